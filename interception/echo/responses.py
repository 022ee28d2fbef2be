"""The responses dialect of the echo model. It keeps nothing: `previous_response_id` is echoed, not looked up."""

from __future__ import annotations

import time
from collections.abc import Iterator

from interception.echo.answer import Answer, Json, Refused, Said, deltas, new_id, objects, sse, text_of


def said(body: Json) -> list[Said]:
    given = body.get("input")
    if given is None:
        raise Refused(400, "Missing required parameter: 'input'.", param="input", code="missing_required_parameter")
    heard = [Said("other", text_of(body.get("instructions")))]
    if isinstance(given, str):
        return [*heard, Said("user", given)]
    for item in objects(given, "input"):
        if str(item.get("type")).endswith("_call_output"):  # of functions, custom tools, shells
            heard.append(Said("tool", text_of(item.get("output"))))
        else:
            heard.append(Said("user" if item.get("role") == "user" else "other", text_of(item.get("content"))))
    return heard


def started_response(body: Json, answer: Answer) -> Json:
    """The response as it is when it starts: no output, no usage."""
    settings: Json = {
        "background": False,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "store": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": None,
    }
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": answer.model,
        "output": [],
        "usage": None,
        "service_tier": "default",
        **{name: default if body.get(name) is None else body[name] for name, default in settings.items()},
    }


def function_of(body: Json, name: str) -> Json:
    """How the call of a tool names it: one of a namespace, offered as `SPACE` with `TOOL` in it, is `SPACE__TOOL`."""
    for offered in body.get("tools") or []:
        if isinstance(offered, dict) and offered.get("type") == "namespace" and isinstance(offered.get("tools"), list):
            space = str(offered.get("name"))
            for tool in offered["tools"]:
                if isinstance(tool, dict) and f"{space}__{tool.get('name')}" == name:
                    return {"name": tool["name"], "namespace": space}
    return {"name": name}


def output_item(body: Json, answer: Answer) -> Json:
    if answer.call:
        made = {"arguments": answer.call.arguments, "call_id": new_id("call_"), **function_of(body, answer.call.name)}
        return {"id": new_id("fc_"), "type": "function_call", "status": "completed", **made}
    part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
    return {"id": new_id("msg_"), "type": "message", "status": "completed", "role": "assistant", "content": [part]}


def completed_response(started: Json, item: Json, answer: Answer) -> Json:
    usage = {
        "input_tokens": answer.input_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.input_tokens + answer.output_tokens,
    }
    return started | {"status": "completed", "completed_at": int(time.time()), "output": [item], "usage": usage}


def whole(body: Json, answer: Answer) -> Json:
    return completed_response(started_response(body, answer), output_item(body, answer), answer)


def events(body: Json, answer: Answer) -> Iterator[Json]:
    started, item = started_response(body, answer), output_item(body, answer)
    of_item = {"item_id": item["id"], "output_index": 0}
    yield {"type": "response.created", "response": started}
    yield {"type": "response.in_progress", "response": started}
    if answer.call:
        opened = item | {"status": "in_progress", "arguments": ""}
        yield {"type": "response.output_item.added", "output_index": 0, "item": opened}
        for part in answer.call.halves:
            yield {"type": "response.function_call_arguments.delta", **of_item, "delta": part}
        done = {"name": item["name"], "arguments": answer.call.arguments}
        yield {"type": "response.function_call_arguments.done", **of_item, **done}
    else:
        opened = item | {"status": "in_progress", "content": []}
        yield {"type": "response.output_item.added", "output_index": 0, "item": opened}
        of_part = of_item | {"content_index": 0}
        text_part = item["content"][0]
        yield {"type": "response.content_part.added", **of_part, "part": text_part | {"text": ""}}
        for part in deltas(answer.text):
            yield {"type": "response.output_text.delta", **of_part, "delta": part, "logprobs": []}
        yield {"type": "response.output_text.done", **of_part, "text": answer.text, "logprobs": []}
        yield {"type": "response.content_part.done", **of_part, "part": text_part}
    yield {"type": "response.output_item.done", "output_index": 0, "item": item}
    yield {"type": "response.completed", "response": completed_response(started, item, answer)}


def stream(body: Json, answer: Answer) -> Iterator[bytes]:
    for number, event in enumerate(events(body, answer)):
        yield sse(event | {"sequence_number": number})
