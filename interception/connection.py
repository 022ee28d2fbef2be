"""A connection to an upstream: one answer after the other, in pieces as they come."""

import asyncio
import select
from collections.abc import Callable
from typing import Any, Final, cast

import aiohttp
import httptools
from multidict import CIMultiDict, CIMultiDictProxy

from interception.coding import UNDECODABLE, Decoder, decoder_of

HEAD_CAP: Final = 64 * 1024
"""Bytes that come before the first of a body."""

HEADERS_CAP: Final = 128

TAPPED: Final = 8 * 1024
"""Bytes of a piece up to which it is given to the tap: read in one go, and nobody else gets a turn meanwhile."""

BODY_CAP: Final = 2**40
"""Bytes that one piece may become: what an upstream sends is not bounded, as it would not be if it were sent plain."""


class NoHttp(aiohttp.ClientError):
    """What came is no HTTP answer. It is not quoted."""


class Undecodable(aiohttp.ClientPayloadError):
    """The body is not what its `Content-Encoding` says."""


class Connection(asyncio.Protocol):
    """Its owner asks for an answer by `expect`, sends the request over `transport`, and reads: `head`, then `readany`
    until it is empty, or `read`. One reader at a time.

    Reading raises aiohttp's errors: `ServerDisconnectedError`, `ClientOSError` or `NoHttp` before the head is there,
    `ClientPayloadError` after it, `SocketTimeoutError` after `idle_timeout` seconds without a byte.

    What an answer costs here, a turn costs: one timer serves all that comes, and all pieces that one segment brought
    are read at once.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, idle_timeout: float | None, siblings: "set[Connection]"
    ) -> None:
        """`siblings`: those that are open; it is among them as long as it is."""
        self.transport: asyncio.Transport | None = None
        self.lost: asyncio.Future[None] = loop.create_future()
        self.status = 0
        self.headers: CIMultiDictProxy[str] = CIMultiDictProxy(CIMultiDict())
        self.reusable = False
        """All of the answer was read, and nothing speaks against another request."""
        self._loop = loop
        self._idle_timeout = idle_timeout
        self._siblings = siblings
        self._fields: list[tuple[str, str]] = []
        self._parts: list[bytes] = []
        self._parser: httptools.HttpResponseParser | None = _parser(self)
        self._expecting = True
        """Also before the first request is sent: some refuse it as soon as they are connected."""
        self._headed = False
        self._whole = False
        self._until_end = False
        """The end of the connection is that of the body."""
        self._decoder: Decoder | None = None
        self._before_body = 0
        self._error: Callable[[], Exception] | None = None
        """Made when it is raised: one that is kept would keep the frames it came through."""
        self._waiter: asyncio.Future[None] | None = None
        self._heard = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.tap: Callable[[bytes], bool] | None = None
        """Given a small piece of the body for which a reader waits, in its place. True: the reader sleeps on. It is
        not asked of the last piece, nor of what must be decoded."""
        self._roused = False
        self._then: Callable[[Connection], None] | None = None
        """To be told when all of an answer that nobody reads any more is here."""
        self._patience: asyncio.TimerHandle | None = None

    # -- its owner's side ----------------------------------------------------------------------

    def expect(self) -> None:
        """The next answer is awaited from now on."""
        self._expecting, self.reusable = True, False
        self._heard = self._loop.time()
        if self._timer is None and self._idle_timeout is not None:
            self._timer = self._loop.call_later(self._idle_timeout, self._look)

    async def head(self) -> None:
        """Until `status` and `headers` are those of the answer (1xx is none)."""
        while not self._headed:
            await self._news()

    async def readany(self) -> bytes:
        """The next bytes of the body, decoded; empty at its end, and where the tap has had this reader woken."""
        while True:
            if self._parts:
                data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
                self._parts.clear()
                if self._decoder is None or (data := self._decoded(self._decoder, data)):
                    return data
            elif self._whole:
                if self._decoder is not None and not self._decoder.whole:
                    raise aiohttp.ClientPayloadError("the compressed body ends too early")
                return b""
            else:
                self._roused = False
                await self._news()
                if self._roused:
                    return b""

    async def read(self) -> bytes:
        """All that is left of the body."""
        pieces = []
        while piece := await self.readany():
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def at_eof(self) -> bool:
        return self._whole and not self._parts

    def done(self) -> None:
        """The owner has read what it wanted."""
        transport = self.transport
        self.reusable = (
            self.reusable
            and not self._parts
            and transport is not None
            and not transport.is_closing()
            # A request that was not read to its end.
            and not transport.get_write_buffer_size()
        )
        self._expecting, self._headed, self._whole, self._until_end = False, False, False, False
        self._before_body, self._decoder, self.tap = 0, None, None
        self._parts.clear()

    def finish(self, seconds: float, then: "Callable[[Connection], None]") -> None:
        """Read what is left of the answer, for nobody, for so many seconds at most. `then` is called when that is
        over; at once if nothing is left."""
        if self._whole or self._error is not None:
            then(self)
            return
        self._parts.clear()
        self._then, self.tap = then, None
        self._patience = self._loop.call_later(seconds, self._finished)

    def _finished(self) -> None:
        then, self._then = self._then, None
        if self._patience is not None:
            self._patience.cancel()
        if then is not None:
            then(self)

    def usable(self) -> bool:
        """Whether a request may be sent on it: it is open, and neither its end nor anything else has come which the
        loop has not come round to tell."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return False
        arrived = select.poll()
        arrived.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not arrived.poll(0)

    def abort(self) -> None:
        """Close it here and now: to close it in order would wait for ever for a peer that does not read."""
        self._error = self._error or _broken_body  # that we ended it is not the end of an answer
        if self.transport is not None:
            self.transport.abort()

    async def _news(self) -> None:
        if self._error is not None:
            raise self._error()
        self._waiter = self._loop.create_future()
        await self._waiter

    def _decoded(self, decoder: Decoder, data: bytes) -> bytes:
        try:
            return decoder.feed(data, BODY_CAP)
        except UNDECODABLE as error:
            raise Undecodable(str(error)) from None

    # -- the transport's side ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self.lost.done():
            self.abort()  # whoever wanted it is gone
        else:
            self._siblings.add(self)

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            return
        if not self._expecting:
            self.abort()  # nobody asked for it
            return
        self._heard = self._loop.time()
        before_body = not self._headed
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._whole, self.reusable = True, False
        except httptools.HttpParserError:
            self._failed(NoHttp)
        if before_body:
            self._before_body += len(data)
            if self._before_body > HEAD_CAP and not (self._headed and _size(self.headers) <= HEAD_CAP):
                self._headed = False
                self._failed(NoHttp)
        if self.tap is None or self._waiter is None or self._waiter.done() or self._tapped(self.tap):
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.lost.done():
            self.transport = None
            return
        if self._error is None:
            if self._headed and self._until_end and exc is None:
                self._whole = True
            elif self._headed:
                self._error = _broken_body
            elif isinstance(exc, OSError):
                args = exc.args
                self._error = lambda: aiohttp.ClientOSError(*args)
            else:
                self._error = aiohttp.ServerDisconnectedError
        self.transport = self._parser = None  # which refers to us
        self.reusable = False
        if self._timer is not None:
            self._timer.cancel()
        self._wake()
        self._siblings.discard(self)
        self.lost.set_result(None)

    def _tapped(self, tap: Callable[[bytes], bool]) -> bool:
        """Whether there is anything for the reader."""
        if not self._parts or self._whole or self._error is not None or self._decoder is not None:
            return True
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        if len(data) > TAPPED:
            return True
        self._parts.clear()
        self._roused = not tap(data)
        return self._roused

    def _failed(self, error: Callable[[], Exception]) -> None:
        self._error, self.reusable = error, False
        self.abort()

    def _wake(self) -> None:
        if self._then is not None:
            self._parts.clear()
            if self._whole or self._error is not None:
                self._finished()
            return
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _look(self) -> None:
        """Whether it is silent. One timer for all that comes, for setting one for each piece takes longer than to read
        it."""
        self._timer = None
        if not self._expecting or self._idle_timeout is None:
            return
        left = self._heard + self._idle_timeout - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        elif not self._whole:
            self._failed(aiohttp.SocketTimeoutError)
            self._wake()

    # -- the parser's side ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._whole:
            # A second answer, which nobody asked for: one of them is not what it seems. No more is read.
            raise NoHttp

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._headed:  # else it is a trailer
            self._fields.append((name.decode(errors="surrogateescape"), value.decode(errors="surrogateescape")))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        fields, self._fields = self._fields, []
        self.status = self._parser.get_status_code()
        if (100 <= self.status < 200 and self.status != 101) or self._headed:
            return
        self.headers = headers = CIMultiDictProxy(CIMultiDict(fields))
        self._headed = len(fields) <= HEADERS_CAP
        if not self._headed:
            self._failed(NoHttp)
        self._until_end = (
            "Content-Length" not in headers and "chunked" not in headers.get("Transfer-Encoding", "").lower()
        )
        encoding = headers.get("Content-Encoding")
        if encoding is not None:
            self._decoder = decoder_of(encoding.strip().lower())

    @property
    def on_body(self) -> Callable[[bytes], Any]:
        return self._parts.append

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self._headed:
            self._whole, self.reusable = True, self._parser.should_keep_alive()


def _parser(connection: Connection) -> httptools.HttpResponseParser:
    parser = httptools.HttpResponseParser(connection)
    # What aiohttp lets pass, too: lines that end in a line feed alone, and the like.
    parser.set_dangerous_leniencies(
        lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
    )
    return parser


def _size(headers: CIMultiDictProxy[str]) -> int:
    return sum(len(name) + len(value) for name, value in headers.items())


def _broken_body() -> Exception:
    return aiohttp.ClientPayloadError("the body did not arrive whole")
