"""The HTTP side of the server: what a harness may ask for, and what it is told otherwise."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import HttpVersion11, web
from multidict import CIMultiDict
from pydantic_core import to_json

from interception.answer import AnswerReader
from interception.base import STATE_ROUTE_HEADER
from interception.dialects import CHAT, DIALECTS, MESSAGES, Dialect
from interception.growth import Request, digest_of
from interception.headers import Sending, secret_of, to_client, to_upstream
from interception.hooks import run_request_hooks
from interception.inbound import LARGE, as_object, drain, read_body, written
from interception.outbound import SENT_LAST
from interception.serving import abort, refusal, serve
from interception.session import RolloutSession
from interception.state import tag
from interception.trace import Attempt
from interception.turn import Call, Exchange, Failure
from interception.turnstile import Turnstile
from interception.upstream import Posting, failure
from tunnel import HEALTH_PATH, IDENTITY_HEADER

if TYPE_CHECKING:
    from interception.server import InterceptionServer

logger = logging.getLogger("interception")

SESSION_HEADER = "X-Session-ID"
"""Sent upstream: routers keep a session's calls on one engine by it."""

PATHS_COUNTED = 100
"""Routes that are not served and yet asked for which a session tells apart."""

UNKNOWN_SECRET = (
    "the key is not one of a running rollout: use the model secret of its slot; "
    "the state secret is for /state and /task alone"
)

UNKNOWN_STATE_SECRET = "the key is not one of a running rollout: use the state secret of its slot"

NOT_KEPT = {"Cache-Control": "no-store"}

UNSEEN = nullcontext()
"""Around what nobody can come upon before it is done."""

OF_THE_BODY = frozenset({b"Content-Length", b"content-length"})
"""As it is mostly written: what else there is of that kind costs only time."""

