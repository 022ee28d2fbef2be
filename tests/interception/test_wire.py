"""A turn's request over the wire is what aiohttp's own client would make of it, and leaves nothing behind."""

import asyncio
import datetime
import gzip
import ipaddress
import socket
import ssl
import struct
import threading
import weakref
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import brotli
import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from multidict import CIMultiDict

from interception import Upstream
from interception.connecting import ADDRESSES_KEPT, Origin, _from, _tls
from interception.connection import Connection
from interception.headers import Sending
from interception.ledger import Ledger
from interception.turn import Call, Exchange, Failure
from interception.upstream import PIECE, UpstreamClients, failure
from interception.wire import KEEPALIVE
from tests.helpers import until
from tests.interception.scripted import WIRE, Step, answers, does, rollout, unsearched

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Peer:
    """A server by hand: each request on a connection is answered with the next bytes, the last one again and again.
    `then_closes`: after the first."""

    def __init__(self, *raw: bytes, then_closes: bool = False) -> None:
        self.raw = raw
        self.then_closes = then_closes
        self.accepted = 0
        self.open = 0
        self.requests: list[tuple[bytes, bytes]] = []
        self.hold: asyncio.Event | None = None
        """To be waited for before each answer."""
        self._writer: asyncio.StreamWriter | None = None

    @asynccontextmanager
    async def serving(self, **options: Any) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**20, **options)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        finally:
            server.close()

    def says(self, raw: bytes) -> None:
        """On the newest connection, unasked."""
        assert self._writer is not None
        self._writer.write(raw)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self.open += 1
        self._writer = writer
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                self.requests.append((head, await reader.readexactly(length)))
                if self.hold is not None:
                    await self.hold.wait()
                writer.write(self.raw[min(len(self.requests), len(self.raw)) - 1])
                await writer.drain()
                if self.then_closes:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()


def upstream(url: str, **options: Any) -> Upstream:
    return Upstream(base_url=url, **{"connect_timeout": 30, "idle_timeout": 30, **options})


@asynccontextmanager
async def clients() -> AsyncIterator[UpstreamClients]:
    made = UpstreamClients()
    try:
        yield made
    finally:
        await made.close()


def open_of(made: UpstreamClients) -> set[Connection]:
    """Its turns' connections."""
    return {connection for wire in made._wires.values() if wire is not None for connection in wire._open}


async def ends_seen(made: UpstreamClients) -> None:
    """Returns once no kept connection is open on our side."""
    connectors = [client.connector for client in made._clients.values()]
    pools = [pool for connector in connectors if connector is not None for pool in connector._conns.values()]
    await until(lambda: not any(protocol.is_connected() for pool in pools for protocol, _ in pool))
    await until(lambda: not open_of(made))


async def outcome(made: UpstreamClients, to: Upstream, *, wire: bool, headers: Any = (), body: bytes = b"{}") -> Any:
    """Of one request: status, headers and body, or what a client is told of its failure."""
    sending = Sending(to, f"{to.base_url}/x?y=%41", CIMultiDict(headers))
    try:
        async with (
            made.post(sending, "id", body)
            if wire
            else made.request(to, "POST", sending.url, headers=sending.headers("id"), body=body)
        ) as answer:
            told = [(name, value) for name, value in answer.headers.items() if name != "Date"]
            return answer.status, told, await answer.read()
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        told = failure(error, to)
        return told.status, told.message.replace(to.base_url, "URL")


PACKED = {"gzip": gzip.compress(b"ok" * 500), "deflate": zlib.compress(b"ok" * 500), "br": brotli.compress(b"ok" * 500)}


