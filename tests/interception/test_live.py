"""Live streams: what repeats goes on as it comes, and nothing of it is lost however the harness reads."""

import asyncio
import contextlib
import json
import socket
import struct
import weakref
import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from interception.connection import TAPPED, Connection
from interception.dialects import RESPONSES
from interception.dialects.base import Phase, Stream
from interception.serving import _Telling
from interception.sse import SseEvent, sse
from interception.trace import Attempt
from interception.turn import Exchange, Failure
from tests.helpers import until
from tests.interception.scripted import PATIENT, WIRE, WIRES, Step, Wire, events_of, rollout, streams, unsearched

PIECES = [f"piece {number} " for number in range(40)]


def spoken(wire: Wire, pieces: Sequence[str]) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """A stream's events: those before the `pieces`, one for each of them, those after."""
    events = wire.events()
    at = next(number for number, event in enumerate(events) if b'"llo"' in event)
    before, _, after = events[at].partition(b'"llo"')
    return events[: at - 1], [before + json.dumps(piece).encode() + after for piece in pieces], events[at + 1 :]


class Line(asyncio.Transport):
    """Stands for a connection's transport."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = False
        self.unread = 0

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True

    def get_write_buffer_size(self) -> int:
        return self.unread


def answering(*headers: str) -> Connection:
    """A connection on which the head of an answer in chunks has come."""
    connection = Connection(asyncio.get_running_loop(), None, set())
    connection.connection_made(Line())
    connection.expect()
    head = ["HTTP/1.1 200 OK", "Transfer-Encoding: chunked", *headers, "", ""]
    connection.data_received("\r\n".join(head).encode())
    return connection


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class TestTheTap:
    """A connection gives it what comes while its reader sleeps."""

    async def test_what_it_gets_does_not_wake_the_reader_until_it_says_so(self) -> None:
        connection, seen = answering(), list[bytes]()
        reading = asyncio.create_task(connection.readany())
        await asyncio.sleep(0)

        def tap(data: bytes) -> bool:
            seen.append(data)
            return len(seen) < 3

        connection.tap = tap
        connection.data_received(chunk(b"one") + chunk(b"two"))
        connection.data_received(chunk(b"three"))
        await asyncio.sleep(0)
        assert seen == [b"onetwo", b"three"]
        assert not reading.done()
        connection.data_received(chunk(b"four"))
        connection.data_received(chunk(b"five"))  # the reader has been woken: this is for it
        assert await asyncio.wait_for(reading, 30) == b""
        assert not connection.at_eof()
        assert await connection.readany() == b"five"
        assert seen == [b"onetwo", b"three", b"four"]
        connection.tap = None
        reading = asyncio.create_task(connection.readany())
        await asyncio.sleep(0)
        connection.data_received(chunk(b"six"))
        assert await reading == b"six"

    async def test_it_gets_nothing_for_which_nobody_waits(self) -> None:
        connection = answering()
        connection.tap = refused
        connection.data_received(chunk(b"one"))
        assert await connection.readany() == b"one"

    async def test_nor_what_a_reader_that_was_cancelled_waited_for(self) -> None:
        connection = answering()
        reading = asyncio.create_task(connection.readany())
        await asyncio.sleep(0)
        connection.tap = refused
        reading.cancel()
        connection.data_received(chunk(b"one"))
        await asyncio.wait({reading})
        assert reading.cancelled()

    @pytest.mark.parametrize("data", [zlib.compress(b"aa"), b"a" * (TAPPED + 1)], ids=["compressed", "large"])
    async def test_nor_what_takes_its_time_to_be_read(self, data: bytes) -> None:
        connection = answering(*["Content-Encoding: deflate"] * (len(data) < TAPPED))
        connection.tap = refused
        reading = asyncio.create_task(connection.readany())
        await asyncio.sleep(0)
        connection.data_received(chunk(data))
        assert set(await reading) == set(b"a")

    async def test_nor_the_end(self) -> None:
        connection = answering()
        connection.tap = refused
        reading = asyncio.create_task(connection.readany())
        await asyncio.sleep(0)
        connection.data_received(chunk(b"last") + b"0\r\n\r\n")
        assert await reading == b"last"
        assert await connection.readany() == b""
        assert connection.at_eof()

    @pytest.mark.parametrize("unread", [0, 1], ids=["sent", "not yet sent"])
    async def test_nor_the_next_answer(self, unread: int) -> None:
        connection = answering()
        connection.tap = refused
        connection.data_received(b"0\r\n\r\n")
        assert isinstance(connection.transport, Line)
        connection.transport.unread = unread  # of the request
        connection.done()
        assert connection.tap is None
        assert connection.reusable == (not unread)


def refused(data: bytes) -> bool:
    pytest.fail(f"it got {data!r}")


class TestFollowing:
    """A reader of an exchange that gets what is released without its task's turn."""

    async def test_it_gets_each_chunk_and_its_task_sleeps_until_one_is_left(self) -> None:
        exchange, got = Exchange(Attempt("c"), never), list[bytes]()

        def follow(chunk: bytes) -> bool:
            got.append(chunk)
            return len(got) < 3

        waiting = asyncio.create_task(exchange.wait(lambda: bool(got), follow=follow))
        other = asyncio.create_task(exchange.wait(lambda: len(exchange.chunks) == 2))
        await asyncio.sleep(0)
        exchange.release(b"1")
        exchange.release(b"2")
        assert await other
        assert not waiting.done()
        exchange.release(b"3")
        exchange.release(b"4")  # its task has been woken: this one is for it
        assert await waiting
        assert got == [b"1", b"2", b"3"]
        exchange.cancel(Failure(503, "over"))

    async def test_the_terminal_chunk_is_for_its_task(self) -> None:
        exchange = Exchange(Attempt("c"), never)
        waiting = asyncio.create_task(
            exchange.wait(lambda: exchange.terminal is not None, follow=lambda chunk: pytest.fail("it was told"))
        )
        await asyncio.sleep(0)
        exchange.release(b"last", terminal=True)
        assert await waiting
        exchange.cancel(Failure(503, "over"))

    @pytest.mark.parametrize("gone", [False, True], ids=["slow", "gone"])
    async def test_nothing_is_written_to_a_harness_that_is_slow_to_read_or_gone(self, gone: bool) -> None:
        line = Line()
        line.aborted, line.unread = gone, not gone
        request: Any = SimpleNamespace(transport=line)
        exchange = Exchange(Attempt("c"), never)
        telling = _Telling(request, exchange)
        assert telling.follow(b"1") is False
        assert telling.chunks == 0
        exchange.cancel(Failure(503, "over"))


