"""The interception server: catches model calls, routes them by secret, forwards and records them."""

import asyncio
import hashlib
import hmac
import logging
import secrets
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Literal

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from interception.base import Interception, Slot
from interception.collector import rare_searches
from interception.config import InterceptionServerConfig
from interception.looplag import LoopWatch
from interception.metrics import Calls, samples_of_calls, samples_of_lag
from interception.routes import Routes
from interception.session import RolloutSession, check_usable
from interception.trace import Trace
from interception.upstream import UpstreamClients
from tunnel import StateChanged, Tunnel, TunnelError, TunnelEvent, make_tunnel
from tunnel.base import in_url
from tunnel.metrics import Sample
from tunnel.metrics import samples_of as samples_of_tunnels
from tunnel.teardown import run_to_end

logger = logging.getLogger("interception")
http_logger = logging.getLogger("interception.http")


def _no_stranger(record: logging.LogRecord) -> bool:
    # What is no HTTP is answered with 400. aiohttp logs it as an error, too, and quotes it, secrets and all.
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


http_logger.addFilter(_no_stranger)

SHUTDOWN_TIMEOUT = 1.0
"""Seconds that answers being written get when the server stops; its sessions are released by then."""

LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where the host itself finds what listens on all its addresses; those of IPv6 are IPv6's alone."""

