"""What the upstream answers and what the clients ask: the same bytes for every subject.

The answers are written once, as the upstream sends them, to a file that either of its programs serves: records of a
length (4 bytes, little-endian) and so many bytes. The first is the whole answer to a call that is not streamed, the
second the head of a stream, and each other an event of it in a chunk of its own, the last with the end of the body.
Every `STAMP` in them is overwritten with the number of the answer, so that no two are the same.
"""

import json
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

STAMP = "0000000000"
"""Ten digits, which the upstream counts up with each answer."""

MODEL = "bench"
"""What the clients ask for."""

EVENTS = 50
"""Events of a stream, `[DONE]` among them."""

ANSWER_BYTES = 1024
"""Body of an answer that is not streamed."""

BIG_BYTES = 108_000
"""Body of a big request: a conversation, the same but for its last message."""

TURNS = 80
"""Turns of the growing conversation; at the last its body has about `BIG_BYTES`."""

TOOL_RESULT = 480
"""Characters of each result in it."""

WORDS = 'The tool ran for 0.21 s and printed "42 passed", then a path: C:\\runs\\7 and a line.\n'
"""What messages are made of: text with the escapes that real ones have."""


def text(size: int) -> str:
    """So many characters of a message."""
    return (WORDS * (size // len(WORDS) + 1))[:size]


# -- what the upstream sends -------------------------------------------------------------------


def answers() -> list[bytes]:
    """The records of the upstream's file."""
    body = _answer_body()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    stream = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    events = [_chunk(f"data: {event}\n\n".encode()) for event in _events()]
    events[-1] += b"0\r\n\r\n"
    return [head.encode() + body, stream.encode(), *events]


def write_answers(path: Path) -> None:
    path.write_bytes(b"".join(struct.pack("<I", len(record)) + record for record in answers()))


def read_answers(path: Path) -> list[bytes]:
    data, records, at = path.read_bytes(), [], 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        records.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return records


def _answer_body() -> bytes:
    def made(content: str) -> bytes:
        message = {"role": "assistant", "content": f"answer {STAMP}: {content}", "refusal": None}
        return _dumps(
            {
                "id": f"chatcmpl-{STAMP}",
                "object": "chat.completion",
                "created": 1760000000,
                "model": MODEL,
                "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 60, "completion_tokens": 200, "total_tokens": 260},
            }
        )

    rest = ANSWER_BYTES - len(made(""))
    return made(("This is what a model says of what it saw. " * 30)[:rest])


def _events() -> Iterable[str]:
    def chunk(choices: list[dict[str, Any]], **more: Any) -> str:
        head = {"id": f"chatcmpl-{STAMP}", "object": "chat.completion.chunk", "created": 1760000000, "model": MODEL}
        return _dumps({**head, "choices": choices, **more}).decode()

    def delta(fields: dict[str, str], finish_reason: str | None = None) -> list[dict[str, Any]]:
        return [{"index": 0, "delta": fields, "logprobs": None, "finish_reason": finish_reason}]

    yield chunk(delta({"role": "assistant", "content": ""}))
    yield chunk(delta({"content": f"answer {STAMP}:"}))
    for number in range(EVENTS - 5):
        yield chunk(delta({"content": f" word{number}"}))
    yield chunk(delta({}, "stop"))
    yield chunk([], usage={"prompt_tokens": 60, "completion_tokens": 47, "total_tokens": 107})
    yield "[DONE]"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


# -- what the clients ask ----------------------------------------------------------------------


def request(*, stream: bool = False, paced: int | None = None, size: int = 300) -> bytes:
    """A call's body of about so many bytes, with a `STAMP` in its last message.

    It asks for the usage of a stream itself: a subject that would add it has nothing to add. `paced`: milliseconds that
    the upstream waits before each event, which it finds in a field that all subjects pass on.
    """
    last = {"role": "user", "content": f"question {STAMP}"}
    body: dict[str, Any] = {"model": MODEL, "messages": [last]}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if paced is not None:
        body["user"] = f"paced-{paced}"
    system = {"role": "system", "content": "You are an agent."}
    history: list[dict[str, str]] = []
    while (rest := size - len(_dumps({**body, "messages": [system, *history, last]}))) > 60:
        role = "assistant" if len(history) % 2 else "user"
        history.append({"role": role, "content": f"{len(history)}: {text(min(rest - 60, 1200))}"})
    return _dumps({**body, "messages": [system, *history, last]})


def stamped(body: bytes, number: int) -> bytes:
    """`body` with its stamp counted: the `number`-th call."""
    return body.replace(STAMP.encode(), b"%010d" % number, 1)


def conversation(said: Sequence[str]) -> bytes:
    """A call's body in the growing conversation, given what the model has `said` in it so far."""
    messages = [{"role": "system", "content": f"You are an agent. {text(TOOL_RESULT)}"}]
    for number, answer in enumerate(said):
        messages.append({"role": "user", "content": f"result {number}: {text(TOOL_RESULT)}"})
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": f"result {len(said)}: {text(TOOL_RESULT)}"})
    return _dumps({"model": MODEL, "messages": messages})


def said(answer: bytes) -> str:
    """What the model says in an answer that is not streamed."""
    content = json.loads(answer)["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


def post(path: str, key: str, body: bytes) -> bytes:
    """The whole of a request."""
    lines = ["Host: 127.0.0.1", f"Authorization: Bearer {key}", "Content-Type: application/json"]
    head = "\r\n".join([f"POST {path} HTTP/1.1", *lines, f"Content-Length: {len(body)}"])
    return f"{head}\r\n\r\n".encode() + body


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
