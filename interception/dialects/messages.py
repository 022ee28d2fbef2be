"""Anthropic messages."""

from collections.abc import Iterator, Mapping
from typing import Final

from interception.dialects.base import (
    CLOSING,
    DONE,
    NO_HEADERS,
    OPEN,
    Common,
    Phase,
    Pieces,
    Stream,
    extend,
    index_of,
    join,
    joined,
    obj,
    objs,
    text,
)
from interception.sse import Json, SseEvent, dumps, loads, sse
from interception.usage import Usage, count, usage_of

PING: Final = sse({"type": "ping"}, named=True)

KINDS: Final = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}

PIECES: Final = {"text_delta": "text", "thinking_delta": "thinking"}
"""The field of a delta that goes on with what was there. Of all others the last value wins, signatures among them."""
REPEATED: Final = {**PIECES, "input_json_delta": "partial_json"}


class Messages(Common):
    name = "messages"
    path = "/v1/messages"
    count_path: str | None = "/v1/messages/count_tokens"
    messages_field = "messages"

    def url(self, base_url: str, path: str) -> str:
        """Anthropic's SDK is given a base without /v1; one with it (as for vLLM) is understood too."""
        return base_url.removesuffix("/v1") + path

    def auth(self, api_key: str) -> Mapping[str, str]:
        return {"x-api-key": api_key}

    def error(self, status: int, message: str, *, kind: str | None = None, code: str | None = None) -> Json:
        """The dialect has no codes: `code` is dropped."""
        usual = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind or usual, "message": message}}

    def stream(self, choices: int = 1, *, model: str = "") -> Stream:
        return MessagesStream()

    def error_event(self, stream: Stream, status: int, message: str) -> bytes:
        return sse(self.error(status, message), named=True)

    def keepalive(self, stream: Stream, silence: float, headers: Mapping[str, str] = NO_HEADERS) -> bytes:
        return PING

    def render(self, response: Json) -> bytes:
        return b"".join([sse(event, named=True) for event in _events(response)])

    def usage(self, response: Json) -> Usage | None:
        """`input_tokens` on the wire leaves out what was read from or written to a cache; here they are added up."""
        usage = obj(response.get("usage"))
        prompt = count(usage.get("input_tokens"))
        cached = count(usage.get("cache_read_input_tokens"))
        if prompt is not None:
            prompt += (cached or 0) + (count(usage.get("cache_creation_input_tokens")) or 0)
        reasoning = obj(usage.get("output_tokens_details")).get("thinking_tokens")
        return usage_of(prompt, usage.get("output_tokens"), None, cached, reasoning)

    def finish_reason(self, response: Json) -> str | None:
        return text(response.get("stop_reason"))


class MessagesStream(Stream):
    """Closing with the `message_delta` that has a stop reason; done with `message_stop`."""

    padded = True

    def __init__(self) -> None:
        super().__init__()
        self._message: Json | None = None
        self._usage: Json = {}
        self._blocks: dict[int, _Block] = {}

    def _read(self, event: SseEvent, payload: Json | None) -> Phase:
        kind = text((payload or {}).get("type")) or event.event
        if payload is None:
            return self._failed(None, event.data or "", shown=True) if kind == "error" else OPEN
        if kind == "error" or (kind is None and payload.get("error")):
            return self._failed(payload, event.data or "", shown=event.event == "error")
        if kind == "message_start":
            self._message = dict(obj(payload.get("message")))
            self._usage = dict(obj(self._message.get("usage")))
        elif kind == "content_block_start":
            self._blocks[index_of(payload.get("index"))] = _Block(obj(payload.get("content_block")))
        elif kind == "content_block_delta":
            block = self._blocks.setdefault(index_of(payload.get("index")), _Block({}))
            delta = obj(payload.get("delta"))
            block.add(delta)
            if self._refrains_left and len(delta) == 2:
                name = REPEATED.get(str(delta.get("type")), "")
                if delta.get(name) and isinstance(delta[name], str):
                    self._may_repeat(event, ("delta", name), block.so_far(name))
        elif kind == "message_delta":
            return self._read_end(payload)
        elif kind == "message_stop":
            return DONE if self._message is not None or self._blocks else OPEN
        return OPEN

    def _read_end(self, payload: Json) -> Phase:
        if self._message is None:
            self._message = {"type": "message", "role": "assistant", "content": []}
        delta = obj(payload.get("delta"))
        join(self._message, delta)
        join(self._message, {name: value for name, value in payload.items() if name not in ("type", "delta", "usage")})
        join(self._usage, obj(payload.get("usage")))  # counts so far, not further ones
        return CLOSING if delta.get("stop_reason") else OPEN

    def response(self) -> Json | None:
        if self._message is None and not self._blocks:
            return None
        message = dict(self._message or {"type": "message", "role": "assistant"})
        if self._blocks:
            message["content"] = [block.whole() for _, block in sorted(self._blocks.items())]
        if self._usage:
            message["usage"] = dict(self._usage)
        return message


class _Block:
    """One block of the content, put together from its start and its deltas."""

    def __init__(self, start: Json) -> None:
        self._fields = dict(start)
        self._input = Pieces()

    def so_far(self, name: str) -> object:
        """What there is of what a field of deltas goes on with."""
        return self._input if name == "partial_json" else self._fields.get(name)

    def add(self, delta: Json) -> None:
        kind = str(delta.get("type"))
        if kind == "input_json_delta":
            self._input.append(text(delta.get("partial_json")) or "")
        elif kind == "citations_delta":
            extend(self._fields, "citations", [delta.get("citation")])
        else:
            fields = {name: value for name, value in delta.items() if name != "type"}
            join(self._fields, fields, frozenset({PIECES[kind]} if kind in PIECES else ()))

    def whole(self) -> Json:
        """The block; an input that is cut short or is no JSON stays the text it is."""
        whole = joined(self._fields)
        written = "".join(self._input)
        if written:
            try:
                whole["input"] = loads(written)
            except ValueError:
                whole["input"] = written
        return whole


def _events(response: Json) -> Iterator[Json]:
    usage = obj(response.get("usage"))
    started = {**response, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield {"type": "message_start", "message": started}
    for index, block in enumerate(objs(response.get("content"))):
        start, deltas = _taken_apart(block)
        yield {"type": "content_block_start", "index": index, "content_block": start}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {name: response.get(name) for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": ended, "usage": usage}
    yield {"type": "message_stop"}


def _taken_apart(block: Json) -> tuple[Json, list[Json]]:
    """A block as it starts, and its deltas. One that the dialect streams whole has none."""
    kind, start, deltas = block.get("type"), dict(block), list[Json]()
    if kind == "text":
        if isinstance(block.get("citations"), list):
            start["citations"] = []
            deltas += [{"type": "citations_delta", "citation": citation} for citation in block["citations"]]
        start["text"] = ""
        deltas.append({"type": "text_delta", "text": block.get("text")})
    elif kind == "thinking":
        start |= {"thinking": "", "signature": ""}
        deltas.append({"type": "thinking_delta", "thinking": block.get("thinking")})
        deltas.append({"type": "signature_delta", "signature": block.get("signature")})
    elif kind in ("tool_use", "server_tool_use"):
        start["input"] = {}
        deltas.append({"type": "input_json_delta", "partial_json": dumps(block.get("input")).decode()})
    return start, deltas


MESSAGES = Messages()
