"""Which server takes a rollout: the decision by tables, and its promises by hypothesis."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interception.placement import ENOUGH, LEAST_PATIENCE, Plan, counted_on, idle_too_long, overdue, place, typical


@dataclass(frozen=True)
class ServerView:
    load: int
    serving: bool


def serving(*loads: int) -> list[ServerView]:
    return [ServerView(load, serving=True) for load in loads]


def silent(*loads: int) -> list[ServerView]:
    return [ServerView(load, serving=False) for load in loads]


@pytest.mark.parametrize(
    ("servers", "waiting", "starting", "may_start", "assign", "start"),
    [
        pytest.param([], 0, 0, None, (), 0, id="nobody waits"),
        pytest.param(serving(0, 2), 0, 0, None, (), 0, id="nobody waits, there is room"),
        pytest.param([], 1, 0, None, (), 1, id="the first rollout of all"),
        pytest.param(serving(0), 1, 0, None, (0,), 0, id="room on the only server"),
        pytest.param(serving(1, 0), 1, 0, None, (1,), 0, id="the least loaded takes it"),
        pytest.param(serving(1, 1), 1, 0, None, (0,), 0, id="the first of equals"),
        pytest.param(serving(1, 0), 3, 0, None, (1, 0, 1), 0, id="levelled as they are seated"),
        pytest.param(serving(2, 2), 1, 0, None, (), 1, id="full"),
        pytest.param(serving(2), 5, 0, None, (), 3, id="a burst starts all it needs"),
        pytest.param(serving(1), 5, 0, None, (0,), 2, id="a burst beyond the room left"),
        pytest.param(serving(2), 5, 2, None, (), 1, id="those being started are counted"),
        pytest.param(serving(2), 2, 3, None, (), 0, id="more being started than needed"),
        pytest.param(serving(1), 2, 1, None, (0,), 0, id="a freed slot is taken while a server starts"),
        pytest.param(silent(0) + serving(1), 1, 0, None, (1,), 0, id="not-serving is passed over though it is empty"),
        pytest.param(silent(0) + serving(2), 1, 0, None, (), 1, id="rather start than use one that does not serve"),
        pytest.param(silent(0), 1, 1, None, (), 0, id="rather wait for a start than use one that does not serve"),
        pytest.param(silent(0) + serving(2), 1, 0, 0, (0,), 0, id="not-serving is used where none can start"),
        pytest.param(silent(0, 1) + serving(1), 3, 0, 0, (2, 0, 0), 0, id="serving first, then least loaded"),
        pytest.param(silent(2) + serving(2), 1, 0, 0, (), 0, id="no room anywhere"),
        pytest.param([], 2, 0, 0, (), 0, id="none left"),
        pytest.param(silent(0), 1, 1, 0, (), 0, id="none can start, but one is being started"),
        pytest.param(serving(2), 9, 0, 2, (), 2, id="no more than may be started"),
        pytest.param(serving(2), 9, 3, -1, (), 0, id="more starting than may be"),
        pytest.param(silent(0) + serving(2), 5, 0, 2, (0,), 2, id="only who none of the started ones will serve"),
    ],
)
def test_the_table(
    servers: list[ServerView], waiting: int, starting: int, may_start: int | None, assign: tuple[int, ...], start: int
) -> None:
    plan = place(servers, waiting, capacity=2, starting=starting, may_start=may_start)
    assert plan == Plan(assign, start)


@pytest.mark.parametrize(
    ("servers", "waiting", "assign"),
    [
        pytest.param(serving(70, 60), 1, (1,), id="no limit"),
        pytest.param(silent(0) + serving(99), 1, (1,), id="serving though loaded"),
        pytest.param(silent(3, 2), 1, (1,), id="none serves"),
        pytest.param([], 1, (), id="none left"),
    ],
)
def test_without_a_capacity_nothing_is_started(
    servers: list[ServerView], waiting: int, assign: tuple[int, ...]
) -> None:
    assert place(servers, waiting, capacity=None) == Plan(assign, 0)


views = st.lists(st.builds(ServerView, load=st.integers(0, 6), serving=st.booleans()), max_size=6)
waiting = st.integers(0, 30)
capacities = st.integers(1, 5)
starting = st.integers(0, 4)
bounds = st.none() | st.integers(-1, 6)

# A busy machine is slow, and that is no finding.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)


def loads_after(servers: list[ServerView], plan: Plan) -> list[int]:
    taken = Counter(plan.assign)
    return [server.load + taken[index] for index, server in enumerate(servers)]


@unhurried
@given(views, waiting, capacities, starting, bounds)
def test_no_server_gets_a_rollout_above_its_capacity(
    servers: list[ServerView], waiting: int, capacity: int, starting: int, may_start: int | None
) -> None:
    plan = place(servers, waiting, capacity=capacity, starting=starting, may_start=may_start)
    after = loads_after(servers, plan)
    assert all(after[index] <= capacity for index in plan.assign)


@unhurried
@given(views, waiting, capacities, starting, bounds)
def test_no_more_are_seated_than_wait(
    servers: list[ServerView], waiting: int, capacity: int, starting: int, may_start: int | None
) -> None:
    plan = place(servers, waiting, capacity=capacity, starting=starting, may_start=may_start)
    assert len(plan.assign) <= waiting
    assert set(plan.assign) <= set(range(len(servers)))


@unhurried
@given(views, waiting, st.none() | capacities, starting, bounds)
def test_a_server_that_does_not_serve_is_used_only_when_those_that_serve_are_full(
    servers: list[ServerView], waiting: int, capacity: int | None, starting: int, may_start: int | None
) -> None:
    plan = place(servers, waiting, capacity=capacity, starting=starting, may_start=may_start)
    loads = [server.load for server in servers]
    for index in plan.assign:
        if not servers[index].serving:
            assert not any(
                server.serving and (capacity is None or loads[other] < capacity) for other, server in enumerate(servers)
            )
        loads[index] += 1


@unhurried
@given(views, waiting, capacities, starting)
def test_a_server_that_does_not_serve_is_never_used_while_one_can_be_started(
    servers: list[ServerView], waiting: int, capacity: int, starting: int
) -> None:
    plan = place(servers, waiting, capacity=capacity, starting=starting)
    assert all(servers[index].serving for index in plan.assign)


@unhurried
@given(views, waiting, capacities, starting, bounds)
def test_nobody_waits_while_a_server_that_serves_has_room(
    servers: list[ServerView], waiting: int, capacity: int, starting: int, may_start: int | None
) -> None:
    plan = place(servers, waiting, capacity=capacity, starting=starting, may_start=may_start)
    if len(plan.assign) < waiting:
        after = loads_after(servers, plan)
        assert all(after[index] >= capacity for index, server in enumerate(servers) if server.serving)


@unhurried
@given(views, waiting, capacities)
def test_where_none_can_be_started_nobody_waits_while_any_server_has_room(
    servers: list[ServerView], waiting: int, capacity: int
) -> None:
    plan = place(servers, waiting, capacity=capacity, may_start=0)
    if len(plan.assign) < waiting:
        assert all(load >= capacity for load in loads_after(servers, plan))


@unhurried
@given(views, waiting, capacities, starting)
def test_as_many_are_started_as_those_left_need_and_not_one_more(
    servers: list[ServerView], waiting: int, capacity: int, starting: int
) -> None:
    plan = place(servers, waiting, capacity=capacity, starting=starting)
    left = waiting - len(plan.assign)
    if plan.start:
        assert (starting + plan.start - 1) * capacity < left  # with one less somebody would be left over
    assert (starting + plan.start) * capacity >= left
    assert plan.start >= 0


@unhurried
@given(views, waiting, capacities, starting)
def test_nothing_is_started_where_nothing_can_be(
    servers: list[ServerView], waiting: int, capacity: int, starting: int
) -> None:
    assert place(servers, waiting, capacity=capacity, starting=starting, may_start=0).start == 0


@unhurried
@given(views, waiting, capacities, starting, st.integers(-1, 6))
def test_never_more_are_started_than_may_be_and_those_left_over_take_whatever_has_room(
    servers: list[ServerView], waiting: int, capacity: int, starting: int, may_start: int
) -> None:
    plan = place(servers, waiting, capacity=capacity, starting=starting, may_start=may_start)
    assert plan.start <= max(0, may_start)
    if waiting - len(plan.assign) > (starting + plan.start) * capacity:
        assert all(load >= capacity for load in loads_after(servers, plan))


@unhurried
@given(views, waiting, st.none() | capacities, starting, bounds)
def test_each_goes_to_the_least_loaded_of_its_kind(
    servers: list[ServerView], waiting: int, capacity: int | None, starting: int, may_start: int | None
) -> None:
    plan = place(servers, waiting, capacity=capacity, starting=starting, may_start=may_start)
    loads = [server.load for server in servers]
    for index in plan.assign:
        same_kind = [load for other, load in enumerate(loads) if servers[other].serving == servers[index].serving]
        assert loads[index] == min(same_kind)
        loads[index] += 1


@pytest.mark.parametrize(
    ("ages", "finished", "usual", "counted"),
    [
        pytest.param([], 0, 1.5, 0, id="none"),
        pytest.param([1.0, 1.4], 0, 1.5, 2, id="young"),
        pytest.param([1.6], 0, 1.5, 0, id="one that takes longer than usual"),
        pytest.param([1.6], 0, None, 1, id="one of which nobody knows how long it takes"),
        pytest.param([5.1], 0, None, 0, id="one that takes too long for anything"),
        pytest.param([9.0, 9.0], 0, 1.5, 0, id="its replacement hangs, too"),
        pytest.param([1.6] * 3, 29, 1.5, 0, id="one in ten hangs, the others are through"),
        pytest.param([1.6] * 32, 0, 1.5, 30, id="all are slow: two are tried"),
        pytest.param([1.6] * 20, 12, 1.5, 18, id="a third is through: still slow"),
        pytest.param([1.6] * 16, 16, 1.5, 8, id="half are through: a quarter of all is replaced"),
        pytest.param([9.0] * 32, 0, 1.5, 24, id="all hang: a quarter is replaced"),
        pytest.param([9.0] * 32, 8, 1.5, 16, id="all hang, and the replacements are through: twice as many"),
        pytest.param([9.0] * 32, 16, 1.5, 0, id="and twice as many"),
        pytest.param([1.6] * 3 + [0.0] * 3, 28, 1.5, 2, id="of three replacements one may hang, too"),
        pytest.param([1.6] * 3 + [0.0] * 4, 28, 1.5, 3, id="there is one to spare"),
        pytest.param([1.6] * 1 + [0.0] * 1, 28, 1.5, 1, id="a single replacement is unlikely to hang"),
        pytest.param([1.6] * 3 + [0.0] * 3, 5, 1.5, 4, id="too few are through to tell how many hang"),
    ],
)
def test_starts_that_take_too_long_are_counted_on_no_more(
    ages: list[float], finished: int, usual: float | None, counted: int
) -> None:
    assert counted_on(ages, finished=finished, usual=usual, patience=5.0) == counted


@unhurried
@given(st.lists(st.floats(0, 100), max_size=80), st.integers(0, 99), st.none() | st.floats(0.1, 50), st.floats(0.1, 50))
def test_none_is_replaced_that_is_in_time_and_few_while_few_are_through(
    ages: list[float], finished: int, usual: float | None, patience: float
) -> None:
    replaced = len(ages) - counted_on(ages, finished=finished, usual=usual, patience=patience)
    together, slow = len(ages) + finished, sum(age > min(usual or patience, patience) for age in ages)
    assert 0 <= replaced <= max(2, together / 4 + 1, 2 * finished)
    spare = max(0, replaced - slow)
    assert spare <= (len(ages) - slow) * slow / together + 1 if slow else spare == 0
    if finished < ENOUGH or 2 * finished < together:
        assert spare == 0


@unhurried
@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 99), st.integers(1, 40))
def test_there_is_an_end_to_replacing_those_that_hang(hung: int, young: int, finished: int, needed: int) -> None:
    """However many are begun for those who wait: each counts for more than it takes away from the others."""
    begun = 0
    while counted_on([9.0] * hung + [0.0] * (young + begun), finished=finished, usual=1.5, patience=5.0) < needed:
        begun += 1
    assert begun <= max(0, needed - young) + max(2, (hung + young + finished) / 4 + 1) + needed


@pytest.mark.parametrize(
    ("took", "ages", "finished", "limit"),
    [
        pytest.param([], [1.0], 0, None, id="nothing is known"),
        pytest.param([2.0], [1.0], 0, 3.0, id="half as long again as the last one"),
        pytest.param([1.0, 2.0, 9.0], [1.0], 2, 3.0, id="one that took long does not tell"),
        pytest.param([2.0] * 16, [2.1] * 9, 23, 3.0, id="many of those beside it are not through"),
        pytest.param([2.0] * 16, [2.1], 7, 3.0, id="those beside it are few"),
        pytest.param([2.0] * 16, [2.1] * 3 + [0.1] * 9, 28, 2.2, id="those beside it are through, and all alike"),
        pytest.param([1.5, 1.75, 2.0, 2.25, 2.5] * 3, [2.1], 28, 3.5, id="they are through, and differ"),
        pytest.param([0.01] * 16, [0.1], 28, LEAST_PATIENCE, id="a moment is no sign of anything"),
    ],
)
def test_how_long_a_start_should_take_at_most(
    took: list[float], ages: list[float], finished: int, limit: float | None
) -> None:
    assert overdue(typical(took) if took else None, ages, finished=finished) == (
        None if limit is None else pytest.approx(limit)
    )


@pytest.mark.parametrize(
    ("idle", "floor", "stop"),
    [
        pytest.param([], 0, [], id="none"),
        pytest.param([None, 9.0, 10.0, 11.0], 0, [3, 2], id="the longest idle first, none before its time"),
        pytest.param([None, 9.0, 10.0, 11.0], 3, [3], id="as many as the floor allows"),
        pytest.param([12.0, 11.0], 1, [0], id="the floor is kept though all are idle"),
        pytest.param([12.0], 1, [], id="the last one"),
        pytest.param([12.0], 2, [], id="fewer than the floor"),
        pytest.param([None, None], 0, [], id="in use"),
    ],
)
def test_servers_that_are_idle_too_long_are_stopped(idle: list[float | None], floor: int, stop: list[int]) -> None:
    assert idle_too_long(idle, floor=floor, timeout=10.0) == stop


@unhurried
@given(st.lists(st.none() | st.floats(0, 100), max_size=20), st.integers(0, 20), st.floats(0, 50))
def test_no_server_in_use_and_none_below_the_floor_is_stopped(
    idle: list[float | None], floor: int, timeout: float
) -> None:
    stop = idle_too_long(idle, floor=floor, timeout=timeout)
    assert len(set(stop)) == len(stop)
    assert len(idle) - len(stop) >= min(floor, len(idle))
    kept = [seconds for index, seconds in enumerate(idle) if index not in stop and seconds is not None]
    for index in stop:
        seconds = idle[index]
        assert seconds is not None
        assert seconds >= timeout
        assert all(seconds >= other for other in kept)
