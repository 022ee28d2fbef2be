"""The whole chain, from a lost tunnel to the next rollout: the SDK, the tunnel, the server and the pool."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
import prime_tunnel
import pytest
from openai import AsyncOpenAI

from interception import (
    ElasticInterceptionPool,
    ElasticInterceptionPoolConfig,
    InterceptionServer,
    InterceptionServerConfig,
    RolloutSession,
    Slot,
    Upstream,
)
from interception.echo import EchoModel
from tests.helpers import until
from tests.prime import FakePrime
from tunnel import HEALTH_PATH, Gone, KeepAlivePolicy, PrimeTunnelConfig, RestartFailed, TunnelError, TunnelEvent

# Minutes become half seconds, or seconds become tenths. What a loaded machine may need is left as it is.
UNSCALED = {"probe_timeout": 5.0, "restart_timeout": 20.0, "give_up_after": 60.0, "clock_jump": 2.0}
PLAIN = KeepAlivePolicy(rule="plain").scaled(0.01).model_copy(update=UNSCALED)
EVIDENCE = (
    KeepAlivePolicy(rule="evidence")
    .scaled(0.1)
    .model_copy(update=UNSCALED | {"idle_spacing": 0.5, "busy_spacing": 0.5})
)


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePrime]:
    with FakePrime(tmp_path) as service:  # its own waits as they are: a busy machine must not outlast them
        for name, value in service.env().items():
            monkeypatch.setenv(name, value)
        yield service


class NextSdk(prime_tunnel.Tunnel):  # type: ignore[misc] # the SDK has no types
    """The SDK's tunnel as it is from 0.1.16 on."""

    async def keep_serving(self, path: str) -> NoReturn:
        failures = 0
        while True:
            await asyncio.sleep(PLAIN.confirm_after)
            async with aiohttp.ClientSession() as session, session.get(f"{self.url}{path}") as response:
                failures = 0 if response.status == 200 else failures + 1
            if failures == 2:
                await self.restart()
                failures = 0


class CountedServer(InterceptionServer):
    """A server that counts how often it is stopped."""

    def __init__(self, config: InterceptionServerConfig) -> None:
        super().__init__(config, requires_tunnel=True)
        self.stops = 0

    async def stop(self) -> None:
        self.stops += 1
        await super().stop()


async def ask(slot: Slot, text: str) -> str | None:
    """A model call as a harness makes it."""
    async with AsyncOpenAI(base_url=f"{slot.base_url}/v1", api_key=slot.model_secret, max_retries=0) as client:
        answer = await client.chat.completions.create(model="echo", messages=[{"role": "user", "content": text}])
    return answer.choices[0].message.content


class Rollout:
    """A rollout in a task of its own. After its harness has ended it holds its slot until `tidied`, to tidy up."""

    def __init__(self, pool: ElasticInterceptionPool, upstream: Upstream) -> None:
        self.session = RolloutSession(upstream)
        self.slot: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self.harness_ended_with: BaseException | None = None
        self.tidied = asyncio.Event()
        self.task = asyncio.create_task(self._run(pool))

    async def _run(self, pool: ElasticInterceptionPool) -> None:
        async with pool.acquire(self.session) as slot:
            try:
                await self.session.guard(self._harness(slot))
            except BaseException as error:
                self.harness_ended_with = error
                raise
            finally:
                await self.tidied.wait()

    async def _harness(self, slot: Slot) -> None:
        assert await ask(slot, "hello") == "hello"
        self.slot.set_result(slot)
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("keepalive", "policy"),
    [("ours", EVIDENCE), ("ours", PLAIN), ("sdk", PLAIN)],
    ids=["evidence", "plain", "sdk"],
)
async def test_a_lost_tunnel_ends_its_rollouts_and_the_next_ones_get_a_new_url(
    service: FakePrime, keepalive: Any, policy: KeepAlivePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    if keepalive == "sdk":
        monkeypatch.setattr(prime_tunnel, "Tunnel", NextSdk)
    tasks_before = asyncio.all_tasks()
    servers: list[CountedServer] = []
    events: list[TunnelEvent] = []

    def make_server(config: InterceptionServerConfig) -> CountedServer:
        servers.append(CountedServer(config))
        return servers[-1]

    def health_requests() -> int:
        return service.requests(old, HEALTH_PATH)

    async with EchoModel() as echo:
        upstream = Upstream(base_url=echo.base_url)
        config = ElasticInterceptionPoolConfig(
            multiplex=2, tunnel=PrimeTunnelConfig(policy=policy, keepalive=keepalive)
        )
        async with ElasticInterceptionPool(config, requires_tunnel=True, server_factory=make_server) as pool:
            pool.on_event = events.append
            first, second = Rollout(pool, upstream), Rollout(pool, upstream)
            slots = await first.slot, await second.slot
            (old,) = service.created
            assert {slot.base_url for slot in slots} == {service.urls[old]}

            # The registration expires, and still the URL serves: nothing happens.
            service.expire_softly(old)
            seen = health_requests()
            await until(lambda: health_requests() >= seen + 3)
            for slot in slots:
                assert await ask(slot, "still there?") == "still there?"
            assert events == []
            assert (service.logins(old), pool.retired, first.task.done(), second.task.done()) == (1, 0, False, False)

            # The route is lost, the URL fails twice, the restart is refused: the server is retired, once.
            seen = health_requests()
            service.lose_route(old)
            await until(lambda: pool.retired)
            assert health_requests() >= seen + 2
            assert service.logins(old) == 1
            assert Counter(map(type, events))[Gone] == 1
            if keepalive == "ours":
                (refused,) = (event for event in events if isinstance(event, RestartFailed))
                assert "inactive" in refused.error

            # Both rollouts are over, and the one that leaves hears it as well.
            await until(lambda: first.harness_ended_with and second.harness_ended_with)
            for rollout in (first, second):
                assert isinstance(rollout.harness_ended_with, TunnelError)
                assert rollout.harness_ended_with is rollout.session.error
                assert "inactive" in str(rollout.session.error)
            first.tidied.set()
            with pytest.raises(TunnelError):
                await first.task

            # While the second is still tidying up, the next one gets a new URL, which serves.
            async with pool.acquire(RolloutSession(upstream)) as slot:
                assert slot.base_url == service.urls[service.created[1]] != service.urls[old]
                assert await ask(slot, "anybody?") == "anybody?"
                assert (servers[0].stops, service.deletes) == (0, [])

                # The second is cancelled twice while it leaves: the old server is stopped all the same, once.
                second.tidied.set()
                second.task.cancel()
                second.task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await second.task
                await until(lambda: service.deletes == [old] and not servers[0].sessions)
                assert await ask(slot, "and now?") == "and now?"

        assert [server.stops for server in servers] == [1, 1]
        assert pool.retired == 1

    assert Counter(map(type, events))[Gone] == 1
    assert service.live() == []
    assert service.deletes == service.created
    assert len(service.created) == 2
    assert service.frpc_pids() == []
    assert service.config_files() == []
    await until(lambda: asyncio.all_tasks() == tasks_before)
