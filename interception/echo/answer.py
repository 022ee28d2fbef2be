"""What the echo model says, apart from any dialect: what it heard, what it answers, and why it refuses."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import Any

import orjson

Json = dict[str, Any]

MAX_DELTAS = 512  # a stream of one event a word would take minutes for a text of megabytes
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


class Refused(Exception):
    """A request that gets an error answer: its status, what to say, and the request field it is about."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True)
class Said:
    """One text of the request. `role` is "user", "tool" (a tool's result) or "other" (never echoed, only counted)."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A scripted tool call; `arguments` is the JSON text of an object, as the directive had it."""

    name: str
    arguments: str

    @property
    def halves(self) -> tuple[str, str]:
        """The arguments as two deltas, neither empty: clients must join them before they parse."""
        middle = len(self.arguments) // 2
        return self.arguments[:middle], self.arguments[middle:]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model says to one request, before a dialect gives it a shape. With a `call` the `text` is empty."""

    model: str
    text: str
    call: Call | None
    input_tokens: int
    output_tokens: int


def new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex


def dump(payload: Json) -> bytes:
    try:
        return orjson.dumps(payload)
    except orjson.JSONEncodeError as error:
        # Parts of the request come back in the answer, and orjson reads deeper nesting than it writes.
        raise Refused(400, f"The request cannot be echoed: {error}.") from error


def sse(payload: Json) -> bytes:
    """One server-sent event. Chat chunks have no `type` and no event name; in the other dialects both agree."""
    name = f"event: {payload['type']}\n".encode() if "type" in payload else b""
    return name + b"data: " + dump(payload) + b"\n\n"


def text_of(content: object) -> str:
    """The text of a message's content: a string, or the text parts of a list, one a line. Anything else is empty."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = [part for part in content if isinstance(part, dict) and part.get("type") in TEXT_PARTS]
    return "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))


def objects(value: object, field: str) -> list[Json]:
    if not isinstance(value, list):
        raise Refused(400, f"'{field}' must be a list.", param=field)
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise Refused(400, f"'{field}[{index}]' must be an object.", param=field)
    return value


def deltas(text: str) -> list[str]:
    """The text cut at word boundaries, at most MAX_DELTAS pieces, none of them empty."""
    words = re.findall(r"\S+\s*|\s+", text)
    size = -(-len(words) // MAX_DELTAS) or 1
    return ["".join(words[start : start + size]) for start in range(0, len(words), size)]


def scripted_call(text: str) -> Call | None:
    """The first line `!call NAME {json arguments}`; without arguments they are `{}`. Other lines are plain text."""
    for line in text.split("\n"):  # not splitlines: a JSON string may hold a bare U+2028
        words = line.split(maxsplit=2)
        if len(words) < 2 or words[0] != "!call":
            continue
        arguments = words[2].strip() if len(words) == 3 else "{}"
        try:
            if isinstance(orjson.loads(arguments), dict):
                return Call(words[1], arguments)
        except orjson.JSONDecodeError:
            pass
    return None


def answer_to(body: Json, said: list[Said], default_model: str) -> Answer:
    # The newest text that is the user's or a tool's decides. A reminder some agents append after a tool's result
    # must not bring the script's `!call` back, or the agent would loop.
    heard = next((item for item in reversed(said) if item.role != "other"), Said("user", ""))
    call = scripted_call(heard.text) if heard.role == "user" and body.get("tools") else None
    words = f"{call.name} {call.arguments}".split() if call else heard.text.split()
    model = body.get("model")
    return Answer(
        model=model if isinstance(model, str) and model else default_model,
        text="" if call else heard.text,
        call=call,
        input_tokens=sum(len(item.text.split()) for item in said),
        output_tokens=max(1, len(words)),
    )
