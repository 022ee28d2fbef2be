"""What a task that kills every worker it meets costs, and whether its neighbours are blamed: in virtual time.

The pool of the env server's sheet, 4 workers with 16 places each, driven by the real decisions (`envserver.slots`,
`envserver.poison`). 16 innocents run beside one or two poisons; every client tries again, under a new id, until it is
answered or refused. `random kills`: besides, each worker is killed by chance once in ten minutes on average. `one
task`: the 16 innocents are the rollouts of one task, which are told apart by nothing.

`deaths_until_refused`: workers that died with a poison on them until it was refused, the most of all lives.
`innocents_refused`: of 16, the mean of all lives. `deaths`: workers that died in a life, the mean. `answered_after`:
seconds until the last innocent had its answer, the median. Subjects: `ours`, and `co-residents`, a rule that refuses
whatever was there at four deaths.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean, median

from benchmarks.report import Figure, parse, show, write
from envserver.limits import PoolPolicy
from envserver.poison import Death, Records, Suspects, Verdict
from envserver.slot import Action, Bury, Drain, Slot, Spawn, State, Terminate
from envserver.slots import Slots

SUBJECTS = ("ours", "co-residents")

WORKERS, PLACES, INNOCENTS = 4, 16, 16

BOOT = 2.0
"""Seconds a worker takes to be ready."""

AGAIN = 0.1
"""Seconds until a client tries again."""

KILL_EVERY = 600.0
"""Seconds between two random kills of a worker, on average."""

KILLED = -9


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    poisons: int
    kills: bool
    one_task: bool = False


CASES = [
    *(
        Case(f"{count} poison{'s' * (count > 1)}{', random kills' * kills}", count, kills)
        for count in (1, 2)
        for kills in (False, True)
    ),
    Case("1 poison, random kills, one task", 1, True, one_task=True),
]


class CoResidents(Records):
    """Blames whoever was there."""

    def verdict(self, task: bytes, now: float) -> Verdict:
        record = self._records.get(task)
        return Verdict.REFUSED if record is not None and record.count >= 4 else Verdict.FREE


@dataclass(eq=False, slots=True)
class Client:
    """Wants one answer."""

    task: bytes
    poison: bool
    deaths: int = 0
    """Of workers that had its run."""
    refused: bool = False
    answered_at: float | None = None


@dataclass(eq=False, slots=True)
class Worker:
    generation: int
    runs: set[Client] = field(default_factory=set)


class World:
    """The pool's shell and its clients."""

    def __init__(self, case: Case, subject: str, rng: random.Random) -> None:
        policy = PoolPolicy()
        self.now = 0.0
        self.deaths = 0
        self._rng = rng
        self._kills = case.kills
        self._slots = Slots(policy, max_workers=WORKERS, elastic=False, multiplex=PLACES, luck=iter(rng.random, None))
        self._records = Records(policy) if subject == "ours" else CoResidents(policy)
        self._suspects: Suspects[Client] = Suspects(policy, self._records)
        self._workers: dict[Slot, Worker] = {}
        self._alone: dict[Slot, bytes] = {}
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.clients = [
            Client(b"all" if case.one_task else b"innocent %d" % number, poison=False) for number in range(INNOCENTS)
        ] + [Client(b"poison %d" % number, poison=True) for number in range(case.poisons)]

    def live(self) -> None:
        """Until each client is answered or refused."""
        self._do(self._slots.start(self.now))
        rng = self._rng
        rng.shuffle(self.clients)
        for client in self.clients:
            self._at(BOOT + rng.uniform(0, 1), lambda client=client: self._submit(client))  # type: ignore[misc]
        while any(not client.refused and client.answered_at is None for client in self.clients):
            due = min(self._slots.due_at(), self._suspects.due_at())
            if self._agenda and self._agenda[0][0] <= due:
                self.now, _, step = heapq.heappop(self._agenda)
                step()
            else:
                self.now = due
            self._look()

    def _at(self, delay: float, step: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + delay, next(self._order), step))

    # Clients

    def _submit(self, client: Client) -> None:
        match self._records.verdict(client.task, self.now):
            case Verdict.REFUSED:
                client.refused = True
            case Verdict.ALONE:
                self._suspects.wait(client.task, client)
            case Verdict.FREE:
                ready = [slot for slot in self._workers if slot.state is State.READY and not slot.lone]
                if ready:
                    self._run(client, min(ready, key=lambda slot: len(self._workers[slot].runs)))
                else:
                    self._at(1.0, lambda: self._submit(client))

    def _run(self, client: Client, slot: Slot) -> None:
        worker = self._workers[slot]
        worker.runs.add(client)
        if client.poison:
            self._at(self._rng.uniform(0.1, 2), lambda: self._die(slot, worker, client))
        else:
            self._at(self._rng.uniform(1, 5), lambda: self._answer(slot, worker, client))

    def _answer(self, slot: Slot, worker: Worker, client: Client) -> None:
        if client not in worker.runs:
            return
        worker.runs.discard(client)
        client.answered_at = self.now
        self._records.succeeded(client.task)
        if slot.lone:
            self._free(slot)
            self._do(self._slots.retire(slot, self.now))

    # Workers

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            slot = action.slot
            match action:
                case Spawn():
                    worker = self._workers[slot] = Worker(slot.generation)
                    self._do(self._slots.spawned(slot, self.now))
                    self._at(BOOT, lambda slot=slot, worker=worker: self._booted(slot, worker))  # type: ignore[misc]
                    if self._kills:
                        end = self._rng.expovariate(1 / KILL_EVERY)
                        self._at(end, lambda slot=slot, worker=worker: self._die(slot, worker))  # type: ignore[misc]
                case Drain():
                    self._do(self._slots.empty(slot, self.now))
                case Terminate():
                    self._do(self._slots.exited(slot, self.now, 0))
                case Bury():
                    del self._workers[slot]
                    self._do(self._slots.closed(slot, self.now))

    def _booted(self, slot: Slot, worker: Worker) -> None:
        if self._workers.get(slot) is worker:
            self._do(self._slots.answered(slot, self.now))

    def _die(self, slot: Slot, worker: Worker, cause: Client | None = None) -> None:
        """By chance, or by a poison that still runs there."""
        if self._workers.get(slot) is not worker or (cause is not None and cause not in worker.runs):
            return
        if not self._slots.up:
            return  # the pool's own start is none of this
        self.deaths += 1
        tasks = {client.task for client in worker.runs}
        if tasks:
            death = Death(worker.generation, "was killed", self.now)
            self._records.died(tasks, death, self.now, alone=slot.lone)
        for client in worker.runs:
            client.deaths += 1
            self._at(AGAIN, lambda client=client: self._submit(client))  # type: ignore[misc]
        worker.runs.clear()
        self._free(slot)
        self._do(self._slots.exited(slot, self.now, KILLED))

    def _free(self, slot: Slot) -> None:
        if (task := self._alone.pop(slot, None)) is not None:
            self._suspects.ended(task)

    def _look(self) -> None:
        for _, verdict, client in self._suspects.released(self.now):
            if verdict is Verdict.REFUSED:
                client.refused = True
            else:
                self._submit(client)
        for slot in [*self._workers]:
            if slot.lone and slot.state is State.READY and slot not in self._alone:
                if (taken := self._suspects.take()) is None:
                    self._do(self._slots.retire(slot, self.now))
                else:
                    self._alone[slot] = taken[0]
                    self._run(taken[1], slot)
        self._slots.lone_wanted = self._suspects.wanted
        self._do(self._slots.tick(self.now))


