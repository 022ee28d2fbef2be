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
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import orjson

LONG = 256
"""Bytes of JSON from which a string is an entry of its own: below, the bookkeeping would cost what sharing saves."""

SURELY_SHORT = (LONG - 2) // 6
"""Characters below which a string's JSON is shorter than that: none takes more than six bytes."""

INLINE = 64
"""Bytes of JSON up to which a request's field is kept in place."""

MIN_RUN, MAX_RUN, TOP_RUN = 2, 32, 8
"""References in one run of a list, at least (so that levels shrink) and at most, and in the list's own entry."""

ROOMY = 64 * 1024
"""Bytes below which it matters that a text of orjson's takes 4 kB more than its length for as long as it is kept
(3.13, measured: it writes into a buffer, whose end is not given back)."""

MARK = b'{"\\u0000":['
END = b"]}"
MESSAGES = MARK + END
"""In a request's entry: here its messages go. They are the part that changes, so all turns share the rest."""

NUL_KEY = b'{"\\u0000'
ESCAPED_NUL_KEY = b'{"\\u0000\\u0000'

SHORT_STRINGS = re.compile(rb'(?:[^"]++|"[^"\\]{0,%d}+")*+' % (LONG - 2))
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
        self._split: dict[int, int] = {}
        """Hash of a text with long strings in it: its entry, which holds references in their place."""
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
                text = _refer([self._put_text(text)]) if len(text) > INLINE else _escape(text)
            fields.append(key + b":" + text)
        return Stored(self._put(b"{" + b",".join(fields) + b"}"), messages, items, known)

    def extend(self, stored: Stored, added: Sequence[Any]) -> Stored:
        """The entries of a request that has further messages at its end."""
        items = [*stored.items, *[self.put(item) for item in added]]
        text, known = self._list(items, stored.known)
        return Stored(stored.request, self._put(text), items, known)

    def put(self, value: Any) -> int:
        """The entry of a value. ValueError: it is nested too deeply; TypeError: it is not JSON."""
        text = self._dump(value)
        # The common case first and by itself: an agent's history is mostly short messages that are known.
        if len(text) < LONG and NUL_KEY not in text:
            return self._put(text, dumped=True)
        return self._put_text(text, value)

    def restore(self, number: int, kept: Any) -> None:
        """Entry `number` as `kept` gave it. ValueError: it is not the next one, or refers to none before it."""
        text = self._dump(kept)
        for part in text.split(MARK)[1:]:
            references = part.split(END, 1)[0]
            if references and not all(item.isdigit() and int(item) < len(self) for item in references.split(b",")):
                raise ValueError(f"entry {number} refers to what is no earlier entry: {references[:40]!r}")
        if number != len(self):
            raise ValueError(f"entry {number} is out of order: {len(self)} is next")
        self._append(_fitted(text))

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

    def _put(self, text: bytes, *, dumped: bool = False) -> int:
        """`dumped`: as orjson made it."""
        number = self._numbers.get(text)
        if number is not None:
            return number
        return self._append(_fitted(text) if dumped else text)

    def _append(self, text: bytes) -> int:
        number = self._numbers[text] = len(self._entries)
        self._entries.append(text)
        self.size += len(text)
        return number

    def _put_text(self, text: bytes, value: Any = None) -> int:
        if len(text) < LONG:
            return self._put(_escape(text), dumped=True)
        # A text that is known is found by hash and compared: splitting costs ten times as much.
        digest = hash(text)
        known = self._split.get(digest)
        if known is not None and self.text(known) == text:
            return known
        pieces = []
        for between, string in _long_strings_of(value, text) or _long_strings(_escape(text)):
            pieces.append(between)
            if string:
                pieces.append(_refer([self._put(string)]))
        self._split[digest] = number = self._put(b"".join(pieces), dumped=len(pieces) == 1)
        return number

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
        run: list[int] = []
        start = before = known.covered
        for at in range(start, len(numbers)):
            number = numbers[at]
            before = start
            run.append(number)
            # The cut depends on the item alone (a multiplicative hash of it: one in eight), so that lists which
            # share a stretch share its runs, wherever it stands in them.
            cut = (number * 2654435761 & 0xFFFFFFFF) >> 29 == 0
            if (cut and len(run) >= MIN_RUN) or len(run) == MAX_RUN:
                runs.append(self._put(_refer(run)))
                run = []
                start = at + 1
        if run:
            runs.append(self._put(_refer(run)))
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


def _fitted(text: bytes) -> bytes:
    return bytes(memoryview(text)) if len(text) < ROOMY else text  # a copy takes no more than its length


def _is_sequence(value: Any) -> bool:
    # A list of numbers (token ids) is one value: as entries its items would take twenty times their bytes.
    return isinstance(value, list) and bool(value) and not isinstance(value[0], int | float)


def _refer(numbers: Sequence[int]) -> bytes:
    return MARK + ",".join(map(str, numbers)).encode() + END


def _escape(text: bytes) -> bytes:
    return text.replace(NUL_KEY, ESCAPED_NUL_KEY)


def _long_strings_of(value: Any, text: bytes) -> list[tuple[bytes, bytes]] | None:
    """The same of `value`, whose text it is, where that is an object without other containers, as most messages are.
    Its strings, written again, tell where they end: to look at each escape takes ten times as long. None: it is not."""
    if type(value) is not dict or NUL_KEY in text:
        return None
    found: list[tuple[bytes, bytes]] = []
    start = 0
    for name, item in value.items():
        if len(name) >= SURELY_SHORT:
            return None  # one of the strings may be just that
        if isinstance(item, str):
            if len(item) < SURELY_SHORT:
                continue
            try:
                string = orjson.dumps(item)
            except TypeError:
                return None
            if len(string) >= LONG:
                at = text.find(string, start)
                if at < 0:  # written by the standard library
                    return None
                found.append((text[start:at], text[at : at + len(string)]))
                start = at + len(string)
        elif isinstance(item, dict | list) or (isinstance(item, int) and item.bit_length() > 64):
            return None
    return [*found, (text[start:], b"")]


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
