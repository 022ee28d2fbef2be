"""How late the event loop is, and what ran when it stood still.

A beat each `PERIOD` on the loop, and a thread that looks whether it came. Only another thread can see what a loop that
stands still is doing; it sleeps otherwise, and wakes about three times a second.
"""

import asyncio
import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from time import monotonic
from types import FrameType
from weakref import WeakKeyDictionary

logger = logging.getLogger("interception")

PERIOD = 0.1
"""Seconds between two beats."""

LIMIT = 0.25
"""Seconds: a beat that comes later than this is a stall, and is told. (A stream's reader notices half a second.)"""

STILL = 5.0
"""Seconds after which it is told that it stands still, and not only that it has."""

QUIET = 10.0
"""Seconds between two lines at least; what comes in between is counted in the next one."""

FRAMES = 6
"""Places that a line names, from the innermost outwards."""


@dataclass(frozen=True, slots=True)
class LoopLag:
    """How late an event loop's beats were, in seconds, since it was first watched.

    `last`: the last beat, or the one that is overdue just now. `stalls`: those that were more than 0.25 late.
    """

    last: float
    max: float
    stalls: int
    stalled: float
    """All stalls together."""


class LoopWatch:
    """Watches one event loop while anybody wants it to; `LoopWatch.join()` is how."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._users = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_id = 0
        self._timer: asyncio.TimerHandle | None = None
        self._ended = threading.Event()
        self._due = 0.0
        self._last = self._max = self._stalled = 0.0
        self._stalls = 0
        self._seen: str | None = None  # what ran, of the stall that is under way
        self._paused = False  # nobody runs the loop: it cannot be late
        self._told_still = False
        self._told_at = -QUIET
        self._untold = 0

    @classmethod
    def join(cls) -> "LoopWatch":
        """The watch of the running loop; `leave` it once."""
        loop = asyncio.get_running_loop()
        watch = _watches.get(loop)
        if watch is None:
            watch = _watches[loop] = cls()
        watch._users += 1
        if watch._users == 1:
            watch._start(loop)
        return watch

    def leave(self) -> None:
        """Idempotent it is not: one for each `join`. On the loop's thread."""
        self._users -= 1
        if not self._users:
            self._ended.set()
            self._loop = None
            self._last = 0.0
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    @property
    def lag(self) -> LoopLag:
        """Also from another thread, and while the loop stands still."""
        overdue = self._clock() - self._due if self._loop is not None and not self._paused else 0.0
        last = max(self._last, overdue)
        return LoopLag(last, max(self._max, last), self._stalls, self._stalled)

    # -- on the loop -----------------------------------------------------------------------------

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread_id = threading.get_ident()
        self._ended = threading.Event()
        self._paused = self._told_still = False
        self._seen = None
        self._next(loop)
        looks = threading.Thread(target=self._look, args=(loop, self._ended), name="event loop lag", daemon=True)
        try:
            looks.start()
        except RuntimeError as error:  # no thread to be had: a server that serves is worth more than this
            logger.warning("the event loop's lag is measured, but nobody sees what it stands still in: %s", error)

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = self._clock() + PERIOD
        self._timer = loop.call_later(PERIOD, self._beat, loop)

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        late = max(0.0, self._clock() - self._due)
        seen, self._seen = self._seen, None
        told_still, self._told_still = self._told_still, False
        paused, self._paused = self._paused, False
        self._next(loop)
        if paused:
            return
        self._last = late
        self._max = max(self._max, late)
        if late > LIMIT:
            self._stalls += 1
            self._stalled += late
            self._tell(late, seen, always=told_still)

    def _tell(self, late: float, seen: str | None, *, always: bool) -> None:
        now = self._clock()
        if now - self._told_at < QUIET and not always:
            self._untold += 1
            return
        others, self._untold, self._told_at = self._untold, 0, now
        more = f" ({others} more since the last line)" if others else ""
        where = seen or "what let no other thread run meanwhile"
        logger.warning("the event loop stood still for %.2f s in %s%s", late, where, more)

    # -- beside it -------------------------------------------------------------------------------

    def _look(self, loop: asyncio.AbstractEventLoop, ended: threading.Event) -> None:
        while not ended.wait(max(0.01, self._wait())):
            if loop.is_closed():  # and nobody has left: it is kept no longer for that
                self._loop = self._timer = None
                return
            if not loop.is_running():
                self._paused = True
                continue
            due = self._due
            late = self._clock() - due
            if late <= LIMIT or self._paused:
                continue
            seen = self._where()
            if due != self._due or ended.is_set():
                continue  # it has moved on, and this is not what it stood in
            self._seen = self._seen or seen
            if late > STILL and not self._told_still:
                self._told_still = True
                logger.warning("the event loop has been standing still for %.1f s in %s", late, seen)

    def _where(self) -> str:
        # A function of its own: a frame that is kept keeps all that its rollout had in hand.
        frame = sys._current_frames().get(self._thread_id)
        return "an unknown place" if frame is None else place(frame)

    def _wait(self) -> float:
        """Seconds until it is worth looking (again)."""
        if self._seen is not None or self._paused:
            return LIMIT
        return self._due + LIMIT - self._clock() + 0.001


_watches: "WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWatch]" = WeakKeyDictionary()


def place(frame: FrameType) -> str:
    """Where a thread is, innermost first: `folder/file.py:line function`. No values and no source: what a program deals
    with may be secret."""
    places: list[str] = []
    at: FrameType | None = frame
    while at is not None and len(places) < FRAMES:
        if places and at.f_globals.get("__name__") == "asyncio.events":
            break  # what is further out is the loop, and the same for all
        code = at.f_code
        places.append(f"{'/'.join(PurePath(code.co_filename).parts[-2:])}:{at.f_lineno} {code.co_qualname}")
        at = at.f_back
    if frame.f_code.co_name == "select" and frame.f_code.co_filename.endswith("selectors.py"):
        return "nothing: it waited for events, so the process itself did not run (a busy or stopped machine)"
    return " < ".join(places)
