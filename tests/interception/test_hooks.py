"""Hooks and limits: code of the user's within a rollout, and how much it may use."""

import asyncio
import json
from typing import Any

import pytest

from interception import RolloutLimits, RolloutSession, StopRollout
from interception.sse import Json
from tests.helpers import until
from tests.interception.scripted import PATIENT, WIRE, WIRES, Rollout, Step, Wire, answers, does, rollout, streams
from tests.interception.sdks import STATUS_ERRORS, sdk

by_wire = pytest.mark.parametrize("wire", WIRES, ids=str)
streamed_or_not = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def replaced(value: Any) -> Any:
    """A copy in which every "hello" is "goodbye"."""
    return json.loads(json.dumps(value).replace("hello", "goodbye"))


def rewrite(session: RolloutSession, body: Json) -> Json:
    return dict(replaced(body))


async def rewrite_in_place(session: RolloutSession, body: Json) -> None:
    await asyncio.sleep(0)
    body.update(replaced(body))


rewriting = pytest.mark.parametrize("hook", [rewrite, rewrite_in_place])


class Boom(Exception):
    pass


def boom(session: RolloutSession, body: Json) -> None:
    raise Boom("for a test")


def no_more(session: RolloutSession, body: Json) -> None:
    raise StopRollout("seen enough")


class TestRewriting:
    @by_wire
    @rewriting
    async def test_a_request(self, wire: Wire, hook: Any) -> None:
        async with rollout(on_request=[hook]) as running:
            running.upstream.then(answers(wire.answer()))
            await running.call(wire, wire.request("hello"))
            assert running.upstream.replies[0].json == wire.request("goodbye")
            assert running.trace.turns[0].request == wire.request("goodbye")

    @by_wire
    @rewriting
    async def test_an_answer(self, wire: Wire, hook: Any) -> None:
        async with rollout(on_response=[hook]) as running:
            running.upstream.then(answers(wire.answer("hello")))
            answer = await running.call(wire, wire.request())
            assert answer.json == wire.answer("goodbye")
            assert running.trace.turns[0].response == wire.answer("goodbye")
            assert (await running.call(wire, wire.request(), retry=1)).body == answer.body

    @by_wire
    @rewriting
    async def test_a_streamed_answer_is_streamed_anew_as_the_sdks_take_it(self, wire: Wire, hook: Any) -> None:
        async with rollout(on_response=[hook]) as running, sdk(running, wire) as client:
            one_by_one = [step for event in wire.events("hello", usage=True) for step in (event, 0.001)]
            running.upstream.always = streams(*one_by_one)
            assert await client.ask(stream=True) == "goodbye"
            [turn] = running.trace.turns
            assert wire.said(turn.response) == "goodbye"
            assert turn.usage is not None
            [attempt] = turn.attempts
            assert (attempt.first_byte or 0) < (attempt.ended or 0)  # of the upstream's answer, not of ours
            answer = await running.call(wire, wire.request("ho", stream=True))
            assert (await running.call(wire, wire.request("ho", stream=True), retry=1)).body == answer.body
            assert running.upstream.calls == 2

    async def test_a_streamed_answer_has_usage_only_where_it_was_asked_for(self) -> None:
        async with rollout(on_response=[rewrite]) as running:
            running.upstream.always = streams(WIRE.stream("hello", usage=True))
            plain = await running.call(WIRE, WIRE.request(stream=True))
            asked = await running.call(WIRE, WIRE.request(stream=True, stream_options={"include_usage": True}))
            assert b'"usage":{' not in plain.body
            assert b'"usage":{' in asked.body
            for answer in (plain, asked):
                assert answer.events[-1].data == "[DONE]"

    @by_wire
    async def test_an_answer_left_alone_is_relayed_byte_for_byte(self, wire: Wire) -> None:
        async with rollout(on_response=[lambda session, body: None]) as running:
            running.upstream.then(answers(wire.answer()), streams(wire.stream()))
            assert (await running.call(wire, wire.request())).body == wire.body()
            assert (await running.call(wire, wire.request(stream=True))).body == wire.stream()

    async def test_nothing_follows_an_answer_that_was_streamed_anew(self) -> None:
        """The upstream's own `[DONE]` comes only after the hold."""
        async with rollout(policy=PATIENT.model_copy(update={"hold": 0.01}), on_response=[rewrite]) as running:
            *events, done = WIRE.events("hello", usage=True)
            running.upstream.then(streams(*events, 0.05, done, done))
            answer = await running.call(WIRE, WIRE.request(stream=True))
            assert [event.data for event in answer.events].count("[DONE]") == 1

    async def test_hooks_run_in_order_each_on_what_the_one_before_left(self) -> None:
        def first(session: RolloutSession, body: Json) -> Json:
            return {**body, "steps": ["first"]}

        def second(session: RolloutSession, body: Json) -> None:
            body["steps"].append("second")

        async with rollout(on_request=[first, second]) as running:
            running.upstream.then(answers(WIRE.answer()))
            await running.call(WIRE, WIRE.request())
            assert running.upstream.replies[0].json["steps"] == ["first", "second"]


