"""Pools that shrink, and replace workers that are well: real processes, the times shortened."""

import asyncio
import dataclasses
import itertools
import logging
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from envserver.memory import rss_of
from envserver.pool import EnvServerPool
from tests.envserver.caller import Caller
from tests.envserver.test_pool import QUICK, children, pool_of, ready
from tests.helpers import until

SHRINKING = dataclasses.replace(QUICK, scale_down_after=0.2, scale_down_idle=0.3, load_look=0.05)
HARD = "tests.envserver.hardships"


async def wave(pool: EnvServerPool, caller: Caller, gate: Path, runs: int) -> None:
    """So many runs at once, until the pool has all its workers; all of them are answered."""
    gate.unlink(missing_ok=True)  # noqa: ASYNC240 - a file of a test
    ids = [await caller.send("run", {"do": "wait for", "path": str(gate)}) for _ in range(runs)]
    await ready(pool, 3)
    gate.touch()  # noqa: ASYNC240
    for request_id in ids:
        assert (await caller.reply(request_id))["success"]


async def test_load_that_rises_and_falls_is_followed_by_the_workers_and_loses_nothing(tmp_path: Path) -> None:
    options: dict[str, Any] = {"elastic": True, "multiplex": 4, "module": HARD, "policy": SHRINKING}
    async with pool_of(3, "hard", **options) as (pool, caller):
        for _ in range(2):
            await wave(pool, caller, tmp_path / "gate", 12)
            await until(lambda: pool.states() == {"ready": 1, "in flight": 0})
            assert len(pool._workers) == 1
            assert (await caller.run())["success"]


async def test_a_pool_does_not_shrink_below_its_floor_nor_end_who_is_busy(tmp_path: Path) -> None:
    options: dict[str, Any] = {"elastic": True, "multiplex": 4, "module": HARD, "policy": SHRINKING, "min_workers": 2}
    async with pool_of(3, "hard", **options) as (pool, caller):
        await ready(pool, 2)
        held = [await caller.send("run", {"do": "hold"}) for _ in range(2)]
        await until(lambda: pool.in_flight == 2)
        busy = {worker.pid for worker in pool._dispatcher.ready}
        await wave(pool, caller, tmp_path / "gate", 10)
        await until(lambda: pool.states() == {"ready": 2, "in flight": 2})
        assert {worker.pid for worker in pool._dispatcher.ready} == busy
        for request_id in held:
            assert (await caller.ask("cancel", {"request_id": request_id.decode()}))["cancelled"] is True
            assert (await caller.reply(request_id))["error"] == "cancelled"


async def test_load_that_came_while_a_worker_was_on_its_way_out_gets_another_once_it_has_gone(tmp_path: Path) -> None:
    """Until then there is no place for one, and nobody has to ask for anything more."""
    gate = tmp_path / "gate"
    options: dict[str, Any] = {"elastic": True, "multiplex": 4, "module": HARD, "policy": SHRINKING}
    async with pool_of(2, "hard", **options) as (pool, caller):
        ids = [await caller.send("run", {"do": "wait for", "path": str(gate)}) for _ in range(4)]
        await ready(pool, 2)
        newest = max(pool._dispatcher.ready, key=lambda worker: worker.generation)
        os.kill(newest.pid, signal.SIGSTOP)  # it takes its time to end
        gate.touch()
        for request_id in ids:
            assert (await caller.reply(request_id))["success"]
        await until(lambda: pool.states().get("killing") == 1)
        for _ in range(4):
            await caller.send("run", {"do": "hold"})
        await until(lambda: pool.in_flight == 4)
        assert pool.states() == {"ready": 1, "killing": 1, "in flight": 4}
        os.kill(newest.pid, signal.SIGCONT)
        await ready(pool, 2)


