"""The three dialects: how far a stream has come, and what answer it makes."""

import copy
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from interception.dialects import CHAT, DIALECTS, MESSAGES, RESPONSES, Dialect
from interception.dialects.base import Phase
from interception.dialects.chat import _Choice
from interception.echo import EchoModel
from interception.sse import Json, SseEvent, SseParser, sse
from tests.interception.corpora import (
    CORPORA,
    anthropic_messages,
    assembled,
    chat,
    delta,
    named,
    openai_responses,
    read,
    same,
    without_nan,
)

OPEN, CLOSING, DONE, FAILED = Phase.OPEN, Phase.CLOSING, Phase.DONE, Phase.FAILED
SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}}


# -- phases --------------------------------------------------------------------------------------------


class TestChatPhases:
    def test_closing_with_the_finish_reason_and_done_with_done(self) -> None:
        raw = chat(
            {"choices": [delta(role="assistant")]},
            {"choices": [delta(content="a")]},
            {"choices": [delta(finish="stop")]},
            {"choices": [], "usage": {"prompt_tokens": 1}},
        )
        assert read(CHAT.stream(), raw) == [OPEN, OPEN, CLOSING, CLOSING, DONE]

    def test_all_choices_asked_for_must_be_finished(self) -> None:
        chunks: list[Json] = [
            {"choices": [delta(1, content="a")]},
            {"choices": [delta(1, finish="stop")]},
            {"choices": [delta(0, content="b"), delta(2, content="c")]},
            {"choices": [delta(0, finish="length")]},
            {"choices": [delta(2, finish="stop")]},
        ]
        assert read(CHAT.stream(3), chat(*chunks)) == [OPEN, OPEN, OPEN, OPEN, CLOSING, DONE]
        # Fewer asked for than seen: those seen must be finished too.
        assert read(CHAT.stream(1), chat(*chunks)) == [OPEN, CLOSING, CLOSING, CLOSING, CLOSING, DONE]
        assert read(CHAT.stream(4), chat(*chunks))[-2:] == [OPEN, DONE]

    def test_an_empty_finish_reason_is_none(self) -> None:
        assert read(CHAT.stream(), chat({"choices": [delta(finish="")]}, done=False)) == [OPEN]

    @pytest.mark.parametrize(
        ("event", "message", "status"),
        [
            ({"error": {"message": "no", "type": "BadRequestError", "code": 400}}, "no", 400),  # vLLM
            ({"error": {"message": "no", "code": 502}, "choices": [delta(finish="error")]}, "no", 502),  # OpenRouter
            ({"error": {"message": "no", "code": "429"}}, "no", 429),
            ({"error": {"message": "no", "type": "server_error", "code": None}}, "no", 500),
            ({"error": {"message": "no", "code": "rate_limit_exceeded"}}, "no", 429),
            ({"error": {"message": "no", "code": True, "status": 7}}, "no", None),
            ({"error": "no"}, "no", None),
            ({"object": "error", "message": "no", "code": 404}, "no", 404),  # vLLM of old
            ({"error": [1]}, '{"error":[1]}', None),
        ],
    )
    def test_an_error_fails_it_for_good(self, event: Json, message: str, status: int | None) -> None:
        stream = CHAT.stream()
        raw = chat({"choices": [delta(content="a")]}, event, {"choices": [delta(finish="stop")]})
        assert read(stream, raw) == [OPEN, FAILED, FAILED, FAILED]
        assert (stream.error(), stream.error_status()) == (message, status)
        answer = stream.response()
        assert answer is not None
        assert answer["choices"][0]["message"]["content"] == "a"

    @pytest.mark.parametrize(
        ("raw", "shown"),
        [
            (b'data: {"error": {"message": "no"}}\n\n', True),
            (b'event: error\ndata: {"error": {"message": "no"}}\n\n', True),
            (b'data: {"object": "error", "message": "no"}\n\n', False),
            (b'event: error\ndata: {"message": "no"}\n\n', False),
            (b"event: error\ndata: no\n\n", False),
        ],
    )
    def test_an_error_that_sdks_do_not_see_is_told(self, raw: bytes, shown: bool) -> None:
        stream = CHAT.stream()
        assert read(stream, raw) == [FAILED]
        assert stream.error() == "no"
        assert stream.error_shown() is shown

    def test_an_error_alone_is_no_answer(self) -> None:
        stream = CHAT.stream()
        read(stream, chat({"error": {"message": "no"}}))
        assert stream.response() is None

    def test_an_error_after_the_finish_reason_fails_it_and_a_null_one_does_not(self) -> None:
        raw = chat({"error": None, "choices": [delta(finish="stop")]}, {"error": {"message": "no"}})
        assert read(CHAT.stream(), raw) == [CLOSING, FAILED, FAILED]

    def test_events_count_data_only(self) -> None:
        stream = CHAT.stream()
        assert read(stream, b": k\n\nevent: x\n\ndata: {}\n\ndata: nonsense\n\n") == [OPEN] * 4
        assert stream.events == 2

    def test_the_usage_chunk(self) -> None:
        def is_usage_chunk(chunk: Json) -> bool:
            return CHAT.stream().usage_chunk(SseParser().feed(sse(chunk))[0])

        assert is_usage_chunk({"choices": [], "usage": {"prompt_tokens": 1}})
        assert not is_usage_chunk({"choices": [], "usage": None})
        assert not is_usage_chunk({"choices": [], "prompt_filter_results": []})  # Azure's first
        assert not is_usage_chunk({"choices": [delta(finish="stop")], "usage": {"prompt_tokens": 1}})
        assert not CHAT.stream().usage_chunk(SseParser().feed(b"data: [DONE]\n\n")[0])
        assert not MESSAGES.stream().usage_chunk(SseParser().feed(sse({"choices": [], "usage": {}}))[0])


