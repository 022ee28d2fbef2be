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

OPENING = 2.0
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
    """What had come of a stream for each session in so many seconds after all were open, and the RSS then, in MiB.

    `RuntimeError` when one never began or ended early.
    """
    connections: list[Connection] = []
    calls: list[asyncio.Task[Reply]] = []
    try:
        while len(connections) < len(sessions):
            wanted = min(CONNECTING, len(sessions) - len(connections))
            connections += await asyncio.gather(*(Connection.to(subject.base_url) for _ in range(wanted)))
        for number, (connection, session) in enumerate(zip(connections, sessions, strict=True)):
            request = canned.post(*session, canned.stamped(body, number))
            calls.append(asyncio.create_task(connection.call(request)))
            if number % 32 == 31:
                await asyncio.sleep(32 * OPENING / len(sessions))
        replies = await _all_open(connections, calls)
        rss = subject.process.rss_mib() if subject.process else 0.0
        await asyncio.sleep(seconds)
        now = time.perf_counter()
        for call, reply in zip(calls, replies, strict=True):
            if not call.done():
                reply.longest_gap = max(reply.longest_gap, now - reply.last)
            elif not call.result().body.endswith(b"data: [DONE]\n\n"):
                raise RuntimeError("a stream ended early")
    finally:
        for connection in connections:
            connection.close()
        await asyncio.gather(*calls, return_exceptions=True)
    return replies, rss


async def _all_open(connections: Sequence[Connection], calls: Sequence[asyncio.Task[Reply]]) -> list[Reply]:
    """Once each has had its first event, and none its last."""
    replies = [connection.reply for connection in connections]
    until = time.perf_counter() + PATIENCE
    while silent := sum(not reply.body for reply in replies):
        if time.perf_counter() > until:
            raise RuntimeError(f"{silent} of {len(calls)} streams have not begun")
        await asyncio.sleep(0.05)
    if ended := sum(call.done() for call in calls):
        raise RuntimeError(f"{ended} of {len(calls)} streams had ended when the last one began")
    return replies
