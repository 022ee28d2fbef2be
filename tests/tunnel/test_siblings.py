"""Rule 13: what the tunnels of one process see together."""

from collections.abc import Iterable
from itertools import pairwise

import pytest

from tests.tunnel.driver import BAD_GATEWAY, NO_ROUTE, OK, PATH, every, local_down, make
from tunnel import KeepAlivePolicy
from tunnel.detector import EvidenceRule
from tunnel.evidence import Probe, Restart, Seen, Wait
from tunnel.siblings import Siblings

POLICY = KeepAlivePolicy(jitter=0)


class Family:
    """Siblings by number."""

    def __init__(self, size: int) -> None:
        self.siblings = Siblings()
        for name in range(size):
            self.siblings.join(name)

    def suspect(self, now: float, *names: int) -> None:
        for name in names:
            self.siblings.suspect(name, now, POLICY)

    def well(self, now: float, *names: int) -> None:
        for name in names:
            self.siblings.well(name, now, POLICY)

    def asks(self, now: float, name: int) -> bool:
        """Whether it may restart; if not, then not before it was told."""
        at = self.siblings.may_restart(name, now, POLICY)
        assert at >= now
        return at == now

    def granted(self, now: float, names: Iterable[int]) -> list[int]:
        return [name for name in names if self.asks(now, name)]


class TestWhenTheyAreLookedAtTogether:
    @pytest.mark.parametrize(
        ("size", "suspect", "together"),
        [
            (1, 1, False),
            (2, 2, False),  # fewer than three
            (3, 2, False),
            (3, 3, True),
            (5, 3, True),
            (6, 3, False),  # not more than half
            (7, 4, True),
            (8, 4, False),
        ],
    )
    def test_at_least_three_and_more_than_half(self, size: int, suspect: int, together: bool) -> None:
        family = Family(size)
        family.suspect(0, *range(suspect))
        assert len(family.granted(1, range(suspect))) == (1 if together else suspect)

    @pytest.mark.parametrize(("spread", "together"), [(30.0, True), (30.1, False)])
    def test_within_30_s(self, spread: float, together: bool) -> None:
        family = Family(3)
        family.suspect(0, 0)
        family.suspect(spread / 2, 0, 1)
        family.suspect(spread, 0, 1, 2)
        assert len(family.granted(spread, range(3))) == (1 if together else 3)

    def test_one_that_is_well_again_does_not_count(self) -> None:
        family = Family(3)
        family.suspect(0, 0, 1)
        family.well(1, 0)
        family.suspect(2, 2)
        assert family.granted(3, [1, 2]) == [1, 2]

    def test_one_that_left_does_not_count(self) -> None:
        family = Family(3)
        family.suspect(0, 0, 1)
        family.siblings.leave(0)
        family.suspect(2, 2)
        assert family.granted(3, [1, 2]) == [1, 2]

    def test_one_restarted_just_before_it_was_seen_to_be_many_is_the_canary(self) -> None:
        family = Family(3)
        family.suspect(0, 0)
        assert family.asks(8, 0)
        family.suspect(9, 1, 2)
        assert family.granted(20, [1, 2]) == []
        family.well(21, 0)
        assert family.granted(21, [1, 2]) == [1]

    def test_a_stranger_is_no_concern(self) -> None:
        family = Family(3)
        family.suspect(0, 0, 1, 2)
        family.suspect(0, 99)
        family.well(0, 99)
        family.siblings.leave(99)
        assert family.asks(0, 99)


