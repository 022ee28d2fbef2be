"""A process of ours: started by exec, watched through a pidfd, its last words kept."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from envserver.errors import EnvServerError

EXEC_TARGET = Path(__file__).with_name("_child.py")

POLL = 0.25
"""Seconds between two looks at a child where the system has no pidfd."""

TAIL_LINES, TAIL_BYTES = 50, 8192

LOG_CAP = 64 << 20
"""Bytes of a child's log on disk. Above it, its beginning and its end are kept."""

LOG_KEPT = 256 << 10
"""Bytes kept at either end."""

LOG_CHECK = 0.5
"""Seconds between two looks at the size of the log."""

UNKNOWN_STATUS = 255
"""Where something else in this process has collected the exit status (a SIGCHLD handler, `os.wait`)."""

ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


class Child:
    """One run of `envserver/_child.py`, from exec until it has been reaped.

    It leads a process group: what it leaves behind there is killed when it has ended. It ends by itself when this
    process does, however that ends. Make it with `spawn`.
    """

    def __init__(
        self, process: "subprocess.Popen[bytes]", files: "_Files", on_exit: "Callable[[Child], None]", log_path: Path
    ) -> None:
        self.pid: int = process.pid
        self.started = time.monotonic()
        self.returncode: int | None = None
        """The exit status; negative: the signal that ended it; None: it runs."""
        self.log_path = log_path
        self._process = process
        self._files = files
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._lost = False
        self._closed = False
        self._ended: float | None = None
        self._pidfd: int | None = None
        self._log_timer = self._loop.call_later(LOG_CHECK, self._check_log)
        try:
            self._pidfd = os.pidfd_open(self.pid)
            self._loop.add_reader(self._pidfd, self._look)
        except (AttributeError, OSError):  # macOS; a sandbox that refuses it; no descriptor left
            self._loop.call_later(POLL, self._look)

    @classmethod
    def spawn(
        cls,
        job: dict[str, Any],
        *,
        log_path: Path,
        on_exit: "Callable[[Child], None]",
        on_report: Callable[[str], None] | None = None,
    ) -> "Child":
        """Start a process that does `job` (JSON values; `role` says what), about 0.5 ms. Needs a running loop.

        `on_exit` is called once, on the loop, when it has ended, is reaped and `returncode` is set; `on_report` with
        each line that it writes to the pipe it inherits for that, all of them before `on_exit`. Its stdout and stderr
        are appended to `log_path`. Raises `EnvServerError`, leaving nothing behind, if it cannot be started.
        """
        try:
            text = json.dumps(job)
        except (TypeError, ValueError, RecursionError) as error:
            raise EnvServerError(f"a worker's configuration must be JSON: {error}") from None
        files = _Files()
        try:
            files.open(log_path, report=on_report is not None)
            inherited = files.inherited
            config = {
                "job": json.loads(text),
                "sys_path": [str(entry) or os.getcwd() for entry in sys.path],
                "parent": os.getpid(),
                # The death signal is tied to the thread that spawns: armed from one that ends, it would kill the child.
                "death_signal": threading.current_thread() is threading.main_thread(),
                **inherited,
            }
            # A file without a name: it is nobody else's to read, and nothing of it is left even if the child dies
            # before it has read it. Not in argv, not in the environment: both can be seen from outside.
            files.config.write(json.dumps(config).encode())
            files.config.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-P", str(EXEC_TARGET), str(files.config.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=files.log,
                stderr=files.log,
                pass_fds=[files.config.fileno(), *inherited.values()],
                process_group=0,
            )
        except (OSError, ValueError) as error:
            files.close()
            raise EnvServerError(f"a process cannot be started: {error}") from None
        except BaseException:
            files.close()
            raise
        files.spawned()
        child = cls(process, files, on_exit, log_path)
        if on_report is not None:
            files.read_reports(child._loop, on_report)
        return child

    @property
    def seconds(self) -> float:
        """How long it has been running, or ran until it was reaped."""
        return (time.monotonic() if self._ended is None else self._ended) - self.started

    @property
    def exit_reason(self) -> str:
        if self._lost:
            return "ended with a status that something else in this process has collected"
        return describe_exit(self.returncode)

    def tail(self) -> str:
        """The last 50 lines, at most 8 KiB, of what it printed, without colours; then the traceback it died with, if
        that is not among them. Still there after `close`."""
        return self._files.tail()

    def send_signal(self, number: int) -> None:
        """Send it a signal; nothing happens once it has ended. Never reaches another process that got its id."""
        if self.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, number)
            else:
                os.kill(self.pid, number)  # nobody else has its id before it is reaped

    def close(self) -> None:
        """Give back what was held for it; `tail` still tells. If it runs it is killed, `on_exit` is not called, and all
        is given back once it has been reaped."""
        self._closed = True
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)
            return
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        self._files.close()

    def _look(self) -> None:
        """Called when it has ended, or by the timer to see whether it has."""
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                if self._pidfd is None:
                    self._loop.call_later(POLL, self._look)
                return
            # Before it is reaped, for until then nobody else can have its id as a process group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            status, self._lost = UNKNOWN_STATUS, True
        self._process.returncode = self.returncode = status
        self._ended = time.monotonic()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
        self._log_timer.cancel()
        self._files.finish()
        if self._closed:
            self.close()
        else:
            self._on_exit(self)

    def _check_log(self) -> None:
        self._log_timer = self._loop.call_later(LOG_CHECK, self._check_log)
        self._files.cap_log()


