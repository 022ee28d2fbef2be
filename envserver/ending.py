"""The end of a process that is told to end: in good order if its env lets it, and in any case."""

import asyncio
import contextlib
import faulthandler
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("envserver")

MARGIN = 5.0
"""Seconds beyond what draining and stopping may take by their own limits, until the process is ended hard."""

LOOK = 0.25
"""Seconds between two looks at the time."""

LAST_WORDS = 1.0
"""Seconds to say why: what logs may itself be what does not go on."""

STATUS = 1
"""The exit status of a process that did not end by itself."""


class HardEnd:
    """Ends this process once it has had its time: the loop may be blocked, and a run or a thread may never end.

    From a thread of its own. It is in time also where Python code blocks the main thread, not where C code holds the
    GIL.
    """

    def __init__(self) -> None:
        self._due = math.inf
        self._thread: threading.Thread | None = None
        self._others = _waited_for()

    def within(self, seconds: float) -> None:
        """The process has so many seconds from now on; said again, the sooner counts."""
        self._due = min(self._due, time.monotonic() + seconds)
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="hard-end", daemon=True)
            self._thread.start()

    def call_off(self) -> None:
        """All has ended in time; but not while there are threads of the env's that the process waits for at its end."""
        if _waited_for() <= self._others:
            self._due = math.inf

    def _watch(self) -> None:
        while (left := self._due - time.monotonic()) > 0:
            if left == math.inf:
                return
            time.sleep(min(left, LOOK))
        saying = threading.Thread(target=_say_why, daemon=True)
        saying.start()
        saying.join(LAST_WORDS)
        os._exit(STATUS)


def _waited_for() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


def _say_why() -> None:
    logger.error("the process was told to end and does not: it is ended hard; what its threads do:")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        faulthandler.dump_traceback()


@contextmanager
def told_to_end(on_told: Callable[[int], None]) -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Events for the first and the second SIGTERM or SIGINT. `on_told` is called with their number so far, in the main
    thread, also while the loop stands still.

    Once there was one, later ones stay without effect to the end of the process, which is near: restored, the default
    handler would turn a third SIGTERM into an exit by a signal. In other threads than the main one there are none.
    """
    told, told_again = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    count = 0

    def note() -> None:
        (told_again if told.is_set() else told).set()

    def handler(number: int, frame: object) -> None:
        nonlocal count
        count += 1
        on_told(count)
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is nothing left to end
            loop.call_soon_threadsafe(note)

    before = {}
    with contextlib.suppress(ValueError):  # not the main thread
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, handler)
    try:
        yield told, told_again
    finally:
        for number, previous in before.items():
            # Ignored, not handled: Python gives up its handlers before the process has ended.
            signal.signal(number, signal.SIG_IGN if told.is_set() else previous or signal.SIG_DFL)
