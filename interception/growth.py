"""Requests that are an earlier one with messages added at its end: most of what an agent sends.

JSON is read from left to right. Where the bytes of an earlier body come again up to its last message, and at the end
the bytes that followed that message, all between is messages, or no JSON; only these are parsed and recorded then, of
a body of 108 kB a fiftieth. (Not from the end of the last message on: it is changed more often than others, by the
cache marker that goes to the next one.) Anything else (an earlier message changed, another temperature) is read from
the beginning, and known from then on.
"""

import secrets
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec
import orjson
import xxhash

from interception.dialects.base import Dialect
from interception.inbound import exactly, written
from interception.interning import Stored
from interception.trace import Trace

LARGE: Final = 32 * 1024**2
"""Bytes of a body from which on it is not looked for, which would take 30 ms of the loop or more."""

MUCH: Final = 8 * 1024**2
"""Bytes of new messages from which on a body is read as a whole, which lets others run in between."""

KEPT: Final = 4
"""Bodies known of a session: its sub-agents call by turns."""

NEEDLE: Final = 64
"""Bytes by which a list is looked for: to look for all of a long one takes ten times as long as to compare it."""

TRIES: Final = 4
"""Other lists that may begin with the same bytes: were each compared, a body could be made so that it takes seconds."""

TOP: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])

SEED: Final = secrets.randbits(64)


def digest_of(body: bytes | memoryview) -> bytes:
    """By which bodies of one session are told apart. It need not withstand more than chance: blake2b takes sixty times
    as long, a tenth of the turn for a body of 100 kB."""
    digest: bytes = xxhash.xxh3_128_digest(body, seed=SEED)
    return digest


class Request(NamedTuple):
    """A request as it is recorded and sent."""

    stored: Stored
    body: bytes
    streamed: bool
    withhold_usage: bool
    asked: Mapping[str, Any]
    """The small fields that its answer depends on: `n`, `model`."""


class _Known(NamedTuple):
    dialect: Dialect
    wanted: Mapping[str, Any]
    """What the session put over the fields of the harness."""
    first: int
    """Where the first message begins."""
    head: int
    """Where the last one but one ends, if there is one."""
    tail: int
    """Bytes after the last one."""
    digests: tuple[bytes, bytes]
    """Of head and tail."""
    around: tuple[bytes, bytes] | None
    """What is sent before and after the messages; None: the body as it came."""
    request: Request

    def between(self, body: bytes) -> bytes | None:
        """What `body` has between head and tail; None: these are not its own."""
        if not 0 <= len(body) - self.head - self.tail <= MUCH:
            return None
        view = memoryview(body)
        if (digest_of(view[: self.head]), digest_of(view[len(body) - self.tail :])) != self.digests:
            return None
        between = body[self.head : len(body) - self.tail]
        if self.head == self.first:
            return between
        return between[1:] if between.startswith(b",") else None


class Growth:
    """The newest bodies of a session, as far as they are needed to tell that they come again and have grown."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._known: list[_Known] = []  # newest first

    def again(self, dialect: Dialect, wanted: Mapping[str, Any], body: bytes) -> Request | None:
        """The request that `body` is, if it is a known one that has grown. ValueError: it cannot be recorded."""
        for known in self._known:
            if known.dialect is dialect and known.wanted == wanted and (between := known.between(body)) is not None:
                try:
                    added = [bytes(item) for item in ITEMS.decode(b"[%b]" % between)]
                    values = [exactly(item) for item in added]
                except (msgspec.MsgspecError, ValueError, RecursionError):
                    return None
                return self._grown(known, body, values, len(added[-1])) if added else None
        return None

    def clear(self) -> None:
        self._known.clear()

    def _grown(self, known: _Known, body: bytes, added: list[Any], last: int) -> Request:
        was = known.request
        sent = body
        end = len(body) - known.tail
        if known.around is not None:
            before, after = known.around
            sent = b"".join([before, memoryview(body)[known.first : end], after])
        stored = self._trace.extend(was.stored, added)
        request = Request(stored, sent, was.streamed, was.withhold_usage, was.asked)
        self._keep(known, body, end, last, request)
        return request

    def learn(
        self,
        dialect: Dialect,
        wanted: Mapping[str, Any],
        body: bytes,
        came: Mapping[str, Any],
        sent: Mapping[str, Any] | None,
        request: Request,
    ) -> None:
        """`body` was read from its beginning: `came` are its fields, `sent` those that are sent if others are."""
        field = dialect.messages_field
        if len(body) > LARGE or not request.stored.items or (place := _place(body, came, field)) is None:
            return
        first, end, last = place
        around = None if sent is None else _around(sent, field)
        known = _Known(dialect, wanted, first, -1, len(body) - end, (b"", b""), around, request)
        self._keep(known, body, end, last, request)

    def _keep(self, known: _Known, body: bytes, end: int, last: int, request: Request) -> None:
        """`end`: of the messages in `body`; `last`: bytes of the last one."""
        while body[end - 1] in b" \t\r\n":
            end -= 1
        head = max(known.first, body.rfind(b",", known.first, end - last))
        kept = known
        if (head, len(body) - end) != (known.head, known.tail):  # else all but the last message is as it was
            view = memoryview(body)
            digests = digest_of(view[:head]), digest_of(view[end:])
            fields, _, items, runs = request.stored
            before = Request(
                Stored(fields, None, items[:-1], runs), b"", request.streamed, request.withhold_usage, request.asked
            )
            tail = len(body) - end
            kept = _Known(known.dialect, known.wanted, known.first, head, tail, digests, known.around, before)
        self._known = [kept, *[other for other in self._known if other is not known][: KEPT - 1]]


def _place(body: bytes, came: Mapping[str, Any], field: str) -> tuple[int, int, int] | None:
    """Where in `body` the items of its list `field` begin and end, and the bytes of the last one; None if that is not
    sure."""
    colon = body.find(b":")
    try:
        # As most SDKs write it: then its parts, too, are what is written of them.
        if body[colon + 1 : colon + 2] != b" " and orjson.dumps(came) == body:
            before, after = _around(came, field)
            return len(before), len(body) - len(after), len(orjson.dumps(came[field][-1]))
    except TypeError:  # an integer over 64 bits, half a surrogate pair
        pass
    try:
        items = bytes(TOP.decode(body)[field])
        last = len(bytes(ITEMS.decode(items)[-1]))
    except (msgspec.MsgspecError, LookupError):
        return None
    first = body.find(items[:NEEDLE])
    for _ in range(TRIES):
        if body.startswith(items, first):
            break
        first = body.find(items[:NEEDLE], first + 1)
    first += 1
    end = first + len(items) - 2
    # The same fields without the items: no other place has these bytes, nor is the field there twice.
    try:
        outline = exactly(body[:first] + body[end:])
    except (ValueError, RecursionError):
        return None
    return (first, end, last) if outline == {**came, field: []} else None


def _around(sent: Mapping[str, Any], field: str) -> tuple[bytes, bytes]:
    """What stands before and after the items of `field` in the body that `sent` makes."""
    names = list(sent)
    at = names.index(field)
    before = written({name: sent[name] for name in names[:at]})[:-1]
    after = written({name: sent[name] for name in names[at + 1 :]})[1:]
    key = written({field: []})[1:-2]
    return b"%b%b%b" % (before, b"," if at else b"", key), b"]%b%b" % (b"," if len(after) > 1 else b"", after)