class TestCanary:
    def test_it_serves_again_and_the_rest_follow_one_a_second(self) -> None:
        family = Family(5)
        family.suspect(0, *range(5))
        assert family.granted(10, range(5)) == [0]
        assert family.granted(15, range(1, 5)) == []
        family.well(20, 0)
        assert family.granted(20, range(1, 5)) == [1]
        assert family.granted(20.9, range(2, 5)) == []
        assert family.granted(21, range(2, 5)) == [2]
        assert family.granted(22, range(3, 5)) == [3]
        assert family.granted(23, range(4, 5)) == [4]

    def test_it_does_not_and_the_next_ones_come_after_60_120_240_300(self) -> None:
        family = Family(4)
        family.suspect(0, *range(4))
        times, names = [], []
        for second in range(2000):
            for name in range(4):
                if family.asks(second, name):
                    times.append(second)
                    names.append(name)
        assert times[:5] == [0, 60, 180, 420, 720], "one after the other, and without end"
        assert times[5:] == [720 + 300 * i for i in range(1, 5)] or times[5] - times[4] >= 300
        assert len(times) == 9
        assert names[:4] == [0, 1, 2, 3], "each has its turn"
        assert set(names[4:8]) == {0, 1, 2, 3}

    def test_one_that_was_tried_lets_the_others_go_first_but_does_not_wait_for_ever(self) -> None:
        family = Family(3)
        family.suspect(0, 0, 1, 2)
        assert family.asks(0, 0)
        assert not family.asks(60, 0)
        assert not family.asks(60 + POLICY.probe_timeout - 0.1, 0)
        assert family.asks(60 + POLICY.probe_timeout, 0), "nobody else asked: they are not to be restarted"

    def test_one_that_leaves_makes_room_for_the_next_at_once(self) -> None:
        family = Family(5)
        family.suspect(0, *range(5))
        assert family.asks(0, 0)
        assert not family.asks(1, 1)
        family.siblings.leave(0)
        assert family.asks(1, 1)
        assert not family.asks(1, 2)

    def test_another_that_leaves_changes_nothing(self) -> None:
        family = Family(5)
        family.suspect(0, *range(5))
        assert family.asks(0, 0)
        family.siblings.leave(1)
        assert family.granted(59, range(2, 5)) == []
        family.well(59.5, 0)
        assert family.granted(60, range(2, 5)) == [2]


class TestTheEnd:
    def test_when_all_are_well(self) -> None:
        family = Family(3)
        family.suspect(0, 0, 1, 2)
        assert family.granted(0, range(3)) == [0]
        family.well(5, 0, 1, 2)
        family.suspect(100, 0)
        family.suspect(101, 1)
        assert family.granted(102, [0, 1]) == [0, 1], "two are their own trouble again"

    def test_when_the_last_that_was_not_well_leaves(self) -> None:
        family = Family(4)
        family.suspect(0, 0, 1, 2)
        family.well(5, 0, 1)
        family.siblings.leave(2)
        family.suspect(6, 0, 3)
        assert family.granted(7, [0, 3]) == [0, 3]

    def test_when_most_came_back_by_themselves_the_rest_follow(self) -> None:
        family = Family(5)
        family.suspect(0, *range(5))
        assert family.asks(0, 0)
        family.well(10, 1, 2)
        assert family.granted(10, [0, 3, 4]) == [], "three of five still fail"
        family.well(11, 3)
        assert family.granted(11, [0, 4]) == [0]
        assert family.granted(12, [4]) == [4]

    def test_one_that_never_serves_again_does_not_spoil_the_next_time(self) -> None:
        family = Family(5)
        family.suspect(0, *range(5))
        assert family.asks(0, 0)
        family.well(5, 0, 1, 2, 3)  # 4 does not
        family.suspect(1000, 0, 1, 2, 3)
        assert family.granted(1001, range(5)) == [0], "a canary again"

    def test_those_that_follow_and_fail_are_no_new_common_cause(self) -> None:
        family = Family(5)
        family.suspect(0, *range(5))
        assert family.asks(0, 0)
        family.well(5, 0)
        family.suspect(6, 1, 2, 3, 4)
        assert family.granted(6, [1, 2, 3, 4]) == [1]
        assert family.granted(7, [2, 3, 4]) == [2]


