"""A relay as frps is one: frpc logs in to it, and it serves http to whoever asks for a tunnel's host."""

import asyncio
import contextlib
import secrets
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal, Self

GatewayFault = int | Literal["hang", "reset"]

NOT_FOUND = b"""<!DOCTYPE html>
<html>
<head>
<title>Not Found</title>
</head>
<body>
<h1>Tunnel Not Found</h1>
<p>The page you requested was not found.</p>
</body>
</html>
"""


@dataclass
class Registration:
    """The service's record of a tunnel."""

    tunnel_id: str
    name: str | None
    hostname: str
    url: str
    local_port: int
    labels: list[str]
    created_at: str
    expires_at: str
    status: str = "PENDING"
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    secret: str = field(default_factory=lambda: secrets.token_hex(8))
    # What frpc is told at its next login or new_proxy.
    refusal: str = ""
    # GET knows nothing of it.
    forgotten: bool = False

    @property
    def terminal(self) -> bool:
        return self.status in ("EXPIRED", "TERMINATED")


@dataclass(eq=False)
class Session:
    """One login of one frpc."""

    registration: Registration
    run_id: str
    writer: asyncio.StreamWriter
    # The network between the two has gone, and neither has been told: nothing is heard or said.
    deaf: bool = False
    # Seconds for which the session is kept after its frpc has gone.
    linger: float = 0.0
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, *fields: str) -> None:
        if not self.deaf:
            send(self.writer, *fields)


