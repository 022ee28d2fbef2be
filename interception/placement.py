"""Which server takes a rollout, and how many servers to start or stop: decisions, without I/O and without a clock."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Protocol

LEAST_PATIENCE = 1.0
"""Seconds; below this a start that takes longer than usual is no sign of anything."""

ENOUGH = 8
"""Starts that went well side by side: what is true of them is likely to be true of those beside them."""

SPARE_FROM = 0.2
"""Replacements that can be expected to hang for which one more is begun, and one for each whole one beyond it."""


class ServerView(Protocol):
    """What placement knows of a healthy server."""

    @property
    def load(self) -> int: ...

    @property
    def serving(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """`assign[i]` is the index of the server that takes the i-th waiter; the waiters after those go on waiting for
    the `start` servers to be started besides those that are starting already."""

    assign: tuple[int, ...]
    start: int


def place(
    servers: Sequence[ServerView],
    waiting: int,
    *,
    capacity: int | None,
    starting: int = 0,
    may_start: int | None = None,
) -> Plan:
    """Where the first of `waiting` rollouts go now.

    Each goes to the least loaded server that serves and has room. Where none has, servers are started, `capacity`
    rollouts for each, but at most `may_start` (None: as many as it takes); only those that none of the `starting` and
    started ones will serve go to a server that is healthy but not serving. `capacity` None: no limit, and so nothing
    to start.
    """
    if not waiting:
        return Plan((), 0)
    loads = [server.load for server in servers]
    assign: list[int] = []

    def fill(serving: bool, most: int) -> None:
        if most <= 0:
            return
        free = [(load, index) for index, load in enumerate(loads) if capacity is None or load < capacity]
        heapify(free)
        while most and free:
            load, chosen = free[0]
            if servers[chosen].serving is not serving:
                heappop(free)
                continue
            assign.append(chosen)
            loads[chosen] = load = load + 1
            most -= 1
            if capacity is None or load < capacity:
                heapreplace(free, (load, chosen))
            else:
                heappop(free)

    fill(True, waiting)
    left = waiting - len(assign)
    if capacity is None:
        fill(False, left)
        return Plan(tuple(assign), 0)
    start = max(0, -(-left // capacity) - starting)
    if may_start is not None:
        start = min(start, max(0, may_start))
    fill(False, left - (starting + start) * capacity)
    return Plan(tuple(assign), start)


def typical(took: Sequence[float]) -> tuple[float, float]:
    """The median of what starts `took`, and how far from it half of them lie."""
    median = statistics.median(took)
    return median, statistics.median(abs(seconds - median) for seconds in took)


def overdue(typically: tuple[float, float] | None, ages: Sequence[float], *, finished: int) -> float | None:
    """Seconds after which a start takes longer than it should, by what is `typical`; None: nothing is known.

    Half as long again as the median. Once three quarters (and `ENOUGH`) of those that should be through are, they tell
    more exactly: a tenth longer, or six times as far from the median as half of them lie. `ages`: of those under way;
    `finished`: those that succeeded since the oldest of them began.
    """
    if typically is None:
        return None
    median, deviation = typically
    if finished < max(ENOUGH, 3 * sum(age > median for age in ages)):
        return max(LEAST_PATIENCE, 1.5 * median)
    return max(LEAST_PATIENCE, median + max(0.1 * median, 6 * deviation))


def counted_on(ages: Sequence[float], *, finished: int, usual: float | None, patience: float) -> int:
    """How many of the starts under way, begun `ages` seconds ago, are still counted on to take rollouts. In the stead
    of the others, which perhaps hang, more are begun. `finished`: starts that succeeded since the oldest one began.

    If many take long they are slow, not hung, and more of them would make it worse. So of those that take longer than
    `usual` (see `overdue`; None: it is not known) a quarter of all begun together is replaced once half of them are
    through, else two. Of those that take longer than `patience` twice as many as are through, too: whatever is through
    shows that replacing helps.

    Of the replacements as many may hang as of the first ones did: where that makes it likely enough (`SPARE_FROM`) that
    one does, it is not counted on either, or whoever waits for it would wait twice.
    """
    together = len(ages) + finished
    quarter = max(2, -(-together // 4))
    half_through = 2 * finished >= together
    slow = 0 if usual is None else sum(age > usual for age in ages)
    soon = min(slow, quarter if half_through else 2)
    late = min(sum(age > patience for age in ages), max(quarter, 2 * finished))
    replaced = max(soon, late)
    if half_through and finished >= ENOUGH and replaced == slow:
        may_hang = (len(ages) - slow) * slow / together
        replaced = max(replaced, min(replaced + int(may_hang + 1 - SPARE_FROM), quarter))
    return len(ages) - replaced


def idle_too_long(idle: Sequence[float | None], *, floor: int, timeout: float) -> list[int]:
    """Indexes of the servers to stop: those without a rollout for `timeout` seconds (`idle`; None: it has rollouts),
    the longest idle ones first, as long as `floor` servers are left."""
    longest_first = sorted(
        (index for index, seconds in enumerate(idle) if seconds is not None and seconds >= timeout),
        key=lambda index: -(idle[index] or 0.0),
    )
    return longest_first[: max(0, len(idle) - floor)]
