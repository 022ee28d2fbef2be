"""`ToolServer`: tools for the agents of many rollouts, served on this host and reached through a tunnel."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, NamedTuple, Self

from interception.base import Slot
from interception.server import LOOPBACK, raise_if_lost
from interception.session import RolloutSession
from interception.tools.host import MCP_PATH, SPEC, ToolHost, as_mcp_server
from interception.tools.process import ToolProcess
from tunnel import Tunnel, TunnelConfig, TunnelError, TunnelEvent, make_tunnel
from tunnel.base import in_url
from tunnel.teardown import run_to_end

logger = logging.getLogger("interception")

GRACE = 45.0
"""Behind a tunnel, seconds after which the answer to a slow call is begun: edges cut a request without one at 60 s."""


class ToolSlot(NamedTuple):
    """Where one rollout's agent finds its tools: an MCP server (streamable HTTP) at `url`, with `secret` as its key."""

    url: str
    secret: str

    @property
    def headers(self) -> dict[str, str]:
        """What an MCP client must send with each request."""
        return {"Authorization": f"Bearer {self.secret}"}

    def mcp_config(self, name: str = "tools") -> dict[str, Any]:
        """The JSON by which Claude Code and many other agents are told of MCP servers."""
        return {"mcpServers": {name: {"type": "http", "url": self.url, "headers": self.headers}}}

    def __repr__(self) -> str:
        return f"ToolSlot(url={self.url!r}, secret='***')"