def send(writer: asyncio.StreamWriter, *fields: str) -> None:
    writer.write("\t".join(fields).encode() + b"\n")


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
    """Copy until either end has gone; the number of bytes copied."""
    count = 0
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            count += len(data)
            writer.write(data)
            await writer.drain()
    return count


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Relay:
    """Times are frps's own, multiplied by ``scale``. Not thread-safe: everything happens on one event loop."""

    def __init__(self, registrations: dict[str, Registration], scale: float) -> None:
        self._registrations = registrations
        self._work_timeout = 10 * scale
        # An frpc pings every 30 s and waits 10 s for the answer; the stand-in waits a second at the least.
        self._silence_timeout = 30 * scale + max(10 * scale, 1.0)
        self._sessions: set[Session] = set()
        self._routes: dict[str, Session] = {}
        self._waiting: dict[str, tuple[Session, asyncio.Future[Connection]]] = {}
        self._servers: list[asyncio.Server] = []
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self.port = 0
        self.http_port = 0
        self.gateway: dict[str, GatewayFault] = {}
        self.host_path: dict[str, GatewayFault] = {}
        self.logins: Counter[str] = Counter()
        self.requests: list[tuple[str, str]] = []

    async def __aenter__(self) -> Self:
        self.port = await self._listen(self._serve_frpc, "127.0.0.1", 0, self._tls())
        self.http_port = await self._listen(self._serve_http, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for server in self._servers:
            server.close()
        for session in list(self._sessions):
            self._drop(session)
        for writer in self._connections.values():
            writer.transport.abort()
        if self._connections:
            await asyncio.wait(self._connections, timeout=5)

    def _tls(self) -> ssl.SSLContext | None:
        """For frpc's side."""
        return None

    async def _listen(
        self,
        serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
    ) -> int:
        async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._connections[task] = writer
            try:
                await serve(reader, writer)
            except (OSError, EOFError, ValueError, asyncio.LimitOverrunError):
                pass  # the peer has left, or speaks something else
            finally:
                del self._connections[task]
                writer.close()

        server = await asyncio.start_server(connection, host, port, backlog=1024, ssl=tls)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def open_host(self, address: str) -> None:
        """Serve http on a loopback address of the tunnel's own, which needs no DNS."""
        await self._listen(self._serve_http, address, self.http_port)

    # Faults

    def throw_out(self, tunnel_id: str) -> None:
        for session in self._of(tunnel_id):
            self._drop(session)

    def lose_route(self, tunnel_id: str) -> None:
        self._routes.pop(tunnel_id, None)

    def lose_route_everywhere(self) -> None:
        self._routes.clear()

    def half_open(self, tunnel_id: str) -> None:
        for session in self._of(tunnel_id):
            session.deaf = True

    def hold_session(self, tunnel_id: str, seconds: float) -> None:
        for session in self._of(tunnel_id):
            session.linger = seconds

    def _of(self, tunnel_id: str) -> list[Session]:
        return [session for session in self._sessions if session.registration.tunnel_id == tunnel_id]

    # frpc's side

    async def _serve_frpc(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kind, *fields = (await reader.readline()).decode().rstrip("\n").split("\t")
        if kind == "work":
            _, work = self._waiting.get(fields[0], (None, None))
            if work is not None and not work.done():
                work.set_result((reader, writer))
                await writer.wait_closed()
        elif kind == "login":
            await self._log_in(reader, writer, *fields)

    async def _log_in(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        user: str,
        token: str,
        secret: str,
        run_id: str,
    ) -> None:
        registration = self._registrations.get(user)
        refusal = self._refusal(registration, registration is not None and token == registration.token, secret)
        if registration is None or refusal:
            send(writer, "login_resp", "", refusal)
            return
        await self._take_over(user, run_id)
        if reader.at_eof():
            return
        session = Session(registration, run_id or secrets.token_hex(8), writer)
        self._sessions.add(session)
        self.logins[user] += 1
        session.send("login_resp", session.run_id, "")
        try:
            await self._hear(session, reader)
        finally:
            self._drop(session)

    @staticmethod
    def _refusal(registration: Registration | None, knows_token: bool, secret: str) -> str:
        """Why a login is refused; empty: it is not."""
        if registration is None:
            return "tunnel not registered"
        if registration.refusal:
            return registration.refusal
        if not knows_token:
            return "token in login doesn't match token from configuration"
        return "" if secret == registration.secret else "invalid binding secret"

    async def _take_over(self, user: str, run_id: str) -> None:
        """frps 0.66: a login under the same run id ends the old session and waits for its end, which for a silent one
        comes only with the keepalive.
        """
        for old in self._of(user):
            if old.run_id == run_id:
                if not old.deaf:
                    self._drop(old)
                await old.closed.wait()

    async def _hear(self, session: Session, reader: asyncio.StreamReader) -> None:
        """Answer a session until it is over for the relay, which may be long after its frpc has gone."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._silence_timeout
        with contextlib.suppress(OSError, TimeoutError):
            while line := await asyncio.wait_for(reader.readline(), deadline - loop.time()):
                if session.deaf:
                    continue
                deadline = loop.time() + self._silence_timeout
                if line == b"ping\n":
                    session.send("pong")
                else:
                    session.send("new_proxy_resp", self._add_proxy(session, line.decode().split()[1]))
        if not session.deaf:
            session.deaf, deadline = True, loop.time() + session.linger
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(session.closed.wait(), deadline - loop.time())

    def _add_proxy(self, session: Session, name: str) -> str:
        registration = session.registration
        if registration.refusal:
            return registration.refusal
        if self._routes.get(registration.tunnel_id, session) is not session:
            return f"proxy [{registration.tunnel_id}.{name}] already exists"
        self._routes[registration.tunnel_id] = session
        registration.status = "CONNECTED"
        return ""

    def _drop(self, session: Session) -> None:
        registration = session.registration
        self._sessions.discard(session)
        if self._routes.get(registration.tunnel_id) is session:
            del self._routes[registration.tunnel_id]
        if registration.status == "CONNECTED" and not self._of(registration.tunnel_id):
            registration.status = "DISCONNECTED"
        session.writer.transport.abort()
        session.closed.set()
        for owner, work in self._waiting.values():
            if owner is session and not work.done():
                work.set_exception(ConnectionResetError("session closed"))

    # The public side

    async def _serve_http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        request_line, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        host = next((value for name, value in headers if name.lower() == "host"), "")
        hostname = host.split(":")[0]
        tunnel_id = next((r.tunnel_id for r in self._registrations.values() if r.hostname == hostname), "")
        self.requests.append((tunnel_id, request_line.split(" ")[1]))

        fault = self.gateway.get(tunnel_id, self.gateway.get("*"))
        if any(name.lower() == "x-vf-probe" for name, _ in headers):
            fault = self.host_path.get(tunnel_id, self.host_path.get("*", fault))
        route = self._routes.get(tunnel_id)
        if fault == "hang":
            await reader.read(-1)  # until the client has had enough
        elif fault == "reset":
            # Closed with nothing to linger for, a socket sends a reset.
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        elif fault is not None:
            await self._answer(writer, fault)
        elif route is None:
            await self._answer(writer, 404)
        else:
            peer = writer.get_extra_info("peername")[0]
            await self._forward(route, reader, writer, rewrite(request_line, headers, host, peer))

    async def _forward(
        self, session: Session, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes
    ) -> None:
        try:
            work_reader, work_writer = await self._work_connection(session)
        except (ConnectionResetError, TimeoutError):
            await self._answer(writer, 404)  # as frps: the same page as for no route
            return
        work_writer.write(head)
        upload = asyncio.create_task(pump(reader, work_writer))
        # A client that leaves takes its request with it.
        upload.add_done_callback(lambda _: work_writer.transport.abort())
        received = await pump(work_reader, writer)
        upload.cancel()
        if not received:
            await self._answer(writer, 404)  # as frps: a work connection that closes without a byte is the same page

    async def _work_connection(self, session: Session) -> Connection:
        work_id = secrets.token_hex(6)
        work: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        self._waiting[work_id] = session, work
        session.send("req_work", work_id)
        try:
            return await asyncio.wait_for(work, self._work_timeout)
        finally:
            del self._waiting[work_id]

    async def _answer(self, writer: asyncio.StreamWriter, status: int) -> None:
        body = NOT_FOUND if status == 404 else f"the gateway says {status}\n".encode()
        kind = "text/html" if status == 404 else "text/plain"
        writer.write(
            f"HTTP/1.1 {status} Gateway\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
            f"Connection: close\r\n\r\n".encode()
            + body
        )
        await writer.drain()


def rewrite(request_line: str, headers: list[tuple[str, str]], host: str, peer: str) -> bytes:
    """The head of a request as a gateway passes it on: marked with where it came from, a connection for itself."""
    forwarded_for = [value for name, value in headers if name.lower() == "x-forwarded-for"] + [peer]
    replaced = {"x-forwarded-for", "x-forwarded-host", "x-forwarded-proto"}
    marks = [f"X-Forwarded-For: {', '.join(forwarded_for)}", f"X-Forwarded-Host: {host}", "X-Forwarded-Proto: http"]
    if not any(name.lower() == "upgrade" for name, _ in headers):
        replaced |= {"connection", "keep-alive"}
        marks.append("Connection: close")
    kept = [f"{name}: {value}" for name, value in headers if name.lower() not in replaced]
    return "\r\n".join([request_line, *kept, *marks, "", ""]).encode("latin-1")
