"""What may happen to a request on its way through a tunnel's edge."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from tunnel import IDENTITY_HEADER

Pass = Callable[[], Awaitable[web.StreamResponse]]
Fault = Callable[[web.Request, Pass], Awaitable[web.StreamResponse]]

KEPT = ("ETag", "Content-Type", IDENTITY_HEADER)


class Unreliable:
    """Stands before a server like a tunnel's edge, and does to the next requests what `faults` says.

    `only`: those requests alone whose body has this in it.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.faults: list[Fault] = []
        self.only = b""
        self.requests = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession() as self._http:
            try:
                yield f"http://127.0.0.1:{runner.addresses[0][1]}"
            finally:
                await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        body = await request.read()

        async def pass_on() -> web.StreamResponse:
            headers = {name: value for name, value in request.headers.items() if name not in ("Host", "Content-Length")}
            async with self._http.request(
                request.method, self._url + request.path_qs, data=body, headers=headers
            ) as answer:
                kept = {
                    name: answer.headers[name]
                    for name in ("ETag", "Content-Type", IDENTITY_HEADER)
                    if name in answer.headers
                }
                return web.Response(status=answer.status, body=await answer.read(), headers=kept)

        if self.faults and self.only in body:
            return await self.faults.pop(0)(request, pass_on)
        return await pass_on()


def status(code: int) -> Fault:
    """The edge answers by itself."""

    async def fault(request: web.Request, pass_on: Pass) -> web.StreamResponse:
        return web.Response(status=code, text="an edge's page")

    return fault


async def cut_before(request: web.Request, pass_on: Pass) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def cut_after(request: web.Request, pass_on: Pass) -> web.StreamResponse:
    """The request arrives, its answer does not."""
    await pass_on()
    return await cut_before(request, pass_on)
