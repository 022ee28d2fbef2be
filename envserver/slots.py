"""What a pool's worker slots do next: the decision, without I/O and without a clock.

Events and the time (seconds of any monotonic clock) go in, actions come out. The shell carries them out, in order,
and reports back: a `Spawn` by `spawned` or `spawn_failed`, a `Bury` by `closed`.

    SPAWNING --spawned--> STARTING --answered--> READY --drain--> DRAINING
       |                     | overdue, lost       | lost            | empty, overdue
       | failed              v                     v                 v
       |                  KILLING <----------------+-----------------+
       |                     | exited (so from every state of a living worker)
       v                     v
    BACKOFF <--again------ DYING --done--> REMOVED
       | due                 | spent
       +--> SPAWNING         +-----------> RETIRED      the last two leave the map

A slot that has spent its tries is not kept: what is missing is then a place, which a fresh slot may open once
the timer of all openings allows it. So nothing that cannot start counts as capacity or blocks growth.
"""

import enum
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from envserver.limits import PoolPolicy


class State(enum.Enum):
    SPAWNING = "spawning"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    KILLING = "killing"
    DYING = "dying"
    BACKOFF = "backoff"
    REMOVED = "removed"
    RETIRED = "retired"


class Event(enum.Enum):
    SPAWNED = "spawned"
    ANSWERED = "answered"  # a health probe
    OVERDUE = "overdue"  # a start or a drain took too long
    LOST = "lost"  # the connection to a worker that lives
    DRAIN = "drain"
    EMPTY = "empty"  # its last request has been answered
    EXITED = "exited"
    DUE = "due"  # the backoff is over
    AGAIN = "again"  # what ended is to be tried again in this slot
    SPENT = "spent"  # it has failed too often
    DONE = "done"  # it ended as planned


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.SPAWNING: {
        Event.SPAWNED: State.STARTING,
        Event.AGAIN: State.BACKOFF,
        Event.SPENT: State.RETIRED,
        Event.DONE: State.REMOVED,
    },
    State.STARTING: {
        Event.ANSWERED: State.READY,
        Event.OVERDUE: State.KILLING,
        Event.LOST: State.KILLING,
        Event.DRAIN: State.KILLING,  # it has no request to wait for
        Event.EXITED: State.DYING,
    },
    State.READY: {
        Event.ANSWERED: State.READY,
        Event.LOST: State.KILLING,
        Event.DRAIN: State.DRAINING,
        Event.EXITED: State.DYING,
    },
    State.DRAINING: {
        Event.ANSWERED: State.DRAINING,
        Event.DRAIN: State.DRAINING,
        Event.EMPTY: State.KILLING,
        Event.OVERDUE: State.KILLING,
        Event.LOST: State.KILLING,
        Event.EXITED: State.DYING,
    },
    State.KILLING: {
        Event.ANSWERED: State.KILLING,  # too late
        Event.DRAIN: State.KILLING,
        Event.EMPTY: State.KILLING,
        Event.LOST: State.KILLING,
        Event.EXITED: State.DYING,
    },
    State.DYING: {
        Event.ANSWERED: State.DYING,  # it had said so before it died
        Event.DRAIN: State.DYING,
        Event.EMPTY: State.DYING,
        Event.LOST: State.DYING,
        Event.AGAIN: State.BACKOFF,
        Event.SPENT: State.RETIRED,
        Event.DONE: State.REMOVED,
    },
    State.BACKOFF: {Event.DUE: State.SPAWNING, Event.DRAIN: State.REMOVED},
    State.RETIRED: {},
    State.REMOVED: {},
}

ONE = 1 - 1e-9  # a token, whatever the arithmetic of its parts
ENDS = frozenset({State.REMOVED, State.RETIRED})
TIMED = frozenset({State.STARTING, State.DRAINING, State.KILLING})


class Slot:
    """One place for a worker. Its fields are the machine's to change."""

    def __init__(self, number: int, tries: int, now: float) -> None:
        self.number = number
        """The smallest that is free: a label that stays small."""
        self.state = State.BACKOFF
        self.since = now
        """When it came into its state."""
        self.due = now
        """When its state's time is over: a backoff, a start's or a drain's deadline, the patience before SIGKILL."""
        self.generation = 0
        """Unique in the pool: of its present or last worker. 0: none yet."""
        self.tries = tries
        """Failed starts in a row that it is allowed."""
        self.failures = 0
        self.crashes = 0
        self.trial = False
        """It opened a place by one try and has not been ready yet."""
        self.planned = False
        """It is not to come back."""
        self.ready_at: float | None = None
        """When its present worker was ready."""
        self.spawned_at = -math.inf
        self.overdue = False
        """Its worker did not start in time."""
        self.returncode = 0
        """Of its last worker that ended; negative for a signal."""

    def __repr__(self) -> str:
        return f"<Slot {self.number} {self.state.value} generation={self.generation} failures={self.failures}>"


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start the worker `slot.generation`, then say `spawned` or `spawn_failed`."""

    slot: Slot


@dataclass(frozen=True, slots=True)
class Terminate:
    """End the worker: SIGKILL if `hard`, else SIGTERM."""

    slot: Slot
    hard: bool


@dataclass(frozen=True, slots=True)
class Bury:
    """The worker has exited: deliver what it had queued, fail the rest, release all of it, then say `closed`."""

    slot: Slot


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The start of the pool has failed by what `slot` saw: nothing that was tried again would help."""

    slot: Slot


Action = Spawn | Terminate | Bury | GiveUp


