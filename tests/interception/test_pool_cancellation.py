"""Cancelled twice, at each step of the event loop that a pool's operations take: whatever was opened is released."""

import asyncio
import random
from collections.abc import Awaitable

import pytest

from interception import ElasticInterceptionPool, ElasticInterceptionPoolConfig
from tests.helpers import until
from tests.interception.fakes import FakeTunnel, Rollout, hangs_are_failures, new_session, other_tasks, seated
from tunnel import TunnelError, TunnelGoneError
from tunnel.keepalive import TunnelClient

__all__ = ["hangs_are_failures"]
pytestmark = pytest.mark.usefixtures("hangs_are_failures")

STEPS = range(1, 26)
"""Rounds of the event loop before the first cancellation; no operation below takes more. (A task cancelled before its
first step never runs at all.)"""


class SteppingTunnel(FakeTunnel):
    """Takes some rounds of the event loop to be connected and to be disconnected."""

    def hangs(self) -> float:
        """Seconds for which it does nothing first."""
        return 0.0

    async def _connect(self, port: int) -> TunnelClient:
        if seconds := self.hangs():
            await asyncio.sleep(seconds)
        client = await super()._connect(port)
        try:
            for _ in range(3):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            await self._disconnect()
            raise
        return client

    async def _disconnect(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        await super()._disconnect()


@pytest.fixture
def tunnels(monkeypatch: pytest.MonkeyPatch) -> list[SteppingTunnel]:
    made: list[SteppingTunnel] = []

    def make(config: object) -> SteppingTunnel:
        made.append(SteppingTunnel())
        return made[-1]

    monkeypatch.setattr("interception.server.make_tunnel", make)
    return made


def new_pool() -> ElasticInterceptionPool:
    config = ElasticInterceptionPoolConfig(multiplex=1, idle_timeout=None)
    return ElasticInterceptionPool(config, requires_tunnel=True)


async def cancelled_twice(operation: Awaitable[object], step: int, between: int = 1) -> None:
    """Whether it was cancelled or had ended by then, it ends."""
    task = asyncio.ensure_future(operation)
    for rounds in (step, between):
        for _ in range(rounds):
            await asyncio.sleep(0)
        task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()


async def nothing_is_left(pool: ElasticInterceptionPool, tunnels: list[SteppingTunnel]) -> None:
    assert sum(tunnel.connected for tunnel in tunnels) == 0
    assert pool.servers == []
    await until(lambda: not other_tasks())


@pytest.mark.parametrize("step", STEPS)
async def test_start(step: int, tunnels: list[SteppingTunnel]) -> None:
    pool = new_pool()
    await cancelled_twice(pool.start(), step)
    await pool.stop()
    await nothing_is_left(pool, tunnels)


@pytest.mark.parametrize("step", STEPS)
async def test_acquire_that_makes_the_pool_grow(step: int, tunnels: list[SteppingTunnel]) -> None:
    pool = new_pool()
    await pool.start()
    async with pool.acquire(new_session()):
        second = Rollout(pool)
        for _ in range(step):
            await asyncio.sleep(0)
        second.task.cancel()
        await asyncio.sleep(0)
        second.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second.task
        assert sum(server.load for server in pool.servers) == 1
        assert pool.stats().waiting == 0
    await pool.stop()
    await nothing_is_left(pool, tunnels)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("starting", [3, 12], ids=["early in the growth", "late in the growth"])
async def test_stop_during_growth(step: int, starting: int, tunnels: list[SteppingTunnel]) -> None:
    pool = new_pool()
    await pool.start()
    rollouts = [Rollout(pool) for _ in range(4)]
    for _ in range(starting):
        await asyncio.sleep(0)
    await cancelled_twice(pool.stop(), step)
    for rollout in rollouts:
        if rollout.seated:
            rollout.tell()
    for rollout in rollouts:
        with pytest.raises((TunnelError, RuntimeError)):
            await rollout.task
    await nothing_is_left(pool, tunnels)


@pytest.mark.parametrize("step", STEPS)
async def test_the_last_rollout_of_a_retired_server(step: int, tunnels: list[SteppingTunnel]) -> None:
    pool = new_pool()
    await pool.start()
    rollout = Rollout(pool)
    await seated(rollout)
    await tunnels[0].set_gone()
    rollout.tell()
    for _ in range(step):
        await asyncio.sleep(0)
    rollout.task.cancel()
    await asyncio.sleep(0)
    rollout.task.cancel()
    await asyncio.wait([rollout.task])
    await until(lambda: not tunnels[0].connected)
    assert tunnels[0].disconnects == 1
    await cancelled_twice(pool.stop(), step % 5)
    await nothing_is_left(pool, tunnels)


@pytest.mark.parametrize("seed", range(4))
async def test_anything_at_random(seed: int, tunnels: list[SteppingTunnel], monkeypatch: pytest.MonkeyPatch) -> None:
    """500 rollouts that come, go, and are cancelled, tunnels that go or hang at first, and a stop meanwhile."""
    chance = random.Random(seed)
    monkeypatch.setattr("interception.placement.LEAST_PATIENCE", 0.005)
    monkeypatch.setattr(SteppingTunnel, "hangs", lambda tunnel: chance.choice([0.0, 0.0, 0.0, 0.1]))
    pool = ElasticInterceptionPool(
        ElasticInterceptionPoolConfig(multiplex=3, idle_timeout=0.001, max_servers=12, start_patience=0.01),
        requires_tunnel=True,
    )
    await pool.start()
    peak = 0

    async def rollout() -> None:
        nonlocal peak
        async with pool.acquire(new_session(), timeout=chance.choice([None, None, 5.0])):
            peak = max(peak, *(server.load for server in pool.servers), 0)
            for _ in range(chance.randrange(8)):
                await asyncio.sleep(0)

    def fault() -> None:
        serving = [tunnel for tunnel in tunnels if tunnel.connected and tunnel._fate and not tunnel._fate.done()]
        if serving and chance.random() < 0.05:
            fate = chance.choice(serving)._fate
            assert fate is not None
            fate.set_result(TunnelGoneError("refused as gone"))  # it may be closed before it hears of it

    running: list[asyncio.Task[None]] = []
    for number in range(500):
        running.append(asyncio.create_task(rollout()))
        if chance.random() < 0.3:
            chance.choice(running[-20:]).cancel()
        fault()
        assert len(pool.servers) + len(pool.stats().starting) <= 12
        for _ in range(chance.randrange(3)):
            await asyncio.sleep(0)
        if number == 450:
            await cancelled_twice(pool.stop(), chance.randrange(20))
            await pool.start()
    await asyncio.wait(running)
    for task in running:
        if not task.cancelled() and (error := task.exception()) is not None:
            assert isinstance(error, TunnelError | RuntimeError), error
    assert peak <= 3
    assert [server.load for server in pool.servers] == [0] * len(pool.servers)
    await pool.stop()
    await nothing_is_left(pool, tunnels)


async def test_a_pool_whose_stop_was_cancelled_can_be_started_again(tunnels: list[SteppingTunnel]) -> None:
    pool = new_pool()
    await pool.start()
    await cancelled_twice(pool.stop(), 1)
    await pool.start()
    async with pool.acquire(new_session()):
        assert sum(tunnel.connected for tunnel in tunnels) == 1
    await pool.stop()
    await nothing_is_left(pool, tunnels)
