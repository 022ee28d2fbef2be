"""The processes of a run: the upstream and the subjects, each on its core, watched from outside, and all ended."""

import json
import os
import select
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

START_TIMEOUT = 120.0
"""Seconds until a subject must say where it listens: LiteLLM's proxy imports for many."""

END_TIMEOUT = 5.0
"""Seconds a process gets to end when its input does."""

TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Cores:
    """Which cores the subject, the load and the upstream run on; empty: wherever the system likes."""

    subject: frozenset[int]
    load: frozenset[int]
    upstream: frozenset[int]

    @classmethod
    def of_machine(cls) -> "Cores":
        """One core for the subject; another for load and upstream, or one each where there are three."""
        usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if len(usable) < 2:
            return cls(frozenset(), frozenset(), frozenset())
        return cls(frozenset(usable[-1:]), frozenset(usable[:1]), frozenset(usable[-2:-1]))

    def __str__(self) -> str:
        if not self.subject:
            return "nothing pinned: fewer than two cores"
        shared = "load and upstream share another" if self.load == self.upstream else "load and upstream one each"
        return f"the subject on one core, {shared}"


class Process:
    """A process that answers each line of its input with a line of JSON, and ends with its input.

    Its stderr is kept for when it fails. `RuntimeError` when it ends or stays silent.
    """

    def __init__(self, command: Sequence[str | Path], cores: frozenset[int]) -> None:
        self.name = " ".join(str(part) for part in command)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in `close`
        self._process = subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        if cores:
            os.sched_setaffinity(self.pid, cores)

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
        except BrokenPipeError:
            raise self._ended() from None

    def answer(self, timeout: float = START_TIMEOUT) -> object:
        """The next line of its output."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            raise RuntimeError(f"{self.name} said nothing for {timeout:g} s{self._said()}")
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        return json.loads(line)

    def cpu(self) -> float:
        """Seconds of CPU it has had so far, all threads; to 10 ms."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    def rss_mib(self) -> float:
        """Its resident memory, MiB."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _ended(self) -> RuntimeError:
        try:
            code = f"ended with {self._process.wait(END_TIMEOUT)}"
        except subprocess.TimeoutExpired:
            code = "closed its output"
        return RuntimeError(f"{self.name} {code}{self._said()}")

    def _said(self) -> str:
        self._log.seek(0)
        said = self._log.read()[-2000:].strip()
        return f":\n{said}" if said else ""


@contextmanager
def running(command: Sequence[str | Path], cores: frozenset[int]) -> Iterator[Process]:
    process = Process(command, cores)
    try:
        yield process
    finally:
        process.close()
