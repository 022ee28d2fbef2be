"""One logical call is one turn: who a retry is, what it is served, and for how long."""

import asyncio
import gc
import weakref

import pytest

from interception import RolloutSession, ServingPolicy
from interception.headers import CALL_ID_HEADER
from interception.ledger import Ledger
from interception.sse import Json
from tests.helpers import until
from tests.interception.scripted import (
    PATIENT,
    WIRE,
    WIRES,
    Rollout,
    Script,
    Step,
    Wire,
    answers,
    does,
    rollout,
    streams,
)

by_wire = pytest.mark.parametrize("wire", WIRES, ids=str)
streamed_or_not = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
HI = WIRE.request()
FAILS = answers({"error": {"message": "broken", "type": "server_error"}}, status=500)


def says(wire: Wire, text: str, *, stream: bool = False, gate: asyncio.Event | None = None) -> Script:
    """An answer, held by `gate` (a stream after its first event)."""
    held = [gate] if gate is not None else []
    if not stream:
        return answers(wire.answer(text), *held)
    first, *rest = wire.events(text)
    return streams(first, *held, *rest)


def sent(wire: Wire, text: str, *, stream: bool = False) -> bytes:
    """What an agent reads of `says`."""
    return wire.stream(text) if stream else wire.body(text)


async def lose(running: Rollout, wire: Wire, body: Json, text: str, *, key: str | None = None) -> None:
    """A call whose agent left before the answer, which has come since."""
    gate = asyncio.Event()
    running.upstream.then(says(wire, text, stream=body.get("stream") is True, gate=gate))
    before = running.upstream.calls
    task = await running.begin_call(wire, body, key=key)
    await until(lambda: running.upstream.calls > before)
    await running.leave(task)
    gate.set()
    turn = running.trace.turns[-1]
    await until(lambda: turn.complete and not any(call.open for call in running.session.ledger))
    assert not turn.delivered


class TestLostAnswers:
    @by_wire
    @streamed_or_not
    async def test_a_marked_retry_is_served_the_recorded_bytes(self, wire: Wire, stream: bool) -> None:
        async with rollout() as running:
            body = wire.request(stream=stream)
            await lose(running, wire, body, "hello")
            [turn] = running.trace.turns
            for retry in (1, 2):
                again = await running.call(wire, body, retry=retry)
                assert again.status == 200
                assert again.body == sent(wire, "hello", stream=stream)
                assert again.headers[CALL_ID_HEADER] == turn.attempts[0].call_id
                assert turn.delivered
            assert running.trace.turns == [turn]
            assert running.upstream.calls == 1

    @by_wire
    @streamed_or_not
    async def test_also_when_the_answer_was_lost_after_we_had_sent_it(self, wire: Wire, stream: bool) -> None:
        async with rollout() as running:
            running.upstream.then(says(wire, "hello", stream=stream))
            body = wire.request(stream=stream)
            first = await running.call(wire, body)
            assert (await running.call(wire, body, retry=1)).body == first.body
            assert running.upstream.calls == len(running.trace.turns) == 1

    @by_wire
    @streamed_or_not
    async def test_a_retry_while_the_first_attempt_runs_attaches_to_it(self, wire: Wire, stream: bool) -> None:
        async with rollout() as running:
            gate = asyncio.Event()
            running.upstream.then(says(wire, "hello", stream=stream, gate=gate))
            body = wire.request(stream=stream)
            first = await running.begin_call(wire, body)
            second = await running.begin_call(wire, body, retry=1)
            gate.set()
            one, two = await asyncio.gather(first, second)
            assert one.body == two.body == sent(wire, "hello", stream=stream)
            assert one.headers[CALL_ID_HEADER] == two.headers[CALL_ID_HEADER]
            assert running.upstream.calls == len(running.trace.turns) == 1

    @by_wire
    @streamed_or_not
    async def test_the_first_reader_may_leave_while_a_second_one_reads(self, wire: Wire, stream: bool) -> None:
        async with rollout() as running:
            gate = asyncio.Event()
            running.upstream.then(says(wire, "hello", stream=stream, gate=gate))
            body = wire.request(stream=stream)
            first = await running.begin_call(wire, body)
            second = await running.begin_call(wire, body, retry=1)
            await running.leave(first)
            gate.set()
            assert (await second).body == sent(wire, "hello", stream=stream)
            assert running.trace.turns[0].delivered

    async def test_the_answer_of_a_slow_request_hook_is_shared_too(self) -> None:
        hooked, gate = asyncio.Event(), asyncio.Event()

        async def slow(session: RolloutSession, request: Json) -> None:
            hooked.set()
            await gate.wait()

        async with rollout(on_request=[slow]) as running:
            running.upstream.then(says(WIRE, "hello"))
            first = await running.begin_call(WIRE, HI)
            await hooked.wait()
            second = await running.begin_call(WIRE, HI, retry=1)
            gate.set()
            one, two = await asyncio.gather(first, second)
            assert one.body == two.body
            assert running.upstream.calls == len(running.trace.turns) == 1

    async def test_a_retry_of_a_large_body_finds_its_answer(self) -> None:
        async with rollout(policy=ServingPolicy(replay_bytes=64 * 1024)) as running:
            running.upstream.then(says(WIRE, "hello"))
            body = WIRE.request("x" * 256 * 1024)
            first = await running.call(WIRE, body)
            assert (await running.call(WIRE, body, retry=1)).body == first.body
            assert running.upstream.calls == 1


