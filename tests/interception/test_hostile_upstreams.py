"""What an upstream, or a hook, may do to a call without harming the rollout's secrets or its neighbours."""

import asyncio
import gzip
import logging
import time
from typing import Any

import aiohttp
import pytest

from interception import InterceptionServer, RolloutLimits, RolloutSession, Upstream
from interception.sse import sse
from tests.helpers import until
from tests.interception.scripted import WIRE, WIRES, ScriptedUpstream, Wire, answers, events_of, rollout, streams

KEY = "sk-0123456789abcdef-KEY"


class TestKeysComeBackFromNowhere:
    @pytest.mark.parametrize(
        "script",
        [
            answers({"error": {"message": f"Incorrect API key provided: {KEY}"}}, status=401),
            answers(f"<html>{KEY}</html>".encode(), status=500, content_type="text/html"),
            answers(f"<html>{KEY}</html>".encode(), content_type="text/html"),
            answers({"error": {"message": f"bad key {KEY}", "code": 401}}),
            answers(b"", status=307, headers={"Location": f"http://x/?key={KEY}"}),
            streams(f'data: {{"error": {{"message": "bad key {KEY}"}}}}\n\n'.encode()),
            streams(WIRE.events()[0], f'data: {{"error": {{"message": "bad key {KEY}"}}}}\n\n'.encode()),
            streams(*WIRE.events(), headers={"X-A": "1", "X-Asked-By": f"Bearer {KEY}"}),
            answers(WIRE.body(), headers={"X-Asked-By": f"Bearer {KEY}"}),
        ],
        ids=[
            "401",
            "500 page",
            "200 page",
            "200 with an error",
            "redirect",
            "first event",
            "later event",
            "header of a stream",
            "header",
        ],
    )
    async def test_an_upstream_that_quotes_our_key_brings_it_nowhere(
        self, script: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG, "interception")
        await self.is_nowhere(WIRE, script, caplog)

    async def test_nor_does_a_response_that_failed(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG, "interception")
        wire = WIRES[1]
        error = {"code": "server_error", "message": f"bad key {KEY}"}
        failed = {"type": "response.failed", "response": {**wire.answer(), "status": "failed", "error": error}}
        await self.is_nowhere(wire, streams(*wire.events()[:3], sse(failed, named=True)), caplog)

    async def is_nowhere(self, wire: Wire, script: Any, caplog: pytest.LogCaptureFixture) -> None:
        async with ScriptedUpstream() as upstream, InterceptionServer() as server, aiohttp.ClientSession() as http:
            upstream.then(script)
            session = RolloutSession(Upstream(base_url=upstream.base_url, api_key=KEY))
            async with server.acquire(session) as slot:
                auth = {"Authorization": f"Bearer {slot.model_secret}"}
                body = wire.request(stream=True)
                async with http.post(slot.base_url + wire.path, json=body, headers=auth) as answer:
                    told = await answer.text() + str(answer.headers)
            assert KEY not in told
            assert KEY not in session.trace.to_jsonl()
            assert KEY not in caplog.text


@pytest.mark.parametrize("wire", [WIRES[0], WIRES[2]], ids=str)  # the end of a Responses stream is the whole answer
async def test_a_stream_of_its_end_alone_broke_off(wire: Wire) -> None:
    async with rollout() as running:
        running.upstream.then(streams(wire.events()[-1]))
        answer = await running.call(wire, wire.request(stream=True))
        assert wire.is_error_event(events_of(answer.body)[-1])
        assert not running.session.trace.turns[0].complete


async def test_a_hundred_thousand_events_at_once_hold_up_nobody_for_long() -> None:
    event = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
    end = b'data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    packed = gzip.compress(event * 100_000 + end)
    async with rollout() as running:
        running.upstream.then(streams(packed, headers={"Content-Encoding": "gzip"}))
        worst, done = 0.0, asyncio.Event()

        async def watch() -> None:
            nonlocal worst
            while not done.is_set():
                began = time.thread_time()  # CPU time: others may have the core meanwhile
                await asyncio.sleep(0)
                worst = max(worst, time.thread_time() - began)

        watching = asyncio.create_task(watch())
        answer = await running.call(WIRE, WIRE.request(stream=True))
        done.set()
        await watching
        assert answer.body.count(b"\n\n") == 100_002
        assert worst < 1.0


