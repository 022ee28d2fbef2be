"""OpenAI chat completions, and what vLLM, OpenRouter and others add to them."""

from collections.abc import Iterator
from typing import Any, Final

from interception.dialects.base import (
    CLOSING,
    DONE,
    FAILED,
    OPEN,
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
from interception.dialects.refrain import Path
from interception.sse import END, Json, SseEvent, sse
from interception.usage import Usage, usage_of

MESSAGE_TEXTS: Final = frozenset({"content", "refusal", "reasoning", "reasoning_content", "thinking"})
MESSAGE_LISTS: Final = frozenset({"annotations", "images"})
CALL_TEXTS: Final = frozenset({"arguments", "input"})
NESTED_TEXTS: Final = {
    "function_call": CALL_TEXTS,
    "audio": frozenset({"data", "transcript"}),
}
"""Objects of a message that come in pieces."""
MESSAGE_OTHERS: Final = frozenset({"tool_calls", "reasoning_details", *NESTED_TEXTS, *MESSAGE_LISTS})
"""What of a message is neither a text nor put."""
CONTAINERS: Final = (dict, list)
ARGUMENTS: Final = ("tool_calls", 0, "function", "arguments")
"""Where they are in the delta of one call."""
DETAIL_TEXTS: Final = frozenset({"text", "summary", "data"})

HEAD: Final = ("id", "object", "created", "model", "service_tier", "system_fingerprint")
"""What every chunk repeats; of the rest, prompts' token ids among it, once is enough."""

PADDING: Final = "obfuscation"
"""A field of OpenAI's chunks, by which their lengths tell nothing: no part of the answer."""
NOT_KEPT: Final = frozenset({"choices", "error", PADDING})


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
        return b"".join([*(sse(chunk) for chunk in _chunks(response)), END])

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

    idle = (PADDING,)

    def __init__(self, choices: int = 1) -> None:
        super().__init__()
        self._expected = choices
        self._top: Json = {}
        self._choices: dict[int, _Choice] = {}

    def _read(self, event: SseEvent, payload: Json | None) -> Phase:
        if payload is None:
            return self._read_text(event)
        top = self._top
        for name, value in payload.items():
            if name not in NOT_KEPT and (value or name not in top or (value is not None and value != "")):
                top[name] = value  # as `put` would
        parts = payload.get("choices")
        choice: _Choice | None = None
        only_put = False
        if isinstance(parts, list):
            for part in parts:
                if isinstance(part, dict):
                    index = index_of(part.get("index"))
                    choice = self._choices.get(index)
                    if choice is None:
                        choice = self._choices[index] = _Choice(index)
                    only_put = choice.add(part)
        error = payload.get("error")
        if error or event.event == "error" or payload.get("object") == "error":  # the latter: vLLM of old
            return self._failed(payload, event.data or "", shown=bool(error))
        if choice is None:
            return OPEN
        if choice.finished:
            return CLOSING if self.phase is CLOSING or self._finished() else OPEN
        if only_put and self._refrains_left and parts == [part]:
            # It may be a chunk that adds a piece of text and nothing else.
            delta = obj(part.get("delta"))
            path = _only_text(delta)
            if path:
                self._may_repeat(event, ("choices", 0, "delta", *path), choice.so_far(delta, path))
        return OPEN

    def _read_text(self, event: SseEvent) -> Phase:
        """An event whose data is no object."""
        if event.event == "error":
            return self._failed(None, event.data or "", shown=False)
        # Of nothing there is no end: a stream of `[DONE]` alone broke off.
        return DONE if self._choices and (event.data or "").strip() == "[DONE]" else OPEN

    def _finished(self) -> bool:
        choices = self._choices
        return len(choices) >= self._expected and all(choice.finished for choice in choices.values())

    def response(self) -> Json | None:
        if not self._choices and (not self._top or self.phase is FAILED):
            return None
        choices = [self._choices[index].whole() for index in sorted(self._choices)]
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
        self._newest: dict[int, Json] = {}
        """Of the calls with an index."""

    @property
    def finished(self) -> bool:
        return bool(self._fields.get("finish_reason"))

    def so_far(self, delta: Json, path: Path) -> object:
        """What there is of the text to which `delta` added what is found in it by `path`."""
        if path == ARGUMENTS:
            return obj(self._call_of(delta["tool_calls"][0]).get("function")).get("arguments")
        return self._message.get(str(path[0]))

    def add(self, part: Json) -> bool:
        """Take a delta. Whether all else in `part` is put, again or once."""
        fields = self._fields
        only_put = True
        for name, value in part.items():
            if name == "delta" or name == "index" or name == "message":
                continue
            if value is None:
                if name not in fields:
                    fields[name] = None
            elif name == "logprobs" and isinstance(value, dict):
                only_put = False
                fields[name] = self._logprobs
                for kind, values in value.items():
                    extend(self._logprobs, kind, values)
            elif name == "token_ids":
                only_put = False
                extend(fields, name, value)
            elif value != "" or name not in fields:
                fields[name] = value  # as `put` would
        # A server may answer with a whole message in place of a delta.
        self._add_delta(obj(part.get("delta")) or obj(part.get("message")))
        return only_put

    def _add_delta(self, delta: Json) -> None:
        message = self._message
        for name, value in delta.items():
            if name in MESSAGE_TEXTS:
                append(message, name, value)
            elif name not in MESSAGE_OTHERS:
                put(message, name, value)
            elif name == "tool_calls" and isinstance(value, list):
                message.setdefault(name, [])
                for call in objs(value):
                    self._add_call(call)
            elif name == "reasoning_details" and isinstance(value, list):
                message[name] = self._details
                for detail in objs(value):
                    self._add_detail(detail)
            elif name in NESTED_TEXTS and isinstance(value, dict):
                message[name] = self._nested.setdefault(name, {})
                join(self._nested[name], value, NESTED_TEXTS[name])
            elif name in MESSAGE_LISTS:
                extend(message, name, value)
            elif name not in message:
                message[name] = value

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
        call = self._newest.get(index)
        if call is None or (_name(delta) and _name(call) and delta.get("id") not in (None, "", call.get("id"))):
            call = self._newest[index] = {}
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
        whole = joined(self._fields)
        whole["message"] = message  # in the place it had
        if self._logprobs:
            whole["logprobs"] = joined(self._logprobs)
        return whole


def _only_text(delta: Json) -> Path:
    """Where in `delta` the one text is that is all it adds; empty if it may be more, or less."""
    added = ""
    for name, value in delta.items():
        if value and name != "role":
            if added:
                return ()
            added = name
    if not added:
        return ()
    if added in MESSAGE_TEXTS:
        return (added,) if isinstance(delta[added], str) else ()
    if added != "tool_calls":
        return ()
    calls = delta[added]
    call = calls[0] if isinstance(calls, list) and len(calls) == 1 else None
    if not isinstance(call, dict):
        return ()
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str) or not function["arguments"]:
        return ()
    others = [value for name, value in (*call.items(), *function.items()) if name not in ("function", "arguments")]
    if "input" in function or any(isinstance(value, CONTAINERS) for value in others):
        return ()
    return ARGUMENTS


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
