"""Our elastic pool over the fake tunnel, for `benchmarks.pool`: runs one round in this interpreter."""

from contextlib import AbstractAsyncContextManager

import interception.server
from benchmarks.pool_load import Pool, Starts, main
from interception import ElasticInterceptionPool, ElasticInterceptionPoolConfig, RolloutSession, Upstream
from tunnel import KeepAlivePolicy, Tunnel, TunnelClient, TunnelConfig


class FakeClient:
    """A tunnel client that leads straight to the local port."""

    is_running = True

    def __init__(self, port: int) -> None:
        self.url: str | None = f"http://127.0.0.1:{port}"

    async def restart(self) -> str:
        raise AssertionError("the fake tunnel never fails")


class FakeTunnel(Tunnel):
    """Takes its time to start."""

    def __init__(self, starts: Starts) -> None:
        super().__init__(KeepAlivePolicy())
        self._starts = starts

    async def _connect(self, port: int) -> TunnelClient:
        await self._starts.start()
        return FakeClient(port)

    async def _disconnect(self) -> None:
        pass


class Ours:
    """Servers are made by the pool itself; only the tunnel they make for themselves is the fake one."""

    def pool(self, starts: Starts, multiplex: int) -> AbstractAsyncContextManager[Pool]:
        def make_tunnel(config: TunnelConfig) -> Tunnel:
            return FakeTunnel(starts)

        interception.server.make_tunnel = make_tunnel  # type: ignore[attr-defined]
        return ElasticInterceptionPool(ElasticInterceptionPoolConfig(multiplex=multiplex), requires_tunnel=True)

    def session(self) -> RolloutSession:
        return RolloutSession(Upstream(base_url="http://127.0.0.1:9/v1"))


if __name__ == "__main__":
    main(Ours)