class TestStopping:
    @by_wire
    @streamed_or_not
    async def test_on_a_request(self, wire: Wire, stream: bool) -> None:
        async with rollout(on_request=[no_more]) as running:
            for _ in range(2):
                refused = await running.call(wire, wire.request(stream=stream))
                assert refused.status == 400
                assert wire.in_error_shape(refused.json)
                assert "seen enough" in refused.json["error"]["message"]
            assert running.session.stop_condition == "seen enough"
            assert running.session.error is None
            assert running.trace.turns == []

    @by_wire
    @streamed_or_not
    async def test_on_an_answer_which_is_recorded_all_the_same(self, wire: Wire, stream: bool) -> None:
        async with rollout(on_response=[no_more]) as running:
            running.upstream.then(streams(wire.stream(usage=True)) if stream else answers(wire.answer()))
            for retry in (0, 1):
                refused = await running.call(wire, wire.request(stream=stream), retry=retry)
                assert refused.status == 400
                assert wire.in_error_shape(refused.json)
            assert running.session.stop_condition == "seen enough"
            [turn] = running.trace.turns
            assert wire.said(turn.response) == "hello"
            assert turn.usage is not None
            assert not turn.delivered


class TestFailing:
    @by_wire
    @pytest.mark.parametrize("hooks", [{"on_request": [boom]}, {"on_response": [boom]}], ids=["request", "response"])
    async def test_it_ends_the_rollout_and_no_other(self, wire: Wire, hooks: dict[str, Any]) -> None:
        async with rollout(**hooks) as running, sdk(running, wire, max_retries=2) as client:
            running.upstream.always = answers(wire.answer())
            with pytest.raises(STATUS_ERRORS) as caught:
                await client.ask()
            assert caught.value.status_code == 500  # type: ignore[attr-defined]
            assert running.session.calls_seen == 1
            assert isinstance(running.session.error, Boom)
            assert running.session.failed.is_set()
            after = await running.call(wire, wire.request("ho"))
            assert (after.status, after.headers["x-should-retry"]) == (409, "false")
            assert wire.in_error_shape(after.json)
            _, secret = running.another_session()
            assert (await running.call(wire, wire.request(), secret=secret)).status == 200

    async def test_so_does_a_hook_that_returns_what_is_no_body(self) -> None:
        async with rollout(on_request=[lambda session, body: "yes"]) as running:
            assert (await running.call(WIRE, WIRE.request())).status == 500
            assert isinstance(running.session.error, TypeError)

    async def test_a_hook_that_goes_on_after_its_rollout_changes_nothing(self) -> None:
        started, stubborn = asyncio.Event(), asyncio.Event()

        async def hook(session: RolloutSession, body: Json) -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                stubborn.set()

        async with rollout(on_response=[hook]) as running:
            running.upstream.then(answers(WIRE.answer()))
            task = await running.begin_call(WIRE, WIRE.request())
            await started.wait()
            running.end()
            sealed = running.trace.to_jsonl()
            assert (await task).status == 409
            await stubborn.wait()
            await running.settled()
            assert running.trace.to_jsonl() == sealed