class Many:
    """Real rules over one `Siblings`, each followed in turn, a second at a time."""

    def __init__(self, size: int) -> None:
        siblings = Siblings()
        self.rules = [make(siblings=siblings, name=name, seed=name, give_up_after=None) for name in range(size)]
        self.restarts: list[tuple[float, int]] = []
        self.seen: dict[int, Seen] = {}
        self.mended = False  # a restart mends

    def live(self, now: float, until: float, step: float = 0.25) -> None:
        while now < until:
            for name, rule in enumerate(self.rules):
                self.do(name, rule, now)
            now += step

    def do(self, name: int, rule: EvidenceRule, now: float) -> None:
        match rule.decide(now):
            case Wait(at):
                assert at > now
            case Probe():
                rule.looked(now, self.seen.get(name, OK))
            case Restart():
                self.restarts.append((now, name))
                if self.mended:
                    self.seen.pop(name, None)
                rule.restarted(now)
            case action:
                raise AssertionError(action)


class TestTheRulesTogether:
    def test_all_routes_lost_at_once_one_canary_then_all_serve_again(self) -> None:
        many = Many(6)
        many.live(0, 100)
        many.mended = True
        many.seen = dict.fromkeys(range(6), NO_ROUTE)
        many.live(100, 200)
        times = [at for at, _ in many.restarts]
        assert len(times) == 6, "each of them once"
        assert all(b - a >= 1 for a, b in pairwise(times[1:])), "those that follow"
        assert all(rule.state.name == "serving" for rule in many.rules)

    def test_a_restart_that_does_not_help_is_not_made_everywhere(self) -> None:
        many = Many(6)
        many.live(0, 100)
        many.seen = dict.fromkeys(range(6), NO_ROUTE)
        many.live(100, 100 + 3600)
        times = [at for at, _ in many.restarts]
        assert 10 <= len(times) <= 14, "a canary at 60, 120, 240, 300, 300 s"
        assert len({name for _, name in many.restarts}) == 6, "not the same one each time"
        held = [rule.state for rule in many.rules if "tried first" in rule.state.reason]
        assert held
        assert all(state.name == "suspect" for state in held)

    def test_a_fault_of_the_host_is_no_storm(self) -> None:
        many = Many(6)
        many.seen = dict.fromkeys(range(6), PATH)
        many.live(0, 300)
        many.seen = {0: NO_ROUTE, 1: local_down(), 2: PATH, 3: PATH}
        many.mended = True
        many.live(300, 360)
        assert [name for _, name in many.restarts] == [0]

    def test_clients_that_exit_all_at_once_are_restarted_at_once(self) -> None:
        many = Many(6)
        many.live(0, 100)
        for rule in many.rules:
            rule.exited(100)
        many.live(100, 100.5)
        assert len(many.restarts) == 6

    def test_a_gateway_that_is_ill_for_all_and_has_no_reference(self) -> None:
        many = Many(4)
        many.live(0, 100)
        many.seen = dict.fromkeys(range(4), Seen(BAD_GATEWAY.outcome, True, "gateway 502"))
        many.live(100, 400)
        assert len(many.restarts) <= 3

    def test_one_that_is_closed_is_forgotten(self) -> None:
        many = Many(4)
        many.live(0, 100)
        for rule in many.rules[:3]:
            rule.left()
            rule.arrived(101)  # a late one
            rule.looked(102, NO_ROUTE)
        last = many.rules[3]
        for at in every(3, 103, 112):
            last.looked(at, NO_ROUTE)
        assert isinstance(last.decide(112), Restart)


def test_who_is_left_of_a_storm_too_small_to_be_one_is_held_no_longer() -> None:
    policy, siblings = KeepAlivePolicy(), Siblings()
    for name in "abc":
        siblings.join(name)
    for name in "abc":
        siblings.suspect(name, 10, policy)
    assert siblings.may_restart("a", 20, policy) == 20  # the canary, which does not serve again
    assert siblings.may_restart("c", 21, policy) > 21
    siblings.leave("a")
    siblings.leave("b")
    assert siblings.may_restart("c", 22, policy) == 22
