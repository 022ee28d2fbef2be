"""Tool servers on this host for harnesses elsewhere: their tunnels, their health route, and who hears of their loss."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import verifiers.v1 as vf
import verifiers.v1.mcp.launch as launch
import verifiers.v1.rollout as their_rollout
from verifiers.v1.runtimes import SubprocessConfig, provision_runtime

from interception.integrations.verifiers import Options, installed
from interception.integrations.verifiers.losses import Watch, forget, watch
from interception.integrations.verifiers.tools import with_health_route
from interception.integrations.verifiers.verdict import was_at_fault
from tests.envserver.processes import alive
from tests.helpers import Switch, until
from tests.prime import FakePrime
from tests.verifiers.evals import Endpoint, config, traces
from tests.verifiers.test_faults import LOST, POLICY, PRIME, by_error, expire_first, with_fault
from tunnel import HEALTH_PATH, IDENTITY_HEADER, PrimeTunnelConfig

STAMPS = {"id": "echo_stamp", "tasks": 1}


class Rollout:
    """A rollout as far as losses are concerned."""

    def __init__(self) -> None:
        self.trace = SimpleNamespace(id=f"trace-{id(self)}", errors=[])
        self.error: Exception | None = None
        self.released = False

    def release(self) -> None:
        self.released = True

    def __enter__(self) -> "Rollout":
        self.watch = Watch(self, None)  # type: ignore[arg-type]
        watch(self.watch)
        return self

    def __exit__(self, *exc: object) -> None:
        forget(self)  # type: ignore[arg-type]


async def status(url: str) -> tuple[int, str | None]:
    async with aiohttp.ClientSession() as client, client.get(url) as answer:
        return answer.status, answer.headers.get(IDENTITY_HEADER)


@pytest.mark.usefixtures("remote")
async def test_a_remote_harness_uses_a_tool_on_this_host(
    service: FakePrime, endpoint: Endpoint, tmp_path: Path
) -> None:
    with installed(PRIME):
        [trace] = await traces(config(endpoint, tmp_path, STAMPS, harness="null", runtime="prime"))
    assert trace.ok, trace.errors
    assert trace.reward == 1.0
    assert len(service.created) == 2, "one for the model, one for the tool"


@pytest.mark.usefixtures("remote")
async def test_its_rollout_hears_of_the_loss_of_a_tools_tunnel(
    service: FakePrime, endpoint: Endpoint, tmp_path: Path
) -> None:
    async def expire_the_tools() -> None:
        await asyncio.to_thread(service.expire, service.created[1])

    eval_config = config(endpoint, tmp_path, STAMPS, harness={"id": "quick_harness", "turns": 1}, runtime="prime")
    with installed(PRIME):
        endpoint.open.clear()
        running = asyncio.create_task(traces(eval_config))
        await until(lambda: endpoint.held == 1 or running.done(), timeout=120)
        assert not running.done(), running.result()
        await expire_the_tools()
        [trace] = await running  # the endpoint never answers: it ends because of the loss
    assert not trace.ok
    assert [error.type for error in trace.errors] == [LOST]
    assert "tool server" in trace.errors[0].message
    assert trace.reward == 0.0


async def test_a_launched_tool_server_has_the_health_route_and_its_own_endpoint(service: FakePrime) -> None:
    from tests.verifiers.tasksets.echo_stamp import Stamp

    Stamp.__module__ = "echo_stamp"  # as its task set is loaded, by id
    remote_harness = SimpleNamespace(is_local=False, host_url=lambda url: url)
    with Rollout() as rollout, installed(PRIME):
        async with their_rollout.serve_tools(
            [Stamp(vf.ToolsetConfig())], remote_harness, state_route=rollout.trace.id
        ) as urls:
            [url] = urls.values()
            assert url.startswith(service.urls[service.created[0]])
            code, identity = await status(url.removesuffix("/mcp") + HEALTH_PATH)
            assert code == 200
            assert identity
            assert (await status(url))[0] in (200, 406), "MCP is behind it"


async def test_a_server_without_the_route_is_kept_by_any_answer_of_its_mcp_endpoint(service: FakePrime) -> None:
    with installed(PRIME):
        async with Switch(406) as tool, launch.PrimeTunnel().expose(tool.port) as url:
            assert (await status(url))[0] == 406
            before = tool.hits
            await until(lambda: tool.hits > before + 2)  # probed, inside and out
            assert set(tool.paths[before:]) == {"/mcp"}
            assert service.logins(service.created[0]) == 1, "and not restarted"


async def test_the_loss_of_a_shared_tool_fails_who_uses_it_and_nobody_else(service: FakePrime) -> None:
    remote_harness = SimpleNamespace(is_local=False, host_url=lambda url: url)
    with Rollout() as user, Rollout() as other, installed(PRIME):
        async with Switch(406) as tool, launch.PrimeTunnel().expose(tool.port) as url:
            shared = {"tool": SimpleNamespace(url=f"{url}/mcp", external=False, local=True, state_secret="")}
            async with their_rollout.serve_tools([], remote_harness, shared=shared, state_route=user.trace.id) as urls:
                assert urls == {"tool": f"{url}/mcp"}
                await asyncio.to_thread(service.expire, service.created[0])
                await asyncio.wait_for(user.watch.lost.wait(), 60)
            assert type(user.error) is vf.TunnelError
            assert user.released
            assert other.error is None
            with pytest.raises(vf.TunnelError, match="tool server was lost"):
                async with their_rollout.serve_tools([], remote_harness, shared=shared, state_route=other.trace.id):
                    pass
        # Stopped, it is forgotten: another one may get the same URL.
        async with their_rollout.serve_tools([], remote_harness, shared=shared, state_route=other.trace.id):
            pass


@pytest.mark.usefixtures("remote")
async def test_the_loss_of_a_shared_tool_ends_its_rollouts_and_not_the_eval(
    service: FakePrime, endpoint: Endpoint, tmp_path: Path
) -> None:
    eval_config = config(endpoint, tmp_path, "shared_words", harness="quick_harness", runtime="prime", max_concurrent=2)
    with installed(PRIME):
        found = await with_fault(eval_config, endpoint, 2, lambda: expire_first(service))
    assert by_error(found) == {LOST: 3}, "the two that had it, and the one that wanted it"
    assert all("tool server was lost" in trace.errors[0].message for trace in found)


@pytest.mark.gate
async def test_a_harness_that_fails_on_a_tools_dead_url_is_put_down_to_the_tunnel(service: FakePrime) -> None:
    """It sees it at once, the keepalive with its next probe."""
    policy = POLICY.model_copy(update={"idle_spacing": 600.0, "busy_spacing": 600.0})
    remote_harness = SimpleNamespace(is_local=False, host_url=lambda url: url)
    with Rollout() as rollout, installed(Options(tunnel=PrimeTunnelConfig(policy=policy))):
        async with Switch(406) as tool, launch.PrimeTunnel().expose(tool.port) as url:
            shared = {"tool": SimpleNamespace(url=f"{url}/mcp", external=False, local=True, state_secret="")}
            async with their_rollout.serve_tools([], remote_harness, shared=shared, state_route=rollout.trace.id):
                assert not await was_at_fault(rollout.watch)
                await asyncio.to_thread(service.lose_route, service.created[0])
                assert await was_at_fault(rollout.watch)
                await asyncio.to_thread(service.expire, service.created[0])
            assert type(rollout.error) is vf.TunnelError, "one that hid it is found out at its end"


@pytest.mark.gate
async def test_a_refused_tunnel_is_verifiers_own_error(service: FakePrime) -> None:
    service.refuse_creates(400, "maximum number of tunnels reached")
    with installed(PRIME), pytest.raises(vf.TunnelError, match="maximum number"):
        async with Switch() as tool, launch.PrimeTunnel().expose(tool.port):
            pass


LAUNCHER = """
import os, subprocess, sys
argv = [str(os.getpid()) if word == "LAUNCHER" else word for word in sys.argv[1:]]
print(subprocess.Popen(argv, start_new_session=True).pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.gate
@pytest.mark.parametrize("when", ["at once", "once it serves"])
async def test_a_tool_server_whose_launcher_is_killed_is_gone(when: str, tmp_path: Path) -> None:
    argv: list[str] = []

    async def run_background(self: object, command: list[str], env: dict[str, str], log: str) -> None:
        argv.extend("LAUNCHER" if word == str(os.getpid()) else word for word in command)

    await with_health_route(run_background)(None, [sys.executable, "-m", "stays"], {"VF_CONFIG": "{}"}, "log")
    assert "LAUNCHER" in argv
    launcher = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", LAUNCHER, *argv),
        cwd=tmp_path,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert launcher.stdout is not None
    tool_server = int(await launcher.stdout.readline())
    try:
        if when == "once it serves":
            await until((tmp_path / "serves").exists, timeout=120)
        launcher.kill()
        await launcher.wait()
        await until(lambda: not alive(tool_server))
        if when == "once it serves":
            started = int((tmp_path / "serves").read_text())
            await until(lambda: not alive(started))
    finally:
        if alive(tool_server):
            os.killpg(tool_server, signal.SIGKILL)


async def test_other_background_programs_are_left_alone(tmp_path: Path) -> None:
    with installed():
        async with provision_runtime(SubprocessConfig()) as runtime:
            await runtime.run_background([sys.executable, "-c", "print('as it was')"], {}, "log")

            async def log() -> Any:
                return (await runtime.run(["cat", "log"], {})).stdout

            text = ""
            while "as it was" not in text:
                text = await log()
