"""The cases: what is asked of each subject, and what is read off it."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.gateway import canned
from benchmarks.gateway.load import load
from benchmarks.gateway.subjects import Subject

Measured = dict[str, float]
"""Values by measure; `UNITS` has all there are."""

UNITS = {
    "requests_per_s": "1/s",
    "p50_ms": "ms",
    "p99_ms": "ms",
    "cpu_us": "µs a request",
}

SETTLE_TIMEOUT = 10.0
"""Seconds that a subject gets to end what the case before has left it with."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    measure: Callable[[Subject, float], Measured]
    """Given how many seconds it may take, about."""


def _throughput(name: str, connections: int, body: bytes) -> Case:
    def measure(subject: Subject, seconds: float) -> Measured:
        keys = subject.sessions(connections)
        before = subject.process.cpu() if subject.process else 0.0
        seen = load(subject.base_url, keys, body, connections, seconds)
        measured = {
            "requests_per_s": seen.requests / seen.seconds,
            "p50_ms": seen.p50_ms,
            "p99_ms": seen.p99_ms,
        }
        if subject.process:
            measured["cpu_us"] = (subject.process.cpu() - before) / seen.requests * 1e6
        return measured

    return Case(name, measure)


def settle(subject: Subject) -> None:
    """Waits until a subject has nothing left to do: an interrupted load leaves it with calls that nobody awaits."""
    if subject.process is None:
        return
    until = time.monotonic() + SETTLE_TIMEOUT
    before = subject.process.cpu()
    while time.monotonic() < until:
        time.sleep(0.05)
        if (now := subject.process.cpu()) == before:
            return
        before = now


CASES = (
    _throughput("json_c1", 1, canned.request()),
    _throughput("json_c32", 32, canned.request()),
    _throughput("json_c256", 256, canned.request()),
    _throughput("big_c32", 32, canned.request(size=canned.BIG_BYTES)),
    _throughput("stream_c32", 32, canned.request(stream=True)),
    _throughput("stream_c256", 256, canned.request(stream=True)),
)
