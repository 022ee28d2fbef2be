"""What the server asks of a dialect, and what dialects share."""

import enum
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from interception.dialects.refrain import Path, Refrain
from interception.sse import Json, SseEvent, loads
from interception.usage import Usage

COMMENT: Final = b": k\n"
"""A keepalive all SSE readers drop. No blank line of its own: after an `id:` line that would be an empty event."""

REFRAINS: Final = 16
"""Events of a stream in which it is looked for a refrain in vain: some have a number in each, and none."""

NO_HEADERS: Final[Mapping[str, str]] = {}


class Phase(enum.Enum):
    """How far a streamed answer has come."""

    OPEN = "open"
    CLOSING = "closing"
    """Nothing of the answer is missing, but the event that ends the stream: a client may stop here."""
    DONE = "done"
    FAILED = "failed"


# An enum's member costs as much to be looked up as a call (on 3.11), several times an event.
OPEN, CLOSING, DONE, FAILED = Phase


class Stream(ABC):
    """Reads one streamed answer. Nothing in it raises for what the upstream sent, however odd."""

    idle: tuple[str, ...] = ()
    """Fields of an event that may have another text each time, of which the answer has nothing."""
    counter = ""
    """The one that may have another number each time."""
    padded = False
    """Whether events may end with blanks of any number."""

    def __init__(self) -> None:
        self.phase = OPEN
        self.events = 0
        """Events with data so far."""
        self._error: str | None = None
        self._error_status: int | None = None
        self._error_shown = False
        self._refrain: Refrain | None = None
        self._refrains_left = REFRAINS

    def repeats(self, data: bytes, at: int = 0) -> int:
        """Take those events from `at` on, where one begins, that are the last one again with another text: an open
        stream stays open with them. How many bytes of `data` they are."""
        refrain = self._refrain
        if refrain is None or not (taken := refrain.taken(data, at)):
            return 0
        self.events += refrain.count
        if not refrain.tried:
            refrain.tried = True
            self._refrains_left += 1  # not in vain
        return taken

    def feed(self, event: SseEvent) -> Phase:
        """Take the next event, and say how far the answer has come with it. DONE and FAILED are final."""
        payload = event.json
        if payload is None and event.data is None:
            return self.phase
        self.events += 1
        self._refrain = None
        phase = self.phase
        if phase is not DONE and phase is not FAILED:
            brought = self._read(event, payload)
            # Closing lasts until the end, whatever else comes.
            if brought is not OPEN:
                phase = self.phase = brought
        return phase

    @abstractmethod
    def response(self) -> Json | None:
        """The answer so far, in the shape it would have had unstreamed; None if nothing of one came."""

    def error(self) -> str | None:
        """The message of the upstream's in-stream error."""
        return self._error

    def error_status(self) -> int | None:
        """The HTTP status that the in-stream error would have had, where it tells."""
        return self._error_status

    def error_shown(self) -> bool:
        """Whether SDKs see the in-stream error in the upstream's own event; if not, it takes an `error_event` too."""
        return self._error_shown

    def usage_chunk(self, event: SseEvent) -> bool:
        """Whether `event` is there only because usage was asked for, so that a client who did not is spared it."""
        return False

    @abstractmethod
    def _read(self, event: SseEvent, payload: Json | None) -> Phase:
        """Take an event with data, which is `payload` if it is an object; the phase it brings about, OPEN if none."""

    def _may_repeat(self, event: SseEvent, path: Path, pieces: object) -> None:
        """`event` added nothing but the text that is found by `path` to `pieces`, and had it nothing but another text,
        and other values in what is `idle` or the `counter`, the same would hold."""
        if self._refrains_left and isinstance(pieces, Pieces):
            self._refrains_left -= 1
            self._refrain = Refrain.of(event, path, self.idle, pieces, counter=self.counter, padded=self.padded)

    def _failed(self, error: Json | None, text: str, *, shown: bool) -> Phase:
        """`error`: the object that has the error, or is one; `text`: what came, should there be no message in it."""
        self._error, self._error_status = read_error(error or {})
        self._error = self._error or text
        self._error_shown = shown
        return FAILED


