"""OpenAI chat completions, and what vLLM, OpenRouter and others add to them."""

from collections.abc import Iterator
from typing import Any, Final

from interception.dialects.base import (
    OpenAI,
    Phase,
    Stream,
    append,
    extend,
    index_of,
    join,
    joined,
    missing,
    obj,
    objs,
    put,
    text,
)
from interception.sse import Json, SseEvent, sse
from interception.usage import Usage, usage_of

DONE: Final = b"data: [DONE]\n\n"

MESSAGE_TEXTS: Final = frozenset({"content", "refusal", "reasoning", "reasoning_content", "thinking"})
MESSAGE_LISTS: Final = frozenset({"annotations", "images"})
CALL_TEXTS: Final = frozenset({"arguments", "input"})
NESTED_TEXTS: Final = {
    "function_call": CALL_TEXTS,
    "audio": frozenset({"data", "transcript"}),
}
"""Objects of a message that come in pieces."""
DETAIL_TEXTS: Final = frozenset({"text", "summary", "data"})

HEAD: Final = ("id", "object", "created", "model", "service_tier", "system_fingerprint")
"""What every chunk repeats; of the rest, prompts' token ids among it, once is enough."""


class ChatCompletions(OpenAI):
    name = "chat completions"
    path = "/v1/chat/completions"
    messages_field = "messages"

    def wants_usage(self, request: Json) -> bool:
        return request.get("stream") is not True or obj(request.get("stream_options")).get("include_usage") is True

    def with_usage(self, request: Json) -> Json:
        if self.wants_usage(request):
            return request
        return {**request, "stream_options": {**obj(request.get("stream_options")), "include_usage": True}}

    def stream(self, choices: int = 1, *, model: str = "") -> Stream:
        return ChatStream(choices)

    def error_event(self, stream: Stream, status: int, message: str) -> bytes:
        return sse(self.error(status, message))

    def render(self, response: Json) -> bytes:
        return b"".join([*(sse(chunk) for chunk in _chunks(response)), DONE])

    def usage(self, response: Json) -> Usage | None:
        usage = obj(response.get("usage"))
        return usage_of(
            usage.get("prompt_tokens"),
            usage.get("completion_tokens"),
            usage.get("total_tokens"),
            obj(usage.get("prompt_tokens_details")).get("cached_tokens"),
            obj(usage.get("completion_tokens_details")).get("reasoning_tokens"),
        )

    def finish_reason(self, response: Json) -> str | None:
        """Of the first choice."""
        choices = objs(response.get("choices"))
        return text(choices[0].get("finish_reason")) if choices else None

    def missing_token_ids(self, response: Json) -> str | None:
        for position, choice in enumerate(objs(response.get("choices")) or [{}]):
            if missing(choice, "token_ids"):
                return f"choices[{position}].token_ids"
        return missing(response, "prompt_token_ids")

    def token_ids_mismatch(self, response: Json) -> str | None:
        for position, choice in enumerate(objs(response.get("choices"))):
            ids, logprobs = choice.get("token_ids"), obj(choice.get("logprobs")).get("content")
            if isinstance(ids, list) and isinstance(logprobs, list) and len(ids) != len(logprobs):
                return f"choices[{position}] has {len(ids)} token_ids and {len(logprobs)} logprobs"
        return None