class TestWhoARetryIs:
    async def test_an_equal_body_unmarked_is_a_new_call_which_supersedes_the_old_one(self) -> None:
        async with rollout() as running:
            running.upstream.then(says(WIRE, "one"), says(WIRE, "two"))
            assert WIRE.said((await running.call(WIRE, HI)).json) == "one"
            assert WIRE.said((await running.call(WIRE, HI)).json) == "two"
            assert WIRE.said((await running.call(WIRE, HI, retry=1)).json) == "two"
            assert running.upstream.calls == len(running.trace.turns) == 2

    @pytest.mark.parametrize(
        ("lost", "retried"),
        [
            ([True, False], "0"),  # the agent has its second answer, so it asks for the first
            ([False, True], "1"),
            ([True, True], "1"),
            ([False, False], "1"),
            ([True, True, False], "1"),
        ],
    )
    async def test_it_is_the_newest_call_that_was_not_delivered_else_the_newest(
        self, lost: list[bool], retried: str
    ) -> None:
        async with rollout() as running:
            for number, away in enumerate(lost):
                if away:
                    await lose(running, WIRE, HI, str(number))
                else:
                    running.upstream.then(says(WIRE, str(number)))
                    await running.call(WIRE, HI)
            assert WIRE.said((await running.call(WIRE, HI, retry=1)).json) == retried
            assert running.upstream.calls == len(running.trace.turns) == len(lost)

    async def test_a_failure_that_was_told_is_not_asked_for_again_once_there_is_a_later_answer(self) -> None:
        async with rollout() as running:
            running.upstream.then(FAILS, says(WIRE, "hello"))
            assert (await running.call(WIRE, HI)).status == 500
            answer = await running.call(WIRE, HI)
            assert (await running.call(WIRE, HI, retry=1)).body == answer.body
            assert running.upstream.calls == 2

    async def test_a_marked_retry_of_a_call_that_never_arrived_is_a_new_one(self) -> None:
        async with rollout() as running:
            running.upstream.then(says(WIRE, "hello"))
            assert (await running.call(WIRE, HI, retry=2)).status == 200
            assert running.upstream.calls == len(running.trace.turns) == 1

    @pytest.mark.parametrize("other", [WIRE.request("ho"), {**HI, "temperature": 1}], ids=["text", "field"])
    async def test_another_body_is_another_call_however_it_is_marked(self, other: Json) -> None:
        async with rollout() as running:
            running.upstream.then(says(WIRE, "one"), says(WIRE, "two"))
            await running.call(WIRE, HI)
            assert WIRE.said((await running.call(WIRE, other, retry=1)).json) == "two"

    async def test_two_sessions_share_no_answers(self) -> None:
        async with rollout() as running:
            running.upstream.then(says(WIRE, "one"), says(WIRE, "two"))
            session, secret = running.another_session()
            await running.call(WIRE, HI)
            assert WIRE.said((await running.call(WIRE, HI, retry=1, secret=secret)).json) == "two"
            assert len(running.trace.turns) == len(session.trace.turns) == 1


