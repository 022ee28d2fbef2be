"""Calling MCP tools over a connection that may break: again where that does no harm, and never twice where it might."""

import asyncio
import functools
import json
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import stamina

from interception.tools.server import ToolSlot
from tunnel import IDENTITY_HEADER

if TYPE_CHECKING:
    import httpx2
    from mcp import Client
    from mcp.types import CallToolResult, Tool

T = TypeVar("T")

CONNECT_TIMEOUT = 30.0
"""Seconds to connect."""

WAIT_MAX = 5.0
"""Seconds between two attempts, at most."""


class ToolCallError(Exception):
    """A call was refused, or never came to the server: a tool that must not run twice was not run.

    `status`: of the refusal, else None.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class OutcomeUnknownError(Exception):
    """A call was sent and its answer never came: the tool may have run. It was not sent again: it may do harm twice.

    An error status that is not known to be the tool server's own is no answer: there are edges that say 404 of a
    request that broke off in their hands.
    """


class ToolClient:
    """Calls the tools of one rollout. Needs the extra `mcp`.

    :param slot: the rollout's `ToolSlot`, or any MCP server's URL and key.
    :param patience: seconds for which a call that cannot have run, or may run twice, is made again when it gets no
        answer or a 5xx. A 4xx is final.
    :param timeout: seconds without a byte of the answer after which a call has none.

    A tool may run twice if its server says so: its annotations have `idempotentHint` or `readOnlyHint`. Errors of the
    tool itself are in its result (`is_error`); errors of the protocol are the SDK's `MCPError`.
    """

    def __init__(self, slot: ToolSlot, *, patience: float = 45.0, timeout: float = 300.0) -> None:
        self._slot = slot
        self._patience = patience
        self._timeout = timeout
        self._mode = "auto"
        self._tools: dict[str, Tool] | None = None

    async def list_tools(self) -> "list[Tool]":
        """What the server offers, asked anew."""

        async def listed(client: "Client") -> "list[Tool]":
            tools, cursor = [], None
            while True:
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                if not (cursor := page.next_cursor):
                    return tools

        tools = await self._again(listed, method="tools/list", harmless=True)
        self._tools = {tool.name: tool for tool in tools}
        return tools

    async def call(self, name: str, arguments: Mapping[str, Any] | None = None) -> "CallToolResult":
        """The tool's result. Raises `OutcomeUnknownError` if a tool that must not run twice may have run."""
        if self._tools is None:
            await self.list_tools()
        assert self._tools is not None
        tool = self._tools.get(name)
        hints = tool.annotations if tool is not None else None
        harmless = hints is not None and bool(hints.idempotent_hint or hints.read_only_hint)

        async def called(client: "Client") -> "CallToolResult":
            return await client.call_tool(name, dict(arguments or {}))

        return await self._again(called, method="tools/call", harmless=harmless)

    # -- parts ---------------------------------------------------------------------------------

    async def _again(self, work: "Callable[[Client], Awaitable[T]]", *, method: str, harmless: bool) -> T:
        try:
            async for attempt in stamina.retry_context(
                on=lambda error: isinstance(error, _NoAnswer) and error.may_pass and (harmless or not error.sent),
                attempts=None,
                timeout=self._patience,
                wait_max=WAIT_MAX,
            ):
                with attempt:
                    return await self._once(work, method)
        except _NoAnswer as error:
            if error.sent and not harmless:
                raise OutcomeUnknownError(
                    f"outcome unknown: the call was sent and its answer never came ({error}); it was not sent again"
                ) from error.__cause__
            raise ToolCallError(f"{self._slot.url}: {error}", error.status) from error.__cause__
        raise AssertionError("unreachable")

    async def _once(self, work: "Callable[[Client], Awaitable[T]]", method: str) -> T:
        """One attempt, over a connection of its own: a fault ends that, and with it the SDK's session."""
        await asyncio.to_thread(_import_sdk)
        import httpx2
        from mcp import Client, MCPError
        from mcp.client.streamable_http import streamable_http_client
        from mcp.types import CONNECTION_CLOSED, PARSE_ERROR, REQUEST_TIMEOUT

        seen = _Seen(method)
        http = httpx2.AsyncClient(
            headers=self._slot.headers,
            verify=_trust(),
            timeout=httpx2.Timeout(CONNECT_TIMEOUT, read=self._timeout),
            event_hooks={"request": [seen.request], "response": [seen.response]},
        )
        try:
            async with (
                http,
                Client(streamable_http_client(self._slot.url, http_client=http), mode=self._mode) as client,
            ):
                if self._mode == "auto":  # asked once
                    self._mode = client.protocol_version if client.session.discover_result else "legacy"
                return await work(client)
        except Exception as raised:
            error = _cause(raised)
            if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout):
                raise _NoAnswer(repr(error), sent=False) from raised
            if isinstance(error, httpx2.HTTPError | httpx2.StreamError):
                raise _NoAnswer(repr(error), sent=seen.sent) from raised
            if not isinstance(error, MCPError):
                raise error from None
            if seen.status >= 300 and not seen.answered:
                raise _NoAnswer(
                    f"status {seen.status}, {error}", sent=seen.sent and not seen.refused, status=seen.status
                ) from raised
            if not seen.is_mcp or error.code in (CONNECTION_CLOSED, PARSE_ERROR, REQUEST_TIMEOUT):
                raise _NoAnswer(str(error), sent=seen.sent) from raised  # the SDK's own word for an answer it lacks
            raise error from None


