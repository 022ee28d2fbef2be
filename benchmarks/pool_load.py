"""What the pool benchmark does to a pool: the same code in the interpreter of each side, and nothing but the standard
library. A side gives `run` a `Side`; `benchmarks.pool_ours` and `benchmarks.pool_verifiers` are the two.

A round: a pool comes up under 1,024 rollouts. Then more come until a server must be started for them, and 64 wait for
it, while 32 of the first leave. Then rollouts come and go on the warm pool.
"""

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

ROLLOUTS = 1024

MULTIPLEX = 32
"""Rollouts on a server."""

LATE = 2 * MULTIPLEX
"""Rollouts that wait for servers when all slots are taken: two servers' worth."""

LEAVING = 32
"""Rollouts that leave meanwhile."""

HANGING = 2
"""Of ten starts in a row, which one hangs (counted from 0)."""

WARM_TASKS = 16
WARM_ACQUIRES = 2048
"""How many acquires, by how many tasks, the rate of a warm pool is taken from."""


class Pool(Protocol):
    """What both pools have. A slot is `(base_url, model_secret, state_secret)`."""

    def acquire(self, session: Any) -> AbstractAsyncContextManager[tuple[str, str, str]]: ...


@dataclass(slots=True)
class Starts:
    """The fake tunnel's starts: `takes` seconds each, or `hangs` seconds for one in ten where that is given."""

    takes: float
    hangs: float | None
    begun: int = 0
    """How many there were."""
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set as one begins."""
    _next: int = 0
    _under_way: int = 0
    _none_under_way: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> None:
        """What the fake tunnel does before it works."""
        self.begun += 1
        self._under_way += 1
        self.has_begun.set()
        self._none_under_way.clear()
        try:
            await asyncio.sleep(self.next())
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._none_under_way.set()

    def next(self) -> float:
        """Seconds that the next start takes."""
        hanging = self._next % 10 == HANGING
        self._next += 1
        return self.takes if self.hangs is None or not hanging else self.hangs

    async def begin_anew(self) -> None:
        """Waits for those under way. The next one hangs, in the case in which some do."""
        await self._none_under_way.wait()
        self._next = HANGING
        self.has_begun.clear()


class Side(Protocol):
    """One project's pool over the fake tunnel."""

    def pool(self, starts: Starts, multiplex: int) -> AbstractAsyncContextManager[Pool]: ...

    def session(self) -> Any:
        """A new rollout's session."""
        ...


@dataclass(frozen=True, slots=True)
class Measured:
    """One round of a case."""

    all_slots_s: float
    """From before the pool is started until each of the 1,024 holds a slot."""
    freed_slot_wait_max_s: float
    """The longest that a slot was free on a live server while a rollout waited."""
    servers: int
    """Servers that had been started, or begun to be, by then."""
    acquires_per_s: float
    """Slots acquired and released a second, with 992 of the 1,024 held."""


class Rollouts:
    """Rollouts that hold a slot until they are told to leave; remembers when slots were taken and freed."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._leave: list[asyncio.Event] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.taken: list[tuple[float, str]] = []
        self.freed: list[tuple[float, str]] = []

    def come(self, sessions: list[Any]) -> "asyncio.Future[Any]":
        """They ask for their slots; done when each has one."""
        seated = []
        for session in sessions:
            has_slot = asyncio.get_running_loop().create_future()
            leave = asyncio.Event()
            self._leave.append(leave)
            self._tasks.append(asyncio.create_task(self._rollout(session, has_slot, leave)))
            seated.append(has_slot)
        return asyncio.gather(*seated)

    async def _rollout(self, session: Any, has_slot: "asyncio.Future[None]", leave: asyncio.Event) -> None:
        try:
            async with self._pool.acquire(session) as (base_url, _, _):
                self.taken.append((time.perf_counter(), base_url))
                has_slot.set_result(None)
                await leave.wait()
                self.freed.append((time.perf_counter(), base_url))
        except Exception as error:  # whoever waits for the slot hears it
            if has_slot.done():
                raise
            has_slot.set_exception(error)

    async def go(self, number: int) -> None:
        """So many of those that hold a slot leave, the first to come first."""
        leaving = range(len(self._leave))[:number]
        for index in leaving:
            self._leave[index].set()
        await asyncio.gather(*(self._tasks[index] for index in leaving))
        del self._leave[:number], self._tasks[:number]

    @property
    def holding(self) -> int:
        return len(self._tasks)


def freed_slot_wait(freed: list[tuple[float, str]], taken: list[tuple[float, str]]) -> float:
    """The longest that a slot was free while somebody waited, in seconds.

    A freed slot was free until the next was taken on its server, at the latest until nobody waited any more: the last
    was `taken`. Both lists are `(time, base_url)`, in the order of time, of the time in which somebody waited.
    """
    last = taken[-1][0]
    left = list(taken)
    longest = 0.0
    for at, base_url in freed:
        again = next((entry for entry in left if entry[1] == base_url and entry[0] >= at), None)
        if again is not None:
            left.remove(again)
        longest = max(longest, (again[0] if again else last) - at)
    return longest


async def measure(side: Side, starts: Starts) -> Measured:
    """One round."""
    sessions = [side.session() for _ in range(ROLLOUTS)]
    warm = [side.session() for _ in range(WARM_ACQUIRES)]
    began = time.perf_counter()
    async with side.pool(starts, MULTIPLEX) as pool:
        rollouts = Rollouts(pool)
        await rollouts.come(sessions)
        all_slots = time.perf_counter() - began
        servers = starts.begun

        await starts.begin_anew()
        full = asyncio.create_task(starts.has_begun.wait())
        while not full.done():  # a pool may have slots to spare
            rollouts.taken.clear()
            last = rollouts.come([side.session()])
            await asyncio.wait({last, full}, return_when=asyncio.FIRST_COMPLETED)
        seated = rollouts.come([side.session() for _ in range(LATE - 1)])
        for _ in range(LEAVING):
            await asyncio.sleep(starts.takes / (2 * LEAVING))  # all leave before the start is over
            await rollouts.go(1)
        await asyncio.gather(last, seated)
        waited = freed_slot_wait(rollouts.freed, rollouts.taken)

        await rollouts.go(rollouts.holding - (ROLLOUTS - MULTIPLEX))
        began = time.perf_counter()
        await asyncio.gather(*(_come_and_go(pool, warm[index::WARM_TASKS]) for index in range(WARM_TASKS)))
        per_second = WARM_ACQUIRES / (time.perf_counter() - began)
        await rollouts.go(rollouts.holding)
    return Measured(all_slots, waited, servers, per_second)


async def _come_and_go(pool: Pool, sessions: list[Any]) -> None:
    for session in sessions:
        async with pool.acquire(session):
            await asyncio.sleep(0)


def main(side: Callable[[], Side]) -> None:
    """`python -m … TAKES [HANGS]`: one round, its figures as JSON on the last line."""
    takes, *hangs = (float(argument) for argument in sys.argv[1:])
    logging.disable(logging.WARNING)  # a rollout without a model call is worth one to us, and none is made here
    made = side()

    async def run() -> Measured:
        return await measure(made, Starts(takes, hangs[0] if hangs else None))

    print(json.dumps(asdict(asyncio.run(run()))))
