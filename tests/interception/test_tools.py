"""Tool servers: real MCP clients through real tunnels, to tools served in this process and in one of their own."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import psutil
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from interception import InterceptionServer, RolloutSession, Slot
from interception.demo.relay import SshRelay
from interception.tools import OutcomeUnknownError, ToolCallError, ToolClient, ToolServer, ToolSlot
from tests.helpers import until
from tests.interception import tool_module
from tests.interception.edge import Fault, Unreliable, cut_after, cut_before, status
from tests.interception.fakes import FakeTunnel, new_session, other_tasks
from tests.interception.tool_module import SPEC, ran
from tests.prime import FakePrime
from tunnel import (
    HEALTH_PATH,
    IDENTITY_HEADER,
    KeepAlivePolicy,
    PrimeTunnelConfig,
    SshTunnelConfig,
    TunnelConfig,
    TunnelError,
)

USER = "tools"
POLICY = (
    KeepAlivePolicy(rule="plain")
    .scaled(0.01)
    .model_copy(update={"probe_timeout": 5.0, "restart_timeout": 30.0, "give_up_after": None})
)


def tools_of(where: str) -> Any:
    """The same tools, as they are served in this process and in another."""
    return tool_module.server() if where == "here" else f"{SPEC}:server"


both = pytest.mark.parametrize("where", ["here", "apart"])


@dataclass
class Rollout:
    server: ToolServer
    session: RolloutSession
    slot: Slot
    tools: ToolSlot

    def client(self, **options: Any) -> ToolClient:
        return ToolClient(self.tools, **options)


@asynccontextmanager
async def rollout(server: ToolServer, session: RolloutSession | None = None) -> AsyncIterator[Rollout]:
    session = session or new_session(state={}, task={"question": "6 x 7?"})
    async with (
        InterceptionServer() as interception,
        server,
        interception.acquire(session) as slot,
        server.acquire(session, slot) as tools,
    ):
        yield Rollout(server, session, slot, tools)


@asynccontextmanager
async def sdk(tools: ToolSlot, mode: str = "auto") -> AsyncIterator[Client]:
    """The SDK's own client."""
    http = httpx2.AsyncClient(headers=tools.headers, timeout=30)
    async with http, Client(streamable_http_client(tools.url, http_client=http), mode=mode) as client:
        yield client


def text(result: Any) -> str:
    assert len(result.content) == 1, result
    return str(result.content[0].text)


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[SshRelay]:
    async with SshRelay() as relay:
        key = tmp_path / "key"
        key.touch(0o600)
        key.write_text(relay.add_account(USER))
        relay.write_known_hosts(tmp_path / "known_hosts")
        yield relay


def ssh(relay: SshRelay, folder: Path) -> SshTunnelConfig:
    return SshTunnelConfig(
        host="127.0.0.1",
        port=relay.port,
        username=USER,
        client_keys=(folder / "key",),
        known_hosts=folder / "known_hosts",
        policy=POLICY,
    )


