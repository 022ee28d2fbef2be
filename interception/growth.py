"""Requests that are an earlier one with messages added at its end: most of what an agent sends.

JSON is read from left to right. Where the bytes up to the last message of an earlier body come again, and at the end
the bytes that followed that message, all between is further messages, or no JSON; only these are parsed and recorded
then. For a body of 108 kB that takes 10 us in place of 1,500. Anything else (a message changed, another temperature) is
read from the beginning, and known from then on.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import xxhash

from interception.dialects.base import Dialect
from interception.inbound import exactly, written
from interception.interning import Stored
from interception.trace import Trace

LARGE: Final = 32 * 1024**2
"""Bytes of a body from which on it is not looked for, which would take 30 ms of the loop or more."""

KEPT: Final = 4
"""Bodies known of a session: its sub-agents call by turns."""

TOP: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])

SEED: Final = secrets.randbits(64)


def digest_of(body: bytes | memoryview) -> bytes:
    """By which bodies of one session are told apart. It need not withstand more than chance: blake2b takes sixty times
    as long, a tenth of the turn for a body of 100 kB."""
    digest: bytes = xxhash.xxh3_128_digest(body, seed=SEED)
    return digest


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it is recorded and sent."""

    stored: Stored
    body: bytes
    streamed: bool
    withhold_usage: bool
    asked: Mapping[str, Any]
    """The small fields that its answer depends on: `n`, `model`."""


@dataclass(frozen=True, slots=True)
class _Known:
    dialect: Dialect
    wanted: Mapping[str, Any]
    """What the session put over the fields of the harness."""
    first: int
    """Where the first message begins."""
    head: int
    """Where the last one ends."""
    tail: int
    """Bytes after that."""
    digests: tuple[bytes, bytes]
    """Of head and tail."""
    around: tuple[bytes, bytes] | None
    """What is sent before and after the messages; None: the body as it came."""
    request: Request

    def between(self, body: bytes) -> bytes | None:
        """What `body` has between head and tail; None: these are not its own."""
        if len(body) < self.head + self.tail:
            return None
        view = memoryview(body)
        if (digest_of(view[: self.head]), digest_of(view[len(body) - self.tail :])) != self.digests:
            return None
        return body[self.head : len(body) - self.tail]


class Growth:
    """The newest bodies of a session, as far as they are needed to tell that they come again and have grown."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._known: list[_Known] = []  # newest first

    def again(self, dialect: Dialect, wanted: Mapping[str, Any], body: bytes) -> Request | None:
        """The request that `body` is, if it is a known one that has grown. ValueError: it cannot be recorded."""
        for known in self._known:
            if known.dialect is dialect and known.wanted == wanted and (between := known.between(body)) is not None:
                added = _added(between)
                return None if added is None else self._grown(known, body, added)
        return None

    def clear(self) -> None:
        self._known.clear()

    def _grown(self, known: _Known, body: bytes, added: list[Any]) -> Request:
        was = known.request
        sent = body
        if known.around is not None:
            before, after = known.around
            sent = b"".join([before, memoryview(body)[known.first : len(body) - known.tail], after])
        stored = self._trace.extend(was.stored, added)
        request = Request(stored, sent, was.streamed, was.withhold_usage, was.asked)
        if added:
            self._keep(known, body, len(body) - known.tail, request)
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
        first, head = place
        around = None if sent is None else _around(sent, field)
        known = _Known(dialect, wanted, first, head, len(body) - head, (b"", b""), around, request)
        self._keep(known, body, head, request)

    def _keep(self, known: _Known, body: bytes, head: int, request: Request) -> None:
        view = memoryview(body)
        kept = _Known(
            known.dialect,
            known.wanted,
            known.first,
            head,
            known.tail,
            (digest_of(view[:head]), digest_of(view[head:])),
            known.around,
            Request(request.stored, b"", request.streamed, request.withhold_usage, request.asked),
        )
        self._known = [kept, *self._known[: KEPT - 1]]


def _added(between: bytes) -> list[Any] | None:
    """The messages that `between` adds; None if it is no such thing."""
    if not between:
        return []
    if not between.startswith(b","):
        return None
    try:
        added = exactly(b"[%b]" % between[1:])
    except (ValueError, RecursionError):
        return None
    return added or None


def _place(body: bytes, came: Mapping[str, Any], field: str) -> tuple[int, int] | None:
    """Where in `body` the items of its list `field` begin and end; None if that is not sure."""
    try:
        items = bytes(TOP.decode(body)[field])
    except (msgspec.MsgspecError, KeyError):
        return None
    first = body.find(items) + 1
    head = first + len(items[1:-1].rstrip())
    # The same fields without the items: no other place has these bytes, nor is the field there twice.
    try:
        outline = exactly(body[:first] + body[first + len(items) - 2 :])
    except (ValueError, RecursionError):
        return None
    return (first, head) if outline == {**came, field: []} else None


def _around(sent: Mapping[str, Any], field: str) -> tuple[bytes, bytes]:
    """What stands before and after the items of `field` in the body that `sent` makes."""
    names = list(sent)
    at = names.index(field)
    before = written({name: sent[name] for name in names[:at]})[:-1]
    after = written({name: sent[name] for name in names[at + 1 :]})[1:]
    key = written({field: []})[1:-2]
    return b"%b%b%b" % (before, b"," if at else b"", key), b"]%b%b" % (b"," if len(after) > 1 else b"", after)
