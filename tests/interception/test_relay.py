"""What crosses the server and what ends at it: headers, secrets, fields of a body, and the routes beside the turns."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from multidict import CIMultiDict
from pydantic import SecretStr
from yarl import URL

from interception import InterceptionServer, InterceptionServerConfig, ServingPolicy, Upstream
from interception.sse import Json
from interception.upstream import proxy_for
from tests.helpers import until
from tests.interception.fakes import ScriptedModel, answering, hang, hangs_are_failures, new_session
from tests.interception.scripted import PATIENT, WIRE, WIRES, Rollout, Wire, answers, rollout, streams

__all__ = ["hangs_are_failures"]
pytestmark = pytest.mark.usefixtures("hangs_are_failures")

KEY = "sk-of-the-upstream"
CHAT, RESPONSES, MESSAGES = WIRES
by_wire = pytest.mark.parametrize("wire", WIRES, ids=str)
streamed_or_not = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


async def post(
    running: Rollout, wire: Wire, body: bytes | Json, headers: Any = None, *, query: str = "", secret: str | None = None
) -> tuple[int, CIMultiDict[str], bytes]:
    """A call whose body and headers are just these."""
    sent = CIMultiDict({"x-api-key": secret or running.slot.model_secret})
    sent.extend(headers or {})
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with running.http.post(running.slot.base_url + wire.path + query, data=data, headers=sent) as response:
        return response.status, CIMultiDict(response.headers), await response.read()


async def get(running: Rollout, path: str, *, method: str = "GET", **headers: str) -> tuple[int, Any]:
    headers = {"x-api-key": running.slot.model_secret, **{k.replace("_", "-"): v for k, v in headers.items()}}
    url = URL(running.slot.base_url + path, encoded=True)
    async with running.http.request(method, url, headers=headers) as response:
        return response.status, json.loads(await response.read() or b"null")


def says(wire: Wire, *, stream: bool = False, headers: Any = None) -> Any:
    return streams(*wire.events(), headers=headers) if stream else answers(wire.answer(), headers=headers)


class TestRequestHeaders:
    @by_wire
    async def test_feature_headers_are_forwarded_and_so_are_those_that_nobody_knows(self, wire: Wire) -> None:
        features = {
            "openai-beta": "assistants=v2",
            "anthropic-beta": "context-1m-2025-08-07,tools",
            "anthropic-version": "2023-06-01",
            "OpenAI-Organization": "org-1",
            "x-stainless-lang": "python",
            "X-Unknown-Feature": "on",
            "User-Agent": "harness/3",
            "Accept": "application/json",
            "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        }
        async with rollout() as running:
            running.upstream.then(says(wire))
            await post(running, wire, wire.request(), features)
            assert {name: running.upstream.replies[0].headers[name] for name in features} == features

    async def test_one_that_is_repeated_loses_nothing(self) -> None:
        async with rollout() as running:
            running.upstream.then(says(MESSAGES))
            twice = [("anthropic-beta", "context-1m"), ("anthropic-beta", "tools")]
            await post(running, MESSAGES, MESSAGES.request(), CIMultiDict(twice))
            assert running.upstream.replies[0].headers["anthropic-beta"] == "context-1m, tools"

    @by_wire
    async def test_hop_by_hop_headers_digests_keys_and_auth_end_here(self, wire: Wire) -> None:
        ends_here = {
            "Connection": "keep-alive, X-Hop",
            "X-Hop": "mine",
            "Keep-Alive": "timeout=5",
            "Proxy-Authorization": "Basic mine",
            "Proxy-Connection": "keep-alive",
            "TE": "trailers",
            "Trailer": "X-Mine",
            "Content-MD5": "mine",
            "Content-Digest": "sha-256=:mine:",
            "Repr-Digest": "sha-256=:mine:",
            "Digest": "mine",
            "Authorization": "Bearer mine",
            "api-key": "mine",
            "Idempotency-Key": "mine",
            "X-Forwarded-For": "10.0.0.1",
            "X-Forwarded-Host": "public.example",
        }
        async with rollout() as running:
            running.upstream.then(says(wire))
            assert (await post(running, wire, wire.request(), ends_here))[0] == 200
            seen = running.upstream.replies[0].headers
            assert not [name for name in ends_here if name in seen and name != "Connection"]
            assert "X-Hop" not in seen.get("Connection", "")
            assert seen["Host"] in running.upstream.base_url
            assert not [value for value in seen.values() if "mine" in value or running.slot.model_secret in value]

    async def test_each_connection_header_is_read(self) -> None:
        async with rollout() as running:
            running.upstream.then(says(WIRE))
            hops = [("Connection", "X-One"), ("Connection", "X-Two"), ("X-One", "1"), ("X-Two", "2")]
            await post(running, WIRE, WIRE.request(), CIMultiDict(hops))
            assert not {"X-One", "X-Two"} & set(running.upstream.replies[0].headers)

    @by_wire
    async def test_the_sessions_id_is_added(self, wire: Wire) -> None:
        async with rollout(id="rollout-17") as running:
            running.upstream.then(says(wire))
            await post(running, wire, wire.request(), {"x-session-id": "the harness's"})
            assert running.upstream.replies[0].request.headers.getall("X-Session-ID") == ["rollout-17"]

    @by_wire
    async def test_the_upstreams_headers_go_over_the_harnesss_and_its_key_is_last(self, wire: Wire) -> None:
        async with ScriptedModel(answering()) as model:
            upstream = Upstream(
                base_url=model.base_url,
                api_key=SecretStr(KEY),
                headers={"X-Title": "ours", "authorization": "Bearer old", "X-API-KEY": "old"},
            )
            async with InterceptionServer() as server, aiohttp.ClientSession() as http:
                session = new_session(upstream)
                async with server.acquire(session) as slot:
                    headers = {"x-api-key": slot.model_secret, "x-title": "the harness's", "x-other": "kept"}
                    url = slot.base_url + wire.path
                    async with http.post(url, json=wire.request(), headers=headers) as response:
                        assert response.status == 200
                    assert session.sending is not None
                    assert repr(session.sending) == "<Sending>"  # it has the keys of both sides
                seen = model.seen[0].headers
                assert seen.getall("X-Title") == ["ours"]
                assert seen["X-Other"] == "kept"
                real = "x-api-key" if wire is MESSAGES else "Authorization"
                assert seen.getall(real) == [KEY if wire is MESSAGES else f"Bearer {KEY}"]

    async def test_a_netrc_of_the_user_is_no_concern_of_ours(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "netrc").write_text("default login someone password secret\n")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        monkeypatch.setattr("interception.upstream.on_this_host", lambda url: False)
        async with ScriptedModel(answering()) as model, InterceptionServer() as server, aiohttp.ClientSession() as http:
            session = new_session(Upstream(base_url=model.base_url, api_key=SecretStr(KEY)))
            async with server.acquire(session) as slot:
                headers = {"x-api-key": slot.model_secret}
                async with http.post(slot.base_url + CHAT.path, json=CHAT.request(), headers=headers) as response:
                    assert response.status == 200
            assert model.seen[0].headers["Authorization"] == f"Bearer {KEY}"


RELAYED = {
    "x-request-id": "r1",
    "request-id": "r2",
    "openai-processing-ms": "3",
    "x-ratelimit-remaining-requests": "59",
    "anthropic-ratelimit-tokens-reset": "2026-01-01T00:00:00Z",
    "X-Unknown": "kept",
}


@pytest.mark.parametrize(
    ("url", "environment", "proxy"),
    [
        ("https://api.example/v1", {"https_proxy": "http://proxy:3128"}, "http://proxy:3128"),
        ("http://gpu.example:8000/v1", {"https_proxy": "http://proxy:3128"}, None),
        ("https://api.example/v1", {"https_proxy": "http://proxy:3128", "no_proxy": ".example"}, None),
        ("http://127.0.0.1:8000/v1", {"http_proxy": "http://proxy:3128"}, None),
        ("http://localhost:8000/v1", {"http_proxy": "http://proxy:3128"}, None),
        ("https://api.example/v1", {}, None),
    ],
)
def test_the_environments_proxy_is_asked_for_models_elsewhere(
    url: str, environment: dict[str, str], proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert proxy_for(url) == proxy


class TestAnswerHeaders:
    @by_wire
    @streamed_or_not
    async def test_they_go_through_but_for_the_hops_own(self, wire: Wire, stream: bool) -> None:
        hop = {"Connection": "X-Hop", "X-Hop": "1", "Keep-Alive": "timeout=9"}
        async with rollout() as running:
            running.upstream.then(says(wire, stream=stream, headers={**RELAYED, **hop}))
            status, headers, _ = await post(running, wire, wire.request(stream=stream))
            assert status == 200
            assert {name: headers[name] for name in RELAYED} == RELAYED
            assert "X-Hop" not in headers
            assert "timeout=9" not in headers.get("Keep-Alive", "")
            assert headers.getall("Content-Type") == ["text/event-stream" if stream else "application/json"]

    @by_wire
    async def test_also_on_an_error(self, wire: Wire) -> None:
        error = {"error": {"type": "rate_limit_error", "message": "slowly"}}
        async with rollout() as running:
            running.upstream.then(answers(error, status=429, headers={**RELAYED, "Retry-After": "7"}))
            status, headers, body = await post(running, wire, wire.request())
            assert (status, json.loads(body), headers["Retry-After"]) == (429, error, "7")
            assert {name: headers.get(name) for name in RELAYED} == RELAYED


class TestSecrets:
    @by_wire
    @pytest.mark.parametrize(
        ("headers", "status"),
        [
            ({"Authorization": "Bearer SECRET"}, 200),
            ({"authorization": "bearer SECRET"}, 200),
            ({"x-api-key": "SECRET"}, 200),
            ({"x-api-key": "SECRET", "Authorization": "Bearer other"}, 200),
            ({"x-api-key": "", "Authorization": "Bearer SECRET"}, 200),
            ({"x-api-key": "other", "Authorization": "Bearer SECRET"}, 401),
            ({}, 401),
            ({"x-api-key": ""}, 401),
            ({"Authorization": ""}, 401),
            ({"Authorization": "Bearer"}, 401),
            ({"Authorization": "Bearer "}, 401),
            ({"Authorization": "Basic SECRET"}, 401),
            ({"Authorization": "SECRET"}, 401),
            ({"x-api-key": "unknown"}, 401),
            ({"x-api-key": "STATE"}, 401),
            ({"Authorization": "Bearer STATE"}, 401),
            ({"x-api-key": "RELEASED"}, 401),
        ],
    )
    async def test_anthropics_key_wins_and_empty_is_none(
        self, wire: Wire, headers: dict[str, str], status: int
    ) -> None:
        async with rollout() as running:
            running.upstream.always = says(wire)
            ended = running.server.register(new_session())
            running.server.unregister(*ended)
            named = {"SECRET": running.slot.model_secret, "STATE": running.slot.state_secret, "RELEASED": ended[0]}
            for word, secret in named.items():
                headers = {name: value.replace(word, secret) for name, value in headers.items()}
            url = running.slot.base_url + wire.path
            async with running.http.post(url, json=wire.request(), headers=headers) as response:
                assert response.status == status
                if status == 401:
                    assert wire.in_error_shape(await response.json())

    async def test_unknown_and_released_are_told_the_same(self) -> None:
        async with rollout() as running:
            ended = running.server.register(new_session())
            running.server.unregister(*ended)
            for wire in WIRES:
                _, _, unknown = await post(running, wire, wire.request(), secret="unknown")
                _, _, released = await post(running, wire, wire.request(), secret=ended[0])
                assert unknown == released

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("GET", "/v1/models"),
            ("POST", "/v1/messages/count_tokens"),
            ("POST", "/v1/embeddings"),
            ("GET", "/"),
            ("DELETE", "/v1/responses/resp_1"),
        ],
    )
    async def test_every_route_asks_for_it(self, method: str, path: str) -> None:
        async with rollout() as running:
            status, answer = await get(running, path, method=method, x_api_key="wrong")
            assert status == 401
            assert answer["error"]["message"]


class TestBesideTheTurns:
    async def test_head_of_the_root_is_answered(self) -> None:
        """Claude Code asks for it before anything else."""
        async with rollout() as running, running.http.head(running.slot.base_url + "/") as response:
            assert response.status == 200

    async def test_the_model_list_is_the_upstreams_and_no_turn(self) -> None:
        listed = {"object": "list", "data": [{"id": "m", "object": "model", "unknown": [1]}]}
        async with rollout() as running:
            running.upstream.then(answers(listed))
            assert await get(running, "/v1/models?limit=9&after=a%2Fb") == (200, listed)
            [reply] = running.upstream.replies
            assert (reply.request.method, reply.request.raw_path) == ("GET", "/v1/models?limit=9&after=a%2Fb")
            assert running.trace.turns == []
            assert running.session.calls_seen == 0

    @pytest.mark.parametrize("which", ["models", "count_tokens"])
    @pytest.mark.parametrize("fault", ["hung", "refused"])
    async def test_a_hung_or_lost_upstream_is_502_and_fails_no_rollout(self, which: str, fault: str) -> None:
        policy = PATIENT.model_copy(update={"models_timeout": 0.2})
        async with ScriptedModel(hang) as model:
            base_url = model.base_url if fault == "hung" else "http://127.0.0.1:9/v1"
            async with rollout(policy=policy, base_url=base_url) as running:
                if which == "models":
                    status, answer = await get(running, "/v1/models")
                    assert CHAT.in_error_shape(answer)
                    status, answer = await get(running, "/v1/models", anthropic_version="2023-06-01")
                    assert MESSAGES.in_error_shape(answer)
                else:
                    status, answer = await count(running, MESSAGES.request())
                    assert MESSAGES.in_error_shape(answer)
                assert status == 502
                assert running.session.error is None
                assert running.trace.turns == []
                await until(lambda: model.open == 0)

    def test_a_hung_one_is_told_within_35_seconds(self) -> None:
        assert ServingPolicy().models_timeout <= 35

    async def test_tokens_are_counted_by_the_upstream_and_that_is_no_turn(self) -> None:
        async with rollout() as running:
            running.upstream.then(answers({"input_tokens": 12}))
            asked = MESSAGES.request(unknown={"kept": 1})
            assert await count(running, asked, query="?beta=true") == (200, {"input_tokens": 12})
            [reply] = running.upstream.replies
            assert reply.request.raw_path == "/v1/messages/count_tokens?beta=true"
            assert reply.json == asked
            assert running.trace.turns == []

    async def test_they_are_counted_for_the_sessions_model(self) -> None:
        async with rollout(model="policy-7") as running:
            running.upstream.then(answers({"input_tokens": 12}))
            asked = MESSAGES.request()
            await count(running, asked)
            assert running.upstream.replies[0].json == {**asked, "model": "policy-7"}

    async def test_without_a_model_of_the_sessions_the_body_is_sent_as_it_came(self) -> None:
        raw = b'{ "messages": [],\n "x": 1.0, "y": NaN }'
        async with rollout() as running:
            running.upstream.then(answers({"input_tokens": 12}))
            assert (await count(running, raw))[0] == 200
            assert running.upstream.replies[0].body == raw

    async def test_an_upstreams_refusal_is_relayed(self) -> None:
        error = {"type": "error", "error": {"type": "not_found_error", "message": "no such route"}}
        async with rollout() as running:
            running.upstream.then(answers(error, status=404))
            assert await count(running, MESSAGES.request()) == (404, error)

    @by_wire
    async def test_the_query_is_kept_as_it_came(self, wire: Wire) -> None:
        async with rollout() as running:
            running.upstream.then(says(wire))
            await post(running, wire, wire.request(), query="?beta=true&q=a%26b&empty=")
            assert running.upstream.replies[0].request.raw_path == wire.path + "?beta=true&q=a%26b&empty="


async def count(running: Rollout, body: Json | bytes, *, query: str = "") -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = running.slot.base_url + "/v1/messages/count_tokens" + query
    async with running.http.post(url, data=data, headers={"x-api-key": running.slot.model_secret}) as response:
        return response.status, await response.json()


class TestRoutesNotServed:
    @pytest.mark.parametrize(
        ("method", "path", "wire"),
        [
            ("POST", "/v1/embeddings", CHAT),
            ("POST", "/v1/completions", CHAT),
            ("POST", "/v1/responses/compact", CHAT),
            ("GET", "/v1/chat/completions", CHAT),
            ("GET", "/v1/responses", CHAT),
            ("DELETE", "/v1/responses/resp_1", CHAT),
            ("POST", "/v1/messages/batches", MESSAGES),
            ("GET", "/nowhere", CHAT),
        ],
    )
    async def test_404_names_the_route_warns_once_and_is_a_finding(
        self, method: str, path: str, wire: Wire, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with rollout() as running:
            for _ in range(3):
                status, answer = await get(running, path + "?secret=1", method=method)
                assert status == 404
                assert wire.in_error_shape(answer)
                assert f"{method} {path}" in answer["error"]["message"]
            other, _ = running.another_session()
            warnings = [record.getMessage() for record in caplog.records if path in record.getMessage()]
            assert len(warnings) == 1
            assert running.session.id in warnings[0]
            assert "secret=1" not in warnings[0]
            assert [found for found in running.session.findings if f"{method} {path}" in found and "3 times" in found]
            assert not [found for found in other.findings if path in found]
            assert running.trace.turns == []

    async def test_in_anthropics_shape_for_anthropics_clients(self) -> None:
        async with rollout() as running:
            _, answer = await get(running, "/v1/files", anthropic_version="2023-06-01")
            assert MESSAGES.in_error_shape(answer)

    async def test_the_sdks_raise_their_own_not_found(self) -> None:
        async with rollout() as running:
            env = running.slot.env()
            async with openai.AsyncOpenAI(base_url=env["OPENAI_BASE_URL"], api_key=env["OPENAI_API_KEY"]) as client:
                with pytest.raises(openai.NotFoundError, match="/v1/embeddings"):
                    await client.embeddings.create(model="m", input="hi")
            async with anthropic.AsyncAnthropic(
                base_url=env["ANTHROPIC_BASE_URL"], api_key=env["ANTHROPIC_API_KEY"]
            ) as client:
                with pytest.raises(anthropic.NotFoundError, match="/v1/messages/batches"):
                    await client.messages.batches.retrieve("b1")

    async def test_a_path_cannot_forge_a_line_of_the_log(self, caplog: pytest.LogCaptureFixture) -> None:
        async with rollout() as running:
            assert (await get(running, "/v1/x%0AWARNING%20all%20is%20lost"))[0] == 404
            assert not [record for record in caplog.records if "\n" in record.getMessage()]

    async def test_many_different_ones_are_told_apart_up_to_a_bound(self) -> None:
        async with rollout() as running:
            for number in range(150):
                assert (await get(running, f"/v1/{number}"))[0] == 404
            assert len(running.session.unknown_paths) == 100

    async def test_a_websocket_is_refused_at_once_so_that_the_client_falls_back(self) -> None:
        async with rollout() as running:
            headers = {"x-api-key": running.slot.model_secret}
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await running.http.ws_connect(running.slot.base_url + "/v1/responses", headers=headers)
            assert refused.value.status == 426
            assert running.session.findings == ["0 calls seen: the harness never called its model here"]
            running.upstream.then(says(RESPONSES))
            assert (await post(running, RESPONSES, RESPONSES.request()))[0] == 200


TOLD: dict[Wire, Json] = {
    CHAT: {
        "error": {
            "message": "This model's maximum context length is 8192 tokens.",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
    },
    RESPONSES: {
        "error": {
            "message": "Your input exceeds the context window of this model.",
            "type": "invalid_request_error",
            "param": "input",
            "code": "context_length_exceeded",
        }
    },
    MESSAGES: {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "prompt is too long: 200082 tokens > 200000 maximum"},
    },
}


class TestPromptTooLong:
    @by_wire
    @streamed_or_not
    async def test_it_is_relayed_and_the_session_says_truncated_not_broken(self, wire: Wire, stream: bool) -> None:
        async with rollout() as running:
            running.upstream.then(answers(TOLD[wire], status=400), says(wire, stream=stream))
            status, _, body = await post(running, wire, wire.request("long", stream=stream))
            assert (status, json.loads(body)) == (400, TOLD[wire])
            assert running.session.stop_condition == "prompt_too_long"
            assert running.session.error is None
            # A harness that compacts goes on, and then was not stopped by anything.
            status, _, _ = await post(running, wire, wire.request("short", stream=stream))
            assert status == 200
            assert running.session.stop_condition is None

    async def test_another_400_is_none(self) -> None:
        async with rollout() as running:
            running.upstream.then(answers({"error": {"message": "bad tool", "type": "x"}}, status=400))
            await post(running, WIRE, WIRE.request("the maximum context length is what I ask about"))
            assert running.session.stop_condition is None


ODD = b"""{ "model": "m",
 "messages": [ {"role": "user", "content": "hi \\ud83d\\ude00 \\ud800", "x_unknown": [1, null]} ],
 "seed": 123456789012345678901234567890, "bias": {"1": -100, "2": 1e2}, "nan": NaN, "inf": [Infinity, -Infinity],
 "float": 1.0, "small": 1e-300, "deep": %s, "": {"\\u0000": 1}, "none": null }""" % (b"[" * 300 + b"7" + b"]" * 300)


def texts(value: Any) -> str:
    """For comparing by value what has NaN in it, or 2**64 (which equals a float)."""
    return json.dumps(value, sort_keys=True)


class TestByValue:
    @pytest.mark.parametrize("stream", [b"", b',"stream":true,"stream_options":{"include_usage":true}'])
    async def test_a_body_that_nothing_changes_is_sent_byte_for_byte(self, stream: bytes) -> None:
        raw = ODD.rstrip(b" }") + b" " + stream + b" }"
        async with rollout() as running:
            running.upstream.then(says(CHAT, stream=bool(stream)))
            status, _, _ = await post(running, CHAT, raw)
            assert status == 200
            assert running.upstream.replies[0].body == raw
            assert texts(running.trace.turns[0].request) == texts(json.loads(raw))

    @by_wire
    async def test_overrides_change_what_they_name_and_nothing_else(self, wire: Wire) -> None:
        sampling = {"temperature": 0.25, "top_p": None, "logit_bias": {"5": 2**70}}
        body = {**json.loads(ODD), **wire.request(temperature=1.5)}
        async with rollout(model="policy-7", sampling=sampling) as running:
            running.upstream.then(says(wire))
            assert (await post(running, wire, body))[0] == 200
            expected = {**body, "model": "policy-7", **sampling}
            assert texts(running.upstream.replies[0].json) == texts(expected)
            assert texts(running.trace.turns[0].request) == texts(expected)

    async def test_a_request_hook_sees_all_and_changes_what_it_changes(self) -> None:
        def hook(session: object, request: Json) -> None:
            request["added"] = float("nan")

        async with rollout(on_request=[hook]) as running:
            running.upstream.then(says(CHAT))
            assert (await post(running, CHAT, ODD))[0] == 200
            assert texts(running.upstream.replies[0].json) == texts({**json.loads(ODD), "added": float("nan")})

    async def test_a_retry_after_a_failure_sends_the_same_again(self) -> None:
        for session in ({}, {"model": "policy-7", "sampling": {"temperature": 0.5}}):
            async with rollout(**session) as running:  # type: ignore[arg-type]
                running.upstream.then(answers({"error": {"message": "busy"}}, status=500), says(CHAT))
                assert (await post(running, CHAT, ODD))[0] == 500
                assert (await post(running, CHAT, ODD, {"x-stainless-retry-count": "1"}))[0] == 200
                first, second = running.upstream.replies
                assert texts(first.json) == texts(second.json)
                assert len(running.trace.turns) == 1

    async def test_usage_is_asked_for_in_streamed_chat_only(self) -> None:
        for wire in WIRES:
            for stream in (False, True):
                async with rollout() as running:
                    running.upstream.then(says(wire, stream=stream))
                    raw = json.dumps(wire.request(stream=stream), indent=2).encode()
                    await post(running, wire, raw)
                    [reply] = running.upstream.replies
                    if wire is CHAT and stream:
                        assert reply.json == {**json.loads(raw), "stream_options": {"include_usage": True}}
                    else:
                        assert reply.body == raw

    async def test_other_stream_options_are_kept(self) -> None:
        options = {"include_obfuscation": False, "unknown": [1]}
        async with rollout() as running:
            running.upstream.then(says(CHAT, stream=True))
            body = CHAT.request(stream=True, stream_options=options)
            await post(running, CHAT, body)
            assert running.upstream.replies[0].json["stream_options"] == {**options, "include_usage": True}
            assert running.trace.turns[0].request == body

    @by_wire
    async def test_an_answer_is_relayed_byte_for_byte_and_recorded_by_value(self, wire: Wire) -> None:
        odd = ODD.replace(b'"model": "m", ', b"").replace(b"messages", b"x_messages").strip(b"{} \n")
        raw = json.dumps(wire.answer())[:-1].encode() + b",\n " + odd + b"}"
        async with rollout() as running:
            running.upstream.then(answers(raw))
            _, _, body = await post(running, wire, wire.request())
            assert body == raw
            assert texts(running.trace.turns[0].response) == texts(json.loads(raw))

    async def test_what_cannot_be_recorded_is_refused_and_the_connection_goes_on(self) -> None:
        deep = b'{"messages":[],"deep":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        async with rollout() as running:
            status, _, body = await post(running, CHAT, deep)
            assert status == 400
            assert CHAT.in_error_shape(json.loads(body))
            assert running.trace.turns == []


async def test_no_model_list_holds_a_rollout_at_its_end() -> None:
    """A call beside the turns is told of the end, too, once its body is read."""
    config = InterceptionServerConfig(serving=ServingPolicy())
    go = asyncio.Event()
    async with ScriptedModel(answering()) as model, InterceptionServer(config) as server:
        session = new_session(model.upstream)
        pair = server.register(session)

        async def body() -> AsyncIterator[bytes]:
            yield b'{"messages": '
            await go.wait()
            yield b"[]}"

        async with aiohttp.ClientSession() as http:
            url = server.base_url + "/v1/messages/count_tokens"
            call = asyncio.create_task(http.post(url, data=body(), headers={"x-api-key": pair[0]}).__aenter__())
            # Answered after it, on the same listener: the call before it is admitted by then.
            async with http.post(server.base_url + CHAT.path, json=CHAT.request(), headers={"x-api-key": pair[0]}):
                pass
            server.unregister(*pair)
            go.set()
            response = await call
            assert response.status == 409
            assert response.headers["x-should-retry"] == "false"
        assert [seen.path for seen in model.seen] == [CHAT.path]
        assert session.trace.stragglers == 1
