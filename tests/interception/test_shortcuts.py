"""What is told by its bytes alone is what reading it whole would have told."""

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from random import Random
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from interception import RolloutSession, ServingPolicy, Upstream
from interception.answer import AnswerReader
from interception.dialects import CHAT, MESSAGES, RESPONSES, Dialect
from interception.dialects.base import Phase, Stream
from interception.dialects.responses import ResponsesStream
from interception.growth import Growth, Request, _place
from interception.inbound import exactly, written
from interception.sse import Json, SseEvent, SseParser, sse
from interception.trace import Attempt, Trace
from interception.turn import Call, Exchange

SEPARATORS = [(",", ":"), (", ", ": ")]

JSON = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def body(messages: list[Any], separators: tuple[str, str] = SEPARATORS[0], **fields: Any) -> bytes:
    asked = {"model": "m", "messages": messages, "temperature": 0.5, **fields}
    return json.dumps(asked, separators=separators, ensure_ascii=False).encode()


class Reading:
    """A session's bodies, read one after another as the routes do."""

    def __init__(self, wanted: Mapping[str, Any] | None = None) -> None:
        self.trace = Trace("t")
        self.growth = Growth(self.trace)
        self.wanted = dict(wanted or {})

    def learn(self, raw: bytes) -> Request:
        came = json.loads(raw)
        asked = {**came, **self.wanted}
        sent = asked if self.wanted else None
        made = Request(self.trace.store(asked, "messages"), written(asked) if sent else raw, False, False, {})
        self.growth.learn(CHAT, self.wanted, raw, came, sent, made)
        return made

    def again(self, raw: bytes) -> Request | None:
        return self.growth.again(CHAT, self.wanted, raw)

    def recorded(self, request: Request) -> dict[str, Any]:
        return self.trace.begin_stored(dialect=CHAT.name, request=request.stored, streamed=False).request


