"""An answer on its way to a harness: head and parts, put on the connection as they come.

By hand: a response of aiohttp's takes longer to put its head together than all else of an answer, and its writer takes
a coroutine for each part.
"""

import time
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus

from aiohttp import HttpVersion11, web
from multidict import CIMultiDict

REASONS = {status.value: status.phrase for status in HTTPStatus}


class _Sent(web.StreamResponse):
    """Stands for an answer that has left already."""

    def __init__(self, *, last: bool) -> None:
        super().__init__()
        self._last = last

    @property
    def keep_alive(self) -> bool:
        return not self._last

    async def prepare(self, request: web.BaseRequest) -> None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        pass


SENT, SENT_LAST = _Sent(last=False), _Sent(last=True)


class Outbound:
    """The answer to `request`. The head leaves with the first part."""

    def __init__(self, request: web.BaseRequest) -> None:
        self.sent: web.StreamResponse = SENT_LAST
        """What aiohttp is given when all was written."""
        self._request = request
        self._transport = request.transport
        self._head = b""
        self._chunked = False

    def head(self, status: int, headers: CIMultiDict[str], length: int | None = None) -> None:
        """In chunks where no `length` is known; to an HTTP/1.0 client, whose connection ends with the answer then."""
        request = self._request
        last = not request.keep_alive
        if length is not None:
            headers["Content-Length"] = str(length)
        elif request.version >= HttpVersion11:
            headers["Transfer-Encoding"] = "chunked"
            self._chunked = True
        else:
            last = True
        headers["Connection"] = "close" if last else "keep-alive"
        headers.setdefault("Date", _date(int(time.time())))
        lines = [f"HTTP/1.1 {status} {REASONS.get(status, '')}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._head = "\r\n".join([*lines, "\r\n"]).encode(errors="surrogateescape")
        self.sent = SENT_LAST if last else SENT

    @property
    def ready(self) -> bool:
        """Whether there is a reader for more, who has read what was written before."""
        transport = self._transport
        return transport is not None and not transport.is_closing() and not transport.get_write_buffer_size()

    def write(self, part: bytes, *, last: bool = False) -> None:
        """The next part, and the end of the answer if it is the `last`. ConnectionError: the client is gone."""
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        data = part
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(part), part) if part else b""
            if last:
                data += b"0\r\n\r\n"
        if self._head:
            data, self._head = self._head + data, b""
        transport.write(data)
        self._request.writer.output_size += len(data)  # by which aiohttp knows that it must not answer by itself

    async def drain(self) -> None:
        """Until the client has read enough for more to be written."""
        if self._transport is not None and self._transport.get_write_buffer_size():
            await self._request.writer.drain()


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)
