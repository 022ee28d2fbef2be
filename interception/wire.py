"""A turn's request over aiohttp's connections, without the client around them.

Of the time of a bare proxy `aiohttp.ClientSession` takes a third: cookies, redirects, retries, traces and middlewares
for each request, of which a turn has none. Here aiohttp's connector, TLS, parser and pool do their work alone.
"""

import asyncio
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, Protocol, Self

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ClientRequest
from aiohttp.connector import Connection
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL


class UpstreamAnswer(Protocol):
    """What is asked of an answer: aiohttp's `ClientResponse` is one, too."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def content(self) -> aiohttp.StreamReader: ...
    async def read(self) -> bytes: ...


class Connector(aiohttp.TCPConnector):
    """aiohttp's, whose connections go on reading only where they had paused.

    They do so after each chunk of an answer otherwise, which takes longer than the chunk (aiohttp 3.14).
    """

    def __init__(self) -> None:
        # Without a limit: aiohttp's own of 100 connections would make rollouts wait for one another.
        super().__init__(limit=0)
        kind: type[ResponseHandler] = _Connected
        self._factory = partial(kind, loop=self._loop)


class _Connected(ResponseHandler):
    def resume_reading(self, *args: Any, **kwargs: Any) -> None:
        if self._reading_paused:
            super().resume_reading(*args, **kwargs)


class Wire:
    """Posts to the upstreams of one origin, over the connections of `session`. The proxies that an environment may name
    are left to `session` itself."""

    def __init__(self, session: aiohttp.ClientSession, origin: URL) -> None:
        connector = session.connector
        assert connector is not None
        self._connector = connector
        self._timeout = session.timeout
        # What the connector needs to know of a request, and the headers a request of aiohttp's has by itself.
        self._model = ClientRequest("POST", origin, loop=asyncio.get_running_loop(), session=session)
        self._defaults = dict(self._model.headers)

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
            raise ValueError("a header of the request has a line break or a NUL in it")
        try:
            connection = await self._connector.connect(self._model, traces=[], timeout=self._timeout)
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError(f"no connection to {self._model.url.origin()}") from error
        protocol = connection.protocol
        assert protocol is not None
        assert protocol.transport is not None
        protocol.set_response_params(read_until_eof=True, read_timeout=self._timeout.sock_read)
        protocol.transport.write(f"{text}\r\n\r\n".encode(errors="surrogateescape") + body)
        protocol.start_timeout()
        return connection

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
        self._connection = connection = await self._wire.send(*request)
        del request
        protocol = connection.protocol
        assert protocol is not None
        try:
            self.status = 100
            while 100 <= self.status < 200 and self.status != 101:
                message, self.content = await protocol.read()
                self.status, self.headers = message.code, message.headers
        except BaseException as error:
            connection.close()
            if isinstance(error, HttpProcessingError):
                raise self._wire.unreadable(error) from error
            raise
        return self

    async def __aexit__(self, *_: Any) -> None:
        if self._connection is not None:
            self._connection.release()


@lru_cache(maxsize=256)
def _target(url: str) -> str:
    return URL(url, encoded=True).raw_path_qs
