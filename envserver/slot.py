"""A worker slot: the states it can be in, what leads from one to the next, and what is to be done on the way.

The words of `envserver.slots`, which decides.
"""

import enum
import math
from dataclasses import dataclass

from envserver.limits import PoolPolicy


class State(enum.Enum):
    SPAWNING = "spawning"
    STARTING = "starting"
    READY = "ready"
    SUSPECT = "suspect"
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
    SILENT = "silent"  # it has not answered for long
    HUNG = "hung"  # it never will, or is not waited for
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
        Event.SILENT: State.SUSPECT,
        Event.HUNG: State.KILLING,
        Event.LOST: State.KILLING,
        Event.DRAIN: State.DRAINING,
        Event.EXITED: State.DYING,
    },
    State.SUSPECT: {
        Event.ANSWERED: State.READY,
        Event.HUNG: State.KILLING,
        Event.LOST: State.KILLING,
        Event.DRAIN: State.DRAINING,
        Event.EXITED: State.DYING,
    },
    State.DRAINING: {
        Event.ANSWERED: State.DRAINING,
        Event.DRAIN: State.DRAINING,
        Event.EMPTY: State.KILLING,
        Event.OVERDUE: State.KILLING,
        Event.HUNG: State.KILLING,
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
        self.lone = False
        """Its worker gets one run, of a task that is to run alone."""
        self.beside = False
        """It takes no place of `max_workers`."""
        self.replaces: Slot | None = None
        """The slot that is drained once this one's worker is ready."""
        self.put_down = False
        """Its worker was ended because we wanted it to: whatever ran there has not killed it."""
        self.idle_since = math.inf
        """Since when its ready worker has had nothing to do; the shell says it."""
        self.rss = 0
        """Bytes of resident memory of its worker; the shell says it."""
        self.hung = ""
        """Why its worker was killed as hung; empty if it was not. Such a death is the
        broker's doing, and says nothing about the requests it had."""
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
class Drain:
    """The worker is to get no more runs: say `empty` when it has none, now or later."""

    slot: Slot


@dataclass(frozen=True, slots=True)
class Bury:
    """The worker has exited: deliver what it had queued, fail the rest, release all of it, then say `closed`."""

    slot: Slot


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The start of the pool has failed by what `slot` saw: nothing that was tried again would help."""

    slot: Slot


Action = Spawn | Terminate | Drain | Bury | GiveUp


class Timer:
    """When what has failed may be tried again: later each time, until it goes well."""

    def __init__(self, policy: PoolPolicy) -> None:
        self.failures = 0
        self.at = -math.inf
        self._policy = policy

    def failed(self, now: float) -> None:
        if now >= self.at:  # else one that was tried together with it has failed already
            self.failures += 1
            self.at = now + self._policy.open_delay(self.failures)

    def reset(self) -> None:
        self.failures = 0
        self.at = -math.inf
