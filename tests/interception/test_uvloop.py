"""On uvloop all goes as on asyncio's own loop: whoever has chosen it has not chosen badly."""

from pathlib import Path

import pytest
import uvloop
from openai import AsyncOpenAI

from interception import ElasticInterceptionPool, ElasticInterceptionPoolConfig, RolloutSession, Upstream
from interception.echo import EchoModel
from tests.prime import FakePrime
from tunnel import PrimeTunnelConfig


def test_a_pool_behind_tunnels_serves_calls_and_streams_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> RolloutSession:
        config = ElasticInterceptionPoolConfig(tunnel=PrimeTunnelConfig())
        async with EchoModel() as model, ElasticInterceptionPool(config) as pool:
            session = RolloutSession(Upstream(base_url=model.base_url))
            async with pool.acquire(session) as slot:
                client = AsyncOpenAI(base_url=f"{slot.base_url}/v1", api_key=slot.model_secret)
                messages = [{"role": "user", "content": "again"}]
                whole = await client.chat.completions.create(model="m", messages=messages)
                assert whole.choices[0].message.content == "again"
                streamed = await client.chat.completions.create(model="m", messages=messages, stream=True)
                text = [part.choices[0].delta.content or "" async for part in streamed if part.choices]
                assert "".join(text) == "again"
                await client.close()
        return session

    with FakePrime(tmp_path) as service:
        for name, value in service.env().items():
            monkeypatch.setenv(name, value)
        session = uvloop.run(main())
        assert len(session.trace.turns) == 2
        assert not service.live()
