"""The echo model, through the real OpenAI and Anthropic SDKs; raw HTTP only for what they cannot send."""

import asyncio
import gzip
import io
import logging
import random
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from interception.echo import EchoModel

KEY = "sk-echo-test"
TEXT = "The quick  brown fox\njumps — über ☃."
CALL = 'Please look.\n  !call search {"query": "a b", "limit": 3}\nThanks.'
ARGUMENTS = {"query": "a b", "limit": 3}
SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "search", "parameters": SCHEMA}}]
RESPONSES_TOOLS: Any = [{"type": "function", "name": "search", "parameters": SCHEMA, "strict": False}]
MESSAGES_TOOLS: Any = [{"name": "search", "input_schema": SCHEMA}]
MODEL_ROUTES = ["/chat/completions", "/responses", "/messages"]


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest.fixture
async def echo() -> AsyncIterator[EchoModel]:
    async with EchoModel() as model:
        yield model


@pytest.fixture
async def oai(echo: EchoModel) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=echo.base_url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
async def ant(echo: EchoModel) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=echo.base_url.removesuffix("/v1"), api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


class TestLife:
    async def test_base_url_before_start_and_after_stop_says_what_to_do(self) -> None:
        echo = EchoModel()
        with pytest.raises(RuntimeError, match=r"call start\(\)"):
            _ = echo.base_url
        await echo.start()
        await echo.stop()
        with pytest.raises(RuntimeError, match=r"call start\(\)"):
            _ = echo.base_url

    async def test_start_and_stop_are_idempotent_and_can_be_repeated(self) -> None:
        echo = EchoModel()
        await echo.stop()
        first, second = await asyncio.gather(echo.start(), echo.start())
        assert first == second == echo.base_url
        assert first.startswith("http://127.0.0.1:")
        assert first.endswith("/v1")
        await asyncio.gather(echo.stop(), echo.stop())
        await echo.start()
        await echo.stop()

    async def test_stop_closes_the_port(self, http: aiohttp.ClientSession) -> None:
        async with EchoModel() as echo:
            url = echo.base_url
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(url + "/models")

    async def test_a_taken_port_is_an_error_and_leaves_nothing_behind(self, echo: EchoModel) -> None:
        other = EchoModel(port=int(echo.base_url.removesuffix("/v1").rpartition(":")[2]))
        with pytest.raises(OSError, match="address already in use"):
            await other.start()
        with pytest.raises(RuntimeError):
            _ = other.base_url
        await echo.stop()
        await other.start()
        await other.stop()

    async def test_stop_cuts_an_open_stream_soon(self, http: aiohttp.ClientSession) -> None:
        echo = EchoModel(chunk_delay=60)
        url = await echo.start()
        body = {"model": "m", "stream": True, "messages": user("hi")}
        async with http.post(url + "/chat/completions", json=body) as response:
            await response.content.readline()
            async with asyncio.timeout(5):
                await echo.stop()

    async def test_calls_counts_model_calls_only_and_refused_ones_too(
        self, echo: EchoModel, oai: AsyncOpenAI, ant: AsyncAnthropic, http: aiohttp.ClientSession
    ) -> None:
        assert echo.calls == 0
        await oai.models.list()
        await ant.messages.count_tokens(model="m", messages=user("hi"))
        assert echo.calls == 0
        await oai.chat.completions.create(model="m", messages=user("hi"))
        await oai.responses.create(model="m", input="hi")
        await ant.messages.create(model="m", max_tokens=9, messages=user("hi"))
        async with http.post(echo.base_url + "/responses", data=b"{"):
            pass
        assert echo.calls == 4

    async def test_chunk_delay_spaces_the_events(self) -> None:
        async with (
            EchoModel(chunk_delay=0.05) as echo,
            AsyncOpenAI(base_url=echo.base_url, api_key="any") as client,
        ):
            loop = asyncio.get_running_loop()
            stream = await client.chat.completions.create(model="m", messages=user("one two"), stream=True)
            times = [loop.time() async for _ in stream]
        assert len(times) == 4  # role, two words, finish
        assert times[-1] - times[0] >= 0.1


