"""A TCP proxy that cuts a connection at a place the test names."""

import asyncio
import contextlib
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


class CuttingProxy:
    """Passes everything on between its `url` and that of a server, but for the connections it was told to cut."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._marks: list[bytes] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.cuts = 0

    def cut_at(self, mark: bytes) -> None:
        """Close the next connection over which the server sends `mark`; what comes before that is passed on. Once."""
        self._marks.append(mark)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()
        assert self._marks == [], "a connection was to be cut, and what it was to be cut at never came"

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connection(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server: asyncio.StreamWriter | None = None
        requests: asyncio.Task[None] | None = None
        try:
            from_server, to_server = await asyncio.open_connection(self._host, self._port)
            requests = asyncio.create_task(_pass_on(reader, to_server))
            await self._answers(from_server, writer)
        except ConnectionError:
            pass
        finally:
            if requests is not None:
                requests.cancel()
            for side in (writer, to_server):
                if side is not None:
                    side.close()
                    with contextlib.suppress(ConnectionError):
                        await side.wait_closed()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held = b""  # the end of what came, as long as it may be the beginning of a mark
        while chunk := await reader.read(2**16):
            held += chunk
            for mark in self._marks:
                before, found, _ = held.partition(mark)
                if found:
                    self._marks.remove(mark)
                    self.cuts += 1
                    writer.write(before)
                    await writer.drain()
                    return
            keep = max((_overlap(held, mark) for mark in self._marks), default=0)
            writer.write(held[: len(held) - keep])
            held = held[len(held) - keep :]
            await writer.drain()
        writer.write(held)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while chunk := await reader.read(2**16):
            writer.write(chunk)
            await writer.drain()
        writer.close()  # the client went away


def _overlap(text: bytes, mark: bytes) -> int:
    """How many bytes at the end of `text` are the beginning of `mark`."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)
