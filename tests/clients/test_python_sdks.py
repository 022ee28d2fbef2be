"""The official Python SDKs, sync and async, in the three dialects: answers, tools, retries, raw responses.

How they take broken and slow streams is in `tests/interception/test_streams.py`.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anthropic
import openai
import pytest

from interception import CALL_ID_HEADER
from interception.dialects import CHAT, RESPONSES
from interception.echo import EchoModel
from tests.clients.proxy import CuttingProxy
from tests.helpers import until
from tests.interception.scripted import WIRES, Rollout, Step, Wire, answers, does, rollout, streams
from tests.interception.sdks import STATUS_ERRORS, sdk

Ask = Callable[..., Awaitable[str]]


@contextmanager
def sync_clients(running: Rollout, max_retries: int) -> Iterator[tuple[openai.OpenAI, anthropic.Anthropic]]:
    env = running.slot.env()
    # Without certificates, which would be loaded for each client, a third of a second each.
    with (
        openai.OpenAI(
            base_url=env["OPENAI_BASE_URL"],
            api_key=env["OPENAI_API_KEY"],
            max_retries=max_retries,
            http_client=openai.DefaultHttpxClient(verify=False),
        ) as oai,
        anthropic.Anthropic(
            base_url=env["ANTHROPIC_BASE_URL"],
            api_key=env["ANTHROPIC_API_KEY"],
            max_retries=max_retries,
            http_client=anthropic.DefaultHttpxClient(verify=False),
        ) as ant,
    ):
        yield oai, ant


def ask_sync(
    wire: Wire, oai: openai.OpenAI, ant: anthropic.Anthropic, text: str = "hi", *, stream: bool = False
) -> str:
    """The text of the answer."""
    body: Any = wire.request(text)
    if wire.dialect is CHAT:
        if stream:
            with oai.chat.completions.stream(**body) as chat:
                return chat.get_final_completion().choices[0].message.content or ""
        return oai.chat.completions.create(**body).choices[0].message.content or ""
    if wire.dialect is RESPONSES:
        if stream:
            with oai.responses.stream(**body) as responses:
                return responses.get_final_response().output_text
        return oai.responses.create(**body).output_text
    if stream:
        with ant.messages.stream(**body) as messages:
            return messages.get_final_text()
    block = ant.messages.create(**body).content[0]
    assert block.type == "text"
    return block.text


@asynccontextmanager
async def asking(kind: str, running: Rollout, wire: Wire, *, max_retries: int = 2) -> AsyncIterator[Ask]:
    """How one asks by the SDK of that kind."""
    if kind == "async":
        async with sdk(running, wire, max_retries=max_retries) as client:
            yield client.ask
        return
    with sync_clients(running, max_retries) as (oai, ant):
        yield lambda *args, **options: asyncio.to_thread(ask_sync, wire, oai, ant, *args, **options)


@pytest.fixture(params=WIRES, ids=str)
def wire(request: pytest.FixtureRequest) -> Wire:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def good(wire: Wire, stream: bool, text: str = "hello") -> Any:
    return streams(wire.stream(text, usage=True)) if stream else answers(wire.answer(text))


# -- answers -------------------------------------------------------------------------------------------


async def test_an_answer_is_one_upstream_call_and_one_turn(wire: Wire, kind: str, stream: bool) -> None:
    async with rollout() as running, asking(kind, running, wire) as ask:
        running.upstream.then(good(wire, stream))
        assert await ask(stream=stream) == "hello"
        [turn] = running.trace.turns
        await until(lambda: turn.delivered)
        assert (turn.dialect, turn.streamed, turn.complete) == (wire.dialect.name, stream, True)
        assert wire.said(turn.response) == "hello"
        assert turn.usage is not None
        assert (turn.usage.input_tokens, turn.usage.output_tokens) == (3, 2)
        assert running.upstream.calls == 1


# -- tools ---------------------------------------------------------------------------------------------

TASK = 'add them\n!call add {"a": 2, "b": 40}'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}


def add(arguments: Any) -> str:
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    return f"the sum is {given['a'] + given['b']}"


def chat_with_tool(oai: openai.OpenAI, stream: bool) -> str | None:
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "user", "content": TASK}]

    def turn() -> Any:
        if not stream:
            return oai.chat.completions.create(model="m", messages=messages, tools=tools).choices[0]
        with oai.chat.completions.stream(model="m", messages=messages, tools=tools) as events:
            return events.get_final_completion().choices[0]

    choice = turn()
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    messages.append(choice.message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": add(call.function.arguments)})
    return turn().message.content  # type: ignore[no-any-return]


def responses_with_tool(oai: openai.OpenAI, stream: bool) -> str | None:
    tools: Any = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}]
    items: list[Any] = [{"role": "user", "content": TASK}]

    def turn() -> Any:
        if not stream:
            return oai.responses.create(model="m", input=items, tools=tools)
        with oai.responses.stream(model="m", input=items, tools=tools) as events:
            return events.get_final_response()

    [call] = turn().output
    assert call.type == "function_call"
    items.append(call.to_dict())
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": add(call.arguments)})
    return turn().output_text  # type: ignore[no-any-return]


def messages_with_tool(ant: anthropic.Anthropic, stream: bool) -> str | None:
    tools: Any = [{"name": "add", "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": TASK}]

    def turn() -> Any:
        if not stream:
            return ant.messages.create(model="m", max_tokens=50, messages=messages, tools=tools)
        with ant.messages.stream(model="m", max_tokens=50, messages=messages, tools=tools) as events:
            return events.get_final_message()

    answer = turn()
    assert answer.stop_reason == "tool_use"
    [call] = answer.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": add(call.input)}
    messages.append({"role": "assistant", "content": [call.to_dict()]})
    messages.append({"role": "user", "content": [result]})
    return turn().content[0].text  # type: ignore[no-any-return]


async def test_a_tool_is_called_and_its_result_answered(wire: Wire, stream: bool) -> None:
    async with EchoModel() as echo, rollout(base_url=echo.base_url) as running:
        with sync_clients(running, max_retries=0) as (oai, ant):
            work: Callable[[], str | None] = {
                "chat completions": lambda: chat_with_tool(oai, stream),
                "responses": lambda: responses_with_tool(oai, stream),
                "messages": lambda: messages_with_tool(ant, stream),
            }[wire.dialect.name]
            assert await asyncio.to_thread(work) == "the sum is 42"
        assert echo.calls == 2
        assert len(running.trace.turns) == 2
        assert all(turn.complete for turn in running.trace.turns)
        await until(lambda: running.trace.turns[-1].delivered)


# -- retries, by the SDKs' own rules ---------------------------------------------------------------------

SOON = {"retry-after-ms": "1"}


def overloaded(status: int) -> Any:
    return answers({"error": {"type": "error", "message": "try again"}}, status=status, headers=SOON)


@pytest.mark.parametrize(("kind", "stream"), [("sync", False), ("async", True)], ids=["sync whole", "async streamed"])
@pytest.mark.parametrize("fault", [overloaded(429), overloaded(500), does(Step.RESET)], ids=["429", "500", "reset"])
async def test_a_fault_of_the_upstreams_is_retried_and_is_an_attempt_of_the_same_turn(
    wire: Wire, kind: str, stream: bool, fault: Any
) -> None:
    async with rollout() as running, asking(kind, running, wire) as ask:
        running.upstream.then(fault, good(wire, stream))
        assert await ask(stream=stream) == "hello"
        assert running.upstream.calls == 2
        [turn] = running.trace.turns
        assert len(turn.attempts) == 2
        assert turn.attempts[0].error is not None
        assert turn.winner is turn.attempts[1]
        assert wire.said(turn.response) == "hello"


async def test_retries_that_are_spent_end_in_the_upstreams_own_error(wire: Wire, kind: str) -> None:
    async with rollout() as running, asking(kind, running, wire, max_retries=1) as ask:
        running.upstream.then(overloaded(429), overloaded(429))
        with pytest.raises(STATUS_ERRORS) as raised:
            await ask()
        assert raised.value.status_code == 429
        assert "try again" in str(raised.value)
        [turn] = running.trace.turns
        assert [attempt.status for attempt in turn.attempts] == [429, 429]
        assert (turn.complete, turn.delivered) == (False, False)


async def test_a_lost_answer_is_served_again_without_another_call(wire: Wire, kind: str, stream: bool) -> None:
    async with rollout() as running, CuttingProxy(running.slot.base_url) as proxy:
        running.slot = running.slot._replace(base_url=proxy.url)
        async with asking(kind, running, wire) as ask:
            running.upstream.then(good(wire, stream))
            proxy.cut_at(b"HTTP/1.1 200")
            assert await ask(stream=stream) == "hello"
        assert proxy.cuts == 1
        assert running.upstream.calls == 1
        [turn] = running.trace.turns
        assert (len(turn.attempts), turn.delivered) == (1, True)


async def test_an_answer_cut_in_its_body_is_served_again(wire: Wire, kind: str) -> None:
    async with rollout() as running, CuttingProxy(running.slot.base_url) as proxy:
        running.slot = running.slot._replace(base_url=proxy.url)
        async with asking(kind, running, wire) as ask:
            running.upstream.then(answers(wire.answer("hello")))
            proxy.cut_at(b"hello")
            assert await ask() == "hello"
        assert running.upstream.calls == 1
        assert len(running.trace.turns) == 1


async def test_no_sdk_retries_a_stream_it_has_begun_to_read(wire: Wire, kind: str) -> None:
    # So a stream that must survive a bad path is served whole; what was cut is in the trace, and was not answered.
    async with rollout(streaming="live") as running, CuttingProxy(running.slot.base_url) as proxy:
        running.slot = running.slot._replace(base_url=proxy.url)
        async with asking(kind, running, wire) as ask:
            first, *rest = wire.events("hello", usage=True)
            go_on = asyncio.Event()
            running.upstream.then(streams(first, go_on, *rest))
            proxy.cut_at(rest[0])
            call = asyncio.ensure_future(ask(stream=True))
            await until(lambda: running.trace.turns and running.trace.turns[0].attempts[0].first_byte)
            go_on.set()
            with pytest.raises(Exception, match=r"incomplete chunked read|Connection error"):
                await call
        [turn] = running.trace.turns
        await until(lambda: turn.complete)
        assert running.upstream.calls == 1


# -- raw responses ---------------------------------------------------------------------------------------


async def test_raw_responses_show_status_headers_and_body(wire: Wire, kind: str) -> None:
    body: Any = wire.request()

    def create(oai: Any, ant: Any) -> Any:
        if wire.dialect is CHAT:
            return oai.chat.completions.with_raw_response.create(**body)
        if wire.dialect is RESPONSES:
            return oai.responses.with_raw_response.create(**body)
        return ant.messages.with_raw_response.create(**body)

    async with rollout() as running:
        running.upstream.then(answers(wire.answer("hello"), headers={"x-request-id": "req-7"}))
        if kind == "async":
            async with sdk(running, wire) as client:
                raw = await create(client.oai, client.ant)
        else:
            with sync_clients(running, 0) as clients:
                raw = await asyncio.to_thread(create, *clients)
        [turn] = running.trace.turns
        assert raw.status_code == 200
        assert raw.headers["x-request-id"] == "req-7"
        assert raw.headers[CALL_ID_HEADER] == turn.attempts[0].call_id
        parsed = raw.parse()
        if asyncio.iscoroutine(parsed):
            parsed = await parsed
        assert wire.said(parsed.to_dict()) == wire.said(turn.response) == "hello"


async def test_streamed_raw_responses_are_the_upstreams_bytes(wire: Wire) -> None:
    async with rollout() as running, sdk(running, wire) as client:
        sent = wire.stream("hello", usage=True)
        running.upstream.then(streams(sent))
        body: Any = wire.request(stream=True)
        if wire.dialect is CHAT:
            body["stream_options"] = {"include_usage": True}
            request = client.oai.chat.completions.with_streaming_response.create(**body)
        elif wire.dialect is RESPONSES:
            request = client.oai.responses.with_streaming_response.create(**body)
        else:
            request = client.ant.messages.with_streaming_response.create(**body)
        async with request as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            got = b"".join([chunk async for chunk in response.iter_bytes()])
        assert got == sent
        assert running.trace.turns[0].complete
