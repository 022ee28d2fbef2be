"""``FakePrime`` with a relay that speaks frp's own wire protocol (v1, over TLS and yamux), for a real frpc.

Written from the protocol as it is seen on the wire; only what an http proxy needs.
"""

import asyncio
import contextlib
import datetime
import hashlib
import ipaddress
import json
import os
import secrets
import ssl
import struct
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from tests.prime.relay import Connection, Relay, Session
from tests.prime.service import FakePrime

try:
    from cryptography.hazmat.decrepit.ciphers.modes import CFB
except ImportError:  # before cryptography 47
    from cryptography.hazmat.primitives.ciphers.modes import CFB

VERSION = "0.66.0"

# yamux: version, type, flags, stream, length
HEAD = struct.Struct(">BBHII")
DATA, WINDOW, PING, GO_AWAY = 0, 1, 2, 3
SYN, ACK, FIN, RST = 1, 2, 4, 8
INITIAL_WINDOW = 256 * 1024

# frp's messages
LOGIN, LOGIN_RESPONSE, NEW_PROXY, NEW_PROXY_RESPONSE = "o", "1", "p", "2"
NEW_WORK, REQUEST_WORK, START_WORK, PING_MESSAGE, PONG = "w", "r", "s", "h", "4"


class Stream:
    """One yamux stream, with the parts of a ``StreamWriter`` that the relay uses (its ``transport`` too)."""

    def __init__(self, mux: "Mux", number: int) -> None:
        self.reader = asyncio.StreamReader()
        self.transport = self
        self.window = INITIAL_WINDOW
        self._mux, self._number = mux, number
        self._buffer = bytearray()
        self._room = asyncio.Event()
        self._ended = False

    def write(self, data: bytes) -> None:
        self._buffer += data
        self.flush()

    def flush(self) -> None:
        while self._buffer and self.window > 0:
            part = bytes(self._buffer[: min(self.window, 65536)])
            del self._buffer[: len(part)]
            self.window -= len(part)
            self._mux.send(DATA, 0, self._number, len(part), part)
        self._room.set()

    async def drain(self) -> None:
        while self._buffer and not self._ended:
            self._room.clear()
            await self._room.wait()
        await self._mux.writer.drain()

    def close(self) -> None:
        self._end(FIN)

    def abort(self) -> None:
        self._end(RST)

    def lost(self) -> None:
        self.reader.feed_eof()
        self._ended = True
        self._room.set()

    def _end(self, flag: int) -> None:
        if not self._ended:
            self._ended = True
            self._room.set()
            self._mux.send(WINDOW, flag, self._number, 0)


