"""An upstream that does what a test scripts, call by call, and a rollout whose calls go to it."""

import asyncio
import contextlib
import enum
import gc
import json
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp import web

from interception import (
    InterceptionServer,
    InterceptionServerConfig,
    RolloutSession,
    ServingPolicy,
    Slot,
    Trace,
    Upstream,
)
from interception.dialects import CHAT, MESSAGES, RESPONSES, Dialect
from interception.sse import Json, SseEvent, SseParser, sse
from tests.helpers import until
from tunnel import HEALTH_PATH, KeepAlivePolicy
from tunnel.base import Tunnel
from tunnel.keepalive import TunnelClient

QUICK = ServingPolicy(grace=0.2, keepalive_interval=0.05, hold=0.1)
"""Waits of seconds in tenths. Tests that need an answer *within* the grace take `PATIENT`."""

PATIENT = ServingPolicy(grace=60, keepalive_interval=60, hold=60)


# -- the upstream --------------------------------------------------------------------------------------


class Step(enum.Enum):
    """How an answer is left."""

    RESET = "a TCP reset"
    CLOSE = "the connection closed before the answer's end"
    HANG = "silence, the connection open"


@dataclass
class Reply:
    """One call at the upstream, and the answer to it."""

    request: web.BaseRequest
    body: bytes
    response: web.StreamResponse | None = None

    @property
    def headers(self) -> Mapping[str, str]:
        return self.request.headers

    @property
    def json(self) -> Json:
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value

    async def begin(self, status: int, content_type: str, headers: Mapping[str, str] | None = None) -> None:
        self.response = web.StreamResponse(status=status, headers={"Content-Type": content_type, **(headers or {})})
        await self.response.prepare(self.request)

    async def take(self, step: "bytes | float | asyncio.Event | Step") -> None:
        """Send bytes, be silent for so many seconds or until an event, or leave."""
        if isinstance(step, asyncio.Event):
            await step.wait()
        elif isinstance(step, float):
            await asyncio.sleep(step)
        elif isinstance(step, bytes):
            assert self.response is not None
            await self.response.write(step)
        else:
            transport = self.request.transport
            assert transport is not None
            if step is Step.RESET:
                # Lingering for no time at all is how a socket is made to send RST.
                connection = transport.get_extra_info("socket")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                transport.abort()
            elif step is Step.CLOSE:
                transport.close()
            await asyncio.Event().wait()  # until the connection's end cancels it


Script = Callable[[Reply], Awaitable[None]]


def answers(
    body: Json | bytes,
    *before: float | asyncio.Event | Step,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    content_type: str = "application/json",
) -> Script:
    """A whole answer, once the steps of `before` are done (or none, where they leave)."""

    async def script(reply: Reply) -> None:
        for step in before:
            await reply.take(step)
        await reply.begin(status, content_type, headers)
        await reply.take(body if isinstance(body, bytes) else json.dumps(body).encode())

    return script


def streams(*steps: bytes | float | asyncio.Event | Step, headers: Mapping[str, str] | None = None) -> Script:
    """A stream, whose headers are sent at once."""

    async def script(reply: Reply) -> None:
        await reply.begin(200, "text/event-stream", headers)
        for step in steps:
            await reply.take(step)

    return script


def does(*steps: float | asyncio.Event | Step) -> Script:
    """No answer at all."""
    return answers(b"", *steps)


