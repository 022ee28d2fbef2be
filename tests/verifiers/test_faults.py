"""Remote evals whose tunnels are cut and revoked: who is lost, who is not, and what is never scored."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from verifiers.v1.configs.cli.eval import EvalConfig
from verifiers.v1.trace import Trace

from interception import InterceptionServerConfig, StaticInterceptionPoolConfig
from interception.demo.relay_process import RelayProcess
from interception.integrations.verifiers import Options, installed
from tests.helpers import until
from tests.prime import FakePrime
from tests.verifiers.evals import Endpoint, config, traces
from tunnel import KeepAlivePolicy, PrimeTunnelConfig, SshTunnelConfig

pytestmark = pytest.mark.usefixtures("remote")

POLICY = (
    KeepAlivePolicy()
    .scaled(0.1)
    .model_copy(
        update={
            "probe_timeout": 5.0,
            "restart_timeout": 20.0,
            "give_up_after": 60.0,
            "clock_jump": 5.0,
            "idle_spacing": 0.5,
            "busy_spacing": 0.5,
        }
    )
)
PRIME = Options(tunnel=PrimeTunnelConfig(policy=POLICY), grace=0.5)
SMALL_POOL = {"type": "elastic", "multiplex": 4}
TWELVE = {"id": "echo_words", "tasks": 12}
LOST = "TunnelError"
RETRIES = {"rules": [{"type": "TunnelError", "max_retries": 2}]}


async def ssh(relay: RelayProcess, account: str) -> SshTunnelConfig:
    return SshTunnelConfig(
        host="127.0.0.1",
        port=relay.port,
        username=account,
        client_keys=(await relay.account(account),),
        known_hosts=relay.known_hosts,
        policy=POLICY,
    )


async def with_fault(config: EvalConfig, endpoint: Endpoint, held: int, fault: Any) -> list[Trace]:
    """The eval with `fault()` while `held` calls wait for their answers."""
    endpoint.open.clear()
    running = asyncio.create_task(traces(config))
    try:
        await until(lambda: endpoint.held >= held or running.done(), timeout=120)
        assert not running.done(), running
        await fault()
        endpoint.open.set()
        return await running
    finally:
        endpoint.open.set()
        if not running.done():
            running.cancel()
            await asyncio.wait([running])


def by_error(found: list[Trace]) -> dict[str, int]:
    """How many ended well (``), and with which last error."""
    counted: dict[str, int] = {}
    for trace in found:
        name = "" if trace.ok else trace.errors[-1].type
        counted[name] = counted.get(name, 0) + 1
    return counted


def assert_none_lost_is_scored(found: list[Trace]) -> None:
    for trace in found:
        assert trace.ok == (trace.reward == 1.0)
        if not trace.ok:
            assert [error.type for error in trace.errors] == [LOST]
            assert not trace.rewards
            assert "tunnel was lost" in trace.errors[0].message


async def test_a_cut_of_the_ssh_tunnel_fails_no_rollout(
    relay: RelayProcess, endpoint: Endpoint, tmp_path: Path
) -> None:
    options = Options(tunnel=await ssh(relay, "one"))
    # It connects again within the 1.4 s of the SDK's own two retries, unless the machine is very busy.
    patient = {"id": "quick_harness", "retries": 6}
    with installed(options):
        found = await with_fault(
            config(endpoint, tmp_path, TWELVE, harness=patient, runtime="prime", interception=SMALL_POOL),
            endpoint,
            12,
            lambda: relay.cut("one"),
        )
    assert by_error(found) == {"": 12}
    assert {trace.num_turns for trace in found} == {2}
    # The answers that the cut swallowed were recorded, and served to the retries: nothing was asked twice.
    assert endpoint.calls == 24


@pytest.mark.gate
async def test_rollouts_on_a_revoked_ssh_account_are_lost_and_no_others(
    relay: RelayProcess, endpoint: Endpoint, tmp_path: Path
) -> None:
    pool = StaticInterceptionPoolConfig(
        servers=[InterceptionServerConfig(tunnel=await ssh(relay, name)) for name in ("one", "two")]
    )
    with installed(Options(interception=pool, grace=0.5)):
        found = await with_fault(
            config(endpoint, tmp_path, TWELVE, harness="quick_harness", runtime="prime"),
            endpoint,
            12,
            lambda: relay.revoke("one"),
        )
    assert by_error(found) == {"": 6, LOST: 6}
    assert_none_lost_is_scored(found)


@pytest.mark.gate
async def test_the_rest_finish_on_a_replacement(service: FakePrime, endpoint: Endpoint, tmp_path: Path) -> None:
    eval_config = config(
        endpoint, tmp_path, TWELVE, harness="quick_harness", runtime="prime", interception=SMALL_POOL, max_concurrent=4
    )
    with installed(PRIME):
        found = await with_fault(eval_config, endpoint, 4, lambda: expire_first(service))
    assert by_error(found) == {"": 8, LOST: 4}
    assert_none_lost_is_scored(found)
    assert len(service.created) == 2


async def test_stock_verifiers_beside_it_keeps_choosing_the_dead_server(
    service: FakePrime, endpoint: Endpoint, tmp_path: Path
) -> None:
    """What the drop-in is for. If this fails, verifiers has mended it: read again what ours still adds."""
    eval_config = config(
        endpoint, tmp_path, TWELVE, harness="quick_harness", runtime="prime", interception=SMALL_POOL, max_concurrent=4
    )
    found = await with_fault(eval_config, endpoint, 4, lambda: expire_first(service))
    assert by_error(found).get("", 0) <= 4
    assert len(service.created) == 1


async def test_three_lines_of_config_run_the_lost_ones_again(
    service: FakePrime, endpoint: Endpoint, tmp_path: Path
) -> None:
    eval_config = config(
        endpoint,
        tmp_path,
        TWELVE,
        harness="quick_harness",
        runtime="prime",
        interception=SMALL_POOL,
        max_concurrent=4,
        retries=RETRIES,
    )
    with installed(PRIME):
        found = await with_fault(eval_config, endpoint, 4, lambda: expire_first(service))
    assert by_error(found) == {"": 12}


@pytest.mark.gate
@pytest.mark.parametrize("habit", ["swallow", "hangs"])
async def test_a_harness_that_hides_the_loss_is_not_scored(
    habit: str, service: FakePrime, endpoint: Endpoint, tmp_path: Path
) -> None:
    eval_config = config(
        endpoint,
        tmp_path,
        {"id": "echo_words", "tasks": 2},
        harness={"id": "quick_harness", habit: True},
        runtime="prime",
        interception=SMALL_POOL,
    )
    with installed(PRIME):
        found = await with_fault(eval_config, endpoint, 2, lambda: expire_first(service))
    assert by_error(found) == {LOST: 2}
    assert_none_lost_is_scored(found)


async def test_a_route_lost_for_a_moment_fails_no_rollout_of_the_null_harness(
    service: FakePrime, endpoint: Endpoint, tmp_path: Path
) -> None:
    async def lose_route() -> None:
        [tunnel_id] = service.live()
        await asyncio.to_thread(service.gateway.__setitem__, tunnel_id, "reset")
        asyncio.get_running_loop().call_later(0.5, service.gateway.pop, tunnel_id)

    eval_config = config(endpoint, tmp_path, {"id": "echo_words", "tasks": 2}, harness="null", runtime="prime")
    with installed(PRIME):
        found = await with_fault(eval_config, endpoint, 2, lose_route)
    assert by_error(found) == {"": 2}


async def expire_first(service: FakePrime) -> None:
    """The record of the first tunnel expires, its frpc is thrown out: it can never serve again."""
    await asyncio.to_thread(service.expire, service.created[0])
    # Before the answers are let go, for those could still be on their way through it.
    await until(lambda: service.status(service.created[0]) == "EXPIRED")
