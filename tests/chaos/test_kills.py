"""A thousand kills under load: nobody waits for ever, and nothing is left of the dead. `pytest -m chaos -s`."""

import asyncio
import os
import random
import re
import signal
import sys
import time
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.envserver.caller import Caller
from tests.envserver.processes import alive
from tests.helpers import until

pytestmark = pytest.mark.chaos

ROOT = Path(__file__).parents[2]

KILLS = 1000
WORKERS = 4
IN_FLIGHT = 64

WARM = 100
"""Kills until the broker's descriptors and memory are taken for its usual ones."""

POOL = f"""
from envserver.limits import PoolPolicy
from envserver.pool import EnvServerPool
from envserver.serve import serve_until_told

policy = PoolPolicy(
    start_backoff=0.01, start_backoff_cap=0.1, open_backoff=0.01, open_backoff_cap=0.1, reap_interval=0.0,
    free_restarts=10**6, spawn_floor=10**6,
)
pool = EnvServerPool("tests.envserver.envs:scripted", max_workers={WORKERS}, elastic=False, policy=policy)
serve_until_told(pool, ready=lambda address: print(address, pool._folder, flush=True))
"""

RUNS: list[dict[str, Any]] = [
    {"do": "hold"},  # until its worker dies
    {"do": "hold", "deltas": 3},
    {"echo": "quick"},
    {"deltas": 50, "size": 200},
    {"deltas": 5, "size": 100_000},
    {"blob": b"x" * 100_000},
]

SIGNALS = [signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT]

DEAD = re.compile(r"worker \d+ \(pid (\d+)\) of the env server was killed by SIG[A-Z]+; ")


class Load:
    """Keeps `IN_FLIGHT` runs under way, and counts what becomes of each."""

    def __init__(self, caller: Caller, luck: random.Random) -> None:
        self._caller = caller
        self._luck = luck
        self.pending: set[bytes] = set()
        self.cancels: set[bytes] = set()
        self.going = False
        self.counts: Counter[str] = Counter()
        self.killed: dict[int, float] = {}
        """When, by pid."""
        self.to_error: list[float] = []

    async def go(self) -> None:
        self.going = True
        await self.fill()

    async def rest(self) -> None:
        """Return when all has been answered: what is held is given up."""
        self.going = False
        for request_id in [*self.pending]:
            self.cancels.add(await self._caller.send("cancel", {"request_id": request_id.decode()}))
        await until(lambda: not self.pending and not self.cancels)

    async def receive(self) -> None:
        while True:
            request_id, kind, data = await self._caller.receive()
            if request_id in self.cancels:
                self.cancels.discard(request_id)
                continue
            assert request_id in self.pending, "it was answered before, or never asked"
            if kind == b"delta":
                self.counts["deltas"] += 1
                continue
            self.pending.discard(request_id)
            if self._count(data, time.monotonic()):
                await self.fill()

    def _count(self, data: dict[str, Any], now: float) -> bool:
        """Whether it is worth asking at once: not where no worker is ready."""
        error = str(data["error"])
        if data["success"]:
            self.counts["done"] += 1
        elif dead := DEAD.match(error):
            self.counts["failed with their worker"] += 1
            self.to_error.append(now - self.killed[int(dead[1])])
        else:
            assert error == "cancelled" or error.startswith("no worker is ready"), error
            self.counts[error[:18]] += 1
            return error == "cancelled"
        return True

    async def fill(self) -> None:
        while self.going and len(self.pending) < IN_FLIGHT:
            # Each is a task of its own: of one that was there at two deaths, the rest would run alone.
            run = {**self._luck.choice(RUNS), "number": self.counts["asked"]}
            self.pending.add(await self._caller.send("run", run))
            self.counts["asked"] += 1


class Broker:
    """What the pool's process holds."""

    def __init__(self, pid: int, folder: Path) -> None:
        self._process = psutil.Process(pid)
        self._children = Path(f"/proc/{pid}/task/{pid}/children")
        self._folder = folder

    def workers(self) -> list[int]:
        """Their pids, of those too that have not been reaped."""
        return [int(pid) for pid in self._children.read_text().split()]

    def workers_but(self, killed: Collection[int]) -> list[int]:
        return [pid for pid in self.workers() if pid not in killed]

    def zombies(self) -> int:
        return sum(not alive(pid) for pid in self.workers())

    def holds(self) -> tuple[int, int, int]:
        """Descriptors, sockets in its folder, worker processes."""
        sockets = sum(name.isdecimal() for name in os.listdir(self._folder))
        return self._process.num_fds(), sockets, len(self.workers())

    def mib(self) -> float:
        return float(self._process.memory_info().rss) / (1 << 20)


async def test_after_a_thousand_kills_all_was_answered_and_nothing_is_left() -> None:
    luck = random.Random(1000)
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", POOL, stdout=PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert process.stdout is not None
    receiving = None
    try:
        address, folder = (await process.stdout.readline()).decode().split()
        broker = Broker(process.pid, Path(folder))
        with Caller(address) as caller, Caller(address) as asker:

            async def ready(count: int) -> None:
                while (await asker.ask("health"))["ready"] < count:  # noqa: ASYNC110 - each asks for the next
                    await asyncio.sleep(0.01)

            load = Load(caller, luck)
            receiving = asyncio.create_task(load.receive())
            await ready(WORKERS)
            await load.go()
            for kills in range(1, KILLS + 1):
                async with asyncio.timeout(120):
                    await ready(WORKERS - 2)
                assert not receiving.done(), receiving.exception()
                await load.fill()
                await until(lambda: broker.workers_but(load.killed))  # the broker may be about to hear of them
                victim = luck.choice(broker.workers_but(load.killed))
                load.killed[victim] = time.monotonic()
                os.kill(victim, luck.choice(SIGNALS))
                if kills in (WARM, KILLS):
                    await load.rest()
                    await ready(WORKERS)
                    # One that was killed may not have been buried when its successor is ready.
                    await until(lambda: broker.holds()[1:] == (WORKERS, WORKERS))
                    if kills == WARM:
                        usual, usual_mib = broker.holds(), broker.mib()
                        await load.go()
            await until(lambda: broker.holds() == usual)
            grown, zombies = broker.mib() - usual_mib, broker.zombies()
            family = broker.workers()
            assert all([(await asker.run())["success"] for _ in range(100)])
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        if receiving is not None:
            receiving.cancel()
        if process.returncode is None:
            process.kill()
        await process.communicate()
    times = sorted(load.to_error)
    print(
        f"\n{KILLS} kills in {time.monotonic() - began:.0f} s: {dict(load.counts)}, unanswered {len(load.pending)}; "
        f"kill to error p50 {times[len(times) // 2] * 1e3:.1f} ms, p95 {times[int(len(times) * 0.95)] * 1e3:.1f} ms, "
        f"max {times[-1] * 1e3:.0f} ms; fds {usual[0]}, RSS {usual_mib:.1f} {grown:+.1f} MiB, zombies {zombies}"
    )
    ended = load.counts.total() - load.counts["asked"] - load.counts["deltas"]
    assert ended == load.counts["asked"]
    assert load.counts["failed with their worker"] > KILLS
    assert grown < 5
    assert zombies == 0
    assert not any(alive(pid) for pid in family)
    assert not Path(folder).exists()  # noqa: ASYNC240
