"""The control API: what ``prime_tunnel``'s client asks for over http."""

import asyncio
import secrets
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from aiohttp import web
from aiohttp.typedefs import Handler

from tests.prime.relay import Registration, Relay

API_KEY = "fake-key"
PRIVATE = {"token", "secret", "refusal", "forgotten"}

# An answer in place of the real one: status, body, headers.
Answer = tuple[int, Mapping[str, Any], Mapping[str, str]]


class ControlApi:
    """Not thread-safe, but for the fault tables: those may be changed from anywhere at any time."""

    def __init__(self, registrations: dict[str, Registration], relay: Relay, domain: str | None = None) -> None:
        self._domain = domain
        self._registrations = registrations
        self._relay = relay
        self._runner: web.AppRunner | None = None
        # Bound but not listening, it refuses connections while the API is down and keeps the port from others.
        self._reservation = socket.socket()
        self._port = 0
        self.calls: Counter[str] = Counter()
        self.created: list[str] = []
        self.deletes: list[str] = []
        # Faults, by method.
        self.delay: dict[str, float] = {}
        self.after_delay: dict[str, float] = {}
        self.status: dict[str, Answer] = {}
        self.drop: set[str] = set()
        self.quota: int | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        self._reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reservation.bind(("127.0.0.1", 0))
        self._port = self._reservation.getsockname()[1]
        await self.up()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.down()
        self._reservation.close()

    async def up(self) -> None:
        app = web.Application(middlewares=[self._faults])
        app.add_routes(
            [
                web.post("/api/v1/tunnel", self._create),
                web.get("/api/v1/tunnel", self._list),
                web.delete("/api/v1/tunnel", self._bulk_delete),
                web.get("/api/v1/tunnel/{id}", self._get),
                web.delete("/api/v1/tunnel/{id}", self._delete),
            ]
        )
        # Requests in flight are cut, not waited for.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()

    async def down(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @web.middleware
    async def _faults(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        method = request.method
        self.calls[method] += 1
        await request.read()  # all of it: what comes after is done though the client be gone
        await asyncio.sleep(self.delay.get(method, 0))
        if request.headers.get("Authorization") != f"Bearer {API_KEY}":
            return web.json_response({"detail": "unauthorized"}, status=401)
        if method in self.status:
            status, body, headers = self.status[method]
            return web.json_response(body, status=status, headers=headers)
        response = await handler(request)
        await asyncio.sleep(self.after_delay.get(method, 0))
        if method in self.drop and request.transport is not None:
            request.transport.abort()
        return response

    async def _create(self, request: web.Request) -> web.Response:
        if self.quota is not None and sum(not r.terminal for r in self._registrations.values()) >= self.quota:
            return web.json_response({"detail": f"maximum number of tunnels reached ({self.quota})"}, status=400)
        body = await request.json()
        count = len(self.created)
        tunnel_id = f"t-{secrets.token_hex(6)}"
        self.created.append(tunnel_id)
        address = f"{tunnel_id}.{self._domain}" if self._domain else f"127.77.{count // 250}.{count % 250 + 1}"
        now = datetime.now(UTC)
        self._registrations[tunnel_id] = registration = Registration(
            tunnel_id=tunnel_id,
            name=body.get("name"),
            hostname=address,
            url=f"http://{address}:{self._relay.http_port}",
            local_port=body["local_port"],
            labels=body.get("labels", []),
            created_at=now.isoformat(),
            expires_at=(now + timedelta(hours=24)).isoformat(),
        )
        if not self._domain:
            await self._relay.open_host(address)
        access = {
            "frp_token": registration.token,
            "binding_secret": registration.secret,
            "server_host": "127.0.0.1",
            "server_port": self._relay.port,
        }
        return web.json_response(view(registration) | access)

    async def _get(self, request: web.Request) -> web.Response:
        registration = self._registrations.get(request.match_info["id"])
        if registration is None or registration.forgotten:
            return web.json_response({"detail": "not found"}, status=404)
        return web.json_response(view(registration))

    async def _list(self, request: web.Request) -> web.Response:
        query = request.query
        found = [r for r in self._select(query.getall("labels", []), query.get("status")) if not r.forgotten]
        if query.get("sortOrder") != "asc":
            found.reverse()
        page, per_page = int(query.get("page", "1")), int(query.get("perPage", "50"))
        start, end = (page - 1) * per_page, page * per_page
        return web.json_response(
            {
                "tunnels": [view(registration) for registration in found[start:end]],
                "total": len(found),
                "page": page,
                "per_page": per_page,
                "has_next": end < len(found),
            }
        )

    async def _delete(self, request: web.Request) -> web.Response:
        if not self._terminate(request.match_info["id"]):
            return web.json_response({"detail": "not found"}, status=404)
        return web.Response(status=204)

    async def _bulk_delete(self, request: web.Request) -> web.Response:
        body = await request.json()
        wanted = body.get("tunnel_ids")
        if wanted is None:
            wanted = [r.tunnel_id for r in self._select(body.get("labels", []), body.get("status")) if not r.terminal]
        done = {tunnel_id: self._terminate(tunnel_id) for tunnel_id in wanted}
        return web.json_response(
            {
                "succeeded": [tunnel_id for tunnel_id, found in done.items() if found],
                "failed": [
                    {"tunnel_id": tunnel_id, "error": "not found"} for tunnel_id, found in done.items() if not found
                ],
                "message": "ok",
            }
        )

    def _select(self, labels: list[str], status: str | None) -> list[Registration]:
        """The records with any of the labels (if any are asked for), oldest first."""
        return [
            registration
            for registration in self._registrations.values()
            if (not labels or set(labels) & set(registration.labels))
            and (status is None or registration.status == status.upper())
        ]

    def _terminate(self, tunnel_id: str) -> bool:
        """Deletion is soft, and may be repeated: the record stays and says so."""
        registration = self._registrations.get(tunnel_id)
        if registration is None:
            return False
        self.deletes.append(tunnel_id)
        registration.status, registration.refusal = "TERMINATED", "tunnel not registered"
        self._relay.throw_out(tunnel_id)
        return True


def view(registration: Registration) -> dict[str, Any]:
    return {key: value for key, value in asdict(registration).items() if key not in PRIVATE}
