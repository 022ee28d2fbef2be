"""Giving a harness its answer: when it is begun, what bridges a silence, and how it ends if the answer does not."""

import logging
import time
from collections.abc import Callable

import orjson
from aiohttp import web
from multidict import CIMultiDict

from interception.dialects.base import Dialect
from interception.headers import CALL_ID_HEADER, to_client
from interception.outbound import SENT_LAST, Outbound
from interception.policy import ServingPolicy
from interception.sse import loads
from interception.turn import Call, Exchange, Failure

logger = logging.getLogger("interception")


async def serve(
    request: web.BaseRequest,
    call: Call,
    exchange: Exchange,
    *,
    since: float,
    whole: bool,
    behind_tunnel: bool,
    policy: ServingPolicy,
) -> web.StreamResponse:
    """Answer `request` from `exchange`, which other requests may read too.

    `whole`: a stream is begun when the turn is complete, not at its first event. `since`: the monotonic time from
    which the edge counts. Raises the `Failure` of an exchange whose answer has not been begun.
    """
    call.readers += 1
    try:
        wait_for_end = whole or not call.streamed
        graced = behind_tunnel and (call.streamed or policy.keepalive_unstreamed)
        deadline = since + policy.grace if graced else None
        telling = _Telling(request, exchange)
        ready = _ready(exchange, wait_for_end)
        if not wait_for_end and await exchange.wait(lambda: exchange.head is not None or ready(), _left(deadline)):
            head = exchange.head
            if head is not None and head.streamed and not ready():
                telling.prepare()  # so that the first event finds all done
        in_time = await exchange.wait(ready, _left(deadline), telling.begin if telling.prepared else None)
        if telling.chunks:
            return await _stream(telling, call, policy)
        if in_time and exchange.failure is not None and (wait_for_end or not exchange.chunks):
            exchange.failure.call_id = exchange.attempt.call_id
            raise exchange.failure
        head = exchange.head
        if in_time and exchange.ended and exchange.failure is None and head is not None and head.streamed:
            return await _body(request, call, exchange)  # all of a stream
        if call.streamed:  # also where the upstream answered it with none: the SDKs would read an empty stream
            return await _stream(telling, call, policy)
        if in_time:
            await exchange.wait(lambda: exchange.ended)
            return await _body(request, call, exchange)
        return await _padded(request, call, exchange, policy)
    except ConnectionError:
        # The harness went away. The exchange goes on without it; a retry finds the answer.
        return web.Response(status=499)
    finally:
        call.readers -= 1


def _ready(exchange: Exchange, wait_for_end: bool) -> Callable[[], bool]:
    """Whether there is what is waited for before anything is answered."""
    # A stream is complete with its terminal event: its upstream may keep the connection open for long after that.
    return lambda: exchange.ended or exchange.terminal is not None or (not wait_for_end and bool(exchange.chunks))


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


async def _body(request: web.BaseRequest, call: Call, exchange: Exchange) -> web.StreamResponse:
    """An answer that is there already."""
    if exchange.failure is not None:
        exchange.failure.call_id = exchange.attempt.call_id
        raise exchange.failure
    assert exchange.head is not None
    headers = _stream_headers(exchange) if exchange.head.streamed else _headers(exchange, "application/json")
    body, out = exchange.body, Outbound(request)
    out.head(exchange.head.status, headers, len(body))
    out.write(body, last=True)
    await out.drain()
    call.turn.delivered = True
    return out.sent


async def _padded(
    request: web.BaseRequest, call: Call, exchange: Exchange, policy: ServingPolicy
) -> web.StreamResponse:
    """A slow answer behind an edge that will not wait: begun with white space, which is no change to JSON."""
    out = Outbound(request)
    out.head(200, _headers(exchange, "application/json"))
    while not exchange.ended:
        out.write(b" ")
        await exchange.wait(lambda: exchange.ended, policy.keepalive_interval)
    if exchange.failure is not None:
        # Cut without a final chunk, so that the SDK tries again; its retry is told the outcome, once.
        call.failure_kept = True
        logger.warning("call %s was cut after it had been begun: %s", exchange.attempt.call_id, exchange.failure)
        abort(request)
        return SENT_LAST
    out.write(exchange.body, last=True)
    await out.drain()
    call.turn.delivered = True
    return out.sent


