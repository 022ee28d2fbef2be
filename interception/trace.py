"""The record of a rollout: its turns, in order, each with every attempt made for it."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import orjson

from interception.interning import Bodies, Stored
from interception.usage import Usage

T = TypeVar("T")

VERSION = 1
"""Of the JSONL form."""

RAW_CAP = 64 * 1024
"""Bytes kept of an answer that was not JSON."""


@dataclass(slots=True)
class Attempt:
    """One request to the upstream. Times are in unix seconds; None: not known, or not reached."""

    call_id: str
    status: int | None = None
    error: str | None = None
    """Why there was no whole answer; None: there was one, or it is still coming."""
    started: float | None = None
    first_byte: float | None = None
    ended: float | None = None

    @property
    def complete(self) -> bool:
        """The upstream answered 2xx and the answer arrived whole."""
        return self.ended is not None and self.error is None and self.status is not None and 200 <= self.status < 300


class Turn:
    """One model call, recorded once: the request as the model was asked (with the session's overrides and hooks in it),
    and the answer as the harness was given it.

    Made by `Trace.begin`. Two turns are equal if they are the same turn with the same record.
    """

    __slots__ = (
        "_bodies",
        "_delivered",
        "_request",
        "_response",
        "attempts",
        "dialect",
        "finish_reason",
        "id",
        "queued",
        "raw",
        "streamed",
        "usage",
    )

    def __init__(
        self, bodies: Bodies, id: str, *, dialect: str, streamed: bool, request: tuple[int, int | None]
    ) -> None:
        self.id = id
        self.dialect = dialect
        self.streamed = streamed
        self.queued: float | None = None
        """Unix seconds at which the request arrived; None: not known."""
        self.attempts: list[Attempt] = []
        """All of them, in order, failed ones too."""
        self.usage: Usage | None = None
        """None: the upstream did not say, or has not yet."""
        self.finish_reason: str | None = None
        self.raw: bytes | None = None
        """The answer where it was no JSON object (an HTML error page): its first 64 KiB."""
        self._bodies = bodies
        self._request = request
        self._response: int | None = None
        self._delivered = False

    @property
    def request(self) -> dict[str, Any]:
        """The request, built anew at each reading."""
        return self._bodies.value(*self._request)  # type: ignore[no-any-return]

    @property
    def response(self) -> dict[str, Any] | None:
        """The answer, built anew at each reading; None: none was recorded, or it was no JSON object (see `raw`)."""
        return None if self._response is None else self._bodies.value(self._response)

    @property
    def delivered(self) -> bool:
        """Whether the answer's end reached a reader. Setting it once the trace is sealed changes nothing."""
        return self._delivered

    @delivered.setter
    def delivered(self, value: bool) -> None:
        # A reader may see the end just after the release. That is no mistake of anyone's, and no part of the record.
        if not self._bodies.closed:
            self._delivered = value

    def record(
        self, *, response: dict[str, Any] | bytes | None, usage: Usage | None, finish_reason: str | None
    ) -> None:
        """Set the outcome; an earlier one (of an attempt that failed) is replaced. RuntimeError once it is sealed.

        Bytes are a body as it came: a JSON object becomes `response`, anything else `raw`.
        """
        if self._bodies.closed:
            raise RuntimeError(f"turn {self.id} cannot be recorded: its trace is sealed")
        parsed = _json_object(response) if isinstance(response, bytes) else response
        self._response = None if parsed is None else self._bodies.put(parsed)
        self.raw = response[:RAW_CAP] if parsed is None and isinstance(response, bytes) and response else None
        self.usage = usage
        self.finish_reason = finish_reason

    @property
    def winner(self) -> Attempt | None:
        """The attempt whose answer is the turn's: the last one that was answered 2xx and whole. None: none was yet."""
        return next((attempt for attempt in reversed(self.attempts) if attempt.complete), None)

    @property
    def complete(self) -> bool:
        """An attempt was answered 2xx and whole."""
        return self.winner is not None

    @property
    def status(self) -> int | None:
        """The upstream's status in the attempt that won, else in the last one."""
        return attempt.status if (attempt := self._deciding) else None

    @property
    def error(self) -> str | None:
        """What went wrong in the last attempt; None if one won."""
        return attempt.error if (attempt := self._deciding) else None

    @property
    def _deciding(self) -> Attempt | None:
        return self.winner or (self.attempts[-1] if self.attempts else None)

    def to_dict(self) -> dict[str, Any]:
        """The turn by itself, with its bodies; `winner` is an index into `attempts`, `raw` text."""
        winner = self.winner
        return {
            **self._outline(),
            "request": self.request,
            "response": self.response,
            "raw": None if self.raw is None else self.raw.decode(errors="replace"),
            "complete": winner is not None,
            "winner": next((i for i, attempt in enumerate(self.attempts) if attempt is winner), None),
        }

    def _outline(self) -> dict[str, Any]:
        """All but the bodies, and what follows from the rest."""
        return {
            "id": self.id,
            "dialect": self.dialect,
            "streamed": self.streamed,
            "queued": self.queued,
            "usage": None if self.usage is None else asdict(self.usage),
            "finish_reason": self.finish_reason,
            "delivered": self.delivered,
            "attempts": [asdict(attempt) for attempt in self.attempts],
        }

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Turn):
            return NotImplemented
        if self is other or self.id != other.id:
            return self is other
        # As texts: NaN is not equal to itself.
        return (
            self._outline() == other._outline()
            and self.raw == other.raw
            and json.dumps([self.request, self.response]) == json.dumps([other.request, other.response])
        )

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        ended = "complete" if self.complete else self.error or "open"
        return f"<Turn {self.id} {self.dialect} attempts={len(self.attempts)} {ended[:80]}>"


