"""Tool servers that a remote harness reaches through a tunnel: kept serving, their loss told to whom it concerns."""

import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar

from verifiers.v1.errors import TunnelError as TheirTunnelError

from interception.integrations.verifiers.losses import Way, as_theirs, watch_of, watches
from interception.integrations.verifiers.options import Options
from interception.integrations.verifiers.verdict import serves
from tunnel import HEALTH_PATH, TunnelGoneError, make_tunnel
from tunnel.probe import probe

logger = logging.getLogger("interception")

TOOL_SERVER = Path(__file__).with_name("toolserver.py")

HEALTH_TIMEOUT = 5.0
"""Seconds to find out whether a tool server on this host has the health route."""

_served: ContextVar[str | None] = ContextVar("interception_verifiers_served", default=None)
"""The id of the trace whose tool servers are being started; None: shared ones."""

_shared: dict[str, Way] = {}
"""To the shared tool servers on this host, by their public URLs, until they are stopped."""


class ToolTunnel:
    """In the place of the `PrimeTunnel` that verifiers opens for a tool server on this host."""

    options: ClassVar[Options] = Options()

    def __init__(self, config: object = None) -> None:
        self.config = config

    @asynccontextmanager
    async def expose(self, port: int) -> AsyncIterator[str]:
        """Makes `127.0.0.1:port` reachable; yields the public URL. If it cannot, verifiers' `TunnelError`."""
        served = _served.get()  # of the rollout whose task this is, at this moment
        async with AsyncExitStack() as stack:
            with as_theirs():
                # A marker in the path would have to be in the tool server's routes.
                tunnel = make_tunnel(self.options.tunnel.model_copy(update={"mark": "host"}))
                local = await probe(
                    f"http://127.0.0.1:{port}{HEALTH_PATH}", timeout=HEALTH_TIMEOUT, through_proxy=False
                )
                if not local.ok:
                    # In a container, where we are not installed. MCP's answer to a GET is no gateway's 404.
                    tunnel.health_path, tunnel.any_path = None, "/mcp"
                url = await stack.enter_async_context(tunnel.expose(port))
            way = Way(tunnel, local.identity)
            tunnel.on_event = way.note
            watched = watch_of(served)
            ways = _shared if served is None else {} if watched is None else watched.tools
            ways[url] = way
            stack.callback(ways.pop, url, None)
            tunnel.on_gone = lambda: _tell(way, shared=served is None)
            yield url


def _tell(way: Way, shared: bool) -> None:
    gone = way.tunnel.gone
    if shared:
        # Nobody restarts a shared tool server: whoever needs it fails, and the eval goes on.
        logger.error("the tunnel of a shared tool server was lost, rollouts that use it fail from now on: %s", gone)
    for watched in watches():
        if way in watched.tools.values():
            watched.lose(_reason(gone), gone)


def _reason(gone: TunnelGoneError | None) -> str:
    return f"the tunnel of a tool server was lost: {gone}"


def _under(tool_url: str, url: str) -> bool:
    return tool_url == url or tool_url.startswith(f"{url}/")


ServeTools = Callable[..., AbstractAsyncContextManager[dict[str, str]]]


def told(serve_tools: ServeTools) -> ServeTools:
    """verifiers' `serve_tools`, by which the tunnels opened inside know whose they are."""

    @asynccontextmanager
    async def told_serve_tools(
        toolsets: list[Any], harness_runtime: Any, shared: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> AsyncIterator[dict[str, str]]:
        trace_id = kwargs.get("state_route") or ""
        watched = watch_of(trace_id)
        for server in (shared or {}).values():
            for url, way in _shared.items():
                if _under(server.url, url):
                    if (gone := way.tunnel.gone) is not None:
                        raise TheirTunnelError(_reason(gone))
                    if watched is not None:
                        watched.tools[url] = way
        async with AsyncExitStack() as stack:
            # Only while they are started: the rest of the rollout's task is not about tool servers.
            token = _served.set(trace_id)
            try:
                urls = await stack.enter_async_context(serve_tools(toolsets, harness_runtime, shared, **kwargs))
            finally:
                _served.reset(token)
            yield urls
            if watched is not None and watched.tools:
                await serves(watched)  # while their tunnels are open
                watched.tools.clear()

    return told_serve_tools


RunBackground = Callable[..., Awaitable[None]]


def with_health_route(run_background: RunBackground) -> RunBackground:
    """A subprocess runtime's `run_background` that starts tool servers by ours, which adds the health route and ends
    with this process."""

    async def run_background_with_health_route(self: Any, argv: list[str], env: dict[str, str], log: str) -> None:
        if "VF_CONFIG" in env and len(argv) == 3 and argv[:2] == [sys.executable, "-m"]:
            argv = [sys.executable, "-P", str(TOOL_SERVER), str(os.getpid()), argv[2]]
        await run_background(self, argv, env, log)

    return run_background_with_health_route
