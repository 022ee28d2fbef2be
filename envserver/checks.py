"""Numbers that no pool can work with, told before anything is started."""

import os

from envserver.errors import EnvServerError
from envserver.limits import PoolPolicy
from envserver.memory import rss_of


def check_numbers(max_workers: int | None, elastic: bool, min_workers: int, multiplex: int) -> None:
    """Raises `EnvServerError` that says which is wrong and what it may be."""
    if max_workers is not None and max_workers < 1:
        raise EnvServerError(f"max_workers is at least 1, or None for any number; not {max_workers}")
    if max_workers is None and not elastic:
        raise EnvServerError("elastic=False starts max_workers at once: give their number")
    if multiplex < 1:
        raise EnvServerError(f"multiplex is at least 1, not {multiplex}")
    if min_workers < 1 or (max_workers is not None and min_workers > max_workers):
        most = "" if max_workers is None else f" and at most max_workers ({max_workers})"
        raise EnvServerError(f"min_workers is at least 1{most}, not {min_workers}")


def check_limits(policy: PoolPolicy) -> None:
    """Raises `EnvServerError` for a limit that nothing can keep, or that this system cannot see."""
    for name in ("max_worker_rss", "max_worker_age"):
        if (limit := getattr(policy, name)) is not None and limit <= 0:
            raise EnvServerError(f"{name} is more than 0, or None for no limit; not {limit}")
    if policy.max_worker_rss is not None and rss_of(os.getpid()) is None:
        raise EnvServerError("max_worker_rss: this system has no /proc, so install psutil")