class Mux:
    """The relay's end of a yamux connection."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_stream: Callable[["Mux", Stream], Awaitable[None]],
    ) -> None:
        self.writer = writer
        self.session: WireSession | None = None
        self.heard = asyncio.get_running_loop().time()
        self._reader = reader
        self._on_stream = on_stream
        self._streams: dict[int, Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def _deaf(self) -> bool:
        return self.session is not None and self.session.deaf

    def send(self, kind: int, flags: int, number: int, length: int, body: bytes = b"") -> None:
        if not self._deaf and not self.writer.is_closing():
            self.writer.write(HEAD.pack(0, kind, flags, number, length) + body)

    async def run(self) -> None:
        """Until the connection has ended."""
        try:
            while True:
                _, kind, flags, number, length = HEAD.unpack(await self._reader.readexactly(HEAD.size))
                body = await self._reader.readexactly(length) if kind == DATA and length else b""
                if self._deaf:
                    continue
                self.heard = asyncio.get_running_loop().time()
                if kind == GO_AWAY:
                    return
                if kind == PING:
                    if flags & SYN:
                        self.send(PING, ACK, 0, length)
                else:
                    self._hear(kind, flags, number, length, body)
        finally:
            for stream in self._streams.values():
                stream.lost()
            if self._tasks:
                await asyncio.wait(self._tasks)

    def _hear(self, kind: int, flags: int, number: int, length: int, body: bytes) -> None:
        if flags & SYN:
            stream = self._streams[number] = Stream(self, number)
            self.send(WINDOW, ACK, number, 0)
            task = asyncio.ensure_future(self._carry(stream))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if (known := self._streams.get(number)) is None:
            return
        if kind == WINDOW:
            known.window += length
            known.flush()
        elif body:
            known.reader.feed_data(body)
            self.send(WINDOW, 0, number, len(body))
        if flags & FIN:
            known.reader.feed_eof()
        if flags & RST:
            known.lost()
            del self._streams[number]

    async def _carry(self, stream: Stream) -> None:
        try:
            await self._on_stream(self, stream)
        except (OSError, EOFError, ValueError):
            stream.abort()


class Sealed:
    """The control stream after the login: AES-128-CFB both ways, each direction led by its IV."""

    def __init__(self, stream: Stream, token: str) -> None:
        self._stream = stream
        self._key = hashlib.pbkdf2_hmac("sha1", token.encode(), b"frp", 64, 16)
        self._decryptor: Any = None
        self._encryptor: Any = None

    async def read(self, count: int) -> bytes:
        if self._decryptor is None:
            self._decryptor = self._cipher(await self._stream.reader.readexactly(16)).decryptor()
        return cast(bytes, self._decryptor.update(await self._stream.reader.readexactly(count)))

    def send(self, kind: str, message: dict[str, Any]) -> None:
        lead = b""
        if self._encryptor is None:
            lead = os.urandom(16)
            self._encryptor = self._cipher(lead).encryptor()
        self._stream.write(lead + self._encryptor.update(pack(kind, message)))

    def _cipher(self, lead: bytes) -> Any:
        return Cipher(algorithms.AES(self._key), CFB(lead))


def pack(kind: str, message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return kind.encode() + struct.pack(">q", len(body)) + body


async def unpack(read: Callable[[int], Awaitable[bytes]]) -> tuple[str, dict[str, Any]]:
    head = await read(9)
    (length,) = struct.unpack(">q", head[1:])
    if not 0 <= length <= 10240:
        raise ValueError("this is not frp's protocol")
    return chr(head[0]), json.loads(await read(length) or b"{}")


@dataclass(eq=False)
class WireSession(Session):
    mux: Mux = field(kw_only=True)
    sealed: Sealed = field(kw_only=True)
    proxy: str = ""
    pool: asyncio.Queue[Stream] = field(default_factory=asyncio.Queue)

    def ask_for_work(self) -> None:
        self.sealed.send(REQUEST_WORK, {})


class WireRelay(Relay):
    """Answers the keepalive of yamux; a session it has not heard of for as long as two of those is over."""

    def _tls(self) -> ssl.SSLContext:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
        day, now = datetime.timedelta(days=1), datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + day)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
            .sign(key, hashes.SHA256())
        )
        encoding = serialization.Encoding.PEM
        with tempfile.NamedTemporaryFile(suffix=".pem") as file:
            file.write(
                key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
                + certificate.public_bytes(encoding)
            )
            file.flush()
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(file.name)
        return context

    async def _serve_frpc(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await Mux(reader, writer, self._serve_stream).run()

    async def _serve_stream(self, mux: Mux, stream: Stream) -> None:
        kind, message = await unpack(stream.reader.readexactly)
        if kind == LOGIN:
            await self._control(mux, stream, message)
        elif kind == NEW_WORK and mux.session is not None:
            mux.session.pool.put_nowait(stream)
        else:
            stream.abort()

    async def _control(self, mux: Mux, stream: Stream, login: dict[str, Any]) -> None:
        user = login.get("user", "")
        registration = self._registrations.get(user)
        token = registration.token if registration else ""
        proof = hashlib.md5(f"{token}{login.get('timestamp')}".encode(), usedforsecurity=False).hexdigest()
        refusal = self._refusal(
            registration,
            login.get("privilege_key") == proof,
            (login.get("metas") or {}).get("binding_secret", ""),
        )
        if registration is None or refusal:
            stream.write(pack(LOGIN_RESPONSE, {"version": VERSION, "error": refusal}))
            stream.close()
            return
        run_id = login.get("run_id") or secrets.token_hex(8)
        await self._take_over(user, run_id)
        if stream.reader.at_eof():
            return
        session = WireSession(registration, run_id, mux.writer, mux=mux, sealed=Sealed(stream, token))
        mux.session = session
        self._sessions.add(session)
        self.logins[user] += 1
        stream.write(pack(LOGIN_RESPONSE, {"version": VERSION, "run_id": run_id}))
        try:
            await self._outlive(session, login.get("pool_count", 0))
        finally:
            self._drop(session)

    async def _outlive(self, session: WireSession, pool_count: int) -> None:
        """Serve a session until it is over for the relay, which may be long after its frpc has gone."""
        loop = asyncio.get_running_loop()
        talking = asyncio.ensure_future(self._talk(session, pool_count))
        try:
            while not talking.done() and loop.time() < (deadline := session.mux.heard + self._silence_timeout):
                await asyncio.wait([talking], timeout=deadline - loop.time())
        finally:
            talking.cancel()
            await asyncio.wait([talking])
        deadline = session.mux.heard + self._silence_timeout
        if not session.deaf:
            session.deaf, deadline = True, loop.time() + session.linger
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(session.closed.wait(), deadline - loop.time())

    async def _talk(self, session: WireSession, pool_count: int) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError):
            while True:
                kind, message = await unpack(session.sealed.read)
                if kind == PING_MESSAGE:
                    session.sealed.send(PONG, {})
                elif kind == NEW_PROXY:
                    session.proxy = message["proxy_name"]
                    refusal = self._add_proxy(session, session.proxy)
                    answer = {"proxy_name": session.proxy, "remote_addr": session.registration.hostname}
                    session.sealed.send(NEW_PROXY_RESPONSE, answer | {"error": refusal})
                    if not refusal:
                        for _ in range(min(10, pool_count)):
                            session.ask_for_work()

    async def _work_connection(self, session: Session) -> Connection:
        assert isinstance(session, WireSession)
        async with asyncio.timeout(self._work_timeout):
            while True:
                if session.pool.empty():
                    session.ask_for_work()
                stream = await self._next_work(session)
                if session.deaf:
                    await session.closed.wait()
                if not stream.reader.at_eof():
                    break
        name = session.proxy
        stream.write(
            pack(
                START_WORK, {"proxy_name": name, "src_addr": "127.0.0.1", "src_port": 1, "dst_addr": "", "dst_port": 1}
            )
        )
        session.ask_for_work()
        return stream.reader, cast(asyncio.StreamWriter, stream)

    @staticmethod
    async def _next_work(session: WireSession) -> Stream:
        work = asyncio.ensure_future(session.pool.get())
        closed = asyncio.ensure_future(session.closed.wait())
        try:
            await asyncio.wait([work, closed], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ConnectionResetError("session closed")
            return work.result()
        finally:
            work.cancel()
            closed.cancel()


class WirePrime(FakePrime):
    """``FakePrime`` for the real frpc at ``frpc``, which runs without rights and without our environment."""

    relay_type = WireRelay

    def __init__(self, home: Path, frpc: Path, scale: float = 1.0) -> None:
        super().__init__(home, scale)
        self._real_frpc = frpc.resolve()

    def _frpc_program(self) -> str:
        return UNPRIVILEGED.format(frpc=str(self._real_frpc))


# What the SDK starts in frpc's place. The config file is readable to its owner alone, and so handed over as a copy.
UNPRIVILEGED = """
import os, sys
with open(sys.argv[2], "rb") as file:
    config = os.memfd_create("frpc.toml", 0)
    os.write(config, file.read())
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
os.execve({frpc!r}, [sys.argv[0], "-c", f"/proc/self/fd/{{config}}"], {{"PATH": "/usr/bin:/bin"}})
"""
