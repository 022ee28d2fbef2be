"""OpenAI Responses."""

import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Final

from interception.dialects.base import (
    COMMENT,
    DONE,
    NO_HEADERS,
    OPEN,
    OpenAI,
    Phase,
    Stream,
    append,
    extend,
    index_of,
    joined,
    obj,
    objs,
    put,
    text,
)
from interception.sse import Json, SseEvent, sse
from interception.usage import Usage, usage_of

PLACEHOLDER_AFTER: Final = 120.0
"""Seconds of silence before the upstream's first event after which comments do no longer."""

TEXTS: Final = {
    # of the events *.delta and *.done: the item's list, the event's index into it, the part's text, the part's type
    "response.output_text": ("content", "content_index", "text", "output_text"),
    "response.refusal": ("content", "content_index", "refusal", "refusal"),
    "response.reasoning_text": ("content", "content_index", "text", "reasoning_text"),
    "response.reasoning_summary_text": ("summary", "summary_index", "text", "summary_text"),
}
PARTS: Final = {
    # of the events *.added and *.done: the item's list, the event's index into it
    "response.content_part": ("content", "content_index"),
    "response.reasoning_summary_part": ("summary", "summary_index"),
}
FIELDS: Final = {
    # of the events *.delta and *.done: the item's field, which the done event has too
    "response.function_call_arguments": "arguments",
    "response.mcp_call_arguments": "arguments",
    "response.custom_tool_call_input": "input",
    "response.code_interpreter_call_code": "code",
}
CALLS: Final = {
    # of the item's type: its field that comes in pieces, and their event
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}


class Responses(OpenAI):
    name = "responses"
    path = "/v1/responses"
    messages_field = "input"

    def stream(self, choices: int = 1, *, model: str = "") -> Stream:
        return ResponsesStream(model)

    def error_event(self, stream: Stream, status: int, message: str) -> bytes:
        """`response.failed`, with the response that the client knows."""
        code = "server_error"
        if 400 <= status < 500:
            # Of the codes there are, one for which clients try again, and one for which they do not.
            code = "rate_limit_exceeded" if status in (408, 429) else "invalid_prompt"
        known, number = stream.known() if isinstance(stream, ResponsesStream) else (started(""), 0)
        event: Json = {"type": "response.failed", "sequence_number": number}
        outcome = {"status": "failed", "error": {"code": code, "message": message}}
        try:
            return sse({**event, "response": {"output": [], **known, **outcome}}, named=True)
        except ValueError:  # it cannot be written, though it could be read: nested too deeply
            plain = {name: known[name] for name in ("id", "model") if isinstance(known.get(name), str)}
            return sse({**event, "response": {**started(""), **plain, **outcome}}, named=True)

    def keepalive(self, stream: Stream, silence: float, headers: Mapping[str, str] = NO_HEADERS) -> bytes:
        """A comment; after two minutes without the upstream's first event, a placeholder of that event.

        Codex drops comments and gives up after some minutes without data. OpenAI's own SDKs need no placeholder, any
        byte is a sign of life to them; and the `responses.stream` helper of newer ones (3.57; 2.54 did not mind)
        refuses the upstream's `response.created`, because its id is not the placeholder's. Their headers tell.
        """
        sdk = any(name.lower() == "x-stainless-lang" for name in headers)
        if silence < PLACEHOLDER_AFTER or sdk or not isinstance(stream, ResponsesStream):
            return COMMENT
        return stream.placeholder() or COMMENT

    def render(self, response: Json) -> bytes:
        events = enumerate(_events(response))
        return b"".join([sse({**event, "sequence_number": number}, named=True) for number, event in events])

    def usage(self, response: Json) -> Usage | None:
        usage = obj(response.get("usage"))
        return usage_of(
            usage.get("input_tokens"),
            usage.get("output_tokens"),
            usage.get("total_tokens"),
            obj(usage.get("input_tokens_details")).get("cached_tokens"),
            obj(usage.get("output_tokens_details")).get("reasoning_tokens"),
        )

    def finish_reason(self, response: Json) -> str | None:
        """Its status, or why it is incomplete."""
        reason = text(obj(response.get("incomplete_details")).get("reason"))
        status = text(response.get("status"))
        return reason or status if status == "incomplete" else status


