"""The interception server: what it catches, forwards, records and refuses, through the real SDKs and raw HTTP."""

import asyncio
import gc
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from aiohttp import web
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import SecretStr

from interception import (
    CALL_ID_HEADER,
    Attempt,
    InterceptionServer,
    InterceptionServerConfig,
    RolloutSession,
    ServingPolicy,
    Slot,
    Turn,
    Upstream,
)
from interception.echo import EchoModel
from interception.turn import Exchange, Failure
from tests.helpers import until
from tests.interception.fakes import (
    FakeTunnel,
    FakeTunnels,
    ScriptedModel,
    answering,
    hang,
    hangs_are_failures,
    new_session,
    other_tasks,
    settle,
)
from tunnel import HEALTH_PATH, IDENTITY_HEADER, TunnelError

__all__ = ["hangs_are_failures"]
pytestmark = pytest.mark.usefixtures("hangs_are_failures")

KEY = "sk-of-the-upstream"
TEXT = "The quick  brown fox\njumps — über ☃."
SOON = 10.0  # seconds; what the design promises within one, on a machine that may be busy

CHAT, RESPONSES, MESSAGES = ROUTES = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
NAMES = {CHAT: "chat completions", RESPONSES: "responses", MESSAGES: "messages"}


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def ask(route: str, text: str = "hi", **fields: Any) -> dict[str, Any]:
    """A request of the route's dialect."""
    said = {"input": text} if route == RESPONSES else {"messages": user(text)}
    return {"model": "m", **({"max_tokens": 9} if route == MESSAGES else {}), **said, **fields}


def is_error(route: str, answer: Any, kind: str | None = None) -> bool:
    """Whether it is an error as the route's SDKs know it."""
    error = answer["error"]
    if route == MESSAGES:
        shaped = answer["type"] == "error" and set(error) == {"type", "message"}
    else:
        shaped = set(answer) == {"error"} and set(error) == {"message", "type", "param", "code"}
    return shaped and bool(error["message"]) and kind in (None, error["type"])


@pytest.fixture
async def echo() -> AsyncIterator[EchoModel]:
    async with EchoModel() as model:
        yield model


@pytest.fixture
async def server() -> AsyncIterator[InterceptionServer]:
    async with InterceptionServer() as server:
        yield server


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


@pytest.fixture
def tunnels(monkeypatch: pytest.MonkeyPatch) -> FakeTunnels:
    tunnels = FakeTunnels()
    monkeypatch.setattr("interception.server.make_tunnel", tunnels)
    return tunnels


@dataclass
class Harness:
    """A rollout on the server, and the SDKs as its harness would have them."""

    session: RolloutSession
    slot: Slot
    http: aiohttp.ClientSession
    oai: AsyncOpenAI
    ant: AsyncAnthropic

    @property
    def turn(self) -> Turn:
        [turn] = self.session.trace.turns
        return turn

    def post(self, route: str, body: Any = None, **options: Any) -> Any:
        headers = {"Authorization": f"Bearer {self.slot.model_secret}", **options.pop("headers", {})}
        if body is not None:
            options["json"] = body
        return self.http.post(self.slot.base_url + route, headers=headers, **options)


@asynccontextmanager
async def rollout(
    server: InterceptionServer, http: aiohttp.ClientSession, upstream: Upstream, **options: Any
) -> AsyncIterator[Harness]:
    session = new_session(upstream, **options)
    async with server.acquire(session) as slot:
        env = slot.env()
        async with (
            AsyncOpenAI(base_url=env["OPENAI_BASE_URL"], api_key=env["OPENAI_API_KEY"], max_retries=0) as oai,
            AsyncAnthropic(base_url=env["ANTHROPIC_BASE_URL"], api_key=env["ANTHROPIC_API_KEY"], max_retries=0) as ant,
        ):
            yield Harness(session, slot, http, oai, ant)


@pytest.fixture
async def harness(server: InterceptionServer, http: aiohttp.ClientSession, echo: EchoModel) -> AsyncIterator[Harness]:
    async with rollout(server, http, Upstream(base_url=echo.base_url)) as harness:
        yield harness


class TestHealth:
    async def test_it_says_ok_to_anybody_from_the_start(
        self, server: InterceptionServer, http: aiohttp.ClientSession
    ) -> None:
        assert HEALTH_PATH == "/vf/health"
        async with http.get(server.base_url + HEALTH_PATH) as response:
            assert (response.status, response.content_type, await response.text()) == (200, "text/plain", "ok")
            assert response.headers[IDENTITY_HEADER] == server.identity

    async def test_each_server_has_an_identity_of_its_own(self) -> None:
        assert InterceptionServer().identity != InterceptionServer().identity

    async def test_it_says_ok_while_the_upstream_hangs(
        self, server: InterceptionServer, http: aiohttp.ClientSession
    ) -> None:
        async with ScriptedModel(hang) as model, rollout(server, http, model.upstream) as harness:
            call = asyncio.create_task(harness.post(CHAT, ask(CHAT)).__aenter__())
            await until(lambda: model.open == 1)
            async with http.get(server.base_url + HEALTH_PATH) as response:
                assert response.status == 200
            server.unregister(harness.slot.model_secret, harness.slot.state_secret)
            await call


