"""Processes told apart for certain: a pid alone may belong to another program by now.

What a process started with is its mark: on Linux the clock tick since boot, elsewhere what psutil knows, if it is
installed. An empty mark means that nothing here tells.
"""

import contextlib
import importlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROC = Path("/proc")


def mark_of(pid: int) -> str | None:
    """The mark of a running process; None: there is none of that pid (a zombie has ended)."""
    if (PROC / "self" / "stat").exists():
        try:
            # After the name, which may hold spaces and brackets: the state, and 19 fields later the start.
            fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else fields[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    psutil = _psutil()
    if psutil is None:
        return ""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else repr(process.create_time())
    except psutil.NoSuchProcess:
        return None
    except psutil.Error:
        return ""


def may_run(pid: int, mark: str) -> bool:
    """Whether that process may still be running; False only if it is certain that it is not."""
    now = mark_of(pid)
    return now is not None and (now == mark or not (now and mark))


def surely_runs(pid: int, mark: str) -> bool:
    return bool(mark) and mark_of(pid) == mark


def kill(pid: int, mark: str, timeout: float = 2.0) -> bool:
    """Kill that very process, and no other that has its pid now; wait up to `timeout` seconds for its end.

    True if it was killed. Blocks.
    """
    with contextlib.ExitStack() as stack:
        handle: int | None = None
        with contextlib.suppress(AttributeError, OSError):  # not everywhere, and not for what has ended
            handle = os.pidfd_open(pid)
            stack.callback(os.close, handle)
        # Looked at after the handle was opened: from here on it can be no other's.
        if pid <= 1 or not surely_runs(pid, mark):
            return False
        try:
            if handle is None:
                os.kill(pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return False
        deadline = time.monotonic() + timeout
        while surely_runs(pid, mark) and time.monotonic() < deadline:
            time.sleep(0.005)
    return True


def with_last_arguments(*wanted: str) -> list[tuple[int, str]]:
    """Pid and mark of the processes whose command line ends in these arguments."""
    found = []
    for pid, arguments in _command_lines():
        if arguments[-len(wanted) :] == list(wanted) and (mark := mark_of(pid)):
            found.append((pid, mark))
    return found


def _command_lines() -> Iterator[tuple[int, list[str]]]:
    if (PROC / "self" / "stat").exists():
        for directory in PROC.glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                yield int(directory.name), os.fsdecode((directory / "cmdline").read_bytes()).rstrip("\0").split("\0")
    elif (psutil := _psutil()) is not None:
        for process in psutil.process_iter(["cmdline"]):
            yield process.pid, process.info["cmdline"] or []


def _psutil() -> Any:
    try:
        return importlib.import_module("psutil")
    except ImportError:
        return None
