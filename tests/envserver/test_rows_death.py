"""Rows of the sheet's table that are about the death of workers, and about who replaces them."""

import asyncio
import dataclasses
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from envserver.burials import Burials
from envserver.pool import EnvServerPool
from envserver.wire import Part
from envserver.worker import Worker
from tests.envserver.caller import Caller
from tests.envserver.processes import exists
from tests.envserver.test_child import spawn
from tests.envserver.test_pool import QUICK, children, pool_of, ready
from tests.helpers import until

HARD = "tests.envserver.hardships"


async def test_row_01_a_killed_workers_runs_fail_are_not_run_again_and_leave_no_count(tmp_path: Path) -> None:
    note = tmp_path / "note"
    async with pool_of(2, "hard", module=HARD) as (pool, caller):
        held = [await caller.send("run", {"do": "hold", "note": str(note)}) for _ in range(8)]
        await until(lambda: note.exists() and len(note.read_text().split()) == 8)
        victim = pool._dispatcher.ready[0]
        os.kill(victim.pid, signal.SIGKILL)
        failed = [await caller.receive() for _ in range(4)]
        assert all("was killed by SIGKILL" in reply["error"] for _, _, reply in failed)
        assert all("is not run again" in reply["error"] for _, _, reply in failed)
        assert pool.in_flight == 4, "the others'"
        await ready(pool, 2)
        assert (await caller.ask("health"))["capacity"] == 256
        for request_id in set(held) - {request_id for request_id, _, _ in failed}:
            await caller.ask("cancel", {"request_id": request_id.decode()})
            await caller.reply(request_id)
        assert pool.in_flight == 0
        pids = note.read_text().split()
        assert pids.count(str(victim.pid)) == 4
        assert len(pids) == 8, "nothing was run twice"