class TestChat:
    async def test_echo(self, oai: AsyncOpenAI) -> None:
        messages: Any = [
            {"role": "system", "content": "You are terse."},
            {"role": "user", "content": "first"},
            {"role": "assistant", "content": "first"},
            {"role": "user", "content": TEXT},
        ]
        done = await oai.chat.completions.create(model="some-model", messages=messages)
        assert done.id.startswith("chatcmpl-")
        assert done.object == "chat.completion"
        assert done.created > 1_700_000_000
        assert done.model == "some-model"
        [choice] = done.choices
        assert choice.message.role == "assistant"
        assert choice.message.content == TEXT
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "stop"
        assert done.usage is not None
        assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (13, 8, 21)

    async def test_parts_and_empty_content(self, oai: AsyncOpenAI) -> None:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        content: Any = [{"type": "text", "text": "one"}, image, {"type": "text", "text": "two"}]
        done = await oai.chat.completions.create(model="m", messages=[{"role": "user", "content": content}])
        assert done.choices[0].message.content == "one\ntwo"
        empty: Any = []
        for messages in (user(""), empty):
            done = await oai.chat.completions.create(model="m", messages=messages)
            assert done.choices[0].message.content == ""
            assert done.usage is not None
            assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (0, 1)

    @pytest.mark.parametrize("include_usage", [None, False, True])
    async def test_stream(self, oai: AsyncOpenAI, include_usage: bool | None) -> None:
        options: Any = {} if include_usage is None else {"stream_options": {"include_usage": include_usage}}
        stream = await oai.chat.completions.create(model="m", messages=user(TEXT), stream=True, **options)
        chunks = [chunk async for chunk in stream]
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk.id for chunk in chunks}) == 1
        assert {chunk.model for chunk in chunks} == {"m"}
        if include_usage:
            last = chunks.pop()
            assert last.choices == []
            assert last.usage is not None
            assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (8, 8)
        assert all(chunk.usage is None for chunk in chunks)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert len(chunks) == 1 + 8 + 1
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 9 + ["stop"]

    async def test_stream_ends_with_done(self, echo: EchoModel, http: aiohttp.ClientSession) -> None:
        body = {"model": "m", "stream": True, "messages": user("hi")}
        async with http.post(echo.base_url + "/chat/completions", json=body) as response:
            assert response.content_type == "text/event-stream"
            assert (await response.text()).endswith("\n\ndata: [DONE]\n\n")

    async def test_tool_call_then_its_result(self, oai: AsyncOpenAI) -> None:
        done = await oai.chat.completions.create(model="m", messages=user(CALL), tools=CHAT_TOOLS)
        [choice] = done.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert choice.message.tool_calls is not None
        [call] = choice.message.tool_calls
        assert call.type == "function"
        assert call.id.startswith("call_")
        assert call.function.name == "search"
        assert call.function.arguments == '{"query": "a b", "limit": 3}'

        result = {"role": "tool", "tool_call_id": call.id, "content": "found it"}
        messages = [*user(CALL), choice.message.model_dump(exclude_none=True), result]
        done = await oai.chat.completions.create(model="m", messages=messages, tools=CHAT_TOOLS)
        assert done.choices[0].message.content == "found it"
        assert done.choices[0].finish_reason == "stop"

    async def test_a_reminder_after_a_result_does_not_repeat_the_call(self, oai: AsyncOpenAI) -> None:
        call = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
        messages: Any = [
            *user(CALL),
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "found it"}]},
            {"role": "system", "content": "be brief"},
        ]
        done = await oai.chat.completions.create(model="m", messages=messages, tools=CHAT_TOOLS)
        assert done.choices[0].message.content == "found it"

    async def test_tool_call_streamed(self, oai: AsyncOpenAI) -> None:
        manager = oai.chat.completions.stream(model="m", messages=user(CALL), tools=CHAT_TOOLS)
        async with manager as stream:
            events = [event async for event in stream]
        pieces = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
        assert len([piece for piece in pieces if piece.arguments_delta]) >= 2
        final = await stream.get_final_completion()
        assert final.choices[0].finish_reason == "tool_calls"
        assert final.choices[0].message.tool_calls is not None
        [call] = final.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("search", '{"query": "a b", "limit": 3}')

    @pytest.mark.parametrize(
        "text",
        ["!call search {broken", "!call search [1]", "!call", "say !call search {}"],
    )
    async def test_what_is_no_directive_is_text(self, oai: AsyncOpenAI, text: str) -> None:
        done = await oai.chat.completions.create(model="m", messages=user(text), tools=CHAT_TOOLS)
        assert done.choices[0].message.content == text

    async def test_directive_without_tools_is_text(self, oai: AsyncOpenAI) -> None:
        done = await oai.chat.completions.create(model="m", messages=user(CALL))
        assert done.choices[0].message.content == CALL

    async def test_directive_without_arguments_and_for_another_name(self, oai: AsyncOpenAI) -> None:
        done = await oai.chat.completions.create(model="m", messages=user("!call other\r\n"), tools=CHAT_TOOLS)
        assert done.choices[0].message.tool_calls is not None
        [call] = done.choices[0].message.tool_calls
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("other", "{}")


