"""Streams as the providers write them, each with the answer it would have been unstreamed."""

import json
import math
from collections.abc import Callable
from typing import Any

from interception.dialects import CHAT, MESSAGES, RESPONSES, Dialect
from interception.dialects.base import Phase, Stream
from interception.sse import Json, SseParser, sse


def read(stream: Stream, raw: bytes) -> list[Phase]:
    parser = SseParser()
    return [stream.feed(event) for event in [*parser.feed(raw), *parser.end()]]


def chat(*chunks: Json, done: bool = True) -> bytes:
    return b"".join(map(sse, chunks)) + (b"data: [DONE]\n\n" if done else b"")


def named(*events: Json) -> bytes:
    return b"".join(sse(event, named=True) for event in events)


def assembled(dialect: Dialect, raw: bytes) -> Json:
    stream = dialect.stream()
    assert read(stream, raw)[-1] is Phase.DONE
    answer = stream.response()
    assert answer is not None
    return answer


def delta(index: int = 0, finish: str | None = None, **fields: Any) -> Json:
    return {"index": index, "delta": fields, "finish_reason": finish}


def openai_chat() -> tuple[bytes, Json]:
    """Two parallel calls, arguments in pieces, then usage, as OpenAI streams them."""
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "gpt-4o", "usage": None}
    head["system_fingerprint"] = "fp_1"
    opening: Json = {"role": "assistant", "content": None, "refusal": None}

    def call(index: int, **function: Any) -> Json:
        made = {"id": f"call_{index}", "type": "function"} if "name" in function else {}
        return {"index": index, **made, "function": function}

    deltas: list[Json] = [
        opening,
        {"tool_calls": [call(0, name="search", arguments="")]},
        {"tool_calls": [call(0, arguments='{"que')]},
        {"tool_calls": [call(0, arguments='ry": 1}')]},
        {"tool_calls": [call(1, name="fetch", arguments="")]},
        {"tool_calls": [call(1, arguments="{}")]},
    ]
    chunks = [{**head, "choices": [{**delta(**each), "logprobs": None}]} for each in deltas]
    chunks.append({**head, "choices": [{**delta(finish="tool_calls"), "logprobs": None}]})
    usage = {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    chunks.append({**head, "choices": [], "usage": usage})
    calls = [
        {"id": "call_0", "type": "function", "function": {"name": "search", "arguments": '{"query": 1}'}},
        {"id": "call_1", "type": "function", "function": {"name": "fetch", "arguments": "{}"}},
    ]
    message = {**opening, "tool_calls": calls}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls"}
    return chat(*chunks), {**head, "object": "chat.completion", "usage": usage, "choices": [choice]}


def vllm_chat() -> tuple[bytes, Json]:
    """Reasoning, token ids and logprobs (one of them NaN), as vLLM streams them."""
    head = {"id": "chatcmpl-2", "object": "chat.completion.chunk", "created": 2, "model": "qwen"}

    def logprob(token: str, value: str = "-0.5") -> str:
        return f'{{"token": "{token}", "logprob": {value}, "bytes": null, "top_logprobs": []}}'

    def chunk(fields: Json, ids: list[int], logprobs: list[str], **end: Any) -> bytes:
        choice = {"index": 0, "delta": fields, "logprobs": {"content": "@"}, "finish_reason": None, "token_ids": ids}
        text = json.dumps({**head, "choices": [{**choice, **end}]})
        return f"data: {text}\n\n".replace('"@"', f"[{', '.join(logprobs)}]").encode()

    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    raw = b"".join(
        [
            sse({**head, "choices": [first], "prompt_token_ids": [1, 2, 3]}),
            chunk({"reasoning_content": "Let "}, [10], [logprob("Let ")]),
            chunk({"reasoning_content": "me."}, [11, 12], [logprob("me", "NaN"), logprob(".", "-Infinity")]),
            chunk({"content": "It is "}, [13], [logprob("It is ")]),
            chunk({"content": "4"}, [14], [logprob("4")], finish_reason="stop", stop_reason=99),
            sse({**head, "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}}),
            b"data: [DONE]\n\n",
        ]
    )
    values = [("Let ", -0.5), ("me", math.nan), (".", -math.inf), ("It is ", -0.5), ("4", -0.5)]
    content = [{"token": token, "logprob": value, "bytes": None, "top_logprobs": []} for token, value in values]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "It is 4", "reasoning_content": "Let me."},
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "stop_reason": 99,
        "token_ids": [10, 11, 12, 13, 14],
    }
    return raw, {
        **head,
        "object": "chat.completion",
        "prompt_token_ids": [1, 2, 3],
        "choices": [choice],
        "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8},
    }


def anthropic_messages() -> tuple[bytes, Json]:
    """Thinking with its signature, text with a citation, two tools, as Anthropic streams them."""
    usage = {"input_tokens": 7, "cache_creation_input_tokens": 20, "cache_read_input_tokens": 100, "output_tokens": 1}
    message: Json = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude", "content": []}
    message |= {"stop_reason": None, "stop_sequence": None, "usage": {**usage, "service_tier": "standard"}}
    citation = {"type": "char_location", "cited_text": "x", "document_index": 0}
    blocks: list[tuple[Json, list[Json], Json]] = [
        (
            {"type": "thinking", "thinking": "", "signature": ""},
            [
                {"type": "thinking_delta", "thinking": "Let me "},
                {"type": "thinking_delta", "thinking": "see."},
                {"type": "signature_delta", "signature": "EqQB"},
            ],
            {"type": "thinking", "thinking": "Let me see.", "signature": "EqQB"},
        ),
        ({"type": "redacted_thinking", "data": "Emw"}, [], {"type": "redacted_thinking", "data": "Emw"}),
        (
            {"type": "text", "text": "", "citations": []},
            [
                {"type": "citations_delta", "citation": citation},
                {"type": "text_delta", "text": "So "},
                {"type": "text_delta", "text": "be it."},
            ],
            {"type": "text", "text": "So be it.", "citations": [citation]},
        ),
        (
            {"type": "tool_use", "id": "toolu_1", "name": "search", "input": {}},
            [
                {"type": "input_json_delta", "partial_json": ""},
                {"type": "input_json_delta", "partial_json": '{"que'},
                {"type": "input_json_delta", "partial_json": 'ry": [1]}'},
            ],
            {"type": "tool_use", "id": "toolu_1", "name": "search", "input": {"query": [1]}},
        ),
        (
            {"type": "tool_use", "id": "toolu_2", "name": "now", "input": {}},
            [{"type": "input_json_delta", "partial_json": ""}],
            {"type": "tool_use", "id": "toolu_2", "name": "now", "input": {}},
        ),
    ]
    events: list[Json] = [{"type": "message_start", "message": message}, {"type": "ping"}]
    for index, (start, deltas, _) in enumerate(blocks):
        events.append({"type": "content_block_start", "index": index, "content_block": start})
        events += [{"type": "content_block_delta", "index": index, "delta": each} for each in deltas]
        events.append({"type": "content_block_stop", "index": index})
    spent = {**usage, "output_tokens": 42, "output_tokens_details": {"thinking_tokens": 9}}
    end = {"stop_reason": "tool_use", "stop_sequence": None}
    events += [{"type": "message_delta", "delta": end, "usage": spent}, {"type": "message_stop"}]
    whole = {**message, "stop_reason": "tool_use", "content": [block for *_, block in blocks]}
    return named(*events), {**whole, "usage": {**spent, "service_tier": "standard"}}


def openai_responses() -> tuple[bytes, Json]:
    """Reasoning with a summary, a message with logprobs and an annotation, a call, a custom call."""
    started: Json = {"id": "resp_1", "object": "response", "created_at": 3, "status": "in_progress", "model": "gpt-5"}
    started |= {"error": None, "incomplete_details": None, "instructions": None, "metadata": {}, "output": []}
    started |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "usage": None}
    logprobs = [{"token": "Hi", "logprob": -1.0, "bytes": [72], "top_logprobs": []}]
    annotation = {"type": "url_citation", "url": "http://x", "title": "x", "start_index": 0, "end_index": 1}
    part: Json = {"type": "output_text", "text": "Hi you", "annotations": [annotation], "logprobs": logprobs * 2}
    summary = {"type": "summary_text", "text": "Think hard"}
    thought = {"type": "reasoning_text", "text": "raw"}
    items: list[Json] = [
        {"id": "rs_1", "type": "reasoning", "summary": [summary], "content": [thought], "encrypted_content": None},
        {"id": "msg_1", "type": "message", "status": "completed", "role": "assistant", "content": [part]},
        {"id": "fc_1", "type": "function_call", "status": "completed", "call_id": "call_1", "name": "search"},
        {"id": "ct_1", "type": "custom_tool_call", "status": "completed", "call_id": "call_2", "name": "sh"},
    ]
    items[2]["arguments"] = '{"query": 1}'
    items[3]["input"] = "ls -l"

    def of(index: int, kind: str, **fields: Any) -> Json:
        return {"type": f"response.{kind}", "output_index": index, "item_id": items[index]["id"], **fields}

    def item(index: int, kind: str, **changes: Any) -> Json:
        return {"type": f"response.output_item.{kind}", "output_index": index, "item": {**items[index], **changes}}

    busy = {"status": "in_progress"}
    empty = {**part, "text": "", "annotations": [], "logprobs": []}
    usage = {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15}
    usage |= {"input_tokens_details": {"cached_tokens": 4}, "output_tokens_details": {"reasoning_tokens": 2}}
    whole = {**started, "status": "completed", "output": items, "usage": usage}
    events = [
        {"type": "response.created", "response": started},
        {"type": "response.in_progress", "response": started},
        item(0, "added", summary=[], content=[]),
        of(0, "reasoning_summary_part.added", summary_index=0, part={**summary, "text": ""}),
        of(0, "reasoning_summary_text.delta", summary_index=0, delta="Think "),
        of(0, "reasoning_summary_text.delta", summary_index=0, delta="hard"),
        of(0, "reasoning_summary_text.done", summary_index=0, text="Think hard"),
        of(0, "reasoning_summary_part.done", summary_index=0, part=summary),
        of(0, "content_part.added", content_index=0, part={**thought, "text": ""}),
        of(0, "reasoning_text.delta", content_index=0, delta="raw"),
        item(0, "done"),
        item(1, "added", content=[], **busy),
        of(1, "content_part.added", content_index=0, part=empty),
        of(1, "output_text.delta", content_index=0, delta="Hi ", logprobs=logprobs),
        of(1, "output_text.annotation.added", content_index=0, annotation_index=0, annotation=annotation),
        of(1, "output_text.delta", content_index=0, delta="you", logprobs=logprobs),
        of(1, "output_text.done", content_index=0, text="Hi you", logprobs=logprobs * 2),
        of(1, "content_part.done", content_index=0, part=part),
        item(1, "done"),
        item(2, "added", arguments="", **busy),
        of(2, "function_call_arguments.delta", delta='{"query"'),
        of(2, "function_call_arguments.delta", delta=": 1}"),
        of(2, "function_call_arguments.done", arguments='{"query": 1}', name="search"),
        item(2, "done"),
        item(3, "added", input="", **busy),
        of(3, "custom_tool_call_input.delta", delta="ls "),
        of(3, "custom_tool_call_input.delta", delta="-l"),
        of(3, "custom_tool_call_input.done", input="ls -l"),
        item(3, "done"),
        {"type": "response.completed", "response": whole},
    ]
    return named(*({**event, "sequence_number": number} for number, event in enumerate(events))), whole


CORPORA: dict[str, tuple[Dialect, Callable[[], tuple[bytes, Json]]]] = {
    "openai chat": (CHAT, openai_chat),
    "vllm chat": (CHAT, vllm_chat),
    "anthropic messages": (MESSAGES, anthropic_messages),
    "openai responses": (RESPONSES, openai_responses),
}


def same(one: object, other: object) -> bool:
    """Equality in which NaN is NaN."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def without_nan(value: Json) -> Json:
    """With null for the numbers that JSON cannot write."""
    plain = json.loads(json.dumps(value).replace("NaN", "null").replace("-Infinity", "null"))
    assert isinstance(plain, dict)
    return plain
