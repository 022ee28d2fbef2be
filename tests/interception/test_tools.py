"""Tool servers: real MCP clients through real tunnels, to tools served in this process and in one of their own."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest

from interception import InterceptionServer
from interception.demo.relay import SshRelay
from interception.tools import OutcomeUnknownError, ToolClient, ToolServer
from interception.tools.host import _without_end
from tests.helpers import until
from tests.interception import tool_module
from tests.interception.fakes import FakeTunnel, new_session, other_tasks, settle
from tests.interception.tool_module import SPEC, ran
from tests.interception.tool_rollouts import both, rollout, sdk, text, tools_of
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
    async def test_the_sdks_client_lists_and_calls_and_the_state_is_the_rollouts(
        self, where: str, tunnel: TunnelConfig
    ) -> None:
        async with rollout(ToolServer(tools_of(where), tunnel=tunnel)) as running:
            assert "127.0.0.1" not in running.tools.url or tunnel.type == "ssh"
            for before, mode in ((0, "auto"), (2, "legacy")):
                async with sdk(running.tools, mode) as client:
                    listed = {tool.name: tool for tool in (await client.list_tools()).tools}
                    assert list(listed["note"].input_schema["properties"]) == ["text"]
                    assert text(await client.call_tool("note", {"text": "a"})) == f"note {before + 1}: a"
                    assert text(await client.call_tool("note", {"text": "b"})) == f"note {before + 2}: b"
                    assert text(await client.call_tool("question", {})) == "6 x 7?"
                    assert (int(text(await client.call_tool("pid", {}))) == os.getpid()) is (where == "here")
                assert running.session.state == {"notes": ["a", "b", "a", "b"][: before + 2]}

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
            session = new_session()

            async def play() -> None:
                async with server.acquire(session, slot):
                    harness = asyncio.create_task(session.guard(asyncio.Event().wait()))
                    await relay.revoke(USER)
                    with pytest.raises(TunnelError):
                        await harness
                    # A harness that ends well all the same is no success.

            with pytest.raises(TunnelError, match="the tool server's tunnel was lost") as lost:
                await play()
            assert lost.value is session.error
            assert left.error is None
            with pytest.raises(TunnelError, match="was lost"):
                async with server.acquire(new_session(), slot):
                    pass
            assert server.lost is not None
        with pytest.raises(TunnelError, match="make a new one"):
            await server.start()

    async def test_stopping_the_server_ends_them_too(self) -> None:
        async def play() -> None:
            async with rollout(ToolServer(tool_module.tools)) as running:
                await running.server.stop()
                assert running.session.failed.is_set()

        with pytest.raises(TunnelError, match="the tool server was stopped"):
            await play()


class TestCancelledTwice:
    """At any await: by the count of the event loop's rounds, which takes it through all of them."""

    @staticmethod
    async def cancel_twice(task: "asyncio.Task[Any]", rounds: int) -> bool:
        """Whether it was cancelled; else it was quicker."""
        for _ in range(rounds):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    async def test_a_start_leaves_nothing(self) -> None:
        before, ends = other_tasks(), []
        for rounds in range(16):
            server = ToolServer([tool_module.pid], tunnel=(tunnel := FakeTunnel()))
            cancelled = await self.cancel_twice(asyncio.create_task(server.start()), rounds)
            ends.append(cancelled)
            assert tunnel.connected is not cancelled
            await server.stop()
            assert not tunnel.connected
            assert other_tasks() == before
        assert ends.count(True) > 3, "and the others were quicker"

    async def test_a_stop_leaves_nothing_either(self) -> None:
        before = other_tasks()
        for rounds in (1, 2, 3, 5, 8, 13):  # one that never began stops nothing
            server = ToolServer([tool_module.pid], tunnel=(tunnel := FakeTunnel()))
            await server.start()
            port = urlsplit(server.url).port
            await self.cancel_twice(asyncio.create_task(server.stop()), rounds)
            assert not tunnel.connected
            assert other_tasks() == before
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)

    @both
    async def test_a_rollout_that_comes_or_goes_is_served_no_longer(self, where: str) -> None:
        async with (
            InterceptionServer() as interception,
            ToolServer(tools_of(where)) as server,
            interception.acquire(session := new_session()) as slot,
            aiohttp.ClientSession() as http,
        ):
            secrets: list[str] = []

            async def play() -> None:
                async with server.acquire(session, slot) as tools:
                    secrets.append(tools.secret)
                    await asyncio.Event().wait()

            for rounds in range(0, 12, 2):
                assert await self.cancel_twice(asyncio.create_task(play()), rounds)
                assert server.load == 0
            for secret in secrets:
                async with http.get(server.url, headers={"Authorization": f"Bearer {secret}"}) as refused:
                    assert refused.status == 401


class TestWhoIsServed:
    @both
    async def test_only_a_rollout_that_runs_and_by_its_own_key(self, where: str) -> None:
        async with rollout(ToolServer(tools_of(where))) as running, aiohttp.ClientSession() as http:
            long = {"Host": "x" * 2**20, "X-Forwarded-Host": "x" * 2**20}
            async with http.get(running.tools.url, headers=long) as response:
                assert response.status == 401, "and its launcher is not deaf from now on"
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


class TestACallThatNeverCameWhole:
    async def test_is_forgotten_as_its_caller_leaves(self) -> None:
        async with rollout(ToolServer(tool_module.tools)) as running:
            url = urlsplit(running.tools.url)
            tasks = len(asyncio.all_tasks())
            for _ in range(3):
                _, writer = await asyncio.open_connection(url.hostname, url.port)
                head = f"POST {url.path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {running.tools.secret}\r\n"
                writer.write(f'{head}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{"json'.encode())
                await until(lambda: len(asyncio.all_tasks()) > tasks)
                writer.close()
                await until(lambda: len(asyncio.all_tasks()) <= tasks)

    async def test_one_that_has_is_not_told_that_its_caller_left(self) -> None:
        """Whatever the SDK, in this version or another, would make of it."""
        part, whole = {"type": "http.request", "more_body": True}, {"type": "http.request"}
        left = {"type": "http.disconnect"}
        for messages, told in (([part, left], 2), ([part, whole, left], 2), ([whole, left], 1)):
            receive = _without_end(partial(self._next, iter(messages)))
            assert [await receive() for _ in range(told)] == messages[:told]
            if told < len(messages):
                waiting = asyncio.create_task(receive())
                await settle()
                assert waiting.cancel(), "it waits for ever"
                await asyncio.wait([waiting])

    @staticmethod
    async def _next(messages: Iterator[Any]) -> Any:
        return next(messages)


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

    async def test_on_all_addresses_it_is_found_on_the_loopback_of_their_kind(self) -> None:
        for host, where in (("0.0.0.0", "http://127.0.0.1:"), ("::", "http://[::1]:")):
            async with rollout(ToolServer(tool_module.tools, bind_host=host)) as running:
                assert running.tools.url.startswith(where)
                assert text(await running.client(patience=1.0).call("note", {"text": "a"})) == "note 1: a"

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
