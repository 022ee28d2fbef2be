"""A conversation that grows: each call repeats all that was said, and the model's last answer with it."""

import time

from benchmarks.gateway import canned
from benchmarks.gateway.http import Connection
from benchmarks.gateway.subjects import Subject


async def conversations(subject: Subject, seconds: float) -> list[list[float]]:
    """Seconds that each turn took, by its place, in as many conversations as go into so many seconds; at least one."""
    by_turn: list[list[float]] = [[] for _ in range(canned.TURNS)]
    until = time.perf_counter() + seconds
    connection = await Connection.to(subject.base_url)
    try:
        (session,) = subject.sessions(1)
        await connection.call(
            canned.post(*session, canned.conversation([]))
        )  # the first call on a connection is slower
        while not by_turn[-1] or time.perf_counter() < until:
            (session,) = subject.sessions(1)
            said: list[str] = []
            for times in by_turn:
                reply = await connection.call(canned.post(*session, canned.conversation(said)))
                if reply.status != 200:
                    raise RuntimeError(f"turn {len(said) + 1} was answered {reply.status}")
                said.append(canned.said(bytes(reply.body)))
                times.append(reply.lasted)
    finally:
        connection.close()
    return by_turn