class ScriptedUpstream:
    """A model endpoint on loopback. Each call is answered by the next script, then by `always`.

    A call for which there is none is answered with 599, and is in `unscripted`.
    """

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.scripts: deque[Script] = deque()
        self.always: Script | None = None
        self.unscripted = 0
        self.abandoned = 0
        """Calls that the server went away from before their answer was at its end."""

    @property
    def calls(self) -> int:
        return len(self.replies)

    def then(self, *scripts: Script) -> None:
        self.scripts.extend(scripts)

    async def __aenter__(self) -> Self:
        self._runner = web.ServerRunner(web.Server(self._handle, handler_cancellation=True), shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        reply = Reply(request, await request.read())
        self.replies.append(reply)
        script = self.scripts.popleft() if self.scripts else self.always
        if script is None:
            self.unscripted += 1
            return web.Response(status=599, text="no script for this call")
        try:
            await script(reply)
        except asyncio.CancelledError:
            self.abandoned += 1
            raise
        return reply.response or web.Response(status=204)


# -- the dialects --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wire:
    """How a dialect asks and is answered, written by hand, so that our own rendering is not its own witness."""

    dialect: Dialect
    stop: int
    """Which of `events` is the first on which a client may stop."""

    @property
    def path(self) -> str:
        return self.dialect.path

    def request(self, text: str = "hi", *, stream: bool = False, **fields: Any) -> Json:
        field_name = "input" if self.dialect is RESPONSES else "messages"
        conversation: Any = [{"role": "user", "content": text}]
        limit = {"max_tokens": 64} if self.dialect is MESSAGES else {}
        return {"model": "m", field_name: conversation, **limit, **({"stream": True} if stream else {}), **fields}

    def answer(self, text: str = "hello") -> Json:
        if self.dialect is CHAT:
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
            return {**CHAT_HEAD, "object": "chat.completion", "choices": [choice], "usage": usage}
        if self.dialect is RESPONSES:
            part = {"type": "output_text", "text": text, "annotations": []}
            item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}
            usage = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}
            return {**RESPONSE, "status": "completed", "output": [item], "usage": usage}
        content = [{"type": "text", "text": text}]
        return {
            **MESSAGE,
            "content": content,
            "stop_reason": "end_turn",
            "usage": {"input_tokens": 3, "output_tokens": 2},
        }

    def body(self, text: str = "hello") -> bytes:
        """`answer` as the scripts send it."""
        return json.dumps(self.answer(text)).encode()

    def events(self, text: str = "hello", *, usage: bool = False) -> list[bytes]:
        """`answer` as a stream, an item for each event. `usage`: with chat's chunk of it, before `[DONE]`."""
        half = len(text) // 2
        if self.dialect is CHAT:
            head = {**CHAT_HEAD, "object": "chat.completion.chunk"}

            def chunk(delta: Json, finish: str | None = None) -> bytes:
                return sse({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

            counts = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
            extra = [sse({**head, "choices": [], "usage": counts})] if usage else []
            return [
                chunk({"role": "assistant", "content": ""}),
                chunk({"content": text[:half]}),
                chunk({"content": text[half:]}),
                chunk({}, "stop"),
                *extra,
                b"data: [DONE]\n\n",
            ]
        if self.dialect is RESPONSES:
            whole = self.answer(text)
            [item] = whole["output"]
            [part] = item["content"]
            at = {"output_index": 0, "item_id": "msg_1", "content_index": 0}
            opened = {**item, "status": "in_progress", "content": []}
            payloads: list[Json] = [
                {"type": "response.created", "response": {**RESPONSE, "status": "in_progress", "output": []}},
                {"type": "response.output_item.added", "output_index": 0, "item": opened},
                {"type": "response.content_part.added", **at, "part": {**part, "text": ""}},
                {"type": "response.output_text.delta", **at, "delta": text[:half], "logprobs": []},
                {"type": "response.output_text.delta", **at, "delta": text[half:], "logprobs": []},
                {"type": "response.output_text.done", **at, "text": text, "logprobs": []},
                {"type": "response.content_part.done", **at, "part": part},
                {"type": "response.output_item.done", "output_index": 0, "item": item},
                {"type": "response.completed", "response": whole},
            ]
            numbered = enumerate(payloads)
            return [sse({**payload, "sequence_number": number}, named=True) for number, payload in numbered]
        started = {**MESSAGE, "content": [], "usage": {"input_tokens": 3, "output_tokens": 1}}
        payloads = [
            {"type": "message_start", "message": started},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text[:half]}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text[half:]}},
            {"type": "content_block_stop", "index": 0},
            {
                "type": "message_delta",
                "delta": {"stop_reason": "end_turn", "stop_sequence": None},
                "usage": {"output_tokens": 2},
            },
            {"type": "message_stop"},
        ]
        return [sse(payload, named=True) for payload in payloads]

    def stream(self, text: str = "hello", *, usage: bool = False) -> bytes:
        return b"".join(self.events(text, usage=usage))

    def said(self, answer: Json | None) -> str:
        """The text of a whole answer."""
        assert answer is not None
        if self.dialect is CHAT:
            return str(answer["choices"][0]["message"]["content"])
        if self.dialect is RESPONSES:
            return str(answer["output"][0]["content"][0]["text"])
        return str(answer["content"][0]["text"])

    def in_error_shape(self, body: Json) -> bool:
        error = body.get("error")
        shaped = (
            isinstance(error, dict) and isinstance(error.get("message"), str) and isinstance(error.get("type"), str)
        )
        return shaped and (self.dialect is not MESSAGES or body.get("type") == "error")

    def is_error_event(self, event: SseEvent) -> bool:
        payload = event.json or {}
        if self.dialect is CHAT:
            return self.in_error_shape(payload)
        if self.dialect is RESPONSES:
            return event.event == "response.failed" and bool(payload["response"]["error"]["message"])
        return event.event == "error" and self.in_error_shape(payload)

    def __str__(self) -> str:
        return self.dialect.name


CHAT_HEAD: Json = {"id": "chatcmpl-1", "created": 1, "model": "m"}
MESSAGE: Json = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "stop_reason": None,
    "stop_sequence": None,
}
RESPONSE: Json = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "model": "m",
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "usage": None,
}
WIRES = [Wire(CHAT, 3), Wire(RESPONSES, 8), Wire(MESSAGES, 5)]
WIRE = WIRES[0]
"""For what has nothing to do with the dialect."""


def events_of(raw: bytes) -> list[SseEvent]:
    """The events of a stream that have data."""
    parser = SseParser()
    return [event for event in [*parser.feed(raw), *parser.end()] if event.data is not None]