class TestGrowingRequests:
    @pytest.mark.parametrize("separators", SEPARATORS)
    @pytest.mark.parametrize("wanted", [{}, {"model": "other", "top_p": 0.1}])
    def test_a_conversation_is_read_from_where_it_grew(self, separators: tuple[str, str], wanted: Json) -> None:
        reading = Reading(wanted)
        messages: list[Any] = [{"role": "system", "content": "be brief"}]
        reading.learn(body(messages, separators, tools=[{"name": "t"}]))
        for turn in range(60):
            messages = [*messages, {"role": "user", "content": f"é{turn}" * 100}, {"n": 2**70}]
            raw = body(messages, separators, tools=[{"name": "t"}])
            request = reading.again(raw)
            assert request is not None
            assert reading.recorded(request) == {**json.loads(raw), **wanted}
            assert json.loads(request.body) == {**json.loads(raw), **wanted}
            whole = reading.trace.store({**json.loads(raw), **wanted}, "messages")
            assert request.stored[:2] == whole[:2]  # nothing is kept twice

    def test_sub_agents_that_call_by_turns_are_all_known(self) -> None:
        reading = Reading()
        agents = [[{"role": "system", "content": name}] for name in "abc"]
        for messages in agents:
            reading.learn(body(messages))
        for _ in range(3):
            for messages in agents:
                messages.append({"role": "user", "content": "go on"})
                request = reading.again(body(messages))
                assert request is not None
                assert reading.recorded(request)["messages"] == messages

    def test_so_is_one_whose_last_message_changed(self) -> None:
        reading = Reading()
        messages: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
        reading.learn(body(messages))
        for changed in ({"role": "user", "content": "bye"}, {"big": 2**70}):
            raw = json.dumps({**json.loads(body([])), "messages": [*messages[:-1], changed]}, separators=(",", ":"))
            request = reading.again(raw.encode())
            assert request is not None
            assert reading.recorded(request) == json.loads(raw)

    @pytest.mark.parametrize(
        "other",
        [
            body(["changed", "two"]),
            body(["one"]),
            body(["one", "two"], temperature=1),
            body(["one", "two"])[:-1] + b',"messages":[]}',
            body(["one", "two"]).replace(b"],", b",],"),
            body(["one", "two"]).replace(b"],", b'],"messages":[{}],'),
        ],
        ids=[
            "an earlier message",
            "fewer messages",
            "another temperature",
            "a second list",
            "a comma too many",
            "a list in between",
        ],
    )
    def test_what_is_no_growth_is_read_whole(self, other: bytes) -> None:
        reading = Reading()
        reading.learn(body(["one", "two"]))
        assert reading.again(other) is None

    def test_a_list_that_is_there_twice_is_not_looked_for(self) -> None:
        reading = Reading()
        raw = b'{"messages":[{"a":1}],"messages":[{"a":1}]}'
        reading.learn(raw)
        assert reading.again(raw) is None

    @given(
        st.lists(JSON, min_size=1, max_size=4),
        st.dictionaries(st.text(max_size=3), JSON, max_size=2),
        st.dictionaries(st.text(max_size=3), JSON, max_size=2),
        st.sampled_from(SEPARATORS),
        st.booleans(),
    )
    @example(["a", "b" * 99], {"": ["a", "b" * 98]}, {}, SEPARATORS[1], False)  # begins alike
    @example([1e16, "é\x7f\n"], {"a": "/"}, {"b": 1e-7}, SEPARATORS[0], False)
    @settings(max_examples=50, deadline=None)
    def test_its_place_is_known_however_it_was_written(
        self, said: list[Any], before: Json, after: Json, separators: tuple[str, str], ascii: bool
    ) -> None:
        asked = {**before, "messages": said, **after}
        raw = json.dumps(asked, separators=separators, ensure_ascii=ascii).encode()
        place = _place(raw, exactly(raw), "messages")
        if place is None:
            assert raw.count(json.dumps(said, separators=separators, ensure_ascii=ascii).encode()) > 1
            return
        first, end, last = place
        assert raw[:first].rstrip().endswith(b"[")
        assert json.loads(raw[:first] + raw[end:]) == {**asked, "messages": []}
        assert json.loads(b"[%b]" % raw[first:end]) == said
        assert json.loads(raw[end - last : end]) == said[-1]

    def test_nor_is_one_that_grew_by_more_than_is_read_in_one_go(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("interception.growth.MUCH", 100)
        reading = Reading()
        reading.learn(body(["one"]))
        assert reading.again(body(["one", "x" * 200])) is None
        assert reading.again(body(["one", "x" * 20])) is not None

    @given(st.binary(max_size=40), st.integers(0, 120), st.integers(0, 12))
    @example(b',{"role":"user"}', 47, 0)
    def test_any_bytes_in_between_are_growth_as_the_whole_says_or_none(self, put_in: bytes, at: int, drop: int) -> None:
        reading = Reading()
        known = body(["one", {"role": "user"}])
        reading.learn(known)
        raw = known[:at] + put_in + known[at + drop :]
        request = reading.again(raw)
        if request is not None:
            assert reading.recorded(request) == json.loads(raw)


def chat(text: Any, **fields: Any) -> bytes:
    return sse({"id": "c", "model": "m", "choices": [{"index": 0, "delta": {"content": text}, **fields}]})


def messages(text: Any) -> bytes:
    delta = {"type": "text_delta", "text": text}
    return sse({"type": "content_block_delta", "index": 0, "delta": delta}, named=True)


def arguments(text: str) -> bytes:
    delta = {"type": "input_json_delta", "partial_json": text}
    return sse({"type": "content_block_delta", "index": 0, "delta": delta}, named=True)


def with_padding(text: str) -> bytes:
    """As OpenAI writes it."""
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
    return sse({"id": "c", "choices": [choice], "usage": None, "obfuscation": "x" * len(text)})


def with_blanks(text: str) -> bytes:
    """As Anthropic writes it."""
    return messages(text)[:-3] + b" " * len(text) + b"}\n\n"


def call(text: str) -> bytes:
    return sse({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}}]})


def part(text: str, *, first: bool = True, kind: str = "output_text") -> bytes:
    number: Json = {"sequence_number": len(text)}
    padding: Json = {"delta": text, "obfuscation": f"{text[:1]}y"}
    at = {"output_index": 0, "content_index": 0, "logprobs": []}
    fields = {**number, **at, **padding} if first else {**padding, **at, **number}
    return sse({"type": f"response.{kind}.delta", **fields}, named=True)


