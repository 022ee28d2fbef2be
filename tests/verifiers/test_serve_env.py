"""verifiers' `serve_env` in processes of its own while ours is installed, and our env server that cannot start."""

import asyncio
import functools
import logging
import multiprocessing
import sys
from pathlib import Path

import pytest
import verifiers.v1.serve as their_serve
from verifiers.v1.serve import env_config_data

from envserver import EnvClient as OurClient
from envserver import EnvServerStartupError, env_server, wait_for_address
from interception.integrations.verifiers import Options, installed, make_interception
from interception.integrations.verifiers.worker import FACTORY
from tests.helpers import until
from tests.verifiers.evals import Endpoint, config
from tests.verifiers.test_worker import client_of, run


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.gate), 2])
async def test_spawned_env_server_workers_run_on_ours(
    workers: int, endpoint: Endpoint, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    eval_config = config(endpoint, tmp_path, {"id": "echo_words", "tasks": 1}, harness="quick_harness")
    context = multiprocessing.get_context("spawn")
    addresses = context.Queue()
    with installed(Options(grace=1)):
        from verifiers.v1.serve import serve_env

        process = context.Process(
            target=serve_env,
            kwargs={
                "max_workers": workers,
                "elastic": True,
                "address": "tcp://127.0.0.1:0",
                "address_queue": addresses,
                "config_data": env_config_data(eval_config.env),
                "log_setup": tell,
            },
        )
        process.start()
    seen = ""
    try:
        await until(lambda: not addresses.empty(), timeout=300)
        async with client_of(addresses.get()) as client:
            await client.wait_for_server_startup(timeout=300)
            trace = await run(client, eval_config)
    finally:
        process.terminate()
        process.join(30)
        seen = capfd.readouterr().err
    assert trace.ok
    assert trace.reward == 1.0
    assert seen.count("ours, with a grace of 1") == (1 if workers == 1 else 2), "the broker's and the worker's own"


def tell() -> None:
    """Called in each spawned process, and telling what verifiers looks up there."""
    import verifiers.v1.env as their_env

    made = their_env.make_interception
    if isinstance(made, functools.partial) and made.func is make_interception:
        print(f"ours, with a grace of {made.keywords['options'].grace}", file=sys.stderr, flush=True)


@pytest.mark.gate
async def test_verifiers_serve_env_serves_from_our_broker_where_the_options_say_so(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    eval_config = config(endpoint, tmp_path, "echo_words", harness="quick_harness")
    context = multiprocessing.get_context("spawn")
    addresses = context.Queue()
    with installed(Options(broker=True, broker_log=str(tmp_path / "env.log"), grace=1)):
        process = context.Process(
            target=their_serve.serve_env,
            kwargs={
                "max_workers": 2,
                "address": "tcp://127.0.0.1:0",
                "address_queue": addresses,
                "config_data": env_config_data(eval_config.env),
                "max_concurrent": 1,
                "log_setup": log_all,
            },
        )
        process.start()
    try:
        address = await wait_for_address(process, addresses, timeout=300, log_path=tmp_path / "env.log")
        async with client_of(address) as client, OurClient(address) as broker:
            assert (await broker.health())["ready"] == 1, "told when it is ready"
            assert (await run(client, eval_config)).reward == 1.0
            endpoint.open.clear()
            running = asyncio.create_task(run(client, eval_config))
            await until(lambda: endpoint.held == 1)
            process.terminate()
            with pytest.raises(RuntimeError, match="shutting down"):
                await running
            await until(lambda: process.exitcode is not None)
            assert process.exitcode == 0
    finally:
        process.kill()
        process.join(30)
    worker_log = (tmp_path / "env-worker-0.log").read_text()
    assert "installed in verifiers" in worker_log
    assert "serving on ipc://" in worker_log


def log_all() -> None:
    """Called in each spawned process."""
    logging.basicConfig(level=logging.INFO)


async def test_a_task_set_that_is_not_there_is_a_startup_error_that_says_so() -> None:
    with pytest.raises(EnvServerStartupError, match=r"worker 0 of .*exited with status 1") as error:
        async with env_server(FACTORY, {"config": {"taskset": {"id": "no_such_words"}}}, max_workers=2):
            pass
    assert "taskset 'no_such_words' not found" in str(error.value)
