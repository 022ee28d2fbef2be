"""Events of a stream that come again and again with another text in the same place: told by their bytes alone."""

import functools
import re
from collections.abc import Sequence
from itertools import pairwise, repeat
from operator import itemgetter
from typing import Any, Final, NamedTuple

import orjson

from interception.sse import CR, SseEvent

LF, QUOTE, BACKSLASH = b'\n"\\'
"""As integers, as `CR` is."""

Path = tuple[str | int, ...]
"""Keys and indices that lead to a value of an event."""

STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"')
NUMBER: Final = re.compile(rb"[0-9]++")
PADDED: Final = re.compile(rb'("\}) *(\}(?:\n\n|\r\n\r\n|\r\r))')
"""The end of an event of Anthropic's, which has as many blanks as pad it to a length that tells nothing."""

FOLLOWING: Final = 8
"""Lines of other events after those that are it again with which it is tried to be quick."""

TEXT_PROBE: Final = "?!"
TEXT_BYTES: Final = TEXT_PROBE.encode()
NUMBER_PROBE: Final = 7190017
NUMBER_BYTES: Final = b"%d" % NUMBER_PROBE


class _Hole(NamedTuple):
    """Where an event has another value each time."""

    start: int
    end: int
    path: Path
    quoted: bool


class Refrain:
    """An event that comes again and again, each time with another text in one place, and perhaps with values elsewhere
    of which the answer has nothing: most of a stream.

    What follows it is told by its bytes alone, all in one go: a tenth of what whole events take. Between the values
    its bytes are the same; they are put into the form of a JSON list of the values, and that is read.
    """

    __slots__ = (
        "_alone",
        "_begin",
        "_between",
        "_close",
        "_closing",
        "_joint",
        "_line",
        "_number",
        "_opening",
        "_pieces",
        "_prefix",
        "_quotes",
        "_separator",
        "_stride",
        "_suffix",
        "_text",
        "count",
        "greatest",
        "tried",
    )

    def __init__(self, literals: Sequence[bytes], holes: Sequence[_Hole], text: int, pieces: list[str]) -> None:
        """`literals`: what stands before, between and after the holes; one more than `holes` if blanks may come before
        the last. `text`: which of the holes is the text."""
        prefix, suffix = self._prefix, self._suffix = literals[0], literals[-1]
        self._joint = suffix + prefix
        before, after = prefix.rfind(b"\n") + 1, suffix.find(b"\n")
        self._opening, self._closing = prefix[before:], suffix[:after]
        self._line = len(prefix) - before, after, self._joint.count(b"\n")
        self._pieces = pieces
        self._stride = len(holes)
        self._text = text
        self._between: list[tuple[bytes, bytes]] = []
        self._number: int | None = None
        self._quotes = 0
        self._alone: bytes | None = b""
        """What stands after a text that is the only hole, before blanks."""
        self._begin, self._separator, self._close = b'["', b'","', b'"]'
        if len(literals) > 2:
            opens = [b'"' if hole.quoted else b"" for hole in holes]
            seams = [before + b"," + after for before, after in pairwise(opens)]
            padded = len(literals) > len(holes) + 1
            self._between = [*zip(literals[1:-1], [*seams, opens[-1]] if padded else seams, strict=True)]
            self._number = next((at for at, hole in enumerate(holes) if not hole.quoted), None)
            self._quotes = sum(literal.count(b'"') for literal, _ in self._between)
            self._alone = literals[1] if padded and len(holes) == 1 else None
            end = b"" if padded else opens[-1]
            self._begin, self._separator, self._close = b"[" + opens[0], end + b"," + opens[0], end + b"]"
        self.count = 0
        """Events that were taken last."""
        self.greatest = -1
        """Of the counter's values in those."""
        self.tried = False
        """Whether any were taken."""

    @classmethod
    def of(
        cls,
        event: SseEvent,
        path: Path,
        others: Sequence[str],
        pieces: list[str],
        *,
        counter: str = "",
        padded: bool = False,
    ) -> "Refrain | None":
        """That of `event`, whose text is found by `path`, and whose later texts go to `pieces`. None if it is not sure
        where in the event's bytes the values stand.

        :param others: the fields that may have other texts, too.
        :param counter: the field that may have another number, which is not negative.
        :param padded: whether blanks may stand before the end.
        """
        raw, payload = event.raw, event.json or {}
        escaped = BACKSLASH in raw
        found = [_hole(raw, path, escaped)]
        for name in others:
            if isinstance(payload.get(name), str):
                found.append(_hole(raw, (name,), escaped))
        if counter and type(payload.get(counter)) is int:
            found.append(_hole(raw, (counter,), escaped, NUMBER))
        holes = [*filter(None, found)]
        if len(holes) < len(found):
            return None
        holes.sort()
        literals, at = [], 0
        for hole in holes:
            literals.append(raw[at : hole.start])
            at = hole.end
        literals.append(raw[at:])
        # Without escapes, a name that is there once is the name there; else other values in these places must be found
        # by their paths.
        if escaped or any(raw.count(_key(hole.path[-1])[:-1]) != 1 for hole in holes):
            probed = literals[0]
            for hole, literal in zip(holes, literals[1:], strict=True):
                probed += (TEXT_BYTES if hole.quoted else NUMBER_BYTES) + literal
            probes = SseEvent(probed).json
            for hole in holes:
                probe = TEXT_PROBE if hole.quoted else NUMBER_PROBE
                if _at(payload, hole.path) == probe or _at(probes, hole.path) != probe:
                    return None
        if padded and (end := PADDED.fullmatch(literals[-1])) is not None and holes[-1].quoted:
            literals[-1:] = end.groups()
        if len(literals) > 2 and any(BACKSLASH in literal for literal in literals[1:-1]):
            return None  # it could not be told from what is escaped in a text
        return cls(literals, holes, [hole.path for hole in holes].index(path), pieces)

    def taken(self, data: bytes, at: int = 0) -> int:
        """How many bytes of `data`, from the beginning of an event on, are it again, whole events all of them; their
        texts are with the pieces then."""
        prefix, suffix = self._prefix, self._suffix
        if not data.startswith(prefix, at):
            return 0
        start = at + len(prefix)
        end = data.find(suffix, start)
        if end < 0:
            return 0
        after = end + len(suffix)
        if after == len(data) and self._alone is not None:
            # One by itself, as a live stream has them: nearly always without quotes, and a string as it stands.
            text, tail = data[start:end], self._alone
            if tail:
                text = text.rstrip(b" ")
                text = text[: -len(tail)] if text.endswith(tail) else b'"'
            if QUOTE not in text and BACKSLASH not in text:
                try:
                    self._pieces.append(orjson.loads(b'"%b"' % text))
                except orjson.JSONDecodeError:
                    return 0
                self.count = 1
                return after - at
        if self._line[2] and data.startswith(prefix, after):
            parts = self._parts(data, start)
            body = self._separator.join(parts)
            length = len(body) - (len(parts) - 1) * len(self._separator)
        else:
            body = data[start:end]
            parts = [body]
            length = len(body)
        if not self._plain(body, parts):
            parts, length = self._unescaped(parts)
            if not parts:
                return 0
            body = self._separator.join(parts)
        if self._between:
            # No value has a line end in it, but what joins them and one of them may seem to be what is between them.
            body = b"\n".join(parts)
            for literal, seam in self._between:
                body = body.replace(literal, seam)
            body = body.replace(b"\n", self._separator)
        try:
            values = orjson.loads(b"%b%b%b" % (self._begin, body, self._close))
        except orjson.JSONDecodeError:
            return 0
        stride = self._stride
        if len(values) != len(parts) * stride:
            return 0
        if self._number is not None:
            numbers = values[self._number :: stride]
            if {*map(type, numbers)} != {int}:
                return 0
            self.greatest = max(numbers)
        self._pieces += values if stride == 1 else values[self._text :: stride]
        self.count = len(parts)
        return length + len(parts) * len(self._joint)

    def _parts(self, data: bytes, start: int) -> list[bytes]:
        """What differs in each event of those that are it again and follow one another, from the first one's text on,
        which begins at `start`: the values, with what stands between them."""
        # Lines are told apart ten times as fast as by all the bytes between two texts.
        before, after, lines = self._line
        texts = data[start - before :].split(b"\n")[::lines]
        opening, closing = self._opening, self._closing
        for _ in range(FOLLOWING):
            if texts[-1].startswith(opening) and texts[-1].endswith(closing):
                break
            if len(texts) > 1:
                texts.pop()  # of another event, which follows
        parts = [*map(itemgetter(slice(before, -after)), texts)]
        joined = self._joint.join(parts)
        if data.startswith(joined, start) and data.startswith(self._suffix, start + len(joined)):
            return parts
        parts = data[start:].split(self._joint)  # another event is between them
        for at, part in enumerate(parts):
            if LF in part:
                text, found, _ = part.partition(self._suffix)
                parts[at:] = [text] if found and LF not in text else []
                break
        else:
            parts.pop()  # it is cut short
        return parts

    def _plain(self, body: bytes, parts: list[bytes]) -> bool:
        """Whether no value of `parts`, which make up `body`, has a quote in it, escaped or not, or is more than a
        value."""
        if LF in body or CR in body or (BACKSLASH in body and (b'\\"' in body or body.endswith(b"\\"))):
            return False
        if self._stride == 2 and len(self._between) == 1:
            # With as many quotes one either has what is between its two values, once, or is more than two values, or
            # one that is no number where it should be: both show later.
            return {*map(bytes.count, parts, repeat(b'"'))} == {self._quotes}
        if body.count(b'"') != (len(parts) - 1) * self._separator.count(b'"') + len(parts) * self._quotes:
            return False
        return all({*map(bytes.count, parts, repeat(literal))} == {1} for literal, _ in self._between)

    def _unescaped(self, parts: list[bytes]) -> tuple[list[bytes], int]:
        """Those of the first of `parts` of which the same is true once their escaped quotes are written differently:
        written so; and how long they were."""
        # An escaped backslash first: the quote after it is not escaped.
        texts = b"\n".join(parts).replace(b"\\\\", b"\\u005c").replace(b'\\"', b"\\u0022").split(b"\n")
        if len(texts) == len(parts) and self._plain(self._separator.join(texts), texts):
            return texts, sum(map(len, parts))
        texts = []
        length = 0
        for part in parts:
            text = part.replace(b"\\\\", b"\\u005c").replace(b'\\"', b"\\u0022")
            if not self._plain(text, [text]):
                break
            texts.append(text)
            length += len(part)
        return texts, length


def _hole(raw: bytes, path: Path, escaped: bool, value: re.Pattern[bytes] = STRING) -> _Hole | None:
    """The last place in `raw` that looks like that of `path`; `escaped`: whether a quote in `raw` may be."""
    key = _key(path[-1])
    at = raw.rfind(key) + len(key)
    if at < len(key):
        return None
    if raw.startswith(b" ", at):
        at += 1
    quoted = value is STRING
    if quoted and not escaped:
        end = raw.find(b'"', at + 1) if raw.startswith(b'"', at) else -1
        return _Hole(at + 1, end, path, True) if end > 0 else None
    found = value.match(raw, at)
    return found and _Hole(at + quoted, found.end() - quoted, path, quoted)


@functools.cache
def _key(name: str | int) -> bytes:
    return b'"%b":' % str(name).encode()


def _at(value: Any, path: Path) -> Any:
    try:
        for key in path:
            value = value[key]
    except (LookupError, TypeError):
        return None
    return value
