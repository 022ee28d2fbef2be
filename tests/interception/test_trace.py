"""The record of a rollout: exact, linear in the conversation, and the same after a file."""

import functools
import gc
import inspect
import json
import math
import sys
import time
import tracemalloc
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from interception.interning import Bodies
from interception.trace import RAW_CAP, Attempt, Trace, Turn
from interception.usage import Usage

SAMPLE = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}

LONG_STRINGS = ["x" * 300, 'quote " and \\ ' * 40, "é☃😀\u2028\x00\n" * 60, "{" * 256, '{"\\u0000":[0]}' * 30]
TEXTS = st.text(max_size=12) | st.sampled_from([*LONG_STRINGS, "\x00", "\x00\x00a", "\ud800", ""])
NUMBERS = st.integers() | st.integers(2**63, 2**70) | st.floats() | st.sampled_from([-0.0, 1e16, 1.0, 1, 10**400])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
REQUESTS = st.dictionaries(TEXTS | st.just("messages"), VALUES, max_size=6)
CONVERSATIONS = st.lists(st.lists(st.sampled_from([{"n": i} for i in range(40)]), max_size=80), max_size=8)


def text(value: Any) -> str:
    # Unlike ==: NaN equals itself, 1 is neither 1.0 nor True, and the order of keys counts.
    return json.dumps(value)


def begin(trace: Trace, request: dict[str, Any] = SAMPLE, field: str = "messages") -> Turn:
    return trace.begin(dialect="chat", request=request, messages_field=field, streamed=False)


def message(role: str, number: int, size: int = 800) -> dict[str, Any]:
    content = f"{role} {number} " + "".join(
        f"{(number * 7919 + i) * 2654435761 % 2**32:08x} " for i in range(size // 9)
    )
    return {"role": role, "content": content}


def answer(said: dict[str, Any]) -> dict[str, Any]:
    return {"id": "chatcmpl", "choices": [{"index": 0, "message": said, "finish_reason": "stop"}]}


def tools(size: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": message("tool", i, 1000)} for i in range(size // 1000)]


def unique_bytes(*parts: Iterable[Any]) -> int:
    return sum(map(len, {json.dumps(value, separators=(",", ":")) for values in parts for value in values}))


def converse(trace: Trace, turns: int, size: int = 800, **fields: Any) -> list[dict[str, Any]]:
    """`turns` turns of an agent that resends everything; its messages."""
    messages: list[dict[str, Any]] = []
    for number in range(turns):
        messages.append(message("user", number, size))
        turn = begin(trace, {"model": "m", "messages": messages, **fields})
        said = message("assistant", number, size)
        turn.record(response=answer(said), usage=Usage(1, 1, 2), finish_reason="stop")
        messages.append(said)
    return messages


def reread(trace: Trace) -> Trace:
    copy = Trace.from_jsonl(trace.to_jsonl())
    assert copy.turns == trace.turns
    assert (copy.id, copy.sealed, copy.stragglers, copy.warnings) == (trace.id, trace.sealed, trace.stragglers, [])
    return copy


# -- exact -------------------------------------------------------------------------------------


@given(st.lists(REQUESTS, max_size=4), st.none() | st.dictionaries(TEXTS, VALUES, max_size=4))
@settings(deadline=None)
def test_bodies_come_back_as_they_were(requests: list[dict[str, Any]], response: dict[str, Any] | None) -> None:
    trace = Trace("t")
    for request in requests:
        begin(trace, request).record(response=response, usage=None, finish_reason=None)
    for turn, request in zip(trace.turns, requests, strict=True):
        assert text(turn.request) == text(request)
        assert text(turn.response) == text(response)
        assert text(turn.to_dict()["request"]) == text(request)
    for turn, request in zip(reread(trace).turns, requests, strict=True):
        assert text(turn.request) == text(request)
        assert text(turn.response) == text(response)


@given(CONVERSATIONS)
@settings(deadline=None)
def test_any_histories_come_back_as_they_were(conversations: list[list[dict[str, Any]]]) -> None:
    trace = Trace("t")
    for messages in conversations:
        begin(trace, {"messages": messages, "tools": messages[::-1]})
    assert [turn.request["messages"] for turn in reread(trace).turns] == conversations


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"messages": []},
        {"messages": None},
        {"input": "a string, as Responses allows", "messages": "m" * 300},
        {"b": 1, "messages": [{"z": 1, "a": 2}], "a": {"z": 1, "a": 2}},
        {"messages": [{"content": None}, {"content": math.nan}, {"content": math.inf}, {"content": -math.inf}]},
        {"messages": [{"n": 1}, {"n": 1.0}, {"n": True}, {"n": "1"}, {"n": -0.0}, {"n": 2**64}, {"n": -(2**64)}]},
        {"messages": ["text", ["a"], 5, None]},
        {"messages": [5, 6, "text"]},
        {"prompt_token_ids": list(range(5000)), "stop": ["\n"], "logit_bias": {"50256": -100}},
        {
            "\x00": [7, 8],
            "messages": [{"\x00": [0]}, {"\x00": []}, {"\x00\x00": [0]}, [{"\x00": 1}]],
            "x": {"\x00": []},
        },
        {"a": {"\x00": []}, "messages": [{"role": "user"}], "b": {"\x00": []}},
        {"messages": [{"k" * 400: "v" * 400, "\\" * 300: '"' * 300}], "k" * 400: "v" * 400},
        {"messages": [{"content": "\ud800 half a pair"}, {"content": "\ud800" * 400}]},
        {"messages": [{"a": "é" * 400}, {"b": ["é" * 400, "\ud800", math.nan, 1e16]}], "x": math.nan, "y": 1e16},
        {"messages": [{"content": "line\u2028separator\x85\x0b\x1c"}]},
    ],
)
def test_odd_requests(request_: dict[str, Any]) -> None:
    trace = Trace("t")
    begin(trace)
    turn = begin(trace, request_)
    assert text(turn.request) == text(request_)
    assert text(reread(trace).turns[1].request) == text(request_)
    assert trace.turns[0].request == SAMPLE


