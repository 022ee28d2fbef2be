"""Rows 14 and 15 of the sheet's table: tasks that kill whatever they run on, with workers that really die."""

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from envserver.metrics import SLOTS
from envserver.pool import EnvServerPool
from tests.envserver.caller import Caller
from tests.envserver.test_pool import QUICK, children, pool_of, ready
from tests.envserver.test_watch import WATCHFUL
from tests.helpers import until

POLICY = dataclasses.replace(QUICK, suspect_after=2)
HARD = "tests.envserver.hardships"


@asynccontextmanager
async def watched(workers: int = 2, env: str = "hard", **options: Any) -> AsyncIterator[tuple[EnvServerPool, Caller]]:
    async with pool_of(workers, env, module=HARD, **{"policy": POLICY, **options}) as (pool, caller):
        yield pool, caller


async def make_suspect(pool: EnvServerPool, caller: Caller, **request: Any) -> None:
    """Two workers are killed by chance while a run of the task is on them."""
    for _ in range(2):
        await ready(pool, pool.states()["ready"])
        held = await caller.send("run", request)
        await until(lambda: pool.in_flight == 1)
        (victim,) = [worker for worker in pool._dispatcher.ready if worker.requests]
        os.kill(victim.pid, signal.SIGKILL)
        assert "SIGKILL" in (await caller.reply(held))["error"]
        await until(lambda: len(pool._dispatcher.ready) == pool._slots.target)


async def insist(caller: Caller, tries: int, **request: Any) -> list[dict[str, Any]]:
    """A client that tries again, each time with a new id, until it is answered with success."""
    replies = []
    for number in range(tries):
        # A worker may be on its way up: that is a wait, not a try.
        reply = await caller.run(**request, model=f"m{number}")
        while "no worker is ready" in (reply["error"] or ""):
            await asyncio.sleep(0.05)
            reply = await caller.run(**request, model=f"m{number}")
        replies.append(reply)
        if reply["success"]:
            break
    return replies


async def test_row_14_a_task_that_aborts_its_process_is_refused_after_four_deaths_however_often_it_is_tried(
    tmp_path: Path,
) -> None:
    note = tmp_path / "note"
    async with watched() as (pool, caller):
        replies = await insist(caller, 20, do="abort", note=str(note))
        pids = note.read_text().split()
        assert len(pids) == 4, "deaths"
        assert len(set(pids)) == 4
        assert all("SIGABRT" in reply["error"] for reply in replies)
        assert ["is not run again" in reply["error"] for reply in replies] == [True] * 4 + [False] * 16
        refusal = replies[-1]["error"]
        assert refusal.startswith("refused: this task has killed 2 workers that ran nothing else")
        assert all(refusal.count(f"pid {pid} was killed by SIGABRT at 20") == 1 for pid in pids)
        assert (await caller.run(do="reply"))["success"]
        await until(lambda: len(pool._workers) == 2)
        await ready(pool, 2)


async def test_row_15_sixteen_innocents_beside_a_poison_are_all_answered_in_the_end(tmp_path: Path) -> None:
    note, gate = tmp_path / "note", tmp_path / "gate"
    async with watched(4) as (pool, _):  # so that few were there at both deaths, who run alone one after the other
        with Caller(pool.address) as poisoner:

            async def innocent(number: int) -> list[dict[str, Any]]:
                with Caller(pool.address) as client:
                    return await insist(client, 20, do="wait for", path=str(gate), number=number)

            innocents = [asyncio.create_task(innocent(number)) for number in range(16)]
            await until(lambda: pool.in_flight == 16)
            poison = asyncio.create_task(insist(poisoner, 20, do="abort", note=str(note)))
            await until(lambda: note.exists() and len(note.read_text().split()) == 2, timeout=120)
            gate.touch()  # from now on they end, so that who is alone does not block who waits
            replies = await poison
            answers = await asyncio.gather(*innocents)
        assert len(note.read_text().split()) == 4
        assert "refused" in replies[-1]["error"]
        assert all(replies[-1]["success"] for replies in answers)
        assert not any("refused" in (reply["error"] or "") for replies in answers for reply in replies)
        assert any(len(replies) > 1 for replies in answers), "some were there when a worker died"
        assert pool._quarantine.waiting == 0