class ChatStream(Stream):
    """Closing with the chunk that gives the last of `choices` its finish reason; done with `[DONE]`."""

    def __init__(self, choices: int = 1) -> None:
        super().__init__()
        self._expected = choices
        self._top: Json = {}
        self._choices: dict[int, _Choice] = {}

    def _read(self, event: SseEvent, data: str) -> Phase:
        chunk = event.json
        shown = bool(chunk and chunk.get("error"))
        failed = shown or event.event == "error" or (chunk or {}).get("object") == "error"  # the latter: vLLM of old
        if failed:
            self._failed(chunk, data, shown=shown)
        if chunk is None:
            if failed:
                return Phase.FAILED
            # Of nothing there is no end: a stream of `[DONE]` alone broke off.
            return Phase.DONE if data.strip() == "[DONE]" and self._choices else Phase.OPEN
        for name, value in chunk.items():
            if name not in ("choices", "error"):
                put(self._top, name, value)
        for part in objs(chunk.get("choices")):
            index = index_of(part.get("index"))
            if index not in self._choices:
                self._choices[index] = _Choice(index)
            self._choices[index].add(part)
        if failed:
            return Phase.FAILED
        finished = bool(self._choices) and all(choice.finished for choice in self._choices.values())
        if finished and len(self._choices) >= self._expected:
            return Phase.CLOSING
        self._look_for_refrain(event, chunk)
        return Phase.OPEN

    def _look_for_refrain(self, event: SseEvent, chunk: Json) -> None:
        """A chunk of one choice that adds a piece of text and nothing else: all else of it is put, again or once."""
        parts = chunk.get("choices")
        if not isinstance(parts, list) or len(parts) != 1 or not isinstance(parts[0], dict):
            return
        delta = obj(parts[0].get("delta"))
        added = [name for name, value in delta.items() if value and name != "role"]
        others = [value for name, value in parts[0].items() if name != "delta"]
        if len(added) != 1 or added[0] not in MESSAGE_TEXTS or any(isinstance(value, dict | list) for value in others):
            return
        if isinstance(delta[added[0]], str):
            choice = self._choices[index_of(parts[0].get("index"))]
            self._may_repeat(event, ("choices", 0, "delta", added[0]), choice.so_far(added[0]))

    def response(self) -> Json | None:
        if not self._choices and (not self._top or self.phase is Phase.FAILED):
            return None
        choices = [choice.whole() for _, choice in sorted(self._choices.items())]
        return {**self._top, "object": "chat.completion", "choices": choices}

    def usage_chunk(self, event: SseEvent) -> bool:
        chunk = event.json or {}
        return chunk.get("choices") == [] and isinstance(chunk.get("usage"), dict)


