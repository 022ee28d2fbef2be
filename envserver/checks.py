"""Arguments that nothing can work with, told to the caller before anything is started."""

import math
import os
from typing import TYPE_CHECKING, Any

from envserver.errors import EnvServerError
from envserver.memory import rss_of
from envserver.zsocket import MAX_PORT

if TYPE_CHECKING:
    from envserver.limits import PoolPolicy


def check_numbers(max_workers: int | None, elastic: bool, min_workers: int, multiplex: int) -> None:
    """Raises `EnvServerError` that says which is wrong and what it may be."""
    if not isinstance(elastic, bool):
        raise EnvServerError(f"elastic is True or False, not {elastic!r}")
    for name, value, none in (
        ("max_workers", max_workers, "None for any number"),
        ("multiplex", multiplex, None),
        ("min_workers", min_workers, None),
    ):
        check_whole(name, value, none=none)
    if max_workers is not None and max_workers < 1:
        raise EnvServerError(f"max_workers is at least 1, or None for any number; not {max_workers}")
    if max_workers is None and not elastic:
        raise EnvServerError("elastic=False starts max_workers at once: give their number")
    if multiplex < 1:
        raise EnvServerError(f"multiplex is at least 1, not {multiplex}")
    if min_workers < 1 or (max_workers is not None and min_workers > max_workers):
        most = "" if max_workers is None else f" and at most max_workers ({max_workers})"
        raise EnvServerError(f"min_workers is at least 1{most}, not {min_workers}")


def check_limits(policy: "PoolPolicy") -> None:
    """Raises `EnvServerError` for a limit that nothing can keep, or that this system cannot see."""
    for name in ("max_worker_rss", "max_worker_age"):
        limit = getattr(policy, name)
        check_number(name, limit, none="None for no limit")
        if limit is not None and limit <= 0:
            raise EnvServerError(f"{name} is more than 0, or None for no limit; not {limit}")
    if policy.max_worker_rss is not None and rss_of(os.getpid()) is None:
        raise EnvServerError("max_worker_rss: this system has no /proc, so install psutil")


def check_port(name: str, port: Any) -> None:
    """`port`: a number that a port can have, 0 for any free one, or None for none at all."""
    check_whole(name, port, none="None for none")
    if port is not None and not 0 <= port <= MAX_PORT:
        raise EnvServerError(f"{name} is 0 to {MAX_PORT}, or None for none; not {port}")


def check_seconds(name: str, value: Any) -> None:
    """`value`: some time, which may be no time at all or for ever."""
    check_number(name, value)
    if value < 0:
        raise EnvServerError(f"{name} is a time in seconds, not {value}")


def check_whole(name: str, value: Any, *, none: str | None = None) -> None:
    """`none`: what None stands for, where it may be given."""
    if not (value is None and none is not None) and (isinstance(value, bool) or not isinstance(value, int)):
        raise EnvServerError(f"{name} is a whole number{_or(none)} not {value!r}")


def check_number(name: str, value: Any, *, none: str | None = None) -> None:
    """The same for what may have a fraction."""
    if value is None and none is not None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise EnvServerError(f"{name} is a number{_or(none)} not {value!r}")


def _or(none: str | None) -> str:
    return "," if none is None else f", or {none};"
