"""Our server in the place of verifiers' own: its form, its start, and its routes behind a marked URL."""

import asyncio
import contextlib
import gc
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import verifiers.v1 as vf
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.utils.aio import run_shielded
from verifiers.v1.utils.loaders import load_taskset

from interception.integrations.verifiers import InterceptionServer, Options, installed, verdict
from interception.integrations.verifiers.server import Stock
from tests.helpers import until
from tests.interception.fakes import FakeTunnel, other_tasks
from tests.prime import FakePrime
from tests.verifiers.evals import Endpoint, config, session_of, traces
from tests.verifiers.test_faults import POLICY, PRIME, by_error, expire_first
from tunnel import HEALTH_PATH, IDENTITY_HEADER, PrimeTunnelConfig

pytestmark = pytest.mark.gate


async def test_a_server_keeps_the_form_that_verifiers_reads(endpoint: Endpoint, tmp_path: Path) -> None:
    session = session_of(config(endpoint, tmp_path, "echo_words"))
    server = InterceptionServer(None, False, ("shared",))
    async with server, server.acquire(session) as slot:
        base_url, model_secret, state_secret = slot
        assert type(slot) is tuple
        assert base_url == server.base_url == f"http://127.0.0.1:{server.port}"
        assert server.sessions == {model_secret: session}
        assert server.state_sessions == {state_secret: session}
        assert server.state_routes == {session.trace.id: session}
        assert len(server.clients) == server.load == 1
        assert server.state_service_secrets == frozenset({"shared"})
        assert server.healthy
        assert server.serving
        async with aiohttp.ClientSession() as client, client.get(base_url + HEALTH_PATH) as health:
            assert (health.status, await health.text()) == (200, "ok")
            assert health.headers[IDENTITY_HEADER] == server.identity
        await server.start()  # idempotent
    assert server.load == 0
    assert session.released
    await server.stop()


async def test_a_session_that_is_in_use_is_refused_and_goes_on(endpoint: Endpoint, tmp_path: Path) -> None:
    session = session_of(config(endpoint, tmp_path, "echo_words"))
    async with InterceptionServer() as one, InterceptionServer() as other:
        async with one.acquire(session):
            for server in (one, other):
                with pytest.raises(ValueError, match="in use already"):
                    server.register(session)
            assert (one.load, other.load, session.released) == (1, 0, False)
        other.unregister(*other.register(session))


async def test_a_version_that_moved_the_seam_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(self: Any) -> None: ...

    monkeypatch.setattr(Stock, "start", start)
    with pytest.raises(RuntimeError, match="health route"):
        await InterceptionServer().start()


def listening() -> list[asyncio.Server]:
    """What still accepts connections in this test."""
    found = [thing for thing in gc.get_objects() if type(thing) is asyncio.Server]
    return [server for server in found if server.get_loop() is asyncio.get_running_loop() and server.is_serving()]


@pytest.fixture
def tunnels(monkeypatch: pytest.MonkeyPatch) -> list[FakeTunnel]:
    """Those that servers make, in order."""
    made: list[FakeTunnel] = []

    def make(config: object) -> FakeTunnel:
        made.append(FakeTunnel())
        return made[-1]

    monkeypatch.setattr("interception.integrations.verifiers.server.make_tunnel", make)
    return made


async def test_start_cancelled_twice_at_any_moment_leaves_nothing(tunnels: list[FakeTunnel]) -> None:
    ends = set()
    for rounds in range(30):
        server = InterceptionServer(requires_tunnel=True)
        starting = asyncio.create_task(server.start())
        for _ in range(rounds):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        ends.add(starting.cancelled())
        if not starting.cancelled():
            await server.stop()  # it was quicker
        assert not tunnels[-1].connected
        assert server.runner is None or not server.runner.sites
        assert server.runner is None or server.runner.server is None, "cleaned up"
    assert ends == {True, False}, "some were cancelled, and some were quicker"
    assert not listening()
    await until(lambda: not other_tasks())