def with_length(body: bytes, *headers: bytes, length: int | None = None) -> bytes:
    head = [b"HTTP/1.1 200 OK", b"Content-Length: %d" % (len(body) if length is None else length), *headers]
    return b"\r\n".join([*head, b"", body])


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n"
ANSWERS = {
    "plain": OK,
    "continue": b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
    "early hints": b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + OK,
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "no content, yet a length": b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n",
    "not modified": b"HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\n\r\n",
    "chunked": CHUNKED + b"\r\n1\r\no\r\n1;x=y\r\nk\r\n0\r\n\r\n",
    "trailers": CHUNKED + b"Trailer: X-T\r\n\r\n2\r\nok\r\n0\r\nX-T: 1\r\n\r\n",
    "a chunk that is none": CHUNKED + b"\r\nzz\r\nok\r\n0\r\n\r\n",
    "no end of the chunks": CHUNKED + b"\r\n2\r\nok\r\n",
    "shorter than it says": with_length(b"ok", length=5),
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
    "length and chunks": CHUNKED + b"Content-Length: 2\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "two at once": OK + OK,
    "an extension of a chunk that is long": CHUNKED + b"\r\n2;x=" + b"a" * 100_000 + b"\r\nok\r\n0\r\n\r\n",
    "until the end": b"HTTP/1.1 200 OK\r\nContent-Type: a/b\r\n\r\nok",
    "of old": b"HTTP/1.0 200 OK\r\n\r\nok",
    "closing": with_length(b"ok", b"Connection: close"),
    **{name: with_length(body, b"Content-Encoding: " + name.encode()) for name, body in PACKED.items()},
    "an unknown encoding": with_length(b"ok", b"Content-Encoding: rot13"),
    "no ASCII": with_length(b"ok", "X-A: é☃".encode(), b"X-B: \xff\xe9"),
    "a header again": with_length(b"ok", b"Set-Cookie: a=1", b"Set-Cookie: b=2", b"x-a: 1", b"X-A: 2"),
    "a folded header": with_length(b"ok", b"X-A: 1\r\n 2"),
    "a huge header": with_length(b"ok", b"X-A: " + b"a" * 100_000),
    "a thousand headers": with_length(b"ok", *[b"X-%d: 1" % number for number in range(1000)]),
    "a large body": with_length(b"ok" * 300_000),
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-",
    "nothing": b"",
    "a status that is none": b"HTTP/1.1 two OK\r\n\r\n",
    "line feeds alone": OK.replace(b"\r", b""),
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nok",
}


def without_end(stream: bytes) -> bytes:
    """All of a stream but the last chunk, which is empty."""
    return CHUNKED + b"Content-Type: text/event-stream\r\n\r\n%x\r\n%b\r\n" % (len(stream), stream)


UNFINISHED = ("no end of the chunks", "until the end", "of old", "half a head", "no HTTP", "line feeds alone")
"""What only the end of the connection ends; as do two more, which show that both wait for that."""

SHAPES = [(name, True) for name in ANSWERS] + [(name, False) for name in ANSWERS if name not in UNFINISHED]


@pytest.mark.parametrize(
    ("name", "then_closes"), SHAPES, ids=lambda value: {True: "closed", False: ""}.get(value, value)
)
async def test_an_answer_is_read_as_aiohttps_client_reads_it(name: str, then_closes: bool) -> None:
    seen = []
    for wire in (True, False):
        peer = Peer(ANSWERS[name], then_closes=then_closes)
        async with peer.serving() as url, clients() as made:
            to = upstream(url, idle_timeout=0.05 if name in ("nothing", "shorter than it says") else 30)
            calls = []
            for _ in range(2):
                calls.append(await outcome(made, to, wire=wire))
                if then_closes:
                    await ends_seen(made)
            seen.append((calls, peer.accepted, [body for _, body in peer.requests]))
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("raw", "status", "said", "connections"),
    [
        # aiohttp's takes what there is of it for all.
        pytest.param(
            with_length(PACKED["gzip"][:-5], b"Content-Encoding: gzip"), 502, "broke off", 1, id="half a gzip"
        ),
        # aiohttp's gives up the connection, whose next answer is intact.
        pytest.param(with_length(b"ok", b"Content-Encoding: gzip"), 502, "content-encoding", 1, id="no gzip"),
        # aiohttp's does not read it at all. It is whole; only what follows it is none.
        pytest.param(with_length(b"okok", length=2), 200, "", 2, id="longer than it says"),
        pytest.param(OK + OK[:20], 200, "", 2, id="half of another one after it"),
    ],
)
async def test_where_it_differs(raw: bytes, status: int, said: str, connections: int) -> None:
    peer = Peer(raw)
    async with peer.serving() as url, clients() as made:
        for _ in range(2):
            told = await outcome(made, upstream(url), wire=True)
            assert told[0] == status
            assert said in str(told[1])
    assert peer.accepted == connections