class TestThroughTheSdks:
    async def test_chat_completions(self, harness: Harness, echo: EchoModel) -> None:
        done = await harness.oai.chat.completions.create(model="m", messages=user(TEXT))
        assert done.choices[0].message.content == TEXT
        assert harness.turn.response == done.to_dict()
        assert echo.calls == 1

    async def test_chat_completions_streamed(self, harness: Harness) -> None:
        stream = await harness.oai.chat.completions.create(model="m", messages=user(TEXT), stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert "".join(pieces) == TEXT
        assert harness.turn.streamed
        assert (harness.turn.response or {})["choices"][0]["message"]["content"] == TEXT

    async def test_responses(self, harness: Harness) -> None:
        done = await harness.oai.responses.create(model="m", input=TEXT)
        assert done.output_text == TEXT
        assert harness.turn.response is not None
        assert harness.turn.response["id"] == done.id

    async def test_responses_streamed(self, harness: Harness) -> None:
        async with harness.oai.responses.stream(model="m", input=TEXT) as stream:
            async for _ in stream:
                pass
            assert (await stream.get_final_response()).output_text == TEXT
            assert harness.turn.response is not None
            assert harness.turn.response["output"][0]["content"][0]["text"] == TEXT

    async def test_messages(self, harness: Harness) -> None:
        done = await harness.ant.messages.create(model="m", max_tokens=9, messages=user(TEXT))
        assert done.content[0].type == "text"
        assert done.content[0].text == TEXT
        assert harness.turn.response is not None
        assert harness.turn.response["id"] == done.id

    async def test_messages_streamed(self, harness: Harness) -> None:
        async with harness.ant.messages.stream(model="m", max_tokens=9, messages=user(TEXT)) as stream:
            assert "".join([text async for text in stream.text_stream]) == TEXT
        assert (harness.turn.response or {})["content"][0]["text"] == TEXT

    async def test_a_wrong_key_is_the_sdks_own_authentication_error(self, harness: Harness, echo: EchoModel) -> None:
        wrong = harness.slot.state_secret
        with pytest.raises(openai.AuthenticationError):
            await harness.oai.with_options(api_key=wrong).chat.completions.create(model="m", messages=user("hi"))
        with pytest.raises(openai.AuthenticationError):
            await harness.oai.with_options(api_key=wrong).responses.create(model="m", input="hi", stream=True)
        with pytest.raises(openai.AuthenticationError):
            await harness.oai.with_options(api_key=wrong).models.list()
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await harness.ant.with_options(api_key=wrong).messages.create(model="m", max_tokens=9, messages=user("hi"))
        assert refused.value.type == "authentication_error"
        assert harness.session.trace.turns == []
        assert echo.calls == 0

    async def test_the_model_list(self, harness: Harness) -> None:
        assert [model.id async for model in harness.oai.models.list()] == ["echo"]
        assert harness.session.trace.turns == []

    async def test_sixteen_calls_at_once_on_one_secret(self, harness: Harness, echo: EchoModel) -> None:
        calls = [harness.oai.chat.completions.create(model="m", messages=user(f"call {n}")) for n in range(16)]
        done = await asyncio.gather(*calls)
        assert [answer.choices[0].message.content for answer in done] == [f"call {n}" for n in range(16)]
        assert len(harness.session.trace.turns) == echo.calls == 16


class TestRecord:
    @pytest.mark.parametrize("route", ROUTES)
    @pytest.mark.parametrize("streamed", [False, True])
    async def test_a_turn_holds_both_bodies(self, harness: Harness, route: str, streamed: bool) -> None:
        asked = ask(route, stream=streamed, unknown={"kept": [1, 2.5, None, "ü"]})
        before = time.time()
        async with harness.post(route, asked) as response:
            answer = await response.read()
            call_id = response.headers[CALL_ID_HEADER]
        turn = harness.turn
        assert (turn.dialect, turn.streamed, turn.complete, turn.delivered) == (NAMES[route], streamed, True, True)
        assert turn.request == asked
        assert turn.response is not None
        assert turn.finish_reason is not None
        assert turn.usage is not None
        if not streamed:
            assert turn.response == json.loads(answer)
        [attempt] = turn.attempts
        assert (attempt.call_id, attempt.status, attempt.error) == (call_id, 200, None)
        assert turn.queued is not None
        assert attempt.started is not None
        assert attempt.first_byte is not None
        assert attempt.ended is not None
        times = [turn.queued, attempt.started, attempt.first_byte, attempt.ended]
        assert before - 1 <= times[0]
        assert times == sorted(times)
        assert times[-1] <= time.time() + 1

    async def test_turns_stand_in_the_order_in_which_they_began(self, harness: Harness) -> None:
        for text in ("one", "two", "three"):
            async with harness.post(CHAT, ask(CHAT, text)) as response:
                await response.read()
        asked = [turn.request["messages"][0]["content"] for turn in harness.session.trace.turns]
        assert asked == ["one", "two", "three"]
        assert len({turn.id for turn in harness.session.trace.turns}) == 3

    async def test_a_refused_request_is_no_turn(self, harness: Harness) -> None:
        async with harness.post(CHAT, data=b"{") as response:
            assert response.status == 400
        assert harness.session.trace.turns == []

    async def test_the_readers_loss_does_not_end_the_turn(
        self, server: InterceptionServer, http: aiohttp.ClientSession
    ) -> None:
        go = asyncio.Event()
        first, last = delta("The quick "), delta("brown fox") + delta(None, "stop") + b"data: [DONE]\n\n"

        async def answer(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(first)
            await go.wait()
            await response.write(last)
            return response

        async with ScriptedModel(answer) as model, rollout(server, http, model.upstream) as harness:
            response = await harness.post(CHAT, ask(CHAT, stream=True)).__aenter__()
            assert await response.content.readuntil(b"\n\n") == first
            response.close()
            await noticed(server, http)
            assert not harness.turn.complete
            go.set()
            await until(lambda: harness.turn.complete)
            assert (harness.turn.response or {})["choices"][0]["message"]["content"] == "The quick brown fox"
            assert not harness.turn.delivered

    async def test_the_loss_of_a_reader_that_waited_for_the_whole_answer_does_not_end_the_turn(
        self, server: InterceptionServer, http: aiohttp.ClientSession
    ) -> None:
        go = asyncio.Event()

        async def answer(request: web.Request) -> web.StreamResponse:
            await go.wait()
            return web.json_response({"id": "late"})

        async with ScriptedModel(answer) as model, rollout(server, http, model.upstream) as harness:
            call = asyncio.create_task(harness.post(MESSAGES, ask(MESSAGES)).__aenter__())
            await until(lambda: model.open == 1)
            call.cancel()
            await asyncio.wait([call])
            await noticed(server, http)
            assert model.open == 1
            go.set()
            await until(lambda: harness.turn.complete)
            assert harness.turn.response == {"id": "late"}
            assert not harness.turn.delivered


class TestOverrides:
    @pytest.mark.parametrize("route", ROUTES)
    async def test_model_and_sampling_reach_the_upstream_and_the_rest_stays(
        self, server: InterceptionServer, http: aiohttp.ClientSession, route: str
    ) -> None:
        async with (
            ScriptedModel(answering()) as model,
            rollout(
                server, http, model.upstream, model="policy-7", sampling={"temperature": 0.25, "top_p": None}
            ) as harness,
        ):
            body = ask(route, temperature=1.5, unknown={"kept": [1, 2.5, None, "ü"]})
            async with harness.post(route, body) as response:
                assert response.status == 200
            [seen] = model.seen
            assert json.loads(seen.body) == {**body, "model": "policy-7", "temperature": 0.25, "top_p": None}
            assert seen.path == route

    async def test_without_overrides_the_body_is_forwarded_byte_by_byte(
        self, server: InterceptionServer, http: aiohttp.ClientSession
    ) -> None:
        raw = b'{ "b": 1.0,"a": 1e2, "messages": [],\n"seed": 123456789012345678901234567890 }'
        async with ScriptedModel(answering()) as model, rollout(server, http, model.upstream) as harness:
            async with harness.post(CHAT, data=raw):
                pass
            assert model.seen[0].body == raw

    async def test_an_override_leaves_numbers_it_does_not_name_as_they_are(
        self, server: InterceptionServer, http: aiohttp.ClientSession
    ) -> None:
        raw = b'{"messages": [], "seed": 123456789012345678901234567890}'
        async with (
            ScriptedModel(answering()) as model,
            rollout(server, http, model.upstream, model="policy-7") as harness,
        ):
            async with harness.post(CHAT, data=raw):
                pass
            assert json.loads(model.seen[0].body)["seed"] == 123456789012345678901234567890

    async def test_the_sdk_sees_the_model_that_answered(
        self, server: InterceptionServer, http: aiohttp.ClientSession, echo: EchoModel
    ) -> None:
        async with rollout(server, http, Upstream(base_url=echo.base_url), model="policy-7") as harness:
            done = await harness.oai.chat.completions.create(model="gpt", messages=user("hi"))
            assert done.model == "policy-7"


class TestRefusals:
    @pytest.mark.parametrize("route", ROUTES)
    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"Authorization": "Bearer "},
            {"Authorization": "Bearer"},
            {"Authorization": ""},
            {"x-api-key": ""},
            {"Authorization": "Bearer unknown"},
            {"x-api-key": "unknown"},
            {"Authorization": "Basic dTpw"},
            {"x-api-key": "schlüssel"},
        ],
    )
    async def test_no_empty_or_unknown_secret_is_401_in_the_dialects_shape(
        self, server: InterceptionServer, harness: Harness, route: str, headers: dict[str, str]
    ) -> None:
        async with harness.http.post(server.base_url + route, json=ask(route), headers=headers) as response:
            assert response.status == 401
            assert is_error(route, await response.json(), "authentication_error")

    @pytest.mark.parametrize("route", ROUTES)
    async def test_a_secret_of_bytes_that_are_no_text_is_401(self, server: InterceptionServer, route: str) -> None:
        status = await raw_status(server, f"POST {route} HTTP/1.1\r\nx-api-key: ".encode() + b"\xff\xfe\r\n")
        assert status == 401

    @pytest.mark.parametrize("route", ROUTES)
    async def test_the_state_secret_cannot_reach_the_model(self, harness: Harness, route: str) -> None:
        for headers in ({"Authorization": f"Bearer {harness.slot.state_secret}"}, {"x-api-key": harness.slot[2]}):
            async with harness.post(route, ask(route), headers=headers) as response:
                assert response.status == 401
                assert is_error(route, await response.json(), "authentication_error")

    @pytest.mark.parametrize("route", ROUTES)
    async def test_the_secret_is_taken_from_either_header_and_anthropics_wins(
        self, harness: Harness, route: str
    ) -> None:
        secret, url = harness.slot.model_secret, harness.slot.base_url + route
        for headers, status in (
            ({"Authorization": f"Bearer {secret}"}, 200),
            ({"Authorization": f"bearer  {secret} "}, 200),
            ({"x-api-key": secret}, 200),
            ({"x-api-key": secret, "Authorization": "Bearer other"}, 200),
            ({"x-api-key": "", "Authorization": f"Bearer {secret}"}, 200),
            ({"x-api-key": "other", "Authorization": f"Bearer {secret}"}, 401),
        ):
            async with harness.http.post(url, json=ask(route), headers=headers) as response:
                assert response.status == status, headers

    @pytest.mark.parametrize("route", ROUTES)
    async def test_a_released_secret_is_401(
        self, server: InterceptionServer, http: aiohttp.ClientSession, echo: EchoModel, route: str
    ) -> None:
        async with rollout(server, http, Upstream(base_url=echo.base_url)) as harness:
            pass
        async with harness.post(route, ask(route)) as response:
            assert response.status == 401
            assert is_error(route, await response.json(), "authentication_error")
        async with http.get(
            server.base_url + "/v1/models", headers={"Authorization": f"Bearer {harness.slot.model_secret}"}
        ) as response:
            assert response.status == 401
        assert echo.calls == 0
        assert harness.session.trace.turns == []

    @pytest.mark.parametrize("route", ROUTES)
    @pytest.mark.parametrize("raw", [b"", b"{", b'{"model": ', b"[1]", b"null", b'"\xff"', b"[" * 100_000, b"NaN"])
    async def test_a_body_that_is_no_json_object_is_400_in_the_dialects_shape(
        self, harness: Harness, echo: EchoModel, caplog: pytest.LogCaptureFixture, route: str, raw: bytes
    ) -> None:
        async with harness.post(route, data=raw) as response:
            assert response.status == 400
            assert is_error(route, await response.json(), "invalid_request_error")
            assert CALL_ID_HEADER in response.headers
        assert echo.calls == 0
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]

    async def test_a_body_nested_deeper_than_can_be_written_is_400_and_no_defect(
        self,
        server: InterceptionServer,
        http: aiohttp.ClientSession,
        echo: EchoModel,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        raw = b'{"messages": [], "metadata": ' + b"[" * 500 + b"]" * 500 + b"}"
        async with (
            rollout(server, http, Upstream(base_url=echo.base_url), model="policy-7") as harness,
            harness.post(CHAT, data=raw) as response,
        ):
            assert response.status in (200, 400)
            assert response.status == 200 or is_error(CHAT, await response.json())
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]

    async def test_a_sender_that_goes_away_in_the_middle_of_its_body_is_no_defect(
        self, server: InterceptionServer, harness: Harness, caplog: pytest.LogCaptureFixture
    ) -> None:
        _, writer = await connect(server)
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: h\r\nx-api-key: {harness.slot.model_secret}\r\nContent-Length: 99\r\n\r\n"
        )
        writer.write(head.encode() + b'{"messages"')
        await writer.drain()
        async with harness.post(CHAT, ask(CHAT)) as response:  # meanwhile nobody else waits
            assert response.status == 200
        writer.transport.abort()
        await noticed(server, harness.http)
        async with harness.post(CHAT, ask(CHAT)) as response:
            assert response.status == 200
        assert len(harness.session.trace.turns) == 2
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


