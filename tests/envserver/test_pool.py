"""The broker over real worker processes, which are really killed."""

import asyncio
import dataclasses
import os
import random
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from envserver.errors import EnvServerError, EnvServerStartupError
from envserver.limits import PoolPolicy
from envserver.pool import EnvServerPool
from tests.envserver.caller import Caller
from tests.envserver.processes import descriptors
from tests.helpers import until

ENVS = "tests.envserver.envs"

QUICK = PoolPolicy(
    start_backoff=0.05,
    start_backoff_cap=0.1,
    open_backoff=0.05,
    open_backoff_cap=0.1,
    reap_interval=0.0,
    free_restarts=10**6,
    spawn_floor=10**6,
    suspect_after=10**6,
    kill_grace=5.0,
)
"""The same rules with shorter times, for tests that kill many workers."""


@asynccontextmanager
async def pool_of(
    workers: int | None,
    env: str = "scripted",
    kwargs: dict[str, Any] | None = None,
    *,
    module: str = ENVS,
    **options: Any,
) -> AsyncIterator[tuple[EnvServerPool, Caller]]:
    """A pool with all its workers ready (if it is not elastic), and a client."""
    options = {"elastic": False, "policy": QUICK, **options}
    async with EnvServerPool(f"{module}:{env}", kwargs, max_workers=workers, **options) as pool:
        if not options["elastic"]:
            await until(lambda: pool.states()["ready"] == workers)
        with Caller(pool.address) as caller:
            yield pool, caller


async def ready(pool: EnvServerPool, count: int) -> None:
    await until(lambda: pool.states()["ready"] == count)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


# Starting


async def test_it_is_up_when_one_worker_is_ready_and_health_tells_how_many_are() -> None:
    async with pool_of(2) as (_, caller):
        assert await caller.ask("health") == {
            "success": True,
            "error": None,
            "ready": 2,
            "suspect": 0,
            "starting": 0,
            "capacity": 256,
        }
        assert (await caller.run())["pid"] in children()


async def test_runs_stream_their_deltas_and_go_to_the_worker_with_the_least_to_do() -> None:
    async with pool_of(2) as (_, caller):
        ids = [await caller.send("run", {"deltas": 3, "echo": number}) for number in range(20)]
        pids = set()
        for number, request_id in enumerate(ids):
            *deltas, (_, reply) = await caller.answers(request_id)
            assert [delta["number"] for _, delta in deltas] == [0, 1, 2]
            assert reply["echo"] == number
            pids.add(reply["pid"])
        assert len(pids) == 2


async def test_a_worker_that_fails_while_it_loads_fails_the_start_at_once_with_what_it_said(tmp_path: Path) -> None:
    before = children()
    pool = EnvServerPool(f"{ENVS}:failing", {"message": "no such model"}, max_workers=2, log_path=tmp_path / "env.log")
    with pytest.raises(EnvServerStartupError, match="exited with status 1") as caught:
        await pool.start()
    assert caught.value.returncode == 1
    assert "about to fail" in caught.value.tail
    assert "RuntimeError: no such model" in caught.value.tail
    assert caught.value.log_path == str(tmp_path / "env-worker-0.log")
    assert children() == before


async def test_a_worker_that_exits_0_before_it_is_ready_is_an_error_too() -> None:
    with pytest.raises(EnvServerStartupError, match="exited with status 0"):
        await EnvServerPool("os:_exit", {"status": 0}, max_workers=2).start()


async def test_a_first_worker_that_is_killed_has_three_tries(tmp_path: Path) -> None:
    kwargs = {"counter": str(tmp_path / "counter"), "times": 2}
    async with EnvServerPool(f"{ENVS}:killed", kwargs, max_workers=2, policy=QUICK) as pool:
        assert pool.states()["ready"] == 1
    kwargs = {"counter": str(tmp_path / "another"), "times": 9}
    with pytest.raises(EnvServerStartupError, match="SIGKILL"):
        await EnvServerPool(f"{ENVS}:killed", kwargs, max_workers=2, policy=QUICK).start()
    assert (tmp_path / "another").read_text() == "xxx"


async def test_what_cannot_be_started_is_said_and_leaves_nothing() -> None:
    """Row 18."""
    before = children(), psutil.Process().num_fds()
    with pytest.raises(EnvServerError, match="JSON"):
        await EnvServerPool(f"{ENVS}:scripted", {"x": object()}, max_workers=2).start()
    with pytest.raises(EnvServerError, match="cannot listen on tcp://256"):
        await EnvServerPool(f"{ENVS}:scripted", address="tcp://256.0.0.1:0", max_workers=2).start()
    for arguments in ({"max_workers": 0}, {"max_workers": None, "elastic": False}, {"max_workers": 1, "multiplex": 0}):
        with pytest.raises(EnvServerError):
            EnvServerPool(f"{ENVS}:scripted", **arguments)
    with pytest.raises(EnvServerError, match="name it as"):
        EnvServerPool("scripted", max_workers=1)
    assert (children(), psutil.Process().num_fds()) == before