async def test_a_request_says_what_aiohttps_client_says() -> None:
    headers = [("Content-Type", "application/json"), ("X-A", "é☃"), ("accept", "a/b"), ("user-agent", "me")]
    heads = []
    for wire in (True, False):
        peer = Peer(OK)
        async with peer.serving() as url, clients() as made:
            assert (await outcome(made, upstream(url), wire=wire, headers=headers))[0] == 200
            [(head, body)] = peer.requests
            first, *rest = head.split(b"\r\n")
            heads.append((first, sorted(line.lower() for line in rest if b"127.0.0.1" not in line), body))
    assert heads[0] == heads[1]
    assert heads[0][0] == b"POST /v1/x?y=%41 HTTP/1.1"


async def test_ends_of_the_kept_connections_are_no_failures() -> None:
    peer = Peer(OK, then_closes=True)
    async with peer.serving() as url, clients() as made:
        for _ in range(5):
            assert (await outcome(made, upstream(url), wire=True))[0] == 200
            await ends_seen(made)
    assert peer.accepted == 5


@pytest.mark.parametrize("linger", [None, 0], ids=["closed", "reset"])
async def test_a_connection_that_is_lost_as_soon_as_it_is_made_is_an_error_of_the_upstreams(linger: int | None) -> None:
    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if linger is not None:
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, linger))
        writer.close()

    server = await asyncio.start_server(leave, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    async with server, clients() as made:
        for _ in range(10):
            status, message = await outcome(made, upstream(url), wire=True)
            assert status == 503
            assert "closed the connection" in message


async def test_one_that_was_lost_before_it_could_be_written_to_is_too(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = Origin.connect

    async def lost(origin: Origin, protocol: Callable[[], Connection]) -> Connection:
        connection = await connect(origin, protocol)
        assert connection.transport is not None
        connection.transport.abort()
        await connection.lost
        return connection

    monkeypatch.setattr(Origin, "connect", lost)
    async with Peer(OK).serving() as url, clients() as made:
        status, message = await outcome(made, upstream(url), wire=True)
        assert status == 503
        assert "closed the connection" in message


async def test_timeouts_and_refusals_are_told_as_before() -> None:
    peer = Peer(OK)
    peer.hold = asyncio.Event()
    async with peer.serving() as url, clients() as made:
        status, message = await outcome(made, upstream(url, idle_timeout=0.05), wire=True)
        assert status == 504
        assert "sent nothing for 0.05 s" in message
        peer.hold.set()
        await until(lambda: not peer.open)
    for unreachable in (url, "http://nowhere.invalid/v1"):
        async with clients() as made:
            status, message = await outcome(made, upstream(unreachable), wire=True)
            assert status == 503
            assert "cannot be reached" in message


@pytest.mark.parametrize("name", ["no end of the chunks", "until the end", "of old", "half a head"])
async def test_silence_is_not_the_end_of_an_answer(name: str) -> None:
    async with Peer(ANSWERS[name]).serving() as url, clients() as made:
        assert (await outcome(made, upstream(url, idle_timeout=0.05), wire=True))[0] in (502, 504)
        await ends_seen(made)


async def test_nor_is_the_servers_stop() -> None:
    async with Peer(ANSWERS["until the end"]).serving() as url, clients() as made:
        to = upstream(url)
        async with made.post(Sending(to, f"{to.base_url}/x", CIMultiDict()), "id", b"{}") as answer:
            reading = asyncio.create_task(answer.read())
            await asyncio.sleep(0)
            await made.close()
            with pytest.raises(aiohttp.ClientPayloadError):
                await reading


async def test_a_connection_that_is_not_made_in_time_is_504(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("interception.connecting.aiohappyeyeballs.start_connection", never)
    async with clients() as made:
        status, message = await outcome(made, upstream("http://127.0.0.1:9/v1", connect_timeout=0.01), wire=True)
        assert status == 504
        assert "could not be connected within 0.01 s" in message


async def test_a_peer_that_speaks_no_tls_is_503() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 speak HTTP\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server, clients() as made:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        status, message = await outcome(made, upstream(url), wire=True)
        assert status == 503
        assert "cannot be reached" in message


@pytest.mark.parametrize("body", [b"{}", b"x" * PIECE, b"x" * (PIECE + 1)], ids=["small", "a piece", "more"])
async def test_bodies_of_any_size_arrive_whole(body: bytes) -> None:
    peer = Peer(OK)
    async with peer.serving() as url, clients() as made:
        for _ in range(2):
            assert (await outcome(made, upstream(url), wire=True, body=body))[0] == 200
    assert [got for _, got in peer.requests] == [body] * 2
    assert peer.accepted == 1


@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Of 127.0.0.1 and `engine.internal`, signed by itself; and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "an engine")])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now - day, now + day)
    names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("engine.internal")]
    made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
    paths = tmp_path / "certificate.pem", tmp_path / "key.pem"
    paths[0].write_bytes(made.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    paths[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    _tls.cache_clear()
    yield paths
    _tls.cache_clear()


class TestTls:
    async def test_a_certificate_is_trusted_if_the_environment_says_so_and_else_named_as_the_reason(
        self, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        served.load_cert_chain(*certificate)
        peer = Peer(OK)
        async with peer.serving(ssl=served) as url, clients() as made:
            to = upstream(url.replace("http:", "https:"))
            for wire in (True, False):
                status, message = await outcome(made, to, wire=wire)
                assert status == 503
                assert "its certificate is not trusted" in message
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
            _tls.cache_clear()
            for _ in range(2):
                assert (await outcome(made, to, wire=True))[0] == 200
            assert peer.accepted == 1  # none was refused in its own application, and the last is kept

    async def test_the_trusted_certificates_are_read_beside_the_event_loop(
        self, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        threads = []
        real = ssl.create_default_context

        def create() -> ssl.SSLContext:
            threads.append(threading.current_thread())
            return real()

        monkeypatch.setattr("interception.connecting.ssl.create_default_context", create)
        served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        served.load_cert_chain(*certificate)
        async with Peer(OK).serving(ssl=served) as url, clients() as made:
            await outcome(made, upstream(url.replace("http:", "https:")), wire=True)
        assert threads
        assert threading.main_thread() not in threads

    async def test_the_dot_of_a_full_name_is_in_no_certificate(
        self, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        served.load_cert_chain(*certificate)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        loop = asyncio.get_running_loop()
        real = loop.getaddrinfo
        monkeypatch.setattr(loop, "getaddrinfo", lambda host, *args, **named: real("127.0.0.1", *args, **named))
        async with Peer(OK).serving(ssl=served) as url, clients() as made:
            to = upstream(url.replace("http://127.0.0.1", "https://engine.internal."))
            assert (await outcome(made, to, wire=True))[0] == 200

    async def test_a_handshake_without_an_end_is_504_and_leaves_nothing(self) -> None:
        ended = asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()
            ended.set()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        async with server, clients() as made:
            url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
            status, message = await outcome(made, upstream(url, connect_timeout=0.05), wire=True)
            assert status == 504
            assert "could not be connected within 0.05 s" in message
            await asyncio.wait_for(ended.wait(), 30)


class TestKeptConnections:
    @pytest.mark.parametrize("linger", [None, 0], ids=["closed", "reset"])
    async def test_one_whose_end_is_there_but_not_told_yet_is_not_written_to(self, linger: int | None) -> None:
        """A busy loop comes round to it late, and a request must not be sent twice."""
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setblocking(False)
            loop = asyncio.get_running_loop()
            async with clients() as made:
                to = upstream(f"http://127.0.0.1:{listening.getsockname()[1]}/v1")
                for _ in range(2):
                    calling = asyncio.create_task(outcome(made, to, wire=True))
                    accepted, _ = await asyncio.wait_for(loop.sock_accept(listening), 30)
                    await loop.sock_recv(accepted, 65536)
                    accepted.send(OK)
                    assert (await calling)[0] == 200
                    if linger is not None:
                        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, linger))
                    accepted.close()  # and the next request is sent before the loop hears of it

    async def test_one_without_a_request_for_longer_than_servers_keep_theirs_is_not_used_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        peer = Peer(OK)
        async with peer.serving() as url, clients() as made:
            assert (await outcome(made, upstream(url), wire=True))[0] == 200
            [wire] = [wire for wire in made._wires.values() if wire is not None]
            monkeypatch.setattr(wire, "_free", [(kept, since - KEEPALIVE) for kept, since in wire._free])
            assert (await outcome(made, upstream(url), wire=True))[0] == 200
        assert peer.accepted == 2

    async def test_on_one_that_is_free_a_request_leaves_at_once(self) -> None:
        peer = Peer(OK)
        async with peer.serving() as url, clients() as made:
            sending = Sending(upstream(url), f"{url}/x", CIMultiDict())
            await outcome(made, sending.upstream, wire=True)
            posting = made.post(sending, "id", b"[]")
            await until(lambda: len(peer.requests) == 2)  # though nobody has entered it
            async with posting as answer:
                assert await answer.read() == b"ok"
            posting.drop()  # has no say any more
            await outcome(made, sending.upstream, wire=True)
            assert (peer.accepted, peer.open) == (1, 1)

    async def test_and_is_cut_if_its_rollout_ends_before_the_call_has_begun(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with unsearched(), rollout() as running:
            running.upstream.then(answers(WIRE.body()), does(Step.HANG))
            await running.call(WIRE, WIRE.request())
            add, held = Ledger.add, list[weakref.ref[Exchange]]()

            def added(ledger: Ledger, call: Call, *, key: str | None) -> None:
                add(ledger, call, key=key)
                held.append(weakref.ref(call.exchange))
                call.exchange.cancel(Failure(409, "over"))  # its task has not run

            monkeypatch.setattr(Ledger, "add", added)
            async with running.open(WIRE, WIRE.request()) as response:
                assert response.status == 409
            await until(lambda: running.upstream.calls == 2 and running.upstream.abandoned == 1)
            assert not open_of(running.server.upstreams)
            running.end()
            await until(lambda: held[0]() is None)

    async def test_none_is_kept_once_the_server_has_stopped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("interception.wire.KEEPALIVE", 3600.0)
        peer = Peer(OK)
        async with peer.serving() as url, clients() as made:
            calling = asyncio.create_task(outcome(made, upstream(url), wire=True))
            await asyncio.sleep(0)
            await made.close()
            assert (await calling)[0] == 200
            await until(lambda: peer.accepted == 1 and not peer.open)

    async def test_an_answer_that_was_not_read_to_its_end_leaves_none_that_served_before(self) -> None:
        peer = Peer(OK, with_length(b"ok", length=5), OK)
        async with peer.serving() as url, clients() as made:
            to = upstream(url)
            assert (await outcome(made, to, wire=True))[0] == 200
            async with made.post(Sending(to, f"{to.base_url}/x", CIMultiDict()), "id", b"{}") as answer:
                assert await answer.content.readany() == b"ok"
            assert (await outcome(made, to, wire=True))[0] == 200
        assert peer.accepted == 2


@pytest.mark.parametrize("size", [2, PIECE], ids=["small", "large"])
async def test_a_refusal_that_comes_before_the_request_is_the_answer(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers that are full say so as soon as they are connected to."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 503 Full\r\nContent-Length: 4\r\nRetry-After: 1\r\n\r\nfull")
        writer.close()

    connect = Origin.connect

    async def late(origin: Origin, protocol: Callable[[], Connection]) -> Connection:
        connection = await connect(origin, protocol)
        await connection.lost
        return connection

    monkeypatch.setattr(Origin, "connect", late)
    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    async with server, clients() as made:
        status, headers, body = await outcome(made, upstream(url), wire=True, body=b"x" * size)
        assert (status, dict(headers)["Retry-After"], body) == (503, "1", b"full")


class TestWhatIsLeftBehind:
    @pytest.mark.parametrize("loop", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
    @pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
    def test_a_call_cancelled_twice_at_any_moment_leaves_no_connection(
        self, loop: Any, tls: bool, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        served.load_cert_chain(*certificate)

        made_by_the_loop = Connection.connection_made

        async def cancelled_after(moments: int | None, url: str) -> None:
            """None: as soon as it is connected."""
            made = UpstreamClients()
            calling = asyncio.create_task(outcome(made, upstream(url), wire=True))
            if moments is None:
                connected = asyncio.Event()

                def cancelled(connection: Connection, transport: asyncio.BaseTransport) -> None:
                    made_by_the_loop(connection, transport)
                    calling.cancel()
                    connected.set()

                with monkeypatch.context() as patched:
                    patched.setattr(Connection, "connection_made", cancelled)
                    await connected.wait()
            for _ in range(moments or 0):
                await asyncio.sleep(0)
            for _ in range(2):
                calling.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await calling
            async with asyncio.timeout(20):  # in order, TLS is closed within 30
                await until(lambda: not open_of(made))
                await made.close()

        async def main() -> None:
            peer = Peer(with_length(b"ok", length=9))
            async with peer.serving(ssl=served if tls else None) as url:
                for moments in (None, *range(40)):
                    await cancelled_after(moments, url.replace("http:", "https:") if tls else url)
                await until(lambda: not peer.open and asyncio.all_tasks() == {asyncio.current_task()})

        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(main())

    async def test_nor_does_one_whose_request_is_never_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listening.setblocking(False)
        async with clients() as made:
            to = upstream(f"http://127.0.0.1:{listening.getsockname()[1]}/v1")
            made_by_asyncio = Connection.connection_made

            def with_little_room(connection: Connection, transport: asyncio.BaseTransport) -> None:
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
                made_by_asyncio(connection, transport)

            monkeypatch.setattr(Connection, "connection_made", with_little_room)
            calling = asyncio.create_task(outcome(made, to, wire=True, body=b"x" * PIECE))
            await until(lambda: bool(open_of(made)))
            [connection] = open_of(made)
            transport = connection.transport
            assert transport is not None
            await until(lambda: transport.get_write_buffer_size() > 0)
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
            await asyncio.wait_for(connection.lost, 30)  # closed, it would wait for the peer to read
        listening.close()

    async def test_what_is_kept_without_a_request_is_closed_after_a_while(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("interception.wire.KEEPALIVE", 0.05)
        peer = Peer(OK)
        async with peer.serving() as url, clients() as made:
            assert (await outcome(made, upstream(url), wire=True))[0] == 200
            await until(lambda: not peer.open)
            assert (await outcome(made, upstream(url), wire=True))[0] == 200

    async def test_a_stream_whose_body_ends_after_its_last_event_keeps_its_connection(self) -> None:
        peer = Peer(without_end(WIRE.stream()))
        async with peer.serving() as url, rollout(base_url=url) as running:
            for _ in range(3):
                answer = await running.call(WIRE, WIRE.request(stream=True))
                assert answer.status == 200
                [connection] = open_of(running.server.upstreams)
                assert connection.tap is None  # which has the rollout
                peer.says(b"0\r\n\r\n")
                await until(partial(getattr, connection, "reusable"))
            assert peer.accepted == 1

    @pytest.mark.parametrize("more", [b"", b"2\r\n: \r\n" * 1000], ids=["silent", "goes on"])
    async def test_one_whose_body_does_not_end_is_cut(self, more: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("interception.wire.LINGER", 0.05)
        peer = Peer(without_end(WIRE.stream()))
        async with peer.serving() as url, rollout(base_url=url) as running:
            assert (await running.call(WIRE, WIRE.request(stream=True))).status == 200
            peer.says(more)
            await until(lambda: not peer.open and not open_of(running.server.upstreams))

    async def test_what_comes_without_a_request_ends_the_connection(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("interception.wire.KEEPALIVE", 3600.0)
        peer = Peer(OK, OK)
        async with peer.serving() as url, clients() as made:
            assert (await outcome(made, upstream(url), wire=True))[0] == 200
            [connection] = open_of(made)
            peer.says(b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\n\r\n")
            await asyncio.wait_for(connection.lost, 30)
            assert (await outcome(made, upstream(url), wire=True))[0] == 200
        assert peer.accepted == 2


class TestAddresses:
    async def test_connections_are_spread_over_all_that_a_name_has(self, monkeypatch: pytest.MonkeyPatch) -> None:
        peers = Peer(OK), Peer(OK)
        async with peers[0].serving() as one, peers[1].serving() as other, clients() as made:
            ports = [int(url.split(":")[2].removesuffix("/v1")) for url in (one, other)]

            async def getaddrinfo(*_: Any, **__: Any) -> Any:
                return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)) for port in ports]

            monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
            to = upstream("http://engines.internal/v1")
            told = await asyncio.gather(*(outcome(made, to, wire=True) for _ in range(8)))
            assert {status for status, *_ in told} == {200}
        assert [peer.accepted for peer in peers] == [4, 4]

    async def test_one_that_refuses_is_passed_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        peer = Peer(OK)
        async with peer.serving() as url, clients() as made:
            with socket.socket() as nobody:
                nobody.bind(("127.0.0.1", 0))  # and does not listen
                ports = nobody.getsockname()[1], int(url.split(":")[2].removesuffix("/v1"))

                async def getaddrinfo(*_: Any, **__: Any) -> Any:
                    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)) for port in ports]

                monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
                to = upstream("http://engines.internal/v1")
                told = await asyncio.gather(*(outcome(made, to, wire=True) for _ in range(4)))
                assert {status for status, *_ in told} == {200}

    def test_the_family_that_the_resolver_puts_first_stays_first(self) -> None:
        found: Any = [(6, "a"), (6, "b"), (4, "c"), (6, "d"), (4, "e")]
        assert [_from(0, found), _from(4, found)] == [
            [(6, "a"), (6, "b"), (6, "d"), (4, "c"), (4, "e")],
            [(6, "b"), (6, "d"), (6, "a"), (4, "c"), (4, "e")],
        ]

    async def test_a_name_is_looked_up_once_for_all_that_connect_and_again_when_they_are_old(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []
        loop = asyncio.get_running_loop()
        real = loop.getaddrinfo

        async def getaddrinfo(host: str, *args: Any, **named: Any) -> Any:
            asked.append(host)
            return await real("127.0.0.1", *args, **named)

        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
        peer = Peer(OK)
        async with peer.serving() as url, clients() as made:
            to = upstream(url.replace("127.0.0.1", "engine.internal"))
            told = await asyncio.gather(*(outcome(made, to, wire=True) for _ in range(20)))
            assert {status for status, *_ in told} == {200}
            assert peer.accepted > 1
            assert asked == ["engine.internal"]
            monkeypatch.setattr("interception.connecting.ADDRESSES_KEPT", -ADDRESSES_KEPT)
            await asyncio.gather(*(outcome(made, to, wire=True) for _ in range(40)))
            assert len(asked) > 1

    async def test_one_that_could_not_be_looked_up_is_looked_up_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        real = loop.getaddrinfo
        failures = [socket.gaierror(socket.EAI_AGAIN, "not now")]

        async def getaddrinfo(host: str, *args: Any, **named: Any) -> Any:
            if failures:
                raise failures.pop()
            return await real("127.0.0.1", *args, **named)

        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
        async with Peer(OK).serving() as url, clients() as made:
            to = upstream(url.replace("127.0.0.1", "engine.internal"))
            assert (await outcome(made, to, wire=True))[0] == 503
            assert (await outcome(made, to, wire=True))[0] == 200

    async def test_a_lookup_ends_with_the_server(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = asyncio.Event()

        async def getaddrinfo(*_: Any, **__: Any) -> Any:
            asked.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        async with clients() as made:
            calling = asyncio.create_task(outcome(made, upstream("http://engine.internal/v1"), wire=True))
            await asked.wait()
            calling.cancel()
            await asyncio.wait([calling])
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})


class TestHeaders:
    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
    async def test_a_status_that_is_none_is_not_relayed(self, stream: bool) -> None:
        kind = b"Content-Type: " + (b"text/event-stream" if stream else b"application/json")
        raw = with_length(WIRE.stream() if stream else WIRE.body(), kind).replace(b"200 OK", b"099 Hm")
        async with Peer(raw).serving() as url, rollout(base_url=url) as running:
            answer = await running.call(WIRE, WIRE.request(stream=stream))
            assert (answer.status, "answered 99" in str(answer.json)) == (502, True)

    @pytest.mark.parametrize("value", ["a\r\nX-B: b", "a\nb", "a\rb", "a\0b"])
    async def test_what_would_be_two_headers_is_refused_and_never_sent(self, value: str) -> None:
        peer = Peer(OK)
        async with peer.serving() as url, clients() as made:
            with pytest.raises(Failure, match="line break") as refused:
                await outcome(made, upstream(url), wire=True, headers=[("X-A", value)])
            assert refused.value.status == 400
        assert not peer.accepted

    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
    async def test_an_upstreams_that_no_header_may_have_go_on_without(self, stream: bool) -> None:
        kind = b"Content-Type: " + (b"text/event-stream" if stream else b"application/json")
        body = WIRE.stream() if stream else WIRE.body()
        async with (
            Peer(with_length(body, kind, b"X-A: a\x01\x7fb\tc")).serving() as url,
            rollout(base_url=url) as running,
        ):
            answer = await running.call(WIRE, WIRE.request(stream=stream))
            assert (answer.status, answer.headers["X-A"]) == (200, "ab\tc")

    async def test_half_a_head_is_not_quoted(self) -> None:
        peer = Peer(b"HTTP/1.1 200 OK\r\nX-Secret: tell-nobody\r\nX-", then_closes=True)
        async with peer.serving() as url, rollout(base_url=url) as running:
            answer = await running.call(WIRE, WIRE.request())
            assert answer.status == 503
            assert "tell-nobody" not in str(answer.json)


async def test_calls_that_are_sent_alike_share_their_head_but_for_id_and_length() -> None:
    peer = Peer(OK)
    async with peer.serving() as url, clients() as made:
        theirs = {"x-vf-call-id": "theirs", "content-length": "99", "host": "virtual", "x-one": "\u00e9"}
        sending = Sending(upstream(url), f"{url}/x?y=%41", CIMultiDict(theirs))
        for call_id, body in (("first", b"{}"), ("second", b'{"longer": 1}'), ("third", b"")):
            async with made.post(sending, call_id, body) as answer:
                await answer.read()
    for (head, body), call_id in zip(peer.requests, ("first", "second", "third"), strict=True):
        line, *fields = head.decode().removesuffix("\r\n\r\n").split("\r\n")
        told = CIMultiDict[str](tuple(field.split(": ", 1)) for field in fields)
        assert line == "POST /v1/x?y=%41 HTTP/1.1"
        assert told.getall("X-VF-Call-Id") == [call_id]
        assert told.getall("Content-Length") == [str(len(body))]
        assert told.getall("Host") == ["virtual"]
        assert told["x-one"] == "\u00e9"
        assert told["Accept"] == "*/*"
