"""What the server asks of a dialect beside the stream; and that nothing an upstream sends makes one raise."""

import copy
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interception.dialects import CHAT, DIALECTS, MESSAGES, RESPONSES, Dialect
from interception.dialects.base import Phase
from interception.sse import Json, SseParser
from interception.usage import Usage
from tests.interception.corpora import CORPORA, named, openai_chat, read, vllm_chat


class TestUsage:
    @pytest.mark.parametrize(
        ("dialect", "usage", "expected"),
        [
            (CHAT, {"prompt_tokens": 1, "completion_tokens": 2}, Usage(1, 2, 3)),
            (CHAT, {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 9}, Usage(1, 2, 9)),
            (CHAT, {"prompt_tokens": 1}, Usage(1, None, None)),
            (CHAT, {"prompt_tokens": 0, "completion_tokens": 0}, Usage(0, 0, 0)),
            (CHAT, {"prompt_tokens": "1", "completion_tokens": -1, "total_tokens": True}, None),
            (CHAT, {"prompt_tokens": 1, "prompt_tokens_details": None}, Usage(1, None, None)),
            (CHAT, {}, None),
            (CHAT, None, None),
            (RESPONSES, {"input_tokens": 1, "output_tokens": 2}, Usage(1, 2, 3)),
            (MESSAGES, {"input_tokens": 1, "output_tokens": 2}, Usage(1, 2, 3)),
            (MESSAGES, {"input_tokens": 1, "cache_read_input_tokens": 5, "output_tokens": 2}, Usage(6, 2, 8, 5)),
            (MESSAGES, {"cache_read_input_tokens": 5, "output_tokens": 2}, Usage(None, 2, None, 5)),
        ],
    )
    def test_unknown_is_none(self, dialect: Dialect, usage: object, expected: Usage | None) -> None:
        assert dialect.usage({"usage": usage}) == expected
        assert dialect.usage({}) is None

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("openai chat", Usage(10, 5, 15, 4, 2)),
            ("vllm chat", Usage(3, 5, 8)),
            ("openai responses", Usage(10, 5, 15, 4, 2)),
            ("anthropic messages", Usage(127, 42, 169, 100, 9)),
        ],
    )
    def test_corpora(self, name: str, expected: Usage) -> None:
        dialect, corpus = CORPORA[name]
        assert dialect.usage(corpus()[1]) == expected

    def test_asking_for_it(self) -> None:
        plain: Json = {"stream": True, "stream_options": {"x": 1}}
        assert not CHAT.wants_usage(plain)
        assert CHAT.with_usage(plain) == {"stream": True, "stream_options": {"x": 1, "include_usage": True}}
        assert plain == {"stream": True, "stream_options": {"x": 1}}
        assert CHAT.with_usage({"stream": True, "stream_options": None})["stream_options"] == {"include_usage": True}
        asked = CHAT.with_usage(plain)
        assert CHAT.wants_usage(asked)
        assert CHAT.with_usage(asked) is asked
        unstreamed: Json = {"messages": []}
        assert CHAT.wants_usage(unstreamed)
        assert CHAT.with_usage(unstreamed) is unstreamed
        for dialect in (RESPONSES, MESSAGES):
            assert dialect.wants_usage(plain)
            assert dialect.with_usage(plain) is plain