OTHER = "*"
"""Any other method."""

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Routes:
    """The routes of one server."""

    def __init__(self, server: "InterceptionServer") -> None:
        self._server = server
        self._policy = server.config.serving
        self._turnstile = Turnstile()
        tunnel = server.tunnel
        # The URL handed out may have a marker in its path, by which requests through it are known.
        self._prefix = tunnel.path_prefix if tunnel is not None else ""
        self._handlers: dict[str, dict[str, Handler]] = {}
        """By path and method. aiohttp's own router and application cost a fifth of the time of a bare proxy."""
        self._add("GET HEAD", HEALTH_PATH, self._health)
        self._add("HEAD", "/", self._root)
        self._add("GET HEAD", "/v1/models", self._models)
        self._add("GET HEAD", "/v1/responses", self._websocket)
        for dialect in DIALECTS:
            self._add("POST", dialect.path, self._guarded(dialect, self._call))
            if dialect.count_path is not None:
                self._add("POST", dialect.count_path, self._guarded(dialect, self._count))
        self._add("GET HEAD", "/state", self._guarded(CHAT, self._read_state, self._state_session))
        self._add("PUT", "/state", self._guarded(CHAT, self._write_state, self._state_session))
        self._add("GET HEAD", "/task", self._guarded(CHAT, self._read_task, self._state_session))
        for path in ("/state", "/task"):
            self._add(OTHER, path, self._guarded(CHAT, self._no_such_method, self._state_session))

    def _add(self, methods: str, path: str, handler: Handler) -> None:
        for method in methods.split():
            self._handlers.setdefault(path, {})[method] = handler

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Any request that arrives."""
        server = self._server
        if server.tunnel is not None:
            server.tunnel.note_arrival(request.headers, request.path)
        server.in_flight += 1
        try:
            if request.headers.get("Expect") and request.version >= HttpVersion11:
                if request.headers["Expect"].lower() != "100-continue":
                    return await _refused_expectation(request)
                # aiohttp leaves it to the application that we do without; some clients wait for it with their body.
                await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                request.writer.output_size = 0
            return await self._handler(request)(request)
        finally:
            server.in_flight -= 1
            if isinstance(lost := request.content.exception(), BaseException):
                # A harness that went away while it was written to: the error's frames know the writers and the rollout.
                lost.with_traceback(None)

    def _handler(self, request: web.BaseRequest) -> Handler:
        path = request.rel_url.path_safe
        if self._prefix and path.startswith(f"{self._prefix}/"):
            path = path[len(self._prefix) :]
        by_method = self._handlers.get(path, {})
        return by_method.get(request.method) or by_method.get(OTHER) or self._unknown

    async def _health(self, request: web.BaseRequest) -> web.Response:
        return web.Response(text="ok", headers={IDENTITY_HEADER: self._server.identity})

    async def _root(self, request: web.BaseRequest) -> web.Response:
        return web.Response()

    # -- what is not served --------------------------------------------------------------------

    async def _websocket(self, request: web.BaseRequest) -> web.Response:
        if request.headers.get("Upgrade", "").lower() != "websocket":
            return await self._unknown(request)
        # At once, so that the client falls back to HTTP.
        return web.Response(status=426, headers={"Upgrade": "HTTP/1.1", "Connection": "close"})

    async def _unknown(self, request: web.BaseRequest) -> web.Response:
        dialect = _dialect_of(request)
        session = self._server.session_of(secret_of(request.headers))
        await drain(request)
        if session is None:
            return refusal(dialect, Failure(401, UNKNOWN_SECRET))
        # Not decoded: a line break in it would forge a line of the log.
        route = f"{request.method} {request.rel_url.raw_path}"
        if route in session.unknown_paths or len(session.unknown_paths) < PATHS_COUNTED:
            session.unknown_paths[route] += 1
        if session.unknown_paths[route] == 1:
            logger.warning("session %s: %s was asked for, and is not served", session.id, route)
        served = ", ".join(dialect.path for dialect in DIALECTS)
        return refusal(dialect, Failure(404, f"{route} is not served here; model routes are {served}"))

    # -- beside the turns ----------------------------------------------------------------------

    async def _models(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._guarded(_dialect_of(request), self._list_models)(request)

    async def _list_models(
        self, request: web.BaseRequest, dialect: Dialect, session: RolloutSession, call_id: str
    ) -> web.StreamResponse:
        return await self._relay(request, dialect, session, "GET", "/v1/models", None)

    async def _count(
        self, request: web.BaseRequest, dialect: Dialect, session: RolloutSession, call_id: str
    ) -> web.StreamResponse:
        assert dialect.count_path is not None
        body = await read_body(request, self._policy.body_cap)
        session.check_open()
        asked = await as_object(body)
        if session.model:
            body = written({**asked, "model": session.model})
        return await self._relay(request, dialect, session, "POST", dialect.count_path, body)

    async def _relay(
        self,
        request: web.BaseRequest,
        dialect: Dialect,
        session: RolloutSession,
        method: str,
        path: str,
        body: bytes | None,
    ) -> web.StreamResponse:
        """A call that is no turn: it fails no rollout, and never hangs."""
        upstream = session.upstream
        url = _with_query(dialect.url(upstream.base_url, path), request)
        try:
            async with (
                asyncio.timeout(self._policy.models_timeout),
                self._server.upstreams.request(
                    upstream, method, url, headers=_upstream_headers(request, session, dialect), body=body
                ) as answer,
            ):
                body, told = await answer.read(), to_client(answer.headers)
                if answer.status >= 400:
                    text = upstream.redacted(body.decode(errors="surrogateescape"))
                    body = text.encode(errors="surrogateescape")
                redacted = {name: upstream.redacted(value) for name, value in told.items()}
                return web.Response(status=answer.status, body=body, headers=redacted)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            logger.warning("%s %s of session %s got no answer: %s", method, path, session.id, error or "too slow")
            raise Failure(502, f"no answer from the upstream {upstream.base_url} to {method} {path}") from error

    # -- state ---------------------------------------------------------------------------------

    def _state_session(self, request: web.BaseRequest) -> RolloutSession:
        """The rollout of a state secret, or the one that a shared tool server names."""
        secret, route = secret_of(request.headers), request.headers.get(STATE_ROUTE_HEADER, "")
        if self._server.is_service(secret):
            if not route:
                raise Failure(400, f"name the session (its id) in {STATE_ROUTE_HEADER}")
            if (session := self._server.session_of(route, "route")) is None:
                raise Failure(404, f"no rollout that {STATE_ROUTE_HEADER} names runs on this server")
            return session
        session = self._server.session_of(secret, "state")
        if session is None:
            raise Failure(401, UNKNOWN_STATE_SECRET)
        if route and route != session.id:
            raise Failure(400, f"the key is of another rollout than {STATE_ROUTE_HEADER} names")
        return session

    async def _read_state(
        self, request: web.BaseRequest, dialect: Dialect, session: RolloutSession, call_id: str
    ) -> web.StreamResponse:
        session.check_open()
        try:
            text = session.shared.written()
        except ValueError as error:
            raise self._unwritable(session, error) from None
        return web.Response(body=text, content_type="application/json", headers={"ETag": tag(text), **NOT_KEPT})

    async def _write_state(
        self, request: web.BaseRequest, dialect: Dialect, session: RolloutSession, call_id: str
    ) -> web.StreamResponse:
        body = await read_body(request, self._policy.state_cap)
        session.check_open()  # from here on nothing waits
        try:
            new = session.shared.put(
                body, request.headers.get("If-Match"), request.headers.get("Idempotency-Key") or None
            )
        except ValueError as error:
            raise self._unwritable(session, error) from None
        return web.Response(status=204, headers={"ETag": new})

    async def _read_task(
        self, request: web.BaseRequest, dialect: Dialect, session: RolloutSession, call_id: str
    ) -> web.StreamResponse:
        session.check_open()
        try:
            text = to_json(session.task, by_alias=True)
        except ValueError as error:
            raise self._unwritable(session, error) from None
        return web.Response(body=text, content_type="application/json", headers=NOT_KEPT)

    async def _no_such_method(
        self, request: web.BaseRequest, dialect: Dialect, session: RolloutSession, call_id: str
    ) -> web.StreamResponse:
        allowed = "GET, HEAD, PUT" if request.path.endswith("/state") else "GET, HEAD"
        raise Failure(405, f"{request.method} is not served here: {allowed}", {"Allow": allowed})

    def _unwritable(self, session: RolloutSession, error: ValueError) -> Failure:
        logger.error("session %s: what the host made of its state or task cannot be served: %s", session.id, error)
        return Failure(500, "the host made something of it that is no JSON; see its log")

    # -- turns ---------------------------------------------------------------------------------

    def _guarded(
        self,
        dialect: Dialect,
        handler: Callable[[web.BaseRequest, Dialect, RolloutSession, str], Awaitable[web.StreamResponse]],
        session_of: Callable[[web.BaseRequest], RolloutSession] | None = None,
    ) -> Handler:
        """Admits by secret, and tells every failure in the dialect's shape."""

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            call_id = os.urandom(16).hex()
            try:
                session = (session_of or self._model_session)(request)
                return await handler(request, dialect, session, call_id)
            except Failure as failed:
                # It may stay with its call: the frames it came through, and all they hold, must not stay with it.
                failed.with_traceback(None)
                await drain(request)
                return refusal(dialect, failed, call_id)
            except ConnectionError:
                return web.Response(status=499)  # gone while it was still sending
            except Exception:
                logger.exception("call %s failed in an unforeseen way", call_id)
                if request.writer.output_size:
                    abort(request)  # in the middle of an answer another one would be read as a part of it
                    return SENT_LAST
                return refusal(dialect, Failure(500, "the interception server failed; see its log"), call_id)

        return handle

    def _model_session(self, request: web.BaseRequest) -> RolloutSession:
        session = self._server.session_of(secret_of(request.headers))
        if session is None:
            raise Failure(401, UNKNOWN_SECRET)
        return session

    async def _call(
        self, request: web.BaseRequest, dialect: Dialect, session: RolloutSession, call_id: str
    ) -> web.StreamResponse:
        queued = time.time()
        session.calls_seen += 1
        await self._turnstile.passed()
        call, arrived = await self._call_of(request, dialect, session, call_id, queued)
        behind_tunnel = self._server.tunnel is not None
        whole = session.streaming == "whole" or (
            session.streaming == "auto" and (behind_tunnel or bool(session.on_response))
        )
        session.ledger.opened(call)
        try:
            return await serve(
                request,
                call,
                call.exchange,
                since=arrived,
                whole=whole,
                behind_tunnel=behind_tunnel,
                policy=self._policy,
            )
        finally:
            session.ledger.settled(call)
            session.ledger.trim(self._policy)

    async def _call_of(
        self, request: web.BaseRequest, dialect: Dialect, session: RolloutSession, call_id: str, queued: float
    ) -> tuple[Call, float]:
        """The call that the request makes or repeats, with an attempt under way or done, and when it had arrived.

        Apart from serving it, so that nothing holds the body while the upstream takes its time.
        """
        raw = await read_body(request, self._policy.body_cap)
        arrived = time.monotonic()
        digest = digest_of(raw)
        session.check_open()
        marked, key = _is_retry(request.headers), request.headers.get("Idempotency-Key") or None
        call = None
        if marked or key is not None:
            await session.ledger.admitted(request.raw_path, digest, key)
            session.ledger.trim(self._policy)  # what has grown too old meanwhile is no answer
            call = session.ledger.find(request.raw_path, digest, marked=marked, key=key)
        if call is None:
            waits = bool(session.on_request) or len(raw) > LARGE  # else no retry can come in between
            with session.ledger.admitting(request.raw_path, digest, key) if waits else UNSEEN:
                call = await self._new_call(request, dialect, session, call_id, raw, digest, queued, key)
        elif call.exchange.ended and call.exchange.failure is not None:
            if call.failure_kept:
                call.failure_kept = False
                call.exchange.failure.call_id = call.exchange.attempt.call_id
                raise call.exchange.failure
            session.check_turn()
            self._attempt(session, call, call_id, _body_again(session, call, raw), _sending(request, session, dialect))
        return call, arrived

    async def _new_call(
        self,
        request: web.BaseRequest,
        dialect: Dialect,
        session: RolloutSession,
        call_id: str,
        raw: bytes,
        digest: bytes,
        queued: float,
        key: str | None,
    ) -> Call:
        session.check_turn()
        wanted = {**session.sampling, **({"model": session.model} if session.model else {})}
        try:
            made = None if session.on_request else session.growth.again(dialect, wanted, raw)
            made = made or await self._made(dialect, session, wanted, raw)
            turn = session.trace.begin_stored(dialect=dialect.name, request=made.stored, streamed=made.streamed)
        except ValueError as error:
            raise Failure(400, f"the request body cannot be recorded: {error}") from None
        turn.queued = queued
        call = Call(
            dialect=dialect,
            turn=turn,
            path=request.raw_path,
            digest=digest,
            asked=made.asked,
            body=b"",
            streamed=made.streamed,
            withhold_usage=made.withhold_usage,
        )
        self._attempt(session, call, call_id, made.body, _sending(request, session, dialect))
        session.ledger.add(call, key=key)
        return call

    async def _made(self, dialect: Dialect, session: RolloutSession, wanted: Mapping[str, Any], raw: bytes) -> Request:
        """What the session, its hooks and the policy make of a body. ValueError: it cannot be recorded."""
        came = await as_object(raw)
        asked = {**came, **wanted}
        session.check_turn()
        if session.on_request:
            asked = await run_request_hooks(session, asked)
            session.check_turn()  # another call may have begun, or the rollout ended, while the hooks ran
        streamed = asked.get("stream") is True
        withhold = streamed and self._policy.request_usage and not dialect.wants_usage(asked)
        changed = (dialect.with_usage(asked) if withhold else asked) if _rewrites(session) or withhold else None
        made = Request(
            stored=session.trace.store(asked, dialect.messages_field),
            body=raw if changed is None else written(changed),
            streamed=streamed,
            withhold_usage=withhold,
            asked={name: asked.get(name) for name in ("n", "model")},
        )
        if not session.on_request:
            session.growth.learn(dialect, wanted, raw, came, changed, made)
        return made

    def _attempt(self, session: RolloutSession, call: Call, call_id: str, body: bytes, sending: Sending) -> None:
        """One more attempt of the call, as a task of its own."""
        call.body = body
        attempt = Attempt(call_id)
        call.turn.attempts.append(attempt)
        call.failure_kept = False

        posting = self._server.upstreams.post(sending, call_id, body)

        async def work(exchange: Exchange) -> None:
            try:
                call.body = b""  # nobody holds it once it is sent: the record has it, and a retry brings its own
                async with posting as response:
                    await AnswerReader(session, call, exchange, self._policy).read(response)
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                raise failure(error, sending.upstream) from error

        call.exchange = Exchange(attempt, work)
        call.exchange.on_end = lambda: self._ended(session, call, posting)

    def _ended(self, session: RolloutSession, call: Call, posting: Posting) -> None:
        posting.drop()  # of a task that is cancelled before it begins nothing runs
        attempt, failed = call.turn.attempts[-1], call.exchange.failure
        self._server.calls.attempt_ended(call.turn, failed)
        call.body = b""  # also where it was cancelled before it was sent
        # What refers to its own frames would keep the rollout's record until the garbage collector comes by.
        call.exchange.on_end = None
        if failed is not None:
            failed.with_traceback(None).__cause__ = failed.__context__ = None
        told = attempt.call_id, session.id, call.dialect.name, attempt.status
        if attempt.error is None:
            logger.debug("call %s of session %s: %s, status %s", *told)
        else:
            logger.warning("call %s of session %s: %s, status %s: %s", *told, attempt.error)
        session.ledger.settled(call)
        session.attempt_ended(call.turn)


