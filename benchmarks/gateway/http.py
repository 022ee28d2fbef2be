"""A client of our own, for what wrk cannot measure, and in its place where it is not installed.

Hand-written on asyncio's protocols: a client that takes its time would be measured along with the subject.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit


@dataclass(slots=True)
class Reply:
    """An answer that has come. Times are of `time.perf_counter`."""

    status: int = 0
    body: bytearray = field(default_factory=bytearray)
    began: float = 0.0
    first: float = 0.0
    """When the first byte of the body came."""
    last: float = 0.0
    """When the last piece came; while one is awaited, when the last one did."""
    longest_gap: float = 0.0
    """Seconds between two pieces of the body."""

    @property
    def lasted(self) -> float:
        return self.last - self.began


class Connection(asyncio.Protocol):
    """One connection, one call at a time. Whatever the server does against HTTP is a `ConnectionError`."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self.reply = Reply()
        self._done: asyncio.Future[Reply] | None = None
        self._left: int | None = None
        """Bytes left of the body or of the chunk; None: a head is awaited."""
        self._chunked = False
        self.lost: Exception | None = None

    @classmethod
    async def to(cls, base_url: str) -> "Connection":
        parts = urlsplit(base_url)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(cls, parts.hostname or "", parts.port or 80)
        return connection

    async def call(self, request: bytes) -> Reply:
        """Sends a request and waits for the whole answer."""
        if self._transport is None or self.lost is not None:
            raise ConnectionError(str(self.lost or "not connected"))
        reply = self.reply = Reply(began=time.perf_counter())
        reply.last = reply.began
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._done

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- what asyncio calls --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = error or ConnectionError("the server closed the connection")
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError(str(self.lost)))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        had = len(self.reply.body)
        try:
            ended = (self._left is not None or self._head()) and (self._chunks() if self._chunked else self._rest())
        except ValueError as error:
            self.lost = error
            self.close()
            return
        reply = self.reply
        if len(reply.body) > had:
            now = time.perf_counter()
            if had:
                reply.longest_gap = max(reply.longest_gap, now - reply.last)
            else:
                reply.first = now
            reply.last = now
        if ended:
            self._left = None
            if self._done is not None and not self._done.done():
                reply.last = reply.last if reply.body else time.perf_counter()
                self._done.set_result(reply)

    # -- parsing -------------------------------------------------------------------------------

    def _head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        status, *lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self.reply.status = int(status.split(" ", 2)[1])
        self._chunked = fields.get("transfer-encoding", "").lower() == "chunked"
        if not self._chunked and "content-length" not in fields:
            raise ValueError("an answer without a length")
        self._left = 0 if self._chunked else int(fields["content-length"])
        return True

    def _rest(self) -> bool:
        self._take()
        return self._left == 0

    def _chunks(self) -> bool:
        """Whether the last chunk has come. A chunk is taken with the line end behind it, which is no part of it."""
        while True:
            if self._left:
                self._take()
                if self._left > 0:
                    return False
                del self.reply.body[-2:]
            end = self._buffer.find(b"\r\n")
            if end < 0:
                return False
            size = int(self._buffer[:end].split(b";")[0], 16)
            if size == 0:
                if len(self._buffer) < end + 4:
                    return False
                del self._buffer[: end + 4]
                return True
            del self._buffer[: end + 2]
            self._left = size + 2

    def _take(self) -> None:
        assert self._left is not None
        taken = self._buffer[: self._left]
        del self._buffer[: self._left]
        self.reply.body += taken
        self._left -= len(taken)