class TestFailedAttempts:
    @by_wire
    @streamed_or_not
    async def test_the_retry_is_a_second_attempt_of_the_same_turn(self, wire: Wire, stream: bool) -> None:
        async with rollout() as running:
            running.upstream.then(FAILS, says(wire, "hello", stream=stream))
            body = wire.request(stream=stream)
            assert (await running.call(wire, body)).status == 500
            [turn] = running.trace.turns
            assert (turn.status, turn.winner, turn.complete) == (500, None, False)
            assert (await running.call(wire, body, retry=1)).body == sent(wire, "hello", stream=stream)
            [turn] = running.trace.turns
            failed, won = turn.attempts
            assert (failed.status, won.status) == (500, 200)
            assert "broken" in (failed.error or "")
            assert turn.winner is won
            assert won.error is None
            assert (turn.status, turn.error, turn.complete, turn.delivered) == (200, None, True, True)
            assert wire.said(turn.response) == "hello"
            assert len({attempt.call_id for attempt in turn.attempts}) == 2
            assert [reply.headers[CALL_ID_HEADER] for reply in running.upstream.replies] == [
                attempt.call_id for attempt in turn.attempts
            ]

    async def test_two_retries_at_once_make_one_attempt(self) -> None:
        async with rollout() as running:
            gate = asyncio.Event()
            running.upstream.then(FAILS, says(WIRE, "hello", gate=gate))
            await running.call(WIRE, HI)
            first = await running.begin_call(WIRE, HI, retry=1)
            second = await running.begin_call(WIRE, HI, retry=1)
            gate.set()
            one, two = await asyncio.gather(first, second)
            assert one.body == two.body
            assert running.upstream.calls == 2


