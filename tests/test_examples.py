"""The examples do what the README shows with them."""

from typing import Any

import pytest

from envserver import EnvClient, EnvRequestError, EnvServer, env_server


async def test_an_env_runs_a_rollout_against_an_interception_pool_in_a_process_of_its_own() -> None:
    deltas: list[dict[str, Any]] = []
    async with env_server("examples.echo_env:make") as address, EnvClient(address) as client:
        reply = await client.run({"prompt": "hello", "turns": 3}, deltas.append)
    assert [delta["turn"] for delta in deltas] == [1, 2, 3]
    assert all("hello" in delta["answer"] for delta in deltas)
    assert reply["reward"] == 1.0
    assert reply["trace"]["turns"] == reply["trace"]["delivered"] == 3
    assert reply["trace"]["output_tokens"] > 0


async def test_a_bad_request_is_a_failed_run_and_no_more() -> None:
    async with EnvServer("examples.echo_env:make", {"multiplex": 1}) as server, EnvClient(server.address) as client:
        with pytest.raises(EnvRequestError, match="a request is"):
            await client.run({"turns": 0})
        assert (await client.run({"prompt": "still here"}))["reward"] == 1.0
