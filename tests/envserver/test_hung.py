"""Which workers are hung: what the evidence means, each figure of the policy, and what always holds."""

import dataclasses
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envserver.errors import EnvServerError
from envserver.hung import Action, Back, Kill, Kind, Look, Probe, Report, Seen, Suspect, Vigil, cpu_share, kind_of
from envserver.limits import PoolPolicy

POLICY = PoolPolicy()
KILLING = dataclasses.replace(POLICY, kill_blocked_after=60.0)


class World:
    """A broker that ticks every second and one worker, 7, whose processes are as `state` and `cpu_per_second` say."""

    def __init__(self, policy: PoolPolicy = POLICY, start: float = 1_000.0) -> None:
        self.policy = policy
        self.vigil = Vigil(policy)
        self.now = self.start = start
        self.state = "S"
        self.cpu_per_second = 0.0
        self.answers = False
        """Whether the worker's loop goes round."""
        self.stacks = True
        self.visible = True
        self.told: list[tuple[float, Action]] = []
        """Since its start: when, and what."""
        self._cpu = 0.0
        self.vigil.add(7, start)

    def pass_time(self, seconds: float, tick: float = 1.0) -> "World":
        """In ticks of so many seconds, the last of them to the end."""
        end = self.now + seconds
        while self.now < end:
            step = min(tick, end - self.now)
            self._cpu += step * self.cpu_per_second
            self.now += step
            self.do(self.vigil.tick(self.now))
        return self

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            self.told.append((self.now - self.start, action))
            match action:
                case Probe() if self.answers:
                    self.do(self.vigil.answered(7, self.now))
                case Look():
                    seen = Seen(self.now, self.state, {"worker": self._cpu}) if self.visible else None
                    self.do(self.vigil.seen(7, self.now, seen, stacks=self.stacks))

    def all(self, kind: type) -> list[tuple[float, Action]]:
        return [(when, action) for when, action in self.told if isinstance(action, kind)]

    @property
    def decisions(self) -> list[tuple[float, Action]]:
        return [(when, action) for when, action in self.told if not isinstance(action, Probe | Look)]


# What the evidence means


def before(cpu: float = 10.0, reaped: float = 0.0) -> Seen:
    return Seen(100.0, "S", {"worker": cpu, "child": 5.0}, reaped)


@pytest.mark.parametrize(
    ("was", "now", "kind"),
    [
        (before(), Seen(105, "T", {"worker": 99}), Kind.STOPPED),
        (None, Seen(105, "T"), Kind.STOPPED),
        (before(), Seen(105, "t", {"worker": 10}), Kind.TRACED),
        (before(), Seen(105, "S", {"worker": 10, "child": 5.0}), Kind.BLOCKED),
        (before(), Seen(105, "D", {"worker": 10, "child": 5.0}), Kind.BLOCKED),  # a disk, or a file server that is gone
        (before(), Seen(105, "S", {"worker": 10.04, "child": 5.0}), Kind.BLOCKED),  # 0.8 %
        (before(), Seen(105, "S", {"worker": 10.05, "child": 5.0}), Kind.BUSY),  # 1 %
        (before(), Seen(105, "S", {"worker": 10, "child": 6.0}), Kind.BUSY),  # what it has started works
        (before(), Seen(105, "S", {"worker": 10, "child": 5.0, "new": 0.1}), Kind.BUSY),
        (before(), Seen(105, "S", {"worker": 10}, reaped=5.0), Kind.BLOCKED),  # a child ended, having done nothing more
        (before(), Seen(105, "S", {"worker": 10}, reaped=6.0), Kind.BUSY),  # a child worked, and ended
        (before(), Seen(105, "S", {"worker": 11}), Kind.BUSY),  # a child's account is lost, the worker's is not
        (before(), Seen(105, "R", {"worker": 10, "child": 5.0}), Kind.BUSY),  # others have all of the CPU
        (before(), Seen(105, "Z", {"worker": 10}), Kind.UNKNOWN),  # it has ended: its exit is told elsewhere
        (before(), Seen(100, "S", {"worker": 10}), Kind.UNKNOWN),
        (None, Seen(105, "S", {"worker": 10}), Kind.UNKNOWN),
        (before(), None, Kind.UNKNOWN),
        (None, None, Kind.UNKNOWN),
    ],
)
def test_what_was_seen_of_its_processes_tells_what_a_silent_worker_does(
    was: Seen | None, now: Seen | None, kind: Kind
) -> None:
    assert kind_of(was, now, POLICY.blocked_share) is kind