class TestIdempotencyKeys:
    @by_wire
    async def test_the_same_key_and_body_is_the_same_call(self, wire: Wire) -> None:
        async with rollout() as running:
            running.upstream.then(says(wire, "hello"))
            first = await running.call(wire, wire.request(), key="k")
            assert (await running.call(wire, wire.request(), key="k")).body == first.body
            assert (await running.call(wire, wire.request(), key="k", retry=1)).body == first.body
            assert running.upstream.calls == len(running.trace.turns) == 1

    async def test_a_key_is_never_forwarded(self) -> None:
        async with rollout() as running:
            running.upstream.then(says(WIRE, "hello"))
            await running.call(WIRE, HI, key="k")
            assert "Idempotency-Key" not in running.upstream.replies[0].headers

    @by_wire
    async def test_the_same_key_with_another_body_is_a_400(self, wire: Wire) -> None:
        async with rollout() as running:
            running.upstream.then(says(wire, "hello"))
            await running.call(wire, wire.request(), key="k")
            refused = await running.call(wire, wire.request("ho"), key="k")
            assert refused.status == 400
            assert wire.in_error_shape(refused.json)
            assert "Idempotency-Key" in refused.json["error"]["message"]
            assert running.upstream.calls == len(running.trace.turns) == 1

    async def test_the_same_key_on_another_path_is_a_400(self) -> None:
        async with rollout() as running:
            chat, responses, _ = WIRES
            body = {**chat.request(), **responses.request()}
            running.upstream.then(says(chat, "hello"))
            await running.call(chat, body, key="k")
            assert (await running.call(responses, body, key="k")).status == 400

    async def test_two_rollouts_may_use_the_same_key(self) -> None:
        async with rollout() as running:
            running.upstream.then(says(WIRE, "one"), says(WIRE, "two"))
            _, secret = running.another_session()
            assert WIRE.said((await running.call(WIRE, HI, key="k")).json) == "one"
            assert WIRE.said((await running.call(WIRE, WIRE.request("ho"), key="k", secret=secret)).json) == "two"

    async def test_after_its_call_has_failed_the_same_key_runs_afresh(self) -> None:
        async with rollout() as running:
            running.upstream.then(FAILS, says(WIRE, "hello"))
            assert (await running.call(WIRE, HI, key="k")).status == 500
            assert (await running.call(WIRE, HI, key="k")).status == 200
            [turn] = running.trace.turns
            assert len(turn.attempts) == 2

    async def test_two_keys_are_two_calls_though_their_bodies_are_equal(self) -> None:
        async with rollout() as running:
            running.upstream.then(says(WIRE, "one"), says(WIRE, "two"))
            await running.call(WIRE, HI, key="a")
            # The first attempt under this key was lost on its way to us.
            assert WIRE.said((await running.call(WIRE, HI, key="b", retry=1)).json) == "two"
            assert WIRE.said((await running.call(WIRE, HI, key="a", retry=1)).json) == "one"

    async def test_a_retry_that_adds_a_key_is_known_by_it_from_then_on(self) -> None:
        async with rollout() as running:
            running.upstream.then(says(WIRE, "hello"))
            first = await running.call(WIRE, HI)
            assert (await running.call(WIRE, HI, key="k", retry=1)).body == first.body
            assert (await running.call(WIRE, HI, key="k")).body == first.body
            assert running.upstream.calls == 1

    async def test_two_calls_under_one_key_at_once_are_one_even_before_a_slow_hook_is_done(self) -> None:
        gate = asyncio.Event()

        async def slow(session: RolloutSession, request: Json) -> None:
            await gate.wait()

        async with rollout(on_request=[slow]) as running:
            running.upstream.then(says(WIRE, "hello"))
            tasks = [await running.begin_call(WIRE, HI, key="k") for _ in range(3)]
            gate.set()
            assert len({(await task).body for task in tasks}) == 1
            assert running.upstream.calls == 1

    async def test_nor_may_another_body_take_the_key_meanwhile(self) -> None:
        gate = asyncio.Event()

        async def slow(session: RolloutSession, request: Json) -> None:
            await gate.wait()

        async with rollout(on_request=[slow]) as running:
            running.upstream.then(says(WIRE, "hello"))
            first = await running.begin_call(WIRE, HI, key="k")
            other = await running.begin_call(WIRE, WIRE.request("ho"), key="k")
            gate.set()
            assert [(await task).status for task in (first, other)] == [200, 400]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class TestBounds:
    """A retry that comes too late is a new call. What is kept is told by how many reach the upstream."""

    async def answered(self, running: Rollout, *texts: str) -> None:
        for text in texts:
            running.upstream.then(says(WIRE, text))
            await running.call(WIRE, WIRE.request(text))

    async def is_kept(self, running: Rollout, text: str) -> bool:
        before = running.upstream.calls
        running.upstream.always = says(WIRE, text)
        answer = await running.call(WIRE, WIRE.request(text), retry=1)
        assert WIRE.said(answer.json) == text
        return running.upstream.calls == before

    async def test_count(self) -> None:
        async with rollout(policy=ServingPolicy(replay_count=2)) as running:
            await self.answered(running, "a", "b", "c")
            assert await self.is_kept(running, "c")
            assert await self.is_kept(running, "b")
            assert not await self.is_kept(running, "a")

    async def test_bytes(self) -> None:
        size = len(WIRE.body("x" * 1000))
        async with rollout(policy=ServingPolicy(replay_bytes=2 * size)) as running:
            await self.answered(running, "a" * 1000, "b" * 1000, "c" * 1000)
            assert await self.is_kept(running, "c" * 1000)
            assert await self.is_kept(running, "b" * 1000)
            assert not await self.is_kept(running, "a" * 1000)

    async def test_age(self) -> None:
        clock = Clock()
        async with rollout(policy=ServingPolicy(replay_age=600)) as running:
            running.session.ledger = Ledger(clock)
            await self.answered(running, "a")
            clock.now += 599
            await self.answered(running, "b")
            assert await self.is_kept(running, "a")
            clock.now += 601
            assert not await self.is_kept(running, "a")
            assert not await self.is_kept(running, "b")

    async def test_age_counts_from_the_answer_not_from_the_question(self) -> None:
        clock, gate = Clock(), asyncio.Event()
        async with rollout(policy=ServingPolicy(replay_age=600)) as running:
            running.session.ledger = Ledger(clock)
            running.upstream.then(says(WIRE, "slow", gate=gate))
            task = await running.begin_call(WIRE, WIRE.request("slow"))
            clock.now += 3600
            await self.answered(running, "quick")
            await running.leave(task)
            gate.set()
            await until(lambda: running.trace.turns[0].complete)
            await running.settled()
            assert await self.is_kept(running, "slow")

    async def test_calls_in_flight_stay_and_take_no_room_from_finished_ones(self) -> None:
        gate = asyncio.Event()
        async with rollout(policy=ServingPolicy(replay_count=1)) as running:
            running.upstream.then(*[says(WIRE, f"slow {number}", gate=gate) for number in range(3)])
            slow = [await running.begin_call(WIRE, WIRE.request(f"slow {number}")) for number in range(3)]
            await until(lambda: running.upstream.calls == 3)
            await self.answered(running, "a")
            assert await self.is_kept(running, "a")
            second = await running.begin_call(WIRE, WIRE.request("slow 0"), retry=1)
            gate.set()
            assert (await second).body == (await slow[0]).body
            await asyncio.gather(*slow)
            assert running.upstream.calls == 4

    async def test_all_is_freed_at_unregister(self) -> None:
        async with rollout() as running:
            await self.answered(running, "a", "b")
            exchanges = [weakref.ref(call.exchange) for call in running.session.ledger]
            assert len(exchanges) == 2
            running.end()
            await running.settled()
            gc.collect()
            assert [exchange() for exchange in exchanges] == [None, None]
            assert len(running.session.ledger) == 0


