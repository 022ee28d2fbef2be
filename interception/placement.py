"""Which server takes a rollout, and how many servers to start or stop: decisions, without I/O and without a clock."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerView:
    """What placement knows of a healthy server."""

    load: int
    serving: bool


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
    loads = [server.load for server in servers]
    assign: list[int] = []

    def fill(serving: bool, most: int) -> None:
        candidates = [index for index, server in enumerate(servers) if server.serving is serving]
        for _ in range(most):
            free = [index for index in candidates if capacity is None or loads[index] < capacity]
            if not free:
                return
            chosen = min(free, key=loads.__getitem__)
            loads[chosen] += 1
            assign.append(chosen)

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


def counted_on(ages: Sequence[float], patience: float) -> int:
    """How many of the starts under way, begun `ages` seconds ago, are still counted on to take rollouts.

    One that takes longer than `patience` seconds perhaps hangs, and another is begun in its stead. But if many take
    long they are slow, not hung, and more of them would make it worse: never are more than a quarter replaced (but
    always two, so that a replacement that hangs, too, is replaced).
    """
    overdue = sum(age > patience for age in ages)
    return len(ages) - min(overdue, max(2, -(-len(ages) // 4)))


def idle_too_long(idle: Sequence[float | None], *, floor: int, timeout: float) -> list[int]:
    """Indexes of the servers to stop: those without a rollout for `timeout` seconds (`idle`; None: it has rollouts),
    the longest idle ones first, as long as `floor` servers are left."""
    longest_first = sorted(
        (index for index, seconds in enumerate(idle) if seconds is not None and seconds >= timeout),
        key=lambda index: -(idle[index] or 0.0),
    )
    return longest_first[: max(0, len(idle) - floor)]