async def test_a_suspect_runs_alone_beside_the_pools_own_workers_and_its_success_clears_it() -> None:
    async with watched() as (pool, caller):
        before = children()
        await make_suspect(pool, caller, do="hold")
        own = {worker.pid for worker in pool._dispatcher.ready}
        first, second = [await caller.send("run", {"do": "hold"}) for _ in range(2)]
        await until(lambda: pool.in_flight == 1)
        assert pool.states() == {"ready": 2, "lone": 1, "waiting": 1, "in flight": 1}
        slots = {sample.labels: sample.value for sample in pool.samples() if sample.family is SLOTS and sample.value}
        assert slots == {("ready",): 2, ("lone",): 1}
        assert len(children() - before - own) == 1
        assert (await caller.run())["pid"] in own, "all others go on as before"
        assert (await caller.ask("health"))["capacity"] == 256
        # What waits can be cancelled, and so can what runs; neither is a success.
        for held in (second, first):
            assert (await caller.ask("cancel", {"request_id": held.decode()}))["cancelled"] is True
            assert (await caller.reply(held))["error"] == "cancelled"
        await until(lambda: not children() - before - own)
        assert pool.states() == {"ready": 2, "in flight": 0}


async def test_equal_runs_wait_for_one_to_prove_that_it_was_not_them_and_then_all_go_at_once(tmp_path: Path) -> None:
    gate, note = tmp_path / "gate", tmp_path / "note"
    request = {"do": "wait for", "path": str(gate), "note": str(note)}
    async with watched() as (pool, caller):
        await make_suspect(pool, caller, **request)
        own = {str(worker.pid) for worker in pool._dispatcher.ready}
        note.unlink()
        ids = [await caller.send("run", request) for _ in range(16)]
        await until(lambda: pool.in_flight == 1 and note.exists())
        assert pool.states()["waiting"] == 15
        gate.touch()
        for request_id in ids:
            assert (await caller.reply(request_id))["success"]
        lone, *others = note.read_text().split()
        assert lone not in own
        assert len(others) == 15
        assert set(others) <= own
        await until(lambda: len(pool._workers) == 2)


async def test_what_the_pool_ends_itself_is_held_against_nobody() -> None:
    async with watched(1) as (pool, caller):
        held = await caller.send("run", {"do": "hold"})
        await until(lambda: pool.in_flight == 1)
        (worker,) = pool._dispatcher.ready
        await pool.drain(0.0)
        assert "shutting down" in (await caller.reply(held))["error"]
        await until(lambda: worker.closed)
        assert worker.slot.put_down
        assert len(pool._quarantine._records) == 0


@pytest.mark.parametrize("how", ["drain", "stop"])
async def test_who_waits_when_the_pool_ends_is_answered_at_once(how: str) -> None:
    before = children()
    async with watched() as (pool, caller):
        await make_suspect(pool, caller, do="hold")
        first, second = [await caller.send("run", {"do": "hold"}) for _ in range(2)]
        await until(lambda: pool.states() == {"ready": 2, "lone": 1, "waiting": 1, "in flight": 1})
        ending = asyncio.create_task(pool.drain(60) if how == "drain" else pool.stop())
        assert "shutting down" in (await caller.reply(second))["error"]
        if how == "drain":  # what runs is waited for, alone or not
            assert not ending.done()
            assert (await caller.ask("cancel", {"request_id": first.decode()}))["cancelled"] is True
        assert (await caller.reply(first))["success"] is False
        await ending
    assert children() == before