async def test_an_address_that_is_taken_is_told_before_any_worker_starts() -> None:
    async with pool_of(1) as (pool, _):
        before = children()
        with pytest.raises(EnvServerError, match="in use"):
            await EnvServerPool(f"{ENVS}:scripted", address=pool.address, max_workers=1).start()
        assert children() == before


async def test_a_start_that_is_cancelled_twice_leaves_nothing(tmp_path: Path) -> None:
    before = children()
    pool = EnvServerPool(f"{ENVS}:gated", {"gate": str(tmp_path / "gate")}, max_workers=2, elastic=False)
    starting = asyncio.create_task(pool.start())
    await until(lambda: pool.states().get("starting") == 2)
    starting.cancel()
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert children() == before


async def test_one_that_is_stopped_before_it_has_begun_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    before = descriptors()
    pool = EnvServerPool(f"{ENVS}:scripted", max_workers=2)
    starting = asyncio.create_task(pool.start())
    await asyncio.sleep(0)
    await pool.stop()
    with pytest.raises(EnvServerError, match="stopped before it was up"):
        await starting
    assert not caplog.records
    assert descriptors() == before


async def test_a_long_tmpdir_is_no_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100) / ("y" * 100)
    long.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    async with pool_of(1) as (_, caller):
        assert (await caller.run())["success"]


# Deaths


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
async def test_a_worker_that_dies_fails_its_own_requests_and_no_others(number: signal.Signals) -> None:
    async with pool_of(2) as (pool, caller):
        held = [await caller.send("run", {"do": "hold"}) for _ in range(8)]
        await until(lambda: pool.in_flight == 8)
        victim, other = pool._dispatcher.ready
        os.kill(victim.pid, number)
        failed = {}
        for _ in range(4):
            request_id, kind, reply = await caller.receive()
            assert (kind, reply["success"]) == (b"reply", False)
            failed[request_id] = reply["error"]
        assert all(f"pid {victim.pid}" in error and number.name in error for error in failed.values())
        for request_id in set(held) - set(failed):
            assert (await caller.ask("cancel", {"request_id": request_id.decode()}))["cancelled"] is True
            assert (await caller.reply(request_id))["success"] is False
        assert other.pid in children()
        await ready(pool, 2)
        assert victim.pid not in children()
        assert (await caller.run())["success"]


async def test_an_exit_is_told_with_its_status() -> None:
    async with pool_of(1) as (_, caller):
        reply = await caller.run(do="exit", status=7)
        assert "exited with status 7" in reply["error"]


async def test_what_a_dead_worker_had_sent_is_delivered_before_its_requests_fail() -> None:
    async with pool_of(1) as (pool, caller):
        held = await caller.send("run", {"do": "hold"})
        await until(lambda: pool.in_flight == 1)
        *deltas, (_, reply) = await caller.answers(
            await caller.send("run", {"do": "deliver and die", "deltas": 300, "size": 10_000})
        )
        assert [delta["number"] for _, delta in deltas] == list(range(300))
        assert "SIGKILL" in reply["error"]
        assert "SIGKILL" in (await caller.reply(held))["error"]


async def test_what_a_dead_worker_has_forked_does_not_hide_its_death() -> None:
    """Row 8: nor its exit status."""
    async with pool_of(1) as (pool, caller):
        reply = await caller.run(do="fork and die", seconds=5)
        assert "SIGKILL" in reply["error"]
        await ready(pool, 1)


async def test_many_deaths_leave_no_descriptor_no_zombie_and_no_file() -> None:
    """Rows 20 and 21; `tests/chaos` does it a thousand times."""
    async with pool_of(2) as (pool, caller):
        assert pool._folder is not None

        async def kill() -> None:
            assert "SIGKILL" in (await caller.run(do="die"))["error"]
            await ready(pool, 2)

        await kill()
        before = psutil.Process().num_fds()
        for _ in range(10):
            await kill()
        await until(lambda: psutil.Process().num_fds() == before)
        assert not [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE]
        assert len([name for name in os.listdir(pool._folder.path) if name.isdecimal()]) == 2


