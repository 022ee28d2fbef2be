"""What a pool's worker slots do next: the decision, without I/O and without a clock.

Events and the time (seconds of any monotonic clock) go in, actions come out. The shell carries them out, in order,
and reports back: a `Spawn` by `spawned` or `spawn_failed`, a `Bury` by `closed`.

                                                SUSPECT
                                           silent ^ | answered
                                                  | v
    SPAWNING --spawned--> STARTING --answered--> READY --drain--> DRAINING    (SUSPECT: the same ways as READY)
       |                     | overdue, lost       | lost, hung      | empty, overdue, lost, hung
       | failed              v                     v                 v
       |                  KILLING <----------------+-----------------+
       |                     | exited (so from every state of a living worker)
       v                     v
    BACKOFF <--again------ DYING --done--> REMOVED
       | due                 | spent
       +--> SPAWNING         +-----------> RETIRED      the last two leave the map

A slot that has spent its tries is not kept: what is missing is then a place, which a fresh slot may open once
the timer of all openings allows it. So nothing that cannot start counts as capacity or blocks growth.

Two kinds of slots are beside `max_workers`. A lone one gets a single run and is never ready for others; it is opened as
`lone_wanted` asks for it. And while a worker is recycled there are two for one place: its replacement until that is
ready, which only then drains the old one, and after that the old one until its last run has ended.

A suspect worker keeps its place and what it runs, and gets new runs only where no other can take them. Silence is no
proof (`hung` looks for one), so it is not replaced; but an elastic pool of which no worker answers starts another.
"""

import itertools
import math
from collections.abc import Callable, Iterable

from envserver.limits import PoolPolicy
from envserver.slot import TRANSITIONS, Action, Bury, Drain, Event, GiveUp, Slot, Spawn, State, Terminate, Timer

ONE = 1 - 1e-9  # a token, whatever the arithmetic of its parts
ENDS = frozenset({State.REMOVED, State.RETIRED})
TIMED = frozenset({State.STARTING, State.DRAINING, State.KILLING})


