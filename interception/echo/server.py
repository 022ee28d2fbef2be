"""The echo model's server: routes, auth and errors. Each dialect's shapes are in a module of their own."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from interception.echo import chat, messages, responses
from interception.echo.answer import Answer, Json, Refused, Said, answer_to, dump, new_id

MAX_BODY = 1024**3  # bytes; the interception server in front sets the real limit
STOP_GRACE = 0.5  # seconds an open stream may still take when the server stops
EPOCH = "1970-01-01T00:00:00Z"  # Anthropic's own value for "release date unknown"
ANTHROPIC_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


class Dialect(Protocol):
    """What each dialect's module offers."""

    def said(self, body: Json) -> list[Said]: ...
    def whole(self, body: Json, answer: Answer) -> Json: ...
    def stream(self, body: Json, answer: Answer) -> Iterator[bytes]: ...


DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": chat,
    "/v1/responses": responses,
    "/v1/messages": messages,
}


class EchoModel:
    """A model endpoint on this host that answers with the text of the last user message.

    It serves `POST /v1/chat/completions`, `/v1/responses` and `/v1/messages`, each streamed or not,
    `POST /v1/messages/count_tokens`, `GET /v1/models` and `HEAD /`.

    * After a tool's result the answer is that result's text. System messages are never echoed.
    * If the request offers tools and the last user text has a line `!call NAME {json arguments}`, the answer is that
      tool call (the first such line; without arguments `{}`). NAME is not checked against the tools offered.
    * Tokens are words between white space: all of the request's text in, the answer's words out (at least 1).
    * A request's `model` comes back in the answer; one without a model gets this one's.
    * A bad request gets 400, an unknown path 404, in its dialect's error shape.

    :param host: the address to listen on.
    :param port: 0 takes any free port.
    :param api_key: if set, requests without it (`x-api-key`, else `Authorization: Bearer`) get 401; `HEAD /` is open.
    :param chunk_delay: seconds between the events of a stream.
    :param model: the id that `GET /v1/models` lists.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        chunk_delay: float = 0.0,
        model: str = "echo",
    ) -> None:
        self._host = host
        self._port = port
        self._api_key = api_key
        self._chunk_delay = chunk_delay
        self._model = model
        self._calls = 0
        self._base_url: str | None = None
        self._runner: web.AppRunner | None = None
        self._changing = asyncio.Lock()

    @property
    def base_url(self) -> str:
        """`http://HOST:PORT/v1`. Anthropic's SDK wants it without the `/v1`. RuntimeError while not serving."""
        if self._base_url is None:
            raise RuntimeError("the echo model is not serving: call start() first, or use it in `async with`")
        return self._base_url

    @property
    def calls(self) -> int:
        """Model calls received on the three dialects' routes, counted as they arrive, refused ones too."""
        return self._calls

    async def start(self) -> str:
        """Serve, and return `base_url`. Does nothing if it serves already. OSError if the port cannot be bound."""
        async with self._changing:
            if self._base_url is None:
                # No lingering: aiohttp would log a traceback for a body it could not decode. `_guard` reads the rest of
                # a refused body instead.
                self._runner = web.AppRunner(
                    self._app(), access_log=None, shutdown_timeout=STOP_GRACE, lingering_time=0
                )
                try:
                    await self._runner.setup()
                    await web.TCPSite(self._runner, self._host, self._port).start()
                except BaseException:
                    await self._runner.cleanup()
                    raise
                host = f"[{self._host}]" if ":" in self._host else self._host
                self._base_url = f"http://{host}:{self._runner.addresses[0][1]}/v1"
            return self._base_url

    async def stop(self) -> None:
        """Close the port and all connections, within about a second. Does nothing if it does not serve."""
        async with self._changing:
            self._base_url = None
            if self._runner is not None:
                # Forgotten only once cleaned up, so that a stop after a cancelled one ends the work.
                await self._runner.cleanup()
                self._runner = None

    async def __aenter__(self) -> EchoModel:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._guard])
        for path in DIALECTS:
            app.router.add_post(path, self._answer)
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_head("/", self._head)
        app.router.add_route("*", "/{path:.*}", self._unknown)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method == "POST" and request.path in DIALECTS:
            self._calls += 1
        try:
            if request.path != "/" and not self._authorized(request):
                raise Refused(401, "Incorrect API key provided.", code="invalid_api_key")
            return await handler(request)
        except Refused as refused:
            with contextlib.suppress(web.RequestPayloadError, ConnectionError):
                await request.release()
            return error_answer(request, refused)
        except ConnectionError:
            return web.Response()  # the client left while it sent its request: nobody reads this

    def _authorized(self, request: web.Request) -> bool:
        if self._api_key is None:
            return True
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        key = request.headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else "")
        # As bytes: compare_digest takes no text outside ASCII, and a header may hold any byte.
        return hmac.compare_digest(key.encode(errors="surrogateescape"), self._api_key.encode())

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        dialect = DIALECTS[request.path]
        body = await read_body(request)
        answer = answer_to(body, dialect.said(body), self._model)
        if body.get("stream") is True:
            return await self._stream(request, dialect.stream(body, answer))
        return json_answer(dialect.whole(body, answer))

    async def _stream(self, request: web.Request, events: Iterator[bytes]) -> web.StreamResponse:
        # All that the answer takes over from the request is in the first event: what cannot be echoed is still a 400.
        event = next(events)
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        try:
            await response.prepare(request)
            await response.write(event)
            for event in events:
                await asyncio.sleep(self._chunk_delay)  # without a delay too: a long stream lets others run
                await response.write(event)
        except ConnectionError:
            pass  # the client left; that is its right
        return response

    async def _count_tokens(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        return json_answer({"input_tokens": answer_to(body, messages.said(body), self._model).input_tokens})

    async def _list_models(self, request: web.Request) -> web.Response:
        if is_anthropic(request):
            model: Json = {"type": "model", "id": self._model, "display_name": self._model, "created_at": EPOCH}
            page = {"first_id": self._model, "last_id": self._model, "has_more": False}
        else:
            model = {"id": self._model, "object": "model", "created": 0, "owned_by": "echo"}
            page = {"object": "list"}
        return json_answer({"data": [model], **page})

    async def _head(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _unknown(self, request: web.Request) -> web.Response:
        raise Refused(404, f"Unknown request URL: {request.method} {request.path}.", code="unknown_url")


def is_anthropic(request: web.Request) -> bool:
    """Whether the client speaks Anthropic's API; the two share paths such as /v1/models."""
    return request.path.startswith("/v1/messages") or "anthropic-version" in request.headers


def error_answer(request: web.Request, refused: Refused) -> web.Response:
    body: Json
    if is_anthropic(request):
        kind = ANTHROPIC_ERRORS.get(refused.status, "invalid_request_error")
        error = {"type": kind, "message": refused.message}
        body = {"type": "error", "error": error, "request_id": new_id("req_")}
    else:
        details = {"type": "invalid_request_error", "param": refused.param, "code": refused.code}
        body = {"error": {"message": refused.message, **details}}
    return json_answer(body, status=refused.status)


def json_answer(payload: Json, status: int = 200) -> web.Response:
    return web.Response(body=dump(payload), status=status, content_type="application/json")


async def read_body(request: web.Request) -> Json:
    try:
        raw = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise Refused(413, f"The body is larger than {MAX_BODY} bytes.") from error
    except web.RequestPayloadError as error:
        raise Refused(400, "The body cannot be decoded: it is cut short or its encoding is corrupt.") from error
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Refused(400, f"The body is not valid JSON: {error}.") from error
    if not isinstance(body, dict):
        raise Refused(400, "The body must be a JSON object.")
    return body
