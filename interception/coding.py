"""Compressed bodies, decoded piece by piece as they come."""

import sys
import zlib
from typing import Any, Final, Protocol

import brotli

if sys.version_info >= (3, 14):
    from compression.zstd import ZstdDecompressor, ZstdError
else:
    from backports.zstd import ZstdDecompressor, ZstdError

UNDECODABLE: Final = (zlib.error, brotli.error, ZstdError)
"""What a decoder raises for what it cannot decode."""


class Decoder(Protocol):
    whole: bool
    """Nothing is missing at the end (or nothing was fed)."""

    def feed(self, data: bytes, room: int) -> bytes:
        """What `data` adds, all of it if that is no more than `room`; else some of it, and more than that."""
        ...


class _Deflate:
    """gzip of one or more members, and deflate with or without zlib's header."""

    def __init__(self, encoding: str) -> None:
        self._gzip = encoding == "gzip"
        self._stream: Any = None
        self.whole = True

    def feed(self, data: bytes, room: int) -> bytes:
        parts: list[bytes] = []
        while data and room >= 0:
            if self._stream is None or (self._gzip and self._stream.eof):
                header = data[0] & 0x0F == 8
                self._stream = zlib.decompressobj(31 if self._gzip else 15 if header else -15)
            if self._stream.eof:
                raise zlib.error("something follows its end")
            parts.append(self._stream.decompress(data, room + 1))
            room -= len(parts[-1])
            data = self._stream.unused_data
        self.whole = self._stream.eof
        return b"".join(parts)


class _Zstd:
    """One or more frames."""

    def __init__(self) -> None:
        self._frame: Any = None
        self.whole = True

    def feed(self, data: bytes, room: int) -> bytes:
        parts: list[bytes] = []
        while data and room >= 0:
            if self._frame is None or self._frame.eof:
                self._frame = ZstdDecompressor()
            parts.append(self._frame.decompress(data, room + 1))
            room -= len(parts[-1])
            data = self._frame.unused_data
        self.whole = self._frame.eof
        return b"".join(parts)


class _Brotli:
    def __init__(self) -> None:
        self._stream = brotli.Decompressor()
        self.whole = True

    def feed(self, data: bytes, room: int) -> bytes:
        part: bytes = self._stream.process(data, output_buffer_limit=room + 1)
        self.whole = self._stream.is_finished()
        return part


def decoder_of(encoding: str) -> Decoder | None:
    """For a `Content-Encoding`, lower case; None: it is none that is known."""
    match encoding:
        case "gzip" | "deflate":
            return _Deflate(encoding)
        case "zstd":
            return _Zstd()
        case "br":
            return _Brotli()
    return None