class TestFinishReason:
    @pytest.mark.parametrize(
        ("dialect", "response", "expected"),
        [
            (CHAT, {"choices": [{"finish_reason": "length"}, {"finish_reason": "stop"}]}, "length"),
            (CHAT, {"choices": []}, None),
            (RESPONSES, {"status": "completed"}, "completed"),
            (
                RESPONSES,
                {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
                "max_output_tokens",
            ),
            (RESPONSES, {"status": "incomplete", "incomplete_details": None}, "incomplete"),
            (MESSAGES, {"stop_reason": "end_turn"}, "end_turn"),
            (MESSAGES, {"stop_reason": None}, None),
        ],
    )
    def test_it_is_the_dialects_own_word(self, dialect: Dialect, response: Json, expected: str | None) -> None:
        assert dialect.finish_reason(response) == expected


class TestTokenIds:
    def test_chat(self) -> None:
        _, whole = vllm_chat()
        assert CHAT.missing_token_ids(whole) is None
        assert CHAT.token_ids_mismatch(whole) is None
        short = copy.deepcopy(whole)
        short["choices"][0]["token_ids"].pop()
        assert CHAT.token_ids_mismatch(short) == "choices[0] has 4 token_ids and 5 logprobs"
        assert CHAT.missing_token_ids({**whole, "prompt_token_ids": None}) == "prompt_token_ids"
        assert CHAT.missing_token_ids({**whole, "choices": []}) == "choices[0].token_ids"
        two = [*whole["choices"], {"index": 1, "token_ids": None}]
        assert CHAT.missing_token_ids({**whole, "choices": two}) == "choices[1].token_ids"
        _, openai_answer = openai_chat()
        assert CHAT.missing_token_ids(openai_answer) == "choices[0].token_ids"
        assert CHAT.token_ids_mismatch(openai_answer) is None

    @pytest.mark.parametrize("dialect", [RESPONSES, MESSAGES], ids=lambda dialect: dialect.name)
    def test_others(self, dialect: Dialect) -> None:
        assert dialect.missing_token_ids({}) == "prompt_token_ids"
        assert dialect.missing_token_ids({"prompt_token_ids": [1]}) == "token_ids"
        assert dialect.missing_token_ids({"prompt_token_ids": [1], "token_ids": []}) is None


class TestPromptTooLong:
    @pytest.mark.parametrize(
        "said",
        [
            "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens.",
            "The decoder prompt (length 123) is longer than the maximum model length of 100.",
            "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
            "prompt is too long: 210000 tokens > 200000 maximum",
            "input length and `max_tokens` exceed context limit: 188240 + 21333 > 200000",
            "Your input exceeds the context window of this model. Please adjust your input and try again.",
            "the request exceeds the available context size, try increasing it",
            "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).",
            "Input is too long for requested model.",
            "Prompt contains 40000 tokens and 0 draft tokens, too large for model with 32768 maximum context length",
        ],
    )
    def test_the_sentences(self, said: str) -> None:
        for dialect in DIALECTS:
            for body in (
                {"error": {"message": said, "type": "invalid_request_error"}},
                {"object": "error", "message": said},
                {"error": said},
                {"detail": said},
            ):
                assert dialect.prompt_too_long(400, json.dumps(body).encode())
            assert dialect.prompt_too_long(413, said.encode())
            assert not dialect.prompt_too_long(500, json.dumps({"error": {"message": said}}).encode())

    def test_the_codes(self) -> None:
        for code in ("context_length_exceeded", "string_above_max_length"):
            assert CHAT.prompt_too_long(400, json.dumps({"error": {"message": "no", "code": code}}).encode())

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"\xff\xfe",
            b"[]",
            b"null",
            b'{"error": null}',
            b'{"error": {"message": "temperature must be below 2"}}',
            b'{"error": {"message": "bad tool"}, "request": "the prompt is too long, I fear"}',
            b'{"error": {"message": ["prompt is too long"], "code": ["context_length_exceeded"]}}',
        ],
    )
    def test_others(self, body: bytes) -> None:
        assert not any(dialect.prompt_too_long(400, body) for dialect in DIALECTS)


class TestErrors:
    def test_shapes(self) -> None:
        for dialect in (CHAT, RESPONSES):
            usual = {"message": "no", "type": "rate_limit_error", "param": None, "code": None}
            assert dialect.error(429, "no") == {"error": usual}
            own = {"message": "no", "type": "t", "param": None, "code": "c"}
            assert dialect.error(400, "no", kind="t", code="c") == {"error": own}
        assert MESSAGES.error(529, "no") == {"type": "error", "error": {"type": "overloaded_error", "message": "no"}}
        assert MESSAGES.error(400, "no", kind="t", code="c")["error"] == {"type": "t", "message": "no"}

    @pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
    def test_our_own_reader_sees_our_own_errors(self, dialect: Dialect) -> None:
        for status, expected in ((429, 429), (500, 500), (502, 500)):
            stream = dialect.stream()
            assert read(stream, dialect.error_event(stream, status, "it broke")) == [Phase.FAILED]
            assert (stream.error(), stream.error_status()) == ("it broke", expected)

    def test_a_failed_response_keeps_what_the_client_knows(self) -> None:
        stream = RESPONSES.stream()
        started = {
            "id": "resp_1",
            "object": "response",
            "model": "gpt-5",
            "status": "in_progress",
            "metadata": {"a": "b"},
        }
        read(stream, named({"type": "response.created", "response": started, "sequence_number": 4}))
        [event] = SseParser().feed(RESPONSES.error_event(stream, 502, "it broke"))
        assert event.event == "response.failed"
        error = {"code": "server_error", "message": "it broke"}
        response = {"output": [], **started, "status": "failed", "error": error}
        assert event.json == {"type": "response.failed", "sequence_number": 5, "response": response}

    @pytest.mark.parametrize(
        ("status", "code"), [(429, "rate_limit_exceeded"), (400, "invalid_prompt"), (409, "invalid_prompt")]
    )
    def test_a_failed_response_of_which_nothing_came(self, status: int, code: str) -> None:
        [event] = SseParser().feed(RESPONSES.error_event(RESPONSES.stream(model="gpt-5"), status, "it broke"))
        assert event.json is not None
        response = event.json["response"]
        assert (response["model"], response["output"], response["error"]["code"]) == ("gpt-5", [], code)


