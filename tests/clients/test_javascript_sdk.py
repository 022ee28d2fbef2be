"""The official JavaScript SDK under node, as `python -m tests.clients.install` installs it."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from interception.echo import EchoModel
from interception.sse import Json
from tests.clients import install
from tests.clients.proxy import CuttingProxy
from tests.helpers import until
from tests.interception.scripted import QUICK, WIRES, Rollout, Step, Wire, answers, does, rollout, streams

missing = install.js_sdk_missing()
pytestmark = pytest.mark.skipif(missing is not None, reason=missing or "")

SCRIPT = Path(__file__).with_name("openai_js.mjs")
CHAT, RESPONSES = WIRES[0], WIRES[1]
JOBS = {str(CHAT): "chat", str(RESPONSES): "responses"}
CUT_BODY, CUT_STREAM = "TypeError", "OpenAIError"
"""What it throws for an answer that was cut: the first is no error of the SDK's, but what node's `fetch` says."""
SOON = {"retry-after-ms": "1"}


def job(wire: Wire, text: str = "hi", *, stream: bool = False, **fields: Any) -> Json:
    return {"dialect": JOBS[str(wire)], "text": text, "stream": stream, **fields}


def good(wire: Wire, stream: bool, text: str = "hello", headers: dict[str, str] | None = None) -> Any:
    if stream:
        return streams(wire.stream(text, usage=True), headers=headers)
    return answers(wire.answer(text), headers=headers)


async def javascript(running: Rollout, *jobs: Json) -> list[Json]:
    """What came of each job."""
    process = await asyncio.create_subprocess_exec(
        *("node", str(SCRIPT), str(install.JS / "node_modules/openai"), json.dumps(jobs)),
        env={**os.environ, **running.slot.env()},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(60):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()
    return [json.loads(line) for line in out.splitlines()]


ALL = [(wire, stream) for wire in (CHAT, RESPONSES) for stream in (False, True)]


async def test_answers() -> None:
    async with rollout() as running:
        running.upstream.then(*(good(wire, stream) for wire, stream in ALL))
        came = await javascript(running, *(job(wire, stream=stream) for wire, stream in ALL))
        assert [answer.get("text") for answer in came] == ["hello"] * 4, came
        turns = running.trace.turns
        assert [(turn.dialect, turn.streamed) for turn in turns] == [(str(wire), stream) for wire, stream in ALL]
        await until(lambda: all(turn.complete and turn.delivered for turn in turns))
        assert running.upstream.calls == 4


async def test_tool_calls() -> None:
    text = '!call add {"a": 2, "b": 40}'
    schema = {"type": "object", "properties": {}}
    tools = {
        CHAT: [{"type": "function", "function": {"name": "add", "parameters": schema}}],
        RESPONSES: [{"type": "function", "name": "add", "parameters": schema, "strict": False}],
    }
    async with EchoModel() as echo, rollout(base_url=echo.base_url) as running:
        came = await javascript(running, *(job(wire, text, stream=stream, tools=tools[wire]) for wire, stream in ALL))
        assert [answer.get("calls") for answer in came] == [['{"a": 2, "b": 40}']] * 4, came
        assert len(running.trace.turns) == echo.calls == 4


async def test_faults_of_the_upstreams_are_retried_as_attempts_of_the_same_turn() -> None:
    error = {"error": {"type": "error", "message": "try again"}}
    faults = [answers(error, status=429, headers=SOON), answers(error, status=500, headers=SOON), does(Step.RESET)]
    async with rollout() as running:
        jobs = []
        for wire, stream in ALL:
            for fault in faults:
                running.upstream.then(fault, good(wire, stream))
                jobs.append(job(wire, f"call {len(jobs)}", stream=stream))
        came = await javascript(running, *jobs)
        assert [answer.get("text") for answer in came] == ["hello"] * 12, came
        assert [len(turn.attempts) for turn in running.trace.turns] == [2] * 12
        assert all(turn.winner is turn.attempts[1] for turn in running.trace.turns)
        assert running.upstream.calls == 24


async def test_a_lost_answer_is_served_again_without_another_call() -> None:
    async with rollout() as running, CuttingProxy(running.slot.base_url) as proxy:
        running.slot = running.slot._replace(base_url=proxy.url)
        for number, (wire, stream) in enumerate(ALL):
            running.upstream.then(good(wire, stream, headers={"x-answer": str(number)}))
            proxy.cut_at(b"x-answer: %d" % number)  # in its headers
        came = await javascript(running, *(job(wire, f"{wire} {stream}", stream=stream) for wire, stream in ALL))
        assert [answer.get("text") for answer in came] == ["hello"] * 4, came
        assert running.upstream.calls == len(running.trace.turns) == 4
        assert all(len(turn.attempts) == 1 for turn in running.trace.turns)


async def test_an_answer_cut_in_its_body_is_not_retried() -> None:
    # It reads bodies after its retry loop: the program sees an error that is not of the SDK's retries, and what it asks
    # next is a new call.
    async with rollout() as running, CuttingProxy(running.slot.base_url) as proxy:
        running.slot = running.slot._replace(base_url=proxy.url)
        jobs = []
        for number, (wire, stream) in enumerate(ALL):
            text = f"hel-lo-{number}"
            running.upstream.then(good(wire, stream, text), good(wire, stream))
            proxy.cut_at(text[len(text) // 2 :].encode())  # a stream's second delta
            jobs += [job(wire, f"{wire} {stream}", stream=stream)] * 2
        came = await javascript(running, *jobs)
        errors = [(answer.get("error"), answer.get("message")) for answer in came[::2]]
        assert errors == [(CUT_STREAM if stream else CUT_BODY, "terminated") for _, stream in ALL], came
        assert [answer.get("text") for answer in came[1::2]] == ["hello"] * 4, came
        assert running.upstream.calls == len(running.trace.turns) == 8


@pytest.mark.parametrize("wire", [CHAT, RESPONSES], ids=str)
async def test_row_13_a_slow_answer_behind_a_tunnel(wire: Wire) -> None:
    # Begun with white space after the grace, which it accepts; a failure after that is a cut that it does not retry.
    late = 7 * QUICK.grace
    async with rollout(policy=QUICK, tunnel=True) as running:
        failing = answers({"error": {"type": "error", "message": "no"}}, late, status=500)
        running.upstream.then(answers(wire.answer("hello"), late), failing)
        came = await javascript(running, job(wire, "slow"), job(wire, "slow and failing"))
        assert came[0].get("text") == "hello", came
        assert (came[1]["error"], came[1]["message"]) == (CUT_BODY, "terminated")
        first, second = running.trace.turns
        assert (first.complete, first.delivered) == (True, True)
        assert (second.status, second.delivered, len(second.attempts)) == (500, False, 1)
        assert running.upstream.calls == 2
