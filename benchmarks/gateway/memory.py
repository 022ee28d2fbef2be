"""What a subject keeps: resident memory after so many turns, and that of a session that waits."""

import asyncio
from collections.abc import Iterator

from benchmarks.gateway import canned
from benchmarks.gateway.control import Session
from benchmarks.gateway.load import PATIENCE, calls
from benchmarks.gateway.subjects import Subject

SESSIONS = 32

PARTS = 4
"""Memory is read after each of so many equal parts of the turns."""

SLOWEST = 100.0
"""Turns a second at least: a part that is slower than that is given up."""


def recorded(subject: Subject, turns: int) -> tuple[float, float]:
    """RSS in MiB after so many turns of 1 kB, and what the last quarter of them added over what the one before did.

    Each turn's question and answer are like no other's.
    """
    assert subject.process is not None
    sessions = subject.sessions(SESSIONS)
    body = canned.request()
    part = turns // PARTS

    def requests(numbers: range) -> Iterator[bytes]:
        for number in numbers:
            session: Session = sessions[number % len(sessions)]
            yield canned.post(*session, canned.stamped(body, number))

    rss = []
    for start in range(0, part * PARTS, part):
        seen = asyncio.run(
            calls(subject.base_url, requests(range(start, start + part)), SESSIONS, part / SLOWEST + PATIENCE)
        )
        if seen.errors or seen.requests != part:
            raise RuntimeError(f"of {part} turns {seen.requests} were answered, {seen.errors} failed")
        rss.append(subject.process.rss_mib())
    # The first part also pays for what is made once, and is left out of the slope.
    return rss[-1], (rss[3] - rss[2]) / max(rss[2] - rss[1], 0.001)


def idle(subject: Subject, sessions: int) -> float:
    """kB of resident memory for each of so many sessions that are registered and not used."""
    assert subject.process is not None
    subject.sessions(1)
    before = subject.process.rss_mib()
    subject.sessions(sessions)
    return (subject.process.rss_mib() - before) * 2**20 / 1000 / sessions