PIECES = st.lists(
    st.sampled_from(
        ["a" * 300, "b" * 41, "é" * 90, "☃" * 60, "\x01" * 43, '"', "\\", '\\"', "\n", '","', '":"', "{", "\0", ""]
    ),
    max_size=5,
).map("".join)


class ByText(Bodies):
    """Finds the long strings of all values in their texts, as `Bodies` does where it is not sure to find them in the
    values themselves."""

    def put(self, value: Any) -> int:
        return self._put_text(self._dump(value))


def entries(bodies: Bodies) -> list[bytes]:
    return [bodies.kept(number) for number in range(len(bodies))]


@given(
    st.lists(
        st.recursive(
            PIECES | VALUES,
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PIECES, inner, max_size=3),
            max_leaves=6,
        ),
        min_size=1,
        max_size=4,
    )
)
@example(["x" * 253, "x" * 254, {"a": "é" * 126, "b": "é" * 127, "c": ["\x01" * 42], "d": {"e": "\x01" * 43}}])
@settings(max_examples=50, deadline=None)
def test_long_strings_are_found_in_values_as_in_their_texts(values: list[Any]) -> None:
    bodies, by_text = Bodies(), ByText()
    for body in (bodies, by_text):
        body.put_request({"messages": values, "field": values[0]}, "messages")
        body.put_request({"messages": values[1:], "field": values}, "messages")
    assert entries(bodies) == entries(by_text)


def test_numbers_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[Any] = []
    outline = Bodies._outline

    def counted(bodies: Bodies, value: Any, *others: Any) -> Any:
        looked_at.append(value)
        return outline(bodies, value, *others)

    monkeypatch.setattr(Bodies, "_outline", counted)
    Bodies().put({"a": [0.5] * 60, "b": 1.5})
    assert len(looked_at) == 2


class Text(str):
    """What a hook may put into a request."""


@pytest.mark.parametrize(
    "odd",
    [
        {"\0": "x" * 300},
        {"\0\0": {}},
        {"a": {"\0": [0]}},
        {"n": math.nan},
        {"n": [[None, -math.inf]]},
        {"n": [1, math.nan, "x" * 300]},
        {"n": 2**64},
        {"half": "\ud800" * 300},
        {"half": ["x" * 300, "\ud800"]},
        {"y" * 300: "y" * 300},
        {"tuple": ("x" * 300, None)},
        {"text": Text("x" * 300)},
        {1: "x" * 300},
        {"deep": functools.reduce(lambda inner, _: {"a": inner, "b": "x" * 300}, range(300), "x" * 300)},
    ],
    ids=lambda odd: repr(odd)[:30],
)
def test_so_they_are_beside_what_json_has_in_no_other_way(odd: dict[Any, Any]) -> None:
    message = {"role": "user", "content": 'say "yes" ' * 30}
    values = [message, message | odd, odd, [message, odd], {"content": None, "inner": [message, odd]}]
    bodies, by_text = Bodies(), ByText()
    for body in (bodies, by_text):
        body.put_request({"messages": values, "field": values[1]}, "messages")
    assert entries(bodies) == entries(by_text)
    assert text(bodies.value(bodies.put(values))) == text(values)
    assert message == {"role": "user", "content": 'say "yes" ' * 30}


