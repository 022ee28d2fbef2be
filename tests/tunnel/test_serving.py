"""The health route in servers that are not ours, and what they tell their tunnel."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import httpx2
import pytest
from aiohttp import web
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tests.helpers import until
from tests.interception.fakes import FakeTunnel
from tunnel import HEALTH_PATH, IDENTITY_HEADER, PROBE_HEADER, Entrance, add_health_route, health_middleware

Guard = Callable[[web.Request, Callable[[web.Request], Awaitable[web.StreamResponse]]], Awaitable[web.StreamResponse]]


class Entry:
    """A tunnel that keeps what it is told."""

    def __init__(self, path_prefix: str = "") -> None:
        self.path_prefix = path_prefix
        self.in_flight: Callable[[], int] = lambda: -1
        self.arrived: list[tuple[str, str | None]] = []

    def note_arrival(self, headers: Any, path: str = "") -> None:
        self.arrived.append((path, headers.get(PROBE_HEADER)))


def asgi(tunnel: Entrance | None = None, **options: Any) -> httpx2.AsyncClient:
    """A Starlette app that lets nobody in, behind the middleware."""

    async def page(request: Request) -> Response:
        return PlainTextResponse(f"{request.method} {request.url.path}", status_code=401)

    app = Starlette(routes=[Route("/{path:path}", page, methods=["GET", "POST"])])
    transport = httpx2.ASGITransport(health_middleware(app, tunnel, **options))
    return httpx2.AsyncClient(transport=transport, base_url="http://tools.example")


@asynccontextmanager
async def aiohttp_app(tunnel: Entrance | None = None, **options: Any) -> AsyncIterator[str]:
    """An aiohttp app that lets nobody in."""

    @web.middleware
    async def nobody(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        raise web.HTTPUnauthorized(text=f"{request.method} {request.path}")

    app = web.Application(middlewares=[nobody])
    add_health_route(app, tunnel, **options)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class TestAnyAsgiApp:
    async def test_health_is_answered_before_the_app_with_an_identity(self) -> None:
        async with asgi(identity="me") as http:
            answer = await http.get(HEALTH_PATH)
            assert (answer.status_code, answer.text, answer.headers["content-type"]) == (
                200,
                "ok",
                "text/plain; charset=utf-8",
            )
            assert answer.headers[IDENTITY_HEADER] == "me"
            head = await http.head(HEALTH_PATH)
            assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", "2")

    async def test_everything_else_is_the_apps(self) -> None:
        async with asgi() as http:
            assert (await http.post(HEALTH_PATH)).text == f"POST {HEALTH_PATH}"
            assert (await http.get("/mcp")).text == "GET /mcp"

    async def test_each_has_an_identity_of_its_own(self) -> None:
        async with asgi() as one, asgi() as two:
            identities = {(await http.get(HEALTH_PATH)).headers[IDENTITY_HEADER] for http in (one, two, one)}
            assert len(identities) == 2

    async def test_the_tunnel_is_told_what_arrives_and_its_marker_is_taken_away(self) -> None:
        entry = Entry("/vf/t/mark")
        async with asgi(entry) as http:
            assert (await http.get("/vf/t/mark/mcp")).text == "GET /mcp"
            assert (await http.get("/vf/t/mark" + HEALTH_PATH, headers={PROBE_HEADER: "nonce"})).text == "ok"
            assert (await http.get("/vf/t/marks")).text == "GET /vf/t/marks"
        assert entry.arrived == [("/vf/t/mark/mcp", None), ("/vf/t/mark" + HEALTH_PATH, "nonce"), ("/vf/t/marks", None)]

    async def test_what_is_in_flight_is_counted_without_probes(self) -> None:
        entry, go = Entry(), asyncio.Event()

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            await go.wait()
            raise LookupError("of the app")

        app = health_middleware(slow, entry)
        scope = {"type": "http", "method": "GET", "path": "/x", "headers": []}
        call = asyncio.ensure_future(app(scope, None, None))  # type: ignore[arg-type]
        await until(lambda: entry.in_flight() == 1)
        go.set()
        with pytest.raises(LookupError):
            await call
        assert entry.in_flight() == 0

    async def test_a_lifespan_goes_to_the_app(self) -> None:
        seen: list[str] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            seen.append(scope["type"])

        await health_middleware(app, Entry())({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
        assert seen == ["lifespan"]

    async def test_a_tunnel_of_ours_counts_it(self) -> None:
        tunnel = FakeTunnel()
        async with tunnel.expose(80), asgi(tunnel) as http:
            await http.get("/mcp", headers={"Host": "127.0.0.1:80"})
            await http.get("/mcp", headers={"Host": "elsewhere"})
            assert tunnel.counters.arrivals == 1


class TestAnyAiohttpApp:
    async def test_health_is_answered_before_the_apps_own_middlewares(self) -> None:
        async with aiohttp_app(identity="me") as url, aiohttp.ClientSession() as http:
            async with http.get(url + HEALTH_PATH) as answer:
                assert (answer.status, answer.content_type, await answer.text()) == (200, "text/plain", "ok")
                assert answer.headers[IDENTITY_HEADER] == "me"
            async with http.head(url + HEALTH_PATH) as answer:
                assert answer.status == 200
            async with http.get(url + "/x") as answer:
                assert answer.status == 401

    async def test_the_tunnel_is_told(self) -> None:
        entry = Entry("/vf/t/mark")
        async with aiohttp_app(entry) as url, aiohttp.ClientSession() as http:
            for path in ("/vf/t/mark" + HEALTH_PATH, "/x"):
                async with http.get(url + path, headers={PROBE_HEADER: "n"}) as answer:
                    assert answer.status == (401 if path == "/x" else 200)
        assert entry.arrived == [("/vf/t/mark" + HEALTH_PATH, "n"), ("/x", "n")]
        assert entry.in_flight() == 0


def test_a_tunnel_is_an_entrance() -> None:
    entrance: Entrance = FakeTunnel()
    assert json.dumps(entrance.path_prefix) == '""'