async def test_row_03_a_newborn_that_loads_gets_nothing_although_it_has_the_least_to_do(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.write_text("open")
    async with pool_of(2, "gated", {"gate": str(gate)}) as (pool, caller):
        gate.unlink()
        victim, survivor = pool._dispatcher.ready
        os.kill(victim.pid, signal.SIGKILL)
        await until(lambda: pool.states().get("starting") == 1)
        held = [await caller.send("run", {"do": "hold"}) for _ in range(50)]
        assert {(await caller.run())["pid"] for _ in range(50)} == {survivor.pid}
        gate.write_text("open")
        await ready(pool, 2)
        assert (await caller.run())["pid"] not in (victim.pid, survivor.pid), "now it has the least to do"
        for request_id in held:
            await caller.ask("cancel", {"request_id": request_id.decode()})
            assert (await caller.reply(request_id))["error"] == "cancelled"


async def test_row_04_once_a_death_was_seen_the_dead_worker_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even before it is buried, when it has nothing to do and the others have a lot."""
    chosen_dead: list[int] = []
    seen_dead = 0
    pools: list[EnvServerPool] = []
    bury = Burials.exited

    def watched_bury(burials: Burials, worker: Worker) -> None:
        nonlocal seen_dead
        seen_dead += 1
        (pool,) = pools
        worker.requests, requests = {}, worker.requests
        chosen_dead.extend(other.pid for other in pool._dispatcher.ready if other is worker)
        if pool._dispatcher._choose() is worker:
            chosen_dead.append(worker.pid)
        worker.requests = requests
        bury(burials, worker)

    monkeypatch.setattr(Burials, "exited", watched_bury)
    async with pool_of(3) as (pool, caller):
        pools.append(pool)
        for deaths in range(1, 4):
            await caller.send("run", {"do": "die"})
            assert "SIGKILL" in (await caller.receive())[2]["error"]
            # Its slot has no new worker yet; whatever comes now is answered by the others.
            assert all([(await caller.run())["success"] for _ in range(20)])
            await ready(pool, 3)
            assert seen_dead == deaths
    assert chosen_dead == []


async def test_row_07_a_native_abort_is_seen_by_the_parent_and_health_tells_how_many_are_left(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.write_text("open")
    async with pool_of(2, "gated_hard", {"gate": str(gate)}, module=HARD) as (pool, caller):
        gate.unlink()
        error = (await caller.run(do="abort"))["error"]
        assert "was killed by SIGABRT" in error
        await until(lambda: pool.states().get("starting") == 1)
        health = await caller.ask("health")
        assert (health["success"], health["ready"], health["starting"], health["capacity"]) == (True, 1, 1, 128)
        assert (await caller.run())["success"]
        gate.write_text("open")
        await ready(pool, 2)


async def test_row_12_a_crash_loop_says_one_thing_a_change_and_keeps_its_first_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "envserver")
    gate = tmp_path / "gate"
    gate.write_text("open")
    policy = dataclasses.replace(QUICK, start_tries=3, open_backoff=60.0, open_backoff_cap=60.0)
    async with pool_of(1, "gated", {"gate": str(gate)}, policy=policy) as (pool, caller):
        pid = (await caller.run())["pid"]
        gate.write_text("fail")
        caplog.clear()
        os.kill(pid, signal.SIGKILL)
        await until(lambda: "is given up" in caplog.text)
        killed, *starts, given_up = [record.getMessage() for record in caplog.records]
        assert killed.startswith(f"worker 0 (pid {pid}) was killed by SIGKILL")
        # The first start comes at once. Each tells that it begins, how it ended, and when the next one is.
        said = ["is starting", "exited with status 1"] + 2 * [
            "is started again in",
            "is starting",
            "exited with status 1",
        ]
        assert [part in line for part, line in zip(said, starts, strict=True)] == [True] * len(said)
        # Only the first failed start is told with all it said, and once more where the slot is given up: all that was
        # in between may have scrolled away.
        assert ["RuntimeError: the gate says fail" in line for line in starts] == [False, True] + 6 * [False]
        assert "RuntimeError: the gate says fail" in given_up
        assert pool.states() == {"ready": 0, "in flight": 0}
        assert "exited with status 1" in (await caller.run())["error"]


async def test_row_13_the_budget_counts_failures_in_a_row_and_being_ready_resets_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed while loading every other time: with two tries a row it can go on like that for ever."""
    kwargs = {"counter": str(tmp_path / "counter")}
    policy = dataclasses.replace(QUICK, start_tries=2)
    async with pool_of(1, "every_other", kwargs, policy=policy, module=HARD) as (pool, caller):
        (slot,) = pool._slots.map.values()
        for deaths in range(1, 4):
            assert "SIGKILL" in (await caller.run(do="die"))["error"]
            await ready(pool, 1)
            assert len((tmp_path / "counter").read_text()) == 1 + 2 * deaths, "one failed start, and one that did not"
            assert slot.failures == 0
        assert [*pool._slots.map.values()] == [slot]
    assert "is given up" not in caplog.text


async def test_row_22_no_signal_is_sent_by_a_pid_that_may_be_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something else in this process reaps the worker; until the loop hears of its end its pid is free to be given to
    somebody new."""
    by_pid: list[int] = []
    ended = asyncio.Event()
    child, _ = spawn(tmp_path, "wait", on_exit=lambda _: ended.set())
    monkeypatch.setattr(os, "kill", lambda pid, number: by_pid.append(pid))
    monkeypatch.setattr(os, "killpg", lambda pid, number: by_pid.append(pid))
    child.send_signal(signal.SIGKILL)
    os.waitpid(child.pid, 0)  # noqa: ASYNC222 - it is being killed
    assert child.returncode is None, "it has not heard of it"
    child.send_signal(signal.SIGTERM)
    child.send_signal(signal.SIGKILL)
    await until(ended.is_set)
    child.close()
    assert by_pid == []
    assert child.returncode == 255, "an exit that nobody knows is none that went well"
    assert "collected" in child.exit_reason
    assert not exists(child.pid)


async def test_row_23_a_worker_that_dies_right_after_its_first_answer_had_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    killed: list[int] = []
    health = EnvServerPool._health

    def kill_first(pool: EnvServerPool, worker: Worker, data: Part) -> None:
        if len(killed) < 3:
            killed.append(worker.pid)
            os.kill(worker.pid, signal.SIGKILL)
        health(pool, worker, data)

    monkeypatch.setattr(EnvServerPool, "_health", kill_first)
    policy = dataclasses.replace(QUICK, start_tries=1, first_start_signals=1)
    async with EnvServerPool(f"{HARD}:hard", max_workers=1, elastic=False, policy=policy) as pool:
        (slot,) = pool._slots.map.values()
        await until(lambda: slot.crashes == 3)
        assert slot.failures == 0
        await ready(pool, 1)
        with Caller(pool.address) as caller:
            assert (await caller.run())["pid"] not in killed
    assert "is given up" not in caplog.text


async def test_a_growth_that_fails_blocks_nothing_and_is_tried_again_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = tmp_path / "gate"
    gate.write_text("first")
    options: dict[str, Any] = {"elastic": True, "multiplex": 2, "module": HARD}
    async with pool_of(None, "loads_once", {"counter": str(gate)}, **options) as (pool, caller):
        held = [await caller.send("run", {"do": "hold"}) for _ in range(4)]
        await until(lambda: caplog.text.count("is given up") >= 2)
        assert (await caller.run())["success"]
        assert (await caller.ask("health"))["capacity"] == 2
        assert pool.in_flight == 4
        gate.write_text("open")
        await until(lambda: pool.states()["ready"] >= 2)
        for request_id in held:
            await caller.ask("cancel", {"request_id": request_id.decode()})
            await caller.reply(request_id)


async def test_all_spent_a_pool_that_had_grown_is_back_at_its_full_size_without_being_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = tmp_path / "gate"
    gate.write_text("open")
    policy = dataclasses.replace(QUICK, start_tries=2)
    before = children()
    options: dict[str, Any] = {"elastic": True, "multiplex": 2, "policy": policy}
    async with pool_of(None, "gated", {"gate": str(gate)}, **options) as (pool, caller):
        held = [await caller.send("run", {"do": "hold"}) for _ in range(4)]
        await until(lambda: pool.states()["ready"] >= 3)
        size = pool.states()["ready"] + pool.states().get("starting", 0)
        await ready(pool, size)
        gate.write_text("fail")
        for pid in children() - before:
            os.kill(pid, signal.SIGKILL)
        for request_id in held:
            assert "SIGKILL" in (await caller.reply(request_id))["error"]
        await until(lambda: caplog.text.count("is given up") >= size)
        assert (await caller.ask("health"))["capacity"] == 0
        gate.write_text("open")
        await ready(pool, size)
        assert (await caller.ask("health"))["capacity"] == 2 * size
        # One try every so often, however long boot was broken: it is never further away than the cap.
        assert pool._slots._opening.at <= pool._now + policy.open_backoff_cap
