"""The health route, and the notes of what arrives, for servers behind a tunnel that are not ours."""

import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Protocol

from aiohttp import web
from multidict import CIMultiDict

from tunnel.health import HEALTH_PATH, IDENTITY_HEADER

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class Entrance(Protocol):
    """What a server tells of its requests: a `Tunnel` is one."""

    path_prefix: str
    in_flight: Callable[[], int]

    def note_arrival(self, headers: Mapping[str, str], path: str = "") -> None: ...


def health_middleware(app: Any, tunnel: Entrance | None = None, *, identity: str | None = None) -> AsgiApp:
    """Any ASGI app, with the health route answered before it and without its authentication.

    With the `tunnel` it is behind, the tunnel is told what arrives and what is in flight, and the marker that
    `mark="path"` puts into the URL's path is taken away again. `identity` is the nonce on the health answer by which
    this server is told from a stranger under its URL; it should be new for each server, as it is by default.
    """
    return _HealthMiddleware(app, tunnel, identity or secrets.token_hex(8))


class _HealthMiddleware:
    def __init__(self, app: AsgiApp, tunnel: Entrance | None, identity: str) -> None:
        self._app = app
        self._tunnel = tunnel
        self._identity = identity
        self._in_flight = 0
        if tunnel is not None:
            tunnel.in_flight = lambda: self._in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        path = scope["path"]
        if self._tunnel is not None:
            self._tunnel.note_arrival(
                CIMultiDict([(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]),
                path,
            )
            prefix = self._tunnel.path_prefix
            if prefix and path.startswith(prefix + "/"):
                path = path.removeprefix(prefix)
                scope = {**scope, "path": path}
                if scope.get("raw_path") is not None:
                    scope["raw_path"] = scope["raw_path"].removeprefix(prefix.encode())
        if path == HEALTH_PATH and scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
            return await self._healthy(scope, send)
        self._in_flight += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._in_flight -= 1

    async def _healthy(self, scope: Scope, send: Send) -> None:
        headers = [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", b"2"),
            (IDENTITY_HEADER.lower().encode(), self._identity.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else b"ok"})


def add_health_route(app: web.Application, tunnel: Entrance | None = None, *, identity: str | None = None) -> None:
    """The same for an aiohttp app that does not run yet; `tunnel` and `identity` as above.

    With a tunnel of `mark="path"` the app must serve its own routes under `tunnel.path_prefix`, too.
    """
    headers = {IDENTITY_HEADER: identity or secrets.token_hex(8)}
    paths = {HEALTH_PATH} if tunnel is None else {HEALTH_PATH, tunnel.path_prefix + HEALTH_PATH}
    in_flight = 0

    @web.middleware
    async def first(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        nonlocal in_flight
        if tunnel is not None:
            tunnel.note_arrival(request.headers, request.path)
        if request.path in paths and request.method in ("GET", "HEAD"):
            return web.Response(text="ok", headers=headers)
        in_flight += 1
        try:
            return await handler(request)
        finally:
            in_flight -= 1

    if tunnel is not None:
        tunnel.in_flight = lambda: in_flight
    # Before the app's own middlewares, whose authentication would refuse the probes.
    app.middlewares.insert(0, first)
