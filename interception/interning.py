"""JSON bodies kept once each, however often they come again.

An agent sends its whole history with each call. `Bodies` keeps every value as compact JSON text in numbered entries,
equal texts once, and lets an entry refer to earlier ones. Three things are shared:

- values: each message, each tool, each larger field of a request;
- long strings inside them: a tool's output stays one entry when a cache marker beside it moves, and an assistant's
  text when it comes back in the next request;
- runs of a list: a list is a tree of runs, cut where its *content* says so, hence alike in every list that has that
  stretch. Appending rewrites the last run of each level, and so does a change at the head, in the middle, or a window
  that slides: some dozens of references a request, not one for each message.

A reference is JSON itself: `{"\\u0000":[7,8]}` stands for entries 7 and 8, comma between them. So that no body can
forge one, a body's own objects whose first key begins with NUL get a second NUL there while they are kept.

Entries are bytes in flat containers: nothing here is work for the garbage collector.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from math import isfinite
from typing import Any, NamedTuple

import orjson

LONG = 256
"""Bytes of JSON from which a string is an entry of its own: below, the bookkeeping would cost what sharing saves."""

SURELY_SHORT = (LONG - 2) // 6
"""Characters below which a string's JSON is shorter than that: none takes more than six bytes."""

LEVELS = 24
"""Levels of a value that are walked through; of a deeper one the text is searched."""

MANY = 64
"""Items beyond which a list in a value (token ids, log probabilities) is not walked through: its text is."""

INLINE = 64
"""Bytes of JSON up to which a request's field is kept in place."""

MIN_RUN, MAX_RUN, TOP_RUN = 2, 32, 8
"""References in one run of a list, at least (so that levels shrink) and at most, and in the list's own entry."""

MARK = b'{"\\u0000":['
END = b"]}"
MESSAGES = MARK + END
"""In a request's entry: here its messages go. They are the part that changes, so all turns share the rest."""

NUL_KEY = b'{"\\u0000'
ESCAPED_NUL_KEY = b'{"\\u0000\\u0000'

SHORT_STRINGS = re.compile(rb'(?:[^"]++|"[^"\\]{0,%d}+")*+' % (LONG - 3))
STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"')


class Runs(NamedTuple):
    """The first runs of a list."""

    entries: Sequence[int]
    covered: int
    """Items of the list that are in them."""


NO_RUNS = Runs((), 0)


class Stored(NamedTuple):
    """The entries of a request."""

    request: int
    """Of all but its messages."""
    messages: int | None
    """None: it has no list of them."""
    items: list[int]
    """Of each message."""
    known: Runs
    """Those of the messages' runs that are there whatever comes after the last message but one."""