class TestLife:
    async def test_sixteen_calls_on_one_secret_run_at_once(self) -> None:
        async with rollout() as running:
            gate = asyncio.Event()
            running.upstream.always = says(WIRE, "hello", gate=gate)
            tasks = [asyncio.create_task(running.call(WIRE, WIRE.request(str(number)))) for number in range(16)]
            await until(lambda: running.upstream.calls == 16)
            gate.set()
            assert {answer.status for answer in await asyncio.gather(*tasks)} == {200}
            assert len(running.trace.turns) == 16

    @by_wire
    @streamed_or_not
    async def test_unregister_ends_the_upstreams_request_and_nothing_is_recorded_after(
        self, wire: Wire, stream: bool
    ) -> None:
        async with rollout() as running:
            running.upstream.then(does(Step.HANG))
            task = await running.begin_call(wire, wire.request(stream=stream))
            await until(lambda: running.upstream.calls == 1)
            running.end()
            [turn] = running.trace.turns
            [attempt] = turn.attempts
            assert attempt.error == "cancelled: the rollout is over"
            assert attempt.ended is not None
            before = running.trace.to_jsonl()
            await until(lambda: running.upstream.abandoned == 1, timeout=5)
            refused = await task
            assert refused.status == 409
            assert refused.headers["x-should-retry"] == "false"
            assert wire.in_error_shape(refused.json)
            assert running.trace.to_jsonl() == before
            late = await running.call(wire, wire.request(stream=stream), retry=1)
            assert late.status == 401
            assert wire.in_error_shape(late.json)
            assert running.trace.turns == [turn]
            assert running.trace.stragglers == 1

    @by_wire
    async def test_unregister_ends_a_stream_that_was_begun_with_an_error_event(self, wire: Wire) -> None:
        async with rollout() as running:
            running.upstream.then(streams(wire.events()[0], Step.HANG))
            async with running.open(wire, wire.request(stream=True)) as response:
                await response.content.readany()
                running.end()
                await until(lambda: running.upstream.abandoned == 1, timeout=5)
                [turn] = running.trace.turns
                assert turn.error == "cancelled: the rollout is over"
                assert not turn.complete
                assert b"the rollout is over" in await response.read()

    async def test_a_request_still_being_read_at_the_end_is_refused_for_good(self) -> None:
        hooked, gate = asyncio.Event(), asyncio.Event()

        async def slow(session: RolloutSession, request: Json) -> None:
            hooked.set()
            await gate.wait()

        async with rollout(on_request=[slow]) as running:
            task = await running.begin_call(WIRE, HI)
            await hooked.wait()
            running.end()
            gate.set()
            refused = await task
            assert (refused.status, refused.headers["x-should-retry"]) == (409, "false")
            assert running.trace.turns == []
            assert running.upstream.calls == 0

    async def test_an_answer_that_was_whole_before_the_end_is_no_cancelled_one(self) -> None:
        """The upstream keeps its connection open after the last chunk with a finish reason."""
        *events, _ = WIRE.events()
        async with rollout(policy=PATIENT.model_copy(update={"hold": 0.05})) as running:
            running.upstream.then(streams(*events, Step.HANG))
            async with running.open(WIRE, WIRE.request(stream=True)) as response:
                read = b""
                while not read.endswith(events[-1]):
                    read += await response.content.readany()
                [turn] = running.trace.turns
                assert turn.complete
                running.end()
                assert await response.read() == b""
            assert turn.complete
            assert turn.error is None
            await until(lambda: running.upstream.abandoned == 1, timeout=5)
