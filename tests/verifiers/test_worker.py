"""verifiers' envs behind our env server, driven by verifiers' own client."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import verifiers.v1 as vf
import verifiers.v1.interception as their_interception
from verifiers.v1.configs.cli.eval import EvalConfig
from verifiers.v1.serve import EnvClient, env_config_data
from verifiers.v1.serve import EnvServer as TheirServer
from verifiers.v1.utils.loaders import load_taskset

from envserver import EnvClient as OurClient
from envserver import EnvServer, EnvServerError, env_server
from interception.integrations.verifiers import Options, installed
from interception.integrations.verifiers.options import options_as_json, options_from_json
from interception.integrations.verifiers.worker import FACTORY, make
from tests.helpers import until
from tests.prime import FakePrime
from tests.verifiers.evals import Endpoint, config, outcome, traces
from tests.verifiers.test_faults import LOST, PRIME, SMALL_POOL, expire_first
from tunnel import SshTunnelConfig

pytestmark = pytest.mark.gate


@contextlib.asynccontextmanager
async def client_of(address: str) -> AsyncIterator[Any]:
    client = EnvClient(address)
    try:
        yield client
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def ours(eval_config: EvalConfig, **kwargs: Any) -> AsyncIterator[Any]:
    """A client of the env behind our server, in this process."""
    arguments = {"config": env_config_data(eval_config.env), **kwargs}
    async with EnvServer(FACTORY, json.loads(json.dumps(arguments))) as server, client_of(server.address) as client:
        yield client


@contextlib.asynccontextmanager
async def theirs(eval_config: EvalConfig) -> AsyncIterator[Any]:
    """A client of the env behind verifiers' own server, in this process."""
    server = TheirServer(eval_config.env, "tcp://127.0.0.1:0")
    serving = asyncio.create_task(server.run())
    try:
        async with client_of(server.address) as client:
            yield client
    finally:
        serving.cancel()
        await asyncio.wait([serving])


async def run(client: Any, eval_config: EvalConfig, number: int = 0, on_delta: Any = None) -> vf.Trace:
    """The only trace of an episode of one of the config's tasks."""
    task = list(load_taskset(eval_config.env.taskset))[number]
    episode = await client.run(
        client=eval_config.client,
        model=eval_config.model,
        sampling=eval_config.sampling,
        task_data=task.data.model_dump(mode="json"),
        on_delta=on_delta,
    )
    [trace] = episode.traces
    assert episode.ok == trace.ok
    return trace