class Bodies:
    """The bodies of one trace. Append-only: what has been given out stays readable."""

    def __init__(self) -> None:
        self.closed = False
        """Whether the trace is sealed; kept here because its turns hold this and not the trace (no cycle)."""
        self.size = 0
        """Bytes kept, references included."""
        self._entries: list[bytes] = []
        self._numbers: dict[bytes, int] = {}
        self._loose = False
        """Whether there is a value that only the standard library reads right."""

    # -- writing -------------------------------------------------------------------------------

    def put_request(self, request: dict[str, Any], messages_field: str) -> Stored:
        """The entries of a request."""
        messages: int | None = None
        items: list[int] = []
        known = NO_RUNS
        fields: list[bytes] = []
        for name, value in request.items():
            key = self._dump(name)
            if not fields and key.startswith(NUL_KEY[1:]):
                key = ESCAPED_NUL_KEY[1:] + key[len(NUL_KEY) - 1 :]
            if _is_sequence(value):
                numbers = [self.put(item) for item in value]
                if name == messages_field:
                    text, known = self._list(numbers, NO_RUNS)
                    messages, items = self._put(text), numbers
                    text = MESSAGES
                else:
                    text = self._sequence(numbers)
                text = b"[" + text + b"]"
            else:
                text = self._dump(value)
                text = _refer([self.put(value)]) if len(text) > INLINE else _escape(text)
            fields.append(key + b":" + text)
        return Stored(self._put(b"{" + b",".join(fields) + b"}"), messages, items, known)

    def extend(self, stored: Stored, added: Sequence[Any]) -> Stored:
        """The entries of a request that has further messages at its end."""
        items = [*stored.items, *[self.put(item) for item in added]]
        text, known = self._list(items, stored.known)
        return Stored(stored.request, self._put(text), items, known)

    def put(self, value: Any) -> int:
        """The entry of a value. ValueError: it is nested too deeply; TypeError: it is not JSON."""
        references: list[int] = []
        try:
            text = orjson.dumps(self._outline(value, references, LEVELS))
        except TypeError:
            return self._put_text(self._dump(value))
        if text.count(NUL_KEY) > len(references):  # the value has such a key itself
            return self._put_text(self._dump(value))
        return self._put(text)

    def restore(self, number: int, kept: Any) -> None:
        """Entry `number` as `kept` gave it. ValueError: it is not the next one, or refers to none before it."""
        text = self._dump(kept)
        for part in text.split(MARK)[1:]:
            references = part.split(END, 1)[0]
            if references and not all(item.isdigit() and int(item) < len(self) for item in references.split(b",")):
                raise ValueError(f"entry {number} refers to what is no earlier entry: {references[:40]!r}")
        if number != len(self):
            raise ValueError(f"entry {number} is out of order: {len(self)} is next")
        # Its own number even where it equals another entry: numbers are written in many ways, and now in one.
        self._numbers[text := b"%b" % text] = number
        self._entries.append(text)
        self.size += len(text)

    # -- reading -------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._entries)

    def kept(self, number: int) -> bytes:
        """The entry's text as it is kept, for `restore`."""
        return self._entries[number]

    def text(self, number: int, messages: int | None = None) -> bytes:
        """The JSON text of an entry, `messages` put in their place."""
        text = self._entries[number]
        if messages is not None:
            text = text.replace(MESSAGES, self._entries[messages], 1)
        # One level of references at a time: runs, then messages, then long strings. Each level is a multiple of the
        # one before, so that all of it is linear in the text, and nothing recurses.
        while MARK in text:
            first, *rest = text.split(MARK)
            pieces = [first]
            for part in rest:
                references, after = part.split(END, 1)
                pieces.append(b",".join([self._entries[int(number)] for number in references.split(b",")]))
                pieces.append(after)
            text = b"".join(pieces)
        return text.replace(ESCAPED_NUL_KEY, NUL_KEY)

    def value(self, number: int, messages: int | None = None) -> Any:
        """The value of an entry, `messages` put in their place; new at each call."""
        text = self.text(number, messages)
        return json.loads(text) if self._loose else orjson.loads(text)

    # -- parts ---------------------------------------------------------------------------------

    def _put(self, text: bytes) -> int:
        # A copy takes no more than its length, where orjson's text takes all that it might have needed: of a string
        # eight times as much. `setdefault` hashes it once, which is most of what a long one costs.
        text = b"%b" % text
        number = self._numbers.setdefault(text, new := len(self._entries))
        if number == new:
            self._entries.append(text)
            self.size += len(text)
        return number

    def _outline(self, value: Any, references: list[int], levels: int) -> Any:
        """`value` with references in place of its long strings, which are kept; these are their numbers. What changes
        is copied. (To look at a value and write it takes a third of the time that a search in its text does.)

        TypeError: there is something in it that orjson does not write as it is, or too much to look at.
        """
        kind = type(value)
        if kind is dict:
            items: Iterable[tuple[Any, Any]] = value.items()
        elif kind is list:
            if len(value) > MANY:
                raise TypeError("of many items")
            items = enumerate(value)
        elif kind is str:
            return self._outline([value], references, levels)[0]
        elif value is None or kind is int or kind is bool or (kind is float and isfinite(value)):
            return value
        else:
            raise TypeError("NaN, or of no type of JSON's")
        if not levels:
            raise TypeError("nested deeply")
        outline = value
        for at, item in items:
            kind = type(item)
            if kind is str:
                if len(item) < SURELY_SHORT or len(text := orjson.dumps(item)) < LONG:
                    continue
                references.append(number := self._put(text))
                of_item: Any = {"\0": (number,)}
            elif item is None or kind is bool or kind is int or (kind is float and isfinite(item)):
                continue
            else:
                of_item = self._outline(item, references, levels - 1)
                if of_item is item:
                    continue
            if outline is value:
                outline = value.copy()
            outline[at] = of_item
        return outline

    def _put_text(self, text: bytes) -> int:
        pieces = []
        for between, string in _long_strings(_escape(text)):
            pieces.append(between)
            if string:
                pieces.append(_refer([self._put(string)]))
        return self._put(b"".join(pieces))

    def _sequence(self, numbers: Sequence[int]) -> bytes:
        while len(numbers) > TOP_RUN:
            numbers, _ = self._runs(numbers, NO_RUNS)
        return _refer(numbers)

    def _list(self, numbers: Sequence[int], known: Runs) -> tuple[bytes, Runs]:
        if len(numbers) <= TOP_RUN:
            return _refer(numbers), NO_RUNS
        runs, known = self._runs(numbers, known)
        return self._sequence(runs), known

    def _runs(self, numbers: Sequence[int], known: Runs) -> tuple[list[int], Runs]:
        """The runs of `numbers`, and those of them that are also `known` of any list that has all but the last of them.

        `known`: of a list with which this one begins.
        """
        runs = list(known.entries)
        start = before = known.covered
        # The cut depends on the item alone (a multiplicative hash of it: one in eight), so that lists which share a
        # stretch share its runs, wherever it stands in them.
        cuts = [at for at, number in enumerate(numbers[start:], start + 1) if not number * 2654435761 & 0xE0000000]
        for cut in [*cuts, len(numbers)]:
            while cut - start >= MIN_RUN or start < cut == len(numbers):
                before, start = start, min(cut, start + MAX_RUN)
                runs.append(self._put(_refer(numbers[before:start])))
        return runs, Runs(runs[:-1], before)

    def _dump(self, value: Any) -> bytes:
        try:
            text = orjson.dumps(value)
        except TypeError:  # an integer over 64 bits, half a surrogate pair, more than 254 levels
            return self._dump_loosely(value)
        # orjson writes NaN and Infinity as null, without a word.
        if b"null" in text and orjson.loads(text) != value:
            return self._dump_loosely(value)
        return text

    def _dump_loosely(self, value: Any) -> bytes:
        try:
            text = _stdlib_dump(value)
            if not self._loose:
                try:
                    # Texts, not values: 2**64 equals the float that orjson makes of it.
                    self._loose = _stdlib_dump(orjson.loads(text)) != text
                except orjson.JSONDecodeError:
                    self._loose = True
        except RecursionError:
            raise ValueError("the value is nested too deeply to be recorded") from None
        return text


