"""A turn's request over connections of our own.

`aiohttp.ClientSession` takes a third of the time of a bare proxy: cookies, redirects, retries, traces and middlewares
for each request, of which a turn has none. Its connections below that take a tenth: a timer and a task's turn for each
piece. What is sent and read is the same but for what `test_where_it_differs` names. HTTP is parsed by httptools.
"""

import asyncio
from functools import lru_cache
from typing import Final, Self

from aiohttp.http import SERVER_SOFTWARE
from multidict import CIMultiDictProxy
from yarl import URL

from interception.connecting import Origin
from interception.connection import Connection
from interception.headers import CALL_ID_HEADER, Sending
from interception.turn import Failure

KEEPALIVE: Final = 4.0
"""Seconds for which a connection without a request is kept. uvicorn (and with it vLLM and SGLang) and Node close theirs
after 5: a request that is under way then is lost, and is not sent again by us, for the model may have begun."""

KEEPALIVE_TLS: Final = 15.0
"""Where a new one costs a handshake, over networks: what stands there keeps them for a minute or more."""

LINGER: Final = 1.0
"""Seconds for which the end of an answer is awaited of which all is known, so that its connection can be kept."""


class Wire:
    """Posts to the upstreams of one origin."""

    def __init__(self, origin: URL, *, connect_timeout: float, idle_timeout: float | None) -> None:
        self._origin = Origin(origin, connect_timeout)
        self._idle_timeout = idle_timeout
        self._keepalive = KEEPALIVE_TLS if origin.scheme == "https" else KEEPALIVE
        self._defaults = {
            "Host": origin.host_port_subcomponent or "",
            "Accept": "*/*",
            "Accept-Encoding": "gzip, deflate, br, zstd",
            "User-Agent": SERVER_SOFTWARE,
        }
        self._open: set[Connection] = set()
        self._free: list[tuple[Connection, float]] = []
        """Those without a request, and since when; the newest last."""
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    def post(self, sending: Sending, call_id: str, body: bytes) -> "Post":
        head = sending.head
        if head is None:
            head = sending.head = self._head(sending)
        data = b"%b%b\r\nContent-Length: %d\r\n\r\n%b" % (head, call_id.encode(), len(body), body)
        return Post(self, data if head else b"")

    def send(self, data: bytes) -> Connection | None:
        """Send a request on a connection that is free: which one it was, if there is one."""
        connection = self._known()
        return None if connection is None else _sent(connection, data)

    async def send_on_new(self, data: bytes) -> Connection:
        return _sent(await self._connect(), data)

    def leave(self, connection: Connection) -> None:
        """The answer was read, or nobody wants it any more."""
        connection.done()
        if not connection.reusable or self._closed:
            connection.abort()
            return
        loop = asyncio.get_running_loop()
        self._free.append((connection, loop.time()))
        if self._sweeper is None:
            self._sweeper = loop.call_later(self._keepalive, self._sweep)

    async def close(self) -> None:
        """Cuts them all."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._origin.close()
        open = list(self._open)
        for connection in open:
            connection.abort()
        await asyncio.gather(*(connection.lost for connection in open))

    def _head(self, sending: Sending) -> bytes:
        """What all calls begin with that go there: up to a call's id, which with the length of its body is its own.
        Empty: they cannot be sent."""
        headers = sending.headers("")
        headers.popall(CALL_ID_HEADER)
        headers.popall("Content-Length", None)
        for name, value in self._defaults.items():
            headers.setdefault(name, value)
        lines = [f"POST {_target(sending.url)} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        if any(mark in line for line in lines for mark in "\r\n\0"):
            return b""
        return "\r\n".join([*lines, f"{CALL_ID_HEADER}: "]).encode(errors="surrogateescape")

    def _known(self) -> Connection | None:
        oldest = asyncio.get_running_loop().time() - self._keepalive
        while self._free:
            connection, since = self._free.pop()
            if since > oldest and connection.usable():
                return connection
            connection.abort()
        return None

    async def _connect(self) -> Connection:
        connection = Connection(asyncio.get_running_loop(), self._idle_timeout, self._open)
        try:
            return await self._origin.connect(lambda: connection)
        except BaseException:
            connection.abort()  # it may be there already, and would be closed in order, as slowly as the peer likes
            connection.connection_lost(None)  # uvloop does not tell it of a transport that it gives up
            raise

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        old = loop.time() - self._keepalive
        kept = [(connection, since) for connection, since in self._free if since > old and connection in self._open]
        for connection in {connection for connection, _ in self._free} - {connection for connection, _ in kept}:
            connection.abort()
        self._free = kept
        self._sweeper = loop.call_later(self._keepalive, self._sweep) if kept else None


class Post:
    """A request: sent at once if a connection is free, else when it is entered. One that may have been sent and will
    not be entered is to be dropped.

    Entered once the head of the answer is there; raises what an `aiohttp.ClientSession` would, or its like. At the
    end the connection is kept for others, or cut if not all of the answer was read.
    """

    status: int
    headers: CIMultiDictProxy[str]

    def __init__(self, wire: Wire, data: bytes) -> None:
        """`data`: empty for a request that is not to be sent, which is said when it is entered."""
        self._wire = wire
        self._connection = wire.send(data) if data else None
        self._data = data if self._connection is None else b""  # nobody holds the body once it is sent
        self._entered = False

    def drop(self) -> None:
        """It will not be entered, if it has not been."""
        if self._connection is not None and not self._entered:
            self._wire.leave(self._connection)

    @property
    def content(self) -> Connection:
        assert self._connection is not None
        return self._connection

    async def read(self) -> bytes:
        return await self.content.read()

    async def __aenter__(self) -> Self:
        self._entered = True
        if self._connection is None:
            data, self._data = self._data, b""
            if not data:
                raise Failure(400, "a header of the request has a line break or a NUL in it")
            self._connection = self._wire.send(data) or await self._wire.send_on_new(data)
            del data
        connection = self.content
        try:
            await connection.head()
        except BaseException:
            self._wire.leave(connection)
            raise
        self.status, self.headers = connection.status, connection.headers
        return self

    async def __aexit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is None:
            # A stream is over with its last event; the end of its body may come in a segment of its own.
            self.content.finish(LINGER, self._wire.leave)
        else:
            self._wire.leave(self.content)


def _sent(connection: Connection, data: bytes) -> Connection:
    connection.expect()
    if connection.transport is not None:  # else it was lost as soon as it was made: the reader is told
        connection.transport.write(data)
    return connection


@lru_cache(maxsize=256)
def _target(url: str) -> str:
    return URL(url, encoded=True).raw_path_qs
