"""At most so many requests a minute, counted over all processes of a user.

pyrate-limiter keeps the count in an SQLite file; a file lock is held while it is looked at. A burst up to the limit
passes at once, the next ones wait for the oldest to be a minute old.
"""

import asyncio
import logging
import os
import random
import sqlite3
import threading
import time
import weakref
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from tunnel.account import make_private

if TYPE_CHECKING:
    from pyrate_limiter import AbstractBucket, Rate

logger = logging.getLogger("tunnel")

MOMENT = 1.0
"""Seconds: a longer wait is said."""

LOCK_TIMEOUT = 5.0
"""Seconds: the file lock is held for milliseconds, unless its holder is stopped."""

SPREAD = 0.03
"""Seconds by which processes that wait for the same moment are spread."""

TABLE = "requests"


class Pacer:
    """At most `limit` in any `interval` seconds, by all who share `path`, whatever limit they have set themselves.

    Those of one event loop are served in order. If the file cannot be used that is said once, and this process then
    counts for itself. `what` names the requests in the log, `setting` the setting.
    """

    def __init__(self, path: Path, limit: int, *, interval: float = 60.0, what: str, setting: str) -> None:
        self._path = path
        self._limit = limit
        self._interval = interval
        self._what = what
        self._setting = setting
        self._memory: AbstractBucket | None = None
        self._memory_lock = threading.Lock()
        self._turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()
        self._said = -float("inf")

    async def wait(self) -> None:
        """Return once the next request may go. Cancelled, it takes no permit, or at most the one it was about to."""
        async with self._turns.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            while (pause := await asyncio.to_thread(self._take)) > 0:
                self._say(pause)
                await asyncio.sleep(pause + random.uniform(0, SPREAD))

    def _say(self, pause: float) -> None:
        now = time.monotonic()
        if pause > MOMENT and now - self._said >= self._interval:
            self._said = now
            logger.warning(
                "%s wait, the next one for %.0f s: %d in %g s are reached by the processes of this user (%s)",
                self._what,
                pause,
                self._limit,
                self._interval,
                self._setting,
            )

    def _take(self) -> float:
        """Take a permit and return 0, or the seconds until the next try. Blocks."""
        if self._memory is None:
            try:
                return self._take_shared()
            except Exception as error:  # noqa: BLE001 - whatever is wrong with a file, it stops no tunnel
                self._use_memory(error)
        with self._memory_lock:
            assert self._memory is not None
            return self._decide(self._memory)

    def _take_shared(self) -> float:
        from filelock import FileLock
        from pyrate_limiter import SQLiteBucket, SQLiteQueries

        make_private(self._path.parent)
        # Opened each time (1 to 2 ms): no descriptor stays, and none is shared with a forked child.
        with FileLock(self._path.with_suffix(".lock"), timeout=LOCK_TIMEOUT, poll_interval=0.005, mode=0o600):
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
            with closing(sqlite3.connect(self._path, check_same_thread=False)) as connection:
                # A power cut may cost the file; a process that is killed cannot.
                connection.execute("PRAGMA synchronous=OFF").close()
                connection.execute(SQLiteQueries.CREATE_BUCKET_TABLE.format(table=TABLE)).close()
                return self._decide(SQLiteBucket([self._rate], connection, TABLE))

    def _decide(self, bucket: "AbstractBucket") -> float:
        from pyrate_limiter import Decision, RateItem

        now = time.time_ns() // 1_000_000  # the wall clock, as the only one that all processes share everywhere
        newest = bucket.peek(0)
        if isinstance(newest, RateItem) and newest.timestamp > now + 1000 * self._interval:
            bucket.flush()  # the clock was put back
        bucket.leak(now)
        decision = bucket.put_decision(RateItem(self._what, now))
        assert isinstance(decision, Decision)
        if decision.allowed:
            return 0.0
        return max(decision.retry_after_ms or 0, 1) / 1000

    def _use_memory(self, error: Exception) -> None:
        from pyrate_limiter import InMemoryBucket

        with self._memory_lock:
            if self._memory is not None:
                return
            self._memory = InMemoryBucket([self._rate])
        logger.warning(
            "%s cannot be used (%s: %s): %s are paced for this process alone. If it is damaged, delete it",
            self._path,
            type(error).__name__,
            error,
            self._what,
        )

    @property
    def _rate(self) -> "Rate":
        from pyrate_limiter import Rate

        return Rate(self._limit, int(1000 * self._interval))


_pacers: dict[tuple[Path, int], Pacer] = {}


def creates(directory: Path, limit: int | None) -> Pacer | None:
    """This process' pacer of creates for an account's state directory; None: no limit."""
    return _pacer(directory / "creates.sqlite", limit, "creates of tunnels", "creates_per_minute")


def deletes(directory: Path, limit: int | None) -> Pacer | None:
    return _pacer(directory / "deletes.sqlite", limit, "deletes of tunnels", "deletes_per_minute")


def _pacer(path: Path, limit: int | None, what: str, setting: str) -> Pacer | None:
    if limit is None:
        return None
    return _pacers.setdefault((path, limit), Pacer(path, limit, what=what, setting=setting))


os.register_at_fork(after_in_child=_pacers.clear)  # their locks may be held by threads that the child has not
