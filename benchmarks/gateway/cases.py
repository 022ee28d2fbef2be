"""The cases: what is asked of each subject, and what is read off it."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.gateway import canned
from benchmarks.gateway.load import load, quantile
from benchmarks.gateway.memory import idle, recorded
from benchmarks.gateway.streams import first_bytes, open_streams
from benchmarks.gateway.subjects import BARE, DIRECT, OURS, Subject
from benchmarks.gateway.turns import conversations

Measured = dict[str, float]
"""Values by measure; `UNITS` has all there are."""

RATES = {"requests_per_s": "1/s", "p50_ms": "ms", "p99_ms": "ms", "cpu_us": "µs a request"}

UNITS = {
    **RATES,
    "first_byte_ms": "ms",
    "gap_max_ms": "ms",
    "turn1_ms": "ms",
    "turn80_ms": "ms",
    "turn80_over_turn1": "",
    "rss_mib": "MiB",
    "later_over_earlier": "",
    "idle_session_kb": "kB",
}

SETTLE_TIMEOUT = 10.0
"""Seconds that a subject gets to end what the case before has left it with."""

FIRST_BYTE_PACE = 10
"""Milliseconds between the events of the paced stream, and before its first."""

FIRST_BYTE_STREAMS = 16
"""Paced streams at a time: far fewer than a subject could serve, so that none waits for another."""

STREAMS = 4096

STREAMS_PACE = 500
"""Milliseconds between the events of each of them."""


@dataclass(frozen=True, slots=True)
class Amount:
    """How much a case may take of a round."""

    seconds: float
    """For each case that is a rate, about."""
    turns: int
    """That are recorded before memory is read."""
    sessions: int
    """Idle ones, from which the size of one is taken."""
    streams_seconds: float
    """For which all `STREAMS` are watched."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    measure: Callable[[Subject, Amount], Measured]
    subjects: frozenset[str] | None = None
    """The only ones it is for, where it is not for all; each in a new process, since memory is measured."""


def settle(subject: Subject) -> None:
    """Waits until a subject has nothing left to do: an interrupted load leaves it with calls that nobody awaits."""
    until = time.monotonic() + SETTLE_TIMEOUT
    before = subject.cpu()
    while subject.process and time.monotonic() < until:
        time.sleep(0.05)
        if (now := subject.cpu()) == before:
            return
        before = now


def _throughput(name: str, connections: int, body: bytes) -> Case:
    def measure(subject: Subject, amount: Amount) -> Measured:
        sessions = subject.sessions(connections)
        seen = load(subject.base_url, sessions, body, connections, amount.seconds, subject.cpu)
        rate = seen.requests / seen.seconds
        return _with_cpu(subject, seen.cpu_us, requests_per_s=rate, p50_ms=seen.p50_ms, p99_ms=seen.p99_ms)

    return Case(name, measure)


def _first_byte(subject: Subject, amount: Amount) -> Measured:
    sessions = subject.sessions(FIRST_BYTE_STREAMS)
    body = canned.request(stream=True, paced=FIRST_BYTE_PACE)
    before, began = subject.cpu(), time.perf_counter()
    replies = asyncio.run(first_bytes(subject.base_url, sessions, body, amount.seconds))
    took, cpu_us = time.perf_counter() - began, (subject.cpu() - before) / len(replies) * 1e6
    firsts, whole = [reply.first - reply.began for reply in replies], [reply.lasted for reply in replies]
    return _with_cpu(
        subject,
        cpu_us,
        requests_per_s=len(replies) / took,
        p50_ms=quantile(whole, 0.5) * 1e3,
        p99_ms=quantile(whole, 0.99) * 1e3,
        first_byte_ms=quantile(firsts, 0.5) * 1e3,
    )


def _multi_turn(subject: Subject, amount: Amount) -> Measured:
    before, began = subject.cpu(), time.perf_counter()
    by_turn = asyncio.run(conversations(subject, amount.seconds))
    took = time.perf_counter() - began
    times = [time for turn in by_turn for time in turn]
    first, last = quantile(by_turn[0], 0.5) * 1e3, quantile(by_turn[-1], 0.5) * 1e3
    return _with_cpu(
        subject,
        (subject.cpu() - before) / len(times) * 1e6,
        requests_per_s=len(times) / took,
        p50_ms=quantile(times, 0.5) * 1e3,
        p99_ms=quantile(times, 0.99) * 1e3,
        turn1_ms=first,
        turn80_ms=last,
        turn80_over_turn1=last / first,
    )


def _streams(subject: Subject, amount: Amount) -> Measured:
    sessions = subject.sessions(STREAMS)
    body = canned.request(stream=True, paced=STREAMS_PACE)
    replies, rss = asyncio.run(open_streams(subject, sessions, body, amount.streams_seconds))
    firsts = [reply.first - reply.began for reply in replies]
    gap = max(reply.longest_gap for reply in replies)
    measured = {"first_byte_ms": quantile(firsts, 0.5) * 1e3, "gap_max_ms": gap * 1e3}
    return measured | ({"rss_mib": rss} if subject.process else {})


def _memory(subject: Subject, amount: Amount) -> Measured:
    rss, later_over_earlier = recorded(subject, amount.turns)
    return {"rss_mib": rss, "later_over_earlier": later_over_earlier}


def _idle(subject: Subject, amount: Amount) -> Measured:
    return {"idle_session_kb": idle(subject, amount.sessions)}


def _with_cpu(subject: Subject, cpu_us: float, **measured: float) -> Measured:
    return measured | ({"cpu_us": cpu_us} if subject.process else {})


CASES = (
    _throughput("json_c1", 1, canned.request()),
    _throughput("json_c32", 32, canned.request()),
    _throughput("json_c256", 256, canned.request()),
    _throughput("big_c32", 32, canned.request(size=canned.BIG_BYTES)),
    _throughput("stream_c32", 32, canned.request(stream=True)),
    _throughput("stream_c256", 256, canned.request(stream=True)),
    Case("first_byte", _first_byte),
    Case("multi_turn", _multi_turn),
    Case("streams_4096", _streams, frozenset({DIRECT, BARE, OURS})),
    Case("memory", _memory, frozenset({OURS})),
    Case("idle_sessions", _idle, frozenset({OURS})),
)
