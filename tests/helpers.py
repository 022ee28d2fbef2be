"""What tests share: waiting for something to become true, and a server whose behaviour the test switches."""

import asyncio
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Self

from aiohttp import web


async def until(condition: Callable[[], object], timeout: float = 30.0) -> None:
    """Return once `condition()` is true. The bound is generous, for the machine may be busy: it only ends a hang."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while not condition():
        if loop.time() > deadline:
            try:
                text = inspect.getsource(condition).strip()
            except (OSError, TypeError):
                text = repr(condition)
            raise AssertionError(f"did not become true within {timeout:g} s: {text}")
        await asyncio.sleep(0.005)


class Switch:
    """An HTTP server on loopback that answers every request as `behaviour` says just now.

    `behaviour`: a status, "silent" (accepts and never answers), "garbage" (bytes that are no HTTP), or
    "redirect to URL".
    """

    def __init__(self, behaviour: int | str = 200) -> None:
        self.behaviour = behaviour
        self.paths: list[str] = []
        """Of each request so far."""

    @property
    def hits(self) -> int:
        return len(self.paths)

    @property
    def connections(self) -> int:
        server = self._runner.server
        return len(server.connections) if isinstance(server, web.Server) else 0

    async def __aenter__(self) -> Self:
        self._runner = web.ServerRunner(web.Server(self._answer, handler_cancellation=True), shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port: int = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.paths.append(request.path)
        match self.behaviour:
            case int(status):
                return web.Response(status=status, text="ok" if status == 200 else "")
            case "silent":
                await asyncio.Event().wait()
            case "garbage":
                assert request.transport is not None
                request.transport.write(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
                request.transport.close()
                await asyncio.Event().wait()
            case redirect:
                return web.Response(status=302, headers={"Location": redirect.removeprefix("redirect to ")})
        raise AssertionError("unreachable")