class _Choice:
    """One choice, put together from its deltas."""

    def __init__(self, index: int) -> None:
        self._fields: Json = {"index": index, "message": {}}
        self._message: Json = {"role": "assistant"}
        self._nested: dict[str, Json] = {}
        self._details: list[Json] = []
        self._logprobs: Json = {}
        self._calls: list[tuple[int, Json]] = []

    @property
    def finished(self) -> bool:
        return bool(self._fields.get("finish_reason"))

    def so_far(self, name: str) -> object:
        """What there is of a field of the message."""
        return self._message.get(name)

    def add(self, part: Json) -> None:
        for name, value in part.items():
            if name == "logprobs" and isinstance(value, dict):
                self._fields[name] = self._logprobs
                for kind, values in value.items():
                    extend(self._logprobs, kind, values)
            elif name == "token_ids":
                extend(self._fields, name, value)
            elif name not in ("index", "delta", "message"):
                put(self._fields, name, value)
        # A server may answer with a whole message in place of a delta.
        self._add_delta(obj(part.get("delta")) or obj(part.get("message")))

    def _add_delta(self, delta: Json) -> None:
        for name, value in delta.items():
            if name in MESSAGE_TEXTS:
                append(self._message, name, value)
            elif name == "tool_calls" and isinstance(value, list):
                self._message.setdefault(name, [])
                for call in objs(value):
                    self._add_call(call)
            elif name == "reasoning_details" and isinstance(value, list):
                self._message[name] = self._details
                for detail in objs(value):
                    self._add_detail(detail)
            elif name in NESTED_TEXTS and isinstance(value, dict):
                self._message[name] = self._nested.setdefault(name, {})
                join(self._nested[name], value, NESTED_TEXTS[name])
            elif name in MESSAGE_LISTS:
                extend(self._message, name, value)
            elif name not in self._message or name not in ("tool_calls", "reasoning_details", *NESTED_TEXTS):
                put(self._message, name, value)

    def _add_call(self, delta: Json) -> None:
        call = self._call_of(delta)
        for name, value in delta.items():
            if name in ("function", "custom") and isinstance(value, dict):
                if not isinstance(call.get(name), dict):
                    call[name] = {}
                join(call[name], value, CALL_TEXTS)
            elif name != "index":
                put(call, name, value)

    def _call_of(self, delta: Json) -> Json:
        """The call that `delta` goes on with, or a new one: with a new index, or with a name and an id of its own
        (Gemini's parallel calls have one index or none; vLLM of old made up an id for every delta, without a name)."""
        index = index_of(delta.get("index"), self._calls[-1][0] if self._calls else 0)
        call = next((call for known, call in reversed(self._calls) if known == index), None)
        if call is None or (_name(delta) and _name(call) and delta.get("id") not in (None, "", call.get("id"))):
            call = {}
            self._calls.append((index, call))
        return call

    def _add_detail(self, detail: Json) -> None:
        """OpenRouter's reasoning blocks: what has the index and the type of the last one goes on with it."""
        last = self._details[-1] if self._details else {}
        key = detail.get("index"), detail.get("type")
        if key[0] is None or not last or key != (last.get("index"), last.get("type")):
            last = {}
            self._details.append(last)
        join(last, detail, DETAIL_TEXTS)

    def whole(self) -> Json:
        message = joined(self._message)
        for name, nested in self._nested.items():
            message[name] = joined(nested)
        if self._details:
            message["reasoning_details"] = [joined(detail) for detail in self._details]
        if self._calls:
            message["tool_calls"] = [_whole_call(call) for _, call in sorted(self._calls, key=lambda pair: pair[0])]
        whole = {**joined(self._fields), "message": message}
        if self._logprobs:
            whole["logprobs"] = joined(self._logprobs)
        return whole


def _name(call: Json) -> object:
    return obj(call.get("function")).get("name") or obj(call.get("custom")).get("name")


def _whole_call(call: Json) -> Json:
    whole = {name: joined(value) if isinstance(value, dict) else value for name, value in call.items()}
    return whole if "type" in whole or "function" not in whole else {**whole, "type": "function"}


def _chunks(response: Json) -> Iterator[Json]:
    head: Json = {name: response[name] for name in HEAD if name in response}
    head["object"] = "chat.completion.chunk"
    rest: Json = {name: value for name, value in response.items() if name not in (*HEAD, "choices", "usage")}
    for position, choice in enumerate(objs(response.get("choices"))):
        index = choice.get("index", position)
        for part in _choice_parts(choice):
            yield {**head, **rest, "choices": [{"index": index, "finish_reason": None, **part}]}
            rest = {}
    if isinstance(response.get("usage"), dict):
        yield {**head, **rest, "choices": [], "usage": response["usage"]}


def _choice_parts(choice: Json) -> Iterator[dict[str, Any]]:
    message = {"role": "assistant", **obj(choice.get("message"))}
    calls = objs(message.get("tool_calls"))
    # Nulls go first, so that what follows never seems to take something back.
    opening = {name: value for name, value in message.items() if name == "role" or value is None}
    apart = (*opening, "tool_calls") if calls else opening
    body = {name: value for name, value in message.items() if name not in apart}
    of_tokens = {name: choice[name] for name in ("logprobs", "token_ids") if choice.get(name) is not None}
    of_end = {name: value for name, value in choice.items() if name not in ("index", "message", *of_tokens)}
    yield {"delta": opening}
    if body or of_tokens:
        yield {"delta": body, **of_tokens}
    for index, call in enumerate(calls):
        yield {"delta": {"tool_calls": [{**call, "index": index}]}}
    yield {"delta": {}, **of_end}


CHAT = ChatCompletions()