class Dialect(Protocol):
    """One wire format."""

    @property
    def name(self) -> str:
        """As it stands in traces and logs."""
        ...

    @property
    def path(self) -> str:
        """Of its model route on our server."""
        ...

    @property
    def count_path(self) -> str | None:
        """Of its route that counts tokens, if it has one."""
        ...

    @property
    def messages_field(self) -> str:
        """The request's field that holds the conversation."""
        ...

    def url(self, base_url: str, path: str) -> str:
        """Where our route `path` is found at an upstream, whose `base_url` is as its SDK takes it."""
        ...

    def auth(self, api_key: str) -> Mapping[str, str]:
        """The headers that carry the upstream's key."""
        ...

    def error(self, status: int, message: str, *, kind: str | None = None, code: str | None = None) -> Json:
        """The body of an error answer; `kind` is its type, by default the one usual for `status`."""
        ...

    def prompt_too_long(self, status: int, body: bytes) -> bool:
        """Whether this error answer says that the prompt does not fit the model."""
        ...

    def wants_usage(self, request: Json) -> bool:
        """Whether the answer to `request` will tell its usage anyway."""
        ...

    def with_usage(self, request: Json) -> Json:
        """`request`, or a copy of it that asks for usage."""
        ...

    def stream(self, choices: int = 1, *, model: str = "") -> Stream:
        """A reader of one streamed answer.

        :param choices: how many answers the request asks for (`n` of chat completions).
        :param model: the request's, for an error before the upstream has named one.
        """
        ...

    def error_event(self, stream: Stream, status: int, message: str) -> bytes:
        """The dialect's own error in a stream of which `stream` has read so much; its SDKs raise. Nothing follows."""
        ...

    def keepalive(self, stream: Stream, silence: float, headers: Mapping[str, str] = NO_HEADERS) -> bytes:
        """What a client gets, once committed, `silence` seconds after the upstream's last event.

        :param headers: those of the client's request, which tell what kind of client it is.
        """
        ...

    def render(self, response: Json) -> bytes:
        """A whole answer as a complete stream. Chat's usage chunk is in it if the answer has usage."""
        ...

    def usage(self, response: Json) -> Usage | None:
        """The usage of a whole answer; None if it tells nothing."""
        ...

    def finish_reason(self, response: Json) -> str | None:
        """Why a whole answer ended, in the dialect's own word."""
        ...

    def missing_token_ids(self, response: Json) -> str | None:
        """The first field with token ids that `response` should have and has not."""
        ...

    def token_ids_mismatch(self, response: Json) -> str | None:
        """What is wrong if there are not as many token ids as logprobs."""
        ...


# -- errors ----------------------------------------------------------------------------------------

OPENAI_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}

