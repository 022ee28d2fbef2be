"""The starts of a pool's servers that are under way, and how many of them are counted on. No I/O; the time is given."""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from interception.base import PoolMember
from interception.placement import counted_on, overdue, typical

TIMES_REMEMBERED = 16
ENDS_REMEMBERED = 256
"""More than are ever begun together: 8,192 rollouts by 32."""

QUEUE_LOOK = 0.1
"""Seconds between two looks at a start that waits within the creation limit: its time runs from when it is through."""


@dataclass(slots=True, eq=False)
class Start:
    """A server being started, over all its tries."""

    since: float
    counted_from: float
    """Since when this try has been under way, its wait for a turn within the creation limit left out."""
    tries: int = 0
    between_tries: bool = False
    given_up: bool = False
    """Whether this try is being ended for it takes too long."""
    error: str | None = None
    """Of the last try that failed."""
    server: PoolMember | None = None
    task: "asyncio.Task[None]" = field(init=False)

    @property
    def queued(self) -> bool:
        return bool(getattr(self.server, "queued", False))

    def age(self, now: float) -> float:
        """Seconds for which this try has been under way. What waits its turn, or for the next try, does not hang."""
        if self.queued or self.between_tries:
            self.counted_from = now
        return now - self.counted_from


class Starts:
    """Those under way, in the order they began; and how long the last ones took."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._under_way: list[Start] = []
        self._took: deque[float] = deque(maxlen=TIMES_REMEMBERED)  # seconds
        self._typically: tuple[float, float] | None = None
        self._ended: deque[float] = deque(maxlen=ENDS_REMEMBERED)  # when starts succeeded

    def __iter__(self) -> Iterator[Start]:
        return iter(self._under_way)

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, now: float) -> Start:
        start = Start(now, now)
        self._under_way.append(start)
        return start

    def try_again(self, start: Start, now: float) -> None:
        """Its next try begins."""
        start.tries += 1
        start.between_tries = start.given_up = False
        start.counted_from = now

    def succeeded(self, start: Start, now: float) -> None:
        self._took.append(start.age(now))
        self._typically = typical(self._took)
        self._ended.append(now)
        self.ended(start)

    def ended(self, start: Start) -> None:
        """It is not under way any more, however it ended; more than once is no harm."""
        if start in self._under_way:
            self._under_way.remove(start)

    def counted_on(self, now: float) -> int:
        """See `placement.counted_on`."""
        if not self._under_way:
            return 0
        ages = self._ages(now)
        usual = self._usual(ages)
        return counted_on(ages, finished=self._finished, usual=usual, patience=max(self._patience, usual or 0.0))

    def limit(self, now: float) -> float:
        """Seconds after which a start takes longer than it should."""
        return self._limit(self._ages(now))

    def hopeless(self, now: float) -> list[Start]:
        """Those that are not counted on and take twice as long as would be long: the ones to give up where nothing can
        be begun beside them, the longest first. None while nothing is known of how long starts take."""
        if self._typically is None:
            return []
        limit = 2 * self.limit(now)
        late = sorted((start for start in self._under_way if start.age(now) > limit), key=lambda start: -start.age(now))
        return late[: len(self._under_way) - self.counted_on(now)]

    def next_look(self, now: float) -> float | None:
        """In how many seconds one that is counted on now may not be any more; None: there is none."""
        ages = self._ages(now)
        limit = self._limit(ages)
        limits = limit, 2 * limit, max(self._patience, limit)
        looks = [moment - age for age in ages for moment in limits if moment >= age]
        if any(start.queued for start in self._under_way):
            looks.append(QUEUE_LOOK)
        return min(looks, default=None)

    def _ages(self, now: float) -> list[float]:
        return [start.age(now) for start in self._under_way]

    def _limit(self, ages: list[float]) -> float:
        return self._usual(ages) or self._patience

    def _usual(self, ages: list[float]) -> float | None:
        return overdue(self._typically, ages, finished=self._finished)

    @property
    def _finished(self) -> int:
        """Those that succeeded since the oldest one under way began."""
        if not self._under_way:
            return 0
        oldest = self._under_way[0].since
        return sum(ended >= oldest for ended in self._ended)
