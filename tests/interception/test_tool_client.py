"""What the client of a tool server does with each kind of answer, or of none."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from mcp import MCPError

from interception.tools import OutcomeUnknownError, ToolCallError, ToolClient, ToolServer, ToolSlot
from tests.helpers import until
from tests.interception.edge import Fault, Pass, Unreliable, cut_after, cut_before, status
from tests.interception.tool_module import ran
from tests.interception.tool_rollouts import Rollout, rollout, text, tools_of


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

    @pytest.mark.parametrize("code", [307, 400, 401, 404, 429])
    @pytest.mark.parametrize("ran_before", [False, True])
    async def test_a_4xx_of_an_edge_does_not_say_that_nothing_was_run(
        self, code: int, ran_before: bool, tmp_path: Path
    ) -> None:
        """frp's edge says 404 of any request that broke off between it and the tunnel's client."""

        async def fault(request: web.Request, pass_on: Pass) -> web.StreamResponse:
            if ran_before:
                await pass_on()
            return await status(code)(request, pass_on)

        async with self.edge(tmp_path) as (client, edge, running):
            edge.faults = [fault, fault]
            with pytest.raises(OutcomeUnknownError, match=f"status {code}") as unknown:
                await client.call("pay", {"folder": str(tmp_path)})
            assert (len(edge.faults), ran(str(tmp_path))) == (1, int(ran_before)), "and it is final"
            assert running.tools.secret not in str(unknown.value)
            with pytest.raises(ToolCallError) as refused:
                await client.call("look", {"folder": str(tmp_path)})
            assert (refused.value.status, edge.faults) == (code, [])

    async def test_a_4xx_with_an_mcp_servers_answer_is_that_answer(self, tmp_path: Path) -> None:
        async def fault(request: web.Request, pass_on: Pass) -> web.StreamResponse:
            error = {"code": -32602, "message": "there is no such month"}
            return web.json_response({"jsonrpc": "2.0", "id": None, "error": error}, status=400)

        async with self.edge(tmp_path) as (client, edge, _):
            for tool in ("pay", "look"):
                edge.faults = [fault, fault]
                with pytest.raises(MCPError, match="there is no such month"):
                    await client.call(tool, {"folder": str(tmp_path)})
                assert len(edge.faults) == 1

    async def test_a_refusal_of_the_tool_servers_own_does(self, tmp_path: Path) -> None:
        async with self.edge(tmp_path) as (client, _, running):
            await client.list_tools()
            running.server._host.dismiss(running.tools.secret)  # type: ignore[union-attr]
            with pytest.raises(ToolCallError) as refused:
                await client.call("pay", {"folder": str(tmp_path)})
            assert (refused.value.status, ran(str(tmp_path))) == (401, 0)

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
