"""Settings for all tests."""

import gc
import signal
from collections.abc import Generator

import pytest
from hypothesis import settings

# Under nohup, or in a script's background, they are ignored, and so they would be in each program that a test starts.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in each run, so that a gate does not depend on luck. `--hypothesis-profile=explore` looks elsewhere.
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("explore", max_examples=1000)
settings.load_profile("repeatable")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collection makes half a million objects that live to the end; searching them for garbage is a third of its time.

    Nor is that worth doing in each full collection while the tests run, so they are set aside.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
