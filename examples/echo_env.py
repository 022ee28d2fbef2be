"""An env whose rollouts talk to the echo model through an interception pool.

    async with env_server("examples.echo_env:make") as address, EnvClient(address) as client:
        reply = await client.run({"prompt": "hello", "turns": 3}, on_delta=print)

A request names its `prompt` and how many `turns` the agent takes. Each turn is emitted as a delta as it ends; the reply
has the `reward`, which is the share of the turns that said what was asked for, and a summary of the recorded trace.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from envserver import Emit
from interception import ElasticInterceptionPool, ElasticInterceptionPoolConfig, RolloutSession, Slot, Trace, Upstream
from interception.echo import EchoModel


class EchoEnv:
    def __init__(self, multiplex: int = 32) -> None:
        self._config = ElasticInterceptionPoolConfig(multiplex=multiplex)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        # What all rollouts share: the model, the pool, one HTTP session. The address is published once they are up.
        async with (
            EchoModel() as model,
            ElasticInterceptionPool(self._config) as self._pool,
            aiohttp.ClientSession(raise_for_status=True) as self._http,
        ):
            self._upstream = Upstream(base_url=model.base_url)
            yield

    async def run(self, request: dict[str, Any], emit: Emit) -> dict[str, Any]:
        prompt, turns = request.get("prompt"), request.get("turns", 1)
        if not isinstance(prompt, str) or not isinstance(turns, int) or turns < 1:
            raise ValueError("a request is {'prompt': TEXT, 'turns': 1 or more}")
        session = RolloutSession(self._upstream, model="echo")
        async with self._pool.acquire(session) as slot:
            answers = await session.guard(self._agent(slot, prompt, turns, emit))
        return {"reward": sum(prompt in answer for answer in answers) / turns, "trace": summary(session.trace)}

    async def _agent(self, slot: Slot, prompt: str, turns: int, emit: Emit) -> list[str]:
        """Stands in for a harness in a sandbox: it knows its slot, and nothing else."""
        messages: list[dict[str, str]] = []
        answers: list[str] = []
        for turn in range(1, turns + 1):
            messages.append({"role": "user", "content": f"{prompt} ({turn})"})
            async with self._http.post(
                f"{slot.base_url}/v1/chat/completions",
                json={"model": "any", "messages": messages},
                headers={"Authorization": f"Bearer {slot.model_secret}"},
            ) as response:
                answer = (await response.json())["choices"][0]["message"]
            messages.append(answer)
            answers.append(answer["content"])
            await emit({"turn": turn, "answer": answer["content"]})
        return answers


def summary(trace: Trace) -> dict[str, Any]:
    """What of a trace travels in a reply: the trace itself stays where it was recorded."""
    usages = [turn.usage for turn in trace.turns if turn.usage is not None]
    return {
        "id": trace.id,
        "turns": len(trace.turns),
        "delivered": sum(turn.delivered for turn in trace.turns),
        "input_tokens": sum(usage.input_tokens or 0 for usage in usages),
        "output_tokens": sum(usage.output_tokens or 0 for usage in usages),
    }


def make(multiplex: int = 32) -> EchoEnv:
    """`multiplex`: rollouts on one interception server."""
    return EchoEnv(multiplex)
