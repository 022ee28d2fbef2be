"""Which workers are hung: the decision, without I/O and without a clock.

The time (seconds of any monotonic clock), signs of life and what was seen of a silent worker's processes go in,
actions come out. A worker is silent while a probe that it was sent is unanswered and nothing else comes from it,
either. That alone says little. It is *busy* if its processes use CPU, and *blocked* if they do not, as in a synchronous
call to a slow sandbox; only one that a signal has *stopped* goes on by nothing that happens elsewhere. So that one is
killed, a blocked one where the policy says so, and any other never.

The broker's own lag is no worker's silence. Of the time between two ticks no more counts than there should have been,
and after a tick that was late nothing is decided before the next: what the workers said meanwhile is heard first.
"""

import enum
import math
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

from envserver.limits import PoolPolicy


class Kind(enum.Enum):
    """What a silent worker is doing."""

    STOPPED = "stopped by a signal"
    TRACED = "held by a debugger"
    BUSY = "busy"
    BLOCKED = "blocked"
    UNKNOWN = "doing what cannot be known here"


@dataclass(frozen=True, slots=True)
class Seen:
    """The processes of a worker at one moment: itself, all that descend from it and all of its process group."""

    at: float
    """When, in seconds of any monotonic clock."""
    state: str
    """The worker's own, by the letters of /proc: R, S, D, T, t, Z."""
    cpu: dict[Hashable, float] = field(default_factory=dict)
    """The CPU seconds of each, under a name that no two processes share."""
    reaped: float = 0.0
    """The CPU seconds of those that have ended, whose exit status one of these has collected."""


def cpu_share(before: Seen, after: Seen) -> float:
    """Of one CPU, what was used in between, at least: what a process used that has ended may be on nobody's account."""
    # By a process's end its account becomes its parent's, so the sum of both tells; but where nobody collects exit
    # statuses it falls. What the living have used is certain.
    in_all = sum(after.cpu.values()) + after.reaped - sum(before.cpu.values()) - before.reaped
    by_living = sum(max(0.0, cpu - before.cpu.get(name, 0.0)) for name, cpu in after.cpu.items())
    return max(in_all, by_living) / (after.at - before.at)


def kind_of(before: Seen | None, now: Seen | None, blocked_share: float) -> Kind:
    """What a silent worker is doing, by what was seen of it `before` and `now` (None: nothing)."""
    match now and now.state:
        case "T":
            return Kind.STOPPED
        case "t":
            return Kind.TRACED
        case "R":  # it would run if it could: others may have all of the CPU
            return Kind.BUSY
        case "S" | "D" | "I" if now is not None and before is not None and now.at > before.at:
            return Kind.BUSY if cpu_share(before, now) >= blocked_share else Kind.BLOCKED
    return Kind.UNKNOWN  # Z: the end of a process is told elsewhere


@dataclass(frozen=True, slots=True)
class Probe:
    """Send `worker` a health probe."""

    worker: int


@dataclass(frozen=True, slots=True)
class Look:
    """See what the processes of `worker` do, then say `seen`."""

    worker: int


@dataclass(frozen=True, slots=True)
class Report:
    """Tell, once in a silence, that `worker` has been silent for `seconds` and what it is doing."""

    worker: int
    seconds: float
    kind: Kind


@dataclass(frozen=True, slots=True)
class Suspect:
    """Send runs to `worker` only if no other can take them."""

    worker: int


@dataclass(frozen=True, slots=True)
class Back:
    """`worker`, which was told of or suspect, has ended a silence of `seconds`."""

    worker: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Kill:
    """End `worker`, which has been `kind` for `seconds`, by SIGKILL: other signals stay pending while it is stopped."""

    worker: int
    seconds: float
    kind: Kind


Action = Probe | Look | Report | Suspect | Back | Kill