class TestResponses:
    async def test_echo(self, oai: AsyncOpenAI) -> None:
        done = await oai.responses.create(model="some-model", input=TEXT, instructions="be terse", temperature=0.5)
        assert done.id.startswith("resp_")
        assert done.object == "response"
        assert done.status == "completed"
        assert done.created_at > 1_700_000_000
        assert done.model == "some-model"
        assert done.instructions == "be terse"
        assert done.temperature == 0.5
        assert done.output_text == TEXT
        [item] = done.output
        assert item.type == "message"
        assert (item.role, item.status) == ("assistant", "completed")
        assert done.usage is not None
        assert (done.usage.input_tokens, done.usage.output_tokens, done.usage.total_tokens) == (10, 8, 18)

    async def test_items_and_empty_input(self, oai: AsyncOpenAI) -> None:
        items: Any = [
            {"role": "developer", "content": "be terse"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one"}]},
        ]
        assert (await oai.responses.create(model="m", input=items)).output_text == "one"
        nothing: Any
        for nothing in ("", []):
            done = await oai.responses.create(model="m", input=nothing)
            assert done.output_text == ""
            assert done.output[0].type == "message"

    async def test_stream(self, oai: AsyncOpenAI) -> None:
        events = [event async for event in await oai.responses.create(model="m", input="one two", stream=True)]
        assert [event.type.removeprefix("response.") for event in events] == [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed",
        ]
        assert [event.sequence_number for event in events] == list(range(10))
        first, last = events[0], events[-1]
        assert first.type == "response.created"
        assert (first.response.status, first.response.output, first.response.usage) == ("in_progress", [], None)
        assert last.type == "response.completed"
        assert last.response.id == first.response.id
        assert last.response.output_text == "one two"
        assert last.response.usage is not None
        assert last.response.usage.output_tokens == 2

    async def test_stream_helper(self, oai: AsyncOpenAI) -> None:
        async with oai.responses.stream(model="m", input=TEXT) as stream:
            pieces = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        assert "".join(pieces) == TEXT
        assert (await stream.get_final_response()).output_text == TEXT

    async def test_tool_call_then_its_result(self, oai: AsyncOpenAI) -> None:
        done = await oai.responses.create(model="m", input=CALL, tools=RESPONSES_TOOLS)
        assert done.status == "completed"
        [call] = done.output
        assert call.type == "function_call"
        assert (call.name, call.arguments, call.status) == ("search", '{"query": "a b", "limit": 3}', "completed")

        result = {"type": "function_call_output", "call_id": call.call_id, "output": "found it"}
        items: Any = [*user(CALL), call.model_dump(exclude_none=True), result]
        done = await oai.responses.create(model="m", input=items, tools=RESPONSES_TOOLS)
        assert done.output_text == "found it"

    async def test_tool_call_streamed(self, oai: AsyncOpenAI) -> None:
        async with oai.responses.stream(model="m", input=CALL, tools=RESPONSES_TOOLS) as stream:
            events = [event async for event in stream]
        pieces = [event for event in events if event.type == "response.function_call_arguments.delta"]
        assert len(pieces) >= 2
        assert pieces[-1].snapshot == '{"query": "a b", "limit": 3}'
        [call] = (await stream.get_final_response()).output
        assert call.type == "function_call"
        assert (call.name, call.arguments) == ("search", '{"query": "a b", "limit": 3}')

    @pytest.mark.parametrize("streamed", [False, True])
    async def test_a_tool_of_a_namespace_is_called_by_both_names(self, oai: AsyncOpenAI, streamed: bool) -> None:
        function = {"type": "function", "name": "note", "parameters": {"type": "object"}}
        space = {"type": "namespace", "name": "mcp__tools", "description": "", "tools": [function]}
        tools: Any = [space, *RESPONSES_TOOLS]
        for named, name, namespace in (
            ("mcp__tools__note", "note", "mcp__tools"),
            ("mcp__tools__other", "mcp__tools__other", None),
            ("search", "search", None),
        ):
            asked: Any = {"model": "m", "input": f"!call {named} {{}}", "tools": tools}
            if streamed:
                events = [event async for event in await oai.responses.create(**asked, stream=True)]
                done = [event for event in events if event.type == "response.function_call_arguments.done"]
                assert [event.name for event in done] == [name]
                [last] = [event for event in events if event.type == "response.completed"]
                [call] = last.response.output
            else:
                [call] = (await oai.responses.create(**asked)).output
            assert call.type == "function_call"
            assert (call.name, call.namespace) == (name, namespace)


class TestMessages:
    async def test_echo(self, ant: AsyncAnthropic) -> None:
        done = await ant.messages.create(model="some-model", max_tokens=9, system="be terse", messages=user(TEXT))
        assert done.id.startswith("msg_")
        assert (done.type, done.role, done.model) == ("message", "assistant", "some-model")
        [block] = done.content
        assert block.type == "text"
        assert block.text == TEXT
        assert (done.stop_reason, done.stop_sequence) == ("end_turn", None)
        assert (done.usage.input_tokens, done.usage.output_tokens) == (10, 8)

    async def test_parts_prefill_and_empty_content(self, ant: AsyncAnthropic) -> None:
        parts: Any = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        messages: Any = [{"role": "user", "content": parts}, {"role": "assistant", "content": "prefill"}]
        done = await ant.messages.create(model="m", max_tokens=9, messages=messages)
        assert done.content[0].type == "text"
        assert done.content[0].text == "one\ntwo"
        done = await ant.messages.create(model="m", max_tokens=9, messages=[])
        assert done.content[0].type == "text"
        assert done.content[0].text == ""

    async def test_stream(self, ant: AsyncAnthropic) -> None:
        stream = await ant.messages.create(model="m", max_tokens=9, messages=user("one two"), stream=True)
        events = [event async for event in stream]  # the SDK drops pings
        assert [event.type for event in events] == [
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        start, delta = events[0], events[-2]
        assert start.type == "message_start"
        assert (start.message.content, start.message.stop_reason, start.message.usage.input_tokens) == ([], None, 2)
        assert delta.type == "message_delta"
        assert (delta.delta.stop_reason, delta.usage.output_tokens) == ("end_turn", 2)

    async def test_stream_helper(self, ant: AsyncAnthropic) -> None:
        async with ant.messages.stream(model="m", max_tokens=9, messages=user(TEXT)) as stream:
            assert "".join([text async for text in stream.text_stream]) == TEXT
            final = await stream.get_final_message()
        assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", 8)

    async def test_stream_has_a_ping(self, echo: EchoModel, http: aiohttp.ClientSession) -> None:
        body = {"model": "m", "max_tokens": 9, "stream": True, "messages": user("hi")}
        async with http.post(echo.base_url + "/messages?beta=true", json=body) as response:
            assert 'event: ping\ndata: {"type":"ping"}\n\n' in await response.text()

    async def test_tool_call_then_its_result(self, ant: AsyncAnthropic) -> None:
        done = await ant.messages.create(model="m", max_tokens=9, messages=user(CALL), tools=MESSAGES_TOOLS)
        assert done.stop_reason == "tool_use"
        [call] = done.content
        assert call.type == "tool_use"
        assert call.id.startswith("toolu_")
        assert (call.name, call.input) == ("search", ARGUMENTS)

        content: Any = [
            {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "found it"}]},
            {"type": "text", "text": "!call search {}"},  # agents append reminders to a result
        ]
        messages: Any = [
            *user(CALL),
            {"role": "assistant", "content": [call.model_dump(exclude_none=True)]},
            {"role": "user", "content": content},
        ]
        done = await ant.messages.create(model="m", max_tokens=9, messages=messages, tools=MESSAGES_TOOLS)
        assert done.stop_reason == "end_turn"
        assert done.content[0].type == "text"
        assert done.content[0].text == "found it"

    async def test_tool_call_streamed(self, ant: AsyncAnthropic) -> None:
        manager = ant.messages.stream(model="m", max_tokens=9, messages=user(CALL), tools=MESSAGES_TOOLS)
        async with manager as stream:
            events = [event async for event in stream]
            final = await stream.get_final_message()
        assert len([event for event in events if event.type == "input_json"]) >= 2
        assert final.stop_reason == "tool_use"
        [call] = final.content
        assert call.type == "tool_use"
        assert (call.name, call.input) == ("search", ARGUMENTS)

    async def test_count_tokens(self, ant: AsyncAnthropic) -> None:
        counted = await ant.messages.count_tokens(model="m", system="be terse", messages=user("one two three"))
        assert counted.input_tokens == 5


