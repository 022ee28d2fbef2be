"""A turn's request over the wire is what aiohttp's own client would make of it, and leaves nothing behind."""

import asyncio
import gzip
import logging
import socket
import struct
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import brotli
import pytest
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ClientRequest
from aiohttp.connector import Connection
from multidict import CIMultiDict

from interception import Upstream
from interception.turn import Failure
from interception.upstream import PIECE, UpstreamClients, failure
from interception.wire import Wire
from tests.helpers import until
from tests.interception.scripted import WIRE, answers, rollout

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

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**20)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self.open += 1
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


async def ends_seen(made: UpstreamClients) -> None:
    """Returns once no kept connection is open on our side."""
    connectors = [client.connector for client, _ in made._clients.values()]
    pools = [pool for connector in connectors if connector is not None for pool in connector._conns.values()]
    await until(lambda: not any(protocol.is_connected() for pool in pools for protocol, _ in pool))


async def outcome(made: UpstreamClients, to: Upstream, *, wire: bool, headers: Any = (), body: bytes = b"{}") -> Any:
    """Of one request: status, headers and body, or what was raised."""
    send = made.post if wire else lambda *args, **named: made.request(args[0], "POST", *args[1:], **named)
    try:
        async with send(to, f"{to.base_url}/x?y=%41", headers=CIMultiDict(headers), body=body) as answer:
            told = [(name, value) for name, value in answer.headers.items() if name != "Date"]
            return answer.status, told, await answer.read()
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        return type(error), failure(error, to).status


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
    "longer than it says": with_length(b"okok", length=2),
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
    "length and chunks": CHUNKED + b"Content-Length: 2\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "two at once": OK + OK,
    "until the end": b"HTTP/1.1 200 OK\r\nContent-Type: a/b\r\n\r\nok",
    "of old": b"HTTP/1.0 200 OK\r\n\r\nok",
    "closing": with_length(b"ok", b"Connection: close"),
    **{name: with_length(body, b"Content-Encoding: " + name.encode()) for name, body in PACKED.items()},
    "no gzip": with_length(b"ok", b"Content-Encoding: gzip"),
    "half a gzip": with_length(PACKED["gzip"][:-5], b"Content-Encoding: gzip"),
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
        for _ in range(20):
            assert (await outcome(made, upstream(url), wire=True))[0] == 200
            await ends_seen(made)
    assert peer.accepted == 20


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
            kind, status = await outcome(made, upstream(url), wire=True)
            assert issubclass(kind, aiohttp.ClientError)
            assert status == 503