def _stdlib_dump(value: Any) -> bytes:
    # Half a surrogate pair is no UTF-8; its backslash form is also JSON's.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")


def _is_sequence(value: Any) -> bool:
    # A list of numbers (token ids) is one value: as entries its items would take twenty times their bytes.
    return isinstance(value, list) and bool(value) and not isinstance(value[0], int | float)


def _refer(numbers: Sequence[int]) -> bytes:
    return orjson.dumps({"\0": numbers})


def _escape(text: bytes) -> bytes:
    return text.replace(NUL_KEY, ESCAPED_NUL_KEY)


def _long_strings(text: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The long strings of a JSON text, each with what stands before it; what is left at the end comes with none."""
    start = at = 0
    while True:
        short = SHORT_STRINGS.match(text, at)
        assert short is not None  # it matches nothing, too
        opening = short.end()
        if opening == len(text):
            break
        at = _end_of_string(text, opening)
        # Keys stay: a reference is an object, and that is no key.
        if at - opening >= LONG and text[at : at + 1] != b":":
            yield text[start:opening], text[opening:at]
            start = at
    yield text[start:], b""


def _end_of_string(text: bytes, opening: int) -> int:
    # The expression takes fifty times as long, which the images of one request make a second.
    closing = text.index(b'"', opening + 1)
    if text[closing - 1 : closing] != b"\\":
        return closing + 1
    string = STRING.match(text, opening)
    assert string is not None
    return string.end()
