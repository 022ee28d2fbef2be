"""Which server takes a rollout, and how many servers to start: the decision, without I/O and without a clock."""

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
    can_start: bool = True,
) -> Plan:
    """Where the first of `waiting` rollouts go now.

    Each goes to the least loaded server that serves and has room. Where none has, servers are started, `capacity`
    rollouts for each; only where none can be started does a server that is healthy but not serving take one.
    `capacity` None: no limit, and so nothing to start.
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
    if capacity is not None and can_start:
        return Plan(tuple(assign), max(0, -(-left // capacity) - starting))
    fill(False, left - starting * (capacity or 0))
    return Plan(tuple(assign), 0)
