"""Rows of the sheet's table that are about frames: hostile ones, many, large, and those nobody reads."""

import asyncio
import random
from collections import Counter

import msgpack
import psutil
import pytest
import zmq

from envserver.limits import MIB, PoolPolicy
from envserver.wire import MAX_ID
from tests.envserver.caller import Caller
from tests.envserver.test_pool import pool_of
from tests.helpers import until

HARD = "tests.envserver.hardships"

WORDS = [
    b"run",
    b"cancel",
    b"health",
    b"reply",
    b"delta",
    b"probe",
    b"1",
    b"",
    b"\xff\xfe",
    b"\x80",
    b"\xc1",
    b"\xdf\xff\xff\xff\xff",  # a map of four thousand million entries
    b"\xc7\x0c\xff" + b"\xff" * 12,  # a time that never comes
    b"\x91" * 5000,
    msgpack.packb({"request_id": "1"}),
    msgpack.packb({"request_id": b"\xff\xfe"}),
    msgpack.packb({"request_id": ["a", "list"]}),
    msgpack.packb({"do": 1, "deltas": "many"}),
]


def fuzzed(luck: random.Random) -> list[bytes]:
    """Half of it looks like a request, but for what is in it."""
    if luck.random() < 0.5:
        return [luck.choice(WORDS), luck.choice(WORDS[:3]), luck.choice(WORDS)]
    parts = [luck.choice(WORDS) if luck.random() < 0.7 else luck.randbytes(luck.choice([0, 1, MAX_ID, 300]))]
    return parts + [luck.choice(WORDS) for _ in range(luck.choice([0, 1, 1, 3, 4]))]


async def test_row_25_10_000_fuzzed_frames_and_a_thousand_askers_that_left_hurt_nobody() -> None:
    luck = random.Random(25)
    async with pool_of(2) as (pool, caller):
        workers = [*pool._dispatcher.ready]
        with Caller(pool.address) as hostile:
            for number in range(10_000):
                await hostile.socket.send_multipart(fuzzed(luck))
                if number % 500 == 0:
                    assert (await caller.run(echo=number))["echo"] == number
            # Its own good request is answered like any, after all of these.
            await hostile.send("run", {"echo": "good"}, b"good")
            while (answer := await hostile.receive())[0] != b"good":
                assert isinstance(answer[2]["success"], bool)
            assert answer[2]["echo"] == "good"
        for _ in range(20):
            with Caller(pool.address) as leaving:
                for _ in range(50):
                    await leaving.send("health")
                await leaving.receive()
        assert (await caller.ask("health"))["ready"] == 2
        assert pool._dispatcher.ready == workers, "the same two processes"
        assert all([(await caller.run())["success"] for _ in range(20)])
        await until(lambda: pool.in_flight == 0)
        assert pool._dispatcher._clients == {}
        assert pool.dropped > 1000


async def test_row_25_a_worker_that_sends_what_is_no_answer_hurts_nobody() -> None:
    """On another's pool one reply of two frames was the end of it."""
    luck = random.Random(25)
    frames = [[b"its id", b"reply"], [b""], [b"its id"], [b"its id", b"nonsense", b"\x80"], [b"x" * 100_000] * 3]
    frames += [[b"probe", b"reply", b"\xc1"], [b"1", b"reply", b"\x80"], [b"its id", b"delta", b"\x80", b""]]
    frames += [fuzzed(luck) for _ in range(500)]
    async with pool_of(1, "hard", module=HARD) as (pool, caller):
        assert (await caller.run())["success"]  # which has used up the id "1"
        ((kind, reply),) = await caller.answers(await caller.send("run", {"do": "send", "frames": frames}))
        assert (kind, reply["success"]) == (b"reply", True)
        assert pool.in_flight == 0
        assert pool.dropped > 300
        assert (await caller.run())["pid"] == reply["pid"]


async def test_row_28_20_000_requests_are_each_answered_once() -> None:
    answered: Counter[bytes] = Counter()
    async with pool_of(2) as (pool, caller):
        for start in range(0, 20_000, 500):
            sent = {await caller.send("run", {"echo": start}) for _ in range(500)}
            while not sent <= answered.keys():
                request_id, kind, reply = await caller.receive()
                assert (kind, reply["success"], reply["echo"]) == (b"reply", True, start)
                answered[request_id] += 1
        # What is asked last is answered last: nothing else is on the way.
        assert (await caller.run())["success"]
        assert set(answered.values()) == {1}
        assert answered.total() == 20_000
        assert pool.in_flight == 0