class ResponsesStream(Stream):
    """Done with `response.completed` or `response.incomplete`; there is no phase of closing."""

    idle = ("obfuscation",)
    counter = "sequence_number"

    def __init__(self, model: str = "") -> None:
        super().__init__()
        self._model = model
        self._snapshot: Json | None = None  # the newest whole response the upstream has sent
        self._items: dict[int, _Item] = {}
        self._sequence = -1
        self._placeholder: Json | None = None

    def repeats(self, data: bytes, at: int = 0) -> int:
        taken = super().repeats(data, at)
        if taken and self._refrain is not None:
            self._sequence = max(self._sequence, self._refrain.greatest)
        return taken

    def _read(self, event: SseEvent, payload: Json | None) -> Phase:
        kind = text((payload or {}).get("type")) or event.event or ""
        if payload is None:
            return self._failed(None, event.data or "", shown=True) if kind == "error" else OPEN
        self._sequence = max(self._sequence, index_of(payload.get("sequence_number"), -1))
        if kind == "error" or (payload.get("error") and not kind.startswith("response.")):
            return self._failed(payload, event.data or "", shown=True)
        response = payload.get("response")
        if isinstance(response, dict):
            self._snapshot = response
        if kind == "response.failed":
            return self._failed(obj(obj(response).get("error")), "the response failed", shown=True)
        if kind in ("response.completed", "response.incomplete"):
            return DONE
        item = self._read_item(kind, payload)
        if item is not None and self._refrains_left and kind.endswith(".delta") and not isinstance(response, dict):
            delta = payload.get("delta")
            if delta and isinstance(delta, str) and not payload.get("logprobs"):
                self._may_repeat(event, ("delta",), item.so_far(kind.removesuffix(".delta"), payload))
        return OPEN

    def _read_item(self, kind: str, payload: Json) -> "_Item | None":
        """The item of which the event tells a part."""
        subject, _, verb = kind.rpartition(".")
        if subject == "response.output_item":
            if isinstance(payload.get("item"), dict):
                self._items[index_of(payload.get("output_index"))] = _Item(payload["item"])
        elif subject in TEXTS or subject in PARTS or subject in FIELDS or subject == "response.output_text.annotation":
            index = index_of(payload.get("output_index"))
            if index not in self._items:
                self._items[index] = _Item({"id": payload["item_id"]} if "item_id" in payload else {})
            self._items[index].add(subject, verb, payload)
            return self._items[index]
        return None

    def response(self) -> Json | None:
        if self._snapshot is None and not self._items:
            return None
        response = dict(self._snapshot or {"object": "response"})  # nothing that the upstream did not say
        if not response.get("output") and self._items:
            # Not only while it runs: Codex's backend completes its responses with an empty output.
            response["output"] = [item.whole() for _, item in sorted(self._items.items())]
        return response

    def known(self) -> tuple[Json, int]:
        """The response as the client knows it, and the sequence number of an event that would come next."""
        return self._snapshot or self._placeholder or started(self._model), self._sequence + 1

    def placeholder(self) -> bytes | None:
        """An event in the stead of the upstream's own first one; None once that has come."""
        if self._snapshot is not None:
            return None
        kind = "response.in_progress" if self._placeholder else "response.created"
        self._placeholder = self._placeholder or started(self._model)
        # Numbered like a first event whatever its place: the upstream's own begin at 0 too.
        return sse({"type": kind, "response": self._placeholder, "sequence_number": 0}, named=True)


def started(model: str) -> Json:
    """A response of which nothing is known, with all fields that a Response must have."""
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": None,
    }