class TestMessagesPhases:
    def test_closing_with_the_stop_reason_and_done_with_message_stop(self) -> None:
        raw, _ = anthropic_messages()
        phases = read(MESSAGES.stream(), raw)
        assert set(phases[:-2]) == {OPEN}
        assert phases[-2:] == [CLOSING, DONE]

    def test_a_message_delta_without_a_stop_reason_is_not_the_end(self) -> None:
        raw = named(
            {"type": "message_delta", "delta": {"stop_reason": None}, "usage": {"output_tokens": 1}},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
            {"type": "ping"},
        )
        stream = MESSAGES.stream()
        assert read(stream, raw) == [OPEN, CLOSING, CLOSING]
        answer = stream.response()
        assert answer is not None
        assert (answer["stop_reason"], answer["usage"]) == ("end_turn", {"output_tokens": 2})

    @pytest.mark.parametrize(
        ("raw", "message", "status"),
        [
            (
                named({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}),
                "Overloaded",
                529,
            ),
            (named({"type": "error", "error": {"type": "rate_limit_error", "message": "slow"}}), "slow", 429),
            (named({"type": "error", "error": {"type": "new_error", "message": "what"}}), "what", None),
            (b"event: error\ndata: it broke\n\n", "it broke", None),
            (b'event: error\ndata: {"message": "it broke"}\n\n', "it broke", None),
            (b'data: {"error": {"message": "it broke", "code": 500}}\n\n', "it broke", 500),
        ],
    )
    def test_an_error_fails_it(self, raw: bytes, message: str, status: int | None) -> None:
        stream = MESSAGES.stream()
        assert read(stream, raw + named({"type": "message_stop"})) == [FAILED, FAILED]
        assert (stream.error(), stream.error_status(), stream.response()) == (message, status, None)
        assert stream.error_shown() is raw.startswith(b"event: error")


class TestResponsesPhases:
    @pytest.mark.parametrize("status", ["completed", "incomplete"])
    def test_done(self, status: str) -> None:
        response = {"id": "resp_1", "status": status, "output": []}
        raw = named({"type": "response.created", "response": {}}, {"type": f"response.{status}", "response": response})
        stream = RESPONSES.stream()
        assert read(stream, raw + b"data: [DONE]\n\n") == [OPEN, DONE, DONE]
        assert stream.response() == response

    def test_done_without_a_name_or_without_a_type(self) -> None:
        assert read(RESPONSES.stream(), sse({"type": "response.completed", "response": {}})) == [DONE]
        assert read(RESPONSES.stream(), b"event: response.completed\ndata: {}\n\n") == [DONE]
        assert read(RESPONSES.stream(), b"data: [DONE]\n\n") == [OPEN]

    @pytest.mark.parametrize(
        ("event", "message", "status"),
        [
            ({"type": "error", "code": "rate_limit_exceeded", "message": "slow", "param": None}, "slow", 429),
            ({"type": "error", "error": {"type": "invalid_request_error", "message": "bad", "code": None}}, "bad", 400),
            ({"error": {"message": "no", "code": 503}}, "no", 503),
            ({"type": "error", "code": "new"}, '{"type":"error","code":"new"}', None),
        ],
    )
    def test_an_error_event_fails_it(self, event: Json, message: str, status: int | None) -> None:
        stream = RESPONSES.stream()
        assert read(stream, sse(event)) == [FAILED]
        assert (stream.error(), stream.error_status(), stream.response()) == (message, status, None)

    def test_a_failed_response_fails_it_and_is_the_answer(self) -> None:
        failed = {"id": "resp_1", "status": "failed", "error": {"code": "server_error", "message": "oh"}}
        stream = RESPONSES.stream()
        assert read(stream, named({"type": "response.failed", "response": failed})) == [FAILED]
        assert (stream.error(), stream.error_status(), stream.response()) == ("oh", 500, failed)
        stream = RESPONSES.stream()
        assert read(stream, named({"type": "response.failed"})) == [FAILED]
        assert stream.error() == "the response failed"