async def _stream(telling: "_Telling", call: Call, policy: ServingPolicy) -> web.StreamResponse:
    exchange, out = telling.exchange, telling.out
    telling.prepare()
    if not exchange.chunks:
        out.write(b"")  # whatever comes next may be long in coming
    unread = call.new_stream()  # what stands for the upstream's stream until that begins
    while True:
        if telling.chunks < len(exchange.chunks):
            fresh = exchange.chunks[telling.chunks :]
            events = b"".join(fresh)
            if exchange.head is not None and not exchange.head.streamed:
                events = call.rendered(loads(events))  # begun as a stream, and then answered as none
            whole = exchange.ended and exchange.failure is None
            telling.write(events, len(fresh), last=whole)  # the end, if it is known, in one write
            await out.drain()
            if exchange.terminal is not None and telling.chunks > exchange.terminal and exchange.failure is None:
                call.turn.delivered = True
            if whole:
                return out.sent
        elif exchange.ended:
            break
        elif not await telling.more(policy.keepalive_interval):
            out.write(call.dialect.keepalive(exchange.stream or unread, telling.silence, telling.request.headers))
            await out.drain()
    last = b""
    if exchange.failure is not None and not exchange.failure.relayed:
        logger.warning("call %s broke off in its stream: %s", exchange.attempt.call_id, exchange.failure)
        last = call.dialect.error_event(exchange.stream or unread, exchange.failure.status, exchange.failure.message)
    out.write(last, last=True)
    await out.drain()
    return out.sent


class _Telling:
    """How much of a stream was told to the harness of `request`; and tells what comes while the reader's task waits.

    For an event of a live stream a turn of that task would cost as much as all else, its system calls included.
    """

    def __init__(self, request: web.BaseRequest, exchange: Exchange) -> None:
        self.request = request
        self.exchange = exchange
        self.out = Outbound(request)
        self.prepared = False
        self.chunks = 0
        """Of the exchange's, from the first on, that were told."""
        self._spoke = time.monotonic()

    @property
    def silence(self) -> float:
        """Seconds since the last one."""
        return time.monotonic() - self._spoke

    def prepare(self) -> None:
        """Make the answer's head."""
        if not self.prepared:
            self.out.head(200, _stream_headers(self.exchange))
            self.prepared = True

    def write(self, events: bytes, chunks: int, *, last: bool = False) -> None:
        self.out.write(events, last=last)
        self.chunks += chunks
        self._spoke = time.monotonic()

    def begin(self, chunk: bytes) -> bool:
        """The first one. The reader's task goes on from there."""
        self.follow(chunk)
        return False

    def follow(self, chunk: bytes) -> bool:
        """The next one, unless the harness is slow to read, or gone: that is for the reader's task."""
        if ready := self.out.ready:
            self.write(chunk, 1)
        return ready

    async def more(self, patience: float) -> bool:
        """Until there are chunks that were not told, or the end. False: there was nothing for so many seconds."""
        exchange, began, left = self.exchange, time.monotonic(), patience
        while not await exchange.wait(lambda: exchange.ended or len(exchange.chunks) > self.chunks, left, self.follow):
            left = max(began, self._spoke) + patience - time.monotonic()
            if left <= 0:
                return False
        return True


def _headers(exchange: Exchange, content_type: str) -> CIMultiDict[str]:
    headers = to_client(exchange.head.headers) if exchange.head is not None else CIMultiDict[str]()
    headers["Content-Type"] = content_type
    headers[CALL_ID_HEADER] = exchange.attempt.call_id
    return headers


def _stream_headers(exchange: Exchange) -> CIMultiDict[str]:
    headers = _headers(exchange, "text/event-stream")
    headers.update({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
    return headers


def refusal(dialect: Dialect, failure: Failure, call_id: str | None = None) -> web.Response:
    """An error in the dialect's shape; an upstream's own, in shape already, as it was sent."""
    call_id = failure.call_id or call_id
    headers = {**failure.headers, **({CALL_ID_HEADER: call_id} if call_id else {})}
    return web.Response(
        status=failure.status,
        body=failure.body or orjson.dumps(dialect.error(failure.status, failure.message)),
        content_type="application/json",
        headers=headers,
    )


def abort(request: web.BaseRequest) -> None:
    """Cut the connection: what was sent so far is not the end."""
    if request.transport is not None:
        request.transport.abort()
