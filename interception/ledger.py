"""Which turn a request belongs to: a retry finds the turn it repeats, anything else is a new one."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from interception.policy import ServingPolicy
from interception.turn import Call, Failure


class Ledger:
    """The calls of one session that a retry may ask for again, bounded by count, bytes and age.

    What a call costs here does not depend on how many there are, unless it is a retry.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._calls: dict[Call, None] = {}  # oldest first
        self._in_flight: dict[Call, None] = {}
        self._finished: dict[Call, tuple[float, int]] = {}  # first finished first: since when, and its bytes
        self._size = 0
        """Bytes of the finished ones."""
        self._keys: dict[str, Call] = {}
        self._admitting: dict[object, asyncio.Event] = {}  # by path and digest, and by key
        self._clock = clock

    @contextmanager
    def admitting(self, path: str, digest: bytes, key: str | None) -> Iterator[None]:
        """Held while a new call is prepared (its hooks may take their time): a retry of it waits to find it."""
        ready = asyncio.Event()
        names = [(path, digest)] if key is None else [(path, digest), key]
        self._admitting.update(dict.fromkeys(names, ready))
        try:
            yield
        finally:
            self._admitting = {name: event for name, event in self._admitting.items() if event is not ready}
            ready.set()

    async def admitted(self, path: str, digest: bytes, key: str | None) -> None:
        """Returns once no call of this path and body, or of this key, is being prepared."""
        while ready := self._admitting.get((path, digest)) or self._admitting.get(key):
            await ready.wait()

    def find(self, path: str, digest: bytes, *, marked: bool, key: str | None) -> Call | None:
        """The call that a request repeats, or None for a new one.

        A key binds path and body (`Failure` 400 for another one). A marked retry takes, among calls of an equal body,
        the newest that was not delivered, else the newest. A failure that a client was told counts as delivered, unless
        it is the newest: whoever was told it has gone on to the later call.
        """
        if key is not None and (call := self._keys.get(key)) is not None:
            if (call.path, call.digest) != (path, digest):
                raise Failure(400, "this Idempotency-Key was used with another path or body")
            return call
        if not marked:
            return None
        # Calls under two keys are two calls, even if their bodies are equal.
        others = set(self._keys.values()) if key is not None else set()
        same = [call for call in self._calls if (call.path, call.digest) == (path, digest) and call not in others]
        undelivered = [call for call in same if not call.turn.delivered and (call is same[-1] or not call.told_failure)]
        found = next(reversed(undelivered or same), None)
        if key is not None and found is not None:
            self._keys[key] = found
        return found

    def add(self, call: Call, *, key: str | None) -> None:
        self._calls[call] = None
        if key is not None:
            self._keys[key] = call

    def opened(self, call: Call) -> None:
        """It is read (again), or tried again: until it is `settled` it stays, and takes no room from finished ones."""
        if call in self._calls:
            self._in_flight[call] = None
            _, size = self._finished.pop(call, (0.0, 0))
            self._size -= size

    def settled(self, call: Call) -> None:
        """To be told when an attempt of it has ended, and when a reader has left."""
        if not call.open and call in self._in_flight:
            del self._in_flight[call]
            self._finished[call] = self._clock(), call.size
            self._size += call.size

    def trim(self, policy: ServingPolicy) -> None:
        """Forget the calls that finished first beyond the bounds; those in flight stay, and count for none."""
        now = self._clock()
        while self._finished:
            call, (since, size) = next(iter(self._finished.items()))
            if (
                len(self._finished) <= policy.replay_count
                and self._size <= policy.replay_bytes
                and now - since <= policy.replay_age
            ):
                break
            del self._finished[call], self._calls[call]
            self._size -= size
            if self._keys:
                self._keys = {key: kept for key, kept in self._keys.items() if kept is not call}

    @property
    def in_flight(self) -> Collection[Call]:
        return self._in_flight.keys()

    def __iter__(self) -> Iterator[Call]:
        return iter(list(self._calls))

    def __len__(self) -> int:
        return len(self._calls)

    def clear(self) -> None:
        self._calls.clear()
        self._in_flight.clear()
        self._finished.clear()
        self._size = 0
        self._keys.clear()
