"""Reading an upstream's answer: what readers may see when, and the record made before they can stop."""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import aiohttp
from multidict import CIMultiDict

from interception.connection import Connection
from interception.dialects.base import CLOSING, FAILED, OPEN, Stream, read_error
from interception.headers import to_client
from interception.hooks import run_response_hooks
from interception.policy import ServingPolicy
from interception.session import RolloutSession
from interception.sse import SseEvent, SseParser, dumps, loads, plain_event
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
        if not 200 <= response.status < 300:
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
        self._began(response, None)
        exchange.release(body, terminal=True)

    # -- streamed ------------------------------------------------------------------------------

    async def _stream(self, response: UpstreamAnswer) -> None:
        call, exchange = self._call, self._exchange
        stream = call.new_stream()
        reading = _Reading(stream, call.withhold_usage)
        free, held = reading.free, reading.held
        content = response.content
        # A response hook sees the whole answer before anybody else does.
        hooked = bool(self._session.on_response)
        if not hooked:
            self._began(response, stream)
        else:
            exchange.attempt.status, exchange.attempt.first_byte = response.status, time.time()
        tapped = content if isinstance(content, Connection) and not hooked else None
        if tapped is not None:
            tapped.tap = partial(self._at_once, stream, reading)
        broken: Exception | None = None
        ended = False
        while not ended and (stream.phase is OPEN or stream.phase is CLOSING):
            try:
                if stream.phase is OPEN:
                    chunk = await content.readany()
                else:
                    if tapped is not None:
                        tapped.tap = None
                    async with asyncio.timeout(self._policy.hold):
                        chunk = await content.readany()
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                broken, chunk = error, b""
            if reading.defective:
                raise Failure(500, "the interception server failed; see its log")
            ended = broken is not None or (not chunk and content.at_eof())
            if chunk or ended:  # else the tap has read what there was
                for _ in reading.take(chunk):
                    await asyncio.sleep(0)
            if not hooked:
                self._release(reading)
        phase = stream.phase
        if phase is FAILED:
            message = self._session.upstream.redacted(stream.error() or "the upstream's stream said that it failed")
            self._note(self._unquoted(stream.response()), whole=False)
            relayed = reading.begun and not hooked
            if relayed:
                exchange.release(self._redacted(b"".join(held)))
            # Some errors the SDKs read past: those are told again, in a shape they raise for.
            raise Failure(stream.error_status() or 502, message, relayed=relayed and stream.error_shown())
        if phase is OPEN:
            self._note(self._unquoted(stream.response()), whole=False)
            if isinstance(broken, TimeoutError):
                raise Failure(504, f"the upstream stalled after {stream.events} events") from broken
            raise Failure(502, f"the upstream broke off after {stream.events} events") from broken
        answer = stream.response() or {}
        changed = await self._hooked(answer)
        if changed is not None:
            answer, free, held = changed, [], [call.rendered(changed)]
        self._record(answer)
        if hooked:
            self._began(response, stream)
        exchange.release(b"".join(free + held), terminal=True)
        if phase is CLOSING and changed is None and not content.at_eof():
            await self._rest(content, reading)

    def _at_once(self, stream: Stream, reading: "_Reading", piece: bytes) -> bool:
        """Read and release a piece for which the task waits. While the stream stays open it need not wake for it: a
        turn of it takes as long as most events."""
        try:
            for _ in reading.take(piece):
                pass  # it is small
            self._release(reading)
        except Exception:
            # Of ours, and no reason for the connection to be cut as if it were the upstream's.
            logger.exception("call %s failed in the interception server", self._exchange.attempt.call_id)
            reading.defective = True
        return stream.phase is OPEN and not reading.defective

    def _release(self, reading: "_Reading") -> None:
        if reading.free and reading.begun:
            self._exchange.release(b"".join(reading.free))
            reading.free.clear()

    async def _rest(self, content: Content, reading: "_Reading") -> None:
        """What follows an answer that was recorded after `hold` seconds of silence: relayed, for what it is worth."""
        try:
            while chunk := await content.readany():
                shown: list[bytes] = []
                for start in range(0, len(chunk), SLICE):
                    shown += reading.unread(chunk[start : start + SLICE])
                    await asyncio.sleep(0)
                self._exchange.release(b"".join(shown))
        except (TimeoutError, aiohttp.ClientError, OSError):
            pass  # the answer was whole

    # -- both ----------------------------------------------------------------------------------

    def _began(self, response: UpstreamAnswer, stream: Stream | None) -> None:
        headers, redacted = response.headers, self._session.upstream.redacted
        told = "\n".join(headers.values())
        if redacted(told) != told:
            headers = CIMultiDict([(name, redacted(value)) for name, value in headers.items()])
        self._exchange.began(response.status, headers, stream)

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

    def _unquoted(self, answer: dict[str, Any] | None) -> dict[str, Any] | None:
        """What there is of one that failed, without our key, which its error may have."""
        try:
            said = dumps(answer)
        except ValueError:
            return answer  # nor can it be recorded
        told = self._redacted(said)
        return answer if told == said else parsed(told)

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


