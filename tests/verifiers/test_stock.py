"""The README's table: what verifiers 0.4.0 does under a fault, beside what it does on ours.

If one of these fails for the stock, verifiers has mended it: read again what ours still adds.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1.interception as their_interception
import verifiers.v1.interception.tunnel.prime as their_tunnel
import verifiers.v1.mcp.launch as launch

from interception.integrations.verifiers import installed
from interception.integrations.verifiers.server import Stock
from tests.helpers import Switch, until
from tests.prime import FakePrime
from tests.verifiers.evals import Endpoint, config, session_of
from tests.verifiers.test_faults import LOST, PRIME, SMALL_POOL, by_error, expire_first, with_fault


def either(kind: str) -> contextlib.AbstractContextManager[Any]:
    return installed(PRIME) if kind == "ours" else contextlib.nullcontext()


BOTH = pytest.mark.parametrize("kind", ["stock", "ours"])


@pytest.mark.gate
@BOTH
async def test_a_route_that_is_lost_behind_a_good_record(
    kind: str, service: FakePrime, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert their_tunnel.CHECK_SECONDS == 20
    monkeypatch.setattr(their_tunnel, "CHECK_SECONDS", 0.02)
    with either(kind):
        async with Switch(406) as tool, launch.PrimeTunnel().expose(tool.port):
            [tunnel_id] = service.created
            await asyncio.to_thread(service.lose_route, tunnel_id)
            if kind == "stock":
                looks = service.api_calls("GET")
                await until(lambda: service.api_calls("GET") > looks + 10)
                assert service.logins(tunnel_id) == 1, "never restarted, as often as it looks"
            else:
                await until(lambda: service.logins(tunnel_id) == 2)


@pytest.mark.usefixtures("remote")
@pytest.mark.parametrize("habit", ["swallow", "hangs"])
async def test_a_harness_that_hides_the_loss_is_scored_by_the_stock(
    habit: str, service: FakePrime, endpoint: Endpoint, tmp_path: Path
) -> None:
    """Ours: `test_faults.test_a_harness_that_hides_the_loss_is_not_scored`."""
    eval_config = config(
        endpoint,
        tmp_path,
        {"id": "echo_words", "tasks": 1},
        harness={"id": "quick_harness", habit: True},
        runtime="prime",
        timeout=20,
        interception=SMALL_POOL,
    )
    [trace] = await with_fault(eval_config, endpoint, 1, lambda: expire_first(service))
    assert trace.ok
    assert trace.errors == []
    # 1 even: the answer was recorded, and its harness never had it.
    assert trace.reward == 1.0
    assert trace.num_turns == 1


class Starts:
    """Servers of either kind, whose starts wait at a gate."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = 0
        start = Stock.start

        async def gated(server: Any) -> None:
            self.waiting += 1
            try:
                await self.gate.wait()
            finally:
                self.waiting -= 1
            await start(server)

        monkeypatch.setattr(Stock, "start", gated)


@pytest.mark.gate
@BOTH
async def test_more_rollouts_than_there_are_places(
    kind: str, endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot is freed while servers are starting for those who wait."""
    starts = Starts(monkeypatch)
    eval_config = config(endpoint, tmp_path, "echo_words")
    over, taken = asyncio.Event(), []

    async def rollout(pool: Any) -> None:
        async with pool.acquire(session_of(eval_config)) as slot:
            taken.append(slot)
            await over.wait()

    with either(kind):
        small = their_interception.ElasticInterceptionPoolConfig(multiplex=1)
        async with their_interception.make_interception(small, requires_tunnel=False) as pool:
            async with pool.acquire(session_of(eval_config)) as (base_url, *_):
                starts.gate.clear()
                waiting = [asyncio.create_task(rollout(pool)) for _ in range(3)]
                await until(lambda: starts.waiting == (1 if kind == "stock" else 3))
            if kind == "stock":
                for _ in range(100):
                    await asyncio.sleep(0)
                assert taken == [], "it is freed, and nobody gets it"
                assert starts.waiting == 1
            else:
                await until(lambda: taken)
                assert taken[0][0] == base_url
            starts.gate.set()
            over.set()
            await asyncio.gather(*waiting)
            assert len(taken) == 3


@BOTH
@pytest.mark.usefixtures("remote")
async def test_the_tunnel_of_a_tool_server_is_gone(
    kind: str, service: FakePrime, endpoint: Endpoint, tmp_path: Path
) -> None:
    async def expire_the_tools() -> None:
        await asyncio.to_thread(service.expire, service.created[1])

    eval_config = config(endpoint, tmp_path, {"id": "echo_stamp", "tasks": 1}, harness="null", runtime="prime")
    with either(kind):
        found = await with_fault(eval_config, endpoint, 1, expire_the_tools)
    # The stock's is the harness's own: it does not say what was lost, and no rule for lost tunnels runs it again.
    assert by_error(found) == {"HarnessError" if kind == "stock" else LOST: 1}
