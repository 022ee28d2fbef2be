"""What a worker slot does next: each transition of the table, each figure of the policy, and what always holds."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envserver.limits import PoolPolicy
from envserver.slot import TRANSITIONS, Action, Bury, Drain, Event, GiveUp, Slot, Spawn, State, Terminate
from envserver.slots import Slots

POLICY = PoolPolicy()
KILLED = -9


class Driver:
    """The shell, in a world where time passes only when told: keeps what the machine has asked for."""

    def __init__(
        self,
        max_workers: int | None = 4,
        elastic: bool = False,
        multiplex: int = 10,
        policy: PoolPolicy = POLICY,
        boots: Callable[[Slot], bool] = lambda slot: True,
        min_workers: int = 1,
    ) -> None:
        self.slots = Slots(
            policy, max_workers=max_workers, elastic=elastic, multiplex=multiplex, min_workers=min_workers
        )
        self.now = 1_000.0
        self.in_flight = 0
        self.boots = boots
        """Whether a process can be started at all."""
        self.told: list[Action] = []
        self.starts: list[tuple[float, int, int]] = []
        """Of each worker: when, slot, generation."""

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            self.told.append(action)
            if isinstance(action, Spawn):
                self.starts.append((self.now, action.slot.number, action.slot.generation))
                report = self.slots.spawned if self.boots(action.slot) else self.slots.spawn_failed
                self.do(report(action.slot, self.now))

    def start(self) -> "Driver":
        self.do(self.slots.start(self.now))
        return self

    def up(self) -> "Driver":
        """Started, and every worker ready."""
        self.start()
        for slot in self.in_state(State.STARTING):
            self.answer(slot)
        return self

    def answer(self, slot: Slot) -> None:
        self.do(self.slots.answered(slot, self.now))

    def die(self, slot: Slot, returncode: int = KILLED) -> None:
        """Exits and is buried, at once."""
        self.do(self.slots.exited(slot, self.now, returncode))
        if slot.state is State.DYING:
            self.do(self.slots.closed(slot, self.now))

    def tick(self) -> None:
        self.do(self.slots.tick(self.now, self.in_flight))

    def run_until(self, end: float, each: Callable[["Driver"], None] = lambda driver: None) -> None:
        """Let time pass up to `end`, ticking when the machine wants it, `each` being done after every tick."""
        while (due := self.slots.due_at()) <= end:
            self.now = max(self.now, due)
            before = (self.now, self.slots.due_at())
            self.tick()
            each(self)
            assert (self.now, self.slots.due_at()) != before, "a tick that is due changes something"
        self.now = end

    def in_state(self, *states: State) -> list[Slot]:
        return [slot for slot in self.slots.map.values() if slot.state in states]

    def one(self, state: State) -> Slot:
        (slot,) = self.in_state(state)
        return slot


# The table


def slot_in(state: State) -> tuple[Driver, Slot]:
    """A pool of two, up, and one slot of it in `state`."""
    driver = Driver(max_workers=2)
    if state is State.STARTING:
        driver.start()
        slot, other = driver.in_state(State.STARTING)
        driver.answer(other)
        return driver, slot
    driver.up()
    slot = driver.in_state(State.READY)[0]
    slots = driver.slots
    match state:
        case State.SUSPECT:
            driver.do(slots.silent(slot, driver.now))
        case State.DRAINING:
            driver.do(slots.shut_down(driver.now, 30))
        case State.KILLING:
            driver.do(slots.lost(slot, driver.now))
        case State.DYING:
            driver.do(slots.exited(slot, driver.now, KILLED))
        case State.BACKOFF:
            driver.die(slot)
    assert slot.state is state
    return driver, slot


def at(driver: Driver, seconds: float) -> list[Action]:
    driver.now += seconds
    return driver.slots.tick(driver.now)


STEPS: list[tuple[State, Event, Callable[[Driver, Slot], list[Action]], State, list[type]]] = [
    (State.STARTING, Event.ANSWERED, lambda d, s: d.slots.answered(s, d.now), State.READY, []),
    (State.STARTING, Event.OVERDUE, lambda d, s: at(d, 600), State.KILLING, [Terminate]),
    (State.STARTING, Event.LOST, lambda d, s: d.slots.lost(s, d.now), State.KILLING, [Terminate]),
    (State.STARTING, Event.DRAIN, lambda d, s: d.slots.shut_down(d.now, 30), State.KILLING, [Terminate]),
    (State.STARTING, Event.EXITED, lambda d, s: d.slots.exited(s, d.now, 1), State.DYING, [Bury]),
    (State.READY, Event.ANSWERED, lambda d, s: d.slots.answered(s, d.now), State.READY, []),
    (State.READY, Event.LOST, lambda d, s: d.slots.lost(s, d.now), State.KILLING, [Terminate]),
    (State.READY, Event.DRAIN, lambda d, s: d.slots.shut_down(d.now, 30), State.DRAINING, []),
    (State.READY, Event.EXITED, lambda d, s: d.slots.exited(s, d.now, 0), State.DYING, [Bury]),
    (State.READY, Event.SILENT, lambda d, s: d.slots.silent(s, d.now), State.SUSPECT, []),
    (State.READY, Event.HUNG, lambda d, s: d.slots.hung(s, d.now, "stopped"), State.KILLING, [Terminate]),
    (State.SUSPECT, Event.ANSWERED, lambda d, s: d.slots.answered(s, d.now), State.READY, []),
    (State.SUSPECT, Event.HUNG, lambda d, s: d.slots.hung(s, d.now, "stopped"), State.KILLING, [Terminate]),
    (State.SUSPECT, Event.LOST, lambda d, s: d.slots.lost(s, d.now), State.KILLING, [Terminate]),
    (State.SUSPECT, Event.DRAIN, lambda d, s: d.slots.shut_down(d.now, 30), State.DRAINING, []),
    (State.SUSPECT, Event.EXITED, lambda d, s: d.slots.exited(s, d.now, KILLED), State.DYING, [Bury]),
    (State.DRAINING, Event.HUNG, lambda d, s: d.slots.hung(s, d.now, "stopped"), State.KILLING, [Terminate]),
    (State.DRAINING, Event.ANSWERED, lambda d, s: d.slots.answered(s, d.now), State.DRAINING, []),
    (State.DRAINING, Event.DRAIN, lambda d, s: d.slots.shut_down(d.now, 30), State.DRAINING, []),
    (State.DRAINING, Event.EMPTY, lambda d, s: d.slots.empty(s, d.now), State.KILLING, [Terminate]),
    (State.DRAINING, Event.OVERDUE, lambda d, s: at(d, 30)[:1], State.KILLING, [Terminate]),
    (State.DRAINING, Event.LOST, lambda d, s: d.slots.lost(s, d.now), State.KILLING, [Terminate]),
    (State.DRAINING, Event.EXITED, lambda d, s: d.slots.exited(s, d.now, KILLED), State.DYING, [Bury]),
    (State.KILLING, Event.ANSWERED, lambda d, s: d.slots.answered(s, d.now), State.KILLING, []),
    (State.KILLING, Event.DRAIN, lambda d, s: d.slots.shut_down(d.now, 30), State.KILLING, []),
    (State.KILLING, Event.EMPTY, lambda d, s: d.slots.empty(s, d.now), State.KILLING, []),
    (State.KILLING, Event.LOST, lambda d, s: d.slots.lost(s, d.now), State.KILLING, []),
    (State.KILLING, Event.EXITED, lambda d, s: d.slots.exited(s, d.now, -15), State.DYING, [Bury]),
    (State.DYING, Event.ANSWERED, lambda d, s: d.slots.answered(s, d.now), State.DYING, []),
    (State.DYING, Event.DRAIN, lambda d, s: d.slots.shut_down(d.now, 30), State.DYING, []),
    (State.DYING, Event.EMPTY, lambda d, s: d.slots.empty(s, d.now), State.DYING, []),
    (State.DYING, Event.LOST, lambda d, s: d.slots.lost(s, d.now), State.DYING, []),
    (State.DYING, Event.AGAIN, lambda d, s: d.slots.closed(s, d.now)[:0], State.BACKOFF, []),
    (State.BACKOFF, Event.DUE, lambda d, s: at(d, 1), State.SPAWNING, [Spawn]),
    (State.BACKOFF, Event.DRAIN, lambda d, s: d.slots.shut_down(d.now, 30), State.REMOVED, []),
]


@pytest.mark.parametrize(("state", "event", "step", "new", "told"), STEPS, ids=lambda x: getattr(x, "value", None))
def test_an_event_in_a_state_leads_to_the_next(
    state: State, event: Event, step: Callable[[Driver, Slot], list[Action]], new: State, told: list[type]
) -> None:
    driver, slot = slot_in(state)
    actions = step(driver, slot)
    assert slot.state is new
    assert [type(action) for action in actions if action.slot is slot] == told
    assert (slot.number in driver.slots.map) == (new not in (State.REMOVED, State.RETIRED))


def test_a_spawn_leads_to_starting_or_by_its_failure_to_backoff_retired_or_removed() -> None:
    slots = Slots(POLICY, max_workers=1, elastic=False, multiplex=1)
    (spawn,) = slots.start(0)
    slot = spawn.slot
    assert slot.state is State.SPAWNING
    slots.spawned(slot, 0)
    assert slot.state is State.STARTING
    slots.answered(slot, 0)
    slots.exited(slot, 0, KILLED)
    slots.closed(slot, 0)
    now = 1.0
    for _ in range(POLICY.start_tries - 1):
        assert slots.tick(now) == [Spawn(slot)]
        slots.spawn_failed(slot, now)
        assert slot.state is State.BACKOFF
        now = slot.due
    assert slots.tick(now) == [Spawn(slot)]
    slots.spawn_failed(slot, now)
    assert slot.state is State.RETIRED
    assert not slots.map


def test_what_is_spawned_while_the_pool_closes_is_ended_at_once() -> None:
    for failed in (False, True):
        slots = Slots(POLICY, max_workers=1, elastic=False, multiplex=1)
        (spawn,) = slots.start(0)
        assert slots.shut_down(0, 30) == []
        report = slots.spawn_failed if failed else slots.spawned
        assert report(spawn.slot, 0) == ([] if failed else [Terminate(spawn.slot, hard=False)])
        assert spawn.slot.state is (State.REMOVED if failed else State.KILLING)


def test_the_table_above_has_every_transition() -> None:
    shown = {(state, event, new) for state, event, _, new, _ in STEPS}
    elsewhere = {
        (State.SPAWNING, Event.SPAWNED, State.STARTING),
        (State.SPAWNING, Event.AGAIN, State.BACKOFF),
        (State.SPAWNING, Event.SPENT, State.RETIRED),
        (State.SPAWNING, Event.DONE, State.REMOVED),
        (State.DYING, Event.SPENT, State.RETIRED),
        (State.DYING, Event.DONE, State.REMOVED),
    }
    table = {(state, event, new) for state, events in TRANSITIONS.items() for event, new in events.items()}
    assert table == shown | elsewhere


def test_what_cannot_happen_in_a_state_is_an_error() -> None:
    driver, slot = slot_in(State.BACKOFF)
    with pytest.raises(RuntimeError, match="cannot be exited"):
        driver.slots.exited(slot, driver.now, KILLED)


# Starting the pool


def test_an_elastic_pool_starts_one_worker_and_a_static_one_all() -> None:
    assert len(Driver(max_workers=4, elastic=True).start().starts) == 1
    assert len(Driver(max_workers=4, elastic=False).start().starts) == 4
    with pytest.raises(ValueError, match="max_workers"):
        Slots(POLICY, max_workers=None, elastic=False, multiplex=1)


@pytest.mark.parametrize("returncode", [0, 1, 3])
def test_the_start_fails_at_once_by_an_exception_or_an_exit(returncode: int) -> None:
    driver = Driver(max_workers=2).start()
    slot = driver.in_state(State.STARTING)[0]
    assert driver.slots.exited(slot, driver.now, returncode) == [GiveUp(slot), Bury(slot)]
    driver.do(driver.slots.closed(slot, driver.now))
    assert slot.state is State.REMOVED


def test_the_start_fails_by_a_third_signal() -> None:
    driver = Driver(max_workers=1).start()
    for _ in range(2):
        driver.die(driver.one(State.STARTING))
        assert driver.one(State.BACKOFF)
        driver.run_until(driver.now + 2)
    slot = driver.one(State.STARTING)
    driver.die(slot)
    assert driver.told[-2:] == [GiveUp(slot), Bury(slot)]
    assert len(driver.starts) == 3


def test_the_start_fails_if_its_worker_cannot_be_started_or_takes_too_long() -> None:
    driver = Driver(max_workers=1, boots=lambda slot: False).start()
    assert isinstance(driver.told[-1], GiveUp)
    driver = Driver(max_workers=1).start()
    slot = driver.one(State.STARTING)
    driver.run_until(driver.now + 599)
    assert slot.state is State.STARTING
    driver.run_until(driver.now + 1)
    assert driver.told[-1] == Terminate(slot, hard=True)
    driver.die(slot)
    assert driver.told[-2:] == [GiveUp(slot), Bury(slot)]


def test_once_one_worker_was_ready_no_failure_ends_the_pool() -> None:
    driver = Driver(max_workers=3).start()
    first, *others = driver.in_state(State.STARTING)
    driver.answer(first)
    for slot in [first, *others]:
        driver.die(slot, 1)
    assert not any(isinstance(action, GiveUp) for action in driver.told)
    assert len(driver.in_state(State.BACKOFF)) == 3


# Ladders


def starts_of(driver: Driver, number: int) -> list[float]:
    return [at for at, slot, _ in driver.starts if slot == number]


def test_failed_starts_wait_longer_each_time_and_the_fifth_spends_the_slot() -> None:
    driver = Driver(max_workers=2).up()
    slot = driver.in_state(State.READY)[0]
    begin = driver.now = 1_100.0
    driver.die(slot)  # it was up for a minute: replaced at once

    def fail(driver: Driver) -> None:
        for starting in driver.in_state(State.STARTING):
            driver.die(starting, 1)

    fail(driver)
    driver.run_until(begin + 8.5, fail)
    # 0.5 s would be before the next reap tick, which is a second after the start before.
    assert starts_of(driver, 0)[1:] == [begin, begin + 1, begin + 2, begin + 4, begin + 8]
    assert slot.state is State.RETIRED
    assert driver.slots.ready == 1


def test_the_failed_starts_are_forgotten_when_a_worker_is_ready() -> None:
    driver = Driver(max_workers=1).up()
    slot = driver.one(State.READY)
    for _ in range(4 * POLICY.start_tries):
        driver.now += 100
        driver.die(slot)
        for _ in range(POLICY.start_tries - 1):
            driver.run_until(driver.now + 30)
            driver.die(slot, 1)
        driver.run_until(driver.now + 30)
        driver.answer(slot)
    assert slot.state is State.READY


def test_start_backoff_is_capped_and_spread() -> None:
    assert [POLICY.start_delay(n, 0.5) for n in (1, 2, 3, 6, 7, 99)] == [0.5, 1, 2, 16, 30, 30]
    assert POLICY.start_delay(1, 0) == pytest.approx(0.4)
    assert POLICY.start_delay(1, 1) == pytest.approx(0.6)
    assert POLICY.start_delay(99, 1) == 30
    assert [POLICY.open_delay(n) for n in (1, 2, 3, 7, 99)] == [1, 2, 4, 60, 60]
    assert [POLICY.crash_delay(n) for n in range(9)] == [0, 0, 0, 1, 2, 4, 8, 16, 30]


def test_ready_then_crash_has_a_ladder_of_its_own_that_never_ends() -> None:
    driver = Driver(max_workers=1).up()
    slot = driver.one(State.READY)

    def crash(driver: Driver) -> None:
        for starting in driver.in_state(State.STARTING):
            driver.answer(starting)
            driver.die(starting)

    driver.die(slot)
    driver.run_until(driver.now + 200, crash)
    times = starts_of(driver, 0)
    assert [b - a for a, b in itertools.pairwise(times)][:9] == [1, 1, 1, 2, 4, 8, 16, 30, 30]
    assert slot.state is State.BACKOFF
    driver.run_until(driver.now + 30, lambda driver: [driver.answer(s) for s in driver.in_state(State.STARTING)])
    driver.now += 60
    driver.die(slot)
    assert slot.state is State.STARTING, "after a minute up it is replaced at once"
    assert slot.crashes == 0


def test_a_slot_starts_at_most_one_worker_a_second() -> None:
    driver = Driver(max_workers=1).up()
    slot = driver.one(State.READY)
    driver.now += 0.25
    driver.die(slot)
    assert slot.state is State.BACKOFF
    driver.run_until(driver.now + 1)
    assert starts_of(driver, 0) == [1000, 1001]


def test_the_pool_starts_only_so_many_workers_in_ten_seconds() -> None:
    driver = Driver(max_workers=3).up()

    def crash(driver: Driver) -> None:
        for slot in driver.in_state(State.STARTING):
            driver.answer(slot)
            driver.now += 60  # each time up long enough for no ladder
            driver.die(slot)
            driver.now -= 60

    for slot in driver.in_state(State.READY):
        driver.now += 60
        driver.die(slot)
        driver.now -= 60
    driver.run_until(driver.now + 100, crash)
    times = [at for at, _, _ in driver.starts]
    most = max(sum(begin <= at < begin + 10 for at in times) for begin in times)
    assert most <= 6 + 6  # a full bucket, and what flows in meanwhile
    assert len(times) <= 6 + 6 * 10 + 1


# Places


def spent(driver: Driver) -> None:
    """Every slot has used up its tries."""
    for slot in driver.in_state(State.READY):
        driver.die(slot)

    def fail(driver: Driver) -> None:
        for slot in driver.in_state(State.STARTING):
            driver.die(slot, 1)

    fail(driver)
    driver.run_until(driver.now + 200, fail)
    assert driver.slots.ready == 0


@pytest.mark.parametrize(("max_workers", "elastic"), [(4, False), (4, True), (None, True)])
def test_with_all_slots_spent_full_capacity_is_back_a_minute_after_boot_is_repaired(
    max_workers: int | None, elastic: bool
) -> None:
    driver = Driver(max_workers=max_workers, elastic=elastic).up()
    while driver.slots.ready < 4:
        driver.in_flight = 39
        driver.tick()
        for slot in driver.in_state(State.STARTING):
            driver.answer(slot)
        driver.now += 10
    driver.in_flight = 0
    spent(driver)
    assert driver.slots.capacity == 0
    assert driver.slots.starting == 0
    repaired = driver.now

    def boot(driver: Driver) -> None:
        for slot in driver.in_state(State.STARTING):
            driver.answer(slot)

    driver.run_until(repaired + 60 + 1, boot)
    assert driver.slots.ready == driver.slots.target >= 4
    assert driver.slots.capacity == driver.slots.target * 10


def test_places_that_fail_together_count_as_one_failed_opening() -> None:
    driver = Driver(max_workers=4, policy=PoolPolicy(spawn_floor=1_000)).up()
    spent(driver)
    gaps = sorted({at for at, _, _ in driver.starts})
    assert [b - a for a, b in itertools.pairwise(gaps)][5:10] == [1, 2, 4, 8, 16]


def test_a_reopened_place_has_one_try_until_it_is_ready_and_then_all() -> None:
    driver = Driver(max_workers=1).up()
    spent(driver)
    assert not driver.in_state(State.STARTING)
    driver.run_until(driver.now + 60)
    slot = driver.one(State.STARTING)
    driver.die(slot, 1)
    assert slot.state is State.RETIRED
    driver.run_until(driver.now + 60)
    slot = driver.one(State.STARTING)
    driver.answer(slot)
    driver.die(slot)
    driver.run_until(driver.now + 5)
    driver.die(slot, 1)
    assert slot.state is State.BACKOFF


def test_the_openings_of_places_are_1_2_4_and_at_most_60_seconds_apart() -> None:
    driver = Driver(max_workers=1).up()
    driver.die(driver.one(State.READY))

    def fail(driver: Driver) -> None:
        for slot in driver.in_state(State.STARTING):
            driver.die(slot, 1)

    driver.run_until(driver.now + 330, fail)
    times = [at for at, _, _ in driver.starts]
    # start, its replacement, four more tries; then the openings
    assert [b - a for a, b in itertools.pairwise(times)][5:14] == [1, 2, 4, 8, 16, 32, 60, 60, 60]


# Growth


def test_growth_begins_at_nine_tenths_of_what_is_ready() -> None:
    driver = Driver(max_workers=4, elastic=True, multiplex=10).up()
    for driver.in_flight in range(9):
        assert driver.in_flight < driver.slots.scale_up_at
        driver.tick()
    assert len(driver.starts) == 1
    driver.in_flight = 9
    assert driver.slots.scale_up_at <= driver.in_flight
    driver.tick()
    assert len(driver.starts) == 2
    for driver.in_flight in range(9, 18):
        driver.tick()
    assert len(driver.starts) == 2, "who starts is counted on, but is no capacity"
    assert driver.slots.capacity == 10


def test_a_burst_starts_all_the_workers_it_needs_side_by_side_and_no_more_than_allowed() -> None:
    driver = Driver(max_workers=4, elastic=True, multiplex=10).up()
    driver.in_flight = 1_000
    driver.tick()
    assert driver.slots.starting == 3
    assert driver.slots.scale_up_at == math.inf
    driver = Driver(max_workers=None, elastic=True, multiplex=10).up()
    driver.in_flight = 25
    driver.tick()
    assert driver.slots.starting == 2


def test_a_static_pool_does_not_grow() -> None:
    driver = Driver(max_workers=2, elastic=False, multiplex=10).up()
    driver.in_flight = 1_000
    assert driver.slots.scale_up_at == math.inf
    driver.tick()
    assert len(driver.starts) == 2


def test_a_failed_growth_waits_on_its_own_timer_and_blocks_nothing_else() -> None:
    driver = Driver(max_workers=4, elastic=True, multiplex=10).up()
    first = driver.one(State.READY)
    driver.in_flight = 9
    driver.tick()
    driver.die(driver.one(State.STARTING), 1)
    assert driver.slots.scale_up_at == math.inf
    driver.tick()
    assert driver.slots.starting == 0
    driver.now += 0.9
    driver.die(first)
    driver.run_until(driver.now + 0.1)
    assert first.state is State.STARTING, "a place of the pool's own does not wait for it"
    driver.answer(first)
    driver.run_until(driver.now + 0.1)
    assert driver.slots.starting == 1
    driver.answer(driver.one(State.STARTING))
    driver.in_flight = 18
    driver.tick()
    assert driver.slots.starting == 1, "the timer is reset by one that is ready"


# Silence


def test_a_suspect_worker_is_no_capacity_but_keeps_its_place_and_is_not_replaced() -> None:
    for elastic in (False, True):
        driver = Driver(max_workers=4, elastic=elastic, multiplex=10).up()
        driver.in_flight = 9
        driver.tick()
        for slot in driver.in_state(State.STARTING):
            driver.answer(slot)
        ready = driver.in_state(State.READY)
        starts = len(driver.starts)
        driver.do(driver.slots.silent(ready[0], driver.now))
        assert driver.slots.capacity == 10 * (len(ready) - 1)
        driver.run_until(driver.now + 600)
        assert len(driver.starts) == starts
        driver.answer(ready[0])
        assert driver.slots.capacity == 10 * len(ready)


def test_an_elastic_pool_of_which_no_worker_answers_starts_one_more_up_to_its_limit() -> None:
    driver = Driver(max_workers=3, elastic=True, multiplex=10).up()
    for workers in (2, 3, 3):
        for slot in driver.in_state(State.READY):
            driver.do(driver.slots.silent(slot, driver.now))
        driver.tick()
        assert len(driver.starts) == workers
        for slot in driver.in_state(State.STARTING):
            driver.answer(slot)
    assert len(driver.in_state(State.SUSPECT)) == 3
    driver = Driver(max_workers=2, elastic=False).up()
    for slot in driver.in_state(State.READY):
        driver.do(driver.slots.silent(slot, driver.now))
    driver.tick()
    assert len(driver.starts) == 2, "a static one has all it may have"


def test_a_hung_worker_gets_sigkill_and_its_slot_says_why_until_it_is_buried() -> None:
    driver = Driver(max_workers=1).up()
    slot = driver.one(State.READY)
    driver.do(driver.slots.hung(slot, driver.now, "it was stopped"))
    assert driver.told[-1] == Terminate(slot, hard=True)
    assert driver.slots.hung(slot, driver.now, "again") == [], "it is being killed"
    driver.do(driver.slots.exited(slot, driver.now, KILLED))
    assert slot.hung == "it was stopped"
    assert slot.put_down, "by us: what it ran has not killed it"
    driver.do(driver.slots.closed(slot, driver.now))
    assert slot.hung == ""
    driver.run_until(driver.now + 1)
    assert slot.state is State.STARTING, "it is replaced like any that died"


def test_silence_means_nothing_before_a_worker_is_ready_and_while_it_ends() -> None:
    for state in (State.STARTING, State.DRAINING, State.KILLING, State.DYING, State.BACKOFF):
        driver, slot = slot_in(state)
        assert driver.slots.silent(slot, driver.now) == []
        assert slot.state is state


# Ends


def test_a_drained_pool_ends_each_worker_when_it_is_empty_and_starts_none() -> None:
    driver = Driver(max_workers=3).up()
    empty, busy, gone = driver.in_state(State.READY)
    driver.die(gone)
    driver.do(driver.slots.shut_down(driver.now, 30))
    assert gone.state is State.REMOVED
    driver.do(driver.slots.empty(empty, driver.now))
    assert driver.told[-1] == Terminate(empty, hard=False)
    driver.die(empty, 0)
    driver.run_until(driver.now + 29)
    assert busy.state is State.DRAINING
    driver.run_until(driver.now + 1)
    assert driver.told[-1] == Terminate(busy, hard=False)
    driver.run_until(driver.now + 10)
    assert driver.told[-1] == Terminate(busy, hard=True)
    driver.die(busy)
    assert not driver.slots.map
    assert driver.slots.due_at() == math.inf
    assert len(driver.starts) == 3


def test_however_old_a_worker_is_it_has_all_of_the_time_to_end_its_runs() -> None:
    for suspect in (False, True):
        driver = Driver(max_workers=1).up()
        slot = driver.one(State.READY)
        driver.run_until(driver.now + 3 * POLICY.start_timeout)
        if suspect:
            driver.do(driver.slots.silent(slot, driver.now))
        driver.do(driver.slots.shut_down(driver.now, 30))
        driver.run_until(driver.now + 29)
        assert slot.state is State.DRAINING


def test_in_a_hurry_nothing_is_waited_for() -> None:
    driver = Driver(max_workers=2).up()
    driver.do(driver.slots.shut_down(driver.now, 30))
    driver.do(driver.slots.hurry(driver.now))
    assert len(driver.in_state(State.KILLING)) == 2


# What always holds


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["wait", "answer", "die", "bury", "lose", "load", "tick", "silent", "hung"]),
        st.integers(0, 7),
        st.sampled_from([0, 1, -9, -11]),
    ),
    max_size=120,
)


@settings(max_examples=300)
@given(
    events=EVENTS,
    max_workers=st.one_of(st.none(), st.integers(1, 5)),
    elastic=st.booleans(),
    broken=st.sets(st.integers(1, 60)),
)
def test_whatever_happens_to_it_a_pool_comes_back_and_keeps_its_limits(
    events: list[tuple[str, int, int]], max_workers: int | None, elastic: bool, broken: set[int]
) -> None:
    if max_workers is None:
        elastic = True
    driver = Driver(max_workers, elastic, boots=lambda slot: slot.generation not in broken)
    slots = driver.slots
    driver.boots = lambda slot: True
    driver.up()
    driver.boots = lambda slot: slot.generation not in broken
    dying: list[Slot] = []

    def check() -> None:
        assert all(slot.number == number for number, slot in slots.map.items())
        assert all(slot.failures < slot.tries for slot in slots.map.values()), "no slot starts without budget"
        if max_workers is not None:
            assert len(slots.map) <= max_workers
        assert slots.capacity == 10 * len(driver.in_state(State.READY))
        assert slots.ready + slots.starting <= len(slots.map)
        generations = [generation for _, _, generation in driver.starts]
        assert len(set(generations)) == len(generations)
        for number in {slot for _, slot, _ in driver.starts}:
            times = starts_of(driver, number)
            # A fresh slot may take the number of one that is gone, and then starts by the timer of openings.
            assert all(b - a >= 0.999 for a, b in itertools.pairwise(times))

    for what, which, returncode in events:
        living = driver.in_state(State.STARTING, State.READY, State.SUSPECT, State.KILLING)
        slot = living[which % len(living)] if living else None
        match what:
            case "wait":
                driver.run_until(driver.now + which**3 / 5)
            case "tick":
                driver.tick()
            case "load":
                driver.in_flight = which * 7
                driver.tick()
            case "answer" if slot:
                driver.answer(slot)
            case "lose" if slot:
                driver.do(slots.lost(slot, driver.now))
            case "silent" if slot:
                driver.do(slots.silent(slot, driver.now))
            case "hung" if slot:
                driver.do(slots.hung(slot, driver.now, "stopped"))
            case "die" if slot:
                driver.do(slots.exited(slot, driver.now, returncode))
                dying.append(slot)
            case "bury" if dying:
                driver.do(slots.closed(dying.pop(), driver.now))
        check()

    # Spawning works from now on: all that there was is there again, in a minute and one start.
    driver.boots = lambda slot: True
    driver.in_flight = 0
    target = slots.target

    def live(driver: Driver) -> None:
        for slot in driver.in_state(State.DYING):
            driver.do(slots.closed(slot, driver.now))
        for slot in driver.in_state(State.KILLING):
            driver.die(slot)
        for slot in driver.in_state(State.STARTING, State.SUSPECT):
            driver.answer(slot)

    driver.tick()
    live(driver)
    driver.run_until(driver.now + 61, live)
    check()
    assert slots.ready >= slots.target
    if not elastic:
        assert slots.target == target
    if slots.ready <= slots.floor:
        assert slots.due_at() == math.inf

    driver.do(slots.shut_down(driver.now, 30))
    driver.run_until(driver.now + 41, lambda driver: [driver.die(slot) for slot in driver.in_state(State.KILLING)])
    assert not slots.map


# Fewer workers


def grown(workers: int = 3, **options: Any) -> Driver:
    """An elastic pool of at most 4 that has grown to so many workers, which have nothing to do any more."""
    driver = Driver(max_workers=4, elastic=True, **options).up()
    while driver.slots.ready < workers:
        driver.in_flight = 10 * driver.slots.ready
        driver.tick()
        for slot in driver.in_state(State.STARTING):
            driver.answer(slot)
    driver.in_flight = 0
    return driver


def live(driver: Driver) -> None:
    """What drains is empty, what is told to end ends, what starts is ready."""
    for slot in driver.in_state(State.DRAINING):
        driver.do(driver.slots.empty(slot, driver.now))
    for slot in driver.in_state(State.KILLING):
        driver.die(slot, 0)
    for slot in driver.in_state(State.STARTING):
        driver.answer(slot)


def test_a_pool_with_too_many_workers_ends_the_newest_idle_one_a_minute_down_to_its_floor() -> None:
    driver = grown()
    oldest = driver.in_state(State.READY)[0]
    driver.run_until(driver.now + 299, live)
    assert driver.slots.ready == 3, "none has been idle for long enough"
    driver.run_until(driver.now + 2, live)
    assert sorted(driver.slots.map) == [0, 1]
    driver.run_until(driver.now + 58, live)
    assert driver.slots.ready == 2
    driver.run_until(driver.now + 3600, live)
    assert driver.in_state(State.READY) == [oldest]
    assert driver.slots.target == 1
    assert driver.slots.due_at() == math.inf, "there is nothing more to look at"


def test_only_a_worker_that_is_idle_is_ended() -> None:
    driver = grown()
    first, second, third = driver.in_state(State.READY)
    driver.in_flight = 2
    first.idle_since = third.idle_since = math.inf
    driver.run_until(driver.now + 3600, live)
    assert driver.in_state(State.READY) == [first, third]
    assert second.state is State.REMOVED


def test_load_that_comes_back_in_between_begins_the_minute_anew() -> None:
    driver = grown(2)
    driver.run_until(driver.now + 299, live)
    driver.in_flight = 10  # half of what there is
    driver.run_until(driver.now + 2, live)
    driver.in_flight = 9
    driver.run_until(driver.now + 59, live)
    assert driver.slots.ready == 2
    driver.run_until(driver.now + 3600, live)
    assert driver.slots.ready == 2, "with one fewer another would be started at once"
    driver.in_flight = 8
    driver.run_until(driver.now + 2, live)
    assert driver.slots.ready == 1


def test_a_floor_is_what_a_pool_starts_with_and_a_static_one_never_shrinks() -> None:
    driver = Driver(max_workers=4, elastic=True, min_workers=2).up()
    assert driver.slots.ready == 2
    driver = grown(4, min_workers=2)
    driver.run_until(driver.now + 7200, live)
    assert driver.slots.ready == 2
    driver = Driver(max_workers=3).up()
    driver.run_until(driver.now + 7200, live)
    assert driver.slots.ready == 3


def test_a_pool_that_has_shrunk_grows_again_and_is_not_filled_up_without_demand() -> None:
    driver = grown()
    driver.run_until(driver.now + 3600, live)
    driver.die(driver.one(State.READY))
    live(driver)
    driver.run_until(driver.now + 60, live)
    assert driver.slots.ready == 1
    driver.in_flight = 9
    driver.tick()
    live(driver)
    assert driver.slots.ready == 2


# Replacing workers that are well


AGED = PoolPolicy(max_worker_age=1000.0)


def test_an_old_worker_is_replaced_by_one_that_is_ready_before_it_is_drained() -> None:
    driver = Driver(max_workers=2, policy=AGED).up()
    first, second = driver.in_state(State.READY)
    driver.run_until(driver.now + 999)
    assert len(driver.starts) == 2
    driver.run_until(driver.now + 1)
    new = driver.one(State.STARTING)
    assert driver.in_state(State.READY) == [first, second]
    driver.run_until(driver.now + 100)
    assert len(driver.starts) == 3, "one at a time"
    driver.answer(new)
    assert driver.told[-1] == Drain(first)
    assert driver.in_state(State.READY) == [second, new]
    driver.run_until(driver.now + 5000)
    assert first.state is State.DRAINING, "for as long as its last run takes"
    assert len(driver.starts) == 3
    driver.do(driver.slots.empty(first, driver.now))
    assert driver.told[-1] == Terminate(first, hard=False)
    driver.die(first, 0)
    assert driver.one(State.STARTING).replaces is second
    live(driver)
    live(driver)
    assert second.state is State.REMOVED
    assert driver.slots.ready == driver.slots.target == 2


def test_a_worker_is_replaced_for_its_memory_but_not_as_soon_as_it_is_there() -> None:
    driver = Driver(max_workers=2, policy=PoolPolicy(max_worker_rss=1000)).up()
    first, second = driver.in_state(State.READY)
    first.rss, second.rss = 1000, 1001
    driver.run_until(driver.now + 59)
    driver.tick()
    assert len(driver.starts) == 2
    driver.run_until(driver.now + 1)
    driver.tick()
    assert driver.one(State.STARTING).replaces is second


def test_a_replacement_that_does_not_start_leaves_the_old_one_serving_and_is_tried_again_later() -> None:
    driver = Driver(max_workers=1, policy=AGED).up()
    old = driver.one(State.READY)

    def fail(driver: Driver) -> None:
        for slot in driver.in_state(State.STARTING):
            driver.die(slot, 1)

    begin = driver.now
    driver.run_until(begin + 1000 + 200, fail)
    assert driver.in_state(State.READY) == [old]
    assert driver.slots.capacity == 10
    tries = [at - begin - 1000 for at, _, _ in driver.starts[1:]]
    assert [b - a for a, b in itertools.pairwise(tries)] == [1, 2, 4, 8, 16, 32, 60, 60]
    driver.run_until(driver.now + 60, live)
    live(driver)
    live(driver)
    assert old.state is State.REMOVED
    assert driver.slots.ready == 1


def test_an_old_worker_that_dies_meanwhile_has_been_replaced_already() -> None:
    driver = Driver(max_workers=1, policy=AGED).up()
    old = driver.one(State.READY)
    driver.run_until(driver.now + 1000)
    new = driver.one(State.STARTING)
    driver.die(old)
    assert old.state is State.REMOVED
    driver.run_until(driver.now + 60)
    assert [*driver.slots.map.values()] == [new]
    driver.answer(new)
    driver.die(new)
    driver.run_until(driver.now + 1)
    assert new.state is State.STARTING, "it is a slot like any"


# Workers for one run


def test_a_lone_worker_is_beside_all_others_and_serves_nobody_else() -> None:
    driver = Driver(max_workers=2).up()
    driver.slots.lone_wanted = 1
    driver.tick()
    lone = driver.one(State.STARTING)
    assert lone.lone
    assert driver.slots.starting == 0
    driver.answer(lone)
    assert (driver.slots.ready, driver.slots.capacity, driver.slots.own) == (2, 20, 2)
    driver.tick()
    assert len(driver.starts) == 3
    driver.slots.lone_wanted = 0
    driver.do(driver.slots.retire(lone, driver.now))
    live(driver)
    assert lone.state is State.REMOVED
    assert len(driver.starts) == 3


def test_a_lone_worker_that_dies_is_not_replaced_unless_another_is_wanted() -> None:
    driver = Driver(max_workers=1).up()
    driver.slots.lone_wanted = 1
    driver.tick()
    lone = driver.one(State.STARTING)
    driver.answer(lone)
    driver.die(lone)
    assert lone.state is State.REMOVED
    assert driver.one(State.STARTING).lone
    driver.slots.lone_wanted = 0
    live(driver)
    driver.die(driver.slots.map[1])
    driver.run_until(driver.now + 60)
    assert len(driver.slots.map) == 1


def test_a_lone_worker_that_does_not_start_is_tried_again_on_a_timer_of_its_own() -> None:
    driver = Driver(max_workers=1).up()
    driver.slots.lone_wanted = 1
    driver.tick()
    for failures, wait in ((1, 1), (2, 2), (3, 4)):
        driver.die(driver.one(State.STARTING), 1)
        assert driver.slots.lone_failures == failures
        driver.run_until(driver.now + wait - 0.01)
        assert not driver.in_state(State.STARTING)
        driver.run_until(driver.now + 0.02)
    driver.answer(driver.one(State.STARTING))
    assert driver.slots.lone_failures == 0


def test_a_death_is_held_against_nobody_if_we_wanted_it_and_else_it_is() -> None:
    driver = Driver(max_workers=4, policy=AGED).up()
    died, lost, drained, replaced = driver.in_state(State.READY)
    driver.do(driver.slots.lost(lost, driver.now))
    driver.do(driver.slots.retire(drained, driver.now))
    driver.do(driver.slots.exited(drained, driver.now, KILLED))
    driver.do(driver.slots.exited(died, driver.now, KILLED))
    assert [slot.put_down for slot in (died, lost, drained)] == [False] * 3, "a drain alone ends no worker"
    driver.do(driver.slots.retire(replaced, driver.now))
    driver.do(driver.slots.empty(replaced, driver.now))
    assert replaced.put_down


# What always holds of both


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(
            ["wait", "wait", "wait", "answer", "die", "bury", "end", "busy", "idle", "load", "rss", "lone", "finish"]
        ),
        st.integers(0, 7),
    ),
    max_size=150,
)


@settings(max_examples=200)
@given(changes=CHANGES, floor=st.integers(1, 3), elastic=st.booleans(), age=st.one_of(st.none(), st.just(500.0)))
def test_no_worker_is_ended_that_runs_something_and_never_too_many_are(
    changes: list[tuple[str, int]], floor: int, elastic: bool, age: float | None
) -> None:
    policy = PoolPolicy(max_worker_age=age, max_worker_rss=1000)
    driver = Driver(4, elastic, policy=policy, min_workers=floor).up()
    slots = driver.slots
    busy: set[Slot] = set()
    unplanned = 0
    """Ends that were nobody's wish, and not made up for yet."""

    def check(told: list[Action]) -> None:
        for action in told:
            if isinstance(action, Terminate):
                assert action.slot not in busy, "a running request is lost"
        assert slots.ready + unplanned >= slots.floor
        assert slots.own <= 4
        assert len([slot for slot in slots.map.values() if slot.beside and not slot.lone]) <= 1
        assert sum(slot.lone and not slot.planned for slot in slots.map.values()) <= 1

    def each(driver: Driver) -> None:
        for slot in busy:
            slot.idle_since = math.inf

    for what, which in changes:
        before = len(driver.told)
        ready = slots.ready
        places = driver.in_state(State.READY, State.DRAINING)
        slot = places[which % len(places)] if places else None
        match what:
            case "wait":
                each(driver)
                driver.run_until(driver.now + which**3, each)
                # Whatever time brings by itself takes at most one worker a minute, and none below the floor.
                assert slots.ready >= min(ready, slots.floor)
            case "answer":
                for starting in driver.in_state(State.STARTING)[:1]:
                    driver.answer(starting)
                    assert slots.ready >= ready, "who takes over is there before the other leaves"
            case "die" if slot:
                busy.discard(slot)
                unplanned += 1
                driver.do(slots.exited(slot, driver.now, KILLED))
            case "bury":
                for dying in driver.in_state(State.DYING):
                    driver.do(slots.closed(dying, driver.now))
            case "end":
                for killing in driver.in_state(State.KILLING):
                    driver.die(killing, 0)
            case "busy" if slot and slot.state is State.READY:
                busy.add(slot)
                slot.idle_since = math.inf
            case "idle" if slot:
                busy.discard(slot)
                slot.idle_since = driver.now
                driver.do(slots.empty(slot, driver.now))
            case "load":
                driver.in_flight = which * 5
                each(driver)
                driver.tick()
            case "rss" if slot:
                slot.rss = 2000
            case "lone":
                slots.lone_wanted = which % 2
                driver.tick()
            case "finish":
                for lone in [slot for slot in driver.in_state(State.READY) if slot.lone and slot not in busy]:
                    driver.do(slots.retire(lone, driver.now))
        for action in driver.told[before:]:
            if isinstance(action, Drain) and action.slot not in busy:
                driver.do(slots.empty(action.slot, driver.now))
        check(driver.told[before:])