class _Reading:
    """A stream as it is read, and what readers may have of it."""

    __slots__ = ("_parser", "_stream", "_withhold_usage", "begun", "defective", "free", "held")

    def __init__(self, stream: Stream, withhold_usage: bool) -> None:
        self._stream = stream
        self._withhold_usage = withhold_usage
        self._parser = SseParser()
        self.free: list[bytes] = []
        """What readers may have."""
        self.held: list[bytes] = []
        """What they may not have yet: from the first event on at which a client may stop."""
        self.begun = False
        """Whether an event has come. Comments and the like are none: what follows them may still be an error with a
        status."""
        self.defective = False
        """Whether reading it failed where nobody could be told."""

    def take(self, chunk: bytes) -> Iterator[None]:
        """Read the events that `chunk` completes, up to one that says that the stream failed; of an empty chunk, which
        is its end, what it ended with. At each step others may run."""
        stream = self._stream
        if not chunk:
            yield from self._each([*_rest_of(self._parser)])
        for start in range(0, len(chunk), SLICE):
            if start:
                yield
            piece = chunk[start : start + SLICE]
            plain = self._parser.plain(piece)
            if plain is None:
                yield from self._each(self._parser.by_lines(piece))
            elif plain:
                at = stream.repeats(plain) if stream.phase is OPEN else 0
                if at:
                    self.begun = True
                    self.free.append(plain[:at])
                if at < len(plain):
                    yield from self._plain(plain, at)

    def unread(self, piece: bytes) -> list[bytes]:
        """What readers may have of `piece`, once the answer is whole."""
        events = self._parser.feed(piece)
        return [event.raw for event in events if not (self._withhold_usage and self._stream.usage_chunk(event))]

    def _plain(self, data: bytes, at: int) -> Iterator[None]:
        stream, size = self._stream, len(data)
        looked_at = 0
        while at < size:
            phase = stream.phase
            if phase is OPEN and (repeated := stream.repeats(data, at)):
                self.begun = True
                self.free.append(data[at : at + repeated])
                at += repeated
            elif phase is FAILED:
                break
            else:
                event = plain_event(data, at)
                self._look_at(event)
                at += len(event.raw)
                looked_at += 1
                if looked_at % BATCH == 0:
                    yield

    def _each(self, events: list[SseEvent]) -> Iterator[None]:
        stream = self._stream
        data = b"".join([event.raw for event in events])
        at = number = 0
        while number < len(events) and stream.phase is not FAILED:
            end = at + stream.repeats(data, at) if stream.phase is OPEN else at
            if end > at:
                self.begun = True
                self.free.append(data[at:end])
                while at < end:
                    at += len(events[number].raw)
                    number += 1
            else:
                self._look_at(events[number])
                at += len(events[number].raw)
                number += 1
                if number % BATCH == 0:
                    yield

    def _look_at(self, event: SseEvent) -> None:
        stream = self._stream
        phase = stream.feed(event)
        if phase is OPEN:
            self.begun = stream.events > 0
            if not (self._withhold_usage and stream.usage_chunk(event)):
                self.free.append(event.raw)
        elif not (self._withhold_usage and stream.usage_chunk(event)):
            self.held.append(event.raw)


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
