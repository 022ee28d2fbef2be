"""The messages dialect of the echo model."""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from interception.echo.answer import Answer, Json, Refused, Said, deltas, new_id, objects, sse, text_of


def said(body: Json) -> list[Said]:
    if body.get("messages") is None:
        raise Refused(400, "messages: Field required")
    heard = [Said("other", text_of(body.get("system")))]
    for message in objects(body["messages"], "messages"):
        content = message.get("content")
        heard.append(Said("user" if message.get("role") == "user" else "other", text_of(content)))
        blocks = content if isinstance(content, list) else []
        results = [block for block in blocks if isinstance(block, dict) and block.get("type") == "tool_result"]
        if results:  # after the message's own text, because a result is what gets echoed
            heard.append(Said("tool", "\n".join(text_of(result.get("content")) for result in results)))
    return heard


def whole(body: Json, answer: Answer) -> Json:
    block: Json = {"type": "text", "text": answer.text, "citations": None}
    if answer.call:
        arguments = orjson.loads(answer.call.arguments)
        block = {"type": "tool_use", "id": new_id("toolu_"), "name": answer.call.name, "input": arguments}
    return {
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": [block],
        "stop_reason": "tool_use" if answer.call else "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": answer.input_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": answer.output_tokens,
            "service_tier": "standard",
        },
    }


def stream(body: Json, answer: Answer) -> Iterator[bytes]:
    message = whole(body, answer)
    [block], usage = message["content"], message["usage"]
    started = message | {"content": [], "stop_reason": None, "usage": usage | {"output_tokens": 1}}
    yield sse({"type": "message_start", "message": started})
    empty: Json = {"input": {}} if answer.call else {"text": ""}
    yield sse({"type": "content_block_start", "index": 0, "content_block": block | empty})
    yield sse({"type": "ping"})
    parts = answer.call.halves if answer.call else deltas(answer.text)
    kind, field = ("input_json_delta", "partial_json") if answer.call else ("text_delta", "text")
    for part in parts:
        yield sse({"type": "content_block_delta", "index": 0, "delta": {"type": kind, field: part}})
    yield sse({"type": "content_block_stop", "index": 0})
    ended = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    spent = {name: count for name, count in usage.items() if name.endswith("_tokens")}
    yield sse({"type": "message_delta", "delta": ended, "usage": spent})
    yield sse({"type": "message_stop"})
