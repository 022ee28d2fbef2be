"""The interception server: catches model calls, routes them by secret, forwards and records them."""

import asyncio
import hashlib
import json
import logging
import secrets
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from interception.base import CALL_ID_HEADER, Interception, Slot
from interception.config import InterceptionServerConfig
from interception.dialects import CHAT, DIALECTS, Dialect
from interception.headers import secret_of, to_client, to_upstream
from interception.session import RolloutSession
from interception.trace import Attempt, Turn
from interception.turn import Exchange, Failure
from interception.upstream import UpstreamClients
from tunnel import HEALTH_PATH, IDENTITY_HEADER, StateChanged, Tunnel, TunnelError, TunnelEvent, make_tunnel
from tunnel.teardown import run_to_end

logger = logging.getLogger("interception")

BODY_CAP = 256 * 1024**2
"""Bytes of one request body, decoded. Parsers hold the GIL: 200 MB stall the loop for 0.2 to 0.7 s."""

SHUTDOWN_TIMEOUT = 1.0
"""Seconds that answers being written get when the server stops; its sessions are released by then."""

MODELS_TIMEOUT = 30.0
"""Seconds for the upstream's model list."""


class InterceptionServer(Interception):
    """Catches the model calls of any number of rollouts; with `requires_tunnel` it is exposed through its tunnel."""

    def __init__(
        self,
        config: InterceptionServerConfig | None = None,
        requires_tunnel: bool = False,
        state_service_secrets: tuple[str, ...] = (),
    ) -> None:
        self.config = config or InterceptionServerConfig()
        self.tunnel: Tunnel | None = make_tunnel(self.config.tunnel) if requires_tunnel else None
        self.on_change: Callable[[], None] | None = None
        """Called when `healthy` or `serving` changed."""
        self.on_event: Callable[[TunnelEvent], None] | None = None
        """Called with each event of its tunnel."""
        self.identity = secrets.token_hex(8)
        """The nonce on the health answer by which this server is told from a stranger under its URL."""
        self.lost: TunnelError | None = None
        """Why it is not healthy any more."""
        self._state_service_secrets = state_service_secrets
        self._base_url: str | None = None
        self._sessions: dict[tuple[str, str], RolloutSession] = {}
        self._by_secret: dict[bytes, RolloutSession] = {}
        self._upstreams = UpstreamClients()
        self._stack = AsyncExitStack()
        self._lifecycle = asyncio.Lock()
        self._started = False

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        async with self._lifecycle:
            if self._started:
                return
            try:
                await self._start()
            except BaseException:
                await run_to_end(self._release_everything())
                raise
            self._started = True

    async def stop(self) -> None:
        await run_to_end(self._stop())

    async def _stop(self) -> None:
        async with self._lifecycle:
            self._started = False
            await self._release_everything()

    async def _start(self) -> None:
        self._stack = AsyncExitStack()
        tunnel = self.tunnel
        self._stack.push_async_callback(self._upstreams.close)
        runner = web.AppRunner(self._app(), access_log=None, shutdown_timeout=SHUTDOWN_TIMEOUT)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        host = tunnel.bind_host if tunnel else self.config.bind_host or "127.0.0.1"
        site = web.TCPSite(runner, host, tunnel.bind_port if tunnel else 0)
        try:
            await run_to_end(site.start())
        except OSError as error:
            raise TunnelError(f"the server cannot listen: {error.strerror or error}") from error
        port = runner.addresses[0][1]
        if tunnel is None:
            # A wildcard address is for containers of this host; on the host itself it is loopback.
            self._base_url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"
            return
        tunnel.on_event = self._tunnel_event
        tunnel.on_gone = self._tunnel_gone
        tunnel.in_use = lambda: self.load > 0
        self._base_url = await self._stack.enter_async_context(tunnel.expose(port))

    async def _release_everything(self) -> None:
        for session in list(self._sessions.values()):
            session.fail(TunnelError("the interception server was stopped"))
            self._release(session, "the interception server was stopped")
        await self._stack.aclose()

    # -- what a pool asks ----------------------------------------------------------------------

    @property
    def base_url(self) -> str:
        if self._base_url is None:
            raise RuntimeError("the interception server has no URL yet: start it first")
        return self._base_url

    @property
    def sessions(self) -> list[RolloutSession]:
        """Those registered and not yet unregistered."""
        return list(self._sessions.values())

    @property
    def healthy(self) -> bool:
        """Until its tunnel is gone; never again after that."""
        return self.lost is None

    @property
    def serving(self) -> bool:
        """Healthy, and its tunnel (if it has one) serves just now."""
        return self.healthy and (self.tunnel is None or self.tunnel.state.name == "serving")

    @property
    def load(self) -> int:
        return len(self._sessions)

    def register(self, session: RolloutSession) -> tuple[str, str]:
        if self.lost is not None:
            raise TunnelError(str(self.lost)) from self.lost
        if session.registered:
            raise ValueError(f"session {session.id} has been used already: make a new one for each rollout")
        session.registered = True
        pair = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self._sessions[pair] = session
        self._by_secret[_digest(pair[0])] = session
        return pair

    def unregister(self, model_secret: str, state_secret: str) -> None:
        """The rollout is over: its calls are ended and its secrets refused. Unknown or repeated: nothing happens."""
        session = self._sessions.pop((model_secret, state_secret), None)
        if session is not None:
            self._by_secret.pop(_digest(model_secret), None)
            session.release("the rollout is over")

    @asynccontextmanager
    async def acquire(self, session: RolloutSession) -> AsyncIterator[Slot]:
        pair = self.register(session)
        try:
            yield Slot(self.base_url, *pair)
        finally:
            self.unregister(*pair)
        raise_if_lost(session)

    def __repr__(self) -> str:
        where = self._base_url or "not started"
        health = "" if self.healthy else " lost" if self.tunnel is None else f" {self.tunnel.state.name}"
        return f"<InterceptionServer {where} load={self.load}{health}>"

    # -- its tunnel ----------------------------------------------------------------------------

    def _tunnel_event(self, event: TunnelEvent) -> None:
        if self.on_event is not None:
            self.on_event(event)
        if isinstance(event, StateChanged):
            self._changed()

    def _tunnel_gone(self) -> None:
        assert self.tunnel is not None
        gone = self.tunnel.gone
        self.lost = TunnelError(f"the tunnel was lost: {gone}")
        self.lost.__cause__ = gone
        for session in self.sessions:
            error = TunnelError(f"the tunnel was lost: {gone}")
            error.__cause__ = gone
            session.fail(error)
            self._release(session, "the tunnel was lost")
        self._changed()

    def _release(self, session: RolloutSession, reason: str) -> None:
        session.release(reason)
        for digest in [digest for digest, owner in self._by_secret.items() if owner is session]:
            del self._by_secret[digest]

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()

    # -- routes --------------------------------------------------------------------------------

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_CAP, middlewares=[self._arrival])
        app.router.add_get(HEALTH_PATH, self._health)
        app.router.add_get("/v1/models", self._models)
        for dialect in DIALECTS:
            app.router.add_post(dialect.path, self._call_handler(dialect))
        return app

    @web.middleware
    async def _arrival(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self.tunnel is not None:
            self.tunnel.note_arrival(request.headers)
        return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok", headers={IDENTITY_HEADER: self.identity})

    def _admit(self, request: web.Request) -> RolloutSession | None:
        secret = secret_of(request.headers)
        return self._by_secret.get(_digest(secret)) if secret else None

    async def _models(self, request: web.Request) -> web.StreamResponse:
        session = self._admit(request)
        if session is None:
            return _refusal(CHAT, Failure(401, UNKNOWN_SECRET))
        upstream = session.upstream
        headers = {**to_upstream(request.headers), **_upstream_auth(session, CHAT)}
        try:
            async with (
                asyncio.timeout(MODELS_TIMEOUT),
                self._upstreams.request(
                    upstream, "GET", CHAT.url(upstream.base_url, "/v1/models"), headers=headers
                ) as answer,
            ):
                return web.Response(status=answer.status, body=await answer.read(), headers=to_client(answer.headers))
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            logger.warning("no model list from %s: %s", upstream.base_url, error or type(error).__name__)
            return _refusal(CHAT, Failure(502, f"no model list from the upstream {upstream.base_url}"))

    def _call_handler(self, dialect: Dialect) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            call_id = uuid.uuid4().hex
            try:
                return await self._call(request, dialect, call_id)
            except Failure as failure:
                return _refusal(dialect, failure, call_id)

        return handle

    async def _call(self, request: web.Request, dialect: Dialect, call_id: str) -> web.StreamResponse:
        session = self._admit(request)
        if session is None:
            raise Failure(401, UNKNOWN_SECRET)
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise Failure(413, f"the request body is over {BODY_CAP // 1024**2} MiB") from None
        except (ConnectionError, web.RequestPayloadError) as error:
            raise Failure(400, "the request body did not arrive whole") from error
        if session.released:
            raise Failure(409, "the rollout is over", {"x-should-retry": "false"})
        asked, body = _override(body, session)
        streamed = asked.get("stream") is True
        exchange = self._begin(request, session, dialect, call_id, body, streamed=streamed)
        head = await exchange.answer()
        headers = {**to_client(head.headers), CALL_ID_HEADER: call_id}
        if not streamed or head.status >= 300:
            return web.Response(status=head.status, body=await exchange.body(), headers=headers)
        response = web.StreamResponse(status=head.status, headers=headers)
        try:
            await response.prepare(request)
            async for chunk in exchange.chunks():
                await response.write(chunk)
            await response.write_eof()
        except Failure as failure:
            # The status is out, so a cut without a final chunk is what says that this is not the end.
            logger.warning("call %s of session %s broke off: %s", call_id, session.id, failure)
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass  # the harness went away; the exchange goes on without it
        return response

    def _begin(
        self,
        request: web.Request,
        session: RolloutSession,
        dialect: Dialect,
        call_id: str,
        body: bytes,
        *,
        streamed: bool,
    ) -> Exchange:
        upstream = session.upstream
        url = dialect.url(upstream.base_url, dialect.path)
        if "?" in request.raw_path:
            url += "?" + request.raw_path.partition("?")[2]
        headers = {
            **to_upstream(request.headers),
            CALL_ID_HEADER: call_id,
            **_upstream_auth(session, dialect),
        }
        turn = Turn(uuid.uuid4().hex, dialect.name, body, streamed=streamed)
        attempt = Attempt(call_id)
        turn.attempts.append(attempt)
        session.trace.add(turn)
        exchange = Exchange(
            turn, attempt, lambda exchange: self._upstreams.forward(exchange, upstream, url, headers, body)
        )
        session.exchanges.add(exchange)
        exchange.on_end = lambda: session.exchanges.discard(exchange)
        return exchange


UNKNOWN_SECRET = "the key is not one of a running rollout: use the model secret of its slot"


def raise_if_lost(session: RolloutSession) -> None:
    """The end of `acquire` without an exception: a rollout whose tunnel was lost has not succeeded."""
    if isinstance(session.error, TunnelError):
        raise session.error


def _digest(secret: str) -> bytes:
    # Secrets are looked up by their digest, so that the time of a lookup tells nothing of them.
    return hashlib.sha256(secret.encode(errors="surrogateescape")).digest()


def _upstream_auth(session: RolloutSession, dialect: Dialect) -> dict[str, str]:
    key = session.upstream.api_key
    return {**(dialect.auth(key.get_secret_value()) if key else {}), **session.upstream.headers}


def _override(body: bytes, session: RolloutSession) -> tuple[dict[str, Any], bytes]:
    """The request as an object, and its bytes with the session's model and sampling in it."""
    try:
        asked = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Failure(400, f"the request body is not JSON: {error}") from None
    if not isinstance(asked, dict):
        raise Failure(400, "the request body must be a JSON object")
    overrides = {**session.sampling, **({"model": session.model} if session.model else {})}
    if not overrides:
        return asked, body
    asked = json.loads(body)
    asked.update(overrides)
    return asked, json.dumps(asked, ensure_ascii=False, separators=(",", ":")).encode()


def _refusal(dialect: Dialect, failure: Failure, call_id: str | None = None) -> web.Response:
    headers = {**failure.headers, **({CALL_ID_HEADER: call_id} if call_id else {})}
    return web.Response(
        status=failure.status,
        body=orjson.dumps(dialect.error(failure.status, failure.message)),
        content_type="application/json",
        headers=headers,
    )