# -- assembly ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CORPORA)
class TestCorpora:
    def test_the_stream_makes_the_unstreamed_answer(self, name: str) -> None:
        dialect, corpus = CORPORA[name]
        raw, whole = corpus()
        answer = assembled(dialect, raw)
        assert same(answer, whole)

    def test_so_it_does_bytewise_and_with_other_line_ends(self, name: str) -> None:
        dialect, corpus = CORPORA[name]
        raw, whole = corpus()
        stream, parser = dialect.stream(), SseParser()
        for byte in raw.replace(b"\n", b"\r\n"):
            for event in parser.feed(bytes([byte])):
                stream.feed(event)
        assert same(stream.response(), whole)

    def test_any_beginning_of_it_makes_an_answer_or_none(self, name: str) -> None:
        dialect, corpus = CORPORA[name]
        raw, _ = corpus()
        stream = dialect.stream()
        assert stream.response() is None
        for event in SseParser().feed(raw):
            stream.feed(event)
            partial = stream.response()
            assert partial is not None
            kept = copy.deepcopy(partial)
            stream.response()
            assert same(partial, kept)

    def test_rendered_it_makes_the_same_answer_again(self, name: str) -> None:
        dialect, corpus = CORPORA[name]
        _, whole = corpus()
        plain = without_nan(whole)
        assert same(assembled(dialect, dialect.render(plain)), plain)