async def test_one_that_was_lost_before_it_could_be_written_to_is_too(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = aiohttp.TCPConnector.connect

    async def lost(connector: aiohttp.TCPConnector, *args: Any, **named: Any) -> Connection:
        connection = await connect(connector, *args, **named)
        assert connection.protocol is not None
        connection.protocol.connection_lost(ConnectionResetError("gone"))
        return connection

    monkeypatch.setattr(aiohttp.TCPConnector, "connect", lost)
    async with Peer(OK).serving() as url, clients() as made:
        assert await outcome(made, upstream(url), wire=True) == (aiohttp.ServerDisconnectedError, 503)


async def test_timeouts_and_refusals_are_told_as_before() -> None:
    peer = Peer(OK)
    peer.hold = asyncio.Event()
    async with peer.serving() as url, clients() as made:
        kind, status = await outcome(made, upstream(url, idle_timeout=0.05), wire=True)
        assert issubclass(kind, TimeoutError)
        assert status == 504
        peer.hold.set()
        await until(lambda: not peer.open)
    for unreachable in (url, "http://nowhere.invalid/v1"):
        async with clients() as made:
            assert (await outcome(made, upstream(unreachable), wire=True))[1] == 503


async def test_a_connection_that_is_not_made_in_time_is_504(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("aiohttp.connector.aiohappyeyeballs.start_connection", never)
    async with clients() as made:
        kind, status = await outcome(made, upstream("http://127.0.0.1:9/v1", connect_timeout=0.01), wire=True)
        assert (kind, status) == (aiohttp.ConnectionTimeoutError, 504)


async def test_a_peer_that_speaks_no_tls_is_503() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 speak HTTP\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server, clients() as made:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        kind, status = await outcome(made, upstream(url), wire=True)
        assert issubclass(kind, aiohttp.ClientConnectorError)
        assert status == 503


@pytest.mark.parametrize("body", [b"{}", b"x" * PIECE, b"x" * (PIECE + 1)], ids=["small", "a piece", "more"])
async def test_bodies_of_any_size_arrive_whole(body: bytes) -> None:
    peer = Peer(OK)
    async with peer.serving() as url, clients() as made:
        for _ in range(2):
            assert (await outcome(made, upstream(url), wire=True, body=body))[0] == 200
    assert [got for _, got in peer.requests] == [body] * 2
    assert peer.accepted == 1


class TestWhatIsLeftBehind:
    @pytest.mark.parametrize("rounds", range(12))
    async def test_a_call_cancelled_twice_at_any_moment_leaves_no_connection(self, rounds: int) -> None:
        peer = Peer(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok")
        async with peer.serving() as url, clients() as made:
            to = upstream(url)
            calling = asyncio.create_task(outcome(made, to, wire=True))
            for _ in range(rounds):
                await asyncio.sleep(0)
            calling.cancel()
            await asyncio.sleep(0)
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
            await until(lambda: not peer.open)
            connector = made._client(to)[0].connector
            assert connector is not None
            assert not connector._acquired
            assert not any(connector._conns.values())

    async def test_nor_does_one_whose_request_is_never_read(self) -> None:
        lost = asyncio.Event()
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listening.setblocking(False)
        async with clients() as made:
            to = upstream(f"http://127.0.0.1:{listening.getsockname()[1]}/v1")
            wire = made._client(to)[1]
            assert wire is not None
            protocols: list[ResponseHandler] = []

            class Kept(ResponseHandler):
                def connection_made(self, transport: Any) -> None:
                    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
                    super().connection_made(transport)
                    protocols.append(self)

                def connection_lost(self, exc: BaseException | None) -> None:
                    super().connection_lost(exc)
                    lost.set()

            wire._connector._factory = lambda: Kept(asyncio.get_running_loop())  # type: ignore[assignment]
            calling = asyncio.create_task(outcome(made, to, wire=True, body=b"x" * PIECE))
            await until(lambda: bool(protocols))
            transport = protocols[0].transport
            assert transport is not None
            await until(lambda: transport.get_write_buffer_size() > 0)
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
            await asyncio.wait_for(lost.wait(), 30)  # closed, it would wait for the peer to read
        listening.close()


class TestHeaders:
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


class TestAnotherAiohttp:
    """Its undocumented parts are others: turns go by its client, and it is said once."""

    @pytest.mark.parametrize(
        ("part", "name", "result"),
        [
            (ClientRequest, "__init__", 0),
            (aiohttp.TCPConnector, "connect", 0),
            (Connection, "protocol", None),
            (ResponseHandler, "set_response_params", 0),
            (ResponseHandler, "start_timeout", None),
            (ResponseHandler, "data_received", 0),
        ],
        ids=lambda value: getattr(value, "__name__", value),
    )
    async def test_turns_go_by_its_client(
        self,
        part: type,
        name: str,
        result: int | None,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        real = Wire.__init__

        def as_if(self: Wire, *args: Any) -> None:
            with monkeypatch.context() as patched:
                if result is None:
                    patched.delattr(part, name)
                else:
                    patched.setattr(part, name, lambda self: result)  # it takes nothing of what we give it
                real(self, *args)

        monkeypatch.setattr(Wire, "__init__", as_if)
        with caplog.at_level(logging.WARNING, "interception"):
            async with rollout() as running:
                for text in "ab":
                    running.upstream.then(answers(WIRE.answer(text)))
                    assert WIRE.said((await running.call(WIRE, WIRE.request())).json) == text
                other = upstream(running.upstream.base_url, idle_timeout=31)
                assert running.server.upstreams._client(other)[1] is None
        assert len([record for record in caplog.records if "slower way" in record.message]) == 1

    async def test_this_one_is_known(self, caplog: pytest.LogCaptureFixture) -> None:
        async with rollout() as running:
            running.upstream.then(answers(WIRE.answer()))
            await running.call(WIRE, WIRE.request())
            assert running.server.upstreams._client(running.session.upstream)[1] is not None
        assert "slower way" not in caplog.text