class TestFailingUpstream:
    @pytest.mark.parametrize("route", ROUTES)
    @pytest.mark.parametrize("streamed", [False, True])
    async def test_refused_is_503(
        self, server: InterceptionServer, http: aiohttp.ClientSession, route: str, streamed: bool
    ) -> None:
        with socket.socket() as bound:  # bound and not listening: refused, and taken by nobody else
            bound.bind(("127.0.0.1", 0))
            upstream = Upstream(base_url=f"http://127.0.0.1:{bound.getsockname()[1]}/v1", api_key=SecretStr(KEY))
            async with rollout(server, http, upstream) as harness:
                async with harness.post(route, ask(route, stream=streamed)) as response:
                    answer = await response.json()
                    assert response.status == 503
                    assert response.headers[CALL_ID_HEADER] == harness.turn.attempts[0].call_id
                assert is_error(route, answer)
                assert KEY not in json.dumps(answer)
                assert not harness.turn.complete
                assert (harness.turn.status, harness.turn.response) == (None, None)
                assert harness.turn.error == answer["error"]["message"]
                assert harness.session.error is None  # a failure of the provider is on the attempt

    @pytest.mark.parametrize("route", ROUTES)
    @pytest.mark.parametrize("streamed", [False, True])
    @pytest.mark.parametrize("status", [400, 404, 429, 500, 529])
    async def test_its_own_refusals_are_relayed_with_retry_after(
        self, server: InterceptionServer, http: aiohttp.ClientSession, route: str, streamed: bool, status: int
    ) -> None:
        body = b'{"error": {"type": "of_the_upstream", "message": "wait", "extra": 1}}'
        async with (
            ScriptedModel(answering(status, body, {"Retry-After": "7", "x-ratelimit-reset": "9"})) as model,
            rollout(server, http, model.upstream) as harness,
        ):
            async with harness.post(route, ask(route, stream=streamed)) as response:
                assert (response.status, await response.read()) == (status, body)
                assert response.headers["Retry-After"] == "7"
                assert response.headers["x-ratelimit-reset"] == "9"
                assert response.headers[CALL_ID_HEADER] == harness.turn.attempts[0].call_id
                assert response.content_type == "application/json"
            assert (harness.turn.status, harness.turn.complete) == (status, False)
            assert harness.turn.response == json.loads(body)

    async def test_a_rate_limit_is_the_sdks_own_error(
        self, server: InterceptionServer, http: aiohttp.ClientSession
    ) -> None:
        async with (
            ScriptedModel(answering(429, b'{"error": {"message": "wait"}}', {"Retry-After": "7"})) as model,
            rollout(server, http, model.upstream) as harness,
        ):
            with pytest.raises(openai.RateLimitError) as limited:
                await harness.oai.chat.completions.create(model="m", messages=user("hi"), stream=True)
            assert limited.value.response.headers["retry-after"] == "7"

    async def test_a_redirect_is_not_followed_with_the_key_nor_by_the_harness(
        self, server: InterceptionServer, http: aiohttp.ClientSession
    ) -> None:
        async with (
            ScriptedModel(answering(307, b"{}", {"Location": "/v1/elsewhere"})) as model,
            rollout(server, http, model.upstream) as harness,
        ):
            async with harness.post(CHAT, ask(CHAT), allow_redirects=False) as response:
                assert response.status == 502
                assert "/v1/elsewhere" in (await response.json())["error"]["message"]
            assert len(model.seen) == 1
            assert not harness.turn.complete

    @pytest.mark.parametrize("route", ROUTES)
    @pytest.mark.parametrize("chunked", [False, True])
    async def test_one_that_breaks_off_in_the_middle_is_502(
        self, server: InterceptionServer, http: aiohttp.ClientSession, route: str, chunked: bool
    ) -> None:
        async with ScriptedModel(breaking_off(chunked)) as model, rollout(server, http, model.upstream) as harness:
            async with harness.post(route, ask(route)) as response:
                assert response.status == 502
                assert is_error(route, await response.json())
            assert harness.turn.error is not None
            assert "broke off" in harness.turn.error
            assert harness.turn.response is None
            assert not harness.turn.complete

    @pytest.mark.parametrize("route", ROUTES)
    async def test_a_stream_that_breaks_off_has_no_clean_end(
        self, server: InterceptionServer, http: aiohttp.ClientSession, route: str
    ) -> None:
        async with ScriptedModel(breaking_off(True)) as model, rollout(server, http, model.upstream) as harness:
            async with harness.post(route, ask(route, stream=True)) as response:
                answer = await response.read()
                assert response.status >= 500 or b'"error"' in answer
            assert harness.turn.error is not None
            assert not harness.turn.complete

    async def test_a_reset_before_the_answer_is_503(
        self, server: InterceptionServer, http: aiohttp.ClientSession
    ) -> None:
        async def reset(request: web.Request) -> web.StreamResponse:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()

        async with (
            ScriptedModel(reset) as model,
            rollout(server, http, model.upstream) as harness,
            harness.post(CHAT, ask(CHAT)) as response,
        ):
            assert response.status == 503
            assert is_error(CHAT, await response.json())

    @pytest.mark.parametrize("raw", [b"\x16\x03\x01 this is no HTTP\r\n\r\n", b"HTTP/1.1 200 OK\r\nbroken\r\n\r\n"])
    async def test_one_that_speaks_no_http_is_an_error_in_the_dialects_shape(
        self, server: InterceptionServer, http: aiohttp.ClientSession, raw: bytes
    ) -> None:
        async with (
            raw_upstream(raw) as upstream,
            rollout(server, http, upstream) as harness,
            harness.post(CHAT, ask(CHAT)) as response,
        ):
            assert response.status in (502, 503)
            assert is_error(CHAT, await response.json())

    @pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
    async def test_an_answer_that_cannot_be_decoded_is_502(
        self, server: InterceptionServer, http: aiohttp.ClientSession, encoding: str
    ) -> None:
        raw = f"HTTP/1.1 200 OK\r\nContent-Encoding: {encoding}\r\nContent-Length: 8\r\n\r\nnot that".encode()
        async with (
            raw_upstream(raw) as upstream,
            rollout(server, http, upstream) as harness,
            harness.post(CHAT, ask(CHAT)) as response,
        ):
            assert response.status == 502
            assert is_error(CHAT, await response.json())

    async def test_one_that_stays_silent_is_504(self, server: InterceptionServer, http: aiohttp.ClientSession) -> None:
        async with ScriptedModel(hang) as model:
            upstream = Upstream(base_url=model.base_url, idle_timeout=0.2)
            async with rollout(server, http, upstream) as harness:
                async with harness.post(CHAT, ask(CHAT)) as response:
                    assert response.status == 504
                    assert is_error(CHAT, await response.json())
                await until(lambda: model.open == 0)

    @pytest.mark.parametrize(
        "base_url", ["http://host:99999/v1", "http://" + "a" * 70 + ".invalid/v1", "http://a b/v1"]
    )
    async def test_an_upstream_that_cannot_exist_is_an_error_and_no_silence(
        self, server: InterceptionServer, http: aiohttp.ClientSession, base_url: str
    ) -> None:
        try:
            upstream = Upstream(base_url=base_url)
        except ValueError:
            return  # said at once: better still
        async with (
            rollout(server, http, upstream) as harness,
            asyncio.timeout(SOON),
            harness.post(CHAT, ask(CHAT)) as response,
        ):
            assert response.status in (502, 503)
            assert is_error(CHAT, await response.json())

    async def test_a_defect_of_the_exchange_ends_it_and_is_recorded(self) -> None:
        async def work(exchange: Exchange) -> None:
            raise LookupError("nobody foresaw this")

        attempt = Attempt("c")
        exchange = Exchange(attempt, work)
        assert await exchange.wait(lambda: exchange.ended, SOON)
        assert exchange.failure is not None
        assert (exchange.failure.status, attempt.error) == (500, exchange.failure.message)
        assert "nobody foresaw this" not in exchange.failure.message
        assert attempt.ended is not None

    async def test_a_wait_that_is_over_as_news_come_ends_as_any(self) -> None:
        loop = asyncio.get_running_loop()
        exchange = Exchange(Attempt("c"), hang_for_ever)
        waiting = asyncio.create_task(exchange.wait(lambda: False, 0.0))
        await asyncio.sleep(0)
        loop.call_at(loop.time(), exchange.release, b"news")  # in the turn of the loop that ends the wait, after it
        assert await waiting is False
        exchange.cancel(Failure(503, "over"))

    async def test_who_waits_no_more_is_forgotten(self) -> None:
        exchange = Exchange(Attempt("c"), hang_for_ever)
        waiting = asyncio.create_task(exchange.wait(lambda: False))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not exchange._waiters
        exchange.cancel(Failure(503, "over"))