class TestChatAssembly:
    def message(self, *deltas: Json) -> Json:
        raw = chat(*({"choices": [delta(**each)]} for each in deltas))
        message = assembled(CHAT, raw)["choices"][0]["message"]
        assert isinstance(message, dict)
        return message

    def test_known_texts_are_joined_and_of_the_unknown_the_last_wins(self) -> None:
        message = self.message(
            {"role": "assistant", "content": None, "reasoning": "a", "refusal": "x", "mood": "good"},
            {"content": "b", "reasoning": "c", "refusal": "y", "mood": "bad", "extra": {"a": 1}},
            {"role": "", "content": "d", "mood": None, "extra": None},
        )
        expected = {"role": "assistant", "content": "bd", "reasoning": "ac", "refusal": "xy", "mood": "bad"}
        assert message == {**expected, "extra": {"a": 1}}

    def test_top_and_choice_fields_are_kept(self) -> None:
        raw = chat(
            {"id": "1", "provider": "x", "choices": [{**delta(content="a"), "native_finish_reason": None}]},
            {"id": "1", "provider": "y", "choices": [{**delta(finish="stop"), "native_finish_reason": "STOP"}]},
        )
        answer = assembled(CHAT, raw)
        assert answer["provider"] == "y"
        assert answer["object"] == "chat.completion"
        assert answer["choices"][0]["native_finish_reason"] == "STOP"

    def test_a_legacy_function_call(self) -> None:
        message = self.message(
            {"role": "assistant", "function_call": {"name": "f", "arguments": ""}},
            {"function_call": {"arguments": "{"}},
            {"function_call": {"arguments": "}"}},
        )
        assert message["function_call"] == {"name": "f", "arguments": "{}"}

    def test_a_custom_tool_and_an_audio(self) -> None:
        message = self.message(
            {"tool_calls": [{"index": 0, "id": "c", "type": "custom", "custom": {"name": "sh", "input": "l"}}]},
            {"tool_calls": [{"index": 0, "custom": {"input": "s"}}], "audio": {"id": "a", "transcript": "x"}},
            {"audio": {"transcript": "y", "expires_at": 1}},
        )
        assert message["tool_calls"] == [{"id": "c", "type": "custom", "custom": {"name": "sh", "input": "ls"}}]
        assert message["audio"] == {"id": "a", "transcript": "xy", "expires_at": 1}

    @pytest.mark.parametrize("index", [{}, {"index": 0}])
    def test_parallel_calls_without_an_index_of_their_own(self, index: Json) -> None:
        message = self.message(
            {"tool_calls": [{**index, "id": "1", "function": {"name": "f", "arguments": "{}"}}]},
            {"tool_calls": [{**index, "id": "2", "function": {"name": "f", "arguments": "[]"}}]},
        )
        assert [(call["id"], call["function"]["arguments"]) for call in message["tool_calls"]] == [
            ("1", "{}"),
            ("2", "[]"),
        ]

    def test_an_id_that_changes_with_every_delta_or_a_name_that_is_repeated_is_one_call(self) -> None:
        message = self.message(
            {"tool_calls": [{"index": 0, "id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}]},
            {"tool_calls": [{"index": 0, "id": "2", "type": "function", "function": {"arguments": "}"}}]},
            {"tool_calls": [{"index": 0, "id": "", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        )
        assert message["tool_calls"] == [{"id": "2", "type": "function", "function": {"name": "f", "arguments": "{}"}}]

    def test_interleaved_calls_are_in_order(self) -> None:
        message = self.message(
            {"tool_calls": [{"index": 1, "id": "b", "function": {"name": "g", "arguments": "1"}}]},
            {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": "2"}}]},
            {
                "tool_calls": [
                    {"index": 1, "function": {"arguments": "3"}},
                    {"index": 0, "function": {"arguments": "4"}},
                ]
            },
        )
        assert [(call["id"], call["function"]["arguments"]) for call in message["tool_calls"]] == [
            ("a", "24"),
            ("b", "13"),
        ]
        assert {call["type"] for call in message["tool_calls"]} == {"function"}

    def test_no_tool_calls_are_no_tool_calls(self) -> None:
        assert self.message({"content": "a", "tool_calls": []})["tool_calls"] == []
        assert "tool_calls" not in self.message({"content": "a"})
        assert self.message({"tool_calls": [{"id": "1", "function": {"name": "f"}}]}, {"tool_calls": None})[
            "tool_calls"
        ] == [{"id": "1", "function": {"name": "f"}, "type": "function"}]

    def test_reasoning_details_of_openrouter(self) -> None:
        def detail(text: str, index: int | None = 0, **more: Any) -> Json:
            return {"reasoning_details": [{"type": "reasoning.text", "text": text, "index": index, **more}]}

        message = self.message(detail("a"), detail("b", signature="s"), detail("c", 1), detail("d", None))
        assert [each["text"] for each in message["reasoning_details"]] == ["ab", "c", "d"]
        assert message["reasoning_details"][0]["signature"] == "s"

    def test_annotations_and_logprobs_add_up(self) -> None:
        chunks = [
            {"choices": [{**delta(content="a", annotations=[1]), "logprobs": {"content": [1], "refusal": None}}]},
            {"choices": [{**delta(annotations=[2]), "logprobs": {"content": [2], "refusal": [3]}}]},
            {"choices": [{**delta(finish="stop"), "logprobs": None}]},
        ]
        [choice] = assembled(CHAT, chat(*chunks))["choices"]
        assert choice["message"]["annotations"] == [1, 2]
        assert choice["logprobs"] == {"content": [1, 2], "refusal": [3]}

    def test_several_choices_are_in_order(self) -> None:
        raw = chat({"choices": [delta(1, content="b")]}, {"choices": [delta(0, content="a"), delta(1, content="c")]})
        choices = assembled(CHAT, raw)["choices"]
        assert [(choice["index"], choice["message"]["content"]) for choice in choices] == [(0, "a"), (1, "bc")]

    def test_a_message_in_place_of_a_delta(self) -> None:
        raw = chat(
            {"choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}]}
        )
        assert assembled(CHAT, raw)["choices"][0]["message"] == {"role": "assistant", "content": "a"}

    def test_a_long_stream_takes_linear_time(self) -> None:
        [event] = SseParser().feed(sse({"choices": [{**delta(content=500 * "x"), "token_ids": [1] * 50}]}))
        stream = CHAT.stream()
        for _ in range(40_000):
            stream.feed(event)
        answer = stream.response()
        assert answer is not None
        assert len(answer["choices"][0]["message"]["content"]) == 20_000_000
        assert len(answer["choices"][0]["token_ids"]) == 2_000_000
        assert event.json is not None
        assert len(event.json["choices"][0]["token_ids"]) == 50

    def test_so_does_one_with_many_choices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        looks = 0

        def finished(choice: _Choice) -> bool:
            nonlocal looks
            looks += 1
            return True

        monkeypatch.setattr(_Choice, "finished", property(finished))
        stream = CHAT.stream()
        for index in range(100):
            stream.feed(SseEvent(sse({"choices": [{"index": index, "delta": {"content": "x"}}]})))
        assert stream.phase is CLOSING
        assert looks <= 200

    def test_the_newest_call_of_an_index_goes_on(self) -> None:
        calls = [(0, "a"), (1, "b"), (0, "c"), (1, ""), (0, "")]
        chunks = [
            {"index": index, "function": {"arguments": "x"}}
            | ({"id": name, "function": {"name": name, "arguments": "x"}} if name else {})
            for index, name in calls
        ]
        raw = chat(*({"choices": [delta(tool_calls=[call])]} for call in chunks))
        told = [call["function"] for call in assembled(CHAT, raw)["choices"][0]["message"]["tool_calls"]]
        assert [(call["name"], call["arguments"]) for call in told] == [("a", "x"), ("c", "xx"), ("b", "xx")]


class TestOtherAssembly:
    def test_an_input_that_is_cut_short_stays_text(self) -> None:
        raw = named(
            {"type": "content_block_start", "index": 0, "content_block": {"type": "tool_use", "input": {}}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": '{"a'}},
        )
        stream = MESSAGES.stream()
        read(stream, raw)
        assert stream.response() == {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "tool_use", "input": '{"a'}],
        }

    def test_unknown_deltas_and_fields_are_kept(self) -> None:
        raw = named(
            {"type": "message_start", "message": {"id": "1", "x": 1}},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "compaction", "content": None}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "compaction_delta", "content": "short"}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "new_delta", "new": 1}},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn", "container": {"id": 1}}, "later": [2]},
            {"type": "message_stop"},
        )
        block = {"type": "compaction", "content": "short", "new": 1}
        end = {"stop_reason": "end_turn", "container": {"id": 1}, "later": [2]}
        assert assembled(MESSAGES, raw) == {"id": "1", "x": 1, **end, "content": [block]}

    def test_a_response_completed_without_output_takes_the_items(self) -> None:
        raw, whole = openai_responses()
        *events, last = SseParser().feed(raw)
        assert last.json is not None
        ended = {**last.json, "response": {**whole, "output": []}}
        stream = b"".join(event.raw for event in events) + named(ended)
        assert same(assembled(RESPONSES, stream), whole)

    def test_deltas_without_their_item_make_one(self) -> None:
        at = {"output_index": 0, "item_id": "msg_1", "content_index": 0}
        stream = RESPONSES.stream()
        read(stream, named({"type": "response.output_text.delta", **at, "delta": "a"}))
        answer = stream.response()
        assert answer is not None
        assert answer["output"] == [{"id": "msg_1", "content": [{"type": "output_text", "text": "a"}]}]


# -- EchoModel -----------------------------------------------------------------------------------------


@pytest.fixture
async def echo() -> AsyncIterator[EchoModel]:
    async with EchoModel() as model:
        yield model


VOLATILE = ("id", "created", "created_at", "completed_at", "call_id")


def lean(value: Any) -> Any:
    """Without ids and times, and without what only one of the two forms spells out as empty."""
    if isinstance(value, dict):
        kept = {name: lean(inner) for name, inner in value.items() if name not in VOLATILE}
        return {name: inner for name, inner in kept.items() if inner not in (None, [])}
    return [lean(inner) for inner in value] if isinstance(value, list) else value


class TestEcho:
    TEXT = "The quick  brown fox\njumps — über ☃."
    CALL = '!call search {"query": "a b", "limit": 3}'

    @pytest.mark.parametrize("text", [TEXT, CALL])
    @pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
    async def test_streamed_and_unstreamed_make_one_answer(self, echo: EchoModel, dialect: Dialect, text: str) -> None:
        function = {"name": "search", "parameters": SCHEMA}
        tools: Json = {
            "chat completions": {"type": "function", "function": function},
            "responses": {"type": "function", **function},
            "messages": {"name": "search", "input_schema": SCHEMA},
        }
        body = {dialect.messages_field: [{"role": "user", "content": text}], "tools": [tools[dialect.name]]}
        url = dialect.url(echo.base_url, dialect.path)
        async with aiohttp.ClientSession() as session:
            async with session.post(url, json={"model": "m", "max_tokens": 9, **body}) as response:
                whole = await response.json()
            streamed = dialect.with_usage({"model": "m", "max_tokens": 9, "stream": True, **body})
            async with session.post(url, json=streamed) as response:
                raw = await response.read()
        answer = assembled(dialect, raw)
        assert lean(answer) == lean(whole)
        assert dialect.usage(answer) == dialect.usage(whole) is not None
        assert dialect.finish_reason(answer) == dialect.finish_reason(whole) is not None
        assert lean(assembled(dialect, dialect.render(whole))) == lean(whole)