NAMES = st.dictionaries(st.integers(0, 5), st.floats(0, 100), max_size=6)


@given(NAMES, st.floats(0, 100), NAMES, st.floats(0.1, 100))
def test_no_cpu_that_the_living_used_is_overlooked_and_none_is_negative(
    cpu: dict[int, float], reaped: float, used: dict[int, float], seconds: float
) -> None:
    was = Seen(0.0, "S", dict(cpu), reaped)
    now = Seen(seconds, "S", {name: cpu.get(name, 0.0) + more for name, more in used.items()}, 0.0)
    assert cpu_share(was, now) * seconds >= sum(used.values()) - 1e-6


# Probes


def test_a_worker_that_answers_is_probed_every_five_seconds_and_nothing_else_happens() -> None:
    world = World()
    world.answers = True
    world.pass_time(300)
    assert [when for when, _ in world.all(Probe)] == [*range(5, 301, 5)]
    assert world.decisions == []
    assert world.all(Look) == []


def test_one_probe_is_outstanding_at_most() -> None:
    world = World().pass_time(300)
    assert len(world.all(Probe)) == 1


def test_who_is_not_watched_is_left_alone() -> None:
    world = World()
    world.vigil.drop(7)
    world.pass_time(100)
    assert world.told == []
    assert world.vigil.answered(7, world.now) == world.vigil.heard(7) == []
    assert world.vigil.seen(7, world.now, Seen(0, "T"), stacks=True) == []


# Silence: all times below are five seconds after the start, when the first probe was sent


def test_a_busy_worker_is_reported_once_last_choice_after_thirty_seconds_and_never_killed() -> None:
    world = World(KILLING)
    world.cpu_per_second = 0.5
    world.pass_time(3600)
    assert world.decisions == [(15, Report(7, 10, Kind.BUSY)), (35, Suspect(7))]


def test_a_blocked_worker_is_reported_once_and_suspect_and_by_default_never_killed() -> None:
    world = World().pass_time(2 * 3600)
    assert world.decisions == [(15, Report(7, 10, Kind.BLOCKED)), (35, Suspect(7))]


def test_a_blocked_worker_is_killed_where_the_policy_says_so() -> None:
    world = World(KILLING).pass_time(3600)
    # That it is blocked is known from the first look on, 5 s into its silence.
    assert world.decisions[2:] == [(5 + 5 + 60, Kill(7, 60, Kind.BLOCKED))]


def test_a_blocked_worker_that_shows_life_has_its_time_begin_again() -> None:
    world = World(KILLING)
    for _ in range(20):
        world.cpu_per_second = 0.0
        world.pass_time(55)
        world.cpu_per_second = 0.1
        world.pass_time(5)
    assert world.all(Kill) == []
    world.cpu_per_second = 0.0
    world.pass_time(70)
    assert len(world.all(Kill)) == 1


def test_a_stopped_worker_is_reported_and_killed_after_thirty_seconds() -> None:
    world = World()
    world.state = "T"
    world.stacks = False
    world.pass_time(100)
    assert world.decisions == [(15, Report(7, 10, Kind.STOPPED)), (35, Suspect(7)), (35, Kill(7, 30, Kind.STOPPED))]


def test_a_worker_that_was_busy_before_it_was_stopped_has_thirty_seconds_from_then() -> None:
    world = World()
    world.state = "R"
    world.pass_time(31)
    world.state = "T"
    world.pass_time(100)
    assert world.all(Kill) == [(65, Kill(7, 30, Kind.STOPPED))]


