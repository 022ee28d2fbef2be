"""What is told by its bytes alone is what reading it whole would have told."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from interception.dialects import CHAT, MESSAGES, Dialect
from interception.dialects.base import Phase, Stream
from interception.growth import Growth, Request
from interception.inbound import written
from interception.sse import Json, SseEvent, sse
from interception.trace import Trace

SEPARATORS = [(",", ":"), (", ", ": ")]


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


def read(stream: Stream, raws: list[bytes], *, shortcut: bool) -> int:
    """The number of events that were not read whole."""
    events = [SseEvent(raw) for raw in raws]
    repeated = 0
    while events:
        taken = stream.repeats(events) if shortcut and stream.phase is Phase.OPEN else 0
        repeated += taken
        if not taken:
            stream.feed(events[0])
        events = events[taken or 1 :]
    return repeated


class TestRepeatingStreams:
    @pytest.mark.parametrize(("dialect", "event"), [(CHAT, chat), (MESSAGES, messages)], ids=["chat", "messages"])
    def test_most_events_are_told_by_their_bytes(self, dialect: Dialect, event: Any) -> None:
        stream, whole = dialect.stream(), dialect.stream()
        raws = [event(f" word {number} é\n") for number in range(50)]
        assert read(stream, raws, shortcut=True) == 49  # the first shows how
        read(whole, raws, shortcut=False)
        assert stream.response() == whole.response()
        assert stream.events == whole.events == 50

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
