"""Streams are honest, and a slow answer is kept alive: what an agent sees when, and how it is told of a failure."""

import asyncio
import json
import socket
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest

from interception import InterceptionServer, RolloutSession, ServingPolicy, Upstream
from interception.dialects import CHAT
from interception.dialects.base import Phase
from interception.sse import Json, SseEvent, SseParser, sse
from tests.helpers import until
from tests.interception.scripted import (
    PATIENT,
    QUICK,
    WIRE,
    WIRES,
    Script,
    Step,
    Wire,
    answers,
    does,
    events_of,
    read_until,
    rollout,
    streams,
)
from tests.interception.sdks import SDK_ERRORS, STATUS_ERRORS, sdk

by_wire = pytest.mark.parametrize("wire", WIRES, ids=str)
streamed_or_not = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])

AT_ONCE = PATIENT.model_copy(update={"hold": 0.05})
"""No grace to speak of, but a short hold."""

SLOW = 0.5
"""Seconds of silence that outlast the grace of `QUICK`."""


def keep(session: RolloutSession, answer: Json) -> None:
    """A hook that changes nothing."""


async def nothing_for(seconds: float, task: "asyncio.Task[Any]") -> bool:
    """Whether the task is still running after that time: for what must *not* happen, there is no event to wait for."""
    done, _ = await asyncio.wait({task}, timeout=seconds)
    return not done


class TestRecordedBeforeTheAgentMayStop:
    @by_wire
    @pytest.mark.parametrize("streaming", ["live", "whole"])
    async def test_the_turn_is_in_the_trace_when_the_agent_sees_the_event(self, wire: Wire, streaming: str) -> None:
        async with rollout(streaming=streaming) as running:
            gate = asyncio.Event()
            events = wire.events(usage=True)
            running.upstream.then(streams(*events[: wire.stop], gate, *events[wire.stop :]))
            [last] = events_of(events[wire.stop])
            task = asyncio.create_task(self.stop_at(running.open(wire, wire.request(stream=True)), last))
            await until(lambda: running.upstream.calls == 1)
            [turn] = running.trace.turns
            assert not turn.complete
            gate.set()
            await task
            # No await since the agent has read the event.
            assert turn.complete
            assert wire.said(turn.response) == "hello"
            assert turn.usage is not None
            assert turn.usage.output_tokens == 2
            assert turn.attempts[0].ended is not None

    async def stop_at(self, opening: Any, last: SseEvent) -> None:
        async with opening as response:
            await read_until(response, lambda event: event.raw == last.raw)

    async def test_nothing_is_recorded_while_the_agent_can_not_have_stopped(self) -> None:
        for wire in WIRES:
            async with rollout() as running:
                events = wire.events()
                running.upstream.then(streams(*events[: wire.stop], Step.CLOSE))
                await running.call(wire, wire.request(stream=True))
                assert not running.trace.turns[0].complete


