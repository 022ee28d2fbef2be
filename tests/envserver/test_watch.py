"""Hung workers, over real processes: who is told apart from whom, who is killed, and what is said of it."""

import asyncio
import dataclasses
import inspect
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from types import FunctionType

import pytest
from typer.testing import CliRunner

from envserver.cli import app
from envserver.errors import EnvServerError
from envserver.pool import EnvServerPool
from envserver.stacks import SWITCH, read_stacks
from envserver.worker import Worker
from tests.envserver import hardships
from tests.envserver.caller import Caller
from tests.envserver.processes import alive
from tests.envserver.test_pool import QUICK, pool_of, ready
from tests.helpers import until

HARD = "tests.envserver.hardships"

WATCHFUL = dataclasses.replace(
    QUICK,
    probe_interval=0.25,
    silent_after=0.5,
    last_choice_after=0.75,
    kill_stopped_after=0.75,
    kill_grace=0.2,
    blocked_share=0.15,  # the kernel counts in hundredths of a second, and a look is a quarter of one here
)
"""The same rules with shorter times."""

TWICE = 2 * WATCHFUL.kill_stopped_after


def silence(pool: EnvServerPool, worker: Worker) -> float:
    """Seconds, as the pool counts them; none of a worker that it watches no more."""
    watched = pool._watch._vigil._watched.get(worker.generation)
    return 0.0 if watched is None else watched.seconds


def where(function: FunctionType, text: str) -> str:
    """How a stack names the line of `function` that has `text`."""
    lines, first = inspect.getsourcelines(function)
    (number,) = [first + i for i, line in enumerate(lines) if text in line]
    return f'hardships.py", line {number} in {function.__name__}'


