"""Request bodies: large, compressed, broken, slow, and many at once."""

import asyncio
import base64
import gzip
import io
import itertools
import json
import logging
import sys
import time
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import brotli
import orjson
import pytest
from aiohttp import web

from interception import CALL_ID_HEADER, InterceptionServer, InterceptionServerConfig, ServingPolicy, Upstream
from interception.sse import Json
from tests.helpers import until
from tests.interception.fakes import ScriptedModel, answering, hang, hangs_are_failures, new_session
from tests.interception.scripted import WIRE, WIRES, Rollout, Wire, answers, rollout

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

__all__ = ["hangs_are_failures"]
pytestmark = pytest.mark.usefixtures("hangs_are_failures")

MIB = 1024**2
by_wire = pytest.mark.parametrize("wire", WIRES, ids=str)
chunked_or_not = pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])


@pytest.fixture(autouse=True)
def _nothing_is_logged_as_a_defect(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever a sender does, it is no error of ours, and nobody's `Unhandled exception`."""
    caplog.set_level(logging.DEBUG)
    yield
    assert not [record.getMessage() for record in caplog.get_records("call") if record.levelno >= logging.ERROR]


# -- an agent that speaks HTTP by hand ---------------------------------------------------------------


@dataclass
class Heard:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Json:
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value


class Connection:
    """One connection to the server, over which an agent sends what no client library would."""

    def __init__(self, running: Rollout, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._secret = running.slot.model_secret
        self.reader, self.writer = reader, writer

    def head(self, wire: Wire, framing: str, *headers: str) -> None:
        lines = [f"POST {wire.path} HTTP/1.1", "Host: h", f"x-api-key: {self._secret}", framing, *headers, "", ""]
        self.writer.write("\r\n".join(lines).encode())

    async def send(self, wire: Wire, body: bytes, *headers: str, chunked: bool, piece: int) -> None:
        self.head(wire, "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}", *headers)
        for start in range(0, len(body), piece):
            part = body[start : start + piece]
            self.writer.write(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
            await self.writer.drain()
        if chunked:
            self.writer.write(b"0\r\n\r\n")

    async def answer(self) -> Heard:
        status = int((await self.reader.readline()).split()[1])
        headers = {}
        while (line := await self.reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        return Heard(status, headers, await self.reader.readexactly(int(headers["content-length"])))

    async def post(self, wire: Wire, body: bytes, *headers: str, chunked: bool = False, piece: int = 65536) -> Heard:
        answer, _ = await asyncio.gather(self.answer(), self.send(wire, body, *headers, chunked=chunked, piece=piece))
        return answer


@asynccontextmanager
async def connected(running: Rollout) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(running.slot.base_url.rpartition(":")[2]))
    try:
        yield Connection(running, reader, writer)
    finally:
        writer.close()


async def is_usable(connection: Connection, running: Rollout, wire: Wire = WIRE) -> None:
    """The same connection serves the next request."""
    running.upstream.then(answers(wire.answer("next")))
    heard = await connection.post(wire, json.dumps(wire.request("next")).encode())
    assert (heard.status, wire.said(heard.json)) == (200, "next")


def screenshots(size: int, *, wire: Wire = WIRE) -> bytes:
    """A request of about that size, which is one picture."""
    picture = base64.b64encode(bytes(range(256)) * 3).decode() * (size // 1024 + 1)
    return orjson.dumps(wire.request(picture[:size]))


# -- size --------------------------------------------------------------------------------------------


class TestSize:
    @chunked_or_not
    async def test_sixty_megabytes_of_screenshots_go_through_intact(self, chunked: bool) -> None:
        raw = screenshots(60_000_000)
        async with ScriptedModel(answering()) as model, rollout(base_url=model.base_url) as running:
            async with connected(running) as connection:
                heard = await connection.post(WIRE, raw, chunked=chunked, piece=MIB)
            assert heard.status == 200
            assert model.seen[0].body == raw
            assert model.seen[0].headers["Content-Length"] == str(len(raw))
            [turn] = running.trace.turns
            assert turn.request == orjson.loads(raw)

    async def test_also_with_an_override(self) -> None:
        raw = screenshots(30_000_000)
        async with ScriptedModel(answering()) as model, rollout(base_url=model.base_url, model="policy-7") as running:
            async with connected(running) as connection:
                assert (await connection.post(WIRE, raw)).status == 200
            assert orjson.loads(model.seen[0].body) == {**orjson.loads(raw), "model": "policy-7"}

    @by_wire
    @chunked_or_not
    async def test_over_the_cap_is_413_in_the_dialects_shape_and_the_connection_stays_usable(
        self, wire: Wire, chunked: bool
    ) -> None:
        async with rollout(policy=ServingPolicy(body_cap=MIB)) as running, connected(running) as connection:
            heard = await connection.post(wire, screenshots(3 * MIB, wire=wire), chunked=chunked)
            assert heard.status == 413
            assert wire.in_error_shape(heard.json)
            assert "1 MiB" in heard.json["error"]["message"]
            assert CALL_ID_HEADER.lower() in heard.headers
            assert running.trace.turns == []
            await is_usable(connection, running, wire)

    @chunked_or_not
    async def test_the_cap_itself_fits(self, chunked: bool) -> None:
        raw = screenshots(300_000)
        async with rollout(policy=ServingPolicy(body_cap=len(raw))) as running, connected(running) as connection:
            running.upstream.then(answers(WIRE.answer()))
            assert (await connection.post(WIRE, raw, chunked=chunked)).status == 200
            assert (await connection.post(WIRE, raw + b" ", chunked=chunked)).status == 413
            await is_usable(connection, running)

    def test_the_default_cap_is_that_of_the_design(self) -> None:
        assert ServingPolicy().body_cap == 256 * MIB


# -- compression -------------------------------------------------------------------------------------


def raw_deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(body) + packer.flush()


PACKED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "gzip in members": ("gzip", lambda body: gzip.compress(body[:50]) + gzip.compress(body[50:])),
    "deflate": ("deflate", zlib.compress),
    "deflate without a header": ("deflate", raw_deflate),
    "br": ("br", lambda body: brotli.compress(body, quality=3)),
    "zstd": ("zstd", zstd.compress),
    "zstd in frames": ("zstd", lambda body: zstd.compress(body[:50]) + zstd.compress(body[50:])),
    "upper case": (" GZIP ", gzip.compress),
}
by_packing = pytest.mark.parametrize(("encoding", "pack"), PACKED.values(), ids=list(PACKED))
FOUR = {name: PACKED[name] for name in ("gzip", "deflate", "br", "zstd")}
by_encoding = pytest.mark.parametrize(("encoding", "pack"), FOUR.values(), ids=list(FOUR))


class TestCompression:
    @by_packing
    @pytest.mark.parametrize("piece", [None, 1, 7], ids=["at once", "by the byte", "by seven"])
    async def test_it_is_decoded_recorded_and_forwarded_plain(
        self, encoding: str, pack: Callable[[bytes], bytes], piece: int | None
    ) -> None:
        raw = json.dumps(WIRE.request("The quick brown fox — über ☃. " * 50), indent=1).encode()
        async with rollout() as running, connected(running) as connection:
            running.upstream.then(answers(WIRE.answer()))
            heard = await connection.post(
                WIRE, pack(raw), f"Content-Encoding: {encoding}", chunked=piece is not None, piece=piece or 65536
            )
            assert heard.status == 200
            [reply] = running.upstream.replies
            assert reply.body == raw
            assert "Content-Encoding" not in reply.headers
            assert running.trace.turns[0].request == json.loads(raw)

    async def test_identity_is_no_encoding(self) -> None:
        async with rollout() as running, connected(running) as connection:
            running.upstream.then(answers(WIRE.answer()))
            raw = json.dumps(WIRE.request()).encode()
            assert (await connection.post(WIRE, raw, "Content-Encoding: identity")).status == 200

    async def test_a_retry_is_known_whether_it_is_compressed_or_not(self) -> None:
        raw = json.dumps(WIRE.request()).encode()
        async with rollout() as running, connected(running) as connection:
            running.upstream.then(answers(WIRE.answer()))
            first = await connection.post(WIRE, raw)
            retry = "x-stainless-retry-count: 1"
            again = await connection.post(WIRE, gzip.compress(raw), "Content-Encoding: gzip", retry)
            assert again.body == first.body
            assert running.upstream.calls == 1

    @by_encoding
    async def test_a_large_one_is_decoded_intact(self, encoding: str, pack: Callable[[bytes], bytes]) -> None:
        raw = screenshots(8 * MIB)
        async with ScriptedModel(answering()) as model, rollout(base_url=model.base_url) as running:
            async with connected(running) as connection:
                assert (await connection.post(WIRE, pack(raw), f"Content-Encoding: {encoding}")).status == 200
            assert model.seen[0].body == raw

    @by_encoding
    async def test_the_cap_counts_what_it_becomes_and_a_bomb_does_not_go_off(
        self, encoding: str, pack: Callable[[bytes], bytes]
    ) -> None:
        bomb = pack(bytes(64 * MIB))
        async with rollout(policy=ServingPolicy(body_cap=MIB)) as running, connected(running) as connection:
            tracemalloc.start()
            try:
                heard = await connection.post(WIRE, bomb, f"Content-Encoding: {encoding}")
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert heard.status == 413
            assert peak < 8 * MIB
            await is_usable(connection, running)

    @by_wire
    @by_encoding
    @pytest.mark.parametrize(
        "damage",
        [
            lambda packed: packed[:-9],
            lambda packed: packed[:12] + b"\xff\xfe\xfd\xfc" * 8 + packed[44:],
            lambda packed: b"this is not compressed at all" * 9,
            lambda packed: packed + b"and more",
        ],
        ids=["cut short", "damaged", "no such thing", "with a tail"],
    )
    async def test_a_corrupt_one_is_400_in_the_dialects_shape(
        self, wire: Wire, encoding: str, pack: Callable[[bytes], bytes], damage: Callable[[bytes], bytes]
    ) -> None:
        packed = damage(pack(json.dumps(wire.request("The quick brown fox. " * 9)).encode()))
        async with rollout() as running, connected(running) as connection:
            heard = await connection.post(wire, packed, f"Content-Encoding: {encoding}")
            assert heard.status == 400
            assert wire.in_error_shape(heard.json)
            assert running.trace.turns == []
            await is_usable(connection, running, wire)

    async def test_a_corrupt_one_that_is_long_is_400_all_the_same(self) -> None:
        async with rollout() as running, connected(running) as connection:
            heard = await connection.post(WIRE, b"not compressed" * 100_000, "Content-Encoding: gzip")
            assert heard.status == 400
            await is_usable(connection, running)

    @by_wire
    @pytest.mark.parametrize("encoding", ["compress", "gzip, gzip", "aes128gcm", "gzip;q=1"])
    async def test_an_unknown_one_is_415_and_says_what_to_use(self, wire: Wire, encoding: str) -> None:
        async with rollout() as running, connected(running) as connection:
            heard = await connection.post(wire, b"x" * 300_000, f"Content-Encoding: {encoding}")
            assert heard.status == 415
            assert wire.in_error_shape(heard.json)
            assert "zstd" in heard.json["error"]["message"]
            await is_usable(connection, running, wire)


# -- many at once ------------------------------------------------------------------------------------


async def sent_in_slices(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 64 * 1024):
        yield body[start : start + 64 * 1024]


class TestMemory:
    COUNT, SIZE = 32, 4 * MIB

    async def test_many_large_bodies_at_a_slow_upstream_take_about_one_copy_each_and_are_given_back(self) -> None:
        arrived = 0

        async def swallow(request: web.BaseRequest) -> web.StreamResponse:
            nonlocal arrived
            async for _ in request.content.iter_any():
                pass
            arrived += 1
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

        raw = screenshots(self.SIZE)
        whole = self.COUNT * len(raw)
        async with AsyncExitStack() as stack:
            runner = web.ServerRunner(web.Server(swallow, handler_cancellation=True), shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            connector = aiohttp.TCPConnector(limit=0)
            async with InterceptionServer() as server, aiohttp.ClientSession(connector=connector) as http:
                # A rollout each, for equal messages of one rollout would be kept once.
                sessions = [new_session(Upstream(base_url=base_url)) for _ in range(self.COUNT)]
                pairs = [server.register(session) for session in sessions]
                tracemalloc.start()
                try:
                    calls = [
                        asyncio.create_task(
                            http.post(
                                server.base_url + WIRE.path,
                                data=sent_in_slices(raw),
                                headers={"x-api-key": pair[0], "Content-Length": str(len(raw))},
                            ).__aenter__()
                        )
                        for pair in pairs
                    ]
                    await until(lambda: arrived == self.COUNT, timeout=50)
                    held, _ = tracemalloc.get_traced_memory()
                    assert held < 1.3 * whole
                    for pair in pairs:
                        server.unregister(*pair)
                    assert [(await call).status for call in calls] == [409] * self.COUNT
                    sessions.clear()
                    await until(lambda: tracemalloc.get_traced_memory()[0] < 0.1 * whole)
                finally:
                    tracemalloc.stop()


SENDER = """
import http.client, sys
port, path, secret, size = sys.argv[1:]
head, tail = b'{"model":"m","messages":[{"role":"user","content":"', b'"}]}'
body = head + b"x" * (int(size) - len(head) - len(tail)) + tail
connection = http.client.HTTPConnection("127.0.0.1", int(port))
connection.request("POST", path, body, {"x-api-key": secret})
print(connection.getresponse().status)
"""


class TestStalls:
    async def test_a_body_of_the_caps_size_stalls_no_stream(self) -> None:
        """32 streams run while one is read, parsed, recorded and forwarded. Its sender is a process of its own, and the
        time is the CPU's, so that it does not matter how busy the machine is otherwise."""
        cap, streams = 64 * MIB, 32
        over = asyncio.Event()

        async def answer(request: web.Request) -> web.StreamResponse:
            if len(await request.read()) == cap:
                return web.json_response(WIRE.answer())
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            first, *rest = WIRE.events()
            while not over.is_set():
                await response.write(first)
                await asyncio.sleep(0.05)
            await response.write(b"".join(rest))
            return response

        config = InterceptionServerConfig(serving=ServingPolicy(body_cap=cap))
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            ScriptedModel(answer) as model,
            InterceptionServer(config) as server,
            aiohttp.ClientSession(connector=connector) as http,
        ):
            session = new_session(model.upstream)
            pair = server.register(session)
            running = 0

            async def read_stream(number: int) -> float:
                """The longest time that the loop's thread worked without there being an event."""
                nonlocal running
                longest = 0.0
                request = WIRE.request(f"stream {number}", stream=True)
                async with http.post(
                    server.base_url + WIRE.path, json=request, headers={"x-api-key": pair[0]}
                ) as response:
                    await response.content.readany()
                    running += 1
                    before = time.thread_time()
                    while await response.content.readany():
                        now = time.thread_time()
                        longest, before = max(longest, now - before), now
                return longest

            readers = [asyncio.create_task(read_stream(number)) for number in range(streams)]
            await until(lambda: running == streams)
            port = server.base_url.rpartition(":")[2]
            sender = await asyncio.create_subprocess_exec(
                sys.executable, "-c", SENDER, port, WIRE.path, pair[0], str(cap), stdout=asyncio.subprocess.PIPE
            )
            output, _ = await sender.communicate()
            over.set()
            assert output.strip() == b"200"
            assert max(await asyncio.gather(*readers)) < 1.0

    async def test_a_large_body_of_digits_is_no_worse(self) -> None:
        """Integers of more than 64 bits are looked for, in a time that does not hold up the loop."""
        raw = orjson.dumps(WIRE.request("12345678 " * (3 * MIB)))
        async with ScriptedModel(answering()) as model, rollout(base_url=model.base_url) as running:
            ticks = [time.thread_time()]

            async def tick() -> None:
                while True:
                    await asyncio.sleep(0.01)
                    ticks.append(time.thread_time())

            ticking = asyncio.create_task(tick())
            async with connected(running) as connection:
                assert (await connection.post(WIRE, raw)).status == 200
            ticking.cancel()
            assert max(after - before for before, after in itertools.pairwise(ticks)) < 1.0


class TestConnections:
    async def test_three_hundred_slow_calls_of_as_many_rollouts_are_all_in_flight(self) -> None:
        async with ScriptedModel(hang) as model, rollout(base_url=model.base_url) as running:
            rollouts = [running.another_session() for _ in range(300)]
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector) as http:
                url = running.slot.base_url + WIRE.path
                calls = [
                    asyncio.create_task(http.post(url, json=WIRE.request(), headers={"x-api-key": secret}).__aenter__())
                    for _, secret in rollouts
                ]
                await until(lambda: model.open == 300, timeout=45)
                for call in calls:
                    call.cancel()
                await asyncio.wait(calls)
            assert model.open == 300  # a harness that leaves ends no call

    async def test_five_hundred_rollouts_in_a_row_keep_connections_bounded(self) -> None:
        connections: set[Any] = set()

        async def answer(request: web.Request) -> web.StreamResponse:
            connections.add(request.transport)
            return web.json_response(WIRE.answer())

        async with (
            ScriptedModel(answer) as model,
            InterceptionServer() as server,
            aiohttp.ClientSession() as http,
        ):
            for _ in range(500):
                async with (
                    server.acquire(new_session(model.upstream)) as slot,
                    http.post(
                        slot.base_url + WIRE.path, json=WIRE.request(), headers={"x-api-key": slot.model_secret}
                    ) as response,
                ):
                    assert response.status == 200
                    await response.read()
            assert server.load == 0
            assert len(connections) < 10


# -- senders that misbehave --------------------------------------------------------------------------


class TestBadSenders:
    @pytest.mark.parametrize(
        "raw",
        [
            b"\x16\x03\x01\x02\x00\x01 this is TLS, or something",
            b"POST /v1/chat/completions HTTP/9.9\r\n\r\n",
            b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: many\r\n\r\n",
            b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
            b"POST /v1/\xff\xfe HTTP/1.1\r\nHost: h\r\n\r\n",
        ],
    )
    async def test_what_is_no_http_harms_nobody_else(self, raw: bytes) -> None:
        async with rollout() as running, connected(running) as bad, connected(running) as good:
            bad.writer.write(raw)
            line = await bad.reader.readline()
            assert not line or 400 <= int(line.split()[1]) < 500
            await is_usable(good, running)

    async def test_a_sender_that_waits_to_be_told_to_go_on_is_told_so(self) -> None:
        body = json.dumps(WIRE.request()).encode()
        async with rollout() as running, connected(running) as agent:
            running.upstream.then(answers(WIRE.answer()))
            agent.head(WIRE, "Expect: 100-continue", f"Content-Length: {len(body)}")
            assert await asyncio.wait_for(agent.reader.readuntil(b"\r\n\r\n"), 30) == b"HTTP/1.1 100 Continue\r\n\r\n"
            agent.writer.write(body)
            assert (await agent.answer()).status == 200
            await is_usable(agent, running)

    async def test_another_expectation_is_417_in_the_dialects_shape(self) -> None:
        async with rollout() as running, connected(running) as agent:
            agent.head(WIRE, "Expect: the-moon", "Content-Length: 2")
            agent.writer.write(b"{}")
            heard = await agent.answer()
            assert heard.status == 417
            assert WIRE.in_error_shape(heard.json)

    @by_wire
    async def test_a_malformed_chunk_is_told_to_its_sender_only(
        self, wire: Wire, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("interception.inbound.SILENCE", 0.3)
        monkeypatch.setattr("interception.inbound.DRAIN_TIMEOUT", 0.1)
        async with rollout() as running, connected(running) as bad, connected(running) as good:
            bad.head(wire, "Transfer-Encoding: chunked")
            bad.writer.write(b'5\r\n{"mod\r\n')
            await until(lambda: running.session.calls_seen == 1)
            bad.writer.write(b"xyz\r\nno chunk at all\r\n\r\n")
            await is_usable(good, running, wire)
            heard = await bad.answer()
            assert heard.status == 408
            assert wire.in_error_shape(heard.json)
            assert len(running.trace.turns) == 1

    async def test_senders_that_stop_in_the_middle_hold_up_nobody(self) -> None:
        async with rollout() as running, connected(running) as good:
            stopped = []
            for number in range(30):
                reader, writer = await asyncio.open_connection("127.0.0.1", int(running.slot.base_url[17:]))
                connection = Connection(running, reader, writer)
                if number % 2:
                    connection.head(WIRE, "Content-Length: 1000")
                    writer.write(b'{"messages": [')
                else:
                    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: ")
                stopped.append(writer)
            await until(lambda: running.session.calls_seen == 15)
            await is_usable(good, running)
            for writer in stopped:
                writer.transport.abort()
            await running.settled()
            await is_usable(good, running)
            assert len(running.trace.turns) == 2

    async def test_a_sender_by_the_byte_is_answered_in_the_end(self) -> None:
        raw = json.dumps(WIRE.request()).encode()
        async with rollout() as running, connected(running) as slow, connected(running) as good:
            slow.head(WIRE, f"Content-Length: {len(raw)}")
            for byte in raw[:-1]:
                slow.writer.write(bytes([byte]))
                await slow.writer.drain()
            await is_usable(good, running)
            running.upstream.then(answers(WIRE.answer("patience")))
            slow.writer.write(raw[-1:])
            assert WIRE.said((await slow.answer()).json) == "patience"

    @by_wire
    @pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"null", b'"\xff"', b"[" * 100_000, b'{"a":' * 2000 + b"1"])
    async def test_what_is_no_json_object_is_400_and_the_connection_stays_usable(self, wire: Wire, raw: bytes) -> None:
        async with rollout() as running, connected(running) as connection:
            heard = await connection.post(wire, raw)
            assert heard.status == 400
            assert wire.in_error_shape(heard.json)
            assert running.trace.turns == []
            await is_usable(connection, running, wire)

    async def test_a_refused_sender_may_send_all_of_its_body_first(self) -> None:
        """As SDKs do: they look at the answer only then."""
        async with rollout() as running, connected(running) as connection:
            connection._secret = "wrong"
            heard = await connection.post(WIRE, screenshots(5 * MIB))
            assert heard.status == 401
            connection._secret = running.slot.model_secret
            await is_usable(connection, running)

    async def test_bytesio_of_a_client_library(self) -> None:
        raw = screenshots(2 * MIB)
        async with ScriptedModel(answering()) as model, rollout(base_url=model.base_url) as running:
            headers = {"x-api-key": running.slot.model_secret}
            url = running.slot.base_url + WIRE.path
            async with running.http.post(url, data=io.BytesIO(raw), headers=headers) as response:
                assert response.status == 200
            assert model.seen[0].body == raw