def describe_exit(returncode: int | None) -> str:
    """`killed by SIGKILL`, `exited with status 3`, `still running`."""
    if returncode is None:
        return "still running"
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:  # a real-time signal
        return f"killed by signal {-returncode}"


def last_lines(data: bytes) -> str:
    """The end of `data` as it can be shown: at most 50 lines and 8 KiB, no colours, nothing undecodable."""
    cut = data[-TAIL_BYTES:]
    lines = ANSI.sub("", cut.decode(errors="replace")).splitlines()
    if len(data) > len(cut) and len(lines) > 1:
        del lines[0]  # which is only a part of one
    text = "\n".join("".join(c if c.isprintable() or c == "\t" else "\ufffd" for c in line) for line in lines)
    return "\n".join(text.rstrip().split("\n")[-TAIL_LINES:])


def read_tail(path: str | os.PathLike[str], start: int = 0) -> str:
    """The last lines of the file at `path`, of what is there from byte `start` on; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return _read_tail(file.fileno(), start)
    except OSError:
        return ""


def _read_tail(fd: int, start: int) -> str:
    size = os.fstat(fd).st_size
    # One byte more than is shown: that tells whether the first line is whole.
    return last_lines(os.pread(fd, TAIL_BYTES + 1, max(start if start <= size else 0, size - TAIL_BYTES - 1)))


class _Files:
    """The descriptors that a child and its parent share."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._theirs = contextlib.ExitStack()
        self._last_tail: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._report: int | None = None
        self.inherited: dict[str, int] = {}
        """What the child must know, by name: numbers that are the same over there."""

    def open(self, log_path: Path, *, report: bool) -> None:
        try:
            self.log = os.open(log_path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise EnvServerError(f"the log {log_path} cannot be written: {error.strerror}") from None
        self._stack.callback(os.close, self.log)
        self._start = os.fstat(self.log).st_size
        self.config: IO[bytes] = self._theirs.enter_context(tempfile.TemporaryFile(buffering=0))  # noqa: SIM115
        self._traceback: IO[bytes] = self._stack.enter_context(tempfile.TemporaryFile(buffering=0))  # noqa: SIM115
        self.inherited["traceback_fd"] = self._traceback.fileno()
        read_end, write_end = os.pipe()
        self._theirs.callback(os.close, read_end)
        self._stack.callback(os.close, write_end)
        self.inherited["death_fd"] = read_end
        if report:
            self._report, write_end = os.pipe()
            os.set_blocking(self._report, False)
            self._theirs.callback(os.close, write_end)
            self.inherited["report_fd"] = write_end

    def spawned(self) -> None:
        """The child has what it inherits."""
        self._theirs.close()

    def read_reports(self, loop: asyncio.AbstractEventLoop, on_report: Callable[[str], None]) -> None:
        assert self._report is not None
        self._loop = loop
        self._rest = b""
        self._on_report = on_report
        loop.add_reader(self._report, self._read_report)

    def _read_report(self) -> None:
        while self._report is not None:
            try:
                data = os.read(self._report, 65536)
            except BlockingIOError:
                return
            if not data:
                self._close_report()
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._on_report(line.decode(errors="replace"))

    def _close_report(self) -> None:
        if self._report is not None:
            if self._loop is not None:
                self._loop.remove_reader(self._report)
            os.close(self._report)
            self._report = None

    def finish(self) -> None:
        """The child has ended: what it reported last is told."""
        if self._loop is not None:
            self._read_report()

    def tail(self) -> str:
        if self._last_tail is not None:
            return self._last_tail
        printed = _read_tail(self.log, self._start)
        traceback = _read_tail(self._traceback.fileno(), 0)
        if not traceback or traceback in printed:
            return printed
        return f"{printed}\n{traceback}" if printed else traceback

    def cap_log(self) -> None:
        """Cut what is in the middle of a log that has grown beyond its cap. What is appended meanwhile may be lost."""
        size = os.fstat(self.log).st_size
        if size - self._start <= LOG_CAP:
            return
        tail = os.pread(self.log, LOG_KEPT, size - LOG_KEPT)
        # The beginning stays in place. The child may write in between, for it is not asked to wait.
        os.ftruncate(self.log, self._start + LOG_KEPT)
        os.write(self.log, b"\n[... %d bytes were cut here ...]\n" % (size - self._start - 2 * LOG_KEPT) + tail)

    def close(self) -> None:
        if self._last_tail is None and "death_fd" in self.inherited:
            self._last_tail = self.tail()
        self._close_report()
        self._theirs.close()
        self._stack.close()