async def ask(running: Rollout, text: str, *, wire: Wire = WIRE) -> int:
    return (await running.call(wire, wire.request(text))).status


class TestLimits:
    @by_wire
    async def test_turns(self, wire: Wire) -> None:
        async with rollout(limits=RolloutLimits(max_turns=2)) as running:
            running.upstream.always = answers(wire.answer())
            assert [await ask(running, text, wire=wire) for text in "ab"] == [200, 200]
            refused = await running.call(wire, wire.request("c"))
            assert refused.status == 400
            assert wire.in_error_shape(refused.json)
            assert "max_turns" in refused.json["error"]["message"]
            assert running.session.stop_condition == "max_turns"
            assert running.upstream.calls == len(running.trace.turns) == 2
            # What was answered is still there for a retry.
            assert (await running.call(wire, wire.request("b"), retry=1)).status == 200

    async def test_turns_in_flight_count(self) -> None:
        async with rollout(limits=RolloutLimits(max_turns=2)) as running:
            gate = asyncio.Event()
            running.upstream.always = answers(WIRE.answer(), gate)
            tasks = [await running.begin_call(WIRE, WIRE.request(text)) for text in "ab"]
            assert await ask(running, "c") == 400
            gate.set()
            assert [(await task).status for task in tasks] == [200, 200]
            assert running.upstream.calls == 2

    async def test_calls_that_wait_in_a_request_hook_do_not_slip_through(self) -> None:
        gate = asyncio.Event()

        async def slow(session: RolloutSession, body: Json) -> None:
            await gate.wait()

        async with rollout(limits=RolloutLimits(max_turns=1), on_request=[slow]) as running:
            running.upstream.always = answers(WIRE.answer())
            tasks = [await running.begin_call(WIRE, WIRE.request(text)) for text in "abc"]
            gate.set()
            assert sorted([(await task).status for task in tasks]) == [200, 400, 400]
            assert running.upstream.calls == 1

    @pytest.mark.parametrize("limit", ["max_input_tokens", "max_output_tokens", "max_total_tokens"])
    @by_wire
    async def test_tokens(self, wire: Wire, limit: str) -> None:
        a_turn = {"max_input_tokens": 3, "max_output_tokens": 2, "max_total_tokens": 5}[limit]
        async with rollout(limits=RolloutLimits(**{limit: a_turn + 1})) as running:
            running.upstream.always = answers(wire.answer())
            assert [await ask(running, text, wire=wire) for text in "abc"] == [200, 200, 400]
            assert running.session.stop_condition == limit

    async def test_unknown_tokens_stop_nobody(self) -> None:
        async with rollout(limits=RolloutLimits(max_total_tokens=1)) as running:
            running.upstream.always = answers({"choices": []})
            assert [await ask(running, text) for text in "ab"] == [200, 200]

    async def test_an_answer_that_nobody_was_given_counts_for_nothing(self) -> None:
        async with rollout(limits=RolloutLimits(max_turns=1, max_total_tokens=5)) as running:
            gate = asyncio.Event()
            running.upstream.then(answers(WIRE.answer(), gate), answers(WIRE.answer()))
            await running.leave(await running.begin_call(WIRE, WIRE.request("a")))
            gate.set()
            await until(lambda: not any(call.open for call in running.session.ledger))
            assert running.trace.turns[0].complete
            assert await ask(running, "a") == 200
            assert await ask(running, "b") == 400

    async def test_nor_does_a_failed_one(self) -> None:
        async with rollout(limits=RolloutLimits(max_turns=1)) as running:
            running.upstream.then(answers(b"", status=500), does(Step.RESET), answers(WIRE.answer()))
            assert await ask(running, "a") == 500
            assert (await running.call(WIRE, WIRE.request("a"), retry=1)).status == 503
            assert (await running.call(WIRE, WIRE.request("a"), retry=2)).status == 200
            assert await ask(running, "b") == 400
