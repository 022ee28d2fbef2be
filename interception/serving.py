"""Giving a harness its answer: when it is begun, what bridges a silence, and how it ends if the answer does not."""

import logging
import time
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus

import orjson
from aiohttp import HttpVersion11, web
from multidict import CIMultiDict

from interception.dialects.base import Dialect, Stream
from interception.headers import CALL_ID_HEADER, to_client
from interception.policy import ServingPolicy
from interception.sse import loads
from interception.turn import Call, Exchange, Failure

logger = logging.getLogger("interception")

REASONS = {status.value: status.phrase for status in HTTPStatus}


class _Sent(web.StreamResponse):
    """Stands for an answer that has left already."""

    def __init__(self, *, last: bool) -> None:
        super().__init__()
        self._last = last

    @property
    def keep_alive(self) -> bool:
        return not self._last

    async def prepare(self, request: web.BaseRequest) -> None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        pass


SENT, SENT_LAST = _Sent(last=False), _Sent(last=True)


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
        # A stream is complete with its terminal event: its upstream may keep the connection open for long after that.
        in_time = await exchange.wait(
            lambda: exchange.ended or exchange.terminal is not None or (not wait_for_end and bool(exchange.chunks)),
            max(0.0, since + policy.grace - time.monotonic()) if graced else None,
        )
        if in_time and exchange.failure is not None and (wait_for_end or not exchange.chunks):
            exchange.failure.call_id = exchange.attempt.call_id
            raise exchange.failure
        head = exchange.head
        if in_time and exchange.ended and exchange.failure is None and head is not None and head.stream is not None:
            return await _body(request, call, exchange)  # all of a stream
        if call.streamed:  # also where the upstream answered it with none: the SDKs would read an empty stream
            return await _stream(request, call, exchange, policy)
        if in_time:
            await exchange.wait(lambda: exchange.ended)
            return await _body(request, call, exchange)
        return await _padded(request, call, exchange, policy)
    except ConnectionError:
        # The harness went away. The exchange goes on without it; a retry finds the answer.
        return web.Response(status=499)
    finally:
        call.readers -= 1


async def _body(request: web.BaseRequest, call: Call, exchange: Exchange) -> web.StreamResponse:
    """An answer that is there already."""
    if exchange.failure is not None:
        exchange.failure.call_id = exchange.attempt.call_id
        raise exchange.failure
    assert exchange.head is not None
    headers = _headers(exchange, "application/json") if exchange.head.stream is None else _stream_headers(exchange)
    body, status = exchange.body, exchange.head.status
    response = await _begin(request, status, headers, len(body))
    await request.writer.write_eof(body)
    call.turn.delivered = True
    return response


async def _padded(
    request: web.BaseRequest, call: Call, exchange: Exchange, policy: ServingPolicy
) -> web.StreamResponse:
    """A slow answer behind an edge that will not wait: begun with white space, which is no change to JSON."""
    response = await _begin(request, 200, _headers(exchange, "application/json"))
    writer = request.writer
    while not exchange.ended:
        await writer.write(b" ")
        await exchange.wait(lambda: exchange.ended, policy.keepalive_interval)
    if exchange.failure is not None:
        # Cut without a final chunk, so that the SDK tries again; its retry is told the outcome, once.
        call.failure_kept = True
        logger.warning("call %s was cut after it had been begun: %s", exchange.attempt.call_id, exchange.failure)
        abort(request)
        return SENT_LAST
    await writer.write_eof(exchange.body)
    call.turn.delivered = True
    return response


async def _stream(
    request: web.BaseRequest, call: Call, exchange: Exchange, policy: ServingPolicy
) -> web.StreamResponse:
    response = await _begin(request, 200, _stream_headers(exchange))
    writer = request.writer
    if not exchange.chunks:
        writer.send_headers()  # whatever comes next may be long in coming
    unread = call.new_stream()  # what stands for the upstream's stream until that begins
    sent = 0
    spoke = time.monotonic()
    while True:
        if sent < len(exchange.chunks):
            fresh = exchange.chunks[sent:]
            events = b"".join(fresh)
            if exchange.head is not None and exchange.head.stream is None:
                events = call.rendered(loads(events))  # begun as a stream, and then answered as none
            sent += len(fresh)
            if exchange.ended and exchange.failure is None:
                await writer.write_eof(events)  # in one write
            else:
                await writer.write(events)
            spoke = time.monotonic()
            if exchange.terminal is not None and sent > exchange.terminal and exchange.failure is None:
                call.turn.delivered = True
        elif exchange.ended:
            break
        elif not await exchange.more(sent, policy.keepalive_interval):
            await writer.write(
                call.dialect.keepalive(_read_so_far(exchange, unread), time.monotonic() - spoke, request.headers)
            )
    if exchange.failure is not None and not exchange.failure.relayed:
        logger.warning("call %s broke off in its stream: %s", exchange.attempt.call_id, exchange.failure)
        await writer.write(
            call.dialect.error_event(_read_so_far(exchange, unread), exchange.failure.status, exchange.failure.message)
        )
    await writer.write_eof()
    return response


async def _begin(
    request: web.BaseRequest, status: int, headers: CIMultiDict[str], length: int | None = None
) -> web.StreamResponse:
    """The head of an answer, which leaves with the first part of its body; in chunks where no length is known.

    What it returns is for aiohttp, when the rest has been written, too. A response of aiohttp's own takes longer to put
    its head together than all else of an answer, and that of a stream sends it by itself.
    """
    last = not request.keep_alive
    if length is not None:
        headers["Content-Length"] = str(length)
    elif request.version >= HttpVersion11:
        headers["Transfer-Encoding"] = "chunked"
        request.writer.enable_chunking()
    else:
        last = True  # its end is the connection's
    headers["Connection"] = "close" if last else "keep-alive"
    headers.setdefault("Date", _date(int(time.time())))
    await request.writer.write_headers(f"HTTP/1.1 {status} {REASONS.get(status, '')}", headers)
    return SENT_LAST if last else SENT


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)


def _read_so_far(exchange: Exchange, unread: Stream) -> Stream:
    return exchange.head.stream or unread if exchange.head is not None else unread


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
