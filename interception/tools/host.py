"""Serving an MCP server over HTTP on this host: for rollouts that were admitted, each with its own secret."""

import asyncio
import contextlib
import hashlib
import importlib
import inspect
import logging
import re
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson
from multidict import CIMultiDict

from interception.headers import secret_of
from interception.state_client import StateClient
from interception.tools.grace import begun_in_time
from interception.tools.injection import Rollout, current_rollout, with_state
from tunnel import IDENTITY_HEADER, Entrance, TunnelError, health_middleware
from tunnel.serving import AsgiApp, Receive, Scope, Send
from tunnel.teardown import run_to_end

if TYPE_CHECKING:
    from mcp.server import MCPServer

logger = logging.getLogger("interception")

MCP_PATH = "/mcp"

BODY_CAP = 64 * 1024**2
"""Bytes of one MCP request."""

END_GRACE = 1.0
"""Seconds that calls under way get when the server stops."""

KEEPALIVE_INTERVAL = 5.0
"""Seconds between two signs of life of a call that was begun because it is slow."""

STATE_PATIENCE = 30.0
"""Seconds for which a tool waits for a state channel that does not answer."""

SPEC = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*(?:\.[^\W\d]\w*)*")


def load(spec: str) -> Any:
    """What `package.module:attribute` names, or returns if it is a function."""
    module, _, path = spec.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found() if inspect.isfunction(found) else found


def as_mcp_server(tools: Any, name: str) -> "MCPServer":
    """An `MCPServer`, made of functions if it is not one yet."""
    try:
        from mcp.server import MCPServer
    except ImportError as error:
        raise ImportError(
            f"a ToolServer needs the MCP SDK, version 2: pip install 'interception-toolkit[mcp]' ({error})"
        ) from error
    if isinstance(tools, MCPServer):
        return tools
    functions = list(tools) if isinstance(tools, list | tuple) else []
    if not functions or not all(callable(function) for function in functions):
        raise TypeError(f"tools must be a list of functions, or an MCPServer of the MCP SDK, not {tools!r:.80}")
    with _logging_as_it_is():
        server: MCPServer = MCPServer(name)
    for function in functions:
        server.add_tool(with_state(function))
    return server


@contextlib.contextmanager
def _logging_as_it_is() -> Iterator[None]:
    # An MCPServer sets the root logger up where nobody has, which is for programs to do.
    handler = logging.NullHandler()
    logging.root.addHandler(handler)
    try:
        yield
    finally:
        logging.root.removeHandler(handler)


class ToolHost:
    """An MCP server on a port of this host; whoever is behind the `entrance` hears of its requests."""

    def __init__(
        self,
        server: "MCPServer",
        entrance: Entrance,
        *,
        identity: str,
        grace: float | None,
        on_count: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._server = server
        self._entrance = entrance
        self._identity = identity
        self._grace = grace
        self._on_count = on_count  # called with how many requests are in flight, when that changes
        self._count = 0
        self._rollouts: dict[bytes, Rollout] = {}
        self._http: aiohttp.ClientSession | None = None
        self._stopping = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """The port it listens on. `TunnelError` if it cannot; then it is to be stopped all the same."""
        listener = listen(host, port)
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        ready = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(self._serve(listener, ready), name="serve tools")
        await asyncio.wait([ready, self._serving], return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            await self._serving  # raises why
            raise TunnelError("the tool server ended as it started")
        return int(listener.getsockname()[1])

    async def stop(self) -> None:
        self._stopping.set()
        if self._serving is not None:
            await asyncio.wait([self._serving])
            if not self._serving.cancelled() and (error := self._serving.exception()) is not None:
                logger.debug("the tool server ended with %r", error)
        if self._http is not None:
            await self._http.close()

    async def admit(self, secret: str, state_url: str, state_secret: str) -> None:
        """From now on calls with `secret` are this rollout's, whose state is at `state_url`."""
        channel = StateClient(state_url, state_secret, patience=STATE_PATIENCE, http=self._http)
        self._rollouts[_digest(secret)] = Rollout(channel)

    def dismiss(self, secret: str) -> None:
        self._rollouts.pop(_digest(secret), None)

    # -- parts ---------------------------------------------------------------------------------

    async def _serve(self, listener: socket.socket, ready: "asyncio.Future[None]") -> None:
        import uvicorn
        from mcp.server.transport_security import TransportSecuritySettings

        app = self._server.streamable_http_app(
            streamable_http_path=MCP_PATH,
            stateless_http=True,
            json_response=True,
            max_request_body_size=BODY_CAP,
            # It would refuse the Host of a tunnel. What it guards against, a web page that is led here, has no secret.
            transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
        )

        served = self._admitted(app)
        if self._grace is not None:
            served = begun_in_time(served, grace=self._grace, interval=KEEPALIVE_INTERVAL)

        class Server(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield  # they are the program's own

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                ready.set_result(None)

        http = Server(
            uvicorn.Config(
                health_middleware(served, self._entrance, identity=self._identity),
                lifespan="off",  # the session manager is run here, where its failure is an error of ours
                log_config=None,
                access_log=False,
                ws="none",
                server_header=False,
                timeout_graceful_shutdown=int(END_GRACE),
            )
        )
        with listener:
            async with self._server.session_manager.run():
                serving = asyncio.create_task(http.serve(sockets=[listener]), name="serve tools over HTTP")
                try:
                    stopped = asyncio.ensure_future(self._stopping.wait())
                    await asyncio.wait([serving, stopped], return_when=asyncio.FIRST_COMPLETED)
                    stopped.cancel()
                finally:
                    http.should_exit = True
                    await run_to_end(_ended(serving))

    def _admitted(self, app: Any) -> AsgiApp:
        """`app` for admitted rollouts alone."""

        async def admitted(scope: Scope, receive: Receive, send: Send) -> None:
            headers = CIMultiDict(
                [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
            )
            secret = secret_of(headers)
            rollout = self._rollouts.get(_digest(secret)) if secret else None
            if rollout is None:
                return await self._refuse(send)
            current_rollout.set(rollout)  # of this request's task, and of those it starts
            if scope["method"] == "POST" and headers.get("Mcp-Method") != "subscriptions/listen":
                receive = _without_end(receive)
            self._counted(1)
            try:
                await app(scope, receive, send)
            finally:
                self._counted(-1)

        return admitted

    async def _refuse(self, send: Send) -> None:
        message = "the key is not one of a running rollout: use the secret of its ToolSlot"
        body = orjson.dumps({"error": {"message": message}})
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            # By this a client knows that no edge said it: nothing was run.
            (IDENTITY_HEADER.lower().encode(), self._identity.encode()),
        ]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _counted(self, more: int) -> None:
        self._count += more
        self._on_count(self._count)


def listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, UnicodeError, OverflowError) as error:
        raise TunnelError(f"the tool server cannot listen on {host}: {error}") from error


def _without_end(receive: Receive) -> Receive:
    """Calls that have begun run to their end, also where their caller has left: none is half done.

    One whose request never came whole has not begun: it is told that its caller has left.
    """
    whole = False

    async def received() -> Any:
        nonlocal whole
        message = await receive()
        if message["type"] == "http.disconnect" and whole:
            await asyncio.Event().wait()
        whole = message["type"] == "http.request" and not message.get("more_body", False)
        return message

    return received


async def _ended(task: "asyncio.Task[Any]") -> None:
    await asyncio.wait([task])
    task.result()


def _digest(secret: str) -> bytes:
    # Looked up by their digest, so that the time of a lookup tells nothing of them.
    return hashlib.sha256(secret.encode(errors="surrogateescape")).digest()