def shape(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """What a stream of deltas adds up to, whatever the pace at which it came."""
    fields = {field for delta in deltas for field in delta}
    return {
        "fields": fields,
        "first": set(deltas[0]),
        "nodes": sum(len(delta.get("nodes", ())) for delta in deltas),
        "calls": sum(len(delta.get("calls", ())) for delta in deltas),
        "set": {field for delta in deltas for field in delta.get("set", {})},
    }


async def test_an_episode_is_the_same_as_behind_verifiers_own_server_and_as_in_process(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    eval_config = config(endpoint, tmp_path, {"id": "echo_words", "tasks": 1}, harness="quick_harness")
    streams: list[list[dict[str, Any]]] = [[], []]
    async with theirs(eval_config) as client:
        stock = await run(client, eval_config, on_delta=streams[0].append)
    async with ours(eval_config) as client:
        assert await client.health()
        served = await run(client, eval_config, on_delta=streams[1].append)
    [in_process] = await traces(eval_config)
    assert outcome(served) == outcome(stock) == outcome(in_process)
    assert (served.reward, served.num_turns) == (1.0, 2)
    assert shape(streams[1]) == shape(streams[0])
    assert served.task.data.model_dump() == stock.task.data.model_dump()


async def test_what_an_env_puts_into_a_trace_arrives_as_it_does_from_verifiers(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    eval_config = config(endpoint, tmp_path, "echo_words", harness={"id": "quick_harness", "notes": True})
    async with theirs(eval_config) as client:
        stock = await run(client, eval_config)
    async with ours(eval_config) as client:
        served = await run(client, eval_config)
    assert served.info == stock.info
    assert set(served.info) >= {"array", "when", "path", "kinds"}


async def test_it_runs_on_ours_while_it_serves_and_no_longer(endpoint: Endpoint, tmp_path: Path) -> None:
    eval_config = config(endpoint, tmp_path, "echo_words", harness="quick_harness")
    stock = their_interception.make_interception
    async with ours(eval_config, options={"grace": 1}):
        assert their_interception.make_interception.keywords["options"] == Options(grace=1)
    assert their_interception.make_interception is stock
    with installed(Options(grace=3)):
        async with ours(eval_config):
            assert their_interception.make_interception.keywords["options"] == Options(grace=3)
        assert their_interception.make_interception is not stock


async def test_a_run_that_is_cancelled_ends_its_calls_and_the_next_goes_well(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    eval_config = config(endpoint, tmp_path, "echo_words", harness="quick_harness")
    async with ours(eval_config) as client:
        endpoint.open.clear()
        running = asyncio.create_task(run(client, eval_config))
        await until(lambda: endpoint.held == 1)
        running.cancel()
        await until(lambda: endpoint.held == 0)
        with pytest.raises(asyncio.CancelledError):
            await running
        endpoint.open.set()
        assert (await run(client, eval_config)).reward == 1.0


async def test_max_concurrent_bounds_the_episodes_of_a_worker(endpoint: Endpoint, tmp_path: Path) -> None:
    eval_config = config(endpoint, tmp_path, {"id": "echo_words", "tasks": 3}, harness="quick_harness")
    async with ours(eval_config, max_concurrent=2) as client:
        endpoint.open.clear()
        running = [asyncio.create_task(run(client, eval_config, number)) for number in range(3)]
        await until(lambda: endpoint.held == 2)
        assert endpoint.calls == 2
        endpoint.open.set()
        assert [(await each).reward for each in running] == [1.0, 1.0, 1.0]
    assert endpoint.calls == 6


async def test_a_request_that_is_none_of_verifiers_is_an_error_that_names_the_field(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    eval_config = config(endpoint, tmp_path, "echo_words", harness="quick_harness")
    async with ours(eval_config) as client:
        with pytest.raises(RuntimeError, match=r"ValidationError(.|\n)*prompt"):
            await client.run(
                client=eval_config.client, model="echo", sampling=eval_config.sampling, task_data={"prompt": 7}
            )
        assert (await run(client, eval_config)).ok


@pytest.mark.usefixtures("remote")
async def test_a_lost_tunnel_ends_the_rollouts_behind_it_and_the_next_gets_another(
    service: FakePrime, endpoint: Endpoint, tmp_path: Path
) -> None:
    eval_config = config(
        endpoint, tmp_path, "echo_words", harness="quick_harness", runtime="prime", interception=SMALL_POOL
    )
    async with ours(eval_config, options=options_as_json(PRIME)) as client:
        endpoint.open.clear()
        running = asyncio.create_task(run(client, eval_config))
        await until(lambda: endpoint.held == 1, timeout=60)
        await expire_first(service)
        endpoint.open.set()
        lost = await running
        assert not lost.ok
        assert [error.type for error in lost.errors] == [LOST]
        assert not lost.rewards
        assert (await run(client, eval_config)).reward == 1.0
    assert len(service.created) == 2


async def test_workers_that_are_processes_and_one_of_them_killed(endpoint: Endpoint, tmp_path: Path) -> None:
    """Its own episode fails at once, the other's goes on, and new ones are served."""
    eval_config = config(endpoint, tmp_path, {"id": "echo_words", "tasks": 2}, harness="quick_harness")
    kwargs = {"config": env_config_data(eval_config.env)}
    async with (
        env_server(FACTORY, kwargs, max_workers=2, elastic=False, log_path=tmp_path / "env.log") as address,
        client_of(address) as client,
        OurClient(address) as broker,
    ):
        await all_ready(broker, 2)
        endpoint.open.clear()
        running = [asyncio.create_task(run(client, eval_config, number)) for number in range(2)]
        await until(lambda: endpoint.held == 2, timeout=60)
        [server] = [child for child in psutil.Process().children() if "_child.py" in " ".join(child.cmdline())]
        victim, _ = (worker.pid for worker in server.children())
        os.kill(victim, signal.SIGKILL)
        [failed], [going] = await asyncio.wait(running, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(RuntimeError, match=f"pid {victim}.*SIGKILL"):
            await failed
        assert not going.done()
        endpoint.open.set()
        trace = await going
        assert (trace.reward, trace.num_turns) == (1.0, 2)
        again = await run(client, eval_config, running.index(failed))
        assert outcome(again) == outcome((await traces(eval_config))[running.index(failed)])


async def all_ready(broker: OurClient, workers: int) -> None:
    async with asyncio.timeout(300):
        while (await broker.health())["ready"] < workers:  # noqa: ASYNC110 - those are other processes
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "config must be verifiers' .env. block; on a command line: --kwargs"),
        ({"config": "echo_words"}, "block, not a str"),
        ({"config": {}}, "config has no taskset.id"),
        ({"config": {"taskset": "echo_words"}}, "config has no taskset.id"),
        ({"config": {"taskset": {"id": "no_such_words"}}}, "taskset 'no_such_words' not found"),
        ({"config": {"taskset": {"id": "echo_words", "taks": 1}}}, "taskset.taks"),
        ({"config": {"taskset": {"id": "echo_words"}}, "max_concurrent": 0}, "max_concurrent must be 1 or more"),
        ({"config": {"taskset": {"id": "echo_words"}}, "options": {"tunel": {}}}, "tunel"),
        ({"config": {"taskset": {"id": "needy_words"}}}, "No module named 'what_nobody_has'"),
        ({"config": {"taskset": {"id": "secret_words"}}}, "key would not reach the worker"),
    ],
)
def test_what_cannot_be_served_is_said(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(EnvServerError, match=said):
        make(**arguments)


def test_an_error_in_a_config_does_not_show_what_else_is_in_it() -> None:
    with pytest.raises(EnvServerError) as error:
        make({"taskset": {"id": "echo_words", "tasks": "a-secret"}})
    assert "taskset.tasks" in str(error.value)
    assert "a-secret" not in str(error.value)


def test_options_go_to_workers_as_json() -> None:
    options = Options(
        tunnel=SshTunnelConfig(host="relay", client_keys=("key",)), grace=1, broker=True, broker_log="log"
    )
    assert options_from_json(json.loads(json.dumps(options_as_json(options)))) == options
    with pytest.raises(ValueError, match="broker=True"):
        Options(broker_log="log")