class TestTheHold:
    """Chat's usage comes after the chunk at which agents stop, so that chunk waits for it."""

    async def test_the_chunk_with_the_finish_reason_waits_for_done(self) -> None:
        async with rollout() as running:
            gate = asyncio.Event()
            *events, done = WIRE.events(usage=True)
            running.upstream.then(streams(*events, gate, done))
            async with running.open(WIRE, WIRE.request(stream=True)) as response:
                await read_until(response, lambda event: b'"llo"' in event.raw)
                rest = asyncio.create_task(response.read())
                assert await nothing_for(0.1, rest)
                assert not running.trace.turns[0].complete
                gate.set()
                assert [event.data for event in events_of(await rest)][-1] == "[DONE]"

    @pytest.mark.parametrize("leave", [[], [Step.CLOSE], [Step.RESET]], ids=["end", "close", "reset"])
    async def test_or_for_the_end_of_the_upstreams_stream(self, leave: list[Step]) -> None:
        async with rollout() as running:
            *events, _ = WIRE.events(usage=True)
            running.upstream.then(streams(*events, 0.05, *leave))
            answer = await running.call(WIRE, WIRE.request(stream=True, stream_options={"include_usage": True}))
            assert answer.body == b"".join(events)
            [turn] = running.trace.turns
            assert turn.complete
            assert turn.usage is not None

    @pytest.mark.parametrize("streaming", ["live", "whole"])
    async def test_or_for_some_silence(self, streaming: str) -> None:
        async with rollout(policy=AT_ONCE, streaming=streaming) as running:
            gate, end = asyncio.Event(), asyncio.Event()
            *events, done = WIRE.events()
            running.upstream.then(streams(*events, gate, done, end))
            async with running.open(WIRE, WIRE.request(stream=True)) as response:
                await read_until(response, lambda event: b'"finish_reason":"stop"' in event.raw)
                assert running.trace.turns[0].complete
                gate.set()
                assert [event.data for event in await read_until(response, lambda _: True)] == ["[DONE]"]
                end.set()
                assert await response.read() == b""
            await until(lambda: running.trace.turns[0].delivered)

    async def test_text_in_the_same_packet_does_not_wait(self) -> None:
        async with rollout() as running:
            *events, _ = WIRE.events()
            running.upstream.then(streams(b"".join(events), Step.HANG))
            async with running.open(WIRE, WIRE.request(stream=True)) as response:
                await read_until(response, lambda event: b'"llo"' in event.raw)
                assert not running.trace.turns[0].complete

    async def test_with_two_choices_it_is_the_last_one_to_finish_that_counts(self) -> None:
        def chunk(index: int, finish: str | None, **delta: str) -> bytes:
            choice = {"index": index, "delta": delta, "finish_reason": finish}
            return sse({"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": [choice]})

        async with rollout() as running:
            gate = asyncio.Event()
            first = [chunk(0, None, content="a"), chunk(1, None, content="b"), chunk(0, "stop")]
            running.upstream.then(streams(*first, gate, chunk(1, "length"), b"data: [DONE]\n\n"))
            async with running.open(WIRE, WIRE.request(stream=True, n=2)) as response:
                await read_until(response, lambda event: b'"stop"' in event.raw)
                assert not running.trace.turns[0].complete
                gate.set()
                await read_until(response, lambda event: b'"length"' in event.raw)
                assert running.trace.turns[0].complete


CUTS: dict[str, list[Step]] = {"closed": [Step.CLOSE], "reset": [Step.RESET], "ended": []}