def test_deep_nesting_is_kept_or_refused() -> None:
    def nested(levels: int) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for _ in range(levels):
            value = {"a": value}
        return {"messages": [value]}

    trace = Trace("t")
    assert text(begin(trace, nested(500)).request) == text(nested(500))
    with pytest.raises(ValueError, match="nested too deeply"):
        begin(trace, nested(200_000))
    assert len(reread(trace).turns) == 1


def test_the_request_is_a_copy() -> None:
    trace = Trace("t")
    request = {"messages": [{"content": "before"}]}
    turn = begin(trace, request)
    request["messages"][0]["content"] = "after"
    turn.request["messages"].clear()
    assert turn.request == {"messages": [{"content": "before"}]}


def test_a_body_as_bytes() -> None:
    turn = begin(Trace("t"))
    assert (turn.response, turn.raw) == (None, None)
    for body, response, raw in [
        (b'{"a": [NaN, 1]}', {"a": [math.nan, 1]}, None),
        (b"[1]", None, b"[1]"),
        (
            b"<html>502 \xff\xe9</html>" + b"x" * 2 * RAW_CAP,
            None,
            (b"<html>502 \xff\xe9</html>" + b"x" * RAW_CAP)[:RAW_CAP],
        ),
        (b"", None, None),
        (b'{"id": 1}', {"id": 1}, None),
    ]:
        turn.record(response=body, usage=None, finish_reason=None)
        assert (text(turn.response), turn.raw) == (text(response), raw)
        json.dumps(turn.to_dict())


# -- linear ------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [80, 400])
def test_a_growing_conversation_is_kept_once(turns: int) -> None:
    trace, offered = Trace("t"), tools(30_000)
    system = "You are an agent. " * 200
    messages = converse(trace, turns, tools=offered, instructions=system, temperature=0.5, metadata={"user": "u" * 50})
    # An assistant's text is in a response and in the requests that follow it, and kept once all the same.
    assert trace.stored_bytes() <= 1.3 * unique_bytes(messages, offered, [system])
    assert len(trace.to_jsonl()) <= 1.6 * unique_bytes(messages, offered, [system])
    assert trace.turns[-1].request["messages"] == messages[:-1]
    assert trace.turns[0].request["messages"] == messages[:1]


def test_references_are_linear_too() -> None:
    def references(turns: int) -> int:
        trace = Trace("t")
        messages = [{"n": i} for i in range(2 * turns)]
        for turn in range(turns):
            begin(trace, {"messages": messages[: 2 * turn + 1]})
        return trace.stored_bytes() - unique_bytes(messages)

    # A list of references each would be 400 x 400 of them.
    assert references(400) <= 300 * 400
    assert references(400) <= 2.8 * references(200)  # four times, were they quadratic


def changed_head(turn: int, messages: list[Any]) -> list[Any]:
    return [{"role": "system", "content": f"It is {turn} o'clock."}, *messages[: turn + 1]]


def sliding_window(turn: int, messages: list[Any]) -> list[Any]:
    return messages[max(0, turn - 150) : turn + 1]


def compacted(turn: int, messages: list[Any]) -> list[Any]:
    start = turn // 100 * 100
    return [{"role": "user", "content": f"Summary up to {start}."}, *messages[start : turn + 1]]


def sub_agents(turn: int, messages: list[Any]) -> list[Any]:
    return messages[turn % 3 : turn + 1 : 3]


def moving_cache_marker(turn: int, messages: list[Any]) -> list[Any]:
    return [*messages[:turn], {**messages[turn], "cache_control": {"type": "ephemeral"}}]


def same_again(turn: int, messages: list[Any]) -> list[Any]:
    return messages