async def test_a_lone_worker_that_cannot_be_started_is_tried_again_and_then_its_runs_fail(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.write_text("open")
    policy = dataclasses.replace(POLICY, start_tries=2)
    async with watched(2, "gated_hard", kwargs={"gate": str(gate)}, policy=policy) as (pool, caller):
        await make_suspect(pool, caller, do="hold")
        gate.write_text("fail")
        ids = [await caller.send("run", {"do": "hold"}) for _ in range(3)]
        for request_id in ids:
            error = (await caller.reply(request_id))["error"]
            assert "is to run alone, and no worker can be started for it: worker 2 (pid " in error
            assert "exited with status 1" in error
        assert (await caller.run())["success"]
        gate.write_text("open")
        held = await caller.send("run", {"do": "hold"})
        await until(lambda: pool.in_flight == 1)
        assert pool.states()["lone"] == 1
        await caller.ask("cancel", {"request_id": held.decode()})
        await caller.reply(held)


async def test_a_lone_worker_that_a_signal_has_stopped_is_killed_counts_nothing_and_blocks_nobody(
    tmp_path: Path,
) -> None:
    policy = dataclasses.replace(WATCHFUL, suspect_after=2)
    async with watched(1, policy=policy) as (pool, caller):
        await make_suspect(pool, caller, do="hold")
        first, second = [await caller.send("run", {"do": "hold"}) for _ in range(2)]
        await until(lambda: pool.in_flight == 1)
        (stopped,) = [worker for worker in pool._workers.values() if worker.requests]
        assert stopped.slot.lone
        os.kill(stopped.pid, signal.SIGSTOP)
        assert "it had been stopped by a signal" in (await caller.reply(first))["error"]
        await until(lambda: pool.in_flight == 1)
        (fresh,) = [worker for worker in pool._workers.values() if worker.requests]
        assert fresh.slot.lone
        assert fresh.pid != stopped.pid
        (task,) = pool._quarantine._records._records.values()
        assert (task.count, task.lone) == (2, [])
        await caller.ask("cancel", {"request_id": second.decode()})
        assert (await caller.reply(second))["error"] == "cancelled"
        assert pool.states()["ready"] == 1


async def test_a_worker_that_loses_only_its_connection_is_ended_and_that_is_a_death_a_lone_one_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with watched(1) as (pool, caller):
        for _ in range(2):
            await ready(pool, 1)
            (own,) = pool._dispatcher.ready
            assert f"(pid {own.pid}) of the env server" in (await caller.run(do="hang up"))["error"]
            assert f"{own} has lost its connection: it is ended" in caplog.text
        await ready(pool, 1)
        (own,) = pool._dispatcher.ready
        lost = await caller.send("run", {"do": "hang up"})
        await until(lambda: pool.in_flight == 1)
        (lone,) = [worker for worker in pool._workers.values() if worker.requests]
        assert lone.slot.lone
        assert f"worker {lone.number} (pid {lone.pid}) of the env server" in (await caller.reply(lost))["error"]
        assert f"{lone} has lost its connection: it is ended" in caplog.text
        (task,) = pool._quarantine._records._records.values()
        assert [death.pid for death in task.lone] == [lone.pid]
        assert (await caller.run())["pid"] == own.pid
        await until(lambda: pool.states() == {"ready": 1, "in flight": 0})


async def test_a_client_that_leaves_takes_its_waiting_runs_with_it() -> None:
    async with watched() as (pool, caller):
        await make_suspect(pool, caller, do="hold")
        with Caller(pool.address) as leaving:
            for _ in range(3):
                await leaving.send("run", {"do": "hold"})
            await until(lambda: pool.states().get("waiting") == 2)
        # The broker learns it when it has something for the client: what runs there emits.
        pool._dispatcher.abandon(next(iter(pool._dispatcher._clients)))
        await until(lambda: pool.states() == {"ready": 2, "in flight": 0})


async def test_a_line_that_is_full_says_so() -> None:
    policy = dataclasses.replace(POLICY, suspects_waiting=1)
    async with watched(policy=policy) as (pool, caller):
        await make_suspect(pool, caller, do="hold")
        ids = [await caller.send("run", {"do": "hold"})]
        await until(lambda: pool.in_flight == 1)
        ids.append(await caller.send("run", {"do": "hold"}))
        assert "1 runs wait for that already" in (await caller.run(do="hold"))["error"]
        for held in reversed(ids):
            await caller.ask("cancel", {"request_id": held.decode()})
            await caller.reply(held)
