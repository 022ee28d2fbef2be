"""A rollout that has tools, for the tests of tool servers and of their client."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from interception import InterceptionServer, RolloutSession, Slot
from interception.tools import ToolClient, ToolServer, ToolSlot
from tests.interception import tool_module
from tests.interception.fakes import new_session
from tests.interception.tool_module import SPEC


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