class TestBrokenStreams:
    @by_wire
    @pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
    async def test_an_answer_cut_short_ends_with_the_dialects_error(self, wire: Wire, cut: list[Step]) -> None:
        async with rollout(streaming="live") as running:
            begun = wire.events()[:3]
            running.upstream.then(streams(*begun, 0.05, *cut))
            answer = await running.call(wire, wire.request(stream=True))
            assert answer.status == 200
            assert answer.body.startswith(b"".join(begun))
            [error] = events_of(answer.body.removeprefix(b"".join(begun)))
            assert wire.is_error_event(error)
            [turn] = running.trace.turns
            assert not turn.complete
            assert not turn.delivered
            assert turn.error == "the upstream broke off after 3 events"
            assert turn.status == 200
            assert turn.usage is None
            running.upstream.then(streams(*wire.events("again")))
            again = await running.call(wire, wire.request(stream=True), retry=1)
            assert again.body == wire.stream("again")
            assert running.trace.turns == [turn]
            assert wire.said(turn.response) == "again"

    @by_wire
    @pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
    async def test_the_sdk_raises(self, wire: Wire, cut: list[Step]) -> None:
        async with rollout(streaming="live") as running, sdk(running, wire) as client:
            running.upstream.then(streams(*wire.events()[:3], 0.05, *cut))
            with pytest.raises(SDK_ERRORS, match="broke off after 3 events"):
                await client.ask(stream=True)

    @by_wire
    async def test_half_an_event_does_not_spoil_the_error(self, wire: Wire) -> None:
        async with rollout(streaming="live") as running, sdk(running, wire) as client:
            one, two, three = wire.events()[:3]
            running.upstream.always = streams(one, two, three[: len(three) // 2], 0.05, Step.CLOSE)
            answer = await running.call(wire, wire.request(stream=True))
            assert wire.is_error_event(answer.events[-1])
            assert len(answer.events) == 3
            with pytest.raises(SDK_ERRORS, match="broke off after 2 events"):
                await client.ask(stream=True)

    @by_wire
    async def test_a_last_event_that_lacks_only_its_blank_line_counts(self, wire: Wire) -> None:
        for lacking in (1, 2):
            async with rollout(streaming="live") as running, sdk(running, wire) as client:
                running.upstream.then(streams(wire.stream()[:-lacking]))
                assert await client.ask(stream=True) == "hello"
                assert running.trace.turns[0].complete

    @by_wire
    async def test_a_stalled_upstream_is_told_with_the_number_of_its_events(self, wire: Wire) -> None:
        async with rollout(streaming="live", idle_timeout=0.2) as running:
            running.upstream.then(streams(*wire.events()[:3], Step.HANG))
            answer = await running.call(wire, wire.request(stream=True))
            assert wire.is_error_event(answer.events[-1])
            assert "stalled after 3 events" in (answer.events[-1].data or "")
            assert running.trace.turns[0].error == "the upstream stalled after 3 events"
            await until(lambda: running.upstream.abandoned == 1)

    async def test_there_is_no_limit_on_a_streams_whole_time(self) -> None:
        _, wire, _ = WIRES
        async with rollout(streaming="live", idle_timeout=2.0) as running:
            running.upstream.then(streams(*[step for event in wire.events() for step in (0.3, event)]))
            assert (await running.call(wire, wire.request(stream=True))).body == wire.stream()


def error_body(wire: Wire, message: str = "no") -> bytes:
    return json.dumps(wire.dialect.error(500, message)).encode()


RATE_LIMIT = {"Retry-After": "7"}
EARLY: dict[str, tuple[Script, int]] = {
    "429": (answers(b'{"error": {"message": "slow down", "type": "x"}}', status=429, headers=RATE_LIMIT), 429),
    "429 as a page": (answers(b"<p>slow", status=429, headers=RATE_LIMIT, content_type="text/html"), 429),
    "400": (answers(b'{"error": {"message": "no", "type": "x"}}', status=400), 400),
    "500": (answers(b"", status=500), 500),
    "529": (answers(b'{"type": "error", "error": {"type": "overloaded_error", "message": "no"}}', status=529), 529),
    "redirect": (answers(b"", status=302, headers={"Location": "http://elsewhere.invalid"}), 502),
    "a page with 200": (answers(b"<html>hello</html>", content_type="text/html"), 502),
    "truncated JSON": (answers(b'{"id": "x", "choices": [{"ind'), 502),
    "a list": (answers(b"[]"), 502),
    "refused": (does(), 503),
    "reset": (does(Step.RESET), 503),
    "closed": (does(Step.CLOSE), 503),
    "timeout": (does(Step.HANG), 504),
}


class TestFailuresBeforeTheFirstEvent:
    @by_wire
    @pytest.mark.parametrize("what", EARLY)
    async def test_the_agent_is_told_the_status(self, wire: Wire, what: str) -> None:
        script, status = EARLY[what]
        elsewhere: dict[str, Any] = {"base_url": f"http://127.0.0.1:{a_free_port()}/v1"} if what == "refused" else {}
        for asked in ("live", "whole", "not streamed"):
            stream = asked != "not streamed"
            async with (
                rollout(
                    idle_timeout=0.2 if what == "timeout" else 60, streaming=asked if stream else "auto", **elsewhere
                ) as running,
                sdk(running, wire) as client,
            ):
                running.upstream.always = script
                answer = await running.call(wire, wire.request(stream=stream))
                assert answer.status == status
                assert answer.headers["Content-Type"].startswith("application/json")
                # An error object of the upstream's own is relayed as it is.
                assert wire.in_error_shape(answer.json) or (what in ("429", "400", "529") and "error" in answer.json)
                assert answer.headers.get("Retry-After") == ("7" if status == 429 else None)
                [turn] = running.trace.turns
                assert not turn.complete
                assert turn.error
                with pytest.raises(STATUS_ERRORS) as caught:
                    await client.ask("ho", stream=stream)
                assert caught.value.status_code == status  # type: ignore[attr-defined]

    @by_wire
    @pytest.mark.parametrize("streaming", ["live", "whole"])
    @pytest.mark.parametrize(
        ("steps", "status"),
        [
            ([], 502),
            ([Step.CLOSE], 502),
            ([Step.RESET], 502),
            ([Step.HANG], 504),
            ([b": processing\n\n", 0.05, Step.CLOSE], 502),
            ([b": processing\n\n", 0.05, b"error"], 429),
            ([b"error"], 429),
        ],
    )
    async def test_also_of_a_stream_that_never_came_to_an_event(
        self, wire: Wire, streaming: str, steps: list[Any], status: int
    ) -> None:
        named = wire.dialect is not CHAT
        error = sse({"type": "error", "error": {"type": "rate_limit_error", "message": "no"}}, named=named)
        async with rollout(streaming=streaming, idle_timeout=0.3) as running:
            running.upstream.then(streams(*[error if step == b"error" else step for step in steps]))
            answer = await running.call(wire, wire.request(stream=True))
            assert answer.status == status
            assert wire.in_error_shape(answer.json)

    async def test_the_status_outlives_a_broken_error_body(self) -> None:
        async def script(reply: Any) -> None:
            await reply.begin(429, "application/json", {"Retry-After": "7", "Content-Length": "1000"})
            await reply.take(b'{"error": ')
            await reply.take(Step.CLOSE)

        async with rollout() as running:
            running.upstream.then(script)
            answer = await running.call(WIRE, WIRE.request())
            assert (answer.status, answer.headers["Retry-After"]) == (429, "7")
            assert WIRE.in_error_shape(answer.json)


def a_free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class TestLiveAndWhole:
    @by_wire
    @pytest.mark.parametrize(
        ("streaming", "tunnel", "hooks", "live"),
        [
            ("live", False, False, True),
            ("live", True, False, True),
            ("whole", False, False, False),
            ("whole", True, False, False),
            ("auto", False, False, True),
            ("auto", True, False, False),
            ("auto", False, True, False),
        ],
    )
    async def test_a_live_stream_begins_at_the_first_event_a_whole_one_when_the_turn_is_complete(
        self, wire: Wire, streaming: str, tunnel: bool, hooks: bool, live: bool
    ) -> None:
        async with rollout(streaming=streaming, tunnel=tunnel, on_response=[keep] * hooks) as running:
            gate = asyncio.Event()
            first, *rest = wire.events()
            running.upstream.always = streams(first, gate, *rest)
            call = await running.begin_call(wire, wire.request(stream=True))
            opening = running.open(wire, wire.request(stream=True), retry=1)
            begun = asyncio.create_task(opening.__aenter__())
            if live:
                await begun
            else:
                assert await nothing_for(0.1, begun)
            gate.set()
            async with await begun as response:
                assert await response.read() == wire.stream()
            assert (await call).body == wire.stream()
            assert running.upstream.calls == 1

    @by_wire
    async def test_a_whole_stream_that_fails_keeps_its_status_so_that_the_sdk_tries_again(self, wire: Wire) -> None:
        async with rollout(streaming="whole") as running, sdk(running, wire, max_retries=1) as client:
            running.upstream.then(streams(*wire.events()[:3], 0.05, Step.CLOSE), streams(wire.stream()))
            assert await client.ask(stream=True) == "hello"
            [turn] = running.trace.turns
            assert [attempt.error is None for attempt in turn.attempts] == [False, True]

    def test_live_streams_cannot_wait_for_response_hooks(self) -> None:
        session = RolloutSession(Upstream(base_url="http://localhost"), streaming="live", on_response=[keep])
        with pytest.raises(ValueError, match="on_response"):
            InterceptionServer().register(session)


class TestGrace:
    @by_wire
    @pytest.mark.parametrize("streaming", ["live", "whole"])
    async def test_behind_a_tunnel_a_stream_is_begun_after_the_grace_and_kept_alive(
        self, wire: Wire, streaming: str
    ) -> None:
        async with rollout(policy=QUICK, tunnel=True, streaming=streaming) as running:
            gate = asyncio.Event()
            running.upstream.then(does(gate))
            running.upstream.scripts[0] = self.gated(gate, streams(wire.stream()))
            async with running.open(wire, wire.request(stream=True)) as response:
                assert response.status == 200
                assert response.content_type == "text/event-stream"
                silence = b""
                while len(silence) < 60:
                    silence += await response.content.readany()
                assert not running.trace.turns[0].complete
                gate.set()
                read = silence + await response.read()
            assert read.endswith(wire.stream())
            lines = set(read.removesuffix(wire.stream()).splitlines())
            if wire.dialect is WIRES[2].dialect:
                assert lines == {b"event: ping", b'data: {"type":"ping"}', b""}
            else:
                assert lines == {b": k"}

    def gated(self, gate: asyncio.Event, script: Script) -> Script:
        async def wait(reply: Any) -> None:
            await gate.wait()
            await script(reply)

        return wait

    @by_wire
    async def test_never_earlier_without_a_tunnel(self, wire: Wire) -> None:
        for streaming in ("live", "whole"):
            async with rollout(policy=QUICK, streaming=streaming) as running:
                running.upstream.then(answers(error_body(wire), SLOW, status=429))
                assert (await running.call(wire, wire.request(stream=True))).status == 429

    @by_wire
    async def test_a_failure_after_it_is_an_error_event(self, wire: Wire) -> None:
        async with rollout(policy=QUICK, tunnel=True) as running, sdk(running, wire) as client:
            running.upstream.always = answers(error_body(wire, "sorry"), SLOW, status=429, headers=RATE_LIMIT)
            answer = await running.call(wire, wire.request(stream=True))
            assert answer.status == 200
            assert wire.is_error_event(answer.events[-1])
            assert "sorry" in (answer.events[-1].data or "")
            # OpenAI's helper for responses does not even take a failure that comes first, and says so.
            with pytest.raises((*SDK_ERRORS, RuntimeError), match=r"sorry|before `response\.failed`"):
                await client.ask("ho", stream=True)

    @by_wire
    @pytest.mark.parametrize("streaming", ["live", "whole"])
    async def test_the_sdks_take_keepalives_before_and_within_a_stream(self, wire: Wire, streaming: str) -> None:
        async with rollout(policy=QUICK, tunnel=True, streaming=streaming) as running, sdk(running, wire) as client:
            first, second, *rest = wire.events()
            running.upstream.then(self.late(streams(first, SLOW, second, SLOW, *rest)))
            assert await client.ask(stream=True) == "hello"
            assert running.trace.turns[0].delivered

    def late(self, script: Script) -> Script:
        async def wait(reply: Any) -> None:
            await reply.take(SLOW)
            await script(reply)

        return wait

    async def test_a_request_hook_takes_its_time_from_the_grace(self) -> None:
        async def slow(session: RolloutSession, request: Json) -> None:
            await asyncio.sleep(3)

        policy = QUICK.model_copy(update={"grace": 3.0, "keepalive_interval": 60})
        async with rollout(policy=policy, tunnel=True, on_request=[slow]) as running:
            running.upstream.then(does(Step.HANG))
            loop = asyncio.get_running_loop()
            before = loop.time()
            async with running.open(WIRE, WIRE.request(stream=True)):
                assert loop.time() - before < 5.5  # 6, were it added

    @by_wire
    async def test_an_upstream_that_streams_nothing_is_streamed_all_the_same(self, wire: Wire) -> None:
        async with rollout(policy=QUICK, tunnel=True) as running, sdk(running, wire) as client:
            running.upstream.always = answers(wire.answer("hello"), SLOW)
            assert await client.ask(stream=True) == "hello"
            raw = await running.call(wire, wire.request("ho", stream=True))
            assert b'"usage":{"prompt_tokens"' not in raw.body
            assert running.trace.turns[0].complete


class TestPadding:
    """Not streamed, slow, behind a tunnel."""

    @by_wire
    async def test_white_space_then_the_body(self, wire: Wire) -> None:
        async with rollout(policy=QUICK, tunnel=True) as running:
            gate = asyncio.Event()
            running.upstream.then(answers(wire.answer(), gate))
            async with running.open(wire, wire.request()) as response:
                assert (response.status, response.content_type) == (200, "application/json")
                assert await response.content.readexactly(3) == b"   "
                gate.set()
                rest = await response.read()
            assert rest.lstrip(b" ") == wire.body()
            assert running.trace.turns[0].delivered
            # A retry needs no padding: the answer is there.
            assert (await running.call(wire, wire.request(), retry=1)).body == wire.body()

    @by_wire
    async def test_the_sdks_take_it(self, wire: Wire) -> None:
        async with rollout(policy=QUICK, tunnel=True) as running, sdk(running, wire) as client:
            running.upstream.then(answers(wire.answer(), SLOW))
            assert await client.ask() == "hello"

    @by_wire
    async def test_never_without_a_tunnel(self, wire: Wire) -> None:
        async with rollout(policy=QUICK) as running:
            running.upstream.then(answers(error_body(wire), SLOW, status=429))
            assert (await running.call(wire, wire.request())).status == 429

    async def test_switched_off_the_status_is_kept_however_long_it_takes(self) -> None:
        policy = QUICK.model_copy(update={"keepalive_unstreamed": False})
        async with rollout(policy=policy, tunnel=True) as running:
            running.upstream.then(answers(error_body(WIRE), SLOW, status=429), answers(WIRE.answer(), SLOW))
            assert (await running.call(WIRE, WIRE.request())).status == 429
            assert (await running.call(WIRE, WIRE.request("ho"))).body == WIRE.body()

    @by_wire
    async def test_a_failure_cuts_the_connection_and_is_told_to_the_next_retry_once(self, wire: Wire) -> None:
        async with rollout(policy=QUICK, tunnel=True) as running:
            running.upstream.then(
                answers(error_body(wire, "sorry"), SLOW, status=429, headers=RATE_LIMIT), answers(wire.answer())
            )
            with pytest.raises(aiohttp.ClientPayloadError):
                await running.call(wire, wire.request())
            told = await running.call(wire, wire.request(), retry=1)
            assert (told.status, told.headers["Retry-After"]) == (429, "7")
            assert wire.in_error_shape(told.json)
            assert told.json["error"]["message"] == "sorry"
            assert running.upstream.calls == 1
            assert (await running.call(wire, wire.request(), retry=2)).json == wire.answer()
            [turn] = running.trace.turns
            assert [attempt.status for attempt in turn.attempts] == [429, 200]

    async def test_an_unmarked_call_after_the_cut_is_a_new_one(self) -> None:
        async with rollout(policy=QUICK, tunnel=True) as running:
            running.upstream.then(answers(b"", SLOW, status=500), answers(WIRE.answer()))
            with pytest.raises(aiohttp.ClientPayloadError):
                await running.call(WIRE, WIRE.request())
            assert (await running.call(WIRE, WIRE.request())).status == 200
            assert len(running.trace.turns) == 2

    @by_wire
    async def test_the_sdk_retries_the_cut_hears_the_status_waits_and_is_answered(self, wire: Wire) -> None:
        async with rollout(policy=QUICK, tunnel=True) as running, sdk(running, wire, max_retries=2) as client:
            running.upstream.then(
                answers(error_body(wire), SLOW, status=429, headers={"retry-after-ms": "20"}), answers(wire.answer())
            )
            assert await client.ask() == "hello"
            assert running.session.calls_seen == 3
            assert running.upstream.calls == 2
            assert len(running.trace.turns) == 1

    @by_wire
    async def test_the_sdk_does_not_repeat_what_cannot_succeed(self, wire: Wire) -> None:
        async with rollout(policy=QUICK, tunnel=True) as running, sdk(running, wire, max_retries=2) as client:
            running.upstream.then(answers(error_body(wire, "sorry"), SLOW, status=400))
            with pytest.raises(STATUS_ERRORS, match="sorry") as caught:
                await client.ask()
            assert caught.value.status_code == 400  # type: ignore[attr-defined]
            assert running.upstream.calls == 1


def upstreams_error(wire: Wire, kind: str) -> bytes:
    """An error within a stream, as the dialect's own service sends it."""
    if wire.dialect is CHAT:
        return sse({"error": {"message": "too busy", "type": kind, "code": None}, "extra": 1})
    if wire.dialect is WIRES[1].dialect:
        return sse({"type": "error", "error": {"message": "too busy", "type": kind}, "extra": 1}, named=True)
    return sse({"type": "error", "error": {"type": kind, "message": "too busy"}, "extra": 1}, named=True)


class TestErrorsWithinTheUpstreamsStream:
    @by_wire
    async def test_live_they_are_relayed_as_they_came(self, wire: Wire) -> None:
        async with rollout(streaming="live") as running, sdk(running, wire) as client:
            said = b"".join([*wire.events()[:3], upstreams_error(wire, "overloaded_error")])
            running.upstream.always = streams(said)
            assert (await running.call(wire, wire.request(stream=True))).body == said
            [turn] = running.trace.turns
            assert (turn.complete, turn.delivered, turn.error) == (False, False, "too busy")
            with pytest.raises(SDK_ERRORS, match="too busy"):
                await client.ask(stream=True)

    @by_wire
    @pytest.mark.parametrize(
        ("kind", "status"), [("rate_limit_error", 429), ("overloaded_error", 529), ("something_new", 502)]
    )
    async def test_whole_they_are_a_status(self, wire: Wire, kind: str, status: int) -> None:
        async with rollout(streaming="whole") as running:
            running.upstream.then(streams(*wire.events()[:3], upstreams_error(wire, kind)))
            answer = await running.call(wire, wire.request(stream=True))
            assert answer.status == status
            assert wire.in_error_shape(answer.json)
            assert answer.json["error"]["message"] == "too busy"

    @by_wire
    async def test_committed_by_the_grace_they_are_an_error_event(self, wire: Wire) -> None:
        async with rollout(policy=QUICK, tunnel=True) as running, sdk(running, wire) as client:
            first, *_ = wire.events()
            running.upstream.then(streams(first, SLOW, upstreams_error(wire, "overloaded_error")))
            with pytest.raises(SDK_ERRORS, match="too busy"):
                await client.ask(stream=True)

    @pytest.mark.parametrize(
        ("wire", "error"),
        [
            (WIRES[0], sse({"error": "too busy"})),
            (WIRES[1], sse({"type": "error", "code": "server_error", "message": "too busy"}, named=True)),
            (WIRES[1], sse({"error": {"message": "too busy"}})),
        ],
        ids=str,
    )
    async def test_in_a_shape_that_the_sdk_does_not_know_they_still_never_look_like_an_end(
        self, wire: Wire, error: bytes
    ) -> None:
        async with rollout(streaming="live") as running, sdk(running, wire) as client:
            running.upstream.then(streams(*wire.events()[:3], error))
            with pytest.raises(SDK_ERRORS):
                await client.ask(stream=True)


class TestUsage:
    """A streamed chat request is made to ask for it; the agent gets what it asked for."""

    async def test_it_is_asked_for_recorded_and_withheld(self) -> None:
        async with rollout() as running:
            running.upstream.then(streams(*WIRE.events(usage=True)))
            answer = await running.call(WIRE, WIRE.request(stream=True, stream_options={"other": 1}))
            [reply] = running.upstream.replies
            assert reply.json == WIRE.request(stream=True, stream_options={"other": 1, "include_usage": True})
            assert answer.body == WIRE.stream()
            [turn] = running.trace.turns
            assert turn.usage is not None
            assert turn.usage.total_tokens == 5
            assert turn.request == WIRE.request(stream=True, stream_options={"other": 1})
            assert (await running.call(WIRE, WIRE.request(stream=True, stream_options={"other": 1}), retry=1)).body == (
                WIRE.stream()
            )

    async def test_an_agent_that_asked_for_it_gets_it(self) -> None:
        async with rollout() as running:
            running.upstream.then(streams(*WIRE.events(usage=True)))
            body = WIRE.request(stream=True, stream_options={"include_usage": True})
            assert (await running.call(WIRE, body)).body == WIRE.stream(usage=True)
            assert running.upstream.replies[0].body == json.dumps(body).encode()

    async def test_switched_off_the_request_goes_out_as_it_came(self) -> None:
        async with rollout(policy=PATIENT.model_copy(update={"request_usage": False})) as running:
            running.upstream.then(streams(*WIRE.events(usage=True)))
            body = WIRE.request(stream=True)
            assert (await running.call(WIRE, body)).body == WIRE.stream(usage=True)
            assert running.upstream.replies[0].body == json.dumps(body).encode()

    @by_wire
    async def test_no_other_request_is_changed(self, wire: Wire) -> None:
        async with rollout() as running:
            running.upstream.always = answers(wire.answer())
            await running.call(wire, wire.request())
            if wire.dialect is not CHAT:
                running.upstream.always = streams(wire.stream())
                await running.call(wire, wire.request(stream=True))
            bodies = [wire.request(), wire.request(stream=True)]
            for reply, body in zip(running.upstream.replies, bodies, strict=False):
                assert reply.body == json.dumps(body).encode()


ODD: Mapping[str, bytes] = {
    "NaN in logprobs": (
        b'{"id":"c","model":"m","choices":[{"index":0,"finish_reason":"stop","message":{"role":"assistant",'
        b'"content":"x"},"logprobs":{"content":[{"token":"x","logprob":NaN},{"token":"y","logprob":-Infinity}]}}]}'
    ),
    "an unknown finish reason": (
        b'{"id":"c","model":"m","choices":[{"index":0,"finish_reason":"solar_flare","message":{"role":"assistant",'
        b'"content":"x"}}]}'
    ),
    "unknown fields": (
        b'{"id":"c","new":{"deep":[1.0,1e400,12345678901234567890123]},"choices":[{"index":0,"finish_reason":"stop",'
        b'"message":{"role":"assistant","content":"x","also":null}}],"usage":{"prompt_tokens":"many"}}'
    ),
    "reasoning only": (
        b'{"id":"c","choices":[{"index":0,"finish_reason":"stop","message":{"role":"assistant","content":null,'
        b'"reasoning_content":"hm"}}]}'
    ),
    "no choices": b'{"id":"c","choices":[]}',
    "nothing": b"{}",
    "wrong types": b'{"choices":"none","usage":[1],"id":{}}',
    "deep": b'{"choices":[],"x":' + b"[" * 600 + b"]" * 600 + b"}",
}


class TestOddAnswers:
    """Relayed by value, whatever we can make of them."""

    @pytest.mark.parametrize("what", ODD)
    async def test_whole(self, what: str) -> None:
        async with rollout() as running:
            running.upstream.then(answers(ODD[what]))
            answer = await running.call(WIRE, WIRE.request())
            assert (answer.status, answer.body) == (200, ODD[what])
            [turn] = running.trace.turns
            assert turn.complete
            assert (turn.usage, turn.error) == (None, None)

    @pytest.mark.parametrize("what", ODD)
    async def test_within_a_stream(self, what: str) -> None:
        async with rollout(policy=AT_ONCE) as running:
            odd = b"data: " + ODD[what].replace(b'"message"', b'"delta"') + b"\n\n"
            first, *rest = WIRE.events()
            running.upstream.then(streams(first, odd, *rest))
            answer = await running.call(WIRE, WIRE.request(stream=True))
            assert answer.body == b"".join([first, odd, *rest])
            assert running.trace.turns[0].complete

    async def test_what_is_no_utf8_and_what_is_no_json(self) -> None:
        async with rollout() as running:
            first, *rest = WIRE.events()
            odd = [b"data: \xff\xfe\n\n", b"event: other\ndata:{\n\n", b": comment\n\n", b"id: 7\ndata: 1\ndata: 2\n\n"]
            running.upstream.then(streams(first, *odd, *rest))
            assert (await running.call(WIRE, WIRE.request(stream=True))).body == b"".join([first, *odd, *rest])

    @by_wire
    async def test_a_stream_that_the_upstream_answers_with_json_is_a_stream_all_the_same(self, wire: Wire) -> None:
        # The SDKs would read plain JSON as a stream without any event: an empty answer, and no error.
        for streaming in ("live", "whole"):
            async with rollout(streaming=streaming) as running:
                running.upstream.then(answers(wire.answer()))
                answer = await running.call(wire, wire.request(stream=True))
                assert answer.headers["Content-Type"] == "text/event-stream"
                stream, parser = wire.dialect.stream(), SseParser()
                for event in [*parser.feed(answer.body), *parser.end()]:
                    stream.feed(event)
                assert stream.phase is Phase.DONE
                whole = stream.response()
                assert whole is not None
                assert wire.dialect.finish_reason(whole) == wire.dialect.finish_reason(wire.answer())


def test_the_defaults_are_those_of_the_design() -> None:
    policy = ServingPolicy()
    assert (policy.grace, policy.keepalive_interval, policy.hold) == (45, 5, 2)
    assert policy.keepalive_unstreamed
    assert policy.request_usage
