"""The real SDKs, streamed and not, through a tunnel URL to the echo model."""

from collections.abc import AsyncIterator
from pathlib import Path

import anthropic
import openai
import pytest

from interception import InterceptionServer, InterceptionServerConfig, RolloutSession, Slot, Upstream
from interception.echo import EchoModel
from tests.prime import FakePrime
from tunnel import PrimeTunnelConfig


@pytest.fixture
async def rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[RolloutSession, Slot]]:
    with FakePrime(tmp_path, scale=0.1) as service:
        for name, value in service.env().items():
            monkeypatch.setenv(name, value)
        config = InterceptionServerConfig(tunnel=PrimeTunnelConfig())
        async with EchoModel() as echo, InterceptionServer(config, requires_tunnel=True) as server:
            session = RolloutSession(Upstream(base_url=echo.base_url))
            async with server.acquire(session) as slot:
                assert slot.base_url in service.urls.values()
                yield session, slot


@pytest.fixture
async def openai_client(rollout: tuple[RolloutSession, Slot]) -> AsyncIterator[openai.AsyncOpenAI]:
    env = rollout[1].env()
    async with openai.AsyncOpenAI(base_url=env["OPENAI_BASE_URL"], api_key=env["OPENAI_API_KEY"]) as client:
        yield client


@pytest.fixture
async def anthropic_client(rollout: tuple[RolloutSession, Slot]) -> AsyncIterator[anthropic.AsyncAnthropic]:
    env = rollout[1].env()
    async with anthropic.AsyncAnthropic(base_url=env["ANTHROPIC_BASE_URL"], api_key=env["ANTHROPIC_API_KEY"]) as client:
        yield client


def only_turn_is_whole(rollout: tuple[RolloutSession, Slot], dialect: str) -> None:
    [turn] = rollout[0].trace.turns
    assert turn.dialect == dialect
    assert turn.complete
    assert "hello out there" in str(turn.response)


async def test_chat_completions(rollout: tuple[RolloutSession, Slot], openai_client: openai.AsyncOpenAI) -> None:
    answer = await openai_client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hello out there"}]
    )
    assert answer.choices[0].message.content == "hello out there"
    only_turn_is_whole(rollout, "chat completions")


async def test_chat_completions_streamed(
    rollout: tuple[RolloutSession, Slot], openai_client: openai.AsyncOpenAI
) -> None:
    stream = await openai_client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hello out there"}], stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello out there"
    assert rollout[0].trace.turns[0].complete


async def test_responses(rollout: tuple[RolloutSession, Slot], openai_client: openai.AsyncOpenAI) -> None:
    answer = await openai_client.responses.create(model="m", input="hello out there")
    assert answer.output_text == "hello out there"
    only_turn_is_whole(rollout, "responses")


async def test_responses_streamed(rollout: tuple[RolloutSession, Slot], openai_client: openai.AsyncOpenAI) -> None:
    async with openai_client.responses.stream(model="m", input="hello out there") as stream:
        answer = await stream.get_final_response()
    assert answer.output_text == "hello out there"
    only_turn_is_whole(rollout, "responses")


async def test_messages(rollout: tuple[RolloutSession, Slot], anthropic_client: anthropic.AsyncAnthropic) -> None:
    answer = await anthropic_client.messages.create(
        model="m", max_tokens=50, messages=[{"role": "user", "content": "hello out there"}]
    )
    assert answer.content[0].type == "text"
    assert answer.content[0].text == "hello out there"
    only_turn_is_whole(rollout, "messages")


async def test_messages_streamed(
    rollout: tuple[RolloutSession, Slot], anthropic_client: anthropic.AsyncAnthropic
) -> None:
    async with anthropic_client.messages.stream(
        model="m", max_tokens=50, messages=[{"role": "user", "content": "hello out there"}]
    ) as stream:
        assert await stream.get_final_text() == "hello out there"
    assert rollout[0].trace.turns[0].complete
