"""The rest of the fourteen rules of the tunnels sheet: see `test_evidence.py`."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from tests.tunnel.driver import (
    AUTH,
    BAD_GATEWAY,
    BUSY,
    HALF_OPEN,
    NO_ANSWER,
    NO_NAME,
    NO_ROUTE,
    OK,
    PATH,
    REFUSED,
    UNRUN,
    WRONG,
    every,
    follow,
    local_down,
    lost,
    make,
    reference,
    restarts,
    see,
)
from tunnel.detector import EvidenceRule
from tunnel.evidence import GiveUp, Probe, Restart, Seen, Wait


class TestRule6NeverARestart:
    @pytest.mark.parametrize(
        ("seen", "state"),
        [
            (PATH, "path_fault"),
            (AUTH, "path_fault"),
            (BUSY, "path_fault"),
            (UNRUN, "path_fault"),
            (local_down(), "local_down"),
            (local_down(OK), "serving"),
            (reference(BAD_GATEWAY, False), "path_fault"),
            (reference(NO_ANSWER, False), "path_fault"),
        ],
        ids=lambda value: value.detail if isinstance(value, Seen) else "",
    )
    def test_it_keeps_probing_and_reports_the_state(self, seen: Seen, state: str) -> None:
        rule = make(give_up_after=None)
        came = follow(rule, 0, seen, until=7200)
        assert came.action is None
        assert rule.state.name == state
        assert len(came.looks) > 100
        assert came.at > 7100

    @pytest.mark.parametrize("seen", [PATH, AUTH, BUSY, local_down(), reference(BAD_GATEWAY, False)])
    def test_it_takes_back_a_restart_that_is_held_back(self, seen: Seen) -> None:
        rule = lost()
        rule.reconnecting(0)
        assert not restarts(rule, 0)
        see(rule, seen, 40)
        assert not restarts(rule, 46)

    @pytest.mark.parametrize("seen", [PATH, AUTH, BUSY, local_down()])
    def test_it_takes_back_a_refused_restart_of_a_client_that_runs(self, seen: Seen) -> None:
        rule = lost()
        assert restarts(rule, 0)
        rule.restart_failed(0, "already exists", gone=False, running=True)
        see(rule, seen, 1)
        assert follow(rule, 1, seen, until=60).action is None
        assert rule.state.name in ("path_fault", "local_down")

    def test_unrun_holds_what_was_counted(self) -> None:
        rule = make()
        see(rule, NO_ROUTE, 0, 1)
        see(rule, UNRUN, 2, 3, 4)
        see(rule, NO_ROUTE, 5)
        assert restarts(rule, 5)

    def test_unrun_holds_a_restart(self) -> None:
        rule = lost()
        see(rule, UNRUN, 0.1)
        assert not restarts(rule, 0.1)
        assert follow(rule, 0.1, UNRUN, until=300).action is None
        see(rule, NO_ROUTE, 301)
        assert restarts(rule, 301)

    def test_unrun_backs_off_too(self) -> None:
        looks = follow(make(), 0, UNRUN, until=120).looks
        assert [b - a for a, b in pairwise(looks)] == [1, 2, 4, 8, 15, 15, 15, 15, 15]

    def test_the_time_in_which_no_probe_could_run_is_not_held_against_the_url(self) -> None:
        rule = make()
        see(rule, OK, 0)
        assert follow(rule, 0, UNRUN, until=3000).action is None
        assert follow(rule, 3000, PATH, until=3500).action is None

    @pytest.mark.parametrize(("seen", "said"), [(PATH, True), (AUTH, True), (local_down(), False), (OK, False)])
    def test_a_path_fault_of_60_s_is_said_once(self, seen: Seen, said: bool) -> None:
        rule = make(give_up_after=None)
        follow(rule, 0, seen, until=85)
        assert rule.notes() == []
        follow(rule, 85, seen, until=2000)
        notes = rule.notes()
        assert len(notes) == said
        if said:
            assert notes[0] == f"this host's own probes have failed for 60 s: {seen.detail}"
        assert rule.notes() == []
        see(rule, OK, 2001)
        follow(rule, 2001, seen, until=2200)
        assert len(rule.notes()) == said, "and again when it has come back"


class TestRule7Wrong:
    def test_one_restart_then_it_only_reports(self) -> None:
        rule = make(give_up_after=None)
        see(rule, OK, 0)
        came = follow(rule, 0, WRONG, until=100)
        assert came.at == 30
        assert isinstance(came.action, Restart)
        assert came.action.drain
        assert "somebody else" in came.action.reason
        rule.restarted(31)
        assert follow(rule, 31, WRONG, until=10_000).action is None
        assert (rule.state.name, rule.state.reason) == ("suspect", "200 from somebody else")

    def test_it_is_not_handed_out_meanwhile(self) -> None:
        rule = make()
        see(rule, WRONG, 0)
        assert rule.state.name == "suspect"

    def test_not_while_requests_arrive(self) -> None:
        # A captive portal on this host's own way: the rollouts are well.
        came = follow(make(), 0, WRONG, until=1000, requests=every(5, 0.1, 1000))
        assert came.action is None

    def test_requests_alone_do_not_allow_another_one(self) -> None:
        rule = make(give_up_after=None)
        came = follow(rule, 0, WRONG, until=100)
        assert came.restarts
        rule.restarted(31)
        assert follow(rule, 31, WRONG, until=3000, requests=every(100, 50, 3000)).action is None

    def test_once_it_was_ours_again_there_may_be_another_one(self) -> None:
        rule = make()
        assert follow(rule, 0, WRONG, until=100).restarts
        rule.restarted(31)
        see(rule, OK, 32)
        assert follow(rule, 32, WRONG, until=100).restarts


class TestRule8Reconnecting:
    def test_it_gets_45_s(self) -> None:
        rule = lost()
        rule.reconnecting(-3)
        rule.reconnecting(10)  # its next try: counted from the first
        assert not restarts(rule, 41.9)
        assert rule.state.name == "suspect"
        assert "reconnecting" in rule.state.reason
        assert restarts(rule, 42)

    def test_a_login_ends_it(self) -> None:
        rule = lost()
        rule.reconnecting(-3)
        rule.logged_in(1)
        assert restarts(rule, 1)

    def test_a_refusal_as_gone_ends_it(self) -> None:
        rule = lost()
        rule.reconnecting(-3)
        rule.said_gone(1, "its client was told: tunnel is inactive")
        assert restarts(rule, 1)


class TestRule9Drain:
    @pytest.mark.parametrize(
        ("seen", "drain"),
        [
            (NO_ROUTE, False),
            (REFUSED, False),
            (HALF_OPEN, True),
            (BAD_GATEWAY, True),
            (NO_ANSWER, True),
            (NO_NAME, True),
            (WRONG, True),
        ],
        ids=lambda value: value.outcome.name if isinstance(value, Seen) else "",
    )
    def test_only_where_something_can_be_in_flight(self, seen: Seen, drain: bool) -> None:
        came = follow(make(), 0, seen, until=200)
        assert isinstance(came.action, Restart)
        assert came.action.drain == drain

    def test_not_of_a_dead_process(self) -> None:
        rule = make()
        see(rule, HALF_OPEN, 0, 20, 45)
        rule.exited(45)
        assert rule.decide(45) == Restart("its client exited", drain=False)

    def test_not_of_one_that_died_since(self) -> None:
        rule = make()
        see(rule, HALF_OPEN, 0, 20, 45)
        action = rule.decide(45)
        assert isinstance(action, Restart)
        assert action.drain
        rule.restart_failed(46, "already exists", gone=False, running=False)
        again = follow(rule, 46, REFUSED, until=60).action
        assert isinstance(again, Restart)
        assert not again.drain

    def test_a_hint_changes_nothing_about_it(self) -> None:
        for seen, drain in [(NO_ROUTE, False), (HALF_OPEN, True)]:
            rule = make()
            see(rule, seen, 0)
            rule.record(1, "expired")
            action = rule.decide(1)
            assert isinstance(action, Restart)
            assert action.drain == drain


class TestRule10Budget:
    def restart_times(self, fails: Callable[[EvidenceRule, float], None], until: float) -> list[float]:
        """When it restarts a client that never serves again."""
        rule = make(give_up_after=None)
        fails(rule, 0)
        now, times = 0.0, []
        while (came := follow(rule, now, NO_ROUTE, until=until)).restarts:
            times.append(came.at)
            rule.restarted(came.at)
            fails(rule, came.at)
            now = came.at
        return times

    def test_cool_downs_and_six_an_hour_by_probes(self) -> None:
        times = self.restart_times(lambda rule, now: None, 3600)
        assert len(times) == 6
        self.check_cool_downs(times)

    def test_the_exits_of_the_client_count_too(self) -> None:
        times = self.restart_times(lambda rule, now: rule.exited(now), 7199)
        assert times[:4] == [0, 15, 75, 375]
        assert times[6] == 3600
        assert len(times) == 12
        self.check_cool_downs(times)

    def check_cool_downs(self, times: list[float]) -> None:
        """0, 15, 60, 300 after the last one, by the number of those in the ten minutes before."""
        for i in range(1, len(times)):
            recent = sum(at > times[i] - 600 for at in times[:i])
            assert times[i] - times[i - 1] >= [0, 15, 60, 300][min(recent, 3)]
            assert sum(at > times[i] - 3600 for at in times[:i]) < 6

    def test_beyond_that_it_is_reported_only_and_said_once(self) -> None:
        rule = make(give_up_after=None)
        now = 0.0
        for _ in range(6):
            rule.exited(now)
            now = follow(rule, now, REFUSED, until=3600).at
            rule.restarted(now)
        rule.exited(now)
        assert follow(rule, now, REFUSED, until=3599).action is None
        assert rule.state.name == "suspect"
        assert rule.notes() == ["no more restarts for now: 6 in 3600 s are enough"]
        assert follow(rule, 3599, REFUSED, until=3700).restarts

    def test_a_refused_restart_is_tried_again_every_3_to_5_s_for_60_s_and_is_one_restart(self) -> None:
        rule = lost()
        came = follow(rule, 0, REFUSED, until=10)
        tries = []
        while came.restarts and came.at < 60:
            tries.append(came.at)
            rule.restart_failed(came.at, "already exists", gone=False, running=False)
            assert rule.state.name == "restarting"
            came = follow(rule, came.at, REFUSED, until=60)
        assert all(3 <= b - a <= 5 for a, b in pairwise(tries))
        assert len(tries) >= 12
        came = follow(rule, came.at, REFUSED, until=200)
        rule.restarted(came.at)
        rule.exited(came.at)
        again = follow(rule, came.at, REFUSED, until=200)
        assert again.at == pytest.approx(came.at + 15), "the second one, not the fourteenth"

    def test_after_60_s_of_refusals_the_next_try_is_another_restart(self) -> None:
        rule = make(give_up_after=None)
        rule.exited(0)
        tries = []
        came = follow(rule, 0, REFUSED, until=3600)
        while came.restarts:
            tries.append(came.at)
            rule.restart_failed(came.at, "already exists", gone=False, running=False)
            came = follow(rule, came.at, REFUSED, until=3600)
        pauses = [round(b - a) for a, b in pairwise(tries) if b - a > 5]
        assert pauses[:3] == [15, 60, 300]
        assert len(pauses) > 6, "a dead client disturbs nobody, so the hourly cap does not end its tries"
        assert max(pauses) <= 300

    def test_a_dead_client_is_restarted_soon_after_its_relay_is_back(self) -> None:
        rule = make(give_up_after=None)
        see(rule, OK, 30)
        rule.exited(40)
        came = follow(rule, 40, REFUSED, until=2400)
        while came.restarts:
            rule.restart_failed(came.at, "connection refused", gone=False, running=False)
            came = follow(rule, came.at, REFUSED, until=2400)
        assert follow(rule, came.at, REFUSED, until=2400 + 400).restarts

    def test_a_restart_that_is_refused_and_then_not_needed_counts(self) -> None:
        rule = lost()
        assert restarts(rule, 0)
        rule.restart_failed(1, "already exists", gone=False, running=True)
        rule.arrived(2)
        assert rule.state.name == "serving"
        see(rule, OK, 6)
        assert isinstance(rule.decide(6), Wait)
        see(rule, NO_ROUTE, 7, 8, 12)
        assert not restarts(rule, 16.9)
        assert restarts(rule, 17)

    def test_a_request_that_came_in_while_it_was_restarted_does_not_stop_the_tries(self) -> None:
        rule = lost()
        assert restarts(rule, 0)
        rule.arrived(0.1)
        rule.restart_failed(1, "already exists", gone=False, running=False)
        came = follow(rule, 1, REFUSED, until=10)
        assert came.restarts
        assert 4 <= came.at <= 6

    def test_an_exit_during_the_tries_is_the_same_restart(self) -> None:
        rule = lost()
        assert restarts(rule, 0)
        rule.restart_failed(1, "already exists", gone=False, running=False)
        rule.exited(1.1)
        assert isinstance(rule.decide(1.1), Wait)

    def test_the_first_line_of_an_error_is_enough(self) -> None:
        rule = lost()
        assert restarts(rule, 0)
        rule.restart_failed(1, "already exists\nand much output", gone=False, running=False)
        assert rule.state.reason == "restart failed, trying again: already exists"


class TestRule11AfterARestart:
    def test_all_evidence_is_forgotten(self) -> None:
        rule = lost()
        assert restarts(rule, 0)
        for at in (0, 20, 45):
            rule.connect_failed(at, "i/o timeout")
            rule.logged_in(at)
            rule.connect_failed(at, "i/o timeout")
        rule.said_gone(45, "told")
        rule.restarted(100)
        assert rule.restarts == 1
        see(rule, NO_ROUTE, 101, 102)
        assert not restarts(rule, 120)

    def test_the_url_is_verified_at_once_and_back_is_said_only_then(self) -> None:
        rule = lost()
        assert restarts(rule, 0)
        rule.restarted(1)
        assert rule.state.name == "restarting"
        assert rule.decide(1) == Probe()
        see(rule, NO_ROUTE, 1.1)
        assert rule.state.name == "restarting"
        assert rule.decide(1.1) == Wait(2.1)
        see(rule, OK, 2.1)
        assert rule.state.name == "serving"

    def test_a_request_verifies_it_too(self) -> None:
        rule = lost()
        assert restarts(rule, 0)
        rule.restarted(1)
        rule.arrived(1.05)
        assert rule.state.name == "serving"

    def test_local_down_is_shown_no_longer_than_it_lasts(self) -> None:
        rule = lost()
        assert restarts(rule, 0)
        rule.restarted(1)
        see(rule, local_down(), 1)
        assert rule.state.name == "local_down"
        see(rule, NO_ROUTE, 2)
        assert rule.state.name == "restarting"

    def test_the_client_of_another_that_keeps_it_serving_was_restarted(self) -> None:
        rule = make()
        rule.exited(0)
        rule.restarted(1)
        see(rule, OK, 1)
        assert rule.state.name == "serving"
        assert rule.decide(1) == Wait(31)


class TestRule12Clock:
    def test_evidence_is_forgotten_and_the_url_probed_at_once(self) -> None:
        rule = make()
        see(rule, NO_ROUTE, 1, 2)
        rule.clock_jumped(10)
        assert rule.state.name == "suspect"  # until somebody has looked
        assert rule.decide(10) == Probe()
        see(rule, NO_ROUTE, 10)
        assert not restarts(rule, 10)

    def test_no_restart_for_10_s(self) -> None:
        rule = make()
        rule.clock_jumped(10)
        see(rule, NO_ROUTE, 10, 11, 15)
        assert not restarts(rule, 19.9)
        assert rule.state.name == "suspect"
        assert restarts(rule, 20)

    def test_not_even_of_a_dead_client(self) -> None:
        rule = make()
        rule.exited(10)
        rule.clock_jumped(10)
        see(rule, REFUSED, 10)
        assert not restarts(rule, 19.9)
        assert restarts(rule, 20)

    def test_a_refused_restart_waits_too(self) -> None:
        rule = lost()
        assert restarts(rule, 0)
        rule.restart_failed(0, "already exists", gone=False, running=False)
        rule.clock_jumped(1)
        see(rule, REFUSED, 1)
        assert follow(rule, 1, REFUSED, until=10.9).action is None
        assert restarts(rule, 11)

    def test_what_the_client_and_the_api_said_is_forgotten(self) -> None:
        rule = make()
        see(rule, NO_ROUTE, 0)
        rule.record(1, "expired")
        rule.clock_jumped(2)
        see(rule, NO_ROUTE, 13)
        assert not restarts(rule, 13)

    def test_the_time_before_is_not_held_against_the_url(self) -> None:
        rule = make()
        see(rule, OK, 0)
        see(rule, PATH, 500)
        rule.clock_jumped(599)
        see(rule, PATH, 600)
        assert not isinstance(rule.decide(600), GiveUp)


class TestRule14Flapping:
    """Rule 13 has a file of its own: `test_siblings.py`."""

    def test_four_logins_in_5_min_are_said_once_and_add_no_restarts(self) -> None:
        rule = make()
        for at in (0, 30, 60):
            rule.logged_in(at)
        assert rule.notes() == []
        rule.logged_in(90)
        rule.logged_in(120)
        assert rule.notes() == ["its client logged in 4 times in 300 s: no restarts of our own for now"]
        see(rule, NO_ROUTE, 121, 122, 126)
        assert not restarts(rule, 126)
        assert rule.state.name == "suspect"
        assert "again and again" in rule.state.reason
        assert not restarts(rule, 329.9)
        assert restarts(rule, 330), "five minutes after the second of five"

    @pytest.mark.parametrize(("last", "flaps"), [(299.9, True), (300, False), (301, False)])
    def test_in_five_minutes(self, last: float, flaps: bool) -> None:
        rule = make()
        for at in (0, 30, 60, last):
            rule.logged_in(at)
        assert bool(rule.notes()) == flaps

    def test_a_client_that_exited_is_restarted_all_the_same(self) -> None:
        rule = make()
        for at in (0, 30, 60, 90):
            rule.logged_in(at)
        rule.exited(91)
        assert restarts(rule, 91)

    def test_a_restart_of_ours_is_no_flapping(self) -> None:
        rule = make()
        for at in (0, 30, 60):
            rule.logged_in(at)
        rule.restarted(70)
        rule.logged_in(71)
        assert rule.notes() == []

    def test_it_serves_meanwhile_and_says_so(self) -> None:
        rule = make()
        for at in (0, 30, 60, 90):
            rule.logged_in(at)
        assert rule.state.name == "serving"
        assert rule.state.reason


class TestGivingUp:
    @pytest.mark.parametrize(
        ("seen", "case", "given_up"),
        [
            (NO_ROUTE, {}, True),
            (PATH, {}, True),
            (NO_ROUTE, {"answered": False}, False),
            (NO_ROUTE, {"in_use": False}, False),
            (local_down(), {}, False),
            (UNRUN, {}, False),
            (OK, {}, False),
            (NO_ROUTE, {"give_up_after": None}, False),
            (NO_ROUTE, {"can_restart": False}, False),
        ],
        ids=str,
    )
    def test_each_condition_is_needed(self, seen: Seen, case: dict[str, Any], given_up: bool) -> None:
        rule = make(can_restart=case.get("can_restart", True), give_up_after=case.get("give_up_after", 600.0))
        if case.get("answered", True):
            see(rule, OK, 0)
        now = 0.0
        while (came := follow(rule, now, seen, until=5000, in_use=case.get("in_use", True))).restarts:
            now = came.at
            rule.restarted(now)
        if given_up:
            assert isinstance(came.action, GiveUp)
            assert came.at == 600, "to the second: the wait ends there"
            assert came.action.reason == f"not serving for 600 s, {rule.restarts} restart{'s' * (rule.restarts != 1)}"
            assert rule.decide(601, in_use=False) == came.action, "the last word"
        else:
            assert came.action is None

    def test_a_request_puts_it_off(self) -> None:
        rule = make()
        came = follow(rule, 0, PATH, until=5000, requests=[590])
        assert isinstance(came.action, GiveUp)
        assert came.at == 1190

    def test_restarts_that_are_refused_do_not_put_it_off(self) -> None:
        rule = make()
        see(rule, OK, 0)
        rule.exited(1)
        now = 1.0
        while (came := follow(rule, now, REFUSED, until=5000)).restarts:
            now = came.at
            rule.restart_failed(now, "already exists", gone=False, running=False)
        assert came.action == GiveUp("not serving for 600 s, 0 restarts")
        assert came.at == 600

    def test_a_client_that_hangs_in_its_budget_is_given_up_too(self) -> None:
        rule = make(restarts_max=1)
        see(rule, OK, 0)
        rule.exited(1)
        assert restarts(rule, 1)
        rule.restarted(1)
        rule.exited(2)
        came = follow(rule, 2, REFUSED, until=5000)
        assert isinstance(came.action, GiveUp)
        assert came.at == 600
