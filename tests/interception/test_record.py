"""The record of a rollout: what is in it, what tells of what is not, and when it ends."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from pydantic import SecretStr

from interception import (
    CALL_ID_HEADER,
    InterceptionError,
    InterceptionServer,
    RolloutSession,
    Trace,
    Turn,
    Upstream,
    Usage,
)
from interception.server import RELEASED_KEPT
from interception.sse import Json, sse
from tests.helpers import until
from tests.interception.fakes import ScriptedModel, hang, hangs_are_failures, new_session
from tests.interception.scripted import (
    WIRE,
    WIRES,
    Rollout,
    Step,
    Wire,
    answers,
    events_of,
    read_until,
    rollout,
    streams,
)

__all__ = ["hangs_are_failures"]
pytestmark = pytest.mark.usefixtures("hangs_are_failures")

CHAT, RESPONSES, MESSAGES = WIRES
by_wire = pytest.mark.parametrize("wire", WIRES, ids=str)
streamed_or_not = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
BUSY = answers({"error": {"message": "busy", "type": "server_error"}}, status=503)
KEY = "sk-of-the-upstream"


def says(wire: Wire, text: str = "hello", *, stream: bool = False) -> Any:
    return streams(*wire.events(text)) if stream else answers(wire.answer(text))


class TestAttempts:
    @by_wire
    @streamed_or_not
    async def test_a_failed_attempt_is_not_hidden_by_a_later_good_one(self, wire: Wire, stream: bool) -> None:
        body = wire.request(stream=stream)
        async with rollout() as running:
            running.upstream.then(BUSY, answers(b"", Step.RESET), says(wire, stream=stream))
            assert (await running.call(wire, body)).status == 503
            assert (await running.call(wire, body, retry=1)).status == 503
            answer = await running.call(wire, body, retry=2)
            assert answer.status == 200
            [turn] = running.trace.turns
            assert [attempt.status for attempt in turn.attempts] == [503, None, 200]
            refused, reset, won = turn.attempts
            assert refused.error is not None
            assert "busy" in refused.error
            assert reset.error is not None
            assert turn.winner is won
            assert turn.error is None
            assert len({attempt.call_id for attempt in turn.attempts}) == 3
            assert answer.headers[CALL_ID_HEADER] == won.call_id
            assert wire.said(turn.response) == "hello"
            for attempt in turn.attempts:
                assert attempt.started is not None
                assert attempt.ended is not None
                assert attempt.started <= attempt.ended

    async def test_a_turn_that_no_attempt_won_keeps_the_last_error(self) -> None:
        async with rollout() as running:
            running.upstream.then(BUSY, answers({"error": {"message": "worse"}}, status=500))
            await running.call(WIRE, WIRE.request())
            await running.call(WIRE, WIRE.request(), retry=1)
            [turn] = running.trace.turns
            assert (turn.winner, turn.status, turn.complete) == (None, 500, False)
            assert "worse" in str(turn.error)

    async def test_each_attempt_is_told_as_it_ends(self) -> None:
        seen: list[tuple[int, bool]] = []

        def told(turn: Turn) -> None:
            seen.append((len(turn.attempts), turn.complete))
            raise LookupError("of the listener, which harms nobody")

        async with rollout() as running:
            running.session.on_turn = told
            running.upstream.then(BUSY, says(WIRE))
            await running.call(WIRE, WIRE.request())
            assert (await running.call(WIRE, WIRE.request(), retry=1)).status == 200
            await until(lambda: seen == [(1, False), (2, True)])


class TestLateCalls:
    @by_wire
    async def test_one_that_arrives_after_the_release_is_401_and_counted(self, wire: Wire) -> None:
        async with rollout() as running:
            running.upstream.then(says(wire))
            await running.call(wire, wire.request())
            running.end()
            before = running.trace.to_jsonl().splitlines()[1:]
            for retry in (0, 1):
                late = await running.call(wire, wire.request(), retry=retry)
                assert late.status == 401
                assert wire.in_error_shape(late.json)
            for path in ("/v1/models", "/nowhere"):
                async with running.http.get(
                    running.slot.base_url + path, headers={"x-api-key": running.slot.model_secret}
                ) as response:
                    assert response.status == 401
            assert running.trace.stragglers == 4
            assert running.trace.to_jsonl().splitlines()[1:] == before
            assert [found for found in running.session.findings if "4 calls" in found]

    @by_wire
    async def test_one_that_was_admitted_before_is_409_for_good_and_counted(self, wire: Wire) -> None:
        sending, go = asyncio.Event(), asyncio.Event()
        raw = json.dumps(wire.request()).encode()

        async def body() -> AsyncIterator[bytes]:
            yield raw[:20]
            sending.set()
            await go.wait()
            yield raw[20:]

        async with rollout() as running:
            headers = {"x-api-key": running.slot.model_secret}
            url = running.slot.base_url + wire.path
            call = asyncio.create_task(running.http.post(url, data=body(), headers=headers).__aenter__())
            await sending.wait()
            await until(lambda: running.session.calls_seen == 1)
            running.end()
            go.set()
            async with await call as response:
                assert response.status == 409
                assert response.headers["x-should-retry"] == "false"
                assert wire.in_error_shape(await response.json())
            assert running.trace.stragglers == 1
            assert running.trace.turns == []

    async def test_so_is_one_whose_hook_took_longer_than_the_rollout(self) -> None:
        hooked, go = asyncio.Event(), asyncio.Event()

        async def slow(session: RolloutSession, request: Json) -> None:
            hooked.set()
            await go.wait()

        async with rollout(on_request=[slow]) as running:
            call = asyncio.create_task(running.call(WIRE, WIRE.request()))
            await hooked.wait()
            running.end()
            go.set()
            assert (await call).status == 409
            assert running.trace.stragglers == 1
            assert running.trace.turns == []

    @by_wire
    async def test_a_committed_stream_ends_with_the_dialects_error(self, wire: Wire) -> None:
        async with rollout() as running:
            first, *_ = wire.events()
            running.upstream.then(streams(first, Step.HANG))
            async with running.open(wire, wire.request(stream=True)) as response:
                await read_until(response, lambda event: True)
                running.end()
                rest = events_of(await response.read())
            assert wire.is_error_event(rest[-1])
            await until(lambda: running.upstream.abandoned == 1)

    async def test_the_last_4096_released_secrets_are_kept(self) -> None:
        assert RELEASED_KEPT == 4096
        async with InterceptionServer() as server, aiohttp.ClientSession() as http:
            sessions = [new_session() for _ in range(RELEASED_KEPT + 2)]
            secrets = []
            for session in sessions:
                pair = server.register(session)
                secrets.append(pair[0])
                server.unregister(*pair)
            for number in (0, 1, 2, -1):
                async with http.post(
                    server.base_url + WIRE.path, json=WIRE.request(), headers={"x-api-key": secrets[number]}
                ) as response:
                    assert response.status == 401
            assert [sessions[number].trace.stragglers for number in (0, 1, 2, -1)] == [0, 0, 1, 1]


class TestTheEnd:
    @streamed_or_not
    async def test_the_end_waits_for_no_call_and_leaves_none_open_in_the_record(
        self, stream: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        async with ScriptedModel(hang) as model, rollout(base_url=model.base_url) as running:
            calls = [
                asyncio.create_task(running.call(WIRE, WIRE.request(f"call {number}", stream=stream)))
                for number in range(5)
            ]
            await until(lambda: model.open == 5)
            assert running.session.release("the rollout is over") == 5
            # From here on a reader of the trace races with nobody.
            text = running.trace.to_jsonl()
            assert running.trace.sealed
            for turn in running.trace.turns:
                assert turn.error is not None
                assert turn.error.startswith("cancelled")
                assert turn.attempts[0].ended is not None
            assert {(await call).status for call in calls} == {409}
            await until(lambda: model.open == 0)
            assert running.trace.to_jsonl() == text
            assert [record for record in caplog.records if "5 calls were in flight" in record.getMessage()]

    async def test_a_second_end_finds_nothing(self) -> None:
        async with rollout() as running:
            running.end()
            assert running.session.release("again") == 0

    async def test_what_is_delivered_after_the_seal_changes_nothing(self) -> None:
        async with rollout() as running:
            running.upstream.then(streams(*WIRE.events()))
            async with running.open(WIRE, WIRE.request(stream=True)) as response:
                await until(lambda: running.trace.turns[0].complete)
                running.end()
                text = running.trace.to_jsonl()
                await response.read()
            await running.settled()
            assert running.trace.to_jsonl() == text


class TestSize:
    @by_wire
    async def test_a_history_sent_again_with_each_of_sixty_turns_is_kept_once(self, wire: Wire) -> None:
        field = "input" if wire is RESPONSES else "messages"
        history: list[Json] = []
        unique = 0
        tools = [{"name": f"tool_{number}", "description": "does something " * 40} for number in range(10)]
        async with rollout() as running:
            for number in range(60):
                question = {"role": "user", "content": f"tool output {number}: " + f"{number:05d} lines of it; " * 40}
                history.append(question)
                said = f"answer {number}: " + f"thinking about {number}; " * 30
                running.upstream.then(says(wire, said))
                body = {**wire.request(), field: history, "tools": tools}
                answer = await running.call(wire, body)
                assert wire.said(answer.json) == said
                reply = {"role": "assistant", "content": said}
                unique += len(json.dumps(question)) + len(answer.body) + len(json.dumps(reply))
                history.append(reply)
            unique += len(json.dumps(tools))
            turns = running.trace.turns
            assert len(turns) == 60
            assert [len(turn.request[field]) for turn in turns] == list(range(1, 121, 2))
            assert turns[-1].request[field] == history[:-1]
            assert running.trace.stored_bytes() <= 1.3 * unique
            assert len(running.trace.to_jsonl()) <= 2 * unique  # a turn's times and ids take room, too


def with_tokens(*, prompt: bool = True, ids: list[int] | None = None, logprobs: int | None = None) -> Json:
    answer = CHAT.answer()
    [choice] = answer["choices"]
    if ids is not None:
        choice["token_ids"] = ids
    if logprobs is not None:
        choice["logprobs"] = {"content": [{"token": "a", "logprob": -0.5}] * logprobs}
    return {**answer, **({"prompt_token_ids": [1, 2, 3]} if prompt else {})}


class TestTokenIds:
    SAMPLING = (("return_token_ids", True), ("logprobs", True))

    async def test_they_are_recorded_as_the_engine_sent_them(self, caplog: pytest.LogCaptureFixture) -> None:
        async with rollout(sampling=dict(self.SAMPLING)) as running:
            running.upstream.then(answers(with_tokens(ids=[7, 8], logprobs=2)))
            assert (await running.call(CHAT, CHAT.request())).status == 200
            assert running.upstream.replies[0].json["return_token_ids"] is True
            response = running.trace.turns[0].response
            assert response is not None
            assert response["prompt_token_ids"] == [1, 2, 3]
            assert response["choices"][0]["token_ids"] == [7, 8]
            assert running.session.error is None
            assert not [record for record in caplog.records if record.levelno >= logging.WARNING]

    async def test_also_from_a_stream(self) -> None:
        def chunk(**fields: Any) -> bytes:
            return sse({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", **fields})

        first = {"index": 0, "delta": {"role": "assistant", "content": "he"}, "token_ids": [7]}
        second = {"index": 0, "delta": {"content": "llo"}, "token_ids": [8, 9], "finish_reason": "stop"}
        events = [chunk(choices=[first], prompt_token_ids=[1, 2, 3]), chunk(choices=[second]), b"data: [DONE]\n\n"]
        async with rollout(sampling=dict(self.SAMPLING)) as running:
            running.upstream.then(streams(*events))
            answer = await running.call(CHAT, CHAT.request(stream=True))
            assert answer.body == b"".join(events)
            response = running.trace.turns[0].response
            assert response is not None
            assert response["prompt_token_ids"] == [1, 2, 3]
            assert response["choices"][0]["token_ids"] == [7, 8, 9]
            assert running.session.error is None

    async def test_as_many_as_logprobs_or_it_is_said(self, caplog: pytest.LogCaptureFixture) -> None:
        async with rollout(sampling=dict(self.SAMPLING)) as running:
            running.upstream.then(answers(with_tokens(ids=[7, 8, 9], logprobs=2)))
            assert (await running.call(CHAT, CHAT.request())).status == 200
            [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
            assert "3 token_ids and 2 logprobs" in warning
            assert running.session.id in warning
            assert running.session.error is None
            response = running.trace.turns[0].response
            assert response is not None
            assert response["choices"][0]["token_ids"] == [7, 8, 9]

    @pytest.mark.parametrize(
        ("answer", "field"),
        [(with_tokens(), "choices[0].token_ids"), (with_tokens(prompt=False, ids=[7, 8]), "prompt_token_ids")],
        ids=["of the answer", "of the prompt"],
    )
    async def test_asked_for_and_missing_they_end_the_rollout_early_and_the_field_is_named(
        self, answer: Json, field: str
    ) -> None:
        async with rollout(sampling=dict(self.SAMPLING)) as running:
            running.upstream.then(answers(answer))
            assert (await running.call(CHAT, CHAT.request("one"))).status == 200
            assert isinstance(running.session.error, InterceptionError)
            assert field in str(running.session.error)
            assert running.session.failed.is_set()
            refused = await running.call(CHAT, CHAT.request("two"))
            assert refused.status == 409
            assert refused.headers["x-should-retry"] == "false"
            assert running.upstream.calls == 1
            assert len(running.trace.turns) == 1

    async def test_unasked_they_are_missed_by_nobody(self) -> None:
        async with rollout() as running:
            running.upstream.then(says(CHAT))
            assert (await running.call(CHAT, CHAT.request())).status == 200
            assert running.session.error is None


class TestCallIds:
    @by_wire
    @streamed_or_not
    async def test_one_id_is_in_the_log_the_record_the_answer_and_the_upstreams_request(
        self, wire: Wire, stream: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG, "interception")
        async with rollout() as running:
            running.upstream.then(BUSY, says(wire, stream=stream))
            answers_ = [
                await running.call(wire, wire.request(stream=stream)),
                await running.call(wire, wire.request(stream=stream), retry=1),
            ]
            await until(lambda: not any(call.open for call in running.session.ledger))
            ids = [attempt.call_id for attempt in running.trace.turns[0].attempts]
            assert [answer.headers[CALL_ID_HEADER] for answer in answers_] == ids
            assert [reply.headers[CALL_ID_HEADER] for reply in running.upstream.replies] == ids
            for call_id in ids:
                lines = [record.getMessage() for record in caplog.records if call_id in record.getMessage()]
                assert lines
                assert running.session.id in lines[0]

    @by_wire
    async def test_a_refusal_has_one_too(self, wire: Wire) -> None:
        async with rollout() as running:
            refused = await running.call(wire, wire.request(), secret="unknown")
            assert refused.status == 401
            assert len(refused.headers[CALL_ID_HEADER]) == 32


class TestUsage:
    @pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": None}, "lots", {"prompt_tokens": "3"}])
    async def test_unknown_counts_are_none_and_never_zero(self, usage: Any) -> None:
        answer = {**CHAT.answer(), "usage": usage}
        async with rollout() as running:
            running.upstream.then(answers(answer))
            assert (await running.call(CHAT, CHAT.request())).json == answer
            [turn] = running.trace.turns
            assert turn.usage is None
            assert json.loads(running.trace.to_jsonl().splitlines()[-1])["usage"] is None

    async def test_known_ones_stay_known_beside_unknown_ones(self) -> None:
        async with rollout() as running:
            running.upstream.then(answers({**CHAT.answer(), "usage": {"prompt_tokens": 3}}))
            await running.call(CHAT, CHAT.request())
            assert running.trace.turns[0].usage == Usage(3, None, None)

    @by_wire
    async def test_a_stream_without_usage_leaves_it_unknown(self, wire: Wire) -> None:
        events = [event.replace(b'"usage"', b'"no_usage"') for event in wire.events()]
        async with rollout() as running:
            running.upstream.then(streams(*events))
            await running.call(wire, wire.request(stream=True))
            assert running.trace.turns[0].complete
            assert running.trace.turns[0].usage is None

    @by_wire
    async def test_a_zero_that_was_said_is_zero(self, wire: Wire) -> None:
        async with rollout() as running:
            answer = wire.answer()
            answer["usage"] = dict.fromkeys(answer["usage"], 0)
            running.upstream.then(answers(answer))
            await running.call(wire, wire.request())
            assert running.trace.turns[0].usage == Usage(0, 0, 0)


class TestStreamsThatStopOrGoOn:
    @by_wire
    async def test_all_deltas_then_silence_is_told_as_a_stall(self, wire: Wire) -> None:
        """The socket stays open, and nothing says that the answer is whole."""
        deltas = wire.events()[: wire.stop]
        async with rollout(idle_timeout=0.3) as running:
            running.upstream.then(streams(*deltas, Step.HANG))
            answer = await running.call(wire, wire.request(stream=True))
            assert wire.is_error_event(answer.events[-1])
            [turn] = running.trace.turns
            assert turn.error == f"the upstream stalled after {len(deltas)} events"
            assert not turn.complete
            assert running.session.error is None
            await until(lambda: running.upstream.abandoned == 1)

    @by_wire
    async def test_a_stream_older_than_any_timeout_goes_on_as_long_as_data_flows(self, wire: Wire) -> None:
        idle = 0.5
        first, *rest = wire.events()
        go = asyncio.Event()

        async def script(reply: Any) -> None:
            await reply.begin(200, "text/event-stream")
            await reply.take(first)
            while not go.is_set():
                await reply.take(b": still there\n\n")
                await reply.take(idle / 10)
            for event in rest:
                await reply.take(event)

        async with rollout(idle_timeout=idle) as running:
            running.upstream.then(script)
            call = await running.begin_call(wire, wire.request(stream=True))
            begun = asyncio.get_running_loop().time()
            await until(lambda: asyncio.get_running_loop().time() > begun + 4 * idle)
            assert not call.done()
            go.set()
            answer = await call
            assert not [event for event in answer.events if wire.is_error_event(event)]
            assert running.trace.turns[0].complete


class TestFindings:
    async def test_a_harness_that_never_called_is_a_finding(self, caplog: pytest.LogCaptureFixture) -> None:
        async with rollout() as running:
            [found] = running.session.findings
            assert "0 calls seen" in found
            running.end()
            [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
            assert running.session.id in warning
            assert "0 calls seen" in warning

    async def test_one_that_called_is_none(self) -> None:
        async with rollout() as running:
            running.upstream.then(says(WIRE))
            await running.call(WIRE, WIRE.request())
            assert running.session.findings == []

    async def test_calls_with_a_wrong_secret_are_not_seen_as_its_own(self) -> None:
        async with rollout() as running:
            await running.call(WIRE, WIRE.request(), secret="unknown")
            assert "0 calls seen" in running.session.findings[0]


async def busy_session(running: Rollout) -> None:
    """Turns of all kinds: whole, streamed, retried, failed, odd, cancelled."""
    for wire in WIRES:
        for stream in (False, True):
            running.upstream.then(BUSY, says(wire, "über ☃", stream=stream))
            body = wire.request("go", stream=stream, unknown={"nan": float("nan"), "big": 2**80, "\0": "\ud800"})
            assert (await running.call(wire, body)).status == 503
            assert (await running.call(wire, body, retry=1)).status == 200
    running.upstream.then(answers(b"<html>no</html>", content_type="text/html"))
    assert (await running.call(CHAT, CHAT.request("html"))).status == 502
    running.upstream.then(answers(b"", Step.HANG))
    task = await running.begin_call(CHAT, CHAT.request("cancelled"))
    await until(lambda: running.upstream.calls == 14)
    running.end()
    assert (await task).status == 409
    assert (await running.call(CHAT, CHAT.request("late"))).status == 401


class TestAsAFile:
    async def test_the_trace_of_a_real_session_comes_back_as_it_was(self) -> None:
        async with rollout() as running:
            await busy_session(running)
            text = running.trace.to_jsonl()
            again = Trace.from_jsonl(text)
            assert again.turns == running.trace.turns
            assert (again.id, again.sealed, again.stragglers, again.warnings) == (running.session.id, True, 1, [])
            assert again.to_jsonl() == text
            assert len(again.turns) == 8
            assert again.turns[0].request["unknown"]["big"] == 2**80
            assert again.turns[6].raw == b"<html>no</html>"
            assert str(again.turns[7].error).startswith("cancelled")


class TestSecrets:
    async def test_none_is_in_the_trace_the_log_a_repr_or_an_error(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG)
        texts: list[str] = []
        async with rollout() as running:
            upstream = Upstream(
                base_url=running.upstream.base_url, api_key=SecretStr(KEY), headers={"X-Token": "token-" + KEY}
            )
            session = RolloutSession(upstream)
            running.session = session
            pair = running.server.register(session)
            running.slot = running.slot._replace(model_secret=pair[0], state_secret=pair[1])
            await busy_session(running)
            assert running.upstream.replies[0].headers["X-Token"] == "token-" + KEY
            secrets = [*pair, KEY]

            bad = RolloutSession(Upstream(base_url="http://127.0.0.1:9/v1", api_key=SecretStr(KEY)))
            secret, other = running.server.register(bad)
            secrets += [secret, other]
            for wire in WIRES:
                answer = await running.call(wire, wire.request(), secret=secret)
                texts.append(answer.body.decode())
                assert answer.status == 503
            for raw in (b"{", b"POST"):
                async with running.http.post(
                    running.slot.base_url + WIRE.path, data=raw, headers={"x-api-key": secret}
                ) as response:
                    texts.append(await response.text())
            async with running.http.get(
                running.slot.base_url + "/v1/models", headers={"x-api-key": secret}
            ) as response:
                assert response.status == 502
                texts.append(await response.text())
            # A header that is no HTTP: aiohttp quotes the line in what it logs.
            reader, writer = await asyncio.open_connection("127.0.0.1", int(running.slot.base_url.rpartition(":")[2]))
            writer.write(f"GET / HTTP/1.1\r\nx-api-key {secret}\r\nx-api-key: {secret}\0\r\n\r\n".encode())
            await reader.read()
            writer.close()
            for each in (session, bad):
                texts += [each.trace.to_jsonl(), repr(each), repr(each.trace), repr(each.upstream), str(each.upstream)]
                texts += [repr(turn) + repr(turn.attempts) + json.dumps(turn.to_dict()) for turn in each.trace.turns]
                texts += each.findings
            texts += [repr(running.server), repr(running.slot), repr(running.server.sessions)]
        texts += [
            record.getMessage() + repr(record.args) + repr(record.exc_info) + str(record.exc_text)
            for record in caplog.records
        ]
        assert len(texts) > 30
        assert not [text for text in texts for secret in secrets if secret in text]
