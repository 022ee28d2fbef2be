"""verifiers 0.4.0's own client against our env server and pool: it works unchanged."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from verifiers.v1.clients import EvalClientConfig
from verifiers.v1.serve.client import EnvClient
from verifiers.v1.types import SamplingConfig

from envserver import EnvClient as OurClient
from envserver import env_server
from tests.helpers import until
from tests.verifiers.served import ENDED

pytestmark = [pytest.mark.gate, pytest.mark.verifiers, pytest.mark.filterwarnings("default")]


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(ENDED, str(tmp_path / "ended"))
    return tmp_path / "ended"


@pytest.fixture(params=[1, 2], ids=["one process", "a pool of two"])
async def address(request: pytest.FixtureRequest, ended: Path) -> AsyncIterator[str]:
    async with env_server("tests.verifiers.served:make", max_workers=request.param, elastic=False) as address:
        yield address


@contextlib.asynccontextmanager
async def client_of(address: str) -> AsyncIterator[Any]:
    client = EnvClient(address)
    try:
        yield client
    finally:
        await client.close()


async def all_ready(address: str, workers: int) -> None:
    async with OurClient(address) as ours:
        async with asyncio.timeout(60):
            while (await ours.health())["ready"] < workers:  # noqa: ASYNC110 - that is another process
                await asyncio.sleep(0.05)


async def run(client: Any, prompt: str, on_delta: Any = None) -> Any:
    endpoint = EvalClientConfig(base_url="http://127.0.0.1:9/v1", api_key_var="NO_SUCH_KEY")
    return await client.run(endpoint, "a model", SamplingConfig(), {"idx": 0, "prompt": prompt}, on_delta)


async def test_it_finds_the_server_healthy(address: str) -> None:
    async with client_of(address) as client:
        assert await client.health() is True
        await client.wait_for_server_startup(timeout=30)


async def test_a_run_streams_its_deltas_and_ends_in_an_episode(address: str) -> None:
    deltas: list[dict[str, Any]] = []
    async with client_of(address) as client:
        episode = await run(client, "hello", deltas.append)
    assert len(deltas) == 2
    [trace] = episode.traces
    assert (episode.ok, trace.rewards["right"].value) == (True, 1.0)
    assert trace.info["model"] == "a model"
    assert trace.task.data.model_dump()["prompt"] == "hello"


async def test_many_runs_at_once_each_get_their_own_answer(address: str) -> None:
    async with client_of(address) as client:
        episodes = await asyncio.gather(*(run(client, f"task {number}") for number in range(50)))
    prompts = [episode.traces[0].task.data.model_dump()["prompt"] for episode in episodes]
    assert prompts == [f"task {number}" for number in range(50)]


async def test_a_run_that_raises_is_its_error(address: str) -> None:
    async with client_of(address) as client:
        with pytest.raises(RuntimeError, match="no such task"):
            await run(client, "raise")
        assert await client.health()


async def test_a_run_that_is_cancelled_ends_in_the_worker(address: str, ended: Path) -> None:
    began = asyncio.Event()
    async with client_of(address) as client:
        running = asyncio.create_task(run(client, "hang", lambda delta: began.set()))
        await began.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(ended.exists)
        assert (await run(client, "after it")).traces


@pytest.mark.usefixtures("ended")
async def test_a_worker_that_dies_is_an_error_at_once_and_the_pool_goes_on() -> None:
    async with (
        env_server("tests.verifiers.served:make", max_workers=2, elastic=False) as address,
        client_of(address) as client,
    ):
        await all_ready(address, 2)
        deltas: list[dict[str, Any]] = []
        hanging = asyncio.create_task(run(client, "hang", deltas.append))
        await until(lambda: deltas)
        os.kill(deltas[0]["set"]["info"]["pid"], signal.SIGKILL)
        with pytest.raises(RuntimeError, match="SIGKILL"):
            await hanging
        with pytest.raises(RuntimeError, match="SIGABRT"):
            await run(client, "die")  # the other one, or the first that is back
        await all_ready(address, 2)
        assert (await run(client, "hello")).ok
