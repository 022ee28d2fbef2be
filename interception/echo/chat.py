"""The chat completions dialect of the echo model. It always makes one choice, whatever `n` says."""

from __future__ import annotations

import time
from collections.abc import Iterator

from interception.echo.answer import Answer, Json, Refused, Said, deltas, new_id, objects, sse, text_of


def said(body: Json) -> list[Said]:
    if body.get("messages") is None:
        raise Refused(
            400, "Missing required parameter: 'messages'.", param="messages", code="missing_required_parameter"
        )
    roles = {"user": "user", "tool": "tool", "function": "tool"}
    return [
        Said(roles.get(str(message.get("role")), "other"), text_of(message.get("content")))
        for message in objects(body["messages"], "messages")
    ]


def usage(answer: Answer) -> Json:
    return {
        "prompt_tokens": answer.input_tokens,
        "completion_tokens": answer.output_tokens,
        "total_tokens": answer.input_tokens + answer.output_tokens,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def envelope(answer: Answer, kind: str) -> Json:
    return {
        "id": new_id("chatcmpl-"),
        "object": kind,
        "created": int(time.time()),
        "model": answer.model,
        "service_tier": "default",
        "system_fingerprint": "fp_echo",
    }


def whole(body: Json, answer: Answer) -> Json:
    message: Json = {"role": "assistant", "content": answer.text, "refusal": None, "annotations": []}
    if answer.call:
        function = {"name": answer.call.name, "arguments": answer.call.arguments}
        message |= {"content": None, "tool_calls": [{"id": new_id("call_"), "type": "function", "function": function}]}
    finish = "tool_calls" if answer.call else "stop"
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
    return envelope(answer, "chat.completion") | {"choices": [choice], "usage": usage(answer)}


def stream(body: Json, answer: Answer) -> Iterator[bytes]:
    options = body.get("stream_options")
    include_usage = isinstance(options, dict) and options.get("include_usage") is True
    head = envelope(answer, "chat.completion.chunk")
    if include_usage:
        head["usage"] = None

    def chunk(delta: Json, finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return sse(head | {"choices": [choice]})

    yield chunk({"role": "assistant", "content": None if answer.call else "", "refusal": None})
    if answer.call:
        function = {"name": answer.call.name, "arguments": ""}
        yield chunk({"tool_calls": [{"index": 0, "id": new_id("call_"), "type": "function", "function": function}]})
        for part in answer.call.halves:
            yield chunk({"tool_calls": [{"index": 0, "function": {"arguments": part}}]})
    for part in deltas(answer.text):
        yield chunk({"content": part})
    yield chunk({}, "tool_calls" if answer.call else "stop")
    if include_usage:
        yield sse(head | {"choices": [], "usage": usage(answer)})
    yield b"data: [DONE]\n\n"