class Vigil:
    """The silences of a pool's workers. Each has a number that no other ever has."""

    def __init__(self, policy: PoolPolicy) -> None:
        self._policy = policy
        self._watched: dict[int, _Watched] = {}
        self._ticked = -math.inf
        self._late = False

    def add(self, worker: int, now: float) -> None:
        """Watch a worker, which has just answered a probe."""
        if not self._watched:
            self._ticked = now
        self._watched[worker] = _Watched(now + self._policy.probe_interval, self._policy.probe_interval)

    def drop(self, worker: int) -> None:
        self._watched.pop(worker, None)

    def answered(self, worker: int, now: float) -> list[Action]:
        """It has answered its probe."""
        if (watched := self._watched.get(worker)) is not None:
            watched.probed = False
            watched.probe_at = now + self._policy.probe_interval
        return self.heard(worker)

    def heard(self, worker: int) -> list[Action]:
        """Something has come from it: its loop goes round."""
        watched = self._watched.get(worker)
        if watched is None:
            return []
        told, seconds = watched.reported or watched.suspect, watched.seconds
        watched.end_silence()
        return [Back(worker, seconds)] if told else []

    def tick(self, now: float, heard: Collection[int] = ()) -> list[Action]:
        """To be called every `watch_interval`; `heard`: from whom anything has come since the last time."""
        actions: list[Action] = []
        for worker in heard:
            actions += self.heard(worker)
        due = self._policy.watch_interval
        self._late = self._is_late(now)
        passed = due if self._late else now - self._ticked
        self._ticked = now
        for worker, watched in self._watched.items():
            if not watched.probed:
                if now >= watched.probe_at:
                    watched.probed = True
                    watched.end_silence()
                    actions.append(Probe(worker))
                continue
            if worker not in heard:
                watched.seconds += passed
            if self._late:
                continue
            if watched.seconds >= self._policy.last_choice_after and not watched.suspect:
                watched.suspect = True
                actions.append(Suspect(worker))
            if watched.seconds >= watched.look_at and not watched.looking:
                watched.looking = True
                actions.append(Look(worker))
        return actions

    def seen(self, worker: int, now: float, seen: Seen | None, *, stacks: bool) -> list[Action]:
        """What a look at it has shown; None: nothing. `stacks`: some can be reported, or there never will be any."""
        watched = self._watched.get(worker)
        if watched is None or not watched.looking:
            return []  # it was heard meanwhile
        watched.learn(seen, self._policy.blocked_share)
        if self._late or self._is_late(now):
            return []
        policy, actions = self._policy, list[Action]()
        seconds, kind, lasted = watched.seconds, watched.kind, watched.seconds - watched.since
        # Where its stacks are late the report waits for them, but not for ever.
        in_full = (
            stacks or kind in (Kind.STOPPED, Kind.TRACED) or seconds >= policy.silent_after + policy.probe_interval
        )
        if seconds >= policy.silent_after and in_full and not watched.reported:
            watched.reported = True
            actions.append(Report(worker, seconds, kind))
        limit = {Kind.STOPPED: policy.kill_stopped_after, Kind.BLOCKED: policy.kill_blocked_after}.get(kind)
        if limit is not None and lasted >= limit:
            self.drop(worker)
            actions.append(Kill(worker, lasted, kind))
        return actions

    def _is_late(self, now: float) -> bool:
        return now - self._ticked > 2 * self._policy.watch_interval


class _Watched:
    """One worker."""

    def __init__(self, probe_at: float, look_interval: float) -> None:
        self.probe_at = probe_at
        self.probed = False
        """It has a probe that it has not answered."""
        self._look_interval = look_interval
        self.end_silence()

    def end_silence(self) -> None:
        self.seconds = 0.0
        """Of its silence, as far as the broker was there to listen."""
        self.suspect = self.reported = False
        self.looking = False
        self.look_at = self._look_interval
        self.kind = Kind.UNKNOWN
        self.since = 0.0
        """From which second of its silence on it has been of its kind, at every look."""
        self._last: Seen | None = None
        self._looked_at: float | None = None

    def learn(self, seen: Seen | None, blocked_share: float) -> None:
        kind = kind_of(self._last, seen, blocked_share)
        if kind is not self.kind:
            if kind is Kind.STOPPED:
                # It fell silent by that, unless it was seen doing something else.
                self.since = 0.0 if self._looked_at is None else self.seconds
            else:  # of what is blocked it takes two looks to know
                self.since = self.seconds if self._looked_at is None else self._looked_at
        self.kind = kind
        self._last, self._looked_at = seen, self.seconds
        self.looking = False
        self.look_at = (self.seconds // self._look_interval + 1) * self._look_interval
