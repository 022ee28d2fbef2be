"""Settings for all tests."""

from hypothesis import settings

# The same examples in each run, so that a gate does not depend on luck. `--hypothesis-profile=explore` looks elsewhere.
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("explore", max_examples=1000)
settings.load_profile("repeatable")