STATUS_OF: Final = {
    "invalid_request_error": 400,
    "invalid_prompt": 400,
    "context_length_exceeded": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "insufficient_quota": 429,
    "api_error": 500,
    "server_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
"""The status of an error that tells only its type or code."""


def read_error(payload: Json) -> tuple[str | None, int | None]:
    """Message and status of an error, wherever OpenAI, Anthropic, vLLM or OpenRouter put them."""
    error = payload.get("error")
    holders = [holder for holder in (error, payload) if isinstance(holder, dict)]
    messages = [error, *(holder.get("message") for holder in holders)]
    message = next((text for text in messages if isinstance(text, str) and text), None)
    numbers = [holder.get(name) for holder in holders for name in ("status", "status_code", "code")]
    names = [holder.get(name) for holder in holders for name in ("code", "type")]
    statuses = [number for number in map(_status, numbers) if number is not None]
    statuses += [STATUS_OF[name] for name in names if isinstance(name, str) and name in STATUS_OF]
    return message, statuses[0] if statuses else None


def _status(value: object) -> int | None:
    if isinstance(value, str) and re.fullmatch("[45][0-9][0-9]", value):
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 400 <= value < 600 else None


TOO_LONG_CODES: Final = frozenset({"context_length_exceeded", "string_above_max_length", "exceed_context_size_error"})
TOO_LONG: Final = re.compile(
    r"maximum context length|context[ _]length[ _]exceeded|string_above_max_length"
    r"|prompt is too long|input is too long|prompt (contains|has) .{0,80}too large"
    r"|exceeds? (the |this |your )?(model'?s )?(available )?context (window|limit|length|size)"
    r"|longer than (the )?(model'?s context|maximum (model|context)) length"
    r"|exceeds? the maximum number of (input )?tokens|exceeds? (the )?(model'?s )?maximum (context|model) length"
    r"|input tokens exceeds? the configured limit",
    re.IGNORECASE,
)
"""The sentences of OpenAI, Anthropic, vLLM, SGLang, llama.cpp, Gemini, Bedrock, Mistral, Fireworks."""

BODY_READ: Final = 64 * 1024
"""Characters searched of an error body that is not JSON."""


def prompt_too_long(status: int, body: bytes) -> bool:
    """Whether a 400 or 413 says so. Only the error's own words count: the body may quote the prompt."""
    if status not in (400, 413):
        return False
    try:
        payload = loads(body)
    except ValueError:
        return TOO_LONG.search(body[:BODY_READ].decode("utf-8", "replace")) is not None
    if not isinstance(payload, dict):
        return False
    error = payload.get("error")
    for holder in (error, payload):
        if isinstance(holder, dict) and any(text(holder.get(name)) in TOO_LONG_CODES for name in ("code", "type")):
            return True
    said = read_error(payload)[0] or text(payload.get("detail"))  # `detail`: FastAPI's own
    return said is not None and TOO_LONG.search(said) is not None


# -- putting answers together ----------------------------------------------------------------------


class Pieces(list[str]):
    """A text that comes in pieces, joined once at the end: adding strings up takes the square of their length."""


class Parts(list[Any]):
    """A list that comes in parts."""


def put(into: Json, name: str, value: Any) -> None:
    """Set a field: the last value wins, but never an empty or null one over another."""
    if (value is not None and value != "") or name not in into:
        into[name] = value


def append(into: Json, name: str, piece: object) -> None:
    """Add a piece to a text. What is no text is `put`."""
    present = into.get(name)
    if not isinstance(piece, str):
        put(into, name, piece)
    elif isinstance(present, Pieces):
        present.append(piece)
    else:
        into[name] = Pieces([present, piece] if isinstance(present, str) else [piece])


def join(into: Json, delta: Mapping[str, Any], texts: frozenset[str] = frozenset()) -> None:
    """Add a delta: `texts` are appended, all else is put."""
    for name, value in delta.items():
        (append if name in texts else put)(into, name, value)


def extend(into: Json, name: str, values: object) -> None:
    """Add to a list that comes in parts. What is no list is `put`, while there is none."""
    if not isinstance(values, list):
        if not isinstance(into.get(name), Parts):
            put(into, name, values)
        return
    parts = into.get(name)
    if not isinstance(parts, Parts):
        # Never the event's own list: others may read the event.
        parts = into[name] = Parts(parts if isinstance(parts, list) else ())
    parts.extend(values)


def joined(fields: Mapping[str, Any]) -> Json:
    """A copy of `fields` with its pieces and parts put together."""
    whole = dict(fields)
    for name, value in fields.items():
        if type(value) is Pieces:
            whole[name] = "".join(value)
        elif type(value) is Parts:
            whole[name] = list(value)
    return whole


def obj(value: object) -> Json:
    """`value` if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def objs(value: object) -> list[Json]:
    """The objects in `value`, if it is a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def index_of(value: object, default: int = 0) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


# -- what dialects have in common ------------------------------------------------------------------


class Common:
    """What holds for a dialect that does not say otherwise."""

    count_path: str | None = None

    def prompt_too_long(self, status: int, body: bytes) -> bool:
        return prompt_too_long(status, body)

    def wants_usage(self, request: Json) -> bool:
        return True

    def with_usage(self, request: Json) -> Json:
        return request

    def keepalive(self, stream: Stream, silence: float, headers: Mapping[str, str] = NO_HEADERS) -> bytes:
        return COMMENT

    def missing_token_ids(self, response: Json) -> str | None:
        return missing(response, "prompt_token_ids", "token_ids")

    def token_ids_mismatch(self, response: Json) -> str | None:
        return None


class OpenAI(Common):
    """What OpenAI's two dialects have in common."""

    def url(self, base_url: str, path: str) -> str:
        """OpenAI SDKs are given a base that ends in /v1 (or in a provider's own path), and add what follows."""
        return base_url + (path if not urlsplit(base_url).path else path.removeprefix("/v1"))

    def auth(self, api_key: str) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {api_key}"}

    def error(self, status: int, message: str, *, kind: str | None = None, code: str | None = None) -> Json:
        usual = OPENAI_KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
        return {"error": {"message": message, "type": kind or usual, "param": None, "code": code}}


def missing(response: Json, *names: str) -> str | None:
    """The first of the fields `names` that is no list."""
    return next((name for name in names if not isinstance(response.get(name), list)), None)
