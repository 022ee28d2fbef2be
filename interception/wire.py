"""A turn's request over aiohttp's connections, without the client around them.

Of the time of a bare proxy `aiohttp.ClientSession` takes a third: cookies, redirects, retries, traces and middlewares
for each request, of which a turn has none. Here aiohttp's connector, TLS, parser and pool do their work alone.
"""

import asyncio
import inspect
from functools import lru_cache, partial
from typing import Any, Self

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ClientRequest
from aiohttp.connector import Connection
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from interception.turn import Failure


class _Connected(ResponseHandler):
    """aiohttp's, which goes on reading only where it had paused.

    It does so after each chunk of an answer otherwise, which takes longer than the chunk (aiohttp 3.14).
    """

    def resume_reading(self, *args: Any, **kwargs: Any) -> None:
        if self._reading_paused:
            super().resume_reading(*args, **kwargs)


class Wire:
    """Posts to the upstreams of one origin, over the connections of `session`. The proxies that an environment may name
    are left to `session` itself.

    Making one raises some `Exception` where aiohttp's parts do not fit; `session` is as it was then.
    """

    def __init__(self, session: aiohttp.ClientSession, origin: URL) -> None:
        connector = session.connector
        assert connector is not None
        self._connector = connector
        self._timeout = session.timeout
        # What the connector needs to know of a request, and the headers a request of aiohttp's has by itself.
        self._model = ClientRequest("POST", origin, loop=asyncio.get_running_loop(), session=session)
        self._defaults = dict(self._model.headers)
        self._rehearse()
        kind: type[ResponseHandler] = _Connected
        connector._factory = partial(kind, loop=connector._loop)

    def post(self, url: str, headers: CIMultiDict[str], body: bytes) -> "Post":
        return Post(self, url, headers, body)

    async def send(self, url: str, headers: CIMultiDict[str], body: bytes) -> Connection:
        """A connection on which the request was sent."""
        head = [f"POST {_target(url)} HTTP/1.1"]
        for name, value in self._defaults.items():
            headers.setdefault(name, value)
        headers["Content-Length"] = str(len(body))
        head += [f"{name}: {value}" for name, value in headers.items()]
        text = "\r\n".join(head)
        if text.count("\n") != len(head) - 1 or text.count("\r") != len(head) - 1 or "\0" in text:
            raise Failure(400, "a header of the request has a line break or a NUL in it")
        try:
            connection = await self._connector.connect(self._model, traces=[], timeout=self._timeout)
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError(f"no connection to {self._model.url.origin()}") from error
        try:
            protocol = connection.protocol
            if protocol is None or protocol.transport is None:  # lost as soon as it was made
                raise aiohttp.ServerDisconnectedError
            self._expect_answer(protocol)
            protocol.transport.write(f"{text}\r\n\r\n".encode(errors="surrogateescape") + body)
            protocol.start_timeout()
        except BaseException:
            connection.close()
            raise
        return connection

    def _expect_answer(self, protocol: ResponseHandler) -> None:
        protocol.set_response_params(read_until_eof=True, read_timeout=self._timeout.sock_read)

    def _rehearse(self) -> None:
        """Read an answer of a connection that is none, as `send` and `Post` do it: most of what they call is not in
        aiohttp's documentation, and may be another tomorrow."""
        inspect.signature(self._connector.connect).bind(self._model, traces=[], timeout=self._timeout)
        for name in ("protocol", "transport", "release", "close"):
            getattr(Connection, name)
        if not isinstance(self._model.request_info, aiohttp.RequestInfo) or "Host" not in self._defaults:
            raise TypeError("a request is made differently")
        if not callable(self._connector._factory):
            raise TypeError("connections are made differently")
        protocol = _Connected(loop=asyncio.get_running_loop())
        protocol.connection_made(_Nowhere())
        self._expect_answer(protocol)
        protocol.start_timeout()
        try:
            protocol.data_received(b"HTTP/1.1 200 OK\r\nX-Vf: 1\r\nContent-Length: 2\r\n\r\nok")
            protocol.resume_reading()
            try:
                protocol.read().send(None)
            except StopIteration as got:
                message, content = got.value
            else:
                raise TypeError("an answer is read differently")
            if (message.code, message.headers["X-Vf"], content.read_nowait()) != (200, "1", b"ok"):
                raise TypeError("an answer is read differently")
        finally:
            protocol.close()

    def unreadable(self, error: HttpProcessingError) -> aiohttp.ClientResponseError:
        return aiohttp.ClientResponseError(self._model.request_info, (), status=error.code, message=error.message)


class Post:
    """Entered once the head of the answer is there; raises what an `aiohttp.ClientSession` would. At the end the
    connection goes back to the pool, or is closed if not all of the answer was read."""

    def __init__(self, wire: Wire, url: str, headers: CIMultiDict[str], body: bytes) -> None:
        self._wire = wire
        self._request: tuple[str, CIMultiDict[str], bytes] | None = (url, headers, body)
        self._connection: Connection | None = None
        self.status = 0
        self.headers: CIMultiDictProxy[str] = CIMultiDictProxy(CIMultiDict())
        self.content: aiohttp.StreamReader = aiohttp.EMPTY_PAYLOAD

    async def read(self) -> bytes:
        return await self.content.read()

    async def __aenter__(self) -> Self:
        assert self._request is not None
        request, self._request = self._request, None  # nobody holds the body once it is sent
        connection = await self._wire.send(*request)
        del request
        protocol = connection.protocol
        assert protocol is not None
        try:
            self.status = 100
            while 100 <= self.status < 200 and self.status != 101:
                message, self.content = await protocol.read()
                self.status, self.headers = message.code, message.headers
        except BaseException as error:
            _leave(connection, whole=False)
            if isinstance(error, HttpProcessingError):
                raise self._wire.unreadable(error) from error
            raise
        self._connection = connection
        return self

    async def __aexit__(self, *_: Any) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            _leave(connection, whole=True)


def _leave(connection: Connection, *, whole: bool) -> None:
    """Give the connection back; `whole`: if all of the answer was read, others may have it."""
    transport = connection.transport
    if transport is not None and transport.get_write_buffer_size():
        # The request was not read to its end. Closing would wait for that, for ever where the upstream hangs.
        transport.abort()
        whole = False
    if whole:
        connection.release()
    else:
        connection.close()


class _Nowhere(asyncio.Transport):
    """A connection to nobody."""

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        pass


@lru_cache(maxsize=256)
def _target(url: str) -> str:
    return URL(url, encoded=True).raw_path_qs
