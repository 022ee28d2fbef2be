"""What becomes of requests, and of the broker, when workers are killed."""

import random
import time
from dataclasses import dataclass, field

import msgpack

from benchmarks.envserver_client import PATIENCE, Client, connected
from benchmarks.envserver_subjects import Subject

IN_FLIGHT = 64
"""Requests under way when a worker is killed."""

SETTLING = 10
"""Kills before the broker's descriptors and memory are taken for its usual ones."""


@dataclass(slots=True)
class Kills:
    """What a series of kills showed."""

    kills: int = 0
    to_error: list[float] = field(default_factory=list)
    """Seconds from each kill to the error of each request that was on the worker."""
    unanswered: int = 0
    """The most requests that a kill left without an answer."""
    fd_growth: int | None = None
    rss_growth_mib: float | None = None
    """None where there were too few kills to tell."""
    zombies: int = 0


class _Held:
    """Requests that are under way until their worker dies, by the worker they are on."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.on: dict[bytes, int] = {}

    def fill(self) -> None:
        asked = {self._client.run(deltas=1, hold=True) for _ in range(IN_FLIGHT - len(self.on))}
        while asked:
            request_id, kind, data = self._client.next()
            if kind != b"delta":
                raise RuntimeError(f"a request on a living worker was answered: {msgpack.unpackb(data)}")
            self.on[request_id] = msgpack.unpackb(data)["pid"]
            asked.discard(request_id)

    def errors(self, pid: int, killed: float, patience: float) -> list[float]:
        """Seconds from `killed` to the error of each request that was on `pid`, waited for `patience` at most."""
        orphans = {request_id for request_id, on in self.on.items() if on == pid}
        times = []
        while orphans and (remains := killed + patience - time.perf_counter()) > 0:
            frame = self._client.receive(remains)
            if frame is None:
                break
            now = time.perf_counter()
            request_id, kind, data = frame
            reply = msgpack.unpackb(data)
            if request_id not in orphans or kind != b"reply" or reply["success"] or not reply["error"]:
                raise RuntimeError(f"a request got what it should not: {reply}")
            orphans.discard(request_id)
            del self.on[request_id]
            times.append(now - killed)
        return times

    def number_on(self, pid: int) -> int:
        return sum(on == pid for on in self.on.values())


def kill_workers(subject: Subject, kills: int, *, seconds: float, replaced: bool, patience: float) -> Kills:
    """Kills one worker after the other, with requests under way on all, for as long as `seconds`. Those that are not
    `replaced`: only one."""
    seen = Kills()
    rng = random.Random(0)
    settled: tuple[int, float] | None = None
    with connected(subject.address) as client:
        held = _Held(client)
        ends = time.monotonic() + seconds
        for number in range(kills):
            held.fill()
            pids = set(held.on.values())
            subject.knows(pids)
            victim = rng.choice(sorted(pids))
            orphans = held.number_on(victim)
            killed = time.perf_counter()
            subject.kill_worker(victim)
            times = held.errors(victim, killed, patience)
            seen.kills += 1
            seen.to_error += times
            seen.unanswered = max(seen.unanswered, orphans - len(times))
            if not replaced:
                break
            _wait_until_ready(client, len(pids))
            if time.monotonic() > ends:
                break
            if number == SETTLING:
                settled = subject.fds(), subject.rss_mib()
        seen.zombies = subject.zombies()
        if settled is not None:
            seen.fd_growth = subject.fds() - settled[0]
            seen.rss_growth_mib = subject.rss_mib() - settled[1]
    return seen


def _wait_until_ready(client: Client, number: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while client.ask(b"health")["ready"] < number:
        if time.monotonic() > deadline:
            raise TimeoutError(f"a killed worker was not replaced in {PATIENCE:g} s")
        time.sleep(0.02)