class ToolServer:
    """Serves tools over MCP for any number of rollouts; with a `tunnel` it is reached through that.

    :param tools: a list of functions, or an `MCPServer` of the MCP SDK: they are served in this process, on its event
        loop (functions that are not `async` in threads), and end with it. Or `"package.module:attribute"`, which names
        either, or a function that returns either: they are served in a process of their own, which a tool cannot
        share a crash or the GIL with, and which ends with this one, however this one ends.
    :param tunnel: any tunnel or its config; None for agents that run on this host.
    :param bind_host: where it listens without a tunnel, for agents in containers on this host. None: loopback.

    Only rollouts that `acquire` it are served, each by a secret of its own. Tools may ask for the rollout's `State` and
    `Task`. If the tunnel, or the tools' process, is lost, so is the server: its rollouts end with a `TunnelError`.
    """

    def __init__(
        self,
        tools: Any,
        *,
        name: str = "tools",
        tunnel: Tunnel | TunnelConfig | None = None,
        bind_host: str | None = None,
    ) -> None:
        self._tools: Any = tools
        if not isinstance(tools, str):
            self._tools = as_mcp_server(tools, name)
        elif not SPEC.fullmatch(tools):
            raise ValueError(f"{tools!r} names no tools: write package.module:attribute")
        self.tunnel: Tunnel | None = tunnel if isinstance(tunnel, Tunnel | None) else make_tunnel(tunnel)
        self._bind_host = bind_host
        self.identity = secrets.token_hex(8)
        """The nonce on the health answer by which this server is told from a stranger under its URL."""
        self.lost: TunnelError | None = None
        """Why it serves nobody any more."""
        self.on_event: Callable[[TunnelEvent], None] | None = None
        """Called with each event of its tunnel."""
        self._url: str | None = None
        self._host: ToolHost | ToolProcess | None = None
        self._sessions: dict[str, RolloutSession] = {}
        self._stack = AsyncExitStack()
        self._lifecycle = asyncio.Lock()

    @property
    def url(self) -> str:
        """Of the MCP server, as agents reach it. `RuntimeError` while it is not started."""
        if self._url is None:
            raise RuntimeError("the tool server has no URL yet: start it first")
        return self._url

    @property
    def load(self) -> int:
        """Rollouts that use it."""
        return len(self._sessions)

    async def start(self) -> None:
        """Listens, and is exposed through its tunnel; `TunnelError` if either cannot be, and for tools that fail."""
        async with self._lifecycle:
            if self._url is not None:
                return
            if self.lost is not None:
                raise TunnelError(f"this tool server is not started again, make a new one: {self.lost}")
            self._stack = AsyncExitStack()
            try:
                self._url = await self._start() + MCP_PATH
            except BaseException:
                await run_to_end(self._stack.aclose())
                raise

    async def stop(self) -> None:
        """Releases everything; rollouts that use it end with a `TunnelError`."""
        await run_to_end(self._stop())

    async def _stop(self) -> None:
        async with self._lifecycle:
            self._end_sessions("the tool server was stopped", None)
            self._url = self._host = None
            await self._stack.aclose()

    async def _start(self) -> str:
        tunnel = self.tunnel
        entrance = tunnel if tunnel is not None else _NoTunnel()
        grace = GRACE if tunnel is not None else None
        host: ToolHost | ToolProcess
        if isinstance(self._tools, str):
            host = ToolProcess(self._tools, entrance, self.identity, grace, self._process_ended)
        else:
            host = ToolHost(self._tools, entrance, identity=self.identity, grace=grace)
        self._stack.push_async_callback(host.stop)
        where = tunnel.bind_host if tunnel is not None else self._bind_host or "127.0.0.1"
        port = await host.start(where, tunnel.bind_port if tunnel is not None else 0)
        self._host = host
        if tunnel is None:
            return f"http://{in_url(LOOPBACK.get(where, where))}:{port}"
        tunnel.on_event = self._tunnel_event
        tunnel.on_gone = self._tunnel_gone
        tunnel.in_use = lambda: self.load > 0
        return await self._stack.enter_async_context(tunnel.expose(port))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @asynccontextmanager
    async def acquire(self, session: RolloutSession, slot: Slot) -> AsyncIterator[ToolSlot]:
        """Admit the rollout that has `slot` until the context is left: its agent finds the tools at the `ToolSlot`.

        Raises `TunnelError` when the server is lost. If it is lost meanwhile, `session.guard` raises that `TunnelError`
        at once, and so does leaving without an exception.
        """
        url, host = self.url, self._host
        assert host is not None
        if self.lost is not None:
            raise TunnelError(str(self.lost)) from self.lost
        secret = secrets.token_urlsafe(32)
        self._sessions[secret] = session
        try:
            # A server on this very host is asked without the detour through its tunnel.
            await host.admit(secret, session.local_url or slot.base_url, slot.state_secret)
            yield ToolSlot(url, secret)
        finally:
            del self._sessions[secret]
            host.dismiss(secret)
        raise_if_lost(session)

    def __repr__(self) -> str:
        lost = "" if self.lost is None else " lost"
        return f"<ToolServer {self._url or 'not started'} load={self.load}{lost}>"

    # -- what ends it --------------------------------------------------------------------------

    def _tunnel_event(self, event: TunnelEvent) -> None:
        if self.on_event is not None:
            try:
                self.on_event(event)
            except Exception:
                logger.exception("on_event failed for %s", event)

    def _tunnel_gone(self) -> None:
        assert self.tunnel is not None
        self._lose(f"the tool server's tunnel was lost: {self.tunnel.gone}", self.tunnel.gone)

    def _process_ended(self, how: str) -> None:
        self._lose(f"the tool server was lost: its process {how}", None)

    def _lose(self, why: str, cause: Exception | None) -> None:
        if self.lost is None:
            self.lost = TunnelError(why)
            self.lost.__cause__ = cause
        self._end_sessions(why, cause)

    def _end_sessions(self, why: str, cause: Exception | None) -> None:
        for session in self._sessions.values():
            error = TunnelError(why)
            error.__cause__ = cause
            session.fail(error)


class _NoTunnel:
    """Nobody hears what arrives."""

    path_prefix = ""

    def __init__(self) -> None:
        self.in_flight: Callable[[], int] = lambda: 0

    def note_arrival(self, headers: Any, path: str = "") -> None:
        pass