async def test_of_workers_that_do_not_answer_only_the_stopped_one_is_killed_and_each_other_says_where_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rows 6 and 11. Each is silent for twice the time after which a stopped one is killed."""
    lines = {
        "spin": [where(hardships.spin, "while True"), where(hardships.spin, "pass")],
        "hold the GIL": [where(hardships.hold_the_gil, "re.match")],
        "sleep": [where(hardships.sleep, "time.sleep")],
        "subprocess": [where(hardships.work_elsewhere, "subprocess.run")],
        "deadlock": [where(hardships.deadlock, "for ever")],
    }
    kinds = {"spin": "busy", "hold the GIL": "busy", "sleep": "blocked", "subprocess": "busy", "deadlock": "blocked"}
    async with pool_of(6, "hard", module=HARD, policy=WATCHFUL) as (pool, caller):
        runs: dict[str, tuple[Worker, bytes]] = {}
        for what in [*lines, "hold"]:
            request_id = await caller.send("run", {"do": what})
            await until(lambda: pool.in_flight > len(runs))
            (worker,) = [
                worker
                for worker in pool._workers.values()
                if worker.requests and worker not in [other for other, _ in runs.values()]
            ]
            runs[what] = worker, request_id
        stopped, its_run = runs.pop("hold")
        os.kill(stopped.pid, signal.SIGSTOP)

        error = (await caller.reply(its_run))["error"]
        assert f"(pid {stopped.pid})" in error
        assert re.search(r"was killed by SIGKILL \(it had been stopped by a signal for \d+ s\); this request", error)
        assert not alive(stopped.pid)
        await until(lambda: all(silence(pool, worker) >= TWICE for worker, _ in runs.values()), timeout=120)
        await until(lambda: [worker.pid for worker in pool._dispatcher.ready] not in ([], [stopped.pid]), timeout=120)
        assert pool.states() == {"ready": 1, "suspect": 5, "in flight": 5}
        assert all(alive(worker.pid) for worker, _ in runs.values())

        said = [record.getMessage() for record in caplog.records if "has not answered for" in record.getMessage()]
        for what, (worker, _) in runs.items():
            (report,) = [text for text in said if text.startswith(str(worker))]
            assert f"it is {kinds[what]}; 1 requests are on it; it was here:" in report
            assert any(line in report for line in lines[what]), report
            assert "orphan.py" not in report
        (report,) = [text for text in said if text.startswith(str(stopped))]
        assert report.endswith("it is stopped by a signal; 1 requests are on it; it is killed after 0.75 s")
    assert len(said) == 6, "each once"


async def test_blocked_workers_are_killed_where_the_policy_says_so_and_busy_ones_are_not() -> None:
    policy = dataclasses.replace(WATCHFUL, kill_blocked_after=WATCHFUL.silent_after)
    async with pool_of(3, "hard", module=HARD, policy=policy) as (pool, caller):
        blocked = [await caller.send("run", {"do": what}) for what in ("sleep", "deadlock")]
        await caller.send("run", {"do": "spin"})
        await until(lambda: pool.in_flight == 3)
        (busy,) = [worker for worker in pool._workers.values() if [*worker.requests] == [b"3"]]
        for request_id in blocked:
            error = (await caller.reply(request_id))["error"]
            assert "was killed by SIGKILL (kill_blocked_after: it had been silent for" in error
            assert "while its processes used no CPU); this request was running there" in error
        await ready(pool, 2)
        await until(lambda: silence(pool, busy) >= 4 * WATCHFUL.silent_after)
        assert alive(busy.pid)
        assert pool.in_flight == 1


async def test_a_silent_worker_is_the_last_to_get_runs_until_it_answers_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "envserver")
    gates = [tmp_path / "first", tmp_path / "second"]
    options = {"module": HARD, "policy": WATCHFUL, "log_path": tmp_path / "env.log"}
    async with pool_of(2, "hard", **options) as (pool, caller):  # type: ignore[arg-type]
        blocked = [await caller.send("run", {"do": "block", "gate": str(gates[0])})]
        await until(lambda: pool.states().get("suspect") == 1)
        (suspect,), (other,) = pool._dispatcher.suspect, pool._dispatcher.ready
        health = await caller.ask("health")
        assert (health["success"], health["ready"], health["suspect"], health["capacity"]) == (True, 1, 1, 128)
        held = [await caller.send("run", {"do": "hold"}) for _ in range(8)]
        await until(lambda: len(other.requests) == 8)
        assert len(suspect.requests) == 1, "although it has less to do"

        blocked.append(await caller.send("run", {"do": "block", "gate": str(gates[1])}))
        await until(lambda: pool.states().get("suspect") == 2)
        blocked.append(await caller.send("run", {}))
        said = await asyncio.to_thread(CliRunner().invoke, app, ["health", pool.address])
        assert (said.exit_code, said.output) == (0, "ready 0, suspect 2, starting 0, capacity 0\n")
        assert len(suspect.requests) == 2, "there is no other"

        for gate in gates:
            gate.touch()
        for request_id in blocked:
            assert (await caller.reply(request_id))["success"]
        await ready(pool, 2)
        assert caplog.text.count("answers again, after") == 2
        assert (await caller.ask("health"))["capacity"] == 256
        assert suspect.stacks_path is not None
        await until(lambda: read_stacks(suspect.stacks_path) == "")
        await until(lambda: "the event loop stood still for" in (tmp_path / "env-worker-0.log").read_text())
        for request_id in held:
            await caller.ask("cancel", {"request_id": request_id.decode()})
        assert "SIGKILL" not in caplog.text


async def test_an_elastic_pool_whose_workers_are_all_silent_starts_another(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    options = {"module": HARD, "policy": WATCHFUL, "elastic": True}
    async with pool_of(2, "hard", **options) as (pool, caller):  # type: ignore[arg-type]
        blocked = await caller.send("run", {"do": "block", "gate": str(gate)})
        await until(lambda: pool.states() == {"ready": 1, "suspect": 1, "in flight": 1})
        assert (await caller.run())["success"]
        gate.touch()
        assert (await caller.reply(blocked))["success"]


async def test_without_stacks_faulthandler_is_the_envs_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(SWITCH, "0")
    async with pool_of(1, "hard", module=HARD, policy=WATCHFUL) as (pool, caller):
        (worker,) = pool._dispatcher.ready
        assert worker.stacks_path is None
        await caller.send("run", {"do": "sleep"})
        await until(lambda: "has not answered" in caplog.text)
    assert "it is blocked; 1 requests are on it (ENVSERVER_STACKS=0: no stacks)" in caplog.text


async def test_a_watch_that_fails_is_the_end_of_the_pool_which_would_only_look_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Row 30."""

    def broken(pids: list[int]) -> None:
        raise RuntimeError("the watch is broken")

    monkeypatch.setattr("envserver.watch.look", broken)
    async with pool_of(1, "hard", module=HARD, policy=WATCHFUL) as (pool, caller):
        reply = await caller.run(do="sleep")
        assert "supervisor failed: RuntimeError('the watch is broken')" in reply["error"]
        with pytest.raises(EnvServerError, match="the watch is broken"):
            await pool.wait_failed()


BROKER = """
import asyncio, sys
from envserver.limits import PoolPolicy
from envserver.pool import EnvServerPool

async def main(env, policy):
    async with EnvServerPool(env, max_workers=2, elastic=False, policy=policy) as pool:
        while pool.states()["ready"] < 2:
            await asyncio.sleep(0.01)
        print(pool.address, flush=True)
        await asyncio.to_thread(input)
        print(pool.states(), flush=True)

asyncio.run(main(sys.argv[1], eval(sys.argv[2])))
"""


async def test_a_broker_that_is_stopped_for_long_kills_nobody_when_it_goes_on(tmp_path: Path) -> None:
    """One worker is idle, the other blocked for a moment before and after: who counts what is in between as its silence
    finds it blocked beyond the limit."""
    gate = tmp_path / "gate"
    policy = dataclasses.replace(WATCHFUL, kill_blocked_after=2.0)
    arguments = ["-c", BROKER, f"{HARD}:hard", repr(policy)]
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(60):
            with Caller((await process.stdout.readline()).decode().strip()) as caller:
                blocked = await caller.send("run", {"do": "block", "gate": str(gate)})
                while b"has not answered" not in await process.stderr.readline():
                    pass
                process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(2.1)  # the broker is away for longer than the limit
                process.send_signal(signal.SIGCONT)
                await asyncio.sleep(0.4)
                gate.touch()
                assert (await caller.reply(blocked))["success"]
                process.stdin.write(b"\n")
                assert b"'ready': 2," in await process.stdout.readline()
                await process.wait()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            await process.wait()
    assert process.returncode == 0