@pytest.fixture(params=["ssh", "prime"])
async def tunnel(
    request: pytest.FixtureRequest, tmp_path: Path, relay: SshRelay, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[TunnelConfig]:
    if request.param == "ssh":
        yield ssh(relay, tmp_path)
        return
    with FakePrime(tmp_path, scale=0.1) as service:
        for name, value in service.env().items():
            monkeypatch.setenv(name, value)
        yield PrimeTunnelConfig(policy=POLICY)
        assert service.live() == []
        assert service.frpc_pids() == []


class TestThroughATunnel:
    @both
    @pytest.mark.parametrize("mode", ["auto", "legacy"])
    async def test_the_sdks_client_lists_and_calls_and_the_state_is_the_rollouts(
        self, where: str, mode: str, tunnel: TunnelConfig
    ) -> None:
        async with rollout(ToolServer(tools_of(where), tunnel=tunnel)) as running:
            assert "127.0.0.1" not in running.tools.url or tunnel.type == "ssh"
            async with sdk(running.tools, mode) as client:
                listed = {tool.name: tool for tool in (await client.list_tools()).tools}
                assert list(listed["note"].input_schema["properties"]) == ["text"]
                assert text(await client.call_tool("note", {"text": "a"})) == "note 1: a"
                assert text(await client.call_tool("note", {"text": "b"})) == "note 2: b"
                assert text(await client.call_tool("question", {})) == "6 x 7?"
                assert (int(text(await client.call_tool("pid", {}))) == os.getpid()) is (where == "here")
            assert running.session.state == {"notes": ["a", "b"]}

    @both
    async def test_its_requests_are_seen_by_the_tunnels_keepalive(
        self, where: str, relay: SshRelay, tmp_path: Path
    ) -> None:
        server = ToolServer(tools_of(where), tunnel=ssh(relay, tmp_path))
        async with rollout(server) as running:
            assert server.tunnel is not None
            (tmp_path / "work").mkdir()
            arrived = server.tunnel.counters.arrivals
            call = asyncio.create_task(running.client().call("look", {"folder": str(tmp_path / "work")}))
            await until(lambda: ran(str(tmp_path / "work")))
            await until(lambda: server.tunnel is not None and server.tunnel.in_flight() == 1)
            (tmp_path / "work" / "go").touch()
            await call
            await until(lambda: server.tunnel is not None and server.tunnel.in_flight() == 0)
            assert server.tunnel.counters.arrivals > arrived

    @both
    async def test_health_is_answered_before_mcp_without_a_key_and_with_the_identity(
        self, where: str, tunnel: TunnelConfig
    ) -> None:
        async with rollout(ToolServer(tools_of(where), tunnel=tunnel)) as running, aiohttp.ClientSession() as http:
            base = running.tools.url.removesuffix("/mcp")
            async with http.get(base + HEALTH_PATH) as response:
                assert (response.status, response.content_type, await response.text()) == (200, "text/plain", "ok")
                assert response.headers[IDENTITY_HEADER] == running.server.identity
            async with http.head(base + HEALTH_PATH) as response:
                assert response.status == 200

    @both
    async def test_any_host_is_accepted(self, where: str) -> None:
        async with rollout(ToolServer(tools_of(where))) as running, aiohttp.ClientSession() as http:
            for host in ("abc.tunnel.example", "evil.example:8000"):
                async with http.post(
                    running.tools.url,
                    json={"jsonrpc": "2.0", "id": 1, "method": "tools/list"},
                    headers={**running.tools.headers, "Host": host, "Accept": "application/json, text/event-stream"},
                ) as response:
                    assert response.status == 200
                    assert response.content_type == "application/json"
                    assert "mcp-session-id" not in response.headers

    async def test_a_marker_in_the_path(self, relay: SshRelay, tmp_path: Path) -> None:
        config = ssh(relay, tmp_path).model_copy(update={"mark": "path"})
        server = ToolServer(f"{SPEC}:tools", tunnel=config)
        async with rollout(server) as running:
            assert "/vf/t/" in running.tools.url
            assert text(await running.client().call("note", {"text": "a"})) == "note 1: a"
            assert server.tunnel is not None
            assert server.tunnel.counters.arrivals > 0


class TestACutTunnel:
    """The relay drops the connection; the keepalive brings the tunnel back under the same URL."""

    @both
    async def test_between_list_and_call(self, where: str, relay: SshRelay, tmp_path: Path) -> None:
        async with rollout(ToolServer(tools_of(where), tunnel=ssh(relay, tmp_path))) as running:
            client, url = running.client(), running.server.url
            assert {tool.name for tool in await client.list_tools()} >= {"pay", "note"}
            relay.refuse_forwards(USER, True)
            await relay.cut(USER)
            call = asyncio.create_task(client.call("pay", {"folder": str(tmp_path)}))
            await until(lambda: relay.logins(USER) >= 2)
            relay.refuse_forwards(USER, False)
            (tmp_path / "go").touch()
            assert text(await call) == "paid"
            assert (ran(str(tmp_path)), running.session.state, running.server.url) == (1, {"paid": 1}, url)

    @both
    async def test_during_a_call_that_must_not_run_twice(self, where: str, relay: SshRelay, tmp_path: Path) -> None:
        async with rollout(ToolServer(tools_of(where), tunnel=ssh(relay, tmp_path))) as running:
            client = running.client()
            call = asyncio.create_task(client.call("pay", {"folder": str(tmp_path)}))
            await until(lambda: ran(str(tmp_path)))
            await relay.cut(USER)
            with pytest.raises(OutcomeUnknownError, match="outcome unknown"):
                await call
            (tmp_path / "go").touch()
            # It goes on without its caller, and what it made of the state is there.
            await until(lambda: running.session.state == {"paid": 1})
            assert text(await client.call("note", {"text": "back"})) == "note 1: back"
            assert ran(str(tmp_path)) == 1
            assert running.session.state == {"paid": 1, "notes": ["back"]}

    async def test_during_a_call_that_may_run_twice(self, relay: SshRelay, tmp_path: Path) -> None:
        async with rollout(ToolServer(tools_of("here"), tunnel=ssh(relay, tmp_path))) as running:
            call = asyncio.create_task(running.client().call("look", {"folder": str(tmp_path)}))
            await until(lambda: ran(str(tmp_path)))
            await relay.cut(USER)
            await until(lambda: ran(str(tmp_path)) >= 2)
            (tmp_path / "go").touch()
            assert text(await call) == "seen"

    @pytest.mark.parametrize("mode", ["auto", "legacy"])
    async def test_the_sdks_own_client_does_not_repeat_the_call_either(
        self, mode: str, relay: SshRelay, tmp_path: Path
    ) -> None:
        async with rollout(ToolServer(tools_of("here"), tunnel=ssh(relay, tmp_path))) as running:

            async def called() -> None:
                async with sdk(running.tools, mode) as client:
                    await client.list_tools()
                    await client.call_tool("pay", {"folder": str(tmp_path)})

            call = asyncio.create_task(called())
            await until(lambda: ran(str(tmp_path)))
            await relay.cut(USER)
            with pytest.raises(BaseExceptionGroup):
                await call
            (tmp_path / "go").touch()
            await until(lambda: running.session.state == {"paid": 1})
            assert ran(str(tmp_path)) == 1


class TestTheEndOfItsTunnel:
    @both
    async def test_ends_the_rollouts_that_use_it_and_no_others(
        self, where: str, relay: SshRelay, tmp_path: Path
    ) -> None:
        server = ToolServer(tools_of(where), tunnel=ssh(relay, tmp_path))
        left = new_session()
        async with InterceptionServer() as interception, server, interception.acquire(new_session()) as slot:
            async with server.acquire(left, slot):
                pass
            with pytest.raises(TunnelError, match="the tool server's tunnel was lost") as lost:
                async with server.acquire(session := new_session(), slot):
                    harness = asyncio.create_task(session.guard(asyncio.Event().wait()))
                    await relay.revoke(USER)
                    with pytest.raises(TunnelError):
                        await harness
                    # A harness that ends well all the same is no success.
            assert lost.value is session.error
            assert left.error is None
            with pytest.raises(TunnelError, match="was lost"):
                async with server.acquire(new_session(), slot):
                    pass
            assert server.lost is not None
        with pytest.raises(TunnelError, match="make a new one"):
            await server.start()

    async def test_stopping_the_server_ends_them_too(self) -> None:
        with pytest.raises(TunnelError, match="the tool server was stopped"):
            async with rollout(ToolServer(tool_module.tools)) as running:
                await running.server.stop()
                assert running.session.failed.is_set()


class TestWhoIsServed:
    @both
    async def test_only_a_rollout_that_runs_and_by_its_own_key(self, where: str) -> None:
        async with rollout(ToolServer(tools_of(where))) as running, aiohttp.ClientSession() as http:
            async with running.server.acquire(new_session(), running.slot) as over:
                pass
            wrong = [{}, {"Authorization": "Bearer "}, {"Authorization": "Bearer wrong"}, over.headers]
            wrong += [{"Authorization": f"Bearer {secret}"} for secret in running.slot[1:]]
            body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "pid", "arguments": {}}}
            accept = {"Accept": "application/json, text/event-stream"}
            for headers in wrong:
                for version in ({}, {"MCP-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/call"}):
                    async with http.post(
                        running.tools.url, json=body, headers={**accept, **version, **headers}
                    ) as response:
                        assert response.status == 401
                        assert "ToolSlot" in (await response.json())["error"]["message"]
            async with http.get(running.tools.url) as response:
                assert response.status == 401

    @both
    async def test_rollouts_at_once_have_each_their_own_state(self, where: str) -> None:
        async with InterceptionServer() as interception, ToolServer(tools_of(where)) as server:
            sessions = [new_session(state={}, task={"question": str(number)}) for number in range(6)]

            async def play(number: int) -> None:
                session = sessions[number]
                async with interception.acquire(session) as slot, server.acquire(session, slot) as tools:
                    client = ToolClient(tools)
                    calls = [client.call("note", {"text": f"{number}.{call}"}) for call in range(5)]
                    await asyncio.gather(*calls)
                    assert text(await client.call("question")) == str(number)

            await asyncio.gather(*(play(number) for number in range(6)))
            for number, session in enumerate(sessions):
                assert sorted(session.state["notes"]) == [f"{number}.{call}" for call in range(5)]
            assert server.load == 0

    async def test_the_key_shows_nowhere(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("DEBUG")
        async with rollout(ToolServer(f"{SPEC}:server")) as running:
            await running.client().call("note", {"text": "a"})
            assert running.tools.mcp_config("t") == {
                "mcpServers": {"t": {"type": "http", "url": running.tools.url, "headers": running.tools.headers}}
            }
            argv = [part for process in psutil.process_iter() for part in _command(process)]
            ours = [record.getMessage() for record in caplog.records if not record.name.startswith(("mcp", "httpcore"))]
            shown = [repr(running.tools), repr(running.server), *argv, *ours]
            for secret in (running.tools.secret, running.slot.state_secret):
                assert not [text for text in shown if secret in text]


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


class TestCallsOverAnEdge:
    """What the client does with each kind of answer. The faults hit the call alone, not the list before it."""

    @asynccontextmanager
    async def edge(self, tmp_path: Path) -> AsyncIterator[tuple[ToolClient, Unreliable, Rollout]]:
        (tmp_path / "go").touch()
        async with rollout(ToolServer(tools_of("here"))) as running:
            edge = Unreliable(running.tools.url.removesuffix("/mcp"))
            edge.only = b"tools/call"
            async with edge.serving() as url:
                yield ToolClient(running.tools._replace(url=url + "/mcp"), patience=20.0), edge, running

    @pytest.mark.parametrize("fault", [status(500), status(502), status(504), cut_before, cut_after, status(200)])
    async def test_a_call_that_must_not_run_twice_is_sent_once(self, fault: Fault, tmp_path: Path) -> None:
        async with self.edge(tmp_path) as (client, edge, running):
            edge.faults = [fault, fault]
            with pytest.raises(OutcomeUnknownError, match="outcome unknown"):
                await client.call("pay", {"folder": str(tmp_path)})
            assert len(edge.faults) == 1
            await until(lambda: ran(str(tmp_path)) == (1 if fault is cut_after else 0))
            assert text(await ToolClient(running.tools).call("note", {"text": "a"})) == "note 1: a"

    @pytest.mark.parametrize("fault", [status(500), status(502), status(504), cut_before, cut_after, status(200)])
    async def test_a_call_that_may_is_sent_again(self, fault: Fault, tmp_path: Path) -> None:
        async with self.edge(tmp_path) as (client, edge, _):
            edge.faults = [fault, fault]
            assert text(await client.call("look", {"folder": str(tmp_path)})) == "seen"
            assert edge.faults == []

    @pytest.mark.parametrize("code", [307, 400, 401, 403, 404, 413, 429])
    @pytest.mark.parametrize("tool", ["pay", "look"])
    async def test_a_4xx_is_final_and_the_tool_has_not_run(self, code: int, tool: str, tmp_path: Path) -> None:
        async with self.edge(tmp_path) as (client, edge, running):
            edge.faults = [status(code), status(code)]
            with pytest.raises(ToolCallError) as refused:
                await client.call(tool, {"folder": str(tmp_path)})
            assert (refused.value.status, len(edge.faults), ran(str(tmp_path))) == (code, 1, 0)
            assert running.tools.secret not in str(refused.value)

    async def test_a_list_that_fails_is_asked_again(self, tmp_path: Path) -> None:
        async with self.edge(tmp_path) as (client, edge, _):
            edge.only = b""
            edge.faults = [status(503), cut_before, cut_after]
            assert "pay" in {tool.name for tool in await client.list_tools()}

    async def test_a_connection_that_is_refused_is_tried_until_patience_ends(self) -> None:
        client = ToolClient(ToolSlot("http://127.0.0.1:9/mcp", "secret"), patience=0.3)
        with pytest.raises(ToolCallError, match=r"127\.0\.0\.1:9"):
            await client.call("pay")

    async def test_a_wrong_key_is_said_at_once(self) -> None:
        async with rollout(ToolServer(tools_of("here"))) as running:
            with pytest.raises(ToolCallError) as refused:
                await ToolClient(running.tools._replace(secret="wrong")).list_tools()
            assert refused.value.status == 401

    async def test_an_error_of_the_tools_is_its_result(self) -> None:
        async with rollout(ToolServer(tools_of("here"))) as running:
            result = await running.client().call("note", {"text": 1, "more": []})
            assert result.is_error
            assert (await running.client().call("no such tool")).is_error


class TestSlowCalls:
    @both
    @pytest.mark.parametrize("mode", ["auto", "legacy"])
    async def test_behind_a_tunnel_an_answer_is_begun_in_time(
        self, where: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("interception.tools.server.GRACE", 0.05)
        async with rollout(ToolServer(tools_of(where), tunnel=FakeTunnel())) as running:
            body = {
                "jsonrpc": "2.0",
                "id": 7,
                "method": "tools/call",
                "params": {"name": "pay", "arguments": {"folder": str(tmp_path)}},
            }
            async with aiohttp.ClientSession() as http:
                accept = {"Accept": "application/json, text/event-stream"}
                async with http.post(
                    running.tools.url, json=body, headers={**running.tools.headers, **accept}
                ) as response:
                    assert (response.status, await response.content.readexactly(1)) == (200, b" ")
                    (tmp_path / "go").touch()
                    assert (await response.json())["result"]["content"][0]["text"] == "paid"
            (tmp_path / "go").unlink()
            async with sdk(running.tools, mode) as client:
                call = asyncio.create_task(client.call_tool("pay", {"folder": str(tmp_path)}))
                await until(lambda: ran(str(tmp_path)) == 2)
                await asyncio.sleep(0.1)  # past the grace: the white space is on its way
                (tmp_path / "go").touch()
                assert text(await call) == "paid"
                assert (await client.call_tool("note", {})).is_error

    async def test_without_one_it_is_not(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("interception.tools.server.GRACE", 0.0)
        async with rollout(ToolServer(tools_of("here"))) as running, aiohttp.ClientSession() as http:
            body = {"jsonrpc": "2.0", "id": 7, "method": "tools/list"}
            async with http.post(
                running.tools.url, json=body, headers={**running.tools.headers, "Accept": "application/json"}
            ) as response:
                assert (await response.read()).startswith(b"{")


class TestItsProcess:
    async def test_one_that_crashes_ends_its_rollouts_with_a_reason(self) -> None:
        with pytest.raises(TunnelError, match="its process exited with status 3"):
            async with rollout(ToolServer(f"{SPEC}:tools")) as running:
                with pytest.raises(OutcomeUnknownError):
                    await running.client().call("crash", {"status": 3})
                await running.session.failed.wait()

    async def test_one_that_is_killed_too(self) -> None:
        with pytest.raises(TunnelError, match="its process was ended by signal 9"):
            async with rollout(ToolServer(f"{SPEC}:tools")) as running:
                os.kill(int(text(await running.client().call("pid"))), signal.SIGKILL)
                await running.session.failed.wait()
        with pytest.raises(TunnelError, match="make a new one"):
            await running.server.start()

    @pytest.mark.parametrize(
        ("spec", "why"),
        [
            ("tests.interception.no_such_module:tools", "ModuleNotFoundError"),
            (f"{SPEC}:no_such_tools", "AttributeError"),
            (f"{SPEC}:nothing", "TypeError: tools must be a list of functions"),
            (f"{SPEC}:failing", "LookupError: the tools' own database is down"),
        ],
    )
    async def test_one_that_cannot_start_says_why_and_leaves_nothing(self, spec: str, why: str) -> None:
        before, tasks = children(), other_tasks()
        server = ToolServer(spec)
        with pytest.raises(TunnelError, match=why):
            await server.start()
        assert (children(), other_tasks()) == (before, tasks)
        await server.stop()

    async def test_stopping_leaves_neither_it_nor_what_its_tools_started(self) -> None:
        before = children()
        async with rollout(ToolServer(f"{SPEC}:tools")) as running:
            client = running.client()
            pids = [int(text(await client.call(tool))) for tool in ("pid", "child")]
        await until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
        assert children() == before

    async def test_one_whose_tool_holds_it_for_ever_is_stopped_all_the_same(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("interception.tools.process.STOP_TIMEOUT", 0.5)
        async with rollout(ToolServer(f"{SPEC}:tools")) as running:
            client = running.client()
            pid = int(text(await client.call("pid")))
            held = asyncio.create_task(client.call("hold"))
            await until(lambda: psutil.Process(pid).status() == psutil.STATUS_SLEEPING and running_count(running) == 1)
        with pytest.raises(OutcomeUnknownError):
            await held
        await until(lambda: not psutil.pid_exists(pid))

    @pytest.mark.parametrize("busy", [False, True], ids=["idle", "while a tool holds it"])
    async def test_its_launcher_is_killed_and_it_is_gone_with_all_it_started(self, busy: bool) -> None:
        launcher = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", LAUNCHER, f"{SPEC}:tools", "hold" if busy else ""),
            stdout=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        assert launcher.stdout is not None
        pids = [int(pid) for pid in (await launcher.stdout.readline()).split()]
        family = [process.pid for process in psutil.Process(launcher.pid).children(recursive=True)]
        assert set(pids) <= set(family)
        launcher.kill()
        await launcher.wait()
        await until(lambda: not any(psutil.pid_exists(pid) for pid in family))

    @pytest.mark.parametrize("steps", range(0, 120, 8))
    async def test_a_start_that_is_cancelled_twice_leaves_nothing(self, steps: int) -> None:
        before, tasks = children(), other_tasks()
        server = ToolServer(f"{SPEC}:tools", tunnel=FakeTunnel(held=steps % 16 == 0))
        starting = asyncio.create_task(server.start())
        for _ in range(steps):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await until(lambda: children() == before)
        assert other_tasks() == tasks


LAUNCHER = """
import asyncio, sys
from interception import InterceptionServer
from interception.tools import ToolClient, ToolServer
from tests.interception.fakes import new_session

async def main():
    session = new_session()
    async with InterceptionServer() as server, ToolServer(sys.argv[1]) as tools, server.acquire(session) as slot:
        async with tools.acquire(session, slot) as mine:
            client = ToolClient(mine)
            pids = [(await client.call(tool)).structured_content["result"] for tool in ("pid", "child")]
            holding = asyncio.create_task(client.call(sys.argv[2])) if sys.argv[2] else None
            await asyncio.sleep(0.2)
            print(*pids, flush=True)
            await asyncio.sleep(3600)

asyncio.run(main())
"""


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def running_count(running: Rollout) -> int:
    host = running.server._host
    return getattr(host, "_in_flight", 0)


class TestWhatItIsGiven:
    @pytest.mark.parametrize("tools", [[], [1], None, {}, tool_module.note], ids=["none", "1", "None", "dict", "one"])
    def test_what_are_no_tools_is_a_type_error(self, tools: Any) -> None:
        with pytest.raises(TypeError, match="list of functions, or an MCPServer"):
            ToolServer(tools)

    @pytest.mark.parametrize("spec", ["tools", "tools.py", "a:b:c", "a b:c", ":x", "x:", ""])
    def test_what_names_no_tools_is_a_value_error(self, spec: str) -> None:
        with pytest.raises(ValueError, match=r"package\.module:attribute"):
            ToolServer(spec)

    def test_without_the_sdk_it_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "mcp.server", None)
        with pytest.raises(ImportError, match=r"pip install 'interception-toolkit\[mcp\]'"):
            ToolServer([tool_module.pid])

    async def test_a_port_that_is_taken_is_a_tunnel_error(self) -> None:
        async with ToolServer(tool_module.tools) as one:
            port = int(one.url.rpartition(":")[2].removesuffix("/mcp"))
            tunnel = FakeTunnel()
            tunnel.bind_port = port
            for tools in (tool_module.tools, f"{SPEC}:tools"):
                with pytest.raises(TunnelError, match="cannot listen"):
                    await ToolServer(tools, tunnel=tunnel).start()

    async def test_it_has_no_url_before_it_is_started_and_starts_again_after_a_stop(self) -> None:
        server = ToolServer(tool_module.tools)
        with pytest.raises(RuntimeError, match="start it first"):
            _ = server.url
        for _ in range(2):
            async with rollout(server) as running:
                await server.start()
                assert text(await running.client().call("note", {"text": "a"})) == "note 1: a"

    def test_making_one_leaves_the_programs_logging_alone(self) -> None:
        code = (
            "import logging; from interception.tools import ToolServer\nToolServer([len.__class__.mro]) if 0 else 0\n"
        )
        code += "from tests.interception import tool_module\nToolServer(tool_module.tools)\n"
        code += (
            "assert logging.root.handlers == [], logging.root.handlers\nassert logging.root.level == logging.WARNING"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
