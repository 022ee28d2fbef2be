"""What every tunnel has in common: one exposure at a time, its keepalive, its end said once."""

import asyncio
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from tunnel.errors import TunnelError, TunnelGoneError
from tunnel.health import HEALTH_PATH, PROBE_HEADER
from tunnel.keepalive import KeepAlive, TunnelClient
from tunnel.policy import KeepAlivePolicy
from tunnel.state import Counters, Gone, StateChanged, TunnelEvent, TunnelState
from tunnel.teardown import cancel_and_wait, run_to_end

logger = logging.getLogger("tunnel")

IDLE = TunnelState("idle")

MARK_PATH = "/vf/t/"
"""Before the random marker in the path of a URL whose proxy rewrites Host."""

DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def in_url(host: str) -> str:
    """A host as it stands in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


class Tunnel(ABC):
    """Makes a local port reachable under a public URL, and keeps it serving. Cheap: holds its config until `expose`."""

    bind_host: str = "127.0.0.1"
    """Where the server behind it must listen."""

    bind_port: int = 0
    """The port it must listen on; 0: any."""

    restartable: ClassVar[bool] = True
    """Whether the keepalive may restart its client."""

    def __init__(self, policy: KeepAlivePolicy, mark: Literal["host", "path"] = "host") -> None:
        self.policy = policy
        self.path_prefix = MARK_PATH + secrets.token_hex(8) if mark == "path" else ""
        """What the URL handed out ends in: the server behind it must serve its routes under this path too. A random
        marker by which requests are known that came in through it, or empty: they are known by their Host."""
        self.health_path: str | None = HEALTH_PATH
        """Where the local service answers 200. None, set before `expose`: it has no such route, and any HTTP answer of
        its `any_path` will do."""
        self.any_path = "/"
        """Best a path whose answer a gateway would not give for a tunnel that it does not have: no 404."""
        self.counters = Counters()
        """For metrics."""
        self.gone: TunnelGoneError | None = None
        """Why it can never serve again, once that is known."""
        self.on_event: Callable[[TunnelEvent], None] | None = None
        """Called on the event loop with each event; if it raises, that is logged."""
        self.in_use: Callable[[], bool] = lambda: True
        """Whether anybody waits behind the URL: one that nobody uses is never given up."""
        self.in_flight: Callable[[], int] = lambda: 0
        """How many requests are being answered, which a restart of the client would fail."""
        self._on_gone: Callable[[], None] | None = None
        self._told_gone: Callable[[], None] | None = None
        self._exposed = False
        self._url: str | None = None
        self._state = IDLE
        self._keepalive: KeepAlive | None = None

    def expose(self, port: int) -> AbstractAsyncContextManager[str]:
        """Makes `127.0.0.1:port` reachable while the context is held; yields the public URL, no trailing slash.

        Raises `TunnelError` if it cannot be set up or is exposed already, `TunnelLimitError` for a spent quota or
        refused credentials. It may be entered and left in different tasks. An error of the body passes unchanged.
        """
        return _Exposure(self, port)

    @property
    def local_host(self) -> str:
        """Where the local service is asked; a server on all interfaces is on loopback too."""
        return "127.0.0.1" if self.bind_host in ("", "0.0.0.0", "::") else in_url(self.bind_host)

    @property
    def url(self) -> str | None:
        """The public URL while exposed, as it is handed out."""
        return None if self._url is None else self._url + self.path_prefix

    @property
    def state(self) -> TunnelState:
        """Where it stands, and why."""
        return self._state

    @property
    def queued(self) -> bool:
        """Whether `expose` waits for its turn within the creation limit just now."""
        return False

    @property
    def restarts(self) -> int:
        """Restarts of the client under the present URL."""
        return self._keepalive.restarts if self._keepalive else 0

    @property
    def on_gone(self) -> Callable[[], None] | None:
        """Called once, on the event loop, when the tunnel is gone; set after the fact it is called at once."""
        return self._on_gone

    @on_gone.setter
    def on_gone(self, callback: Callable[[], None] | None) -> None:
        self._on_gone = callback
        self._say_gone()

    def report(self, reason: str) -> None:
        """A caller saw the URL fail: brings a probe forward. Does nothing while not exposed."""
        if self._keepalive is not None:
            self._keepalive.report(reason)

    def note_arrival(self, headers: Mapping[str, str], path: str = "") -> None:
        """The server behind the tunnel hands over each request's headers (a case-insensitive mapping) and path."""
        if self._url is None or not self._is_ours(headers, path):
            return
        nonce = headers.get(PROBE_HEADER)
        if nonce is None:
            self.counters.arrivals += 1
        if self._keepalive is not None:
            self._keepalive.arrived(nonce)

    def _is_ours(self, headers: Mapping[str, str], path: str) -> bool:
        """Whether a request came in through the URL. To be forged it takes one who reaches the local port already."""
        if self.path_prefix and path.startswith(self.path_prefix + "/"):
            return True
        parts = urlsplit(self._url or "")
        default = DEFAULT_PORTS.get(parts.scheme, "")
        ours = parts.netloc.lower().removesuffix(default)
        named = [headers.get("Host", ""), *headers.get("X-Forwarded-Host", "").split(",")]
        return any(host.strip().lower().removesuffix(default) == ours for host in named)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url or 'not exposed'} {self._state.name}>"

    # -- for the kinds of tunnel ---------------------------------------------------------------

    @abstractmethod
    async def _connect(self, port: int) -> TunnelClient:
        """Make the port reachable. If it fails or is cancelled it leaves nothing behind."""

    @abstractmethod
    async def _disconnect(self) -> None:
        """Release everything; runs to its end, once, after the keepalive has ended."""

    async def _keep(self, client: TunnelClient, local_url: str) -> None:
        """Keep the URL serving; raises `TunnelGoneError` when it is gone."""
        self._keepalive = KeepAlive(
            client,
            self.health_path,
            local_url=local_url,
            policy=self.policy,
            any_path=self.any_path,
            on_event=self._noted,
            can_restart=self.restartable,
            in_use=lambda: self.in_use(),
            in_flight=lambda: self.in_flight(),
            counters=self.counters,
        )
        self._show(self._keepalive.state)
        await self._keepalive.run()

    # -- parts ---------------------------------------------------------------------------------

    def _noted(self, event: TunnelEvent) -> None:
        if isinstance(event, StateChanged):
            self._state = event.after
        if self.on_event is not None:
            try:
                self.on_event(event)
            except Exception:
                logger.exception("on_event failed for %s", event)

    def _show(self, state: TunnelState) -> None:
        """Where the state changes without a keepalive of ours that tells of it."""
        if state.name != self._state.name:
            self._noted(StateChanged(url=self._url or "", at=time.time(), before=self._state, after=state))

    def _set_gone(self, error: TunnelGoneError) -> None:
        # Sessions keep it for as long as they are kept: the frames it came through, and the client in them, must not
        # stay with it.
        raised: BaseException | None = error
        while raised is not None:
            raised = raised.with_traceback(None).__cause__ or raised.__context__
        self.gone = error
        self.counters.gone += 1
        if self._state.name != "gone":
            self._show(TunnelState("gone", str(error)))
            self._noted(Gone(url=self._url or "", at=time.time(), error=error))
        self._say_gone()

    def _say_gone(self) -> None:
        callback = self._on_gone
        if self.gone is None or callback is None or callback == self._told_gone:
            return
        self._told_gone = callback
        try:
            callback()
        except Exception:
            logger.exception("on_gone failed for %s", self._url)