class Slots:
    """The map of a pool's slots.

    `max_workers` None: no cap (elastic only). `multiplex`: requests a worker is meant for. `luck` gives numbers between
    0 and 1 for the jitter.
    """

    def __init__(
        self,
        policy: PoolPolicy,
        *,
        max_workers: int | None,
        elastic: bool,
        multiplex: int,
        luck: Iterable[float] = itertools.repeat(0.5),
    ) -> None:
        if not elastic and max_workers is None:
            raise ValueError("a pool that is not elastic needs max_workers")
        self.policy = policy
        self.max_workers = max_workers
        self.multiplex = multiplex
        self.elastic = elastic
        self.target = 1 if elastic or max_workers is None else max_workers
        """Places the pool has had ready, or starts with: what is missing to it is opened again without demand."""
        self.map: dict[int, Slot] = {}
        self.up = False
        """A worker has been ready: the start has succeeded."""
        self.on_move: Callable[[Slot, State, Event], None] = lambda slot, was, event: None
        """Told of each change of state once it has happened: the slot, its state before, and why."""
        self._closing = False
        self._luck = iter(luck)
        self._generations = itertools.count(1)
        self._open_failures = 0
        self._open_at = -math.inf
        self._tokens: float = self._bucket
        self._now = -math.inf

    # What there is

    def count(self, *states: State) -> int:
        return sum(slot.state in states for slot in self.map.values())

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
    def scale_up_at(self) -> float:
        """Requests in flight at which `tick` would start another worker, or infinity."""
        if self._closing or not self.elastic or self._room <= 0 or self._open_at > self._now:
            return math.inf
        return self._share * self._coming  # never less than the share of what is ready

    def due_at(self) -> float:
        """When `tick` must be called at the latest, if nothing else happens; infinity if never."""
        times = [slot.due for slot in self.map.values() if slot.state in TIMED]
        waiting = [slot.due for slot in self.map.values() if slot.state is State.BACKOFF]
        if waiting:
            token_at = self._now + max(0.0, 1 - self._tokens) * self.policy.spawn_period / self._bucket
            times.append(max(token_at, min(waiting)))
        if self._open_at > self._now:
            times.append(self._open_at)
        return min(times, default=math.inf)

    # What happens

    def start(self, now: float) -> list[Action]:
        """Open the first places: all of a static pool, one of an elastic one."""
        for _ in range(self.target):
            self._open(now, self.policy.start_tries)
        return self.tick(now)

    def tick(self, now: float, in_flight: int = 0) -> list[Action]:
        """Whatever is due: call it at `due_at`, when `in_flight` reaches `scale_up_at`, and when workers are missed."""
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
        self._open_missing(now, in_flight)
        for slot in sorted(self.map.values(), key=lambda slot: slot.due):
            if slot.state is State.BACKOFF and slot.due <= now and self._tokens >= ONE:
                self._tokens -= 1
                self._move(slot, Event.DUE, now)
                slot.generation = next(self._generations)
                slot.spawned_at = now
                slot.ready_at = None
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
            slot.ready_at = now
            slot.failures = 0
            slot.tries = self.policy.start_tries
            if slot.trial:
                slot.trial = False
                self._open_failures = 0
                self._open_at = -math.inf
            self.target = max(self.target, self.ready)
        return []

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
        if self.up or self._closing:
            return [Bury(slot)]
        if returncode < 0 and not slot.overdue and slot.failures + 1 < self.policy.first_start_signals:
            return [Bury(slot)]
        slot.planned = True
        return [GiveUp(slot), Bury(slot)]

    def closed(self, slot: Slot, now: float) -> list[Action]:
        """All that the worker held has been released."""
        slot.overdue = False
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
                was = slot.state
                self._move(slot, Event.DRAIN, now)
                if was is State.READY:
                    slot.due = now + patience
        return actions

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
        return sum(not slot.planned for slot in self.map.values())

    @property
    def _room(self) -> float:
        return math.inf if self.max_workers is None else self.max_workers - len(self.map)

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
        slot.due = math.inf if hard else now + self.policy.kill_grace
        return [Terminate(slot, hard)]

    def _after_failed_start(self, slot: Slot, now: float) -> None:
        slot.failures += 1
        if self._closing:
            self._move(slot, Event.DONE, now)
        elif slot.failures >= slot.tries:
            self._move(slot, Event.SPENT, now)
            if now >= self._open_at:  # else one that was opened together with it has failed already
                self._open_failures += 1
                self._open_at = now + self.policy.open_delay(self._open_failures)
        else:
            self._retry(slot, now, self.policy.start_delay(slot.failures, next(self._luck)))

    def _retry(self, slot: Slot, now: float, delay: float) -> None:
        self._move(slot, Event.AGAIN, now)
        slot.due = max(now + delay, slot.spawned_at + self.policy.reap_interval)

    def _open_missing(self, now: float, in_flight: int) -> None:
        if self._closing or not self.up or now < self._open_at:
            return
        wanted = self.target
        if self.elastic:
            wanted = max(wanted, math.floor(in_flight / self._share) + 1)
        for _ in range(int(min(wanted - self._coming, self._room))):
            self._open(now, 1)

    def _open(self, now: float, tries: int) -> None:
        number = next(number for number in itertools.count() if number not in self.map)
        slot = self.map[number] = Slot(number, tries, now)
        slot.trial = tries == 1

    def _refill(self, now: float) -> None:
        elapsed = now - self._now
        self._tokens = min(self._bucket, self._tokens + elapsed * self._bucket / self.policy.spawn_period)
        self._now = now