async def test_an_old_worker_is_replaced_and_ends_what_it_runs(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    policy = dataclasses.replace(QUICK, max_worker_age=0.5)
    async with pool_of(1, "hard", module=HARD, policy=policy) as (pool, caller):
        held = await caller.send("run", {"do": "wait for", "path": str(gate)})
        await until(lambda: pool.in_flight == 1)
        (old,) = pool._dispatcher.ready
        await until(lambda: pool.states().get("draining") == 1)
        assert pool.states()["ready"] == 1
        assert (await caller.run())["pid"] != old.pid
        gate.touch()
        assert (await caller.reply(held))["pid"] == old.pid
        await until(lambda: old.closed)
        assert old.child.returncode == 0


async def test_an_old_worker_that_dies_while_it_is_drained_has_died_like_any(caplog: pytest.LogCaptureFixture) -> None:
    policy = dataclasses.replace(QUICK, max_worker_age=0.5)
    async with pool_of(1, "hard", module=HARD, policy=policy) as (pool, caller):
        held = await caller.send("run", {"do": "hold"})
        await until(lambda: pool.in_flight == 1)
        (old,) = pool._dispatcher.ready
        await until(lambda: pool.states().get("draining") == 1)
        os.kill(old.pid, signal.SIGKILL)
        assert f"(pid {old.pid}) of the env server was killed by SIGKILL" in (await caller.reply(held))["error"]
        await until(lambda: old.closed)
        assert (await caller.run())["success"]
        assert len(pool._quarantine._records) == 1, "what ran there may have killed it"
    assert f"(pid {old.pid}) was killed by SIGKILL after" in caplog.text


async def test_a_worker_that_has_grown_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "envserver")
    limit = (rss_of(os.getpid()) or 0) + (150 << 20)
    policy = dataclasses.replace(QUICK, max_worker_rss=limit, steady_after=0.0, load_look=0.05)
    async with pool_of(1, "hard", module=HARD, policy=policy) as (pool, caller):
        (old,) = pool._dispatcher.ready
        assert (await caller.run(do="grow", size=limit))["pid"] == old.pid
        await until(lambda: old.closed)
        await ready(pool, 1)
        assert (await caller.run())["pid"] != old.pid
        assert f"to replace worker 0 (pid {old.pid}), ready for 0.0 h, " in caplog.text


async def test_a_pool_that_was_never_started_can_be_stopped() -> None:
    await EnvServerPool(f"{HARD}:hard", max_workers=1).stop()


def test_the_memory_of_a_process_is_what_the_system_says() -> None:
    assert rss_of(os.getpid()) == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert rss_of(2**30) is None


async def test_a_replacement_that_does_not_start_leaves_the_old_one_serving(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = tmp_path / "gate"
    gate.write_text("open")
    policy = dataclasses.replace(QUICK, max_worker_age=0.3)
    async with pool_of(1, "gated_hard", {"gate": str(gate)}, module=HARD, policy=policy) as (pool, caller):
        gate.write_text("fail")
        pid = (await caller.run())["pid"]
        await until(lambda: caplog.text.count("is given up") >= 2)
        assert (await caller.run())["pid"] == pid
        assert (await caller.ask("health"))["capacity"] == 128
        gate.write_text("open")
        await until(lambda: pid not in children())
        await ready(pool, 1)
        assert (await caller.run())["success"]


@pytest.mark.chaos
async def test_a_week_in_ten_minutes_load_rises_and_falls_20_times_rss_and_fds_flat(tmp_path: Path) -> None:
    """Each rise takes the pool to all its workers, each fall to one; meanwhile workers are replaced for their age."""
    policy = dataclasses.replace(SHRINKING, scale_down_after=2.0, scale_down_idle=5.0, max_worker_age=20.0)
    options: dict[str, Any] = {"elastic": True, "multiplex": 4, "module": HARD, "policy": policy}
    async with pool_of(3, "hard", **options) as (pool, caller):
        me = psutil.Process()
        assert (await caller.run())["success"]
        rss, usual = [], me.num_fds()
        for day in itertools.count(1):
            await wave(pool, caller, tmp_path / "gate", 12)
            results = await asyncio.gather(*(_ask_many(pool, 500) for _ in range(4)))
            assert sum(results) == 2000
            await until(lambda: (pool.states(), len(pool._workers)) == ({"ready": 1, "in flight": 0}, 1), timeout=120)
            rss.append(me.memory_info().rss)
            await until(lambda: me.num_fds() == usual)  # zmq gives them back in a thread of its own
            if day == 20:
                break
        print(f"RSS {[value >> 20 for value in rss]} MiB, descriptors {usual}")
        assert rss[-1] - rss[4] < 5 << 20


async def _ask_many(pool: EnvServerPool, count: int) -> int:
    with Caller(pool.address) as client:
        return sum([(await client.run(echo=number))["success"] for number in range(count)])
