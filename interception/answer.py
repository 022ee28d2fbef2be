"""Reading an upstream's answer: what readers may see when, and the record made before they can stop."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import aiohttp

from interception.dialects.base import Phase, read_error
from interception.headers import to_client
from interception.hooks import run_response_hooks
from interception.policy import ServingPolicy
from interception.session import RolloutSession
from interception.sse import SseEvent, SseParser, dumps, loads
from interception.turn import Call, Exchange, Failure

logger = logging.getLogger("interception")

SLICE = 64 * 1024
"""Bytes of a stream that are read without letting others run: a small gzip can be a hundred thousand events."""

BATCH = 256
"""Events that are looked at without letting others run."""

REDIRECTS = frozenset({301, 302, 303, 307, 308})

EXCERPT = 500
"""Characters of an upstream's error page that are quoted."""


class Content(Protocol):
    """The body of an answer."""

    async def readany(self) -> bytes: ...
    def at_eof(self) -> bool: ...


class UpstreamAnswer(Protocol):
    """What is asked of an answer: aiohttp's `ClientResponse` is one, and what `interception.wire` reads."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def content(self) -> Content: ...
    async def read(self) -> bytes: ...


class AnswerReader:
    """Reads one answer for `call` into its exchange."""

    def __init__(self, session: RolloutSession, call: Call, exchange: Exchange, policy: ServingPolicy) -> None:
        self._session = session
        self._call = call
        self._exchange = exchange
        self._policy = policy

    async def read(self, response: UpstreamAnswer) -> None:
        """The whole answer. Raises `Failure` for one that is no success, or not whole."""
        if response.status >= 300:
            try:
                body = await response.read()
            except (TimeoutError, aiohttp.ClientError, OSError):
                body = b""  # the status says enough
            raise self._refusal(response.status, response.headers, body)
        if self._call.streamed and "text/event-stream" in response.headers.get("Content-Type", "").lower():
            await self._stream(response)
        else:
            await self._whole(response)

    # -- not streamed --------------------------------------------------------------------------

    async def _whole(self, response: UpstreamAnswer) -> None:
        exchange = self._exchange
        exchange.attempt.status = response.status
        exchange.attempt.first_byte = time.time()
        body = await response.read()
        answer = parsed(body)
        if answer is None:
            body = self._redacted(body)
            self._note(body, whole=False)
            raise Failure(502, f"the upstream's answer is no JSON object: {excerpt(body)}")
        if answer.get("type") == "error" or (answer.get("error") and not answer.get("output")):
            # Some gateways answer 200 with an error. The SDKs would read past it, and show an empty answer.
            body = self._redacted(body)
            message, status = read_error(answer)
            self._note(body, whole=False)
            text = self._session.upstream.redacted(message or "it answered 200 with an error")
            raise Failure(status if status and status >= 400 else 502, text, body=body)
        changed = await self._hooked(answer)
        if changed is not None:
            answer, body = changed, dumps(changed)
        self._record(answer)
        exchange.began(response.status, response.headers, None)
        exchange.release(body, terminal=True)

    # -- streamed ------------------------------------------------------------------------------

    async def _stream(self, response: UpstreamAnswer) -> None:
        call, exchange = self._call, self._exchange
        stream = call.new_stream()
        parser = SseParser()
        # A response hook sees the whole answer before anybody else does.
        hooked = bool(self._session.on_response)
        if not hooked:
            exchange.began(response.status, response.headers, stream)
        else:
            exchange.attempt.status, exchange.attempt.first_byte = response.status, time.time()
        free: list[bytes] = []
        """What readers may have."""
        held: list[bytes] = []
        """What they may not have yet: from the first event on at which a client may stop."""
        begun = False
        phase = Phase.OPEN
        broken: Exception | None = None
        while phase in (Phase.OPEN, Phase.CLOSING):
            try:
                chunk = await self._next(response, self._policy.hold if phase is Phase.CLOSING else None)
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                broken, chunk = error, b""
            for number, events in enumerate(_batches(parser, chunk)):
                if number:
                    await asyncio.sleep(0)
                at = 0
                while at < len(events) and stream.phase is not Phase.FAILED:
                    if phase is Phase.OPEN and (repeated := stream.repeats(events[at:])):
                        begun = True
                        free += [event.raw for event in events[at : at + repeated]]
                        at += repeated
                        continue
                    event = events[at]
                    at += 1
                    phase = stream.feed(event)
                    # Comments and the like are no beginning: what follows them may still be an error with a status.
                    begun = begun or (phase is Phase.OPEN and event.data is not None)
                    if not (call.withhold_usage and stream.usage_chunk(event)):
                        (free if phase is Phase.OPEN else held).append(event.raw)
                if stream.phase is Phase.FAILED:
                    break
            if begun and not hooked:
                exchange.release(b"".join(free))
                free.clear()
            if not chunk:
                break
        if phase is Phase.FAILED:
            message = self._session.upstream.redacted(stream.error() or "the upstream's stream said that it failed")
            self._note(stream.response(), whole=False)
            relayed = begun and not hooked
            if relayed:
                exchange.release(self._redacted(b"".join(held)))
            # Some errors the SDKs read past: those are told again, in a shape they raise for.
            raise Failure(stream.error_status() or 502, message, relayed=relayed and stream.error_shown())
        if phase is Phase.OPEN:
            self._note(stream.response(), whole=False)
            if isinstance(broken, TimeoutError):
                raise Failure(504, f"the upstream stalled after {stream.events} events") from broken
            raise Failure(502, f"the upstream broke off after {stream.events} events") from broken
        answer = stream.response() or {}
        changed = await self._hooked(answer)
        if changed is not None:
            answer, free, held = changed, [], [call.rendered(changed)]
        self._record(answer)
        if hooked:
            exchange.began(response.status, response.headers, stream)
        exchange.release(b"".join(free + held), terminal=True)
        if phase is Phase.CLOSING and changed is None and not response.content.at_eof():
            await self._rest(response, parser, stream.usage_chunk)

    async def _next(self, response: UpstreamAnswer, timeout: float | None) -> bytes:
        if timeout is None:
            return await response.content.readany()
        async with asyncio.timeout(timeout):
            return await response.content.readany()

    async def _rest(self, response: UpstreamAnswer, parser: SseParser, usage_chunk: Callable[[SseEvent], bool]) -> None:
        """What follows an answer that was recorded after `hold` seconds of silence: relayed, for what it is worth."""
        try:
            while chunk := await response.content.readany():
                shown: list[bytes] = []
                for events in _batches(parser, chunk):
                    shown += [e.raw for e in events if not (self._call.withhold_usage and usage_chunk(e))]
                    await asyncio.sleep(0)
                self._exchange.release(b"".join(shown))
        except (TimeoutError, aiohttp.ClientError, OSError):
            pass  # the answer was whole

    # -- both ----------------------------------------------------------------------------------

    async def _hooked(self, answer: dict[str, Any]) -> dict[str, Any] | None:
        """The answer as the hooks leave it; None if they leave it alone. What they refuse is recorded all the same."""
        try:
            return await run_response_hooks(self._session, answer)
        except Failure:
            self._note(answer)
            raise

    def _record(self, answer: dict[str, Any]) -> None:
        self._note(answer)
        self._exchange.attempt.ended = time.time()
        self._session.recorded(self._call.turn, self._call.dialect, answer)

    def _note(self, answer: dict[str, Any] | bytes | None, *, whole: bool = True) -> None:
        turn, dialect = self._call.turn, self._call.dialect
        usage, finish_reason = None, None
        if whole and isinstance(answer, dict):
            usage, finish_reason = dialect.usage(answer), dialect.finish_reason(answer)
        try:
            turn.record(response=answer, usage=usage, finish_reason=finish_reason)
        except ValueError as error:
            # A copy that cannot be kept is no reason to fail the call.
            logger.warning("turn %s is recorded without its answer: %s", turn.id, error)
            turn.record(response=None, usage=usage, finish_reason=finish_reason)

    def _redacted(self, body: bytes) -> bytes:
        text = body.decode(errors="surrogateescape")
        return self._session.upstream.redacted(text).encode(errors="surrogateescape")

    def _refusal(self, status: int, headers: Any, body: bytes) -> Failure:
        """An error answer of the upstream's, with its status, its headers and, if it is in shape, its body."""
        self._exchange.attempt.status = status
        self._exchange.attempt.first_byte = time.time()
        redacted = self._session.upstream.redacted
        body = self._redacted(body)
        kept = {name: redacted(value) for name, value in to_client(headers).items() if name.lower() != "content-type"}
        if status in REDIRECTS and "Location" in headers:
            where = redacted(headers["Location"])
            return Failure(502, f"the upstream redirects to {where}: configure that as its base_url")
        if status < 400:
            return Failure(502, f"the upstream answered {status}, which is no answer to a model call")
        if self._call.dialect.prompt_too_long(status, body):
            self._session.truncated()
        answer = parsed(body)
        self._note(body, whole=False)
        if answer is not None and "error" in answer:
            return Failure(status, f"the upstream answered {status}: {excerpt(body)}", kept, body=body)
        return Failure(status, f"the upstream answered {status}: {excerpt(body)}", kept)