class TestRefusals:
    async def test_missing_or_wrong_text_field_is_the_sdks_own_bad_request(
        self, oai: AsyncOpenAI, ant: AsyncAnthropic
    ) -> None:
        nothing: Any = None
        wrong: Any = ["text"]
        for given in (nothing, wrong):
            with pytest.raises(openai.BadRequestError) as chat:
                await oai.chat.completions.create(model="m", messages=given)
            assert (chat.value.param, chat.value.type) == ("messages", "invalid_request_error")
            with pytest.raises(openai.BadRequestError) as responses:
                await oai.responses.create(model="m", input=given, stream=True)
            assert responses.value.param == "input"
            with pytest.raises(anthropic.BadRequestError) as messages:
                await ant.messages.create(model="m", max_tokens=9, messages=given)
            assert messages.value.type == "invalid_request_error"
            with pytest.raises(anthropic.BadRequestError):
                await ant.messages.count_tokens(model="m", messages=given)

    @pytest.mark.parametrize("route", [*MODEL_ROUTES, "/messages/count_tokens"])
    @pytest.mark.parametrize(
        ("raw", "headers"),
        [
            (b"", {}),
            (b'{"model": ', {}),
            (b"[1]", {}),
            (b'"\xff"', {}),
            (b'{"input": 5, "messages": 5}', {}),
            (b"[" * 100_000, {}),
            (b"not gzip", {"Content-Encoding": "gzip"}),
            (b"not zstd", {"Content-Encoding": "zstd"}),
        ],
    )
    async def test_malformed_body(
        self,
        echo: EchoModel,
        http: aiohttp.ClientSession,
        caplog: pytest.LogCaptureFixture,
        route: str,
        raw: bytes,
        headers: dict[str, str],
    ) -> None:
        async with http.post(echo.base_url + route, data=raw, headers=headers) as response:
            assert response.status == 400
            answer = await response.json()
        error = answer["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        assert "Traceback" not in error["message"]
        if route.startswith("/messages"):
            assert answer["type"] == "error"
        else:
            assert set(error) == {"message", "type", "param", "code"}
        async with http.get(echo.base_url + "/models") as response:
            assert response.status == 200
        assert caplog.records == []

    async def test_corrupt_compression_after_a_good_start(
        self, echo: EchoModel, http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
    ) -> None:
        good = gzip.compress(random.Random(7).randbytes(500_000))
        raw = good[:300_000] + b"\xff" * 200_000
        async with http.post(echo.base_url + "/messages", data=raw, headers={"Content-Encoding": "gzip"}) as response:
            assert response.status == 400
        assert caplog.records == []

    async def test_a_large_body_with_a_wrong_key_gets_its_401(self, http: aiohttp.ClientSession) -> None:
        async with EchoModel(api_key=KEY) as echo:
            for _ in range(3):
                async with http.post(echo.base_url + "/messages", data=io.BytesIO(bytes(20_000_000))) as response:
                    assert response.status == 401

    @pytest.mark.parametrize("stream", [False, True])
    async def test_nesting_that_cannot_be_echoed(
        self, echo: EchoModel, http: aiohttp.ClientSession, stream: bool
    ) -> None:
        deep = "[" * 500 + "]" * 500
        raw = f'{{"input": "hi", "stream": {str(stream).lower()}, "metadata": {deep}}}'.encode()
        async with http.post(echo.base_url + "/responses", data=raw) as response:
            assert response.status == 400
            assert "cannot be echoed" in (await response.json())["error"]["message"]

    async def test_odd_optional_fields_are_ignored(self, echo: EchoModel, http: aiohttp.ClientSession) -> None:
        body = {"model": None, "messages": [{"role": 5, "content": 7}, {"content": [None, {"type": "text"}]}]}
        for extra in ({}, {"stream": True, "stream_options": "x", "tools": 5}):
            async with http.post(echo.base_url + "/chat/completions", json=body | extra) as response:
                assert response.status == 200
                assert '"model":"echo"' in await response.text()

    async def test_wrong_key_is_the_sdks_own_authentication_error(self) -> None:
        async with EchoModel(api_key=KEY) as echo:
            root = echo.base_url.removesuffix("/v1")
            async with AsyncOpenAI(base_url=echo.base_url, api_key="wrong", max_retries=0) as oai:
                with pytest.raises(openai.AuthenticationError) as chat:
                    await oai.chat.completions.create(model="m", messages=user("hi"))
                assert chat.value.code == "invalid_api_key"
                with pytest.raises(openai.AuthenticationError):
                    await oai.responses.create(model="m", input="hi", stream=True)
                with pytest.raises(openai.AuthenticationError):
                    await oai.models.list()
            async with AsyncAnthropic(base_url=root, api_key="wrong", max_retries=0) as ant:
                with pytest.raises(anthropic.AuthenticationError) as messages:
                    await ant.messages.create(model="m", max_tokens=9, messages=user("hi"))
                assert messages.value.type == "authentication_error"
                with pytest.raises(anthropic.AuthenticationError):
                    await ant.models.list()
            assert echo.calls == 3

    async def test_right_key_in_either_header(self) -> None:
        async with EchoModel(api_key=KEY) as echo:
            root = echo.base_url.removesuffix("/v1")
            async with AsyncOpenAI(base_url=echo.base_url, api_key=KEY) as oai:
                assert (await oai.responses.create(model="m", input="hi")).output_text == "hi"
            async with AsyncAnthropic(base_url=root, api_key=KEY) as ant:
                await ant.messages.create(model="m", max_tokens=9, messages=user("hi"))
            async with AsyncAnthropic(base_url=root, auth_token=KEY) as ant:
                await ant.messages.create(model="m", max_tokens=9, messages=user("hi"))

    @pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer "}, {"x-api-key": "schlüssel"}])
    async def test_no_key_empty_key_and_foreign_bytes(
        self, http: aiohttp.ClientSession, headers: dict[str, str]
    ) -> None:
        async with EchoModel(api_key=KEY) as echo:
            async with http.get(echo.base_url + "/models", headers=headers) as response:
                assert response.status == 401
            async with http.head(echo.base_url.removesuffix("v1"), headers=headers) as response:
                assert response.status == 200

    async def test_unknown_path_is_404_in_the_dialects_shape(
        self, echo: EchoModel, oai: AsyncOpenAI, http: aiohttp.ClientSession
    ) -> None:
        with pytest.raises(openai.NotFoundError, match="POST /v1/embeddings"):
            await oai.embeddings.create(model="m", input="hi")
        async with http.post(echo.base_url + "/messages/batches", json={}) as response:
            assert response.status == 404
            assert (await response.json())["error"]["type"] == "not_found_error"
        async with http.get(echo.base_url + "/responses") as response:
            assert response.status == 404
        assert echo.calls == 0


class TestRest:
    async def test_models(self, oai: AsyncOpenAI, ant: AsyncAnthropic) -> None:
        page = await oai.models.list()
        assert [(model.id, model.object) for model in page.data] == [("echo", "model")]
        listed = await ant.models.list()
        assert [(model.id, model.type) for model in listed.data] == [("echo", "model")]
        assert not listed.has_more

    async def test_a_client_that_leaves_mid_stream_is_no_error(
        self, http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING)
        async with EchoModel(chunk_delay=0.01) as echo:
            body = {"messages": user("word " * 50), "stream": True}
            response = await http.post(echo.base_url + "/messages", json=body)
            await response.content.readline()
            response.close()
            await asyncio.sleep(0.3)
            async with http.post(echo.base_url + "/messages", json={"messages": user("next")}) as response:
                assert response.status == 200
        assert caplog.records == []

    async def test_a_client_that_leaves_while_it_sends_is_no_error(
        self, echo: EchoModel, caplog: pytest.LogCaptureFixture
    ) -> None:
        port = int(echo.base_url.removesuffix("/v1").rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/messages HTTP/1.1\r\nHost: echo\r\nContent-Length: 100\r\n\r\nshort")
        await writer.drain()
        await asyncio.sleep(0.2)
        assert echo.calls == 1
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.1)
        assert caplog.records == []

    async def test_big_text_streams_whole_in_few_events(self, oai: AsyncOpenAI) -> None:
        text = "0123456789 " * 1_000_000
        stream = await oai.chat.completions.create(model="m", messages=user(text), stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces) == text
        assert len(pieces) < 600
