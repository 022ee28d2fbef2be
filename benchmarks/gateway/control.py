"""What a subject's process speaks with the benchmark: lines of JSON, commands in and answers out.

Nothing but the standard library: it is imported in the interpreters of all subjects. A subject is an async context
manager that yields its `Served`; `main` runs it, tells where it listens, and obeys: a line `N` asks for N new sessions
in place of the last ones. It ends when its standard input does.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import NamedTuple

PATH = "/v1/chat/completions"


class Session(NamedTuple):
    """One rollout's way in: `POST` to the path, with the key as its bearer."""

    path: str
    key: str


@dataclass(frozen=True, slots=True)
class Served:
    """A subject that serves chat completions."""

    base_url: str
    """`http://HOST:PORT`."""
    sessions: Callable[[int], list[Session]]
    """So many new ones; those before are over."""


def keyless(number: int) -> list[Session]:
    """The sessions of a subject that knows none."""
    return [Session(PATH, "key")] * number


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