class Trace:
    """The turns of one rollout. Sealed once the rollout is over: nothing is added after that.

    What is kept grows with the conversation, not with the requests: each message once (see `interning.py`).
    """

    def __init__(self, id: str) -> None:
        self.id = id
        self.turns: list[Turn] = []
        self.stragglers = 0
        """Calls that came for this rollout after its release. They are refused; only this number tells of them."""
        self.warnings: list[str] = []
        """What `from_jsonl` had to leave out."""
        self._bodies = Bodies()
        self._lead = os.urandom(12).hex()
        """Of the ids of its turns, which no other trace has."""

    def begin(self, *, dialect: str, request: dict[str, Any], messages_field: str, streamed: bool) -> Turn:
        """A new turn, `queued` now. The request is copied; `messages_field` names its list of messages.

        RuntimeError: the trace is sealed. ValueError: the request is nested too deeply (about 900 levels).
        """
        return self.begin_stored(dialect=dialect, request=self.store(request, messages_field), streamed=streamed)

    def store(self, request: dict[str, Any], messages_field: str) -> Stored:
        """Keep a request for `begin_stored`. It raises what `begin` does."""
        self._check_open()
        return self._bodies.put_request(request, messages_field)

    def extend(self, stored: Stored, added: Sequence[Any]) -> Stored:
        """Keep a request that is a stored one with messages added at its end."""
        self._check_open()
        return self._bodies.extend(stored, added)

    def begin_stored(self, *, dialect: str, request: Stored, streamed: bool) -> Turn:
        """A new turn with a request that is kept already."""
        self._check_open()
        entries = request.request, request.messages
        turn = Turn(
            self._bodies, f"{self._lead}{len(self.turns):08x}", dialect=dialect, streamed=streamed, request=entries
        )
        turn.queued = time.time()
        self.turns.append(turn)
        return turn

    def _check_open(self) -> None:
        if self.sealed:
            raise RuntimeError(f"trace {self.id} is sealed")

    def seal(self) -> None:
        """Nothing is begun or recorded after this."""
        self._bodies.closed = True

    @property
    def sealed(self) -> bool:
        return self._bodies.closed

    def stored_bytes(self) -> int:
        """Bytes kept of requests and answers, with the references between them; Python's own overhead not counted."""
        return self._bodies.size + sum(len(turn.raw) for turn in self.turns if turn.raw is not None)

    # -- as a file -----------------------------------------------------------------------------

    def to_jsonl(self) -> str:
        """The trace as JSON lines: a header, then each turn after the entries it needs that no earlier turn did.

        An entry is a JSON value, in which `{"\\u0000":[7,8]}` stands for entries 7 and 8, comma between them; a turn's
        request is two entries, the second standing for `{"\\u0000":[]}` in the first. (An object of a body whose first
        key begins with NUL has one more NUL there.)
        """
        header = {"trace": self.id, "version": VERSION, "sealed": self.sealed, "stragglers": self.stragglers}
        lines = [json.dumps(header).encode()]
        written = 0
        for turn in self.turns:
            needed = max(number for number in (*turn._request, turn._response) if number is not None) + 1
            for number in range(written, needed):
                lines.append(b'{"entry":%d,"value":%s}' % (number, self._bodies.kept(number)))
            written = max(written, needed)
            record = {
                "turn": turn.id,
                **turn._outline(),
                "request": turn._request,
                "response": turn._response,
                # Latin-1 gives every byte a character, so that any body survives and HTML stays legible.
                "raw": None if turn.raw is None else turn.raw.decode("latin-1"),
            }
            del record["id"]
            lines.append(json.dumps(record).encode())
        return b"\n".join([*lines, b""]).decode()

    @classmethod
    def from_jsonl(cls, text: str) -> "Trace":
        """What `to_jsonl` wrote. A torn last line is left out and told in `warnings`.

        ValueError, with the number of the line: it is damaged elsewhere, or of an unknown version.
        """
        # Not `splitlines`, which also cuts at U+2028 and others that JSON leaves inside strings.
        lines = text.split("\n")
        while len(lines) > 1 and not lines[-1].strip():
            lines.pop()
        trace: Trace | None = None
        for number, line in enumerate(lines, 1):
            try:
                # The standard library: orjson makes floats of large integers, and refuses NaN.
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                if trace is not None and number == len(lines):
                    trace.warnings.append(f"line {number} is torn and was skipped: {error}")
                    break
                raise ValueError(f"line {number} is not JSON: {error}") from None
            try:
                if not isinstance(record, dict):
                    raise ValueError("not a record")
                if trace is None:
                    trace = cls._from_header(record)
                elif "entry" in record:
                    trace._bodies.restore(_field(record, "entry", int), record["value"])
                else:
                    trace.turns.append(trace._turn(record))
            except (KeyError, TypeError, ValueError) as error:
                what = f"{error} is missing" if isinstance(error, KeyError) else error
                raise ValueError(f"line {number}: {what}") from error
        assert trace is not None
        return trace

    @classmethod
    def _from_header(cls, record: dict[str, Any]) -> "Trace":
        if record.get("version") != VERSION:
            raise ValueError(f"not a trace of version {VERSION}, which is the one known: {record.get('version')!r}")
        trace = cls(_field(record, "trace", str))
        trace.stragglers = _field(record, "stragglers", int)
        trace._bodies.closed = _field(record, "sealed", bool)
        return trace

    def _turn(self, record: dict[str, Any]) -> Turn:
        request, messages = _field(record, "request", list)
        response = record["response"]
        for number in (request, messages or 0, response or 0):
            if type(number) is not int or not 0 <= number < len(self._bodies):
                raise ValueError(f"the turn refers to entry {number!r}, which is not before it")
        turn = Turn(
            self._bodies,
            _field(record, "turn", str),
            dialect=_field(record, "dialect", str),
            streamed=_field(record, "streamed", bool),
            request=(request, messages),
        )
        turn.queued = record["queued"]
        turn.finish_reason = record["finish_reason"]
        turn.usage = None if record["usage"] is None else Usage(**_field(record, "usage", dict))
        turn.raw = None if record["raw"] is None else _field(record, "raw", str).encode("latin-1")
        turn.attempts = [Attempt(**attempt) for attempt in _field(record, "attempts", list)]
        turn._response = response
        turn._delivered = _field(record, "delivered", bool)
        return turn

    def __repr__(self) -> str:
        return f"<Trace {self.id}: {len(self.turns)} turns{', sealed' if self.sealed else ''}>"


def _field(record: dict[str, Any], name: str, kind: type[T]) -> T:
    value = record[name]
    if not isinstance(value, kind):
        raise ValueError(f"{name} is no {kind.__name__}")
    return value


def _json_object(body: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            value = json.loads(body)  # NaN and Infinity, which engines send as log probabilities
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None
