"""A process of ours does not outlive the one it works for."""

import os
import select
import signal
import threading
import time
from typing import Any

PARENT_POLL = 1.0
"""Seconds. A process forked from the parent keeps its end of the pipe open; then only the parent's id tells."""

DEADLINE = 1.0
"""Seconds to end in good order once the parent has gone."""

LAST_DEADLINE = 2
"""Seconds until the kernel ends what could not even end itself: no Python code runs in it."""

ORPHANED = 112
"""The exit status of a process that did not."""


def end_with_parent(death_fds: list[int], parent: int | None, *, kill_group: bool) -> threading.Event:
    """From now on: when one of `death_fds` is closed at its other end, or the parent's id is no longer `parent`, send
    SIGTERM to this process, and end it hard one second later.

    From a thread of its own, so also while Python code blocks the main one. `kill_group`: this process leads a group,
    which is ended with it. The event that is returned is set first.
    """
    orphaned = threading.Event()

    def watch() -> None:
        poller = select.poll()
        for fd in death_fds:
            poller.register(fd, select.POLLIN)
        while parent is None or os.getppid() == parent:
            if poller.poll(PARENT_POLL * 1000):
                break
        orphaned.set()
        if (libc := _libc()) is not None:
            libc.signal(signal.SIGHUP, signal.SIG_IGN)  # it would be ended before the group is
        signal.alarm(LAST_DEADLINE)
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(DEADLINE)
        finally:
            if kill_group:
                os.killpg(0, signal.SIGKILL)
            os._exit(ORPHANED)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
    return orphaned


def arm_death_signal(parent: int) -> None:
    """Have the kernel end this process a second after the thread that spawned us, also if it is in C code that lets no
    other thread run (a regular expression, say, that would take for ever). Linux only.

    SIGHUP is what the kernel sends, and C's `alarm` is its handler: called with the signal's number, which is 1, it has
    SIGALRM follow a second later. Where Python code runs, `end_with_parent` is told as well and takes over.
    """
    libc = _libc()
    if libc is None or not hasattr(libc, "prctl"):
        return
    pr_set_pdeathsig = 1
    libc.signal(signal.SIGHUP, libc.alarm)
    libc.prctl(pr_set_pdeathsig, int(signal.SIGHUP), 0, 0, 0)
    if os.getppid() != parent:  # it ended before that
        os.kill(os.getpid(), signal.SIGTERM)


def _libc() -> Any:
    """The C library, or None. Python sets handlers from its main thread only, and none that run without it."""
    try:
        import ctypes

        libc = ctypes.CDLL(None)
    except (ImportError, OSError):
        return None
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    return libc
