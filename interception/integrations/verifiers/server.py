"""verifiers' own interception server, its handlers untouched, behind our tunnels: watched, and retired when lost."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from aiohttp import web
from verifiers.v1.interception import InterceptionServer as Stock
from verifiers.v1.interception import InterceptionServerConfig as TheirServerConfig
from verifiers.v1.session import RolloutSession

from interception.config import InterceptionServerConfig
from interception.integrations.verifiers.losses import Watch, Way, as_theirs, forget, watch, watch_of
from interception.integrations.verifiers.options import Options, as_ours
from interception.integrations.verifiers.verdict import serves
from tunnel import HEALTH_PATH, IDENTITY_HEADER, StateChanged, Tunnel, TunnelError, TunnelEvent, make_tunnel
from tunnel.teardown import cancel_and_wait, protected, run_to_end

logger = logging.getLogger("interception")

LISTEN_POLL = 0.02
"""Seconds between two looks whether a server that is no longer wanted listens yet."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Member(Stock):  # type: ignore[misc] # untyped
    """The server as our pools ask for it (`interception.PoolMember`): it raises our `TunnelError`."""

    options: ClassVar[Options] = Options()
    """Of servers that are made without any."""

    def __init__(
        self,
        config: TheirServerConfig | InterceptionServerConfig | None = None,
        requires_tunnel: bool = False,
        state_service_secrets: Collection[str] = (),
        *,
        options: Options | None = None,
    ) -> None:
        # Without a tunnel as far as verifiers knows: its own would be made here, or end the process for want of a key.
        super().__init__(config if isinstance(config, TheirServerConfig) else None, False, state_service_secrets)
        self.options_used = options or self.options
        ours = as_ours(config, self.options_used)
        if not isinstance(ours, InterceptionServerConfig):
            raise TypeError(f"not the config of one server: {type(config).__name__}")
        if config is not None:
            self.config = config
        self.tunnel: Tunnel | None = make_tunnel(ours.tunnel) if requires_tunnel else None
        self.on_change: Callable[[], None] | None = None
        self.on_event: Callable[[TunnelEvent], None] | None = None
        """Called with each event of its tunnel."""
        self.identity = secrets.token_hex(8)
        self.lost: TunnelError | None = None
        """Why it is not healthy any more."""
        self.in_flight = 0
        self._lifecycle = asyncio.Lock()
        self._started = False
        self._has_health_route = False
        self._way = None if self.tunnel is None else Way(self.tunnel, self.identity)

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listens, and is exposed through its tunnel if one is required; `TunnelError` if either cannot be."""
        async with self._lifecycle:
            if self._started:
                return
            if self.lost is not None:
                raise TunnelError(f"this server is not started again, make a new one: {self.lost}")
            if self.tunnel is not None:
                self.tunnel.on_event = self._tunnel_event
                self.tunnel.on_gone = self._tunnel_gone
                self.tunnel.in_use = lambda: self.load > 0
                self.tunnel.in_flight = lambda: self.in_flight
            try:
                await self._listen_and_expose()
                if not self._has_health_route:
                    raise RuntimeError(
                        "this version of verifiers does not keep its server's web runner in `runner`, where the "
                        "health route is added: it is not one that this integration knows"
                    )
            except OSError as error:
                await run_to_end(self.stack.aclose())
                raise TunnelError(f"the server cannot listen on {self.host}: {error}") from error
            except BaseException:
                await run_to_end(self.stack.aclose())
                raise
            self._started = True

    async def _listen_and_expose(self) -> None:
        self.port = 0
        starting = protected(super().start())
        try:
            await asyncio.wait([starting])
        except asyncio.CancelledError:
            await run_to_end(self._break_off(starting))
            raise
        starting.result()

    async def _break_off(self, starting: "asyncio.Task[None]") -> None:
        # Cancelled while it opens its listener, verifiers' start would leave one that nobody knows of.
        while not starting.done() and not self.port:
            await asyncio.wait([starting], timeout=LISTEN_POLL)
        await cancel_and_wait(starting)

    async def stop(self) -> None:
        """Releases everything; rollouts still on it end with a `TunnelError`."""
        await run_to_end(self._stop())

    async def _stop(self) -> None:
        async with self._lifecycle:
            self._started = False
            for session in list(self.sessions.values()):
                self._lose(session, "the interception server was stopped")
            await self.stack.aclose()

    @property
    def runner(self) -> web.AppRunner | None:
        """verifiers' web runner. It sets this before it freezes the routes: here ours are added, so that they are live
        before the tunnel is exposed."""
        return self._runner

    @runner.setter
    def runner(self, runner: web.AppRunner | None) -> None:
        self._runner = runner
        if runner is not None:
            self._add_routes(runner.app)
            self._has_health_route = True

    def _add_routes(self, app: web.Application) -> None:
        app.middlewares.append(self._arrival)
        app.router.add_get(HEALTH_PATH, self._health)
        if self.tunnel is not None and self.tunnel.path_prefix:
            # The URL handed out has a marker in its path: the same routes once more, under it.
            marked = web.Application()
            for route in app.router.routes():
                if route.resource is not None and route.method != "HEAD":  # those come with their GET
                    marked.router.add_route(route.method, route.resource.canonical, route.handler)
            app.add_subapp(self.tunnel.path_prefix, marked)

    @web.middleware
    async def _arrival(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self.tunnel is not None:
            self.tunnel.note_arrival(request.headers, request.path)
        self.in_flight += 1
        try:
            return await handler(request)
        finally:
            self.in_flight -= 1

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok", headers={IDENTITY_HEADER: self.identity})

    # -- what a pool asks ----------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        """Until its tunnel is gone; never again after that."""
        return self.lost is None

    @property
    def serving(self) -> bool:
        """Healthy, and its tunnel (if it has one) serves just now."""
        return self.healthy and (self.tunnel is None or self.tunnel.state.name == "serving")

    @property
    def queued(self) -> bool:
        """Its start waits for its turn within the creation limit."""
        return self.tunnel is not None and self.tunnel.queued

    def register(self, session: RolloutSession) -> tuple[str, str]:
        """The model secret and the state secret of a new rollout; `TunnelError` when not healthy.

        `ValueError` for one that is registered already, here or on another server: whichever left first would end it.
        """
        if self.lost is not None:
            raise TunnelError(str(self.lost)) from self.lost
        if (watched := watch_of(session.trace.id)) is not None and watched.session is session:
            raise ValueError(f"the session of trace {session.trace.id} is in use already: acquire it once at a time")
        pair: tuple[str, str] = super().register(session)
        watch(Watch(session, self._way))
        return pair

    def unregister(self, model_secret: str, state_secret: str) -> None:
        session = self.sessions.get(model_secret)
        super().unregister(model_secret, state_secret)
        if session is not None:
            forget(session)

    # -- its tunnel ----------------------------------------------------------------------------

    def _tunnel_event(self, event: TunnelEvent) -> None:
        if self.on_event is not None:
            self.on_event(event)
        if self._way is not None:
            self._way.note(event)
        if isinstance(event, StateChanged):
            self._changed()

    def _tunnel_gone(self) -> None:
        assert self.tunnel is not None
        gone = self.tunnel.gone
        self.lost = TunnelError(f"the tunnel was lost: {gone}")
        self.lost.__cause__ = gone
        for session in list(self.sessions.values()):
            self._lose(session, str(self.lost), gone)
        self._changed()

    def _lose(self, session: RolloutSession, reason: str, cause: BaseException | None = None) -> None:
        if (watched := watch_of(session.trace.id)) is not None:
            watched.lose(reason, cause)

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def __repr__(self) -> str:
        health = "" if self.healthy else " lost"
        return f"<{type(self).__name__} {self.base_url or 'not started'} load={self.load}{health}>"


class InterceptionServer(Member):
    """In the place of verifiers' own: the same constructor, attributes and routes; it raises verifiers' errors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with as_theirs():
            super().__init__(*args, **kwargs)

    async def start(self) -> None:
        with as_theirs():
            await super().start()

    def register(self, session: RolloutSession) -> tuple[str, str]:
        with as_theirs():
            return super().register(session)

    @asynccontextmanager
    async def acquire(self, session: RolloutSession) -> AsyncIterator[tuple[str, str, str]]:
        """Register `session` until the context is left; verifiers' `TunnelError` at its end if its tunnel was lost.

        What a harness makes of a dead URL is its own affair, so the URL is asked at the end, too.
        """
        pair = self.register(session)
        watched = watch_of(session.trace.id)
        assert watched is not None
        watched.entered()
        try:
            yield self.base_url, *pair
            await serves(watched)
        finally:
            self.unregister(*pair)
        watched.raise_if_unrecorded()
