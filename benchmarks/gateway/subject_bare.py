"""The floor: a proxy of aiohttp's server and client that relays, and records nothing."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from benchmarks.gateway.control import PATH, Served, keyless, main

KEPT = ("Content-Type", "Authorization")
"""Headers that are passed on, both ways."""


@asynccontextmanager
async def bare(upstream: str) -> AsyncIterator[Served]:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as client:

        async def relay(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            headers = {name: request.headers[name] for name in KEPT if name in request.headers}
            async with client.post(upstream + request.path, data=body, headers=headers) as answer:
                told = {name: answer.headers[name] for name in KEPT if name in answer.headers}
                if answer.content_length is not None:
                    return web.Response(status=answer.status, body=await answer.read(), headers=told)
                response = web.StreamResponse(status=answer.status, headers=told)
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response

        app = web.Application(client_max_size=2**30)
        app.router.add_post(PATH, relay)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
            yield Served(f"http://127.0.0.1:{runner.addresses[0][1]}", keyless)
        finally:
            await runner.cleanup()


if __name__ == "__main__":
    main(bare)
