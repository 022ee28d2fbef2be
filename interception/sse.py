"""Server-sent events, read from bytes in any chunking and written. No I/O: bytes go in, events come out."""

import json
from typing import Any, Final

import orjson

Json = dict[str, Any]

BOM: Final = b"\xef\xbb\xbf"
CR: Final = 13
"""As an integer: to look for one in bytes takes a ninth of what bytes of one take."""
_UNREAD: Final[Any] = object()

END: Final = b"data: [DONE]\n\n"
"""The last event of chat's streams, and of those made of them."""

NAMELESS: Final = len(b"data: ")
"""Where the data begins in an event that is one line of it."""

MERGED: Final = 4096
"""Bytes of an unfinished event up to which it is looked at again with the next chunk: longer ones would take the square
of their length."""


def loads(text: str | bytes) -> Any:
    """The JSON value of `text`; NaN and Infinity, which engines write into logprobs, are numbers too. ValueError."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        try:
            return json.loads(text)
        except RecursionError:
            raise ValueError("the JSON is nested too deeply") from None


def dumps(value: Any) -> bytes:
    """`value` as JSON on one line; NaN and Infinity become null. ValueError if it cannot be written."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        # It writes no integers beyond 64 bits, no lone surrogates and no nesting of 255, all of which `loads` reads.
        try:
            return json.dumps(value).encode()
        except (TypeError, RecursionError) as error:
            raise ValueError(f"this cannot be written as JSON: {error}") from error


def sse(payload: Json, *, named: bool = False) -> bytes:
    """One event with `payload` as its data; `named`: called after the payload's `type`."""
    name = f"event: {payload['type']}\n".encode() if named else b""
    return name + b"data: " + dumps(payload) + b"\n\n"


class SseEvent:
    """One event, or a block without data (comments, a lone blank line), in which `data` is None.

    It is read when it is first asked: of a stream that only repeats itself nobody asks.
    """

    __slots__ = ("_at", "_bom", "_fields", "_json", "complete", "raw")

    def __init__(self, raw: bytes, *, complete: bool = True, bom: bytes = b"") -> None:
        self.raw = raw
        """Its bytes, blank line included: all events' `raw` in a row are the stream."""
        self.complete = complete
        """False for the rest of a stream that ends without a blank line: SDKs drop such an event, and what is sent
        after its `raw` would become a part of it."""
        self._bom = bom
        self._at = 0  # as `_only_line` says
        self._fields: tuple[str | None, bytes | None, str | None] | None = None
        self._json: Any = _UNREAD

    @property
    def event(self) -> str | None:
        return None if self._at == NAMELESS else (self._fields or self._read())[0]

    @property
    def data(self) -> str | None:
        """Lines joined by a newline; what is not UTF-8 is replaced."""
        return _text((self._fields or self._read())[1])

    @property
    def id(self) -> str | None:
        return (self._fields or self._read())[2]

    @property
    def json(self) -> Json | None:
        """`data` as a JSON object, parsed once; None if it is none."""
        if self._json is _UNREAD:
            raw = self.raw
            at = self._at = _only_line(raw)
            if at and raw.startswith(b"{", at):
                try:
                    self._json = orjson.loads(raw[at:])  # the blank line is white space to JSON
                except orjson.JSONDecodeError:
                    self._json = _object(self.data)
            else:
                self._json = None if raw == END else _object(self.data)
        return self._json  # type: ignore[no-any-return]

    def _read(self) -> tuple[str | None, bytes | None, str | None]:
        raw = self.raw
        at = _only_line(raw)
        if at:
            self._fields = None if at == NAMELESS else _text(raw[7 : at - NAMELESS - 1]), raw[at:-2], None
        else:
            self._fields = _fields(raw.removeprefix(self._bom))
        return self._fields

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SseEvent):
            return NotImplemented
        return (self.raw, self.complete, self._bom) == (other.raw, other.complete, other._bom)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<SseEvent {self.raw[:80]!r}{'' if self.complete else ', cut short'}>"