@pytest.mark.parametrize(
    "history", [changed_head, sliding_window, compacted, sub_agents, moving_cache_marker, same_again]
)
def test_other_histories_are_kept_once(history: Any) -> None:
    trace, messages = Trace("t"), [message("user", i, 1500) for i in range(300)]
    for turn in range(300):
        begin(trace, {"messages": history(turn, messages)})
    assert trace.stored_bytes() <= 1.3 * unique_bytes(messages)
    for turn in (0, 1, 199, 299):
        assert trace.turns[turn].request["messages"] == history(turn, messages)


def test_the_last_of_5000_turns_is_rebuilt_without_recursion() -> None:
    trace, messages = Trace("t"), [{"n": i} for i in range(5000)]
    for turn in range(5000):
        # Each turn adds a message to one of 50 agents' histories: a single one takes a minute to offer.
        begin(trace, {"messages": messages[turn % 50 : turn + 1 : 50]})
    begin(trace, {"messages": messages})
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 60)
    try:
        rebuilt = [trace.turns[i].request["messages"] for i in (-1, -2, 0)]
    finally:
        sys.setrecursionlimit(limit)
    assert rebuilt == [messages, messages[49::50], messages[:1]]
    assert Trace.from_jsonl(trace.to_jsonl()).turns[-1].request["messages"] == messages


def test_memory_is_linear() -> None:
    messages = [message("user", i, 2000) for i in range(200)]

    def used(turns: int) -> int:
        trace, offered = Trace("t"), tools(30_000)
        tracemalloc.start()
        try:
            for turn in range(turns):
                begin(trace, {"messages": messages[: turn + 1], "tools": offered}).attempts.append(Attempt("c" * 32))
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    used(5)  # what is loaded on first use
    at_100, at_200 = used(100), used(200)
    assert at_200 <= 2 * unique_bytes(messages, tools(30_000))
    assert at_200 <= 2.2 * at_100


def test_a_short_message_takes_about_its_own_bytes() -> None:
    # orjson's texts, kept as they are, take 4 kB each.
    def used(messages: int) -> int:
        tracemalloc.start()
        try:
            trace = Trace("t")
            trace.store(
                {"messages": [{"role": "user", "content": f"go on {number}"} for number in range(messages)]}, "messages"
            )
            for number in range(messages):
                begin(trace).record(response={"ids": [number] * 80}, usage=None, finish_reason=None)
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    used(5)
    assert (used(600) - used(100)) / 500 < 1500


def test_so_does_a_long_one() -> None:
    # orjson's text of a string, kept as it is, takes eight times as much.
    said = [{"content": f"{number} " * 20_000} for number in range(100, 110)]
    tracemalloc.start()
    try:
        trace = Trace("t")
        trace.store({"messages": said}, "messages")
        assert tracemalloc.get_traced_memory()[0] < 1.1 * trace.stored_bytes()
    finally:
        tracemalloc.stop()


def test_the_garbage_collector_sees_turns_only() -> None:
    trace = Trace("t")
    gc.collect()
    before = len(gc.get_objects())
    converse(trace, 100)
    gc.collect()
    assert len(gc.get_objects()) - before <= 100 * 5  # the turn, its list of attempts, ...; no message, no entry


# -- attempts ----------------------------------------------------------------------------------


def test_every_attempt_is_kept_and_the_turn_points_to_the_one_that_won() -> None:
    turn = begin(Trace("t"))
    assert (turn.winner, turn.status, turn.error, turn.complete) == (None, None, None, False)
    failed = Attempt("1", status=503, error="overloaded", started=1.0, first_byte=1.5, ended=2.0)
    won = Attempt("2", started=3.0)
    late = Attempt("3", status=200, error="cut", started=5.0, ended=6.0)
    turn.attempts.append(failed)
    assert (turn.winner, turn.status, turn.error, turn.complete) == (None, 503, "overloaded", False)
    turn.attempts.append(won)
    assert (turn.winner, turn.status, turn.error, turn.complete) == (None, None, None, False)
    won.status, won.first_byte = 200, 3.5
    assert not turn.complete  # not whole yet
    won.ended = 4.0
    turn.attempts.append(late)
    assert (turn.winner, turn.status, turn.error, turn.complete) == (won, 200, None, True)
    assert turn.to_dict()["winner"] == 1
    assert [attempt["error"] for attempt in turn.to_dict()["attempts"]] == ["overloaded", None, "cut"]


