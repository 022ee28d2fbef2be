"""The upstream of `upstream.c` in Python, for where no C compiler is: the same answers, several times as slowly."""

import asyncio
import sys
from pathlib import Path
from typing import cast

from benchmarks.gateway.canned import STAMP, read_answers

SCAN = 4096
"""Bytes at the head and at the tail of a body in which it is looked for what the call asks."""


class Upstream(asyncio.Protocol):
    answers = 0
    """Sent so far, by all connections."""

    def __init__(self, records: list[bytes]) -> None:
        self._whole, self._head, *self._events = records
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._pacing: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self._pacing is not None:
            self._pacing.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while self._pacing is None:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._buffer[:end]).lower()
            _, _, rest = head.partition(b"content-length:")
            whole = end + 4 + int(rest.split(b"\r\n", 1)[0] or 0)
            if len(self._buffer) < whole:
                return
            body = bytes(self._buffer[end + 4 : whole])
            del self._buffer[:whole]
            self._answer(body if len(body) <= 2 * SCAN else body[:SCAN] + body[-SCAN:])

    def _answer(self, asked: bytes) -> None:
        Upstream.answers += 1
        number = b"%010d" % Upstream.answers
        if b'"stream":true' not in asked and b'"stream": true' not in asked:
            self._send(self._whole, number)
            return
        self._send(self._head, number)
        _, paced, rest = asked.partition(b"paced-")
        if paced:
            self._pacing = asyncio.create_task(self._pace(int(rest.split(b'"', 1)[0]) / 1e3, number))
            return
        for event in self._events:
            self._send(event, number)

    async def _pace(self, interval: float, number: bytes) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        for count, event in enumerate(self._events, 1):
            await asyncio.sleep(began + count * interval - loop.time())
            self._send(event, number)
        self._pacing = None
        self.data_received(b"")  # the next call may have come

    def _send(self, record: bytes, number: bytes) -> None:
        assert self._transport is not None
        self._transport.write(record.replace(STAMP.encode(), number))


async def main(answers: Path) -> None:
    """Prints the port, and serves until standard input ends."""
    records = read_answers(answers)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Upstream(records), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    ended = asyncio.Event()
    loop.add_reader(sys.stdin, ended.set)  # nobody writes to it
    await ended.wait()
    server.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