EVENTS: dict[str, tuple[Dialect, Callable[[str], bytes]]] = {
    "chat": (CHAT, chat),
    "chat with padding": (CHAT, with_padding),
    "chat's tool calls": (CHAT, call),
    "messages": (MESSAGES, messages),
    "messages with blanks": (MESSAGES, with_blanks),
    "messages' tool calls": (MESSAGES, arguments),
    "responses": (RESPONSES, part),
    "responses in another order": (RESPONSES, lambda text: part(text, first=False)),
    "responses' tool calls": (RESPONSES, lambda text: part(text, kind="function_call_arguments")),
}


def read(stream: Stream, raws: list[bytes], *, shortcut: bool, end: bytes = b"\n") -> int:
    """The number of events that were not read whole."""
    data = b"".join(raws)
    at = whole = 0
    while at < len(data):
        taken = stream.repeats(data, at) if shortcut and stream.phase is Phase.OPEN else 0
        if not taken:
            taken = data.index(2 * end, at) + 2 * len(end) - at
            stream.feed(SseEvent(data[at : at + taken]))
            whole += 1
        at += taken
    return len(raws) - whole


class TestRepeatingStreams:
    @pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
    @pytest.mark.parametrize("kind", EVENTS)
    def test_most_events_are_told_by_their_bytes(self, kind: str, end: bytes) -> None:
        dialect, event = EVENTS[kind]
        odd = ["}", '"}', "a", '{"k": "\\\\"}', "\\", '"', "", ",", '","', " ", "}}\n", "\x7f"]
        raws = [event(text).replace(b"\n", end) for text in [*(f" word {number} é\n" for number in range(20)), *odd]]
        for other in ([], [event("x").replace(b'"x"', b"null").replace(b"\n", end)], [b": k" + 2 * end]):
            at_once, one_by_one, whole = dialect.stream(), dialect.stream(), dialect.stream()
            events = raws[:25] + other + raws[25:]
            assert read(at_once, events, shortcut=True, end=end) >= len(raws) - 2  # the first shows how
            for raw in events:
                read(one_by_one, [raw], shortcut=True, end=end)
            read(whole, events, shortcut=False, end=end)
            assert at_once.response() == one_by_one.response() == whole.response()
            assert at_once.events == one_by_one.events == whole.events == len(events) - other.count(b": k" + 2 * end)
            numbers = {s.known()[1] for s in (at_once, one_by_one, whole) if isinstance(s, ResponsesStream)}
            assert len(numbers) == (dialect is RESPONSES)

    @pytest.mark.parametrize("kind", EVENTS)
    def test_what_only_looks_like_it_is_read_whole(self, kind: str) -> None:
        dialect, event = EVENTS[kind]
        like = [b'x","obfuscation":"y', b"x\\", b'","', b"x\ny", b'"}}', b"\\u12", b"\xff", b'x","delta":"y', b'"}  ,"']
        for odd in [*like, *(b"z" + text for text in like)]:
            stream, whole = dialect.stream(), dialect.stream()
            raws = [event(text) for text in "abcd"] + [event("???").replace(b"???", odd)] + [event("e"), event("f")]
            read(stream, raws, shortcut=True)
            read(whole, raws, shortcut=False)
            assert stream.response() == whole.response()
            assert (stream.events, stream.phase) == (whole.events, whole.phase)

    def test_each_event_has_what_stands_between_its_values_once(self) -> None:
        fields = {"type": "response.output_text.delta", "output_index": 0, "content_index": 0}
        event = sse({**fields, "delta": "a", "obfuscation": "y"})
        padding = b'","obfuscation":"y"'
        twice, without = event.replace(padding, b'","obfuscation":"x","obfuscation":"b"'), event.replace(padding, b'"')
        stream, whole = RESPONSES.stream(), RESPONSES.stream()
        raws = [event, event, twice, without.replace(b'"a"', b'"c"'), event]
        read(stream, raws, shortcut=True)
        read(whole, raws, shortcut=False)
        assert stream.response() == whole.response()

    def test_whatever_stands_between_the_values_the_answer_is_the_same(self) -> None:
        # By hand: of a hundred streams of hypothesis's hardly one is nearly right.
        random = Random(3)
        kinds = ["chat", "chat with padding", "messages with blanks", "responses", "responses in another order"]
        odd = [
            b'"',
            b'"',
            b",",
            b"{",
            b"}",
            b":",
            b"5",
            b"x",
            b" ",
            b"\\",
            b'"k"',
            b'{"k":5}',
            b'["a"]',
            b'"delta":"y"',
        ]
        for _ in range(1000):
            dialect, event = EVENTS[random.choice(kinds)]
            raw = event("T~")
            if random.random() < 0.5:
                raw = re.sub(rb'"sequence_number":2,|,"sequence_number":2', b"", raw)
            spans = [found.span() for found in re.finditer(rb"T~|Ty|xx|(?<=number.:)2|  (?=}\n)", raw)]
            start, end = spans[0][0], spans[-1][1]
            middle = raw[start:end]
            raws = [raw, raw, raw]
            for _ in range(random.randint(1, 3)):
                at = random.randrange(len(middle) + 1)
                dropped = random.choice([0, 0, 1, 2, len(middle) - 4])
                put_in = b"".join(random.choices([*odd, middle[2:-2], middle[2:-2]], k=random.randint(0, 3)))
                raws.insert(2, raw[:start] + middle[:at] + put_in + middle[at + max(dropped, 0) :] + raw[end:])
            stream, whole = dialect.stream(), dialect.stream()
            read(stream, raws, shortcut=True)
            read(whole, raws, shortcut=False)
            assert (stream.response(), stream.events) == (whole.response(), whole.events), raws

    def test_nor_is_a_brace_missing_before_blanks(self) -> None:
        for kept in (b'"', b'"]', b'"}"', b'"}}', b"}"):
            stream, whole = MESSAGES.stream(), MESSAGES.stream()
            raws = [with_blanks(text) for text in "abc"]
            raws[2:2] = [with_blanks("de").replace(b'"} ', kept + b" "), with_blanks("f")]
            read(stream, raws, shortcut=True)
            read(whole, raws, shortcut=False)
            assert stream.response() == whole.response()

    @pytest.mark.parametrize(
        ("fields", "told"),
        [
            ({}, 8),
            ({"stop_reason": None, "matched": {"a": [1]}}, 8),
            ({"token_ids": [5]}, 0),
            ({"logprobs": {"content": [{"logprob": -1}]}}, 0),
            ({"logprobs": {}}, 0),
            ({"message": {"role": "user"}}, 8),
        ],
        ids=["nothing", "what is put", "token ids", "logprobs", "empty logprobs", "a message"],
    )
    def test_a_choice_with_more_than_its_text_to_be_added_is_read_whole(self, fields: Json, told: int) -> None:
        stream, whole = CHAT.stream(), CHAT.stream()
        raws = [chat("x", **fields) for _ in range(9)] + [chat("y", logprobs=None, token_ids=None)]
        assert read(stream, raws, shortcut=True) == told
        read(whole, raws, shortcut=False)
        assert stream.response() == whole.response()

    def test_the_number_of_an_event_is_no_other_number_in_it(self) -> None:
        stream, whole = RESPONSES.stream(), RESPONSES.stream()
        fields = {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "sequence_number": 5}
        raws = [sse({**fields, "delta": "x", "obfuscation": number}) for number in (100, 200, 300)]
        read(stream, raws, shortcut=True)
        read(whole, raws, shortcut=False)
        assert isinstance(stream, ResponsesStream)
        assert isinstance(whole, ResponsesStream)
        assert stream.known()[1] == whole.known()[1] == 6

    def test_padding_is_no_part_of_the_answer(self) -> None:
        stream = CHAT.stream()
        read(stream, [with_padding(text) for text in "abc"], shortcut=True)
        assert "obfuscation" not in (stream.response() or {"obfuscation": ""})

    def test_quotes_in_a_long_stream_are_no_reason_to_read_it_whole(self) -> None:
        stream = CHAT.stream()
        assert read(stream, [chat(text) for text in ["a", '"', None, "b"] * 50], shortcut=True) == 99

    @settings(max_examples=40)
    @given(
        st.lists(
            st.one_of(
                st.text().map(chat),
                st.text().map(lambda text: chat(text, finish_reason=None)),
                st.binary(max_size=12).map(lambda text: chat("?").replace(b'"?"', text)),
                st.binary(max_size=12).map(lambda text: chat("?").replace(b"?", text.replace(b"\n", b""))),
                st.sampled_from(
                    [
                        chat(None),
                        chat(["x"]),
                        chat("stop", finish_reason="stop"),
                        chat('","'),
                        chat("?").replace(b"?", b'","'),
                        chat("?").replace(b"?", b"\\"),
                        chat("x").replace(b":", b": "),
                        chat("x", logprobs={"content": [1]}),
                        sse({"choices": [{"delta": {"content": "a", "x": {"content": "a"}}}]}),
                        b": k\n\n",
                        b"data: [DONE]\n\n",
                    ]
                ),
            ),
            max_size=12,
        )
    )
    def test_whatever_comes_the_answer_is_the_same(self, raws: list[bytes]) -> None:
        raws = [raw for raw in raws if raw.count(b"\n") == 2]
        stream, whole = CHAT.stream(), CHAT.stream()
        read(stream, raws, shortcut=True)
        read(whole, raws, shortcut=False)
        assert (stream.phase, stream.events, stream.error()) == (whole.phase, whole.events, whole.error())
        assert stream.response() == whole.response()

    @pytest.mark.parametrize("dialect_and_event", [(CHAT, chat), (MESSAGES, messages)], ids=["chat", "messages"])
    def test_half_a_surrogate_pair_is_a_text_like_others(self, dialect_and_event: tuple[Dialect, Any]) -> None:
        dialect, event = dialect_and_event
        stream, whole = dialect.stream(), dialect.stream()
        raws = [event("?").replace(b"?", text) for text in (b"\\ud83d", b"\\ude00", b"x", b"\\ud83d", b"y")]
        read(stream, raws, shortcut=True)
        read(whole, raws, shortcut=False)
        assert stream.response() == whole.response()
        assert json.dumps("\ud83d\ude00x\ud83dy") in json.dumps(stream.response())