@pytest.mark.parametrize("status", [None, 199, 301, 400, 500])
def test_no_2xx_no_winner(status: int | None) -> None:
    turn = begin(Trace("t"))
    turn.attempts.append(Attempt("1", status=status, ended=1.0))
    assert not turn.complete


def test_to_dict_stands_alone() -> None:
    before = time.time()
    turn = begin(Trace("t"))
    turn.attempts.append(Attempt("1", status=200, started=1.0, first_byte=2.0, ended=3.0))
    turn.record(response={"id": "r"}, usage=Usage(3, None, None), finish_reason="stop")
    turn.delivered = True
    assert turn.queued is not None
    assert before <= turn.queued <= time.time()
    assert json.loads(json.dumps(turn.to_dict())) == {
        "id": turn.id,
        "dialect": "chat",
        "streamed": False,
        "queued": turn.queued,
        "request": SAMPLE,
        "response": {"id": "r"},
        "raw": None,
        "usage": {
            "input_tokens": 3,
            "output_tokens": None,
            "total_tokens": None,
            "cached_input_tokens": None,
            "reasoning_tokens": None,
        },
        "finish_reason": "stop",
        "delivered": True,
        "complete": True,
        "winner": 0,
        "attempts": [
            {"call_id": "1", "status": 200, "error": None, "started": 1.0, "first_byte": 2.0, "ended": 3.0},
        ],
    }


# -- sealed ------------------------------------------------------------------------------------


def test_a_sealed_trace_does_not_change() -> None:
    trace = Trace("t")
    turn = begin(trace)
    assert not trace.sealed
    trace.seal()
    trace.seal()
    assert trace.sealed
    before = trace.to_jsonl()
    with pytest.raises(RuntimeError, match="sealed"):
        begin(trace)
    with pytest.raises(RuntimeError, match="sealed"):
        turn.record(response={}, usage=None, finish_reason=None)
    turn.delivered = True  # a reader that was just being served
    assert trace.to_jsonl() == before
    trace.stragglers += 1
    assert trace.to_jsonl().partition("\n")[2] == before.partition("\n")[2]
    assert reread(trace).stragglers == 1
    with pytest.raises(RuntimeError, match="sealed"):
        begin(reread(trace))


def test_reprs_are_short_and_tell_nothing_of_bodies() -> None:
    trace = Trace("t")
    turn = begin(trace, {"messages": [{"content": "private " * 99}]})
    turn.record(response={"text": "private " * 99}, usage=None, finish_reason=None)
    turn.attempts.append(Attempt("1", error="e" * 999))
    for shown in (repr(trace), repr(turn)):
        assert "private" not in shown
        assert len(shown) < 200


def test_equality() -> None:
    trace = Trace("t")
    turn, other = begin(trace), begin(trace)
    [copy, _] = reread(trace).turns
    assert copy == turn != other
    assert turn != "turn"
    assert len({turn, copy, other}) == 2
    copy.attempts.append(Attempt("1"))
    assert copy != turn


# -- as a file ---------------------------------------------------------------------------------


def recorded() -> Trace:
    trace = Trace("t")
    converse(trace, 12, tools=tools(3000))
    turn = begin(trace, {"messages": [{"content": "sub-agent"}]})
    turn.attempts += [Attempt("1", 502, "bad gateway", 1.0, 2.0, 3.0), Attempt("2", 502, "again \ud800")]
    turn.record(response=b"<html>\xff\x00\xe9</html>", usage=None, finish_reason=None)
    turn.queued, turn.delivered = None, True
    open_ = begin(trace, {"messages": [{"content": math.nan, "n": 2**80}]})
    trace.turns[0].record(response={"id": "later than the next turn's request"}, usage=None, finish_reason=None)
    assert open_.response is None
    trace.stragglers = 2
    return trace


def test_a_file_holds_all_of_it() -> None:
    trace = recorded()
    copy = reread(trace)
    assert [turn.to_dict()["attempts"] for turn in copy.turns] == [turn.to_dict()["attempts"] for turn in trace.turns]
    assert copy.turns[12].raw == b"<html>\xff\x00\xe9</html>"
    assert copy.turns[1].usage == Usage(1, 1, 2)
    assert text(copy.turns[13].request) == text({"messages": [{"content": math.nan, "n": 2**80}]})
    assert copy.to_jsonl() == trace.to_jsonl()
    trace.seal()
    assert reread(trace).sealed