def _batches(parser: SseParser, chunk: bytes) -> Iterator[list[SseEvent]]:
    """The events that `chunk` completes, no more at a time than may be read without letting others run; for an empty
    one what the stream ended with."""
    if not chunk:
        yield list(_rest_of(parser))
        return
    for start in range(0, len(chunk), SLICE):
        events = parser.feed(chunk[start : start + SLICE])
        for first in range(0, len(events), BATCH):
            yield events[first : first + BATCH]


def _rest_of(parser: SseParser) -> Iterator[SseEvent]:
    """What the stream ended with. An event that is cut short is dropped: the next one would become a part of it."""
    for event in parser.end():
        if event.complete:
            yield event
        elif event.json is not None or (event.data or "").strip() == "[DONE]":
            # It lacks only its blank line, without which SDKs drop it.
            yield SseEvent(event.raw + (b"\n" if event.raw.endswith(b"\n") else b"\n\n"))


def parsed(body: bytes) -> dict[str, Any] | None:
    """A JSON object, or None. NaN and Infinity are no JSON, but engines send them."""
    try:
        answer = loads(body)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def excerpt(body: bytes) -> str:
    text = " ".join(body[: 4 * EXCERPT].decode(errors="replace").split())
    return text[:EXCERPT] or "(empty)"
