"""Settings for all tests."""

import signal

from hypothesis import settings

# Under nohup it is ignored, and so it would be in each program that a test starts.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The same examples in each run, so that a gate does not depend on luck. `--hypothesis-profile=explore` looks elsewhere.
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("explore", max_examples=1000)
settings.load_profile("repeatable")