class _Exposure(AbstractAsyncContextManager[str]):
    """One exposure of a tunnel. A class, for it is entered and left in different tasks."""

    def __init__(self, tunnel: Tunnel, port: int) -> None:
        self._tunnel, self._port = tunnel, port
        self._connected = False
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> str:
        tunnel = self._tunnel
        if tunnel._exposed:
            raise TunnelError(f"this {type(tunnel).__name__} is exposed already; make one tunnel for each port")
        tunnel._exposed = True
        tunnel.gone = tunnel._told_gone = None
        tunnel._state = IDLE
        try:
            client = await tunnel._connect(self._port)
            self._connected = True
            if client.url is None:
                raise TunnelError(f"{type(tunnel).__name__} connected without a URL")
            tunnel._url = client.url.rstrip("/")
            tunnel._state = TunnelState("serving")
            self._watch = asyncio.create_task(self._supervise(client), name=f"keep {tunnel._url} serving")
            return tunnel._url + tunnel.path_prefix
        except BaseException:
            await run_to_end(self._close())
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await run_to_end(self._close())
        except Exception:
            if error is None:
                raise
            logger.exception("%r could not be closed cleanly", self._tunnel)  # the body's own error goes on

    async def _supervise(self, client: TunnelClient) -> None:
        """The keepalive until the tunnel is gone. A defect in it must not leave the tunnel unwatched."""
        while True:
            try:
                await self._tunnel._keep(client, f"http://{self._tunnel.local_host}:{self._port}")
            except TunnelGoneError as error:
                return self._tunnel._set_gone(error)
            except Exception:
                logger.exception("%s: the keepalive failed and is started again", self._tunnel._url)
            await asyncio.sleep(self._tunnel.policy.restart_backoff)

    async def _close(self) -> None:
        tunnel = self._tunnel
        try:
            if self._watch is not None:
                await cancel_and_wait(self._watch)
            if self._connected:
                self._connected = False
                await tunnel._disconnect()
        finally:
            tunnel._keepalive = None
            tunnel._url = None
            if tunnel.gone is None:
                tunnel._state = IDLE
            tunnel._exposed = False
