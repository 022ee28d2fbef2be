"""verifiers' interception server as installed, without a tunnel: runs in verifiers' own interpreter."""

import gc
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.trace import Trace

from benchmarks.gateway.canned import MODEL
from benchmarks.gateway.control import PATH, Served, Session, main

KEY = "BENCHMARK_UPSTREAM_KEY"


@asynccontextmanager
async def verifiers(upstream: str) -> AsyncIterator[Served]:
    os.environ[KEY] = "upstream-key"
    context = ModelContext(model=MODEL, client=EvalClientConfig(base_url=f"{upstream}/v1", api_key_var=KEY))
    async with InterceptionServer() as server:
        pairs: list[tuple[str, str]] = []

        def session() -> RolloutSession:
            task = {"type": "Task", "data": {"idx": 0, "prompt": "a task"}}
            return RolloutSession(ctx=context, trace=Trace.model_validate({"task": task, "agent": {"config": {}}}))

        def sessions(number: int) -> list[Session]:
            while pairs:
                server.unregister(*pairs.pop())
            gc.collect()
            pairs.extend(server.register(session()) for _ in range(number))
            return [Session(PATH, model_secret) for model_secret, _ in pairs]

        yield Served(server.base_url, sessions)


if __name__ == "__main__":
    main(verifiers)
