"""verifiers' elastic pool over the fake tunnel, for `benchmarks.pool`: runs one round in verifiers' own interpreter.

Its pool and its server are as installed. The fake tunnel is a `Tunnel` of its own kind, and stands where its server
makes one.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import verifiers.v1.interception.server
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.interception import (
    ElasticInterceptionPool,
    ElasticInterceptionPoolConfig,
)
from verifiers.v1.interception.tunnel import Tunnel
from verifiers.v1.session import RolloutSession
from verifiers.v1.trace import Trace

from benchmarks.pool_load import Pool, Starts, main


class FakeTunnel(Tunnel):  # type: ignore[misc]
    """Takes its time to start, and leads straight to the local port."""

    def __init__(self, starts: Starts) -> None:
        super().__init__()
        self._starts = starts

    @asynccontextmanager
    async def expose(self, port: int) -> AsyncIterator[str]:
        await self._starts.start()
        yield f"http://127.0.0.1:{port}"


class Verifiers:
    def __init__(self) -> None:
        endpoint = EvalClientConfig(base_url="http://127.0.0.1:9/v1", api_key_var="NO_SUCH_KEY")
        self._context = ModelContext(model="model", client=endpoint)

    def pool(self, starts: Starts, multiplex: int) -> AbstractAsyncContextManager[Pool]:
        verifiers.v1.interception.server.make_tunnel = lambda config: FakeTunnel(starts)
        pool: AbstractAsyncContextManager[Pool] = ElasticInterceptionPool(
            ElasticInterceptionPoolConfig(multiplex=multiplex), requires_tunnel=True
        )
        return pool

    def session(self) -> Any:
        task = {"type": "Task", "data": {"idx": 0, "prompt": "a task"}}
        trace = Trace.model_validate({"task": task, "agent": {"config": {}}})
        return RolloutSession(ctx=self._context, trace=trace)


if __name__ == "__main__":
    main(Verifiers)
