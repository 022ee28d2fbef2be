"""Our interception server, as its users get it: every rule holds, and every turn is recorded."""

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benchmarks.gateway.control import PATH, Served, Session, main
from interception import InterceptionServer, RolloutSession, Upstream


@asynccontextmanager
async def ours(upstream: str) -> AsyncIterator[Served]:
    async with InterceptionServer() as server:
        pairs: list[tuple[str, str]] = []

        def sessions(number: int) -> list[Session]:
            while pairs:
                server.unregister(*pairs.pop())
            gc.collect()  # the rounds before must not be this one's burden
            endpoint = Upstream(base_url=f"{upstream}/v1", api_key="upstream-key")
            pairs.extend(server.register(RolloutSession(endpoint)) for _ in range(number))
            return [Session(PATH, model_secret) for model_secret, _ in pairs]

        yield Served(server.base_url, sessions)


if __name__ == "__main__":
    main(ours)
