"""Waiting for a server's address, and learning at once that there will be none."""

import asyncio
import contextlib
import os
import queue
import subprocess
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from envserver.child import describe_exit, read_tail
from envserver.errors import EnvServerError, EnvServerStartupError

__all__ = ["EnvServerStartupError", "wait_for_address"]

TIMEOUT = 600.0
"""Seconds for a server to come up: an env may load data or models first."""

POLL = 0.05
"""Seconds between two looks where nothing tells."""

STATUS_TIMEOUT = 5.0
"""Seconds that the exit status of a process that has ended may be behind (a fork server passes it on)."""


def traceback_path(log_path: str | os.PathLike[str]) -> Path:
    """Where a server that logs to `log_path` leaves the traceback it died with: nothing else is written there."""
    return Path(f"{os.fspath(log_path)}.traceback")


def startup_error(
    reason: str,
    *,
    pid: int | None,
    seconds: float,
    tail: str,
    log_path: str | os.PathLike[str] | None,
    returncode: int | None = None,
    address: str | None = None,
    what: str = "the env server",
) -> EnvServerStartupError:
    """The error for a process that will not serve: all that is known, in one text."""
    path = None if log_path is None else os.fspath(log_path)
    when = f"after {seconds:.1f} s"
    if address is not None:
        head = f"{what} (pid {pid}) {reason} {when}, just after it had reported {address}"
    elif returncode is None:
        head = f"{what} (pid {pid}) {reason}"
    else:
        head = f"{what} (pid {pid}) {reason} {when}, before it was ready"
    if tail:
        text = f"{head}; the end of its output{'' if path is None else f' ({path})'}:\n{tail}"
    elif path is None:
        text = f"{head}; it has no log_path, so see the output of this process"
    elif returncode == -9:
        text = f"{head}; no output; SIGKILL, perhaps out of memory ({path})"
    else:
        text = f"{head}; no output ({path})"
    return EnvServerStartupError(
        text, exit_reason=reason, returncode=returncode, seconds=seconds, tail=tail, log_path=path
    )


async def wait_for_address(
    process: Any, address_queue: Any, *, timeout: float = TIMEOUT, log_path: str | os.PathLike[str] | None = None
) -> str:
    """The address that `process` puts on `address_queue`, as soon as it does.

    `process` is a started `multiprocessing.Process` or a `subprocess.Popen`; `address_queue` a queue of multiprocessing
    (also of a manager) or a connection to read from. `log_path` is what the process was told to log to.

    Raises `EnvServerStartupError` in the moment the process ends, whatever its exit status, also if it had put its
    address before; and after `timeout` seconds. The process is left as it is.
    """
    watched = _Process(process)
    source = _Source(address_queue)
    changed = asyncio.Event()

    def error(reason: str, address: str | None = None) -> EnvServerStartupError:
        return startup_error(
            reason,
            pid=watched.pid,
            seconds=watched.seconds,
            tail=_tail(log_path),
            log_path=log_path,
            returncode=watched.returncode(),
            address=address,
        )

    with _Readers(changed.set) as readers:
        told = readers.watch(source.fileno) & readers.watch(watched.fileno)
        try:
            async with asyncio.timeout(timeout):
                while True:
                    changed.clear()
                    ended = watched.ended()  # first: what it has put before is there then
                    address = source.read()
                    if source.closed:  # which the loop would tell again and again
                        told = readers.forget(source.fileno)
                    if ended:
                        await watched.wait_for_status()
                        raise error(describe_exit(watched.returncode()), address)
                    if address is not None:
                        return address
                    if told:
                        await changed.wait()
                    else:
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(POLL):
                                await changed.wait()
        except TimeoutError:
            raise error(f"reported no address within {timeout:g} s") from None
        finally:
            readers.close()
            watched.close()


def _tail(log_path: str | os.PathLike[str] | None) -> str:
    if log_path is None:
        return ""
    printed, last_words = read_tail(log_path), read_tail(traceback_path(log_path))
    if not last_words or last_words in printed:
        return printed
    return f"{printed}\n{last_words}" if printed else last_words


CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _start_time(pid: int) -> float:
    """When the process was started, by `CLOCK`."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        # The 22nd field; the second is the name, in brackets, and may hold anything.
        return int(stat[stat.rindex(b")") + 1 :].split()[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.clock_gettime(CLOCK)


class _Readers:
    """Descriptors that the loop watches for as long as somebody waits."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._fds: list[int] = []

    def __enter__(self) -> "_Readers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def watch(self, fd: int | None) -> bool:
        """Whether it can be watched."""
        if fd is None:
            return False
        self._loop.add_reader(fd, self._callback)
        self._fds.append(fd)
        return True

    def forget(self, fd: int | None) -> bool:
        """False: it is not watched any more."""
        if fd in self._fds:
            self._loop.remove_reader(fd)
            self._fds.remove(fd)
        return False

    def close(self) -> None:
        while self._fds:
            self._loop.remove_reader(self._fds.pop())


class _Process:
    """A process of multiprocessing or subprocess: whether it has ended, and how."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int | None = process.pid
        if self.pid is None:
            raise EnvServerError("the process has not been started: start it, then wait for its address")
        self._popen = isinstance(process, subprocess.Popen)
        # Not the sentinel of multiprocessing: a process that the server has forked keeps it open.
        self.fileno: int | None = None
        with contextlib.suppress(AttributeError, OSError):
            self.fileno = os.pidfd_open(self.pid)
        self._started = _start_time(self.pid)

    @property
    def seconds(self) -> float:
        """Since it was started; where that is not known, since it was waited for."""
        return time.clock_gettime(CLOCK) - self._started

    def returncode(self) -> int | None:
        code: int | None = self._process.poll() if self._popen else self._process.exitcode
        return code

    def ended(self) -> bool:
        if self.returncode() is not None:
            return True
        if self.fileno is None:
            return False
        return bool(wait([self.fileno], 0))

    async def wait_for_status(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STATUS_TIMEOUT):
                while self.returncode() is None:  # noqa: ASYNC110 - the fork server's answer sets no event
                    await asyncio.sleep(0.002)

    def close(self) -> None:
        if self.fileno is not None:
            os.close(self.fileno)
            self.fileno = None


class _Source:
    """Where the address comes from."""

    def __init__(self, address_queue: Any) -> None:
        self._queue = address_queue
        reader = getattr(address_queue, "_reader", address_queue)
        self._reader = reader if hasattr(reader, "poll") and hasattr(reader, "fileno") else None
        self.fileno: int | None = None if self._reader is None else self._reader.fileno()
        self.closed = False

    def read(self) -> str | None:
        """The address, if it is there."""
        try:
            if self._reader is None:
                found = self._queue.get_nowait()
            elif not self._reader.poll():
                return None
            elif self._reader is self._queue:
                found = self._queue.recv()
            else:
                found = self._queue.get()
        except queue.Empty:
            return None
        except (EOFError, OSError):
            self.closed = True
            return None
        return str(found)
