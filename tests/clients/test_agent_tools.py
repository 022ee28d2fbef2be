"""Agent programs that call tools of a `ToolServer`, which they reach through a tunnel, its bad moments included."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from interception import InterceptionServer, RolloutSession, Upstream
from interception.demo.relay import SshRelay
from interception.echo import EchoModel
from interception.programs import launch
from interception.tools import ToolServer, ToolSlot
from tests.clients.test_agents import AGENTS, Desk, pytestmark
from tests.helpers import until
from tests.interception.tool_module import SPEC, ran
from tunnel import KeepAlivePolicy, SshTunnelConfig

__all__ = ["pytestmark"]

USER = "tools"
POLICY = (
    KeepAlivePolicy(rule="plain")
    .scaled(0.01)
    .model_copy(update={"probe_timeout": 5.0, "restart_timeout": 30.0, "give_up_after": None})
)
CODEX, CLAUDE = AGENTS[:2]


@dataclass(frozen=True)
class Program:
    name: str
    command: Callable[[str, ToolSlot, Path], list[str]]
    """For a task, and the tools; a file may be left in the folder."""


def codex(task: str, tools: ToolSlot, folder: Path) -> list[str]:
    program, *rest = CODEX.command(task)
    config = f'mcp_servers.tools={{url="{tools.url}", bearer_token_env_var="TOOLS_KEY"}}'
    return [program, *rest[:-1], "-c", config, rest[-1]]


def claude(task: str, tools: ToolSlot, folder: Path) -> list[str]:
    file = folder / "mcp.json"
    file.write_text(json.dumps(tools.mcp_config("tools")))
    program, *rest = CLAUDE.command(task)
    return [program, *rest[:-1], "--strict-mcp-config", "--mcp-config", str(file), "--", rest[-1]]


@pytest.fixture(params=[Program("codex", codex), Program("claude-code", claude)], ids=lambda program: program.name)
def program(request: pytest.FixtureRequest) -> Program:
    return request.param  # type: ignore[no-any-return]


@dataclass
class Scene:
    program: Program
    relay: SshRelay
    server: ToolServer
    session: RolloutSession
    run: Callable[[str, dict[str, Any]], Any]


@pytest.fixture
async def scene(program: Program, tmp_path: Path) -> AsyncIterator[Scene]:
    async with _scene(program, tmp_path) as scene:
        yield scene


@asynccontextmanager
async def _scene(program: Program, folder: Path) -> AsyncIterator[Scene]:
    desk = Desk(folder)
    agent = {"codex": CODEX, "claude-code": CLAUDE}[program.name]
    async with SshRelay() as relay:
        key = folder / "key"
        key.touch(0o600)
        key.write_text(relay.add_account(USER))
        tunnel = SshTunnelConfig(
            host="127.0.0.1",
            port=relay.port,
            username=USER,
            client_keys=(key,),
            known_hosts=relay.write_known_hosts(folder / "known_hosts"),
            policy=POLICY,
        )
        async with (
            EchoModel() as echo,
            InterceptionServer() as interception,
            ToolServer(f"{SPEC}:server", tunnel=tunnel) as server,
        ):
            session = RolloutSession(Upstream(base_url=echo.base_url), state={})
            async with interception.acquire(session) as slot, server.acquire(session, slot) as tools:

                async def run(tool: str, arguments: dict[str, Any]) -> str:
                    task = f"Please do this:\n!call mcp__tools__{tool} {json.dumps(arguments)}"
                    command, env = launch(program.command(task, tools, folder), slot.env(), desk.environ(agent))
                    ran = await desk.run(command, {**env, "TOOLS_KEY": tools.secret})
                    assert ran.status == 0, ran.out + ran.err
                    return ran.out

                yield Scene(program, relay, server, session, run)


async def test_a_call_changes_the_rollouts_state_and_its_result_comes_back(scene: Scene) -> None:
    said = await scene.run("note", {"text": "from the agent"})
    assert "note 1: from the agent" in said
    assert scene.session.state == {"notes": ["from the agent"]}
    assert "note 1: from the agent" in str(scene.session.trace.turns[-1].request)


async def test_the_tunnel_is_cut_between_list_and_call(scene: Scene) -> None:
    cut: list[bool] = []

    async def cut_once(session: RolloutSession, request: dict[str, Any]) -> None:
        """By the time it asks its model the agent has listed the tools."""
        if not cut and "mcp__tools" in json.dumps(request):
            cut.append(True)
            logins = scene.relay.logins(USER)
            await scene.relay.cut(USER)
            tunnel = scene.server.tunnel
            await until(lambda: scene.relay.logins(USER) > logins and tunnel and tunnel.state.name == "serving")

    scene.session.on_request = (cut_once,)
    assert "note 1: again" in await scene.run("note", {"text": "again"})
    assert cut == [True]
    assert scene.session.state == {"notes": ["again"]}


async def test_the_tunnel_is_cut_during_a_call_that_must_not_run_twice(scene: Scene, tmp_path: Path) -> None:
    folder = tmp_path / "payments"
    folder.mkdir()
    agent = asyncio.create_task(scene.run("pay", {"folder": str(folder)}))
    await until(lambda: ran(str(folder)) or agent.done(), timeout=120)
    assert not agent.done(), agent.result()
    await scene.relay.cut(USER)
    (folder / "go").touch()
    await until(lambda: scene.session.state == {"paid": 1})
    said = await agent
    assert "error" in said or "ECONNRESET" in said, said
    assert ran(str(folder)) == 1
    assert scene.session.state == {"paid": 1}