async def hang_for_ever(exchange: Exchange) -> None:
    await asyncio.Event().wait()


class TestEndOfTheRollout:
    @pytest.mark.parametrize("route", ROUTES)
    @pytest.mark.parametrize("streamed", [False, True])
    async def test_unregister_ends_a_hanging_call_at_once(
        self, server: InterceptionServer, http: aiohttp.ClientSession, route: str, streamed: bool
    ) -> None:
        async with ScriptedModel(hang) as model:
            session = new_session(model.upstream)
            pair = server.register(session)
            headers = {"x-api-key": pair[0]}
            call = asyncio.create_task(
                http.post(server.base_url + route, json=ask(route, stream=streamed), headers=headers).__aenter__()
            )
            await until(lambda: model.open == 1)
            server.unregister(*pair)
            [turn] = session.trace.turns
            assert session.trace.sealed
            assert turn.error is not None
            assert turn.error.startswith("cancelled")
            ended = turn.attempts[0].ended
            assert ended is not None
            await until(lambda: model.open == 0, timeout=SOON)
            async with asyncio.timeout(SOON):
                response = await call
            assert response.status == 409
            assert response.headers["x-should-retry"] == "false"
            assert is_error(route, await response.json())
            error = turn.error
            await settle()
            assert (turn.attempts[0].ended, turn.error, len(session.trace.turns)) == (ended, error, 1)
            assert server.load == 0
            assert len(session.ledger) == 0

    async def test_the_sdk_does_not_retry_a_call_that_was_admitted_before(
        self, server: InterceptionServer, http: aiohttp.ClientSession
    ) -> None:
        async with ScriptedModel(hang) as model, rollout(server, http, model.upstream) as harness:
            call = asyncio.create_task(
                harness.oai.with_options(max_retries=3).chat.completions.create(model="m", messages=user("hi"))
            )
            await until(lambda: model.open == 1)
            server.unregister(*harness.slot[1:])
            with pytest.raises(openai.ConflictError):
                await call
            assert len(model.seen) == 1

    async def test_a_call_still_being_sent_when_the_rollout_ends_is_409_and_no_turn(
        self, server: InterceptionServer, http: aiohttp.ClientSession, echo: EchoModel
    ) -> None:
        sending, go = asyncio.Event(), asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            yield b'{"messages": '
            sending.set()
            await go.wait()
            yield b"[]}"

        async with rollout(server, http, Upstream(base_url=echo.base_url)) as harness:
            call = asyncio.create_task(harness.post(CHAT, data=body()).__aenter__())
            await sending.wait()
            async with harness.post(CHAT, ask(CHAT)):  # once this is answered the one before it is admitted
                pass
            server.unregister(*harness.slot[1:])
            go.set()
            response = await call
            assert response.status == 409
            assert response.headers["x-should-retry"] == "false"
            assert is_error(CHAT, await response.json())
            assert echo.calls == len(harness.session.trace.turns) == 1

    async def test_unregister_ends_a_stream_with_the_dialects_error(
        self, server: InterceptionServer, http: aiohttp.ClientSession
    ) -> None:
        async def answer(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(delta("first"))
            return await hang(request)

        async with ScriptedModel(answer) as model, rollout(server, http, model.upstream) as harness:
            response = await harness.post(CHAT, ask(CHAT, stream=True)).__aenter__()
            assert await response.content.readuntil(b"\n\n") == delta("first")
            server.unregister(*harness.slot[1:])
            await until(lambda: model.open == 0, timeout=SOON)
            rest = await response.read()
            assert is_error(CHAT, json.loads(rest.removeprefix(b"data: ")))
            assert harness.turn.error is not None
            assert harness.turn.error.startswith("cancelled")
            assert not harness.turn.complete
            assert not harness.turn.delivered

    async def test_unregister_can_be_repeated_and_knows_nothing_of_strangers(self, server: InterceptionServer) -> None:
        first, second = new_session(), new_session()
        pair = server.register(first)
        server.register(second)
        assert server.load == 2
        assert server.sessions == [first, second]
        for _ in range(2):
            server.unregister(*pair)
            server.unregister("no", "such")
            server.unregister(*reversed(pair))
            assert server.load == 1
        assert first.released
        assert not second.released

    async def test_other_rollouts_are_not_touched(
        self, server: InterceptionServer, http: aiohttp.ClientSession, harness: Harness
    ) -> None:
        async with ScriptedModel(hang) as model:
            async with rollout(server, http, model.upstream) as other:
                call = asyncio.create_task(other.post(CHAT, ask(CHAT)).__aenter__())
                await until(lambda: model.open == 1)
            async with harness.post(CHAT, ask(CHAT)) as response:
                assert response.status == 200
            assert (await call).status == 409

    async def test_a_session_is_used_once(self, server: InterceptionServer) -> None:
        session = new_session()
        pair = server.register(session)
        with pytest.raises(ValueError, match="used already"):
            server.register(session)
        server.unregister(*pair)
        with pytest.raises(ValueError, match="used already"):
            server.register(session)
        assert server.load == 0


class TestModelList:
    async def test_it_is_forwarded_with_the_upstreams_key(
        self, server: InterceptionServer, http: aiohttp.ClientSession
    ) -> None:
        body = b'{"object": "list", "data": []}'
        async with ScriptedModel(answering(200, body)) as model:
            upstream = Upstream(base_url=model.base_url, api_key=SecretStr(KEY))
            async with rollout(server, http, upstream) as harness:
                async with get_models(harness) as response:
                    assert (response.status, await response.read()) == (200, body)
                [seen] = model.seen
                assert (seen.method, seen.path) == ("GET", "/v1/models")
                assert seen.headers["Authorization"] == f"Bearer {KEY}"
                assert harness.session.trace.turns == []

    async def test_a_hung_one_is_502_and_fails_no_rollout(self, http: aiohttp.ClientSession) -> None:
        config = InterceptionServerConfig(serving=ServingPolicy(models_timeout=0.2))
        async with (
            InterceptionServer(config) as server,
            ScriptedModel(hang) as model,
            rollout(server, http, model.upstream) as harness,
        ):
            async with get_models(harness) as response:
                assert response.status == 502
                assert is_error(CHAT, await response.json())
            await until(lambda: model.open == 0)
            assert harness.session.error is None
            assert harness.session.trace.turns == []

    def test_it_takes_no_longer_than_the_design_says(self) -> None:
        assert ServingPolicy().models_timeout <= 35

    @pytest.mark.parametrize(
        "raw", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", b"HTTP/1.1 nonsense\r\n\r\n"]
    )
    async def test_one_that_breaks_off_is_502(
        self,
        server: InterceptionServer,
        http: aiohttp.ClientSession,
        caplog: pytest.LogCaptureFixture,
        raw: bytes,
    ) -> None:
        async with (
            raw_upstream(raw) as upstream,
            rollout(server, http, upstream) as harness,
            get_models(harness) as response,
        ):
            assert response.status == 502
            assert is_error(CHAT, await response.json())
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]

    async def test_one_that_cannot_be_reached_is_502(
        self, server: InterceptionServer, http: aiohttp.ClientSession
    ) -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            upstream = Upstream(base_url=f"http://127.0.0.1:{bound.getsockname()[1]}/v1")
            async with rollout(server, http, upstream) as harness, get_models(harness) as response:
                assert response.status == 502