async def never(exchange: Exchange) -> None:
    await asyncio.Event().wait()


class TestALiveStream:
    @pytest.mark.parametrize("wire", WIRES, ids=str)
    async def test_comes_event_by_event_and_wakes_nobody_for_those_that_repeat(
        self, wire: Wire, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        woken = 0
        readany = Connection.readany

        async def counted(connection: Connection) -> bytes:
            nonlocal woken
            woken += 1
            return await readany(connection)

        monkeypatch.setattr(Connection, "readany", counted)
        before, pieces, after = spoken(wire, PIECES)
        gates = [asyncio.Event() for _ in pieces]
        async with rollout(streaming="live") as running:
            gated: list[bytes | asyncio.Event] = [step for pair in zip(pieces, gates, strict=True) for step in pair]
            running.upstream.then(streams(*before, *gated, *after))
            async with running.open(wire, wire.request(stream=True)) as response:
                seen = b""
                for piece, gate in zip(pieces, gates, strict=True):
                    while not seen.endswith(piece):
                        seen += await response.content.readany()
                    gate.set()
                seen += await response.read()
            assert [event.raw for event in events_of(seen)] == [*before, *pieces, *after]
            await until(lambda: running.trace.turns[0].complete)
            if wire.dialect is not RESPONSES:  # which says all once more at its end
                assert wire.said(running.trace.turns[0].response) == "".join(PIECES)
            [call] = running.session.ledger
            await until(lambda: call.exchange.ended)
            assert call.exchange.stream is None  # of what a retry would be given that is no part
        assert woken < len(PIECES) / 2

    @pytest.mark.parametrize(("version", "connection"), [("1.0", "keep-alive"), ("1.1", "close")])
    async def test_waits_for_a_harness_that_reads_late_and_loses_nothing(self, version: str, connection: str) -> None:
        texts = [f"{number:05} " + "x" * 2000 for number in range(5000)]  # more than all buffers in between hold
        before, pieces, after = spoken(WIRE, texts)
        async with asyncio.timeout(60), rollout(streaming="live") as running:
            begun = asyncio.Event()
            running.upstream.then(streams(*before, begun, *pieces, *after))
            reader, writer = await asyncio.open_connection("127.0.0.1", int(running.slot.base_url.rpartition(":")[2]))
            body = json.dumps(WIRE.request(stream=True)).encode()
            writer.write(
                f"POST {WIRE.path} HTTP/{version}\r\nHost: h\r\nAuthorization: Bearer {running.slot.model_secret}\r\n"
                f"Content-Length: {len(body)}\r\nConnection: {connection}\r\n\r\n".encode()
                + body
            )
            head = await reader.readuntil(b"\r\n\r\n")
            begun.set()
            await until(lambda: running.trace.turns[0].complete)  # the upstream was not held up
            await running.settled()
            assert not running.trace.turns[0].delivered
            came = await reader.read()
            writer.close()
            await writer.wait_closed()
        if b"chunked" in head:
            came = unchunked(came)
        assert (b"chunked" in head) == (version == "1.1")
        assert came == b"".join([*before, *pieces, *after])

    async def test_of_a_harness_that_left_is_recorded_to_its_end(self) -> None:
        gone = asyncio.Event()
        before, pieces, after = spoken(WIRE, PIECES)
        async with rollout(streaming="live") as running:
            running.upstream.then(streams(*before, *pieces[:20], gone, *pieces[20:], *after))
            async with running.open(WIRE, WIRE.request(stream=True)) as response:
                await response.content.readuntil(b"piece 8 ")
                response.close()
            gone.set()
            await until(lambda: running.trace.turns[0].complete)
            assert WIRE.said(running.trace.turns[0].response) == "".join(PIECES)

    async def test_of_a_harness_that_left_while_it_was_written_to_is_held_by_nobody(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loop, gate, follow = asyncio.get_running_loop(), asyncio.Event(), _Telling.follow
        before, pieces, after = spoken(WIRE, PIECES)

        def followed(telling: _Telling, chunk: bytes) -> bool:
            if gate.is_set():
                harness.close()  # which the server has not been told
            return follow(telling, chunk)

        monkeypatch.setattr(_Telling, "follow", followed)
        async with unsearched(), rollout(streaming="live") as running:
            running.upstream.then(streams(*before, gate, *pieces, *after))
            harness = socket.create_connection(("127.0.0.1", int(running.slot.base_url.rpartition(":")[2])))
            harness.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            harness.setblocking(False)
            body = json.dumps(WIRE.request(stream=True)).encode()
            head = f"POST {WIRE.path} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {running.slot.model_secret}\r\n"
            await loop.sock_sendall(harness, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert await loop.sock_recv(harness, 1)
            [exchange] = [weakref.ref(call.exchange) for call in running.session.ledger]
            gate.set()
            await until(lambda: running.trace.turns[0].complete and not running.server.in_flight)
            running.end()
            await until(lambda: exchange() is None)

    async def test_that_we_fail_to_read_is_said_to_be_our_failure(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        gate, feed = asyncio.Event(), Stream.feed
        before, pieces, _ = spoken(WIRE, PIECES[:1])

        def defective(stream: Stream, event: SseEvent) -> Phase:
            if b"odd" in event.raw:
                raise LookupError("a defect")
            return feed(stream, event)

        monkeypatch.setattr(Stream, "feed", defective)
        async with rollout(streaming="live") as running:
            running.upstream.then(streams(*before, *pieces, gate, sse({"odd": 1}), Step.HANG))
            async with running.open(WIRE, WIRE.request(stream=True)) as response:
                came = await response.content.readuntil(b"piece 0 ")
                gate.set()
                error = events_of(came + await response.read())[-1]
            assert WIRE.is_error_event(error)
            [attempt] = running.trace.turns[0].attempts
            for told in (error.raw.decode(), str(attempt.error)):
                assert "the interception server failed" in told
            assert f"call {attempt.call_id} failed in the interception server" in caplog.text
            assert "a defect" in caplog.text

    async def test_that_we_fail_to_tell_is_cut_and_has_no_second_answer_in_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before, _, _ = spoken(WIRE, PIECES)
        monkeypatch.setattr(type(WIRE.dialect), "keepalive", "none")
        policy = PATIENT.model_copy(update={"keepalive_interval": 0.05})
        async with rollout(streaming="live", policy=policy) as running:
            running.upstream.then(streams(*before, Step.HANG))
            reader, writer = await asyncio.open_connection("127.0.0.1", int(running.slot.base_url.rpartition(":")[2]))
            body = json.dumps(WIRE.request(stream=True)).encode()
            writer.write(
                f"POST {WIRE.path} HTTP/1.0\r\nAuthorization: Bearer {running.slot.model_secret}\r\n"
                f"Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            came = await reader.readuntil(b"\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                while piece := await reader.read(2**16):
                    came += piece
            writer.close()
            assert came.endswith(before[-1])

    @pytest.mark.parametrize("leave", [Step.CLOSE, Step.RESET], ids=["close", "reset"])
    async def test_that_breaks_off_is_told_so_after_all_that_came(self, leave: Step) -> None:
        seen = asyncio.Event()
        before, pieces, _ = spoken(WIRE, PIECES)
        async with rollout(streaming="live") as running:
            running.upstream.then(streams(*before, *pieces, seen, leave))
            async with running.open(WIRE, WIRE.request(stream=True)) as response:
                came = await response.content.readuntil(b"piece 39 ")
                seen.set()
                [*events, error] = events_of(came + await response.read())
            assert [event.raw for event in events] == [*before, *pieces]
            assert WIRE.is_error_event(error)

    async def test_whose_first_event_is_an_error_is_none_though_its_head_came_long_before(self) -> None:
        gate = asyncio.Event()
        error = sse({"error": {"message": "no such model", "type": "invalid_request_error", "code": 404}})
        async with rollout(streaming="live") as running:
            running.upstream.then(streams(gate, error))

            async def ask() -> tuple[int, str]:
                async with running.open(WIRE, WIRE.request(stream=True)) as response:
                    return response.status, await response.text()

            asking = asyncio.create_task(ask())
            await until(lambda: any(turn.attempts[-1].first_byte for turn in running.trace.turns))
            gate.set()
            status, text = await asking
            assert status == 404
            assert "no such model" in text

    async def test_is_silent_from_its_last_event_on(self) -> None:
        """A keepalive is due so long after that one, not so long after the last that woke a task."""
        loop = asyncio.get_running_loop()
        policy = PATIENT.model_copy(update={"keepalive_interval": 0.4})
        before, pieces, _ = spoken(WIRE, PIECES[:6])
        async with asyncio.timeout(60), rollout(streaming="live", policy=policy) as running:
            spaced = [step for piece in pieces for step in (0.1, piece)]
            running.upstream.then(streams(0.05, *before, *spaced, Step.HANG))  # its head first, by itself
            came, spoke = b"", 0.0
            async with running.open(WIRE, WIRE.request(stream=True)) as response:
                while not came.endswith(b": k\n"):
                    spoke = loop.time()
                    came += await response.content.readany()
            # However late the events were, none came after the silence began.
            assert loop.time() - spoke > 0.15
            assert came.count(b": k") == 1


def unchunked(data: bytes) -> bytes:
    whole = []
    while data:
        size, _, data = data.partition(b"\r\n")
        whole.append(data[: int(size, 16)])
        data = data[int(size, 16) + 2 :]
    return b"".join(whole)