@pytest.mark.parametrize("state", ["t", "Z", "?"])
def test_one_that_a_debugger_holds_or_that_cannot_be_told_is_never_killed(state: str) -> None:
    world = World(KILLING)
    world.state = state
    world.pass_time(3600)
    assert world.all(Kill) == []
    assert len(world.all(Report)) == 1


def test_nothing_is_known_where_processes_cannot_be_seen_so_nothing_is_killed() -> None:
    world = World(KILLING)
    world.visible = False
    world.pass_time(3600)
    assert world.decisions == [(15, Report(7, 10, Kind.UNKNOWN)), (35, Suspect(7))]


def test_an_answer_brings_a_worker_back_and_its_next_silence_is_a_new_one() -> None:
    world = World().pass_time(50)
    world.do(world.vigil.answered(7, world.now))
    assert world.decisions[2:] == [(50, Back(7, 45))]
    world.pass_time(50)
    assert world.decisions[3:] == [(50 + 15, Report(7, 10, Kind.BLOCKED)), (50 + 35, Suspect(7))]


def test_anything_that_comes_from_a_worker_ends_its_silence() -> None:
    world = World()
    for _ in range(20):
        world.pass_time(9)
        assert world.vigil.heard(7) == []
    assert world.decisions == []
    world.pass_time(36)
    assert world.vigil.tick(world.now + 1, [7]) == [Back(7, 36)]


def test_what_was_seen_of_a_silence_that_is_over_counts_for_nothing() -> None:
    world = World()
    world.state = "T"
    world.pass_time(34)
    world.vigil.answered(7, world.now)
    assert world.vigil.seen(7, world.now, Seen(world.now, "T"), stacks=True) == []


def test_a_report_waits_for_stacks_that_are_late_but_not_for_ever() -> None:
    world = World()
    world.stacks = False
    world.pass_time(17)
    assert world.all(Report) == []
    world.stacks = True
    world.pass_time(30)
    assert world.all(Report) == [(20, Report(7, 15, Kind.BLOCKED))]
    world = World()
    world.stacks = False
    world.pass_time(100)
    assert world.all(Report) == [(20, Report(7, 15, Kind.BLOCKED))]


def test_a_limit_below_that_of_the_report_is_refused() -> None:
    for limit in (0, -1, 9.9, float("nan")):
        with pytest.raises(EnvServerError, match=r"kill_blocked_after is (at least 10 s|a number)"):
            PoolPolicy(kill_blocked_after=limit)
    assert PoolPolicy(kill_blocked_after=10).kill_blocked_after == 10


# The broker's own lag


@pytest.mark.parametrize("lag", [2.5, 10, 100, 10_000])
@pytest.mark.parametrize("at", [3, 5, 9, 14, 30])
def test_a_broker_that_was_away_takes_that_for_nobodys_silence(lag: float, at: float) -> None:
    """It was stopped, or had no CPU: its workers answered, and it was not there to hear them."""
    world = World()
    world.state = "T"  # whatever one sees of them
    world.pass_time(at)
    told = len(world.decisions)
    world.now += lag
    world.do(world.vigil.tick(world.now))
    assert len(world.decisions) == told, "what has come meanwhile is heard before anything is decided"
    world.now += 1
    world.do(world.vigil.tick(world.now, [7]))
    world.pass_time(9)
    assert [action for _, action in world.decisions[told:] if not isinstance(action, Back)] == []


def test_lag_is_not_added_to_a_silence_that_was_real() -> None:
    world = World()
    world.state = "T"
    world.pass_time(25)
    world.pass_time(1_000, tick=1_000)
    world.pass_time(8)
    assert world.all(Kill) == [], "20 s before, 1 s that the broker should have been away, 8 s since"
    world.pass_time(5)
    assert len(world.all(Kill)) == 1


