"""The subjects of the env server benchmark as processes: started, watched, killed, and nothing of them left."""

import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.envserver_client import connected, workers

ROOT = Path(__file__).parents[1]

START_TIMEOUT = 300.0
"""Seconds until a subject's workers must answer: verifiers imports for five, in each of five processes."""


@dataclass(slots=True)
class Subject:
    """A server that runs. `broker` is the process at `address`; it has its workers under it, or none."""

    broker: subprocess.Popen[str]
    address: str
    _workers: dict[int, int] = field(default_factory=dict)
    """pid to pidfd: what is killed by it is that process, and no other that got its pid."""

    def knows(self, pids: set[int]) -> None:
        """These are its workers now."""
        for pid in set(self._workers) - pids:
            os.close(self._workers.pop(pid))
        for pid in pids - set(self._workers):
            self._workers[pid] = os.pidfd_open(pid)

    def kill_worker(self, pid: int) -> None:
        signal.pidfd_send_signal(self._workers[pid], signal.SIGKILL)

    def kill_broker(self, patience: float) -> float | None:
        """Seconds from its SIGKILL until all its workers are gone; None if they are not in `patience` seconds."""
        began = time.perf_counter()
        self.broker.kill()
        left = set(self._workers.values())
        while left and (remains := began + patience - time.perf_counter()) > 0:
            left -= set(select.select(left, [], [], remains)[0])  # a pidfd is readable once its process has ended
        lasted = time.perf_counter() - began
        self.broker.wait()
        return None if left else lasted

    def fds(self) -> int:
        """Open file descriptors of the broker."""
        return len(os.listdir(f"/proc/{self.broker.pid}/fd"))

    def rss_mib(self) -> float:
        """Resident memory of the broker, MiB."""
        pages = int(Path(f"/proc/{self.broker.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def zombies(self) -> int:
        """Ended children of the broker that it has not waited for."""
        found = 0
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:  # it has just ended
                    continue
                found += state == "Z" and int(parent) == self.broker.pid
        return found

    def close(self) -> None:
        if self.broker.poll() is None:
            os.killpg(self.broker.pid, signal.SIGKILL)  # also workers that have not told their pid
        self.broker.wait()
        for pidfd in self._workers.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        self._workers.clear()


@contextmanager
def started(command: Sequence[str | Path], number: int) -> Iterator[Subject]:
    """The server that `command` starts, once its `number` workers answer (0: it has none)."""
    with tempfile.TemporaryFile("w+") as log:
        broker = subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        subject = Subject(broker, "")
        try:
            assert broker.stdout is not None
            if select.select([broker.stdout], [], [], START_TIMEOUT)[0]:
                subject.address = broker.stdout.readline().strip()
            if not subject.address:
                log.seek(0)
                raise RuntimeError(f"{' '.join(map(str, command))} printed no address:\n{log.read()[-4000:]}")
            if number:
                with connected(subject.address) as client:
                    subject.knows(workers(client, number, START_TIMEOUT))
            yield subject
        finally:
            subject.close()
            if broker.stdout is not None:
                broker.stdout.close()
