"""What the real SDKs make of a dialect's errors, keepalives and rendered answers."""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import web
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from interception.dialects import CHAT, MESSAGES, RESPONSES
from interception.sse import Json, SseParser
from tests.interception.corpora import (
    anthropic_messages,
    openai_chat,
    openai_responses,
    read,
    vllm_chat,
    without_nan,
)


class Replay:
    """A server that answers every POST with the same bytes as an event stream, and keeps the request's headers."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.headers: dict[str, str] = {}
        self.port = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.headers = dict(request.headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in self.chunks:
            await response.write(chunk)
        return response


@pytest.fixture
async def replay() -> AsyncIterator[Replay]:
    replay = Replay()
    app = web.Application()
    app.router.add_post("/{path:.*}", replay.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    replay.port = runner.addresses[0][1]
    yield replay
    await runner.cleanup()


@pytest.fixture
async def oai(replay: Replay) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{replay.port}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
async def ant(replay: Replay) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=f"http://127.0.0.1:{replay.port}", api_key="any", max_retries=0) as client:
        yield client


MESSAGE: Any = [{"role": "user", "content": "x"}]


async def chat_helper(oai: AsyncOpenAI) -> Json:
    async with oai.chat.completions.stream(model="m", messages=MESSAGE) as stream:
        return (await stream.get_final_completion()).to_dict()


async def chat_raw(oai: AsyncOpenAI) -> list[Json]:
    stream = await oai.chat.completions.create(model="m", messages=MESSAGE, stream=True)
    return [chunk.to_dict() async for chunk in stream]


async def responses_helper(oai: AsyncOpenAI) -> Json:
    async with oai.responses.stream(model="m", input="x") as stream:
        return (await stream.get_final_response()).to_dict()


async def responses_raw(oai: AsyncOpenAI) -> list[Json]:
    stream = await oai.responses.create(model="m", input="x", stream=True)
    return [event.to_dict() async for event in stream]


async def messages_helper(ant: AsyncAnthropic) -> Json:
    async with ant.messages.stream(model="m", max_tokens=9, messages=MESSAGE) as stream:
        return (await stream.get_final_message()).to_dict()


async def messages_raw(ant: AsyncAnthropic) -> list[Json]:
    stream = await ant.messages.create(model="m", max_tokens=9, messages=MESSAGE, stream=True)
    return [event.to_dict() async for event in stream]


def beginnings(raw: bytes) -> Iterable[tuple[list[bytes], bytes]]:
    """The events of `raw` but the last two, some more each time."""
    events = [event.raw for event in SseParser().feed(raw)]
    for count in range(0, len(events) - 2, 3):
        yield events[:count], b"".join(events[:count])


class TestSdkErrors:
    async def test_chat(self, replay: Replay, oai: AsyncOpenAI) -> None:
        for events, begun in beginnings(openai_chat()[0]):
            stream = CHAT.stream()
            read(stream, begun)
            replay.chunks = [*events, CHAT.error_event(stream, 502, "the upstream broke off")]
            for call in (chat_raw, chat_helper):
                with pytest.raises(openai.APIError, match="the upstream broke off"):
                    await call(oai)

    async def test_error_shown_tells_whether_the_sdk_raises(
        self, replay: Replay, oai: AsyncOpenAI, ant: AsyncAnthropic
    ) -> None:
        for raw in (
            b'data: {"error": {"message": "no"}}\n\n',
            b'data: {"object": "error", "message": "no"}\n\n',
            b'event: error\ndata: {"message": "no"}\n\n',
        ):
            stream = CHAT.stream()
            read(stream, raw)
            replay.chunks = [raw]
            with pytest.raises(openai.APIError) if stream.error_shown() else contextlib.nullcontext():
                await chat_raw(oai)
        for raw in (
            b'event: error\ndata: {"type": "error", "error": {"message": "no"}}\n\n',
            b'data: {"type": "error", "error": {"message": "no"}}\n\n',
        ):
            messages = MESSAGES.stream()
            read(messages, raw)
            replay.chunks = [raw]
            with pytest.raises(anthropic.APIError) if messages.error_shown() else contextlib.nullcontext():
                await messages_raw(ant)

    async def test_messages(self, replay: Replay, ant: AsyncAnthropic) -> None:
        for events, begun in beginnings(anthropic_messages()[0]):
            stream = MESSAGES.stream()
            read(stream, begun)
            replay.chunks = [*events, MESSAGES.error_event(stream, 502, "the upstream broke off")]
            for call in (messages_raw, messages_helper):
                with pytest.raises(anthropic.APIStatusError, match="the upstream broke off"):
                    await call(ant)

    async def test_responses(self, replay: Replay, oai: AsyncOpenAI) -> None:
        for events, begun in beginnings(openai_responses()[0]):
            stream = RESPONSES.stream()
            read(stream, begun)
            replay.chunks = [*events, RESPONSES.error_event(stream, 502, "the upstream broke off")]
            last = (await responses_raw(oai))[-1]
            assert last["type"] == "response.failed"
            assert last["response"]["error"]["message"] == "the upstream broke off"
            # The helper has no exception of its own for a failed response.
            with pytest.raises(RuntimeError, match=r"response\.completed|response\.created"):
                await responses_helper(oai)

    async def test_responses_helper_fires_the_failed_event(self, replay: Replay, oai: AsyncOpenAI) -> None:
        begun = b"".join(event.raw for event in SseParser().feed(openai_responses()[0])[:-1])
        stream = RESPONSES.stream()
        read(stream, begun)
        replay.chunks = [begun, RESPONSES.error_event(stream, 502, "the upstream broke off")]
        async with oai.responses.stream(model="m", input="x") as helper:
            last = [event async for event in helper][-1]
        assert last.type == "response.failed"
        assert last.response.error is not None
        assert last.response.error.message == "the upstream broke off"
        assert last.response.id == "resp_1"


class TestSdkKeepalives:
    async def test_chat_between_any_events(self, replay: Replay, oai: AsyncOpenAI) -> None:
        raw, _ = openai_chat()
        replay.chunks = [raw]
        expected = await chat_raw(oai)
        keepalive = CHAT.keepalive(CHAT.stream(), 5)
        replay.chunks = [part for event in SseParser().feed(raw) for part in (keepalive, keepalive, event.raw)]
        assert await chat_raw(oai) == expected
        # After an `id:` line a blank line of its own would be an event, and an empty one.
        replay.chunks = [part for event in SseParser().feed(raw) for part in (b"id: 1\n" + event.raw, keepalive)]
        assert await chat_raw(oai) == expected

    async def test_messages_between_any_events(self, replay: Replay, ant: AsyncAnthropic) -> None:
        raw, _ = anthropic_messages()
        replay.chunks = [raw]
        expected, whole = await messages_raw(ant), await messages_helper(ant)
        keepalive = MESSAGES.keepalive(MESSAGES.stream(), 5)
        replay.chunks = [part for event in SseParser().feed(raw) for part in (keepalive, keepalive, event.raw)]
        assert await messages_raw(ant) == expected
        assert await messages_helper(ant) == whole

    async def test_responses_between_any_events(self, replay: Replay, oai: AsyncOpenAI) -> None:
        raw, _ = openai_responses()
        replay.chunks = [raw]
        expected, whole = await responses_raw(oai), await responses_helper(oai)
        keepalive = RESPONSES.keepalive(RESPONSES.stream(), 5)
        replay.chunks = [part for event in SseParser().feed(raw) for part in (keepalive, event.raw)]
        assert await responses_raw(oai) == expected
        assert await responses_helper(oai) == whole

    async def test_the_responses_helper_after_minutes_of_silence(self, replay: Replay, oai: AsyncOpenAI) -> None:
        raw, whole = openai_responses()
        replay.chunks = [raw]
        await responses_helper(oai)
        silences = (5.0, 120.0, 125.0, 130.0)
        stream = RESPONSES.stream()
        for_sdk = [RESPONSES.keepalive(stream, silence, replay.headers) for silence in silences]
        replay.chunks = [*for_sdk, raw]
        assert (await responses_helper(oai))["id"] == whole["id"]
        # Whoever reads the events themselves is served by placeholders too.
        placeholders = [RESPONSES.keepalive(stream, silence) for silence in silences]
        replay.chunks = [*placeholders, raw]
        kinds = [event["type"] for event in await responses_raw(oai)]
        begun = ["response.created", "response.in_progress"]
        assert kinds[:5] == [*begun, "response.in_progress", *begun]
        assert kinds[-1] == "response.completed"

    async def test_placeholders_and_an_error_of_one_response(self, replay: Replay, oai: AsyncOpenAI) -> None:
        stream = RESPONSES.stream(model="m")
        placeholders = [RESPONSES.keepalive(stream, silence) for silence in (120.0, 125.0)]
        replay.chunks = [*placeholders, RESPONSES.error_event(stream, 504, "the upstream stalled")]
        async with oai.responses.stream(model="m", input="x") as helper:
            events = [event async for event in helper]
        assert [event.type for event in events] == ["response.created", "response.in_progress", "response.failed"]


class TestSdkRendered:
    @pytest.mark.parametrize("corpus", [openai_chat, vllm_chat])
    async def test_chat(self, replay: Replay, oai: AsyncOpenAI, corpus: Callable[[], tuple[bytes, Json]]) -> None:
        _, whole = corpus()
        replay.chunks = [CHAT.render(without_nan(whole))]
        final = await chat_helper(oai)
        [choice], [expected] = final["choices"], whole["choices"]
        assert choice["finish_reason"] == expected["finish_reason"]
        for name, value in expected["message"].items():
            if name != "tool_calls":
                assert choice["message"].get(name) == value
        calls = choice["message"].get("tool_calls") or []
        assert [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls] == [
            (call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in expected["message"].get("tool_calls", [])
        ]
        assert final["usage"] == whole["usage"]
        chunks = await chat_raw(oai)
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert {chunk["id"] for chunk in chunks} == {whole["id"]}

    async def test_chat_with_two_choices(self, replay: Replay, oai: AsyncOpenAI) -> None:
        choices = [
            {"index": index, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            for index, text in enumerate("ab")
        ]
        whole = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": choices}
        replay.chunks = [CHAT.render(whole)]
        final = await chat_helper(oai)
        assert [choice["message"]["content"] for choice in final["choices"]] == ["a", "b"]
        stream = CHAT.stream(2)
        read(stream, CHAT.render(whole))
        assert stream.response() == whole

    async def test_responses(self, replay: Replay, oai: AsyncOpenAI) -> None:
        raw, whole = openai_responses()
        replay.chunks = [raw]
        expected = await responses_helper(oai)
        replay.chunks = [RESPONSES.render(whole)]
        assert await responses_helper(oai) == expected
        deltas = [event["delta"] for event in await responses_raw(oai) if event["type"].endswith("output_text.delta")]
        assert deltas == ["Hi you"]

    @pytest.mark.parametrize("status", ["incomplete", "failed"])
    async def test_responses_that_did_not_complete(self, replay: Replay, oai: AsyncOpenAI, status: str) -> None:
        _, whole = openai_responses()
        replay.chunks = [RESPONSES.render({**whole, "status": status})]
        assert (await responses_raw(oai))[-1]["type"] == f"response.{status}"
        async with oai.responses.stream(model="m", input="x") as helper:
            assert [event.type async for event in helper][-1] == f"response.{status}"

    async def test_messages(self, replay: Replay, ant: AsyncAnthropic) -> None:
        raw, whole = anthropic_messages()
        replay.chunks = [raw]
        expected = await messages_helper(ant)
        replay.chunks = [MESSAGES.render(whole)]
        assert await messages_helper(ant) == expected
        assert [block["type"] for block in expected["content"]] == [block["type"] for block in whole["content"]]

    async def test_what_a_hook_has_made_of_little(self, replay: Replay, oai: AsyncOpenAI, ant: AsyncAnthropic) -> None:
        chat_answer: Json = {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]}
        replay.chunks = [CHAT.render(chat_answer)]
        assert (await chat_helper(oai))["choices"][0]["message"]["content"] == "a"
        part = {"type": "output_text", "text": "a"}
        output = [{"type": "message", "content": [part]}, {"type": "function_call", "name": "f", "arguments": "{}"}]
        replay.chunks = [RESPONSES.render({"id": "resp_1", "output": output})]
        final = await responses_helper(oai)
        assert final["output"][0]["content"][0]["text"] == "a"
        assert final["output"][1]["arguments"] == "{}"
        content = [{"type": "text", "text": "a"}, {"type": "tool_use", "id": "1", "name": "f", "input": {"b": 1}}]
        replay.chunks = [MESSAGES.render({"role": "assistant", "content": content, "stop_reason": "tool_use"})]
        message = await messages_helper(ant)
        assert message["content"][0]["text"] == "a"
        assert message["content"][1]["input"] == {"b": 1}
