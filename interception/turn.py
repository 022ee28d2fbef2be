"""One turn's exchange with the upstream: one task, one append-only buffer, any number of readers.

The task outlives its readers: a harness whose connection broke finds the answer when it asks again. Only the end of
the session cancels it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from interception.trace import Attempt, Turn

logger = logging.getLogger("interception")


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of the upstream's answer."""

    status: int
    headers: Mapping[str, str]


class Failure(Exception):
    """Why there is no (whole) answer, with the HTTP status and headers that tell a client so."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers or {}


class Exchange:
    """The buffer of one turn, filled by `fetch`, which calls `began`, `received` and returns at the answer's end.

    `fetch` raises `Failure` when there is no whole answer. The turn is recorded before the readers see the end.
    """

    def __init__(self, turn: Turn, attempt: Attempt, fetch: "Callable[[Exchange], Coroutine[Any, Any, None]]") -> None:
        self.turn = turn
        self.attempt = attempt
        self.head: Head | None = None
        self.failure: Failure | None = None
        self.ended = False
        self.on_end: Callable[[], None] | None = None
        """Called once, when the turn has been recorded."""
        self._chunks: list[bytes] = []
        self._changed = asyncio.Event()
        attempt.started = time.time()
        self._task = asyncio.create_task(self._run(fetch), name=f"turn {turn.id}")

    # -- the upstream's side -------------------------------------------------------------------

    def began(self, status: int, headers: Mapping[str, str]) -> None:
        self.head = Head(status, headers)
        self.attempt.status = status
        self.attempt.first_byte = time.time()
        self._wake()

    def received(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._wake()

    # -- the readers' side ---------------------------------------------------------------------

    async def answer(self) -> Head:
        """The head of the answer, as soon as it is there; raises the `Failure` if none came."""
        while self.head is None and not self.ended:
            await self._news()
        if self.head is None:
            assert self.failure is not None
            raise self.failure
        return self.head

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body from its first byte, as it comes; raises the `Failure` where it breaks off."""
        sent = 0
        while True:
            while sent < len(self._chunks):
                sent += 1
                yield self._chunks[sent - 1]
            if self.ended:
                break
            await self._news()
        if self.failure is not None:
            raise self.failure

    async def body(self) -> bytes:
        """The whole body; raises the `Failure` if it broke off."""
        return b"".join([chunk async for chunk in self.chunks()])

    def cancel(self, reason: str) -> None:
        """End the exchange. It is recorded as cancelled here and now: the trace may be sealed right after."""
        if not self.ended:
            self._end(Failure(409, f"cancelled: {reason}", {"x-should-retry": "false"}))
            self._task.cancel()

    async def settled(self) -> None:
        """Returns once the upstream's connection is closed."""
        await asyncio.wait([self._task])

    # -- parts ---------------------------------------------------------------------------------

    async def _run(self, fetch: "Callable[[Exchange], Coroutine[Any, Any, None]]") -> None:
        try:
            await fetch(self)
        except Failure as failure:
            self._end(failure)
        except asyncio.CancelledError:
            self._end(Failure(409, "cancelled", {"x-should-retry": "false"}))
            raise
        except Exception as error:
            logger.exception("turn %s failed in an unforeseen way", self.turn.id)
            self._end(Failure(502, f"the call failed: {type(error).__name__}"))
        else:
            self._end(None)

    def _end(self, failure: Failure | None) -> None:
        if self.ended:
            return
        self.ended = True
        self.failure = failure
        self.turn.response_body = b"".join(self._chunks)
        self.attempt.error = failure.message if failure else None
        self.attempt.ended = time.time()
        if self.on_end is not None:
            self.on_end()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _news(self) -> None:
        await self._changed.wait()
