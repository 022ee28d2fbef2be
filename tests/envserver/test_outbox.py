"""Answers to clients of whom some do not read: what waits, in which order, and for how long."""

import asyncio
from collections.abc import Sequence

import pytest
import zmq

from envserver.outbox import BUDGET, IN_ZMQ, Outbox
from envserver.wire import DELTA, REPLY, Part, decode
from tests.helpers import until


class Pipe:
    """A ROUTER of which the test says who reads."""

    def __init__(self) -> None:
        self.closed = False
        self.room: dict[bytes, int] = {}
        self.arrived: list[list[bytes]] = []

    def send(self, parts: Sequence[Part]) -> bool:
        client = parts[0]
        assert isinstance(client, bytes)
        if client == b"gone":
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        if self.room.get(client, 10**9) <= 0:
            return False
        self.room[client] = self.room.get(client, 10**9) - 1
        self.arrived.append([part if isinstance(part, bytes) else part.bytes for part in parts])
        return True


def delta(client: bytes, number: int, size: int = 0) -> list[Part]:
    return [client, b"id", DELTA, b"%d" % number + b"x" * size]


async def test_what_has_no_room_goes_out_in_order_once_there_is_some() -> None:
    pipe = Pipe()
    outbox = Outbox(pipe, lambda client: None)
    pipe.room[b"slow"] = 2
    for number in range(5):
        assert outbox.send(delta(b"slow", number))
        assert outbox.send(delta(b"quick", number))
    assert outbox.waits(b"slow")
    assert not outbox.waits(b"quick")
    assert outbox.waiting(b"slow") > 0
    pipe.room[b"slow"] = 1
    outbox.flush()
    assert outbox.waits(b"slow")
    pipe.room[b"slow"] = 10
    await until(lambda: outbox.empty)  # without being asked: zmq does not always tell
    for client in (b"slow", b"quick"):
        assert [parts[3] for parts in pipe.arrived if parts[0] == client] == [b"0", b"1", b"2", b"3", b"4"]
    outbox.close()


async def test_a_client_that_left_is_no_error() -> None:
    outbox = Outbox(Pipe(), lambda client: None)
    assert outbox.send(delta(b"gone", 1)) is False
    assert outbox.empty


async def test_who_reads_nothing_is_cut_off_and_told_so() -> None:
    pipe = Pipe()
    cut_off: list[bytes] = []
    outbox = Outbox(pipe, cut_off.append, budget=10_000)
    pipe.room[b"deaf"] = 0
    outbox.send([b"deaf", b"one", REPLY, b"x" * 3000])
    while not cut_off:
        outbox.send(delta(b"deaf", 1, 1000))
        assert outbox.waiting(b"deaf") <= 12_000
    assert cut_off == [b"deaf"]
    assert outbox.waiting(b"deaf") < 1000
    outbox.send([b"deaf", b"two", REPLY, b"a later one"])
    pipe.room[b"deaf"] = 10
    outbox.flush()
    (_, one, kind, data), two = pipe.arrived
    assert (one, kind) == (b"one", REPLY)
    assert "cut off" in decode(data)["error"]
    assert two[1:] == [b"two", REPLY, b"a later one"]
    outbox.close()


async def test_zmq_holds_only_so_many_bytes_of_large_frames_for_one_client() -> None:
    """Its own limit counts messages: a thousand of a megabyte each would be within it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        ours.setsockopt(zmq.SNDHWM, 0)
        ours.bind("inproc://large")
        theirs.connect("inproc://large")
        theirs.setsockopt(zmq.RCVTIMEO, 30_000)

        class Sender:
            closed = False

            def send(self, parts: Sequence[Part]) -> bool:
                ours.send_multipart(parts, copy=False)
                return True

        outbox = Outbox(Sender(), lambda client: None)
        size = 1 << 20
        for number in range(2 * IN_ZMQ // size):
            outbox.send(delta(b"c", number, size))
        assert IN_ZMQ / 2 < outbox.waiting(b"c") < 1.1 * IN_ZMQ
        for number in range(2 * IN_ZMQ // size):
            assert (await asyncio.to_thread(theirs.recv_multipart))[3].startswith(b"%dx" % number)
        assert outbox.empty
        outbox.close()
    context.term()


@pytest.mark.parametrize("budget", [None, BUDGET])
async def test_forgetting_a_client_drops_what_waits_for_it(budget: int | None) -> None:
    pipe = Pipe()
    outbox = Outbox(pipe, lambda client: None, budget=budget)
    pipe.room[b"c"] = 0
    outbox.send(delta(b"c", 1))
    outbox.forget(b"c")
    assert outbox.empty
    outbox.close()