# -- the rollout ---------------------------------------------------------------------------------------


class LoopbackTunnel(Tunnel):
    """A tunnel whose public URL is the local server's own: all that is done *because* there is a tunnel is done."""

    def __init__(self) -> None:
        super().__init__(KeepAlivePolicy())

    async def _connect(self, port: int) -> TunnelClient:
        return _Loopback(f"http://127.0.0.1:{port}")

    async def _disconnect(self) -> None:
        pass

    async def _keep(self, client: TunnelClient, local_url: str) -> None:
        await asyncio.Event().wait()


class _Loopback:
    is_running = True

    def __init__(self, url: str) -> None:
        self.url: str | None = url

    async def restart(self) -> str:
        raise AssertionError("nothing restarts it")


@dataclass
class Answer:
    """What an agent was answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Json:
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value

    @property
    def events(self) -> list[SseEvent]:
        return events_of(self.body)


@dataclass
class Rollout:
    """A session on a server, its upstream, and an agent that speaks plain HTTP."""

    server: InterceptionServer
    upstream: ScriptedUpstream
    session: RolloutSession
    slot: Slot
    http: aiohttp.ClientSession

    @property
    def trace(self) -> Trace:
        return self.session.trace

    def open(self, wire: Wire, body: Json, *, retry: int = 0, key: str | None = None, secret: str | None = None) -> Any:
        """The call as a context manager: for agents that look at their answer while it comes, or go away from it."""
        headers = {
            "Authorization": f"Bearer {secret or self.slot.model_secret}",
            "Content-Type": "application/json",
            "x-stainless-retry-count": str(retry),
            **({"Idempotency-Key": key} if key is not None else {}),
        }
        return self.http.post(self.slot.base_url + wire.path, data=json.dumps(body), headers=headers)

    async def call(
        self, wire: Wire, body: Json, *, retry: int = 0, key: str | None = None, secret: str | None = None
    ) -> Answer:
        async with self.open(wire, body, retry=retry, key=key, secret=secret) as response:
            return Answer(response.status, response.headers, await response.read())

    async def begin_call(
        self, wire: Wire, body: Json, *, retry: int = 0, key: str | None = None
    ) -> asyncio.Task[Answer]:
        """A call that has reached the server, and the upstream if it was to."""
        seen = self.session.calls_seen
        task = asyncio.create_task(self.call(wire, body, retry=retry, key=key))
        await until(lambda: self.session.calls_seen > seen)
        await self.settled()
        return task

    async def leave(self, task: asyncio.Task[Answer]) -> None:
        """The agent goes away from its call, and the server has noticed."""
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await self.settled()

    async def settled(self) -> None:
        """Returns once the server has seen all that came before on other connections: it shares our event loop, and
        answers this request only some turns of it later."""
        async with self.http.get(self.slot.base_url + HEALTH_PATH) as response:
            assert response.status == 200

    def another_session(self, **session: Any) -> tuple[RolloutSession, str]:
        """A second rollout on the same server and upstream, and its model secret."""
        recorded = RolloutSession(self.session.upstream, **session)
        return recorded, self.server.register(recorded)[0]

    def end(self) -> None:
        self.server.unregister(self.slot.model_secret, self.slot.state_secret)


@asynccontextmanager
async def rollout(
    *,
    policy: ServingPolicy = PATIENT,
    tunnel: bool = False,
    idle_timeout: float | None = 60.0,
    base_url: str | None = None,
    **session: Any,
) -> AsyncIterator[Rollout]:
    """A rollout whose upstream is scripted (or is at `base_url`). Fails if a call came that no script was there for."""
    server = InterceptionServer(InterceptionServerConfig(serving=policy))
    if tunnel:
        server.tunnel = LoopbackTunnel()
    # A connection for each call: one that the test has cut or left must not be reused.
    connector = aiohttp.TCPConnector(force_close=True)
    async with ScriptedUpstream() as upstream, server, aiohttp.ClientSession(connector=connector) as http:
        target = Upstream(base_url=base_url or upstream.base_url, idle_timeout=idle_timeout)
        recorded = RolloutSession(target, **session)
        pair = server.register(recorded)
        running = Rollout(server, upstream, recorded, Slot(server.base_url, *pair), http)
        yield running
        running.end()
        assert upstream.unscripted == 0, f"{upstream.unscripted} calls reached the upstream that should not have"


@asynccontextmanager
async def unsearched() -> AsyncIterator[None]:
    """What is gone in here was held by nobody, nor by itself: the garbage collector does not come by."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def read_until(response: aiohttp.ClientResponse, wanted: Callable[[SseEvent], bool]) -> list[SseEvent]:
    """Read a stream up to the first event that is wanted."""
    parser = SseParser()
    seen: list[SseEvent] = []
    while True:
        # By the byte, so that nothing beyond that event has been looked at.
        byte = await response.content.read(1)
        assert byte, f"the stream ended before that event: {seen}"
        for event in parser.feed(byte):
            seen.append(event)
            if event.data is not None and wanted(event):
                return seen