def test_a_look_that_comes_back_after_a_lag_decides_nothing() -> None:
    world = World()
    world.state = "T"
    world.pass_time(34)
    world.now += 1
    assert Look(7) in world.vigil.tick(world.now)
    assert world.vigil.seen(7, world.now + 50, Seen(world.now + 50, "T"), stacks=True) == []


# What always holds


@settings(max_examples=100)
@given(
    steps=st.lists(
        st.tuples(
            st.one_of(st.just(1.0), st.floats(0.01, 3), st.floats(0, 10_000)),
            st.sampled_from("RSDTtZ?"),
            st.sampled_from([0.0, 0.005, 0.5]),
        ),
        max_size=100,
    ),
    limit=st.sampled_from([None, 10.0, 60.0]),
)
def test_a_worker_whose_answers_come_by_the_next_tick_in_time_is_never_even_reported(
    steps: list[tuple[float, str, float]], limit: float | None
) -> None:
    """Whatever the broker's own loop does, and whatever the processes look like."""
    world = World(dataclasses.replace(POLICY, kill_blocked_after=limit))
    waiting = False
    for passed, world.state, world.cpu_per_second in steps:
        late = passed > 2 * world.policy.watch_interval
        if waiting and not late:  # after a late tick the answer is read before the next one
            world.do(world.vigil.answered(7, world.now))
            waiting = False
        world.now += passed
        before = len(world.all(Probe))
        world.do(world.vigil.tick(world.now))
        waiting = waiting or len(world.all(Probe)) > before
    assert world.decisions == []


SILENT = st.lists(
    st.tuples(
        st.one_of(st.just(1.0), st.floats(0.01, 30)),
        st.sampled_from("RSDTtZ?"),
        st.sampled_from([0.0, 0.005, 0.5]),
        st.booleans(),
    ),
    max_size=100,
)


@settings(max_examples=100)
@given(steps=SILENT, limit=st.sampled_from([None, 10.0, 60.0]))
def test_who_is_killed_was_so_at_every_look_for_as_long_as_the_policy_says_and_told_of_before(
    steps: list[tuple[float, str, float, bool]], limit: float | None
) -> None:
    policy = dataclasses.replace(POLICY, kill_blocked_after=limit)
    world = World(policy)
    states: list[str] = []
    heard_since_report = True
    for passed, world.state, world.cpu_per_second, hears in steps:
        told = len(world.told)
        if hears and passed > 20:
            world.do(world.vigil.answered(7, world.now))
        if any(isinstance(action, Back) for _, action in world.told[told:]):
            states.clear()
            heard_since_report = True
        world.pass_time(passed, tick=passed)
        for _, action in world.told[told:]:
            match action:
                case Look():
                    states.append(world.state)
                case Report():
                    assert heard_since_report, "once a silence"
                    heard_since_report = False
                case Kill(_, seconds, kind):
                    assert not heard_since_report
                    if kind is Kind.STOPPED:
                        assert seconds >= policy.kill_stopped_after
                        assert states[-1] == "T"
                    else:
                        assert kind is Kind.BLOCKED
                        assert limit is not None
                        assert seconds >= limit
                        assert states[-1] in "SDI"
                    return
    assert all(not isinstance(action, Kill) for _, action in world.told)


def test_many_workers_are_judged_each_by_its_own() -> None:
    vigil = Vigil(POLICY)
    kinds = dict(zip(range(4), itertools.cycle("TSR")))
    for worker in kinds:
        vigil.add(worker, 0.0)
    killed: list[int] = []
    silent: Callable[[int], bool] = lambda worker: worker != 3  # noqa: E731
    for second in range(1, 100):
        for action in vigil.tick(float(second)):
            match action:
                case Probe(worker) if not silent(worker):
                    assert vigil.answered(worker, float(second)) == []
                case Look(worker):
                    seen = Seen(float(second), kinds[worker])
                    killed += [a.worker for a in vigil.seen(worker, second, seen, stacks=True) if isinstance(a, Kill)]
    assert killed == [0]