async def test_a_large_request_does_not_keep_others_waiting() -> None:
    async with pool_of(2) as (pool, caller):
        with Caller(pool.address) as other:
            large = await caller.send("run", {"blob": b"x" * (24 * MIB)})
            for _ in range(20):
                assert (await other.ask("health"))["ready"] == 2
                assert (await other.run())["success"]
            assert (await caller.reply(large))["size"] == 24 * MIB


async def test_clients_that_never_read_cost_their_budget_and_no_more_and_others_are_served() -> None:
    """Two of them leave 300 MB each unread."""
    policy = PoolPolicy(client_budget=4 * MIB)
    context = zmq.Context()
    async with pool_of(2, policy=policy) as (pool, caller):
        before = psutil.Process().memory_info().rss
        most = 0
        deaf = [context.socket(zmq.DEALER) for _ in range(2)]
        try:
            for socket in deaf:
                socket.setsockopt(zmq.RCVHWM, 1)
                socket.connect(pool.address)
                socket.send_multipart([b"id", b"run", msgpack.packb({"deltas": 300, "size": MIB, "do": "hold"})])
            await until(lambda: pool.in_flight > 0)
            while pool.in_flight:
                assert (await caller.run())["success"]
                most = max(most, psutil.Process().memory_info().rss)
            assert most - before < 150 * MIB
            for socket in deaf:  # who reads after all is told
                *deltas, reply = await asyncio.to_thread(_read_to_the_reply, socket)
                assert len(deltas) < 100
                assert "cut off" in msgpack.unpackb(reply)["error"]
        finally:
            for socket in deaf:
                socket.close(0)
            context.term()


async def test_a_client_cut_off_with_more_runs_under_way_than_it_may_be_told_of_costs_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The answers that say so would be more than its budget allows."""
    policy = PoolPolicy(client_budget=MIB // 4)
    context = zmq.Context()
    async with pool_of(1, policy=policy) as (pool, caller):
        socket = context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.RCVHWM, 1)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.connect(pool.address)
            for number in range(3_000):
                socket.send_multipart([b"%d" % number, b"run", msgpack.packb({"do": "hold"})])
            await until(lambda: pool.in_flight == 3_000)
            socket.send_multipart([b"many", b"run", msgpack.packb({"deltas": 1_000, "size": 100_000, "do": "hold"})])
            await until(lambda: pool.in_flight == 0)
            assert pool._dispatcher._clients == {}
            assert (await caller.run())["success"]
        finally:
            socket.close(0)
            context.term()
    assert "could not be handled" not in caplog.text


def _read_to_the_reply(socket: "zmq.Socket[bytes]") -> list[bytes]:
    data = []
    while True:
        _, kind, payload = socket.recv_multipart()
        data.append(payload)
        if kind == b"reply":
            return data


async def test_cancelled_again_and_again_a_run_has_one_reply_and_each_cancel_too() -> None:
    """Also a cancel of a cancel, of what is over, of what never was, and of another client's run."""
    async with pool_of(1) as (pool, caller):
        with Caller(pool.address) as other:
            await caller.send("run", {"do": "hold"}, b"run")
            cancels = [await caller.send("cancel", {"request_id": "run"}) for _ in range(50)]
            cancels += [await caller.send("cancel", {"request_id": cancel.decode()}) for cancel in cancels]
            await other.send("run", {"do": "hold"}, b"others")
            cancels.append(await caller.send("cancel", {"request_id": "others"}))
            replies = [await caller.reply(cancel) for cancel in cancels]
            assert all(reply["success"] for reply in replies)
            assert replies[0]["cancelled"] is True
            assert replies[-1]["cancelled"] is False
            assert await caller.reply(b"run") == {"success": False, "error": "cancelled"}
            assert pool.in_flight == 1
            assert (await caller.ask("cancel", {"request_id": "run"}))["cancelled"] is False
            assert (await other.ask("cancel", {"request_id": "others"}))["cancelled"] is True
            assert (await other.reply(b"others"))["success"] is False
            await until(lambda: pool.in_flight == 0)
