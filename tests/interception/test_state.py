"""The state channel of a server: who may read and write a rollout's state, what is refused, and with which reason."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from pydantic import BaseModel, Field, SecretBytes, SecretStr, field_serializer, field_validator

from interception import (
    STATE_ROUTE_HEADER,
    InterceptionServer,
    InterceptionServerConfig,
    RolloutSession,
    ServingPolicy,
    Slot,
)
from tests.helpers import until
from tests.interception.fakes import FakeTunnel, new_session
from tunnel import TunnelError

SERVICE = "the-secret-of-a-shared-tool-server"


class Board(BaseModel):
    notes: list[str] = []
    moves: int = Field(0, ge=0, alias="nMoves")

    @field_validator("notes")
    @classmethod
    def _short(cls, notes: list[str]) -> list[str]:
        if any(len(note) > 20 for note in notes):
            raise ValueError("a note is longer than 20 characters")
        return notes


class Login(BaseModel, extra="allow"):
    token: SecretStr | None = None
    spare: set[SecretStr] = set()


class Picky(BaseModel):
    """Its author did not know that pydantic takes ValueErrors only for a word on the value."""

    found: dict[str, int] = {}

    @field_validator("found", mode="before")
    @classmethod
    def _at_least(cls, found: Any) -> Any:
        return {name: max({"a": 0}[name], number) for name, number in found.items()}

    @field_serializer("found")
    def _inverted(self, found: dict[str, int]) -> dict[str, int]:
        return {**found, "a": 1 // found["a"]}


@dataclass
class Rollout:
    server: InterceptionServer
    session: RolloutSession
    slot: Slot
    http: aiohttp.ClientSession

    async def ask(
        self, method: str, path: str = "/state", body: bytes | None = None, /, secret: str | None = None, **headers: str
    ) -> "Answer":
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        auth = {"Authorization": f"Bearer {self.slot.state_secret if secret is None else secret}"}
        async with self.http.request(
            method, self.slot.base_url + path, data=body, headers={**auth, **headers}
        ) as response:
            return Answer(response.status, await response.read(), response.headers.get("ETag", ""), response)

    async def put(self, value: Any, **headers: str) -> "Answer":
        return await self.ask("PUT", "/state", json.dumps(value).encode(), **headers)


@dataclass
class Answer:
    status: int
    body: bytes
    tag: str
    response: aiohttp.ClientResponse

    @property
    def value(self) -> Any:
        return json.loads(self.body)

    @property
    def reason(self) -> str:
        return str(self.value["error"]["message"])


@asynccontextmanager
async def rollout(
    session: RolloutSession | None = None, server: InterceptionServer | None = None
) -> AsyncIterator[Rollout]:
    session = session or new_session(state={"notes": []}, task={"question": "6 x 7?"})
    server = server or InterceptionServer()
    async with server, aiohttp.ClientSession() as http, server.acquire(session) as slot:
        yield Rollout(server, session, slot, http)


class TestReadingAndWriting:
    async def test_the_state_is_read_written_and_read_by_the_host(self) -> None:
        async with rollout() as running:
            read = await running.ask("GET")
            assert (read.status, read.value, read.response.content_type) == (200, {"notes": []}, "application/json")
            written = await running.put({"notes": ["a"], "score": 0.5})
            assert (written.status, written.body) == (204, b"")
            assert written.tag == (await running.ask("GET")).tag != read.tag
            assert running.session.state == {"notes": ["a"], "score": 0.5}
        assert running.session.state == {"notes": ["a"], "score": 0.5}, "and after its end"

    @pytest.mark.parametrize(
        "value", [None, 0, -1.5, "", "ü\u2028\U0001f600", [], [[None]], {}, {"": {"a": True}}, 2**100, 1e300]
    )
    async def test_any_json_value_comes_back_as_it_went(self, value: Any) -> None:
        async with rollout() as running:
            assert (await running.put(value)).status == 204
            assert repr((await running.ask("GET")).value) == repr(value)

    async def test_a_state_that_was_not_given_is_null(self) -> None:
        async with rollout(new_session()) as running:
            assert (await running.ask("GET")).body == b"null"
            assert (await running.ask("GET", "/task")).body == b"null"

    async def test_what_the_host_changes_in_place_is_seen_and_has_another_tag(self) -> None:
        async with rollout() as running:
            before = await running.ask("GET")
            running.session.state["notes"].append("from the host")
            after = await running.ask("GET")
            assert after.value == {"notes": ["from the host"]}
            assert after.tag != before.tag
            assert (await running.put({}, If_Match=before.tag)).status == 412

    async def test_the_task_is_read_only(self) -> None:
        async with rollout() as running:
            assert (await running.ask("GET", "/task")).value == {"question": "6 x 7?"}
            refused = await running.ask("PUT", "/task", b"{}")
            assert (refused.status, refused.response.headers["Allow"]) == (405, "GET, HEAD")
            assert (await running.ask("DELETE", "/state")).response.headers["Allow"] == "GET, HEAD, PUT"

    async def test_a_task_may_be_a_model(self) -> None:
        async with rollout(new_session(task=Board(nMoves=3))) as running:
            assert (await running.ask("GET", "/task")).value == {"notes": [], "nMoves": 3}

    async def test_behind_a_tunnel_with_a_marker_in_its_path(self) -> None:
        server = InterceptionServer()
        server.tunnel = FakeTunnel()
        server.tunnel.path_prefix = "/vf/t/mark"
        async with rollout(server=server) as running:
            assert running.slot.base_url.endswith("/vf/t/mark")
            assert (await running.ask("GET")).value == {"notes": []}

    async def test_a_compressed_state_is_decoded(self) -> None:
        import gzip

        async with rollout() as running:
            written = await running.ask("PUT", "/state", gzip.compress(b'{"a": 1}'), Content_Encoding="gzip")
            assert written.status == 204
            assert running.session.state == {"a": 1}


class TestTypes:
    async def test_a_model_validates_and_the_host_gets_an_instance(self) -> None:
        async with rollout(new_session(state=Board())) as running:
            assert (await running.ask("GET")).value == {"notes": [], "nMoves": 0}
            assert (await running.put({"notes": ["a"], "nMoves": 1})).status == 204
            assert running.session.state == Board(notes=["a"], nMoves=1)

    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            ({"notes": "x"}, "notes: Input should be a valid"),
            ({"nMoves": -1}, "nMoves: Input should be greater than or equal to 0"),
            ({"notes": ["x" * 21]}, "a note is longer than 20 characters"),
            ([], "Input should be an object"),
            (None, "Input should be an object"),
        ],
    )
    async def test_what_is_not_of_the_type_is_400_with_the_reason_and_changes_nothing(
        self, value: Any, reason: str
    ) -> None:
        async with rollout(new_session(state=Board(notes=["kept"]))) as running:
            refused = await running.put(value)
            assert refused.status == 400
            assert reason in refused.reason
            assert running.session.state == Board(notes=["kept"])

    async def test_at_most_five_reasons_are_told(self) -> None:
        async with rollout(new_session(state=[1], state_type=list[int])) as running:
            assert (await running.put(["x"] * 100)).reason.endswith("and 95 more")

    async def test_thousands_are_only_counted(self) -> None:
        async with rollout(new_session(state=[1], state_type=list[int])) as running:
            assert "5000 parts of it are not valid" in (await running.put(["x"] * 5000)).reason

    async def test_a_number_that_json_does_not_have_is_refused_and_not_made_null(self) -> None:
        async with rollout(new_session(state=1.5, state_type=float)) as running:
            refused = await running.put("NaN")  # which pydantic reads as one
            assert (refused.status, running.session.state) == (400, 1.5)

    async def test_any_type_pydantic_knows_will_do(self) -> None:
        async with rollout(new_session(state={1, 2}, state_type=set[int])) as running:
            assert sorted((await running.ask("GET")).value) == [1, 2]
            await running.put([3, 3])
            assert running.session.state == {3}

    async def test_a_model_with_defaults_need_not_be_given(self) -> None:
        assert new_session(state_type=Board).state == Board()

    @pytest.mark.parametrize(
        "given",
        [
            {"state": object()},
            {"state": {"a": float("nan")}},
            {"state": {1: 2}},
            {"state": {"notes": 1}, "state_type": Board},
            {"state_type": int},
            {"task": object()},
        ],
        ids=["no JSON", "NaN", "a key that is no text", "not of its type", "no default", "a task that is no JSON"],
    )
    def test_a_state_or_task_that_is_none_is_refused_when_the_session_is_made(self, given: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"the (state|task) (is|must)"):
            new_session(**given)

    @pytest.mark.parametrize(
        "state",
        [Login(token="abc"), Login(spare={SecretStr("abc")}), Login(more=SecretBytes(b"abc"))],
        ids=["a field", "in a set", "of an undeclared field"],
    )
    async def test_a_secret_that_would_come_back_as_asterisks_is_refused(self, state: "Login") -> None:
        with pytest.raises(ValueError, match=r"written as JSON: there is a Secret\w+ in it.*field_serializer"):
            new_session(state=state)
        async with rollout(new_session(state=Login())) as running:
            assert (await running.put({"token": ""})).status == 204, "which comes back as it went"
            refused = await running.put({"token": "abc"})
            assert (refused.status, "SecretStr" in refused.reason, "abc" in refused.reason) == (400, True, False)
            assert running.session.state == Login(token="")

    async def test_one_whose_serializer_tells_it_comes_back_as_it_went(self) -> None:
        class Told(Login):
            @field_serializer("token", when_used="json")
            def _tell(self, token: SecretStr) -> str:
                return token.get_secret_value()

        async with rollout(new_session(state=Told(token="*" * 10))) as running:
            assert (await running.put({**(await running.ask("GET")).value, "spare": []})).status == 204
            assert running.session.state == Told(token="*" * 10)

    async def test_a_validator_that_breaks_off_is_400_and_changes_nothing(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with rollout(new_session(state=Picky(found={"a": 1}))) as running:
            for sent in ({"found": {"hunter2": 0}}, {"found": None}):
                refused = await running.put(sent)
                assert refused.status == 400
                assert refused.reason.startswith("the state is not of its type: its validator raised ")
                assert running.session.state == Picky(found={"a": 1})
            assert [record.getMessage() for record in caplog.records if "test_state.py, line" in record.getMessage()]
            assert "hunter2" not in caplog.text

    async def test_a_serializer_that_breaks_off_loses_nothing_either(self) -> None:
        async with rollout(new_session(state=Picky(found={"a": 1}))) as running:
            refused = await running.put({"found": {"a": 0}})
            assert (refused.status, "cannot be written as JSON" in refused.reason) == (400, True)
            assert running.session.state == Picky(found={"a": 1})

    async def test_what_the_host_breaks_later_is_500_and_a_line_in_the_log(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with rollout() as running:
            for broken in (object(), {"a": float("nan")}):
                running.session.state = broken
                assert (await running.ask("GET")).status == 500
                assert (await running.put({}, If_Match='"x"')).status == 500
            assert "what the host made of its state" in caplog.text
            assert (await running.put({})).status == 204, "a write without a condition mends it"


class TestBadInput:
    @pytest.mark.parametrize(
        "body", [b"", b"{", b'{"a": NaN}', b"[1e999]", b'"\xff"', b'"\\ud800"', b"[" * 100_000, b"[" * 300 + b"]" * 300]
    )
    async def test_what_is_no_json_is_400_with_the_reason(self, body: bytes, caplog: pytest.LogCaptureFixture) -> None:
        for session in (new_session(state={"kept": True}), new_session(state={"kept": True}, state_type=dict)):
            async with rollout(session) as running:
                refused = await running.ask("PUT", "/state", body)
                if body == b"[1e999]":
                    assert refused.status in (204, 400)  # a number of JSON's, if not of ours
                    continue
                assert refused.status == 400
                assert len(refused.reason) > 20
                assert session.state == {"kept": True}
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]

    async def test_a_state_over_the_cap_is_413_and_the_connection_stays_usable(self) -> None:
        server = InterceptionServer(InterceptionServerConfig(serving=ServingPolicy(state_cap=1000)))
        async with rollout(server=server) as running:
            assert (await running.put("x" * 2000)).status == 413
            assert (await running.put("x" * 900)).status == 204

    @pytest.mark.parametrize("header", ["abc", '"', '"a" "b"', '"a",', "W/", '"a\tb"'])
    async def test_an_if_match_that_is_none_is_400(self, header: str) -> None:
        async with rollout() as running:
            refused = await running.put({}, If_Match=header)
            assert (refused.status, "If-Match" in refused.reason) == (400, True)


class TestConditions:
    async def test_a_write_on_what_was_read_is_made_and_one_on_what_is_past_is_412(self) -> None:
        async with rollout() as running:
            first = (await running.ask("GET")).tag
            second = await running.put({"by": "one"}, If_Match=first)
            assert second.status == 204
            refused = await running.put({"by": "two"}, If_Match=first)
            assert (refused.status, refused.tag) == (412, second.tag)
            assert "read it again" in refused.reason
            assert (await running.put({"by": "two"}, If_Match=refused.tag)).status == 204
            assert running.session.state == {"by": "two"}

    async def test_without_a_condition_the_last_write_wins(self) -> None:
        async with rollout() as running:
            for number in range(3):
                assert (await running.put(number)).status == 204
            assert (await running.put(3, If_Match="*")).status == 204
            assert running.session.state == 3

    async def test_weak_tags_and_lists_match_too(self) -> None:
        async with rollout() as running:
            tag = (await running.ask("GET")).tag
            assert (await running.put({"notes": []}, If_Match=f"W/{tag}")).status == 204
            assert (await running.put({"notes": []}, If_Match=f'"other", {tag}')).status == 204

    async def test_a_write_that_is_sent_again_under_its_key_is_made_once(self) -> None:
        async with rollout() as running:
            tag = (await running.ask("GET")).tag
            first = await running.put({"n": 1}, If_Match=tag, Idempotency_Key="k")
            assert (await running.put({"n": 2})).status == 204
            again = await running.put({"n": 1}, If_Match=tag, Idempotency_Key="k")
            assert (again.status, again.tag) == (204, first.tag)
            assert running.session.state == {"n": 2}, "the other's write is not undone"

    async def test_a_key_for_another_write_is_400(self) -> None:
        async with rollout() as running:
            await running.put({"n": 1}, Idempotency_Key="k")
            assert (await running.put({"n": 2}, Idempotency_Key="k")).status == 400
            async with rollout() as other:
                assert (await other.put({"n": 2}, Idempotency_Key="k")).status == 204, "a key belongs to its session"


class TestSecrets:
    PATHS = (("GET", "/state"), ("PUT", "/state"), ("GET", "/task"), ("POST", "/state"))

    @pytest.mark.parametrize(("method", "path"), PATHS)
    async def test_the_model_secret_a_wrong_one_and_none_are_401(self, method: str, path: str) -> None:
        async with rollout() as running:
            for secret in (running.slot.model_secret, "wrong", "", SERVICE, running.slot.state_secret[:-1]):
                refused = await running.ask(method, path, b"{}" if method == "PUT" else None, secret=secret)
                assert refused.status == 401
                assert refused.value["error"]["type"] == "authentication_error"
            assert running.session.state == {"notes": []}

    async def test_another_rollouts_state_secret_reaches_that_rollout_alone(self) -> None:
        other = new_session(state="other")
        async with rollout() as one, one.server.acquire(other) as slot:
            assert (await one.ask("GET")).value == {"notes": []}
            assert (await one.ask("GET", secret=slot.state_secret)).value == "other"
            refused = await one.ask("GET", **{STATE_ROUTE_HEADER: other.id})
            assert refused.status == 400
            assert (await one.ask("GET", **{STATE_ROUTE_HEADER: one.session.id})).status == 200

    async def test_a_released_secret_is_401_and_counted(self) -> None:
        async with InterceptionServer() as server, rollout(server=server) as kept:
            async with server.acquire(session := new_session(state=1)) as slot:
                pass
            kept.slot = slot
            for method, path in self.PATHS:
                assert (await kept.ask(method, path)).status == 401
            assert session.trace.stragglers == len(self.PATHS)
            assert session.state == 1

    async def test_a_write_that_was_admitted_before_the_end_is_409_and_counted(self) -> None:
        async with InterceptionServer() as server, rollout(server=server) as running:
            may_end = asyncio.Event()

            async def body() -> AsyncIterator[bytes]:
                yield b'{"late":'
                await may_end.wait()
                yield b" true}"

            write = asyncio.create_task(
                running.http.put(
                    running.slot.base_url + "/state",
                    data=body(),
                    headers={"Authorization": f"Bearer {running.slot.state_secret}"},
                ).__aenter__()
            )
            await until(lambda: server.in_flight == 1)
            server.unregister(running.slot.model_secret, running.slot.state_secret)
            may_end.set()
            answer = await write
            assert (answer.status, answer.headers["x-should-retry"]) == (409, "false")
            answer.release()
            assert running.session.trace.stragglers == 1
            assert running.session.state == {"notes": []}

    async def test_after_its_tunnel_was_lost_it_is_409(self) -> None:
        async with rollout() as running:
            running.session.fail(TunnelError("the tool server's tunnel was lost"))
            assert (await running.ask("GET")).status == 409
            running.session.error = None

    async def test_no_secret_and_no_state_is_in_the_log(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG)
        async with rollout(server=InterceptionServer(state_service_secrets=(SERVICE,))) as running:
            await running.put({"password": "hunter2"})
            await running.ask("PUT", "/state", b'{"password": "hunter2"')
            await running.ask("GET", secret=SERVICE)
            assert SERVICE not in repr(vars(running.server))
        told = [record.getMessage() for record in caplog.records if record.name.startswith(("interception", "aiohttp"))]
        for secret in (*running.slot[1:], SERVICE, "hunter2"):
            assert secret not in "\n".join(told)


class TestSharedToolServers:
    @pytest.fixture
    async def running(self) -> AsyncIterator[Rollout]:
        async with rollout(server=InterceptionServer(state_service_secrets=("another", SERVICE))) as running:
            yield running

    async def test_one_names_the_session_it_speaks_for(self, running: Rollout) -> None:
        async with running.server.acquire(other := new_session(id="task 8, ü", state=8)):
            route = {STATE_ROUTE_HEADER: running.session.id}
            assert (await running.ask("GET", secret=SERVICE, **route)).value == {"notes": []}
            assert (await running.ask("PUT", "/state", b"9", secret="another", **route)).status == 204
            assert (running.session.state, other.state) == (9, 8)
            read = await running.ask("GET", secret=SERVICE, **{STATE_ROUTE_HEADER: other.id})
            assert read.value == 8

    async def test_it_must_name_one(self, running: Rollout) -> None:
        refused = await running.ask("GET", secret=SERVICE)
        assert (refused.status, STATE_ROUTE_HEADER in refused.reason) == (400, True)

    async def test_one_that_does_not_run_is_404_and_a_late_call_is_counted(self, running: Rollout) -> None:
        async with running.server.acquire(over := new_session(id="over")):
            pass
        for route in ("over", "unheard of"):
            assert (await running.ask("GET", secret=SERVICE, **{STATE_ROUTE_HEADER: route})).status == 404
        assert over.trace.stragglers == 1

    async def test_its_secret_cannot_reach_the_model(self, running: Rollout) -> None:
        for path in ("/v1/chat/completions", "/v1/models"):
            refused = await running.ask("POST", path, b"{}", secret=SERVICE, **{STATE_ROUTE_HEADER: running.session.id})
            assert refused.status == 401

    async def test_the_name_of_a_session_is_no_secret(self, running: Rollout) -> None:
        named = {STATE_ROUTE_HEADER: running.session.id}
        for secret in ("", "wrong", running.session.id):
            assert (await running.ask("GET", secret=secret, **named)).status == 401

    async def test_two_rollouts_of_one_name_are_told_apart_by_refusing_the_second(self, running: Rollout) -> None:
        with pytest.raises(ValueError, match="id of its own"):
            running.server.register(new_session(id=running.session.id))
        assert running.server.load == 1

    async def test_without_shared_tool_servers_names_may_be_the_same(self) -> None:
        async with rollout(new_session(id="task-7")) as one, one.server.acquire(new_session(id="task-7")):
            assert one.server.load == 2

    @pytest.mark.parametrize("secrets", ["abc", ("",), (" a",), ("a\n",), ("é",), (1,)])
    def test_secrets_that_no_header_can_carry_are_refused_and_not_quoted(self, secrets: Any) -> None:
        with pytest.raises(ValueError, match="state_service_secrets") as refused:
            InterceptionServer(state_service_secrets=secrets)
        assert repr(secrets) not in str(refused.value)