class TestHeaders:
    async def test_auth_and_hop_by_hop_headers_end_here(
        self, server: InterceptionServer, http: aiohttp.ClientSession
    ) -> None:
        ends_here = {
            "api-key": "mine",
            "Proxy-Authorization": "Basic mine",
            "Connection": "keep-alive, X-Hop",
            "X-Hop": "mine",
            "Keep-Alive": "timeout=5",
            "TE": "trailers",
            "Upgrade": "h2c",
            "Content-MD5": "mine",
            "Digest": "mine",
            "Idempotency-Key": "mine",
            "X-Forwarded-For": "10.0.0.1",
            "X-Forwarded-Host": "public.example",
        }
        async with ScriptedModel(answering()) as model, rollout(server, http, model.upstream) as harness:
            headers = {**ends_here, "x-api-key": harness.slot.model_secret, "Authorization": "Bearer mine"}
            async with harness.post(CHAT, ask(CHAT), headers=headers) as response:
                assert response.status == 200
            [seen] = model.seen
            assert "mine" not in seen.headers.values()
            assert not [name for name in ends_here if name in seen.headers and name != "Connection"]
            assert "Authorization" not in seen.headers
            assert "x-api-key" not in seen.headers
            assert "X-Hop" not in seen.headers.get("Connection", "")
            assert seen.headers["Host"] in model.base_url
            assert harness.slot.model_secret not in str(seen)

    @pytest.mark.parametrize("route", ROUTES)
    async def test_feature_headers_go_through_and_the_upstreams_key_is_added(
        self, server: InterceptionServer, http: aiohttp.ClientSession, route: str
    ) -> None:
        features = {
            "openai-beta": "assistants=v2",
            "anthropic-beta": "context-1m,tools",
            "anthropic-version": "2023-06-01",
            "x-stainless-retry-count": "0",
            "X-Unknown-Feature": "on",
            "User-Agent": "harness/3",
        }
        async with ScriptedModel(answering()) as model:
            upstream = Upstream(base_url=model.base_url, api_key=SecretStr(KEY), headers={"X-Org": "ours"})
            async with rollout(server, http, upstream) as harness:
                async with harness.post(route, ask(route), headers=features) as response:
                    call_id = response.headers[CALL_ID_HEADER]
                [seen] = model.seen
                assert {name: seen.headers[name] for name in features} == features
                assert seen.headers["X-Org"] == "ours"
                assert seen.headers.getall(CALL_ID_HEADER) == [call_id]
                assert harness.turn.attempts[0].call_id == call_id
                if route == MESSAGES:
                    assert seen.headers["x-api-key"] == KEY
                    assert "Authorization" not in seen.headers
                else:
                    assert seen.headers["Authorization"] == f"Bearer {KEY}"
                    assert "x-api-key" not in seen.headers

    async def test_the_upstreams_headers_go_over_those_of_the_harness_however_they_are_written(
        self, server: InterceptionServer, http: aiohttp.ClientSession
    ) -> None:
        async with ScriptedModel(answering()) as model:
            upstream = Upstream(base_url=model.base_url, headers={"X-Title": "ours", "authorization": "Bearer ours"})
            async with rollout(server, http, upstream) as harness:
                sent = {"x-title": "the harness's", CALL_ID_HEADER.lower(): "the harness's"}
                async with harness.post(CHAT, ask(CHAT), headers=sent) as response:
                    call_id = response.headers[CALL_ID_HEADER]
                [seen] = model.seen
                assert seen.headers.getall("X-Title") == ["ours"]
                assert seen.headers.getall("Authorization") == ["Bearer ours"]
                assert seen.headers.getall(CALL_ID_HEADER) == [call_id]

    async def test_each_call_is_sent_as_it_came_whatever_the_one_before_it_was(
        self, server: InterceptionServer, http: aiohttp.ClientSession
    ) -> None:
        async with ScriptedModel(answering()) as model:
            upstream = Upstream(base_url=model.base_url, api_key=SecretStr(KEY), headers={"X-Org": "ours"})
            async with rollout(server, http, upstream) as harness:

                async def sent(route: str = CHAT, **headers: str) -> tuple[str, dict[str, str | None]]:
                    async with harness.post(route, ask(CHAT), headers=headers) as response:
                        assert response.status == 200
                    seen = model.seen[-1]
                    names = ("X-Turn", "X-Org", "Authorization", "X-Session-ID", "Content-Length")
                    return seen.path, {name: seen.headers.get(name) for name in names}

                _, usual = told = await sent()
                assert usual == {
                    "X-Turn": None,
                    "X-Org": "ours",
                    "Authorization": f"Bearer {KEY}",
                    "X-Session-ID": harness.session.id,
                    "Content-Length": str(len(model.seen[0].body)),
                }
                assert await sent() == told
                assert await sent(**{"X-Turn": "1"}) == (CHAT, usual | {"X-Turn": "1"})
                assert await sent(**{"X-Turn": "2"}) == (CHAT, usual | {"X-Turn": "2"})
                assert await sent() == told
                assert await sent(f"{CHAT}?a=1") == (f"{CHAT}?a=1", usual)
                assert await sent(MESSAGES) == (MESSAGES, usual | {"Authorization": None})
                upstream.headers["X-Org"] = "another"
                assert await sent() == (CHAT, usual | {"X-Org": "another"})
                harness.session.upstream = Upstream(base_url=f"{model.base_url}/more", headers=upstream.headers)
                path, headers = await sent()
                assert path == "/v1/more/chat/completions"
                assert headers == usual | {"X-Org": "another", "Authorization": None}
                ids = [seen.headers[CALL_ID_HEADER] for seen in model.seen]
                assert ids == [turn.attempts[0].call_id for turn in harness.session.trace.turns]
                assert len(set(ids)) == len(ids) == 9

    @pytest.mark.parametrize(
        ("version", "asked", "told"),
        [
            ("1.1", "", "keep-alive"),
            ("1.1", "close", "close"),
            ("1.0", "", "close"),
            ("1.0", "keep-alive", "keep-alive"),
        ],
    )
    async def test_an_answer_has_a_length_and_a_date_and_says_whether_its_connection_stays(
        self, server: InterceptionServer, harness: Harness, version: str, asked: str, told: str
    ) -> None:
        body = json.dumps(ask(CHAT)).encode()
        head = f"POST {CHAT} HTTP/{version}\r\nHost: h\r\nx-api-key: {harness.slot.model_secret}\r\n"
        asking = f"{head}Connection: {asked}\r\n" if asked else head
        reader, writer = await connect(server)
        async with asyncio.timeout(SOON):
            for _ in range(2 if told == "keep-alive" else 1):
                writer.write(f"{asking}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
                headers = dict(line.split(": ", 1) for line in lines)
                assert line == "HTTP/1.1 200 OK"
                assert headers["Connection"] == told
                assert abs(parsedate_to_datetime(headers["Date"]).timestamp() - time.time()) < 60
                answer = json.loads(await reader.readexactly(int(headers["Content-Length"])))
                assert answer["object"] == "chat.completion"
            if told == "close":
                assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()

    async def test_a_header_of_bytes_that_are_no_text_does_not_hang_the_call(
        self, server: InterceptionServer, harness: Harness
    ) -> None:
        body = json.dumps(ask(CHAT)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nx-api-key: {harness.slot.model_secret}\r\nContent-Length: {len(body)}\r\nX-T: "
        async with asyncio.timeout(SOON):
            status = await raw_status(server, head.encode() + b"caf\xe9\r\n", body)
        assert status in (200, 400)

    async def test_the_query_goes_through_as_it_came(
        self, server: InterceptionServer, http: aiohttp.ClientSession
    ) -> None:
        query = "?beta=true&q=a%26b%3Dc%2526%23d+e%20f&empty="
        async with ScriptedModel(answering()) as model, rollout(server, http, model.upstream) as harness:
            request = f"POST {MESSAGES}{query} HTTP/1.1\r\nx-api-key: {harness.slot.model_secret}\r\n"
            assert await raw_status(server, f"{request}Content-Length: 2\r\n".encode(), b"{}") == 200
            assert model.seen[0].path == MESSAGES + query

    async def test_the_answers_headers_go_through_but_for_the_hops_own(
        self, server: InterceptionServer, http: aiohttp.ClientSession
    ) -> None:
        headers = {"x-request-id": "r1", "Connection": "X-Hop", "X-Hop": "1", "openai-processing-ms": "3"}
        async with (
            ScriptedModel(answering(200, b"{}", headers)) as model,
            rollout(server, http, model.upstream) as harness,
            harness.post(CHAT, ask(CHAT)) as response,
        ):
            assert (response.headers["x-request-id"], response.headers["openai-processing-ms"]) == ("r1", "3")
            assert "X-Hop" not in response.headers

    async def test_a_compressed_answer_is_recorded_and_relayed_plain(
        self, server: InterceptionServer, http: aiohttp.ClientSession
    ) -> None:
        async def answer(request: web.Request) -> web.StreamResponse:
            response = web.json_response({"id": "x" * 5000})
            response.enable_compression(web.ContentCoding.gzip)
            return response

        async with ScriptedModel(answer) as model, rollout(server, http, model.upstream) as harness:
            async with harness.post(CHAT, ask(CHAT)) as response:
                assert await response.json() == {"id": "x" * 5000}
            assert harness.turn.response == {"id": "x" * 5000}

    @pytest.mark.parametrize(
        ("base", "route", "path"),
        [
            ("", CHAT, "/v1/chat/completions"),
            ("/v1", CHAT, "/v1/chat/completions"),
            ("/api/v3/", RESPONSES, "/api/v3/responses"),
            ("", MESSAGES, "/v1/messages"),
            ("/v1", MESSAGES, "/v1/messages"),
            ("/proxy", MESSAGES, "/proxy/v1/messages"),
        ],
    )
    async def test_an_upstreams_url_is_read_as_its_sdk_reads_it(
        self, server: InterceptionServer, http: aiohttp.ClientSession, base: str, route: str, path: str
    ) -> None:
        async with ScriptedModel(answering()) as model:
            upstream = Upstream(base_url=model.base_url.removesuffix("/v1") + base)
            async with rollout(server, http, upstream) as harness, harness.post(route, ask(route)):
                pass
            assert model.seen[0].path == path


class TestLoad:
    async def test_three_hundred_slow_calls_are_all_in_flight_at_once(
        self, server: InterceptionServer, http: aiohttp.ClientSession
    ) -> None:
        go = asyncio.Event()

        async def answer(request: web.Request) -> web.StreamResponse:
            await go.wait()
            return web.json_response({"id": "a"})

        async with ScriptedModel(answer) as model, rollout(server, http, model.upstream) as harness:

            async def call(route: str) -> int:
                async with harness.post(route, ask(route)) as response:
                    await response.read()
                    status: int = response.status
                    return status

            calls = [asyncio.create_task(call(ROUTES[number % 3])) for number in range(300)]
            await until(lambda: model.open == 300, timeout=45)
            go.set()
            assert await asyncio.gather(*calls) == [200] * 300
            assert len(harness.session.trace.turns) == 300
            assert all(turn.delivered for turn in harness.session.trace.turns)
            assert not any(call.open for call in harness.session.ledger)


class TestSecrets:
    async def test_none_reaches_a_log_a_repr_a_trace_or_an_error(
        self, http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        texts: list[str] = []
        async with (
            InterceptionServer() as server,
            ScriptedModel(breaking_off(True)) as model,
            ScriptedModel(hang) as hung,
        ):
            upstream = Upstream(base_url=model.base_url, api_key=SecretStr(KEY), headers={"X-Token": f"{KEY}-2"})
            async with rollout(server, http, upstream) as harness:
                for route in ROUTES:
                    for streamed in (False, True):
                        async with harness.post(route, ask(route, stream=streamed)) as response:
                            try:
                                texts.append(await response.text())
                            except aiohttp.ClientPayloadError as error:
                                texts.append(repr(error))
                    async with harness.post(route, data=b"{") as response:
                        texts.append(await response.text())
                    async with harness.post(route, headers={"x-api-key": "wrong"}) as response:
                        texts.append(await response.text())
                async with get_models(harness) as response:
                    texts.append(await response.text())
                texts += [repr(server), repr(harness.slot), repr(harness.session), repr(harness.session.trace)]
                texts += [repr(turn) for turn in harness.session.trace.turns]
                with pytest.raises(ValueError, match="used already") as used:
                    server.register(harness.session)
                texts.append(str(used.value))
            secrets = [*harness.slot[1:], KEY]
            async with rollout(server, http, Upstream(base_url=hung.base_url, api_key=SecretStr(KEY))) as other:
                call = asyncio.create_task(other.post(CHAT, ask(CHAT)).__aenter__())
                await until(lambda: hung.open == 1)
                server.unregister(*other.slot[1:])
                texts.append(await (await call).text())
            secrets += other.slot[1:]
        texts += [record.getMessage() + repr(record.args) + repr(record.exc_info) for record in caplog.records]
        assert len(texts) > 20
        assert not [text for text in texts for secret in secrets if secret in text]

    async def test_every_rollout_has_secrets_of_its_own(self, server: InterceptionServer) -> None:
        pairs = [server.register(new_session()) for _ in range(50)]
        secrets = {secret for pair in pairs for secret in pair}
        assert len(secrets) == 100
        assert min(map(len, secrets)) >= 32


class TestLife:
    async def test_start_and_stop_are_idempotent_and_can_be_repeated(self, http: aiohttp.ClientSession) -> None:
        server = InterceptionServer()
        await server.stop()
        await asyncio.gather(server.start(), server.start())
        url = server.base_url
        await server.start()
        assert server.base_url == url
        assert url.startswith("http://127.0.0.1:")
        await asyncio.gather(server.stop(), server.stop())
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(url + HEALTH_PATH)
        await server.start()
        async with EchoModel() as echo, rollout(server, http, Upstream(base_url=echo.base_url)) as harness:
            done = await harness.oai.responses.create(model="m", input="again")
            assert done.output_text == "again"
        await server.stop()
        await until(lambda: not listening())

    async def test_it_may_be_stopped_in_another_task_than_it_was_started_in(self, tunnels: FakeTunnels) -> None:
        server = InterceptionServer(requires_tunnel=True)
        await asyncio.create_task(server.start())
        assert tunnels.connected == 1
        await asyncio.create_task(server.stop())
        assert tunnels.connected == 0
        assert tunnels.made[0].disconnects == 1
        await until(lambda: not other_tasks())

    async def test_before_start_it_has_no_url_and_says_what_to_do(self) -> None:
        with pytest.raises(RuntimeError, match="start it first"):
            _ = InterceptionServer().base_url

    async def test_it_is_healthy_from_construction_and_serves_without_a_tunnel(self) -> None:
        server = InterceptionServer()
        assert (server.healthy, server.serving, server.load, server.sessions) == (True, True, 0, [])

    async def test_with_a_tunnel_its_url_is_the_tunnels(
        self, tunnels: FakeTunnels, http: aiohttp.ClientSession
    ) -> None:
        server = InterceptionServer(requires_tunnel=True)
        assert server.healthy
        assert not server.serving
        async with server:
            assert server.serving
            assert server.base_url == tunnels.made[0].url
            async with http.get(server.base_url + HEALTH_PATH) as response:
                assert response.headers[IDENTITY_HEADER] == server.identity

    async def test_every_request_is_handed_over_to_the_tunnel_as_an_arrival(
        self, tunnels: FakeTunnels, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        arrivals: list[str | None] = []
        monkeypatch.setattr(
            FakeTunnel, "note_arrival", lambda tunnel, headers, path: arrivals.append(headers.get("x-probe"))
        )
        async with InterceptionServer(requires_tunnel=True) as server:
            for path in (HEALTH_PATH, "/v1/models", "/nowhere"):
                async with http.get(server.base_url + path, headers={"X-Probe": path}):
                    pass
        assert arrivals == [HEALTH_PATH, "/v1/models", "/nowhere"]

    async def test_a_change_of_its_tunnel_is_said(self, tunnels: FakeTunnels) -> None:
        said: list[tuple[bool, bool]] = []
        async with InterceptionServer(requires_tunnel=True) as server:
            server.on_change = lambda: said.append((server.healthy, server.serving))
            tunnels.made[0].set_state("suspect")
            tunnels.made[0].set_state("serving")
            await tunnels.made[0].set_gone()
        assert said[:2] == [(True, False), (True, True)]
        assert said[-1] == (False, False)
        assert not server.healthy

    async def test_gone_ends_the_calls_in_flight_and_revokes_the_secrets(
        self, tunnels: FakeTunnels, http: aiohttp.ClientSession
    ) -> None:
        async with InterceptionServer(requires_tunnel=True) as server, ScriptedModel(hang) as model:
            session = new_session(model.upstream)
            with pytest.raises(TunnelError, match="refused as gone"):  # noqa: PT012 - it is the leaving that raises
                async with server.acquire(session) as slot:
                    headers = {"x-api-key": slot.model_secret}
                    call = asyncio.create_task(
                        http.post(slot.base_url + CHAT, json=ask(CHAT), headers=headers).__aenter__()
                    )
                    await until(lambda: model.open == 1)
                    gone = await tunnels.made[0].set_gone("refused as gone")
                    await until(lambda: model.open == 0, timeout=SOON)
                    assert (await call).status == 409
                    [turn] = session.trace.turns
                    assert turn.error is not None
                    assert turn.error.startswith("cancelled")
                    assert session.trace.sealed
                    assert session.error is not None
                    assert session.error.__cause__ is gone
                    async with http.post(slot.base_url + CHAT, json=ask(CHAT), headers=headers) as response:
                        assert response.status == 401
                    assert server.load == 1
            assert server.load == 0
            with pytest.raises(TunnelError, match="refused as gone"):
                server.register(new_session())

    async def test_stop_fails_the_rollouts_it_still_has(
        self, http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
    ) -> None:
        server = InterceptionServer()
        await server.start()
        async with ScriptedModel(hang) as model:
            session = new_session(model.upstream)
            with pytest.raises(TunnelError, match="stopped"):  # noqa: PT012 - it is the leaving that raises
                async with server.acquire(session) as slot:
                    headers = {"x-api-key": slot.model_secret}
                    call = asyncio.create_task(
                        http.post(slot.base_url + CHAT, json=ask(CHAT), headers=headers).__aenter__()
                    )
                    await until(lambda: model.open == 1)
                    async with asyncio.timeout(SOON):
                        await server.stop()
                    assert session.failed.is_set()
                    assert session.trace.sealed
            await until(lambda: model.open == 0, timeout=SOON)
            await asyncio.wait([call])
            assert call.exception() is not None or call.result().status == 409
        assert server.load == 0
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]

    async def test_a_port_in_use_is_a_tunnel_error_that_says_so_and_leaves_nothing(self, tunnels: FakeTunnels) -> None:
        tunnel = FakeTunnel()
        tunnels.script = [tunnel]
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            tunnel.bind_port = taken.getsockname()[1]
            server = InterceptionServer(requires_tunnel=True)
            with pytest.raises(TunnelError, match=r"cannot listen.*in use") as refused:
                await server.start()
            assert str(tunnel.bind_port) in str(refused.value)
            assert not tunnel.connected
        await until(lambda: not other_tasks())
        tunnel.bind_port = 0
        async with server:
            assert tunnel.connected

    async def test_a_tunnel_that_fails_leaves_no_listener(self, tunnels: FakeTunnels) -> None:
        tunnels.script = [FakeTunnel(error=TunnelError("the edge said no"))]
        with pytest.raises(TunnelError, match="the edge said no"):
            await InterceptionServer(requires_tunnel=True).start()
        assert not listening()
        await until(lambda: not other_tasks())

    async def test_start_cancelled_twice_while_the_tunnel_comes_up_leaves_nothing(self, tunnels: FakeTunnels) -> None:
        tunnels.script = [FakeTunnel(held=True)]
        server = InterceptionServer(requires_tunnel=True)
        starting = asyncio.create_task(server.start())
        await until(lambda: tunnels.made[0].connecting)
        starting.cancel()
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not tunnels.made[0].connecting
        assert tunnels.connected == 0
        assert not listening()
        await until(lambda: not other_tasks())

    @pytest.mark.parametrize("rounds", range(10))
    async def test_start_cancelled_twice_at_any_moment_leaves_nothing(self, tunnels: FakeTunnels, rounds: int) -> None:
        server = InterceptionServer(requires_tunnel=True)
        starting = asyncio.create_task(server.start())
        for _ in range(rounds):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        if not starting.cancelled():
            await server.stop()  # it was quicker
        assert tunnels.connected == 0
        assert not listening()
        await until(lambda: not other_tasks())

    async def test_stop_cancelled_twice_stops_all_the_same(self, tunnels: FakeTunnels) -> None:
        server = InterceptionServer(requires_tunnel=True)
        await server.start()
        stopping = asyncio.create_task(server.stop())
        for _ in range(2):
            await asyncio.sleep(0)
            stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert tunnels.connected == 0
        assert not listening()
        await until(lambda: not other_tasks())


# -- parts -----------------------------------------------------------------------------------------


def listening() -> list[asyncio.Server]:
    """What still accepts connections in this test."""
    found = [thing for thing in gc.get_objects() if type(thing) is asyncio.Server]
    return [server for server in found if server.get_loop() is asyncio.get_running_loop() and server.is_serving()]


async def noticed(server: InterceptionServer, http: aiohttp.ClientSession) -> None:
    """Returns once the server has seen what happened to its other connections before this."""
    await settle()
    async with http.get(server.base_url + HEALTH_PATH, headers={"Connection": "close"}) as response:
        await response.read()
    await settle()


def delta(content: str | None, finish_reason: str | None = None) -> bytes:
    """A chunk of a streamed chat completion."""
    change = {} if content is None else {"content": content}
    choice = {"index": 0, "delta": change, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"object": "chat.completion.chunk", "choices": [choice]}).encode() + b"\n\n"


def breaking_off(chunked: bool) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        if not chunked:
            response.content_length = 100
        await response.prepare(request)
        await response.write(b'{"id": ')
        assert request.transport is not None
        request.transport.close()
        return response

    return answer


@asynccontextmanager
async def raw_upstream(answer: bytes) -> AsyncIterator[Upstream]:
    """An endpoint that reads something, sends these bytes whatever it was, and closes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with listener:
        yield Upstream(base_url=f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1")


def get_models(harness: Harness) -> Any:
    headers = {"Authorization": f"Bearer {harness.slot.model_secret}"}
    return harness.http.get(harness.slot.base_url + "/v1/models", headers=headers)


async def connect(server: InterceptionServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(server.base_url.rpartition(":")[2]))


async def raw_status(server: InterceptionServer, head: bytes, body: bytes = b"") -> int:
    """The status that a request gets which no client library would send. `head` is without its last empty line."""
    reader, writer = await connect(server)
    try:
        writer.write(head + b"Host: h\r\nConnection: close\r\n\r\n" + body)
        line = await reader.readline()
        return int(line.split()[1])
    finally:
        writer.close()
        await writer.wait_closed()
