"""What the processes of a worker are doing, as the system tells it: /proc, or psutil where there is none."""

import importlib
import os
import time
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from envserver.hung import Seen

PROC = "/proc"

PSUTIL_STATES = {"running": "R", "sleeping": "S", "disk-sleep": "D", "stopped": "T", "tracing-stop": "t", "zombie": "Z"}


class Process(NamedTuple):
    """A line of /proc/PID/stat, as far as it matters."""

    pid: int
    state: str
    parent: int
    group: int
    cpu: float
    """Seconds that it has used itself, in all its threads."""
    reaped: float
    """Seconds that its children had used, and theirs, whose exit statuses have been collected."""
    started: int
    """Together with its id: a name that no other process has."""


def look(pids: Iterable[int]) -> dict[int, Seen | None]:
    """The processes of each of these: itself, its descendants and its group. None for one that cannot be seen.

    Blocks, for about 30 µs a process of the system (on a slow machine), so call it in a thread. Never raises.
    """
    if not os.path.exists(f"{PROC}/self/stat"):
        return {pid: _look_by_psutil(pid) for pid in pids}
    processes = {process.pid: process for process in _all()}
    at = time.monotonic()
    return {pid: _seen(pid, processes, at) for pid in pids}


def parse_stat(text: str) -> Process:
    """Of /proc/PID/stat. Raises `ValueError` or `IndexError` if it is none."""
    # The second field is the program's name, in which anything may be.
    pid, _, rest = text.partition(" ")
    fields = rest.rpartition(")")[2].split()
    user, system, reaped_user, reaped_system = (int(value) / _TICKS for value in fields[11:15])
    return Process(
        int(pid),
        fields[0],
        int(fields[1]),
        int(fields[2]),
        user + system,
        reaped_user + reaped_system,
        int(fields[19]),
    )


_TICKS = os.sysconf("SC_CLK_TCK")


def _all() -> list[Process]:
    processes = []
    try:
        names = os.listdir(PROC)
    except OSError:
        return []
    for name in names:
        if name.isdigit():
            try:
                fd = os.open(f"{PROC}/{name}/stat", os.O_RDONLY | os.O_CLOEXEC)  # a third of what a file object takes
                try:
                    processes.append(parse_stat(os.read(fd, 4096).decode(errors="replace")))
                finally:
                    os.close(fd)
            except (OSError, ValueError, IndexError):  # it has ended meanwhile, or is not for us to see
                continue
    return processes


def _seen(pid: int, processes: dict[int, Process], at: float) -> Seen | None:
    if pid not in processes:
        return None
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    # What has lost its parent is still of the group, which the worker leads.
    found = {process.pid for process in processes.values() if process.group == pid} | {pid}
    waiting = [*found]
    while waiting:
        new = set(children.get(waiting.pop(), ())) - found
        found |= new
        waiting += new
    tree = [processes[found_pid] for found_pid in found]
    cpu: dict[Hashable, float] = {(process.pid, process.started): process.cpu for process in tree}
    return Seen(at, processes[pid].state, cpu, sum(process.reaped for process in tree))


def _look_by_psutil(pid: int) -> Seen | None:
    try:
        psutil: Any = importlib.import_module("psutil")
    except ImportError:
        return None
    cpu: dict[Hashable, float] = {}
    reaped = 0.0
    try:
        worker = psutil.Process(pid)
        state = PSUTIL_STATES.get(worker.status(), "?")
        for process in [worker, *worker.children(recursive=True)]:
            try:
                times = process.cpu_times()
                cpu[process.pid, process.create_time()] = times.user + times.system
                reaped += times.children_user + times.children_system
            except psutil.Error:
                continue
    except psutil.Error:
        return None
    return Seen(time.monotonic(), state, cpu, reaped)