class Slots:
    """The map of a pool's slots.

    `max_workers` None: no cap (elastic only). `min_workers`: what an elastic pool starts with and never goes below.
    `multiplex`: requests a worker is meant for. `luck` gives numbers between 0 and 1 for the jitter.
    """

    def __init__(
        self,
        policy: PoolPolicy,
        *,
        max_workers: int | None,
        elastic: bool,
        multiplex: int,
        min_workers: int = 1,
        luck: Iterable[float] = itertools.repeat(0.5),
    ) -> None:
        if not elastic and max_workers is None:
            raise ValueError("a pool that is not elastic needs max_workers")
        self.policy = policy
        self.max_workers = max_workers
        self.multiplex = multiplex
        self.elastic = elastic
        self.floor = min_workers if elastic or max_workers is None else max_workers
        self.target = self.floor
        """Places the pool has had ready, or starts with: what is missing to it is opened again without demand."""
        self.lone_wanted = 0
        """Lone workers there are to be, the busy ones included."""
        self.map: dict[int, Slot] = {}
        self.up = False
        """A worker has been ready: the start has succeeded."""
        self.on_move: Callable[[Slot, State, Event], None] = lambda slot, was, event: None
        """Told of each change of state once it has happened: the slot, its state before, and why."""
        self._closing = False
        self._luck = iter(luck)
        self._generations = itertools.count(1)
        self._opening = Timer(policy)
        self._recycling = Timer(policy)
        self._lone = Timer(policy)
        self._low_since = math.inf
        self._look_at = -math.inf
        self._tokens: float = self._bucket
        self._now = -math.inf

    # What there is

    def count(self, *states: State) -> int:
        """Of the slots that all runs can go to, or could."""
        return sum(slot.state in states and not slot.lone for slot in self.map.values())

    @property
    def ready(self) -> int:
        return self.count(State.READY)

    @property
    def starting(self) -> int:
        return self.count(State.SPAWNING, State.STARTING)

    @property
    def capacity(self) -> int:
        """Requests the ready workers are meant for."""
        return self.ready * self.multiplex

    @property
    def own(self) -> int:
        """Slots that are not beside `max_workers`."""
        return sum(not slot.beside for slot in self.map.values())

    @property
    def scale_up_at(self) -> float:
        """Requests in flight at which `tick` would start another worker, or infinity."""
        if self._closing or not self.elastic or self._room <= 0 or self._opening.at > self._now:
            return math.inf
        return self._share * self._coming  # never less than the share of what is ready

    def due_at(self) -> float:
        """When `tick` must be called at the latest, if nothing else happens; infinity if never."""
        times = [slot.due for slot in self.map.values() if slot.state in TIMED]
        waiting = [slot.due for slot in self.map.values() if slot.state is State.BACKOFF]
        if waiting:
            token_at = self._now + max(0.0, 1 - self._tokens) * self.policy.spawn_period / self._bucket
            times.append(max(token_at, min(waiting)))
        times += [timer.at for timer in (self._opening, self._lone, self._recycling) if timer.at > self._now]
        if self._can_shrink:
            times.append(self._look_at)
        if self.policy.max_worker_age is not None and self._can_recycle:
            oldest = min((slot.ready_at or 0.0 for slot in self._serving), default=math.inf)
            times.append(max(oldest + self.policy.max_worker_age, self._recycling.at))
        return min(times, default=math.inf)

    @property
    def lone(self) -> int:
        """Slots for one run alone, in whatever state."""
        return sum(slot.lone for slot in self.map.values())

    @property
    def lone_failures(self) -> int:
        """Lone workers that did not start, one after the other."""
        return self._lone.failures

    # What happens

    def start(self, now: float) -> list[Action]:
        """Open the first places: all of a static pool, one of an elastic one."""
        for _ in range(self.target):
            self._open(now, self.policy.start_tries)
        return self.tick(now)

    def tick(self, now: float, in_flight: int | None = None) -> list[Action]:
        """Whatever is due: call it at `due_at`, when `in_flight` reaches `scale_up_at`, and when workers are missed.

        `in_flight`: requests on the ready workers. None: what they have to do is not known, so it decides nothing.
        """
        self._refill(now)
        actions: list[Action] = []
        for slot in self.map.values():
            if slot.due > now:
                continue
            match slot.state:
                case State.STARTING:
                    slot.overdue = True
                    actions += self._kill(slot, Event.OVERDUE, now, hard=True)
                case State.DRAINING:
                    actions += self._kill(slot, Event.OVERDUE, now)
                case State.KILLING:
                    slot.due = math.inf
                    actions.append(Terminate(slot, hard=True))
        self._open_missing(now, in_flight or 0)
        self._open_lone(now)
        self._open_replacement(now)
        if in_flight is not None:
            actions += self._shrink(now, in_flight)
        for slot in sorted(self.map.values(), key=lambda slot: slot.due):
            if slot.state is State.BACKOFF and slot.due <= now and self._tokens >= ONE:
                self._tokens -= 1
                self._move(slot, Event.DUE, now)
                slot.generation = next(self._generations)
                slot.spawned_at = now
                slot.ready_at = None
                slot.put_down = False
                slot.rss = 0
                actions.append(Spawn(slot))
        return actions

    def spawned(self, slot: Slot, now: float) -> list[Action]:
        self._move(slot, Event.SPAWNED, now)
        slot.due = now + self.policy.start_timeout
        if self._closing:
            return self._kill(slot, Event.DRAIN, now)
        return []

    def spawn_failed(self, slot: Slot, now: float) -> list[Action]:
        """The worker could not even be started, and nothing of it is left."""
        if not (self.up or self._closing):
            self._move(slot, Event.DONE, now)
            return [GiveUp(slot)]
        self._after_failed_start(slot, now)
        return self.tick(now)

    def answered(self, slot: Slot, now: float) -> list[Action]:
        """The worker has answered a health probe."""
        was = slot.state
        self._move(slot, Event.ANSWERED, now)
        if was is State.STARTING:
            self.up = True
            slot.ready_at = slot.idle_since = now
            slot.due = math.inf
            slot.failures = 0
            slot.tries = self.policy.start_tries
            if slot.lone:
                self._lone.reset()
            if slot.trial:
                slot.trial = False
                self._opening.reset()
            actions = self._take_over(slot, now)
            self.target = max(self.target, self.ready)
            return actions
        return []

    def silent(self, slot: Slot, now: float) -> list[Action]:
        """The worker has not answered for so long that others should get its runs."""
        if slot.state is not State.READY:
            return []
        self._move(slot, Event.SILENT, now)
        return self.tick(now)

    def hung(self, slot: Slot, now: float, why: str) -> list[Action]:
        """The worker is stopped or blocked beyond its limit."""
        if slot.state not in (State.READY, State.SUSPECT, State.DRAINING):
            return []
        slot.hung = why
        return self._kill(slot, Event.HUNG, now, hard=True)

    def lost(self, slot: Slot, now: float) -> list[Action]:
        """The connection to a worker that lives has ended: what is on it can never be answered."""
        if slot.state in (State.KILLING, State.DYING):
            return []
        return self._kill(slot, Event.LOST, now)

    def exited(self, slot: Slot, now: float, returncode: int) -> list[Action]:
        """The worker has ended; `returncode` is negative for a signal."""
        slot.returncode = returncode
        self._move(slot, Event.EXITED, now)
        slot.due = math.inf
        slot.planned |= slot.lone and slot.ready_at is not None
        for other in self.map.values():
            if other.replaces is slot:  # too late to drain it, but its place is taken
                self._promote(other)
                slot.planned = True
        if self.up or self._closing:
            return [Bury(slot)]
        if returncode < 0 and not slot.overdue and slot.failures + 1 < self.policy.first_start_signals:
            return [Bury(slot)]
        slot.planned = True
        return [GiveUp(slot), Bury(slot)]

    def closed(self, slot: Slot, now: float) -> list[Action]:
        """All that the worker held has been released."""
        slot.overdue = False
        slot.hung = ""
        if slot.planned:
            self._move(slot, Event.DONE, now)
        elif slot.ready_at is None:
            self._after_failed_start(slot, now)
        else:
            early = slot.since - slot.ready_at < self.policy.steady_after
            slot.crashes = slot.crashes + 1 if early else 0
            self._retry(slot, now, self.policy.crash_delay(slot.crashes))
        return self.tick(now)

    def shut_down(self, now: float, patience: float) -> list[Action]:
        """Let every worker end what it has, for `patience` seconds at most, and start none."""
        self._closing = True
        actions: list[Action] = []
        for slot in list(self.map.values()):
            slot.planned = True
            if slot.state is State.STARTING:
                actions += self._kill(slot, Event.DRAIN, now)
            elif slot.state is not State.SPAWNING:
                self._move(slot, Event.DRAIN, now)
                if slot.state is State.DRAINING:
                    slot.due = min(slot.due, now + patience)
        return actions

    def retire(self, slot: Slot, now: float) -> list[Action]:
        """The worker gets no more runs, ends when it has none, however long that takes, and is not replaced."""
        slot.planned = True
        was = slot.state
        self._move(slot, Event.DRAIN, now)
        if slot.state is not State.DRAINING or was is State.DRAINING:
            return []
        slot.due = math.inf
        return [Drain(slot)]

    def empty(self, slot: Slot, now: float) -> list[Action]:
        """A draining worker has answered its last request."""
        return self._kill(slot, Event.EMPTY, now) if slot.state is State.DRAINING else []

    def hurry(self, now: float) -> list[Action]:
        """Do not wait for draining workers."""
        for slot in self.map.values():
            if slot.state is State.DRAINING:
                slot.due = now
        return self.tick(now)

    # How it is decided

    @property
    def _share(self) -> float:
        return self.policy.scale_up_share * self.multiplex

    @property
    def _coming(self) -> int:
        """Slots that have a worker to count on, or will have one."""
        return sum(not (slot.planned or slot.beside) for slot in self.map.values())

    @property
    def _room(self) -> float:
        return math.inf if self.max_workers is None else self.max_workers - self.own

    @property
    def _serving(self) -> list[Slot]:
        """Who may get any run."""
        return [slot for slot in self.map.values() if slot.state is State.READY and not slot.lone]

    @property
    def _can_shrink(self) -> bool:
        return self.elastic and self.up and not self._closing and self.ready > self.floor

    @property
    def _can_recycle(self) -> bool:
        """No worker is being replaced: neither is a replacement starting, nor does an old one still run."""
        recycling = any(slot.replaces or (slot.beside and not slot.lone) for slot in self.map.values())
        return self.up and not self._closing and not recycling

    @property
    def _bucket(self) -> int:
        """Starts in a `spawn_period`."""
        return max(self.policy.spawn_floor, 2 * (self.target if self.max_workers is None else self.max_workers))

    def _move(self, slot: Slot, event: Event, now: float) -> None:
        was = slot.state
        new = TRANSITIONS[was].get(event)
        if new is None:
            raise RuntimeError(f"{slot!r} cannot be {event.value}")
        if new is not was:
            slot.state = new
            slot.since = now
        if new in ENDS:
            del self.map[slot.number]
        if new is not was:
            self.on_move(slot, was, event)

    def _kill(self, slot: Slot, event: Event, now: float, hard: bool = False) -> list[Action]:
        self._move(slot, event, now)
        slot.put_down = event is not Event.LOST  # that was its own doing
        slot.due = math.inf if hard else now + self.policy.kill_grace
        return [Terminate(slot, hard)]

    def _after_failed_start(self, slot: Slot, now: float) -> None:
        slot.failures += 1
        if self._closing:
            self._move(slot, Event.DONE, now)
        elif slot.failures >= slot.tries:
            self._move(slot, Event.SPENT, now)
            (self._lone if slot.lone else self._recycling if slot.replaces else self._opening).failed(now)
        else:
            self._retry(slot, now, self.policy.start_delay(slot.failures, next(self._luck)))

    def _retry(self, slot: Slot, now: float, delay: float) -> None:
        self._move(slot, Event.AGAIN, now)
        slot.due = max(now + delay, slot.spawned_at + self.policy.reap_interval)

    def _open_missing(self, now: float, in_flight: int) -> None:
        if self._closing or not self.up or now < self._opening.at:
            return
        wanted = self.target
        if self.elastic:
            wanted = max(wanted, math.floor(in_flight / self._share) + 1)
            if self._coming == self.count(State.SUSPECT):
                wanted = max(wanted, self._coming + 1)
        for _ in range(int(min(wanted - self._coming, self._room))):
            self._open(now, 1).trial = True

    def _open_lone(self, now: float) -> None:
        if self._closing or not self.up or now < self._lone.at:
            return
        there = sum(slot.lone and not slot.planned for slot in self.map.values())
        for _ in range(self.lone_wanted - there):
            slot = self._open(now, 1)
            slot.lone = slot.beside = True

    def _open_replacement(self, now: float) -> None:
        """Of the worker that is longest due, one at a time; until it is ready the old one serves as ever."""
        if now < self._recycling.at or not self._can_recycle:
            return
        for old in sorted(self._serving, key=lambda slot: slot.ready_at or 0.0):
            if self._worn_out(old, now):
                new = self._open(now, 1)
                new.beside = True
                new.replaces = old
                return

    def _worn_out(self, slot: Slot, now: float) -> bool:
        ready_at, policy = slot.ready_at or 0.0, self.policy
        if policy.max_worker_age is not None and now >= ready_at + policy.max_worker_age:
            return True
        # A limit below what every worker needs must not make each be replaced as soon as it is there.
        steady = now >= ready_at + policy.steady_after
        return policy.max_worker_rss is not None and slot.rss > policy.max_worker_rss and steady

    def _take_over(self, new: Slot, now: float) -> list[Action]:
        """A replacement is ready: the old worker ends what it has, beside it."""
        old = new.replaces
        if old is None:
            return []
        self._recycling.reset()
        self._promote(new)
        old.beside = True
        return self.retire(old, now)

    def _promote(self, new: Slot) -> None:
        new.replaces = None
        new.beside = False
        new.tries = self.policy.start_tries

    def _shrink(self, now: float, in_flight: int) -> list[Action]:
        """End the newest idle worker of a pool that has had too many for a while."""
        if not self._can_shrink:
            self._low_since = math.inf
            return []
        policy = self.policy
        self._look_at = now + policy.load_look
        changing = self.starting or any(slot.replaces for slot in self.map.values())
        if changing or in_flight >= policy.scale_down_share * self.capacity:
            self._low_since = math.inf
            return []
        self._low_since = min(self._low_since, now)
        idle = [slot for slot in self._serving if now - slot.idle_since >= policy.scale_down_idle]
        # Those that stay must not be so busy that another is started at once.
        enough = in_flight < self._share * (self.ready - 1)
        if now - self._low_since < policy.scale_down_after or not idle or not enough:
            return []
        self._low_since = now
        self.target = max(self.floor, self.ready - 1)
        return self.retire(max(idle, key=lambda slot: slot.generation), now)

    def _open(self, now: float, tries: int) -> Slot:
        number = next(number for number in itertools.count() if number not in self.map)
        slot = self.map[number] = Slot(number, tries, now)
        return slot

    def _refill(self, now: float) -> None:
        elapsed = now - self._now
        self._tokens = min(self._bucket, self._tokens + elapsed * self._bucket / self.policy.spawn_period)
        self._now = now