def _dialect_of(request: web.BaseRequest) -> Dialect:
    return MESSAGES if "anthropic-version" in request.headers or request.path.startswith(MESSAGES.path) else CHAT


async def _refused_expectation(request: web.BaseRequest) -> web.Response:
    await drain(request)
    return refusal(_dialect_of(request), Failure(417, "of the Expect header only 100-continue is known"))


def _is_retry(headers: Mapping[str, str]) -> bool:
    count = headers.get("x-stainless-retry-count", "").strip()
    return count.isdecimal() and int(count) > 0


def _with_query(url: str, request: web.BaseRequest) -> str:
    # As it was sent: a decoded query would not say the same.
    _, _, query = request.raw_path.partition("?")
    return f"{url}?{query}" if query else url


def _upstream_headers(request: web.BaseRequest, session: RolloutSession, dialect: Dialect) -> CIMultiDict[str]:
    headers = to_upstream(request.headers)
    headers[SESSION_HEADER] = session.id
    headers.update(session.upstream.headers)
    if key := session.upstream.api_key:
        headers.update(dialect.auth(key.get_secret_value()))
    return headers


def _sending(request: web.BaseRequest, session: RolloutSession, dialect: Dialect) -> Sending:
    """How the turn of `request` is sent on."""
    last, upstream = session.sending, session.upstream
    came = [header for header in request.raw_headers if header[0] not in OF_THE_BODY]
    made_of = request.raw_path, dialect, came, upstream.headers.copy()
    if last is None or last.upstream is not upstream or last.made_of != made_of:
        url = _with_query(dialect.url(upstream.base_url, dialect.path), request)
        last = session.sending = Sending(upstream, url, _upstream_headers(request, session, dialect), made_of)
    return last


def _rewrites(session: RolloutSession) -> bool:
    return bool(session.sampling or session.model or session.on_request)


def _body_again(session: RolloutSession, call: Call, raw: bytes) -> bytes:
    """What is sent in another attempt: hooks have had their say, and are not asked again."""
    if not _rewrites(session) and not call.withhold_usage:
        return raw
    asked = call.turn.request
    return written(call.dialect.with_usage(asked) if call.withhold_usage else asked)