def test_a_trace_goes_on_after_a_file() -> None:
    trace = Trace("t")
    messages = converse(trace, 40)
    copy = reread(trace)
    begin(copy, {"model": "m", "messages": [*messages, message("user", 99)]})
    assert copy.turns[-1].request["messages"][:-1] == messages
    assert copy.stored_bytes() - trace.stored_bytes() < 1500  # what is new, and not the history again
    begin(trace)
    ids = {turn.id for turn in (*trace.turns, *copy.turns, begin(Trace("t")))}
    assert len(ids) == 40 + 1 + 1 + 1, "no two turns have the same, also where a file goes on in two places"


def test_the_header_comes_first() -> None:
    assert Trace("t").to_jsonl() == '{"trace": "t", "version": 1, "sealed": false, "stragglers": 0}\n'
    assert reread(Trace("t\n\ud800")).turns == []


def test_a_torn_last_line_is_skipped_and_said() -> None:
    trace = recorded()
    lines = trace.to_jsonl().split("\n")[:-1]
    whole = "\n".join(lines)
    assert Trace.from_jsonl(whole).warnings == []  # only the line's end is missing
    for cut in (1, 2, len(lines[-1]) // 2, len(lines[-1]) - 1):
        for end in ("", "\n"):
            copy = Trace.from_jsonl(whole[:-cut] + end)
            assert copy.turns == trace.turns[:-1]
            [warning] = copy.warnings
            assert warning.startswith(f"line {len(lines)} is torn")


@pytest.mark.parametrize(
    ("line", "damage", "problem"),
    [
        (1, "", "not JSON"),
        (1, '{"trace": "t"', "not JSON"),
        (1, '{"trace": "t", "version": 2, "sealed": false, "stragglers": 0}', "version"),
        (1, '{"trace": "t", "version": 1, "stragglers": 0}', "'sealed' is missing"),
        (1, '{"trace": 5, "version": 1, "sealed": false, "stragglers": 0}', "trace is no str"),
        (1, "[]", "not a record"),
        (2, '{"entry": 0, "value": ', "not JSON"),
        (2, "", "not JSON"),
        (2, '"text"', "not a record"),
        (2, "[" * 100_000, "not JSON"),
        (2, '{"something": "else"}', "is missing"),
        (2, '{"entry": 0}', "'value' is missing"),
        (2, '{"entry": 1, "value": {}}', "out of order"),
        (2, '{"entry": "0", "value": {}}', "entry is no int"),
        (2, '{"entry": 0, "value": {"\\u0000": [0]}}', "no earlier entry"),
        (2, '{"entry": 0, "value": {"\\u0000": [-1]}}', "no earlier entry"),
        (2, '{"entry": 0, "value": {"\\u0000": ["a"]}}', "no earlier entry"),
    ],
)
def test_damage_elsewhere_is_an_error_with_its_line(line: int, damage: str, problem: str) -> None:
    lines = recorded().to_jsonl().split("\n")
    lines[line - 1] = damage
    with pytest.raises(ValueError, match=f"line {line}[: ].*{problem}"):
        Trace.from_jsonl("\n".join(lines))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request", None),
        ("request", [0]),
        ("request", [0, 10_000]),
        ("request", ["0", None]),
        ("response", -1),
        ("response", "0"),
        ("raw", 5),
        ("raw", "☃"),
        ("usage", {"unknown": 1}),
        ("usage", 5),
        ("attempts", None),
        ("attempts", [{}]),
        ("attempts", [5]),
        ("delivered", None),
        ("turn", 5),
    ],
)
def test_a_damaged_turn_is_an_error_with_its_line(field: str, value: Any) -> None:
    lines = recorded().to_jsonl().split("\n")
    number = len(lines) - 1
    lines[number - 1] = json.dumps({**json.loads(lines[number - 1]), field: value})
    with pytest.raises(ValueError, match=f"line {number}: "):
        Trace.from_jsonl("\n".join(lines))


def test_a_lost_line_is_noticed() -> None:
    lines = recorded().to_jsonl().split("\n")
    entry = next(number for number, line in enumerate(lines) if '"entry":5,' in line)
    with pytest.raises(ValueError, match=f"line {entry + 1}: entry 6 "):
        Trace.from_jsonl("\n".join([*lines[:entry], *lines[entry + 1 :]]))


def test_an_empty_file_is_an_error() -> None:
    with pytest.raises(ValueError, match="line 1 "):
        Trace.from_jsonl("")