class TestKeepalive:
    def test_chat_and_messages(self) -> None:
        for silence in (5.0, 500.0):
            assert CHAT.keepalive(CHAT.stream(), silence) == b": k\n"
            assert MESSAGES.keepalive(MESSAGES.stream(), silence) == b'event: ping\ndata: {"type":"ping"}\n\n'

    def test_responses_has_placeholders_after_two_minutes(self) -> None:
        stream = RESPONSES.stream(model="gpt-5")
        assert RESPONSES.keepalive(stream, 119.9) == b": k\n"
        parser = SseParser()
        kinds, ids = [], set()
        for silence in (120.0, 125.0, 130.0):
            [event] = parser.feed(RESPONSES.keepalive(stream, silence))
            assert event.json is not None
            kinds.append(event.event)
            ids.add(event.json["response"]["id"])
            assert event.json["response"]["model"] == "gpt-5"
        assert kinds == ["response.created", "response.in_progress", "response.in_progress"]
        assert len(ids) == 1
        [failed] = parser.feed(RESPONSES.error_event(stream, 504, "stalled"))
        assert failed.json is not None
        assert {failed.json["response"]["id"]} == ids
        assert stream.response() is None
        read(stream, named({"type": "response.created", "response": {"id": "resp_1"}}))
        assert RESPONSES.keepalive(stream, 500.0) == b": k\n"

    def test_responses_has_none_for_openais_own_sdks(self) -> None:
        stream = RESPONSES.stream()
        assert RESPONSES.keepalive(stream, 500.0, {"X-Stainless-Lang": "js"}) == b": k\n"
        assert b"response.created" in RESPONSES.keepalive(stream, 500.0, {"User-Agent": "codex_exec/0.50"})


# -- nothing raises ------------------------------------------------------------------------------------

KEYS = """
    type choices index delta message content role tool_calls function custom name arguments input id finish_reason
    logprobs token_ids prompt_token_ids usage error code status object reasoning_details annotations audio
    function_call text thinking partial_json citation signature content_block stop_reason output item part summary
    item_id output_index content_index summary_index response sequence_number incomplete_details reason model
    prompt_tokens input_tokens output_tokens output_tokens_details cached_tokens
"""
WORDS = """
    error message_start message_delta message_stop content_block_start content_block_delta text_delta thinking_delta
    input_json_delta citations_delta signature_delta response.created response.completed response.failed
    response.output_item.added response.output_item.done response.content_part.added response.output_text.delta
    response.output_text.done response.output_text.annotation.added response.function_call_arguments.delta
    response.function_call_arguments.done response.reasoning_summary_text.delta text thinking tool_use function_call
    reasoning output_text stop in_progress reasoning.text
"""
keys = st.sampled_from(KEYS.split())
words = st.sampled_from(WORDS.split())
leaves = st.sampled_from([None, True, -1, 0, 1, 2**70, float("nan"), "", "a"]) | words
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(keys, inner, max_size=3), max_leaves=6
)
objects = st.dictionaries(keys, values, max_size=4)
payloads = st.one_of(
    objects,
    st.fixed_dictionaries({"choices": st.lists(st.fixed_dictionaries({"delta": objects}), max_size=2)}),
    st.fixed_dictionaries({"type": words}, optional={"response": objects, "item": objects, "part": objects}),
    st.fixed_dictionaries({"type": words}, optional={"message": objects, "delta": objects, "content_block": objects}),
)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@settings(max_examples=100, deadline=None)
@given(sent=st.lists(payloads, max_size=6))
def test_nothing_raises_on_arbitrary_objects(dialect: Dialect, sent: list[Json]) -> None:
    stream = dialect.stream()
    raw = b"".join(b"data: " + json.dumps(payload).encode() + b"\n\n" for payload in sent)
    phases = read(stream, raw)
    for before, after in itertools.pairwise(phases):
        assert after is before or before is Phase.OPEN or (before is Phase.CLOSING and after.ended)
    answer = stream.response()
    assert stream.events == len(sent)
    assert (stream.error() is None) == (stream.phase is not Phase.FAILED)
    [event] = SseParser().feed(dialect.error_event(stream, 502, "broke"))
    assert event.json is not None
    assert dialect.keepalive(stream, 500)
    for one in [answer, *sent]:
        if one is not None:
            json.dumps(one)
            dialect.usage(one)
            dialect.finish_reason(one)
            dialect.missing_token_ids(one)
            dialect.token_ids_mismatch(one)
            dialect.wants_usage(one)
            dialect.with_usage(one)
            assert dialect.render(one)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("depth", [300, 900])
def test_deep_nesting_fails_nothing(dialect: Dialect, depth: int) -> None:
    deep = b"[" * depth + b"]" * depth
    stream = dialect.stream()
    for template in (
        b'{"choices":[{"delta":{"x":@}}],"x":@}',
        b'{"type":"message_start","message":{"x":@}}',
        b'{"type":"response.created","response":{"id":"resp_1","metadata":@}}',
    ):
        read(stream, b"data: " + template.replace(b"@", deep) + b"\n\n")
    assert stream.response() is not None
    [event] = SseParser().feed(dialect.error_event(stream, 502, "broke"))
    assert event.json is not None
    if dialect is RESPONSES:
        assert event.json["response"]["id"] == "resp_1"