RELEASED_KEPT = 4096
"""Rollouts that are over whose late calls are still counted, for each server: their secrets are kept, as hashes."""


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
        self._services = _service_digests(state_service_secrets)
        self._base_url: str | None = None
        self._local_url: str | None = None
        self._sessions: dict[tuple[str, str], RolloutSession] = {}
        self._by_secret: dict[bytes, RolloutSession] = {}
        # Weakly: a trace that nobody else keeps has nobody to read the count of its late calls.
        self._released: OrderedDict[bytes, weakref.ref[Trace]] = OrderedDict()
        self.upstreams = UpstreamClients()
        self._stack = AsyncExitStack()
        self._lifecycle = asyncio.Lock()
        self._started = False
        self.in_flight = 0
        """Requests being answered, which a restart of its tunnel's client would fail."""
        self.calls = Calls()
        """For metrics."""
        self._watch: LoopWatch | None = None

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listens, and is exposed through its tunnel if one is required; `TunnelError` if either cannot be."""
        async with self._lifecycle:
            if self._started:
                return
            if self.lost is not None:
                raise TunnelError(f"this server is not started again, make a new one: {self.lost}")
            try:
                await self._start()
            except BaseException:
                await run_to_end(self._release_everything())
                raise
            self._started = True

    async def stop(self) -> None:
        """Ends what runs on it and releases everything; rollouts still on it end with a `TunnelError`."""
        await run_to_end(self._stop())

    async def _stop(self) -> None:
        async with self._lifecycle:
            self._started = False
            await self._release_everything()

    async def _start(self) -> None:
        self._stack = AsyncExitStack()
        self._watch = LoopWatch.join()
        self._stack.callback(self._watch.leave)
        self._stack.enter_context(rare_searches())
        tunnel = self.tunnel
        self._stack.push_async_callback(self.upstreams.close)
        served = web.Server(
            Routes(self).handle,
            access_log=None,
            # Bodies are decoded and drained by us (see `inbound`): aiohttp would log a defect of ours where it comes
            # upon one that is malformed.
            auto_decompress=False,
            lingering_time=0,
            logger=http_logger,
        )
        runner = web.ServerRunner(served, shutdown_timeout=SHUTDOWN_TIMEOUT)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        host = tunnel.bind_host if tunnel else self.config.bind_host or "127.0.0.1"
        site = web.TCPSite(runner, host, tunnel.bind_port if tunnel else 0)
        try:
            await run_to_end(site.start())
        except (OSError, UnicodeError) as error:  # no such address, or no host name at all
            raise TunnelError(f"the server cannot listen on {host}: {error}") from error
        port = runner.addresses[0][1]
        # A wildcard address is for containers of this host, or for its proxy; on the host itself it is loopback.
        self._local_url = f"http://{in_url(LOOPBACK.get(host, host))}:{port}"
        if tunnel is None:
            self._base_url = self._local_url
            return
        tunnel.on_event = self._tunnel_event
        tunnel.on_gone = self._tunnel_gone
        tunnel.in_use = lambda: self.load > 0
        tunnel.in_flight = lambda: self.in_flight
        self._base_url = await self._stack.enter_async_context(tunnel.expose(port))

    async def _release_everything(self) -> None:
        for pair, session in list(self._sessions.items()):
            session.fail(TunnelError("the interception server was stopped"))
            self._release(pair, session, "the interception server was stopped")
        self._base_url = None
        await self._stack.aclose()

    # -- what a pool asks ----------------------------------------------------------------------

    @property
    def base_url(self) -> str:
        """Its URL for harnesses, no trailing slash; `RuntimeError` while it is not started."""
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
        return self.lost is None and (self.tunnel is None or self.tunnel.state.name == "serving")

    @property
    def queued(self) -> bool:
        """Its start waits for its turn within the creation limit."""
        return self.tunnel is not None and self.tunnel.queued

    @property
    def load(self) -> int:
        """Rollouts registered and not yet unregistered."""
        return len(self._sessions)

    def register(self, session: RolloutSession) -> tuple[str, str]:
        """The model secret and the state secret of a new rollout.

        `TunnelError` when not healthy, `ValueError` for a session that was used before.
        """
        check_usable(session, RolloutSession)
        if self.lost is not None:
            raise TunnelError(str(self.lost)) from self.lost
        if self._services and _digest("route", session.id) in self._by_secret:
            raise ValueError(
                f"a session with the id {session.id!r} runs on this server already, and shared tool servers tell them "
                "apart by it: give each rollout an id of its own"
            )
        session.registered = True
        session.local_url = self._local_url
        pair = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self._sessions[pair] = session
        for digest in self._digests_of(pair, session):
            self._by_secret[digest] = session
        return pair

    def unregister(self, model_secret: str, state_secret: str) -> None:
        """The rollout is over: its calls are ended and its secrets refused. Unknown or repeated: nothing happens."""
        session = self._sessions.pop((model_secret, state_secret), None)
        if session is not None:
            self._release((model_secret, state_secret), session, "the rollout is over")

    @asynccontextmanager
    async def acquire(self, session: RolloutSession, *, timeout: float | None = None) -> AsyncIterator[Slot]:
        """See `Interception.acquire`; there is no cap, and so nothing to wait for. `RuntimeError` while not started."""
        base_url = self.base_url
        pair = self.register(session)
        try:
            yield Slot(base_url, *pair)
        finally:
            self.unregister(*pair)
        raise_if_lost(session)

    def __repr__(self) -> str:
        where = self._base_url or "not started"
        health = "" if self.healthy else " lost" if self.tunnel is None else f" {self.tunnel.state.name}"
        return f"<InterceptionServer {where} load={self.load}{health}>"

    def samples(self) -> list[Sample]:
        """Its numbers, as `interception.prometheus` shows them; also from another thread."""
        mine = samples_of_calls(self.calls, self.in_flight)
        return mine if self._watch is None else mine + samples_of_lag(self._watch.lag)

    def tunnel_samples(self) -> list[Sample]:
        """Those of its tunnel; none without one."""
        return samples_of_tunnels([] if self.tunnel is None else [self.tunnel], {})

    # -- its tunnel ----------------------------------------------------------------------------

    def _tunnel_event(self, event: TunnelEvent) -> None:
        if self.on_event is not None:
            try:
                self.on_event(event)
            except Exception:
                logger.exception("on_event failed for %s", event)
        if isinstance(event, StateChanged):
            self._changed()

    def _tunnel_gone(self) -> None:
        assert self.tunnel is not None
        gone = self.tunnel.gone
        self.lost = TunnelError(f"the tunnel was lost: {gone}")
        self.lost.__cause__ = gone
        for pair, session in list(self._sessions.items()):
            error = TunnelError(f"the tunnel was lost: {gone}")
            error.__cause__ = gone
            session.fail(error)
            self._release(pair, session, "the tunnel was lost")
        self._changed()

    def _release(self, pair: tuple[str, str], session: RolloutSession, reason: str) -> None:
        session.release(reason)
        digests = self._digests_of(pair, session)
        for digest in digests:
            if self._by_secret.pop(digest, None) is not None:  # else its tunnel was lost before the rollout was over
                self._released[digest] = weakref.ref(session.trace)
        while len(self._released) > len(digests) * RELEASED_KEPT:
            self._released.popitem(last=False)

    def _digests_of(self, pair: tuple[str, str], session: RolloutSession) -> list[bytes]:
        """By which a request names a rollout: its two secrets and, for shared tool servers, its id."""
        digests = [_digest("model", pair[0]), _digest("state", pair[1])]
        return [*digests, _digest("route", session.id)] if self._services else digests

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()

    # -- what its routes ask -------------------------------------------------------------------

    def session_of(self, secret: str, kind: Literal["model", "state", "route"] = "model") -> RolloutSession | None:
        """The running rollout whose secret of that kind (or whose id, as a route) this is.

        A late call of one that is over is counted.
        """
        if not secret:
            return None
        digest = _digest(kind, secret)
        session = self._by_secret.get(digest)
        if session is None and (released := self._released.get(digest)) and (trace := released()) is not None:
            trace.stragglers += 1
        return session

    def is_service(self, secret: str) -> bool:
        """Whether this is a secret of a shared tool server's."""
        digest = _digest("service", secret)
        # All are compared, so that the time does not tell which one it resembles.
        return sum(hmac.compare_digest(digest, known) for known in self._services) > 0


def raise_if_lost(session: RolloutSession) -> None:
    """The end of `acquire` without an exception: a rollout whose tunnel was lost has not succeeded."""
    if isinstance(session.error, TunnelError):
        raise session.error


def _service_digests(secrets: tuple[str, ...]) -> list[bytes]:
    if isinstance(secrets, str) or not all(
        isinstance(secret, str) and secret and secret.isascii() and secret.isprintable() and secret == secret.strip()
        for secret in secrets
    ):
        # They are not quoted back.
        raise ValueError("state_service_secrets must be a tuple of strings, each fit for a header and none empty")
    return [_digest("service", secret) for secret in secrets]


def _digest(kind: str, secret: str) -> bytes:
    # Secrets are looked up by their digest, so that the time of a lookup tells nothing of them. With their kind, so
    # that none can pass for one of another kind.
    return hashlib.blake2b(f"{kind}:{secret}".encode(errors="surrogateescape"), digest_size=32).digest()
