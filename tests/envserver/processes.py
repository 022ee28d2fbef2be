"""What is left of processes, as the system sees it."""

import os
from pathlib import Path

from tests.helpers import until


def alive(pid: int) -> bool:
    """Whether it runs: a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def exists(pid: int) -> bool:
    """Whether it has not been reaped."""
    return Path(f"/proc/{pid}").exists()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def read_pid(path: Path) -> int:
    """The process id that another process leaves there."""
    await until(lambda: path.exists() and path.read_text())
    return int(path.read_text())  # noqa: ASYNC240 - a few bytes
