"""A rush of calls begins a few in a turn of the event loop, in order; a call that comes alone does not wait."""

import asyncio

import pytest

from interception.dialects import CHAT
from interception.turnstile import EACH_TURN, Turnstile
from tests.interception.scripted import WIRE, answers, rollout


class Rush:
    """So many that come at once; `begun` in which turn of the loop each passed."""

    def __init__(self, number: int) -> None:
        self.turn = 0
        self.begun: dict[int, int] = {}
        self._turnstile = Turnstile()
        self.callers = [asyncio.create_task(self._call(name)) for name in range(number)]

    async def _call(self, name: int) -> None:
        await self._turnstile.passed()
        self.begun[name] = self.turn

    async def over(self) -> None:
        while not all(caller.done() for caller in self.callers):
            await asyncio.sleep(0)
            self.turn += 1

    def in_turn(self, turn: int) -> int:
        return [*self.begun.values()].count(turn)


async def test_in_each_turn_a_few_begin_and_nobody_is_passed_by() -> None:
    rush = Rush(10 * EACH_TURN + 3)
    await rush.over()
    assert [*rush.begun] == [*range(10 * EACH_TURN + 3)]
    assert max(map(rush.in_turn, range(rush.turn))) <= EACH_TURN
    assert rush.turn < 20


async def test_one_that_was_cancelled_takes_nobodys_place() -> None:
    rush = Rush(3 * EACH_TURN)
    await asyncio.sleep(0)
    for name in range(EACH_TURN, 2 * EACH_TURN):
        rush.callers[name].cancel()
    await rush.over()
    assert [*rush.begun] == [*range(EACH_TURN), *range(2 * EACH_TURN, 3 * EACH_TURN)]


async def test_who_comes_alone_does_not_wait() -> None:
    turnstile = Turnstile()
    for _ in range(3 * EACH_TURN):
        passing = turnstile.passed()
        try:
            passing.send(None)
        except StopIteration:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        else:
            raise AssertionError("it waits")


async def test_a_rush_of_calls_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    came, passed = 0, Turnstile.passed

    async def counted(turnstile: Turnstile) -> None:
        nonlocal came
        came += 1
        await passed(turnstile)

    monkeypatch.setattr(Turnstile, "passed", counted)
    async with rollout() as running:
        running.upstream.always = answers(WIRE.body("hello"))
        answered = await asyncio.gather(*(running.call(WIRE, WIRE.request(f"{n}")) for n in range(3 * EACH_TURN)))
        assert came == len(answered) == len(running.trace.turns) == 3 * EACH_TURN
        assert {turn.dialect for turn in running.trace.turns} == {CHAT.name}