async def test_start_cancelled_twice_while_the_tunnel_comes_up_leaves_nothing_and_may_be_tried_again(
    tunnels: list[FakeTunnel],
) -> None:
    server = InterceptionServer(requires_tunnel=True)
    [tunnel] = tunnels
    tunnel.may_connect.clear()
    starting = asyncio.create_task(server.start())
    await until(lambda: tunnel.connecting)
    starting.cancel()
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not tunnel.connecting
    assert not tunnel.connected
    assert not listening()
    await until(lambda: not other_tasks())
    tunnel.may_connect.set()
    async with server:
        assert tunnel.connected
    assert not tunnel.connected


@pytest.mark.parametrize("ended_by", ["its cancellation", "its deadline"])
async def test_only_a_rollout_that_somebody_asks_for_waits_for_what_became_of_its_url(
    ended_by: str, tunnels: list[FakeTunnel], endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict, "VERDICT_TIMEOUT", 600.0 if ended_by == "its cancellation" else 0.0)
    async with InterceptionServer(requires_tunnel=True) as server:
        session = session_of(config(endpoint, tmp_path, "echo_words"))
        entered = asyncio.Event()

        async def rollout() -> None:
            stack = AsyncExitStack()
            await stack.enter_async_context(server.acquire(session))
            entered.set()
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if ended_by == "its cancellation" else 0):
                        await asyncio.Event().wait()
            finally:
                await run_shielded(stack.aclose())  # as verifiers does

        running = asyncio.create_task(rollout())
        await entered.wait()
        server.identity = "a stranger's"  # nothing of ours answers at its URL any more
        if ended_by == "its cancellation":
            running.cancel()
        await asyncio.wait([running], timeout=60)
        assert running.cancelled() == (ended_by == "its cancellation")
        if ended_by == "its deadline":
            assert type(running.exception()) is vf.TunnelError


@pytest.mark.usefixtures("remote")
async def test_behind_a_url_with_a_marker_in_its_path(service: FakePrime, endpoint: Endpoint, tmp_path: Path) -> None:
    options = Options(tunnel=PrimeTunnelConfig(policy=POLICY, mark="path"))
    eval_config = config(endpoint, tmp_path, {"id": "echo_words", "tasks": 2}, harness="quick_harness", runtime="prime")
    session = session_of(eval_config)
    async with (
        InterceptionServer(requires_tunnel=True, options=options) as server,
        server.acquire(session) as (base_url, _, state_secret),
        aiohttp.ClientSession() as client,
    ):
        assert server.tunnel is not None
        assert server.tunnel.path_prefix
        assert base_url.endswith(server.tunnel.path_prefix)
        async with client.get(base_url + HEALTH_PATH) as health:
            assert (health.status, health.headers[IDENTITY_HEADER]) == (200, server.identity)
        for secret, expected in ((state_secret, 200), ("another", 401)):
            headers = {"Authorization": f"Bearer {secret}"}
            async with client.get(base_url + "/state", headers=headers) as state:
                assert state.status == expected
        assert server.tunnel.counters.arrivals >= 2, "told apart by the marker"
    with installed(options):
        found = await traces(eval_config)
    assert by_error(found) == {"": 2}
    assert {trace.reward for trace in found} == {1.0}


@pytest.mark.usefixtures("remote")
async def test_an_entered_agent_goes_on_with_another_server_once_its_own_is_lost(
    service: FakePrime, endpoint: Endpoint, tmp_path: Path
) -> None:
    eval_config = config(endpoint, tmp_path, {"id": "echo_words", "tasks": 3})
    first, second, third = load_taskset(eval_config.env.taskset)
    agent_config = AgentConfig.model_validate(
        {
            "harness": {"id": "quick_harness"},
            "runtime": {"type": "prime"},
            "model": "echo",
            "client": eval_config.client,
        }
    )
    with installed(PRIME):
        async with vf.make_agent(agent_config) as agent:
            assert (await agent.run(first)).ok
            endpoint.open.clear()
            running = asyncio.create_task(agent.run(second))
            await until(lambda: endpoint.held == 1)
            await expire_first(service)
            lost = await running
            assert [error.type for error in lost.errors] == ["TunnelError"]
            endpoint.open.set()
            assert (await agent.run(third)).ok
        assert len(service.created) == 2, "one for all its rollouts, and another after that"