async def test_a_loading_worker_gets_no_request_and_with_none_ready_a_request_fails_at_once(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.write_text("open")
    async with pool_of(1, "gated", {"gate": str(gate)}) as (pool, caller):
        gate.unlink()
        dead = (await caller.run(do="die"))["error"]
        assert "SIGKILL" in dead
        await until(lambda: pool.states().get("starting") == 1)
        error = (await caller.run())["error"]
        assert "no worker is ready (1 starting)" in error
        assert "SIGKILL" in error
        health = await caller.ask("health")
        assert (health["success"], health["ready"], health["starting"], health["capacity"]) == (True, 0, 1, 0)
        gate.write_text("open")
        await ready(pool, 1)
        assert (await caller.run())["success"]


@pytest.mark.parametrize("elastic", [False, True])
async def test_with_every_slot_spent_full_capacity_comes_back_once_boot_is_repaired(
    tmp_path: Path, elastic: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Row 5."""
    gate = tmp_path / "gate"
    gate.write_text("open")
    workers = 1 if elastic else 2
    policy = dataclasses.replace(QUICK, start_tries=2)
    kwargs = {"gate": str(gate)}
    async with pool_of(None if elastic else 2, "gated", kwargs, elastic=elastic, policy=policy) as (pool, caller):
        gate.write_text("fail")
        for _ in range(workers):
            await caller.run(do="die")
        await until(lambda: caplog.text.count("is given up") >= workers)
        assert "no worker is ready" in (await caller.run())["error"]
        gate.write_text("open")
        await ready(pool, workers)
        assert (await caller.run())["success"]


# Growth


async def test_an_elastic_pool_grows_at_nine_tenths_of_its_capacity_up_to_its_most() -> None:
    async with pool_of(3, elastic=True, multiplex=10) as (pool, caller):
        held = [await caller.send("run", {"do": "hold"}) for _ in range(8)]
        await until(lambda: pool.in_flight == 8)
        assert pool.states() == {"ready": 1, "in flight": 8}
        held.append(await caller.send("run", {"do": "hold"}))
        await ready(pool, 2)
        held += [await caller.send("run", {"do": "hold"}) for _ in range(100)]
        await ready(pool, 3)
        assert (await caller.ask("health"))["capacity"] == 30
        # The newcomers take what comes now.
        assert [len(worker.requests) for worker in pool._dispatcher.ready] != [109, 0, 0]
        assert len(pool._slots.map) == 3


# Requests


async def test_equal_ids_of_two_clients_are_told_apart() -> None:
    async with pool_of(1) as (pool, one):
        with Caller(pool.address) as two:
            await one.send("run", {"do": "hold"}, b"same")
            await until(lambda: pool.in_flight == 1)
            await two.send("run", {"echo": "two"}, b"same")
            assert (await two.reply(b"same"))["echo"] == "two"
            assert (await two.ask("cancel", {"request_id": "same"}))["cancelled"] is False
            assert (await one.ask("cancel", {"request_id": "same"}))["cancelled"] is True
            assert (await one.reply(b"same"))["success"] is False


async def test_a_cancel_never_overtakes_its_run() -> None:
    """Row 26."""
    async with pool_of(2) as (pool, caller):
        pairs = []
        for number in range(1000):
            run = await caller.send("run", {"do": "hold"}, b"run %d" % number)
            pairs.append((run, await caller.send("cancel", {"request_id": run.decode()})))
        for run, cancel in pairs:
            assert (await caller.reply(cancel))["cancelled"] is True
            assert (await caller.reply(run))["success"] is False
        await until(lambda: pool.in_flight == 0)


async def test_what_is_no_request_is_counted_and_dropped_and_a_bad_one_answered() -> None:
    async with pool_of(1) as (pool, caller):
        random_ = random.Random(6)
        sent = 0
        for _ in range(2_000):
            count = random_.choice([1, 2, 4, 5])
            await caller.socket.send_multipart([random_.randbytes(random_.choice([0, 3, 40])) for _ in range(count)])
            sent += 1
        await caller.socket.send_multipart([b"x" * 129, b"run", b"\x80"])
        assert "unknown method" in (await caller.ask("sing"))["error"]
        assert pool.dropped == sent + 1
        for request_id in (b"\xff\xfe", b"", b"\0" * 128):
            await caller.socket.send_multipart([request_id, b"run", b"\x80"])
            assert (await caller.reply(request_id))["success"] is True
            await caller.socket.send_multipart([request_id, b"run", b"\xc1 no msgpack"])
            assert (await caller.reply(request_id))["success"] is False
            await caller.socket.send_multipart([request_id, b"cancel", b"\xc1 no msgpack"])
            assert "bad request" in (await caller.reply(request_id))["error"]


async def test_an_id_that_is_under_way_is_not_taken_twice() -> None:
    async with pool_of(1) as (pool, caller):
        await caller.send("run", {"do": "hold"}, b"once")
        await caller.send("run", {"echo": "again"}, b"once")
        assert (await caller.ask("cancel", {"request_id": "once"}))["cancelled"] is True
        assert (await caller.reply(b"once"))["success"] is False
        assert pool.dropped == 1


async def test_a_large_payload_passes_unchanged() -> None:
    async with pool_of(1) as (_, caller):
        reply = await caller.run(blob=b"x" * 5_000_000, deltas=2, size=3_000_000)
        assert reply["size"] == 5_000_000


async def test_a_client_that_leaves_hurts_nobody_and_its_runs_are_cancelled() -> None:
    async with pool_of(1) as (pool, caller):
        with Caller(pool.address) as leaving:
            await leaving.send("run", {"do": "hold", "deltas": 1})
            await leaving.receive()
            await leaving.send("run", {"deltas": 1_000_000, "size": 100})
            await leaving.receive()
        await until(lambda: pool.in_flight == 0)
        assert (await caller.run())["success"]


async def test_a_client_that_does_not_read_is_cut_off_and_learns_it_when_it_reads() -> None:
    policy = PoolPolicy(client_budget=1 << 20)
    async with pool_of(1, policy=policy) as (pool, caller):
        with Caller(pool.address) as deaf:
            deaf.socket.setsockopt(zmq.RCVHWM, 1)
            first = await deaf.send("run", {"do": "hold", "deltas": 2_000, "size": 100_000})
            assert (await caller.run())["success"]
            await until(lambda: pool.in_flight == 0)
            assert "cut off" in (await deaf.reply(first))["error"]
            assert (await deaf.run())["success"]


async def test_a_stopped_worker_with_50_mb_to_read_blocks_nobody() -> None:
    """Row 16."""
    async with pool_of(2) as (pool, caller):
        stopped, other = pool._dispatcher.ready
        other.dispatchable = False  # so that all goes to the one that does not read
        pool._refresh_ready()
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            ids = [await caller.send("run", {"blob": b"x" * 1_000_000}) for _ in range(50)]
            await until(lambda: len(stopped.requests) == 50)
            assert (await caller.ask("health"))["success"]
            other.dispatchable = True
            pool._refresh_ready()
            assert (await caller.run())["pid"] == other.pid
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        for request_id in ids:
            assert (await caller.reply(request_id))["size"] == 1_000_000


# Ends


async def test_a_drain_takes_no_new_run_and_waits_for_those_under_way() -> None:
    async with pool_of(2) as (pool, caller):
        await caller.send("run", {"do": "hold"}, b"held")
        await until(lambda: pool.in_flight == 1)
        draining = asyncio.create_task(pool.drain(60))
        await until(lambda: pool.states().get("draining") == 1)
        assert "shutting down" in (await caller.run())["error"]
        assert (await caller.ask("health"))["success"] is False
        assert not draining.done()
        assert (await caller.ask("cancel", {"request_id": "held"}))["cancelled"] is True
        assert (await caller.reply(b"held"))["success"] is False
        await draining


async def test_a_stop_answers_what_it_ends_and_leaves_nothing() -> None:
    before = children()
    async with pool_of(2) as (pool, caller):
        held = [await caller.send("run", {"do": "hold"}) for _ in range(4)]
        await until(lambda: pool.in_flight == 4)
        folder = pool._folder
        assert folder is not None
        stopping = asyncio.create_task(pool.stop())
        await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.sleep(0)
        stopping.cancel()
        for request_id in held:
            assert "shutting down" in (await caller.reply(request_id))["error"]
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert children() == before
        assert not folder.path.exists()


async def test_a_drain_that_is_over_ends_workers_that_are_stopped() -> None:
    policy = PoolPolicy(kill_grace=0.2)
    async with pool_of(1, policy=policy) as (pool, caller):
        held = await caller.send("run", {"do": "hold"})
        await until(lambda: pool.in_flight == 1)
        os.kill(pool._dispatcher.ready[0].pid, signal.SIGSTOP)
        await pool.drain(0.1)
        await pool.stop()
        assert "SIGKILL" in (await caller.reply(held))["error"]


async def test_a_supervisor_that_fails_fails_all_requests_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Row 30; that the process ends by it is in `test_rows_shutdown`."""
    async with pool_of(2) as (pool, caller):
        held = [await caller.send("run", {"do": "hold"}) for _ in range(4)]
        await until(lambda: pool.in_flight == 4)
        failing = asyncio.create_task(pool.wait_failed())

        def broken(*_: object) -> None:
            raise RuntimeError("a bug")

        pool._slots.exited = broken  # type: ignore[method-assign]
        os.kill(pool._dispatcher.ready[0].pid, signal.SIGKILL)
        with pytest.raises(EnvServerError, match=r"supervisor failed.*a bug"):
            await failing
        for request_id in held:
            assert "supervisor failed" in (await caller.reply(request_id))["error"]
        assert (await caller.ask("health"))["success"] is False
        assert "a bug" in (await caller.run())["error"]
        await until(lambda: not pool._workers)
    assert "a bug" in caplog.text
