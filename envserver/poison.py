"""Which tasks kill the workers they run on, and what is done about it: the decision, without I/O and without a clock.

A task that was in flight at two deaths of workers is a suspect: whoever it was, it runs alone from then on, one run at
a time, each on a worker of its own. Only what happens there convicts: two deaths of workers that ran nothing else, and
it is refused. So neighbours of a poison, and tasks that were there when a worker was killed by chance, cost time and
are never refused for it, unless chance strikes the same lone task twice.

- What counts is the death of a worker, once for each task, however many runs of it were there: the equal rollouts of a
  group are one task. A run that fails counts nothing.
- A death that the pool wanted is none: when it drains, shrinks, replaces a worker or stops, or kills one that a signal
  has stopped or that is blocked. One that lost its connection and was therefore ended counts, for that was its own
  doing, and so does one that ends by itself while it is drained. (`Slot.put_down` tells them apart.)
- A success of any run of the task forgets all that it was suspected of.
- An hour after its last death a task is free again, and of more than 1,024 the one that was longest not heard of.

Times are seconds of any monotonic clock, tasks the fingerprints of `envserver.fingerprint`.
"""

import enum
import math
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from envserver.limits import PoolPolicy

Run = TypeVar("Run", bound=Hashable)

LISTED = 8
"""Deaths beside others that the text of a refusal lists at most: those that came last."""


class Verdict(enum.Enum):
    FREE = "free"
    ALONE = "alone"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Death:
    """Of a worker. `how` follows its pid, as in `was killed by SIGABRT`; `at` is unix seconds."""

    pid: int
    how: str
    at: float

    def __str__(self) -> str:
        return f"pid {self.pid} {self.how} at {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(self.at))} UTC"


@dataclass(slots=True)
class _Record:
    beside: list[Death] = field(default_factory=list)
    """The last of the deaths among other runs."""
    count: int = 0
    """All of those."""
    lone: list[Death] = field(default_factory=list)
    last: float = -math.inf


class Records:
    """What the deaths of workers tell about tasks. Empty as long as none has died."""

    def __init__(self, policy: PoolPolicy) -> None:
        self._policy = policy
        self._records: OrderedDict[bytes, _Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, task: bytes) -> bool:
        return task in self._records

    def died(self, tasks: Iterable[bytes], death: Death, now: float, *, alone: bool) -> None:
        """A worker has died by itself with runs of `tasks` on it; `alone`: it was a lone worker."""
        # Who is known comes last, so that a crowd of new ones does not push it out.
        for task in sorted(set(tasks), key=self._records.__contains__):
            record = self._records.setdefault(task, _Record())
            self._records.move_to_end(task)
            record.last = now
            if alone:
                record.lone.append(death)
            else:
                record.count += 1
                record.beside = [*record.beside, death][-LISTED:]
        while len(self._records) > self._policy.poison_records:
            self._records.popitem(last=False)

    def succeeded(self, task: bytes) -> bool:
        """A run of the task went well. Whether anything was forgotten by that."""
        return self._records.pop(task, None) is not None

    def verdict(self, task: bytes, now: float) -> Verdict:
        """What is to become of a run of the task."""
        record = self._records.get(task)
        if record is None:
            return Verdict.FREE
        if now >= self.expiry(task):
            del self._records[task]
            return Verdict.FREE
        self._records.move_to_end(task)
        if len(record.lone) >= self._policy.refuse_after:
            return Verdict.REFUSED
        if record.lone or record.count >= self._policy.suspect_after:
            return Verdict.ALONE
        return Verdict.FREE

    def expiry(self, task: bytes) -> float:
        """When the task is forgotten if nothing else happens; already, if it is not known."""
        record = self._records.get(task)
        return -math.inf if record is None else record.last + self._policy.poison_forgotten_after

    def refusal(self, task: bytes) -> str:
        """Why a refused task is refused: the deaths, each with pid, signal or status, and time."""
        record = self._records[task]
        text = (
            f"refused: this task has killed {len(record.lone)} workers that ran nothing else "
            f"({'; '.join(map(str, record.lone))})"
        )
        if record.count:
            more = f"{record.count - len(record.beside)} more; " if record.count > len(record.beside) else ""
            text += f", and was running when {record.count} others died ({more}{'; '.join(map(str, record.beside))})"
        return f"{text}. It is refused for {self._policy.poison_forgotten_after / 60:g} minutes after the last of them"


class Suspects(Generic[Run]):
    """Whose turn it is on the lone workers: runs of suspects, one of a task at a time, the tasks in turn.

    A run is anything hashable. No task waits for more than one run of each other task that waits, and none for longer
    than until it is forgotten.
    """

    def __init__(self, policy: PoolPolicy, records: Records) -> None:
        self._policy = policy
        self._records = records
        self._waiting: OrderedDict[bytes, OrderedDict[Run, None]] = OrderedDict()
        self._alone: set[bytes] = set()
        self.waiting = 0
        """Runs."""

    @property
    def full(self) -> bool:
        return self.waiting >= self._policy.suspects_waiting

    @property
    def wanted(self) -> int:
        """Lone workers that have something to do, or would have."""
        return min(self._policy.lone_workers, len(self._alone | self._waiting.keys()))

    def due_at(self) -> float:
        """When `released` is to be called at the latest; infinity if never."""
        return min((self._records.expiry(task) for task in self._waiting), default=math.inf)

    def wait(self, task: bytes, run: Run) -> None:
        self._waiting.setdefault(task, OrderedDict())[run] = None
        self.waiting += 1

    def withdraw(self, task: bytes, run: Run) -> bool:
        """Nobody wants it any more. Whether it was waiting."""
        runs = self._waiting.get(task)
        if runs is None or run not in runs:
            return False
        del runs[run]
        self.waiting -= 1
        if not runs:
            del self._waiting[task]
        return True

    def take(self) -> tuple[bytes, Run] | None:
        """The run for a lone worker that is ready, or None; `ended` says when its task may have another."""
        for task in self._waiting:
            if task not in self._alone:
                break
        else:
            return None
        run = next(iter(self._waiting[task]))
        self.withdraw(task, run)
        if task in self._waiting:
            self._waiting.move_to_end(task)
        self._alone.add(task)
        return task, run

    def ended(self, task: bytes) -> None:
        """Its lone run is over, in whatever way."""
        self._alone.discard(task)

    def released(self, now: float) -> list[tuple[bytes, Verdict, Run]]:
        """The runs that need not wait any more, for their task is free again or refused."""
        out: list[tuple[bytes, Verdict, Run]] = []
        for task in [*self._waiting]:
            verdict = self._records.verdict(task, now)
            if verdict is not Verdict.ALONE:
                runs = self._waiting.pop(task)
                self.waiting -= len(runs)
                out += [(task, verdict, run) for run in runs]
        return out

    def clear(self) -> list[Run]:
        """All that wait, which wait no more."""
        runs = [run for runs in self._waiting.values() for run in runs]
        self._waiting.clear()
        self.waiting = 0
        return runs