@functools.cache
def _import_sdk() -> None:
    """Takes a second or two, in which the event loop has other rollouts to serve."""
    import mcp
    import mcp.client.streamable_http  # noqa: F401


@functools.cache
def _trust() -> ssl.SSLContext:
    """Whose certificates count; reading them takes longer than many a call."""
    import httpx2

    return httpx2.create_ssl_context()


class _Seen:
    """What went over the wire in one attempt."""

    def __init__(self, method: str) -> None:
        self.sent = False
        """Whether the request with the method that matters may have been."""
        self.status = 0
        """Of the last answer; once that request was sent, of its own."""
        self.is_mcp = True
        """Whether that is one that an MCP server would give."""
        self.refused = False
        """Whether it is a `ToolServer`'s word that it has not let the request in."""
        self.answered = False
        """Whether it is a 4xx that has an MCP server's answer in it: an error of the protocol."""
        self._method = method
        self._call: httpx2.Request | None = None

    async def request(self, request: "httpx2.Request") -> None:
        if request.method == "POST" and json.loads(request.content).get("method") == self._method:
            self.sent, self._call = True, request
            self.status, self.is_mcp = 0, True

    async def response(self, response: "httpx2.Response") -> None:
        if self._call is not None and response.request is not self._call:
            return  # the SDK asks for more of a broken stream, or says that it has given up
        self.status = response.status_code
        kind = response.headers.get("content-type", "").lower()
        self.refused = response.status_code == 401 and IDENTITY_HEADER in response.headers
        self.is_mcp = response.status_code != 202 and kind.startswith(("application/json", "text/event-stream"))
        self.answered = 400 <= response.status_code < 500 and self.is_mcp and _is_rpc_error(await response.aread())


def _is_rpc_error(body: bytes) -> bool:
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(said, dict) and said.get("jsonrpc") == "2.0" and isinstance(said.get("error"), dict)


class _NoAnswer(Exception):
    """Of one attempt. `sent`: whether the call may have come to the server. `status`: of what came in its place."""

    def __init__(self, message: str, *, sent: bool, status: int | None = None) -> None:
        super().__init__(message)
        self.sent = sent
        self.status = status

    @property
    def may_pass(self) -> bool:
        return self.status is None or self.status >= 500


def _cause(error: BaseException) -> BaseException:
    """What an exception group of the SDK's is about: a fault of the connection, if there is one in it."""
    import httpx2

    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [_cause(one) for one in error.exceptions]
    return next((cause for cause in causes if isinstance(cause, httpx2.HTTPError)), causes[0])