class _Item:
    """One item of the output, as it was added or done, and what its deltas have added since."""

    def __init__(self, item: Json) -> None:
        self._fields = dict(item)
        self._parts: dict[str, dict[int, Json]] = {}  # of the lists that deltas have touched

    def add(self, subject: str, verb: str, payload: Json) -> None:
        if subject in FIELDS:
            name = FIELDS[subject]
            if verb == "delta":
                append(self._fields, name, payload.get("delta"))
            else:
                put(self._fields, name, payload.get(name))
        elif subject in PARTS:
            list_name, index_name = PARTS[subject]
            if isinstance(payload.get("part"), dict):
                self._list(list_name)[index_of(payload.get(index_name))] = dict(payload["part"])
        elif subject in TEXTS:
            list_name, index_name, name, kind = TEXTS[subject]
            part = self._list(list_name).setdefault(index_of(payload.get(index_name)), {"type": kind})
            if verb == "delta":
                append(part, name, payload.get("delta"))
                if payload.get("logprobs"):
                    extend(part, "logprobs", payload["logprobs"])
            else:
                put(part, name, payload.get(name))
        else:  # an annotation
            part = self._list("content").setdefault(index_of(payload.get("content_index")), {"type": "output_text"})
            extend(part, "annotations", [payload.get("annotation")])

    def so_far(self, subject: str, payload: Json) -> object:
        """What there is of the text to which a delta is added."""
        if subject in FIELDS:
            return self._fields.get(FIELDS[subject])
        if subject in TEXTS:
            list_name, index_name, name, _ = TEXTS[subject]
            return self._list(list_name)[index_of(payload.get(index_name))].get(name)
        return None

    def _list(self, name: str) -> dict[int, Json]:
        if name not in self._parts:
            self._parts[name] = {number: dict(part) for number, part in enumerate(objs(self._fields.get(name)))}
        return self._parts[name]

    def whole(self) -> Json:
        lists = {name: [joined(part) for _, part in sorted(parts.items())] for name, parts in self._parts.items()}
        return {**joined(self._fields), **lists}


def _events(response: Json) -> Iterator[Json]:
    status = response.get("status")
    ended = status if status in ("failed", "incomplete") else "completed"
    later = [name for name in ("usage", "error", "incomplete_details", "completed_at") if name in response]
    opened: Json = {**response, **dict.fromkeys(later), "status": "in_progress", "output": []}
    yield {"type": "response.created", "response": opened}
    yield {"type": "response.in_progress", "response": opened}
    for index, item in enumerate(objs(response.get("output"))):
        yield from _item_events({"output_index": index}, item)
    yield {"type": f"response.{ended}", "response": response}


def _item_events(at: dict[str, Any], item: Json) -> Iterator[Json]:
    opened = {**item, "status": "in_progress"} if "status" in item else dict(item)
    of_item = {**at, "item_id": item.get("id") or ""}
    lists = [(name, subject, at_part) for subject, (name, at_part) in PARTS.items() if isinstance(item.get(name), list)]
    opened |= {name: [] for name, *_ in lists}
    field, subject = CALLS.get(str(item.get("type")), ("", ""))
    whole = text(item.get(field))
    if whole is not None:
        opened[field] = ""
    yield {"type": "response.output_item.added", **at, "item": opened}
    for name, part_subject, at_part in lists:
        for number, part in enumerate(objs(item[name])):
            yield from _part_events(part_subject, {**of_item, at_part: number}, part)
    if whole is not None:
        yield {"type": f"{subject}.delta", **of_item, "delta": whole}
        yield {"type": f"{subject}.done", **of_item, "name": item.get("name"), field: whole}
    yield {"type": "response.output_item.done", **at, "item": item}


def _part_events(subject: str, of_part: dict[str, Any], part: Json) -> Iterator[Json]:
    kinds = {kind: (text_subject, name) for text_subject, (_, _, name, kind) in TEXTS.items()}
    text_subject, name = kinds.get(str(part.get("type")), ("", ""))
    whole = text(part.get(name))
    yield {"type": f"{subject}.added", **of_part, "part": part if whole is None else {**part, name: ""}}
    if whole is not None:
        logprobs = {"logprobs": part.get("logprobs") or []} if text_subject == "response.output_text" else {}
        yield {"type": f"{text_subject}.delta", **of_part, "delta": whole, **logprobs}
        yield {"type": f"{text_subject}.done", **of_part, name: whole, **logprobs}
    yield {"type": f"{subject}.done", **of_part, "part": part}


RESPONSES = Responses()
