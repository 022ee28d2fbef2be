"""Paced streams: how soon the first byte comes, and how evenly the events of thousands at once."""

import asyncio
import time
from collections.abc import Sequence

from benchmarks.gateway import canned
from benchmarks.gateway.control import Session
from benchmarks.gateway.http import Connection, Reply
from benchmarks.gateway.load import PATIENCE
from benchmarks.gateway.subjects import Subject

CONNECTING = 128
"""Connections that are made at a time: a server's queue of them is short."""

OPENING = 4.0
"""Seconds over which the streams are begun: rollouts do not begin in the same millisecond."""


async def first_bytes(base_url: str, sessions: Sequence[Session], body: bytes, seconds: float) -> list[Reply]:
    """Whole streams, one after the other in each session, for so many seconds and at least one each."""
    until = time.perf_counter() + seconds
    connections = [await Connection.to(base_url) for _ in sessions]
    replies: list[Reply] = []

    async def caller(number: int) -> None:
        await asyncio.sleep(seconds * number / len(sessions) / 2)  # not all at once
        while True:
            stamped = canned.stamped(body, number + len(replies))
            replies.append(await connections[number].call(canned.post(*sessions[number], stamped)))
            if replies[-1].status != 200:
                raise RuntimeError(f"a paced stream was answered {replies[-1].status}")
            if time.perf_counter() + replies[-1].lasted / 2 > until:
                return

    try:
        async with asyncio.timeout(seconds + PATIENCE), asyncio.TaskGroup() as group:
            for number in range(len(sessions)):
                group.create_task(caller(number))
    finally:
        for connection in connections:
            connection.close()
    return replies


async def open_streams(
    subject: Subject, sessions: Sequence[Session], body: bytes, seconds: float
) -> tuple[list[Reply], float]:
    """What had come of a stream for each session once all had been open for so many seconds, and the RSS then, in MiB.

    `RuntimeError` when one ended or never began.
    """
    connections: list[Connection] = []
    try:
        while len(connections) < len(sessions):
            wanted = min(CONNECTING, len(sessions) - len(connections))
            connections += await asyncio.gather(*(Connection.to(subject.base_url) for _ in range(wanted)))
        calls: list[asyncio.Task[Reply]] = []
        for number, (connection, session) in enumerate(zip(connections, sessions, strict=True)):
            request = canned.post(*session, canned.stamped(body, number))
            calls.append(asyncio.create_task(connection.call(request)))
            if number % 32 == 31:
                await asyncio.sleep(32 * OPENING / len(sessions))
        await asyncio.wait(calls, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        rss = subject.process.rss_mib() if subject.process else 0.0
        now = time.perf_counter()
        replies = [connection.reply for connection in connections]
        ended = sum(call.done() for call in calls)
        silent = sum(not reply.body for reply in replies)
        if ended or silent:
            raise RuntimeError(f"of {len(calls)} streams {ended} ended early and {silent} had not begun")
        for reply in replies:
            reply.longest_gap = max(reply.longest_gap, now - reply.last)
    finally:
        for connection in connections:
            connection.close()
    await asyncio.gather(*calls, return_exceptions=True)
    return replies, rss
