"""Whatever an agent does with its calls, and whatever its upstream does with them, the record agrees with a model."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interception import InterceptionServer, InterceptionServerConfig, RolloutSession, Slot, Trace, Upstream
from tests.helpers import until
from tests.interception.scripted import PATIENT, WIRES, Answer, Reply, Rollout, ScriptedUpstream, Wire

TEXTS = ("hi", "hi", "hi", "ho")
KEYS = (None, None, None, "k", "l")


@dataclass(eq=False)
class ModelTurn:
    """What the record should have."""

    text: str
    attempts: list[int] = field(default_factory=list)
    """The number of each attempt among the upstream's calls."""
    state: str = "in flight"
    delivered: bool = False
    readers: list[asyncio.Task[Answer]] = field(default_factory=list)


class Model:
    """The rule of who a retry is, written once more, as plainly as it can be."""

    def __init__(self) -> None:
        self.turns: list[ModelTurn] = []
        self.keys: dict[str, ModelTurn] = {}
        self.calls = 0

    def find(self, text: str, marked: bool, key: str | None) -> ModelTurn | None:
        """LookupError: the key is another body's."""
        if key in self.keys:
            if self.keys[key].text != text:
                raise LookupError
            return self.keys[key]
        if not marked:
            return None
        same = [turn for turn in self.turns if turn.text == text]
        if key is not None:
            same = [turn for turn in same if turn not in self.keys.values()]
        for turn in reversed(same):
            # The newest that nobody has an answer of. A failure is an answer once there is a later call.
            if not turn.delivered and (turn is same[-1] or turn.state != "failed"):
                return turn
        return same[-1] if same else None

    def attempt(self, turn: ModelTurn) -> None:
        turn.attempts.append(self.calls)
        turn.state = "in flight"
        self.calls += 1

    @property
    def in_flight(self) -> list[ModelTurn]:
        return [turn for turn in self.turns if turn.state == "in flight"]


@dataclass
class House:
    """One server and one upstream for all examples; each is a rollout of its own."""

    runner: asyncio.Runner
    server: InterceptionServer
    http: aiohttp.ClientSession


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()

        async def open_house() -> House:
            server = await stack.enter_async_context(InterceptionServer(InterceptionServerConfig(serving=PATIENT)))
            connector = aiohttp.TCPConnector(force_close=True)
            http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            return House(runner, server, http)

        yield runner.run(open_house())
        runner.run(stack.aclose())


class Run:
    """One example: the agent's and the upstream's deeds, and what must be true after each."""

    def __init__(self, house: House, upstream: ScriptedUpstream, wire: Wire, stream: bool) -> None:
        self.wire, self.stream = wire, stream
        self.model = Model()
        self.upstream = upstream
        upstream.always = self.script
        self.gates: list[asyncio.Event] = []
        self.well: dict[int, bool] = {}
        self.session = RolloutSession(Upstream(base_url=upstream.base_url), streaming="whole")
        slot = Slot(house.server.base_url, *house.server.register(self.session))
        self.rollout = Rollout(house.server, upstream, self.session, slot, house.http)

    async def script(self, reply: Reply) -> None:
        number = len(self.gates)
        self.gates.append(asyncio.Event())
        await self.gates[number].wait()
        if not self.well[number]:
            await reply.begin(500, "text/plain")
            await reply.take(b"failed")
        else:
            await reply.begin(200, "text/event-stream" if self.stream else "application/json")
            await reply.take(self.said(number))

    def said(self, number: int) -> bytes:
        """The answer of the upstream's call of that number: each is another one."""
        text = f"answer {number}"
        return self.wire.stream(text) if self.stream else self.wire.body(text)

    async def ask(self, text: str, marked: bool, key: str | None) -> None:
        body = self.wire.request(text, stream=self.stream)
        task = await self.rollout.begin_call(self.wire, body, retry=int(marked), key=key)
        try:
            turn = self.model.find(text, marked, key)
        except LookupError:
            assert (await task).status == 400
            return
        if turn is None:
            turn = ModelTurn(text)
            self.model.turns.append(turn)
            self.model.attempt(turn)
        elif turn.state == "failed":
            self.model.attempt(turn)
        if key is not None:
            self.model.keys[key] = turn
        if turn.state == "answered":
            answer = await task
            assert (answer.status, answer.body) == (200, self.said(turn.attempts[-1]))
            turn.delivered = True
        else:
            turn.readers.append(task)
            await until(lambda: len(self.gates) == self.model.calls, timeout=5)

    async def leave(self, which: int) -> None:
        readers = [(turn, reader) for turn in self.model.in_flight for reader in turn.readers]
        if readers:
            turn, reader = readers[which % len(readers)]
            turn.readers.remove(reader)
            await self.rollout.leave(reader)

    async def answer(self, which: int, well: bool) -> None:
        if not self.model.in_flight:
            return
        turn = self.model.in_flight[which % len(self.model.in_flight)]
        number = turn.attempts[-1]
        self.well[number] = well
        self.gates[number].set()
        turn.state = "answered" if well else "failed"
        for reader in turn.readers:
            answer = await reader
            assert answer.status == (200 if well else 500)
            if well:
                assert answer.body == self.said(number)
        turn.delivered = turn.delivered or (well and bool(turn.readers))
        turn.readers.clear()
        recorded = self.trace.turns[self.model.turns.index(turn)]
        await until(lambda: recorded.attempts[-1].ended is not None)
        await self.rollout.settled()

    @property
    def trace(self) -> Trace:
        return self.session.trace

    def check(self) -> None:
        assert self.upstream.calls == self.model.calls
        assert len(self.trace.turns) == len(self.model.turns)
        for turn, expected in zip(self.trace.turns, self.model.turns, strict=True):
            assert len(turn.attempts) == len(expected.attempts)
            assert turn.delivered == expected.delivered
            assert turn.complete == (expected.state == "answered")
            assert (turn.error is not None) == (expected.state == "failed")
            if turn.complete:
                assert self.wire.said(turn.response) == f"answer {expected.attempts[-1]}"

    async def end(self) -> None:
        in_flight = self.model.in_flight
        self.rollout.end()
        for turn in in_flight:
            turn.state = "failed"
            for reader in turn.readers:
                assert (await reader).status == 409
        self.check()
        sealed = self.trace.to_jsonl()
        await until(lambda: self.upstream.abandoned == len(in_flight))
        late = await self.rollout.call(self.wire, self.wire.request("hi"), retry=1)
        assert late.status == 401
        assert self.trace.to_jsonl().partition("\n")[2] == sealed.partition("\n")[2]
        assert len(self.session.ledger) == 0


calls = st.tuples(st.just("ask"), st.sampled_from(TEXTS), st.booleans(), st.sampled_from(KEYS))
leaves = st.tuples(st.just("leave"), st.integers(0, 3))
outcomes = st.tuples(st.just("answer"), st.integers(0, 3), st.sampled_from((True, True, False)))
deeds = st.lists(st.one_of(calls, calls, outcomes, leaves), min_size=1, max_size=14)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(deeds=deeds, wire=st.sampled_from(WIRES), stream=st.booleans())
def test_upstream_calls_turns_and_bytes_served_are_those_of_the_model(
    house: House, deeds: list[tuple[Any, ...]], wire: Wire, stream: bool
) -> None:
    async def example() -> None:
        # The bound is for a failure: a call that the model and the server disagree about may wait for ever.
        async with asyncio.timeout(20), ScriptedUpstream() as upstream:
            run = Run(house, upstream, wire, stream)
            for name, *arguments in deeds:
                await getattr(run, name)(*arguments)
                run.check()
            await run.end()

    house.runner.run(example())