# -- whole streams, as readers and the record have them ------------------------------------------------


def chunk(delta: Json, index: int = 0, finish: str | None = None, **fields: Any) -> Json:
    return {"id": "c", "choices": [{"index": index, "delta": delta, "finish_reason": finish}], **fields}


def block(kind: str, name: str, value: object, index: int = 0) -> Json:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, name: value}}


NUMBER, RAW = 7190, "~raw~"
"""What `as_it_came` puts other bytes for."""
NUMBERS = [b"0", b"12", b"01", b"1e5", b"1.0", b"-1", b"null", b"true", b"", b"99999999999999999999", b"1,2", b" 5"]
NUMBER_BYTES = st.one_of(st.integers(0, 99).map(lambda number: b"%d" % number), st.sampled_from(NUMBERS))
RAWS = [
    b"\\ud83d",
    b"\\ude00",
    b"\\u0022",
    b"\\/",
    b"\\x",
    b"\xff",
    b"\x01",
    b'x","delta":"y',
    b'x","content":"y',
    b'"}  ',
]
TEXT = st.one_of(
    st.text(max_size=6),
    st.sampled_from(["a", "\\", '"', '\\"', "\n", "?!", '","', "\ud83d", "\ude00", "é☃", "\u2028\x85", "\x7f"]),
    st.just(RAW),
    st.sampled_from(['data: {"id":"c","choices":[{"index":0,"delta":{"content":"', '"},"finish_reason":null}]}', "}"]),
)
CHUNKS: list[Callable[[str], Json]] = [
    lambda text: chunk({"content": text}),
    lambda text: chunk({"content": text}, 1),
    lambda text: chunk({"role": "assistant", "content": text}),
    lambda text: chunk({"reasoning_content": text, "content": None}),
    lambda text: chunk({"content": text, "refusal": text}),
    lambda text: chunk({"content": text}, obfuscation="x"),
    lambda text: chunk({"content": "x"}, obfuscation=text),
    lambda text: chunk({"content": text}, usage={"prompt_tokens": 1, "completion_tokens": len(text)}),
    lambda text: chunk({"content": text}, usage={"prompt_tokens": 1}, service_tier=None),
    lambda text: {"choices": [{"index": True, "delta": {"content": text}}]},
    lambda text: {"choices": [{"delta": {"content": text, "tool_calls": []}, "logprobs": None, "token_ids": None}]},
    lambda text: chunk({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": text}}]}),
    lambda text: {"choices": [{"index": 0, "delta": {"content": text}, "logprobs": {"content": [text]}}]},
    lambda text: {"choices": [{"index": 0, "delta": {"content": text, "x": {"content": text}}}]},
    lambda text: {"choices": [{"index": 0, "delta": {"content": text}}, {"index": 1, "delta": {"content": text}}]},
    lambda text: {"content": text, "choices": [{"index": 0, "delta": {"content": text}}]},
    lambda text: {"choices": [{"index": 0, "message": {"content": text}}]},
]
CHUNKS_ONCE: list[Json] = [
    chunk({}),
    chunk({"content": ["x"]}),
    chunk({"content": None}),
    chunk({}, 0, "stop"),
    chunk({"content": "end"}, 1, "length"),
    {"choices": [], "usage": {"prompt_tokens": 1}},
    {"error": {"message": "no", "code": 429}},
    {"choices": None},
]
BLOCKS: list[Callable[[str], Json]] = [
    lambda text: block("text_delta", "text", text),
    lambda text: block("text_delta", "text", text, 1),
    lambda text: block("thinking_delta", "thinking", text),
    lambda text: block("text_delta", "thinking", text),
    lambda text: block("input_json_delta", "partial_json", text),
    lambda text: block("signature_delta", "signature", text),
]
BLOCKS_ONCE: list[Json] = [
    {"type": "message_start", "message": {"id": "m", "content": [], "usage": {"input_tokens": 1}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ["x"]}},
    {"type": "content_block_stop", "index": 0},
    {"type": "ping"},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
    {"type": "message_stop"},
    {"type": "error", "error": {"type": "overloaded_error", "message": "no"}},
]
PARTS: list[Callable[[str], Json]] = [
    lambda text: {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": text},
    lambda text: {"type": "response.output_text.delta", "output_index": 1, "delta": text, "obfuscation": "x"},
    lambda text: {"type": "response.output_text.delta", "sequence_number": NUMBER, "delta": text, "obfuscation": text},
    lambda text: {"type": "response.output_text.delta", "obfuscation": NUMBER, "delta": text, "sequence_number": 1},
]
PARTS_ONCE: list[Json] = [
    {"type": "response.created", "response": {"id": "r", "output": []}},
    {"type": "response.completed", "response": {"id": "r", "status": "completed", "output": []}},
    {"type": "response.failed", "response": {"error": {"message": "no"}}},
]


def as_event(payload: Json, style: int) -> bytes:
    """An event as one of many servers would write it."""
    separators = SEPARATORS[style & 1]
    data = json.dumps(payload, separators=separators, ensure_ascii=bool(style & 2)).encode(errors="replace")
    name = f"event: {payload['type']}\n".encode() if "type" in payload and not style & 4 else b""
    field = b"data:" if style & 8 else b"data: "
    lines = data.replace(b",", b",\n" + field, 1) if style & 48 == 16 else data
    end = b"\r\n" if style & 48 == 32 else b"\r" if style & 240 == 240 else b"\n"
    comment = b": k\n" if style & 192 == 64 else b""
    return (comment + name + field + lines + b"\n\n").replace(b"\n", end)


@st.composite
def as_it_came(draw: st.DrawFn, event: bytes) -> bytes:
    """An event with what no writer of JSON makes of a text or a number, and with blanks at its end."""
    event = event.replace(RAW.encode(), draw(st.sampled_from(RAWS))).replace(b"%d" % NUMBER, draw(NUMBER_BYTES))
    return event.replace(b'"}}', b'"}' + b" " * draw(st.integers(0, 2)) + b"}")


KINDS = [(CHAT, CHUNKS, CHUNKS_ONCE), (MESSAGES, BLOCKS, BLOCKS_ONCE), (RESPONSES, PARTS, PARTS_ONCE)]
ODD = [b": k\n\n", b"\n", b"id: 1\n\n", b"data: [DONE]\n\n", b"data\n\n", b"data: \xff\n\n", b"data: {"]


@st.composite
def written_streams(draw: st.DrawFn) -> tuple[Dialect, bytes]:
    """Stretches of events that differ in their text alone, and others between them."""
    dialect, repeated, once = draw(st.sampled_from([KINDS[0], *KINDS]))
    events: list[bytes] = []
    for _ in range(draw(st.integers(1, 4))):
        style = draw(st.sampled_from([0, 0, 2, None]))
        style = draw(st.integers(0, 255)) if style is None else style
        make = draw(st.sampled_from([repeated[0], *repeated]))
        events += [draw(as_it_came(as_event(make(text), style))) for text in draw(st.lists(TEXT, max_size=5))]
        if draw(st.booleans()):
            events.append(as_event(draw(st.sampled_from(once)), style))
        if not draw(st.integers(0, 4)):
            events.append(draw(st.sampled_from(ODD)))
    end = draw(st.sampled_from([b"", b"data: [DONE]\n\n"]))
    return dialect, b"".join([*events, end])


class Pieces:
    """An upstream's answer that comes in pieces."""

    status = 200
    headers: Mapping[str, str] = MappingProxyType({"Content-Type": "text/event-stream"})

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = [*filter(None, pieces)]
        self.content: Any = self

    async def readany(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""

    def at_eof(self) -> bool:
        return not self._pieces

    async def read(self) -> bytes:
        return b"".join(self._pieces)


async def told_and_recorded(dialect: Dialect, pieces: list[bytes], *, n: int, withhold: bool) -> Any:
    """What a reader of the stream gets, and what the trace has."""
    session = RolloutSession(Upstream(base_url="http://127.0.0.1:1/v1"))
    trace = Trace("t")
    turn = trace.begin(dialect=dialect.name, request={}, messages_field="messages", streamed=True)
    call = Call(dialect, turn, "/", b"", {"n": n}, b"", True, withhold)
    attempt = Attempt("a")
    turn.attempts.append(attempt)

    async def work(exchange: Exchange) -> None:
        await AnswerReader(session, call, exchange, ServingPolicy(hold=30)).read(Pieces(pieces))

    call.exchange = exchange = Exchange(attempt, work)
    await exchange.wait(lambda: exchange.ended)
    failure = exchange.failure and (exchange.failure.status, exchange.failure.message, exchange.failure.relayed)
    again = Trace.from_jsonl(trace.to_jsonl()).turns[0]
    assert again == turn
    record = (json.dumps(again.response), again.usage, again.finish_reason, again.raw, again.complete)
    return exchange.body, exchange.terminal is not None, failure, record


@settings(max_examples=150, deadline=None)
@given(written_streams(), st.lists(st.integers(0, 900), max_size=6), st.sampled_from([1, 1, 2]), st.booleans())
def test_a_stream_is_told_and_recorded_as_one_that_is_read_event_by_event(
    stream: tuple[Dialect, bytes], cuts: list[int], n: int, withhold: bool
) -> None:
    dialect, raw = stream
    at = [0, *sorted(cut % (len(raw) + 1) for cut in cuts), len(raw)]
    pieces = [raw[start:end] for start, end in pairwise(at)]
    fast = asyncio.run(told_and_recorded(dialect, pieces, n=n, withhold=withhold))
    with pytest.MonkeyPatch.context() as naive:
        naive.setattr(Stream, "repeats", lambda self, data, at=0: 0)
        naive.setattr(SseParser, "_plain", lambda self, chunk: False)
        slow = asyncio.run(told_and_recorded(dialect, pieces, n=n, withhold=withhold))
    assert fast == slow
    assert fast[2] is None or fast[2][1] != "the interception server failed; see its log"