def measure(case: Case, subject: str, lives: int) -> Iterator[Figure]:
    worlds = []
    for seed in range(lives):
        world = World(case, subject, random.Random(f"{case.name} {seed}"))
        world.live()
        worlds.append(world)
    poisons = [client.deaths for world in worlds for client in world.clients if client.poison]
    innocents = [[client for client in world.clients if not client.poison] for world in worlds]
    refused = mean(sum(client.refused for client in clients) for clients in innocents)
    yield Figure("deaths_until_refused", case.name, subject, max(poisons), "deaths")
    yield Figure("innocents_refused", case.name, subject, refused, "of 16")
    yield Figure("deaths", case.name, subject, mean(world.deaths for world in worlds), "1")
    answered = [max((client.answered_at or 0.0) for client in clients) for clients in innocents]
    yield Figure("answered_after", case.name, subject, median(answered), "s")


def run(lives: int) -> list[Figure]:
    return [figure for case in CASES for subject in SUBJECTS for figure in measure(case, subject, lives)]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse("Monte Carlo of tasks that kill their workers, in virtual time", arguments)
    figures = run(50 if options.quick else 1000)
    show(figures, "Poison: deaths until it is refused, and neighbours that are blamed")
    if options.json is not None:
        write(figures, options.json)


if __name__ == "__main__":
    main()
