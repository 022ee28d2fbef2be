"""What a subject's process speaks with the benchmark: lines of JSON, commands in and answers out.

Nothing but the standard library: it is imported in the interpreters of all subjects. A subject is an async context
manager that yields its `Served`; `main` runs it, tells where it listens, and obeys: a line `N` asks for the keys of N
new sessions in place of the last ones. It ends when its standard input does.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Served:
    """A subject that serves `POST base_url/v1/chat/completions`."""

    base_url: str
    """No trailing slash, no `/v1`."""
    sessions: Callable[[int], list[str]]
    """So many new sessions, by their keys; those before are over."""


Subject = Callable[[str], AbstractAsyncContextManager[Served]]
"""Given the upstream's URL, without `/v1`."""


def main(subject: Subject) -> None:
    """`python -m … UPSTREAM`: the subject, until standard input ends."""
    asyncio.run(_obey(subject, sys.argv[1]))


async def _obey(subject: Subject, upstream: str) -> None:
    # What the subject prints must not come among the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    async with subject(upstream) as served:
        print(json.dumps(served.base_url), file=answers)
        async for line in _lines():
            print(json.dumps(served.sessions(int(line))), file=answers)


async def _lines() -> AsyncIterator[bytes]:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line