class TestHooks:
    async def test_one_that_ends_in_no_exception_fails_the_rollout_and_holds_nobody(self) -> None:
        class Odd(BaseException):
            pass

        def odd(session: RolloutSession, body: dict[str, Any]) -> None:
            raise Odd("out of line")

        for name in ("on_request", "on_response"):
            async with rollout(**{name: [odd]}) as running:
                if name == "on_response":
                    running.upstream.then(answers(WIRE.answer()))
                answer = await asyncio.wait_for(running.call(WIRE, WIRE.request()), 20)
                assert answer.status == 500
                assert "out of line" in str(running.session.error)

    async def test_what_it_waited_for_being_cancelled_is_its_own_failure(self) -> None:
        async def waits_for_a_cancelled_task(session: RolloutSession, body: dict[str, Any]) -> None:
            task = asyncio.ensure_future(asyncio.sleep(3600))
            task.cancel()
            await task

        async with rollout(on_request=[waits_for_a_cancelled_task]) as running:
            answer = await running.call(WIRE, WIRE.request())
            assert answer.status == 500
            assert running.session.error is not None

    async def test_one_that_never_returns_does_not_hold_its_caller_beyond_the_rollout(self) -> None:
        begun = asyncio.Event()

        async def never(session: RolloutSession, body: dict[str, Any]) -> None:
            begun.set()
            await asyncio.Event().wait()

        async with rollout(on_request=[never]) as running:
            asked = asyncio.create_task(running.call(WIRE, WIRE.request()))
            await until(begun.is_set)
            running.end()
            answer = await asyncio.wait_for(asked, 20)
            assert (answer.status, answer.headers["x-should-retry"]) == (409, "false")

    async def test_one_that_leaves_what_is_no_json_fails_the_rollout(self) -> None:
        def unwritable(session: RolloutSession, body: dict[str, Any]) -> None:
            body["x"] = {1, 2}

        async with rollout(on_request=[unwritable]) as running:
            assert (await running.call(WIRE, WIRE.request())).status == 500
            assert running.session.error is not None


class TestBadArguments:
    @pytest.mark.parametrize("key", ["sk-ab\ncd-0123456789", "sk-\x00-0123456789"])
    def test_a_key_no_header_can_carry_is_refused_without_being_quoted(self, key: str) -> None:
        with pytest.raises(ValueError, match="no header can carry") as refusal:
            Upstream(base_url="http://127.0.0.1:1/v1", api_key=key)  # type: ignore[arg-type]
        assert "0123456789" not in str(refusal.value)

    def test_a_line_break_at_the_end_of_a_key_file_is_forgiven(self) -> None:
        upstream = Upstream(base_url="http://127.0.0.1:1/v1", api_key=f"{KEY}\n")  # type: ignore[arg-type]
        assert upstream.api_key is not None
        assert upstream.api_key.get_secret_value() == KEY

    @pytest.mark.parametrize(
        ("given", "error"),
        [
            ({"sampling": {"stream": True}}, ValueError),
            ({"limits": {"max_turns": 1}}, TypeError),
            ({"on_request": ["x"]}, TypeError),
            ({"id": "task\n7"}, ValueError),
            ({"streaming": "lively"}, ValueError),
        ],
        ids=str,
    )
    def test_a_session_of_nonsense_is_refused_at_once(self, given: dict[str, Any], error: type[Exception]) -> None:
        with pytest.raises(error):
            RolloutSession(Upstream(base_url="http://127.0.0.1:1/v1"), **given)
        assert RolloutLimits() == RolloutSession(Upstream(base_url="http://127.0.0.1:1/v1")).limits


@pytest.mark.parametrize("count", ["0", "00", "-1", "abc", ""])
async def test_a_retry_is_marked_by_a_count_above_zero_alone(count: str) -> None:
    async with rollout() as running:
        running.upstream.then(answers(WIRE.answer()), answers(WIRE.answer()))
        for _ in range(2):
            headers = {
                "Authorization": f"Bearer {running.slot.model_secret}",
                "x-stainless-retry-count": count,
            }
            async with running.http.post(
                running.slot.base_url + WIRE.path, json=WIRE.request(), headers=headers
            ) as sent:
                assert sent.status == 200
        assert len(running.session.trace.turns) == 2
