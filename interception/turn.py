"""One turn's exchange with the upstream: one task, one append-only buffer, any number of readers.

The task outlives its readers: a harness whose connection broke finds the answer when it asks again. Only the end of
the session cancels it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from interception.dialects.base import Dialect, Stream
from interception.trace import Attempt, Turn

logger = logging.getLogger("interception")


class Failure(Exception):
    """Why there is no (whole) answer, with the HTTP status and headers that tell a client so.

    `body`: the upstream's own error body, already in the dialect's shape. `relayed`: the stream itself said so.
    """

    def __init__(
        self,
        status: int,
        message: str,
        headers: Mapping[str, str] | None = None,
        *,
        body: bytes | None = None,
        relayed: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = dict(headers or {})
        self.body = body
        self.relayed = relayed
        self.call_id: str | None = None
        """Of the attempt that failed, where there was one."""


def refused_for_good(message: str) -> Failure:
    """A 409 that the SDKs do not retry."""
    return Failure(409, message, {"x-should-retry": "false"})


class Head(NamedTuple):
    """Status and headers of the upstream's answer, and whether it is a stream."""

    status: int
    headers: Mapping[str, str]
    streamed: bool


class Exchange:
    """One attempt: what the upstream answered, as far as readers may see it.

    `work` fills it (`began`, `release`) and returns at the answer's end, or raises `Failure`. It records the turn
    before it releases the part on which a client may stop.
    """

    def __init__(self, attempt: Attempt, work: "Callable[[Exchange], Coroutine[Any, Any, None]]") -> None:
        self.attempt = attempt
        self.head: Head | None = None
        self.stream: Stream | None = None
        """What reads the answer, if it is a stream; as long as it is not whole, for it is a hundred objects."""
        self.chunks: list[bytes] = []
        self.size = 0
        """Bytes of `chunks`."""
        self.terminal: int | None = None
        """Index of the chunk that tells a client that this is the whole answer. Set, the exchange cannot fail."""
        self.failure: Failure | None = None
        self.ended = False
        self.on_end: Callable[[], None] | None = None
        """Called once, when the outcome is known."""
        self._waiters: dict[asyncio.Future[bool], Callable[[bytes], bool] | None] = {}
        attempt.started = time.time()
        self._task: asyncio.Task[None] | None = asyncio.create_task(self._run(work), name=f"call {attempt.call_id}")

    # -- the upstream's side -------------------------------------------------------------------

    def began(self, status: int, headers: Mapping[str, str], stream: Stream | None) -> None:
        self.head, self.stream = Head(status, headers, stream is not None), stream
        self.attempt.status = status
        if self.attempt.first_byte is None:
            self.attempt.first_byte = time.time()
        self._wake()

    def release(self, chunk: bytes, *, terminal: bool = False) -> None:
        """Readers may have this, too."""
        if chunk:
            if terminal:
                self.terminal = len(self.chunks)
            self.chunks.append(chunk)
            self.size += len(chunk)
            for waiter, follow in [*self._waiters.items()]:
                if terminal or follow is None or not follow(chunk):
                    self._waiters.pop(waiter)
                    _wake(waiter, True)

    # -- the readers' side ---------------------------------------------------------------------

    async def wait(
        self,
        ready: Callable[[], bool],
        timeout: float | None = None,
        follow: Callable[[bytes], bool] | None = None,
    ) -> bool:
        """Until `ready()`, for `timeout` seconds at most; whether it is.

        `follow` gets each chunk that is released meanwhile, but the terminal one, and says whether its reader may sleep
        on: if not, `ready` is asked. So a stream's event is passed on without a task's turn.
        """
        # By hand: an `asyncio.timeout` and an `asyncio.Event` for each chunk of a stream cost more than the chunk.
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while not ready():
            waiter = loop.create_future()
            self._waiters[waiter] = follow
            timer = None if deadline is None else loop.call_at(deadline, _wake, waiter, False)
            try:
                if not await waiter:
                    break
            finally:
                self._waiters.pop(waiter, None)  # it may have been woken since its time was over
                if timer is not None:
                    timer.cancel()
        return ready()

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    def cancel(self, failure: Failure) -> bool:
        """End the exchange here and now, so that the trace may be sealed right after. False: it had its answer."""
        if self.ended:
            return False
        task = self._task
        self._end(failure)
        assert task is not None
        task.cancel()
        return self.failure is not None

    # -- parts ---------------------------------------------------------------------------------

    async def _run(self, work: "Callable[[Exchange], Coroutine[Any, Any, None]]") -> None:
        try:
            await work(self)
        except Failure as failure:
            self._end(failure)
        except asyncio.CancelledError:
            # Not raised again: nobody awaits this task's outcome, and a cancelled task keeps the frames that it was
            # cancelled in, and with them the rollout's record, until the garbage collector comes by.
            self._end(refused_for_good("cancelled"))
        except Exception:
            if not self.ended:  # else a hook went on after its rollout: nobody waits for what it makes
                logger.exception("call %s failed in the interception server", self.attempt.call_id)
            self._end(Failure(500, "the interception server failed; see its log"))
        else:
            self._end(None)
        finally:
            # A net for what is no Exception: a reader must not wait for ever.
            if not self.ended:
                self._end(Failure(500, "the call ended in an unforeseen way"))

    def _end(self, failure: Failure | None) -> None:
        if self.ended:
            return
        self.ended = True
        # A retry may find us for minutes. (And a task that had not begun keeps the frame that it was cancelled in, and
        # with it us and all that `work` knows.)
        self._task = None
        # An answer that is whole has been recorded, and may have been read: whatever comes after it is no failure.
        self.failure = failure if self.terminal is None else None
        if self.failure is not None:
            self.attempt.error = self.failure.message
        else:
            self.stream = None
        if self.attempt.ended is None:
            self.attempt.ended = time.time()
        if self.on_end is not None:
            self.on_end()
        self._wake()

    def _wake(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, {}
            for waiter in waiters:
                _wake(waiter, True)


def _wake(waiter: asyncio.Future[bool], changed: bool) -> None:
    if not waiter.done():  # nor its reader cancelled
        waiter.set_result(changed)


@dataclass(slots=True, eq=False)
class Call:
    """A logical call: the turn that records it, and the exchange of its newest attempt."""

    dialect: Dialect
    turn: Turn
    path: str
    """Of the request, with its query."""
    digest: bytes
    """Of the body as the harness sent it."""
    asked: Mapping[str, Any]
    """The small fields of the request that its answer depends on: `n`, `model`."""
    body: bytes
    """As it is sent to the upstream; empty from then on: the record has it, and a retry brings its own."""
    streamed: bool
    withhold_usage: bool = False
    exchange: Exchange = field(init=False)
    readers: int = 0
    failure_kept: bool = False
    """Its failure could not be told (the answer had been begun): the next marked retry hears it, once."""

    def new_stream(self) -> Stream:
        """A reader of its answer as a stream."""
        choices = self.asked.get("n")
        return self.dialect.stream(
            choices if isinstance(choices, int) and choices > 0 else 1, model=str(self.asked.get("model", ""))
        )

    def rendered(self, answer: dict[str, Any]) -> bytes:
        """A whole answer as a stream, without the usage that the client did not ask for."""
        if self.withhold_usage:
            answer = {name: value for name, value in answer.items() if name != "usage"}
        return self.dialect.render(answer)

    @property
    def size(self) -> int:
        """Bytes kept for it."""
        return self.exchange.size + len(self.body)

    @property
    def told_failure(self) -> bool:
        """It failed, and nobody is left to be told."""
        return self.exchange.ended and self.exchange.failure is not None and not self.failure_kept

    @property
    def open(self) -> bool:
        """In flight: the upstream, or a reader of ours, is not done with it."""
        return not self.exchange.ended or self.readers > 0