class SseParser:
    """Cuts a stream into events. Lines end with LF, CRLF or CR; how the bytes are chunked makes no difference.

    The time is linear in the bytes, for an event of any size in chunks of any size.
    """

    def __init__(self) -> None:
        self._raw = bytearray()  # of the block so far
        self._line = 0  # where its current line starts
        self._held = b""  # a CR at the end of the chunk: it may be half of a CRLF
        # The last event ended with a lone CR, at once; an LF now would still be of that line end.
        self._after_cr = False
        self._started = False
        self._bom = b""  # of the stream, while its first block is read
        self._ended = False  # the last chunk was plain, and ended with an event

    def plain(self, chunk: bytes) -> bytes | None:
        """The events that `chunk` completes, in a row, where blank lines (two LFs) alone cut the stream there; None
        where they do not: then nothing has been taken of it, and it is for `by_lines`."""
        if self._ended and chunk.endswith(b"\n\n") and CR not in chunk and not chunk.startswith(b"\n"):
            return chunk  # as nearly all of a live stream are
        if not self._plain(chunk):
            return None
        data = bytes(self._raw) + chunk if self._raw else chunk
        end = data.rfind(b"\n\n") + 2
        if end == 1:
            end = 0
        if end < len(data) or self._raw:
            self._raw[:] = data[end:]
            self._line = self._raw.rfind(b"\n") + 1
        self._started = True
        self._ended = end == len(data)
        return data[:end]

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """The events that `chunk` completes."""
        plain = self.plain(chunk)
        if plain is None:
            return self.by_lines(chunk)
        events: list[SseEvent] = []
        at = 0
        while at < len(plain):
            events.append(plain_event(plain, at))
            at += len(events[-1].raw)
        return events

    def by_lines(self, chunk: bytes) -> list[SseEvent]:
        """The same for one that is not `plain`."""
        self._ended = False
        events: list[SseEvent] = []
        pieces = (self._held + chunk).splitlines(keepends=True)
        self._held = b""
        for number, piece in enumerate(pieces, 1):
            self._take(piece, number == len(pieces), events)
        return events

    def end(self) -> list[SseEvent]:
        """The rest at the end of the stream, if any: an event that is cut short, or lacks only its blank line."""
        blank = bool(self._held) and self._line == len(self._raw)
        self._raw += self._held
        self._held = b""
        return [self._cut(complete=blank)] if self._raw else []

    def _plain(self, chunk: bytes) -> bool:
        """Whether blank lines alone cut the stream here: it has LFs alone, and does not begin with a blank line."""
        return not (
            CR in chunk
            or self._held
            or self._after_cr
            or self._bom
            or len(self._raw) > MERGED
            or self._raw.startswith(b"\n")
            or (not self._started and (self._raw or not chunk.startswith((b"data:", b"event:"))))
            or (chunk.startswith(b"\n") and self._line == len(self._raw))
        )

    def _take(self, piece: bytes, last: bool, events: list[SseEvent]) -> None:
        text = piece.rstrip(b"\r\n")  # a piece has one line end, at most
        line_end = piece[len(text) :]
        after_cr, self._after_cr = self._after_cr, False
        if after_cr and piece == b"\n":
            self._raw += piece
            self._line = len(self._raw)
            return
        self._raw += text
        if not self._started and len(self._raw) >= len(BOM):
            self._started = True
            if self._raw.startswith(BOM):
                self._bom = BOM
                self._line = len(BOM)
        blank = self._line == len(self._raw)
        if blank and line_end.startswith(b"\r") and self._raw.endswith(b"\r"):
            # A stream of lone CRs, whose events must not wait for what follows. Decided by the bytes before alone,
            # so that chunks make no difference: an LF, should one follow, goes to the next block.
            self._raw += b"\r"
            events.append(self._cut())
            self._raw += line_end[1:]
            self._line = len(self._raw)
            self._after_cr = last and line_end == b"\r"
        elif last and line_end == b"\r":
            self._held = line_end
        elif line_end:
            self._raw += line_end
            self._line = len(self._raw)
            if blank:
                events.append(self._cut())

    def _cut(self, complete: bool = True) -> SseEvent:
        event = SseEvent(bytes(self._raw), complete=complete, bom=self._bom)
        self._raw.clear()
        self._line = 0
        self._started = True
        self._bom = b""
        return event


def plain_event(data: bytes, at: int) -> SseEvent:
    """The event that begins at `at` in what `SseParser.plain` gave, read where that is soon done. A blank line that
    follows upon another is one by itself."""
    if data.startswith(b"\n", at):
        return SseEvent(b"\n")
    raw = data[at : data.index(b"\n\n", at) + 2]
    event = SseEvent(raw)
    if raw.startswith(b"data: {") and raw.find(b"\n") == len(raw) - 2 and CR not in raw:
        event._at = NAMELESS
        try:
            event._json = orjson.loads(raw[NAMELESS:])
        except orjson.JSONDecodeError:
            return event  # `json` tries again, more patiently
    return event


def _only_line(raw: bytes) -> int:
    """Where the data begins in an event that is one line of data, or one after a name, as nearly all are; 0: it is
    another."""
    at = raw.find(b"\n") + 1 if raw.startswith(b"event: ") else 0
    one = raw.startswith(b"data: ", at) and raw.endswith(b"\n\n") and raw.find(b"\n", at) == len(raw) - 2
    return at + NAMELESS if one and CR not in raw else 0


def _fields(block: bytes) -> tuple[str | None, bytes | None, str | None]:
    """Its event, its data and its id."""
    name: bytes | None = None
    id: bytes | None = None
    data: list[bytes] = []
    for line in block.splitlines():
        field_name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field_name == b"data":
            data.append(value)
        elif field_name == b"event":
            name = value
        elif field_name == b"id" and b"\0" not in value:
            id = value
    return _text(name), b"\n".join(data) if data else None, _text(id)


def _object(data: str | None) -> Json | None:
    if data is None or not data.lstrip().startswith("{"):
        return None
    try:
        value = loads(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")
