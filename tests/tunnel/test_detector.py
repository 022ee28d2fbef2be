"""The plain rule, as tables: evidence and the time go in, decisions come out. Nothing here sleeps or does I/O."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunnel import KeepAlivePolicy
from tunnel.detector import Action, GiveUp, PlainRule, Probe, Restart, Wait
from tunnel.state import StateName

SEEN: dict[str, tuple[bool, bool, str]] = {
    "good": (True, True, "the URL: answered 200"),
    "fails": (False, True, "the URL: answered 404"),
    "local down": (False, False, "the local service: answered 503"),
}


def make(now: float = 0.0, *, can_restart: bool = True, jitter: float = 0.0, **policy: float | None) -> PlainRule:
    """A rule with the default policy but no jitter, so that times can be written down."""
    return PlainRule(KeepAlivePolicy.model_validate({"jitter": jitter, **policy}), now, can_restart=can_restart)


def see(rule: PlainRule, now: float, what: str) -> None:
    url_ok, local_ok, detail = SEEN[what]
    rule.probed(now, url_ok=url_ok, local_ok=local_ok, detail=detail)


def follow(
    rule: PlainRule, now: float, answer: str | Callable[[float], str], *, until: float, in_use: bool = True
) -> tuple[float, Action | None]:
    """Do as the rule says, as `keep_serving` would: wait, and answer its probes. Stops at the first `Restart` or
    `GiveUp`, or when the next thing to do lies beyond `until`; says when, and which it was."""
    for _ in range(20_000):
        match rule.decide(now, in_use=in_use):
            case Wait(at):
                if at > until:
                    return now, None
                now = at
            case Probe():
                see(rule, now, answer if isinstance(answer, str) else answer(now))
            case action:
                return now, action
    raise AssertionError(f"the rule goes round in circles at {now}")


def probe_times(rule: PlainRule, now: float, answer: str, *, until: float) -> list[float]:
    times: list[float] = []

    def noted(at: float) -> str:
        times.append(at)
        if len(times) > 1000:
            raise AssertionError(f"more than 1000 probes by {at}: {times[:5]} ...")
        return answer

    _, action = follow(rule, now, noted, until=until)
    assert action is None
    return times


class TestTwoFailures:
    def test_two_failures_confirm_after_apart_restart_the_client(self) -> None:
        rule = make()
        assert rule.decide(0) == Wait(60)
        assert rule.state.name == "serving"
        assert rule.decide(60) == Probe()
        see(rule, 60, "fails")
        assert rule.decide(60) == Wait(120)
        assert (rule.state.name, rule.state.reason) == ("suspect", "the URL: answered 404")
        assert rule.decide(119.9) == Wait(120)
        assert rule.decide(120) == Probe()
        see(rule, 120, "fails")
        action = rule.decide(120)
        assert isinstance(action, Restart)
        assert action.reason == "two probes 60 s apart failed (the URL: answered 404), local service fine"
        assert (rule.state.name, rule.state.reason) == ("restarting", action.reason)

    @pytest.mark.parametrize(
        ("probes", "restarts"),
        [
            ([(60, "fails")], False),
            ([(60, "fails"), (120, "fails")], True),
            ([(60, "fails"), (119, "fails")], False),  # too close to confirm
            ([(60, "fails"), (119, "fails"), (120, "fails")], True),  # counted from the first one
            ([(60, "fails"), (500, "fails")], True),  # later than planned is fine
            ([(60, "fails"), (120, "good")], False),
            ([(60, "fails"), (90, "good"), (120, "fails")], False),
            ([(60, "fails"), (90, "good"), (120, "fails"), (180, "fails")], True),
            ([(60, "local down"), (120, "fails")], False),
            ([(60, "fails"), (120, "local down")], False),
            ([(60, "local down"), (120, "local down")], False),
            ([(60, "fails"), (90, "local down"), (120, "fails")], False),
            ([(60, "fails"), (120, "local down"), (180, "fails")], False),
            ([(60, "fails"), (120, "local down"), (180, "fails"), (240, "fails")], True),
            ([(60, "good"), (120, "good"), (180, "good")], False),
        ],
    )
    def test_what_restarts_and_what_does_not(self, probes: list[tuple[float, str]], restarts: bool) -> None:
        rule = make()
        for at, what in probes:
            see(rule, at, what)
        assert isinstance(rule.decide(probes[-1][0]), Restart if restarts else Wait)

    def test_one_failure_is_never_enough_also_when_confirmation_is_wanted_at_once(self) -> None:
        rule = make(confirm_after=0)
        see(rule, 60, "fails")
        assert not isinstance(rule.decide(60), Restart)

    def test_the_state_follows_what_was_seen(self) -> None:
        rule = make()
        seen = []
        for at, what in enumerate(["fails", "local down", "fails", "good", "local down", "good"]):
            see(rule, at, what)
            seen.append(rule.state.name)
        assert seen == ["suspect", "local_down", "suspect", "serving", "local_down", "serving"]

    def test_a_url_that_serves_is_probed_every_period(self) -> None:
        assert probe_times(make(), 0, "good", until=300) == [60, 120, 180, 240, 300]

    def test_a_local_service_that_is_down_is_probed_every_period_and_nothing_is_restarted(self) -> None:
        rule = make()
        assert probe_times(rule, 0, "local down", until=300) == [60, 120, 180, 240, 300]
        assert rule.state.name == "local_down"

    def test_a_restart_that_failed_is_not_tried_again_while_the_client_runs_and_the_local_service_is_down(self) -> None:
        rule = make()
        see(rule, 60, "fails")
        see(rule, 120, "fails")
        assert isinstance(rule.decide(120), Restart)
        rule.restart_failed(120, "proxy already exists", gone=False, running=True)
        see(rule, 120.5, "local down")
        assert follow(rule, 120.5, "local down", until=1000)[1] is None
        assert rule.state.name == "local_down"

    def test_a_url_that_serves_again_before_the_restart_is_tried_again_is_left_alone(self) -> None:
        rule = make()
        see(rule, 60, "fails")
        see(rule, 120, "fails")
        assert isinstance(rule.decide(120), Restart)
        rule.restart_failed(120, "proxy already exists", gone=False, running=True)
        see(rule, 120.5, "good")
        assert rule.state.name == "serving"
        assert follow(rule, 120.5, "good", until=1000)[1] is None


class TestSpacing:
    def test_the_period_varies_by_a_fifth_and_not_more(self) -> None:
        rule = PlainRule(KeepAlivePolicy(), 0.0, rng=random.Random(1))
        times = [0.0, *probe_times(rule, 0, "good", until=30_000)]
        gaps = [after - before for before, after in pairwise(times)]
        assert 48 <= min(gaps) < 50
        assert 70 < max(gaps) <= 72

    def test_many_tunnels_do_not_probe_in_step(self) -> None:
        first = {PlainRule(KeepAlivePolicy(), 0.0).decide(0) for _ in range(20)}
        assert len(first) > 10

    def test_a_report_brings_a_probe_forward(self) -> None:
        rule = make()
        rule.reported(10)
        assert rule.decide(10) == Probe()
        see(rule, 10, "good")
        assert rule.decide(10) == Wait(70)
        rule.reported(30)
        assert rule.decide(30) == Probe()

    def test_reports_bring_no_probe_closer_than_the_gap_to_the_last_one(self) -> None:
        rule = make(report_gap=1)
        see(rule, 60, "good")
        for at in (60.0, 60.2, 60.9):
            rule.reported(at)
            assert rule.decide(at) == Wait(61)
        assert rule.decide(61) == Probe()

    def test_a_report_never_puts_a_probe_off(self) -> None:
        rule = make(report_gap=10)
        see(rule, 55, "fails")
        rule.reported(114)
        assert rule.decide(114) == Probe()
        see(rule, 114, "good")
        rule = make(period=5, report_gap=10)
        see(rule, 0, "good")
        rule.reported(1)
        assert rule.decide(1) == Wait(5)

    def test_reports_cannot_confirm_a_failure_earlier(self) -> None:
        rule = make()
        see(rule, 60, "fails")
        for at in range(61, 120):
            rule.reported(at)
            assert rule.decide(at) == Probe()
            see(rule, at, "fails")
            assert rule.decide(at) == Wait(120)
        assert rule.decide(120) == Probe()
        see(rule, 120, "fails")
        assert isinstance(rule.decide(120), Restart)

    def test_a_report_is_no_evidence(self) -> None:
        rule = make()
        rule.reported(10)
        assert rule.state.name == "serving"
        assert follow(rule, 10, "good", until=1000)[1] is None


class TestExit:
    def test_a_client_that_exited_is_restarted_at_once(self) -> None:
        rule = make()
        rule.exited(5)
        assert rule.decide(5) == Restart("its client exited")
        assert rule.state.name == "restarting"

    def test_it_is_restarted_although_the_local_service_is_down(self) -> None:
        rule = make()
        see(rule, 60, "local down")
        rule.exited(61)
        assert rule.decide(61) == Restart("its client exited")

    def test_a_late_good_probe_does_not_call_off_the_restart_of_a_client_that_exited(self) -> None:
        rule = make()
        rule.exited(5)
        see(rule, 5, "good")
        assert rule.decide(5) == Restart("its client exited")
        assert rule.state.name == "restarting"

    def test_saying_again_that_it_exited_changes_nothing(self) -> None:
        rule = make()
        rule.exited(5)
        rule.restarted(5)
        see(rule, 5, "good")
        rule.exited(6)
        for at in (6.0, 6.3, 6.6):
            rule.exited(at)
            assert rule.decide(at) == Wait(7)
        assert rule.decide(7) == Restart("its client exited")

    def test_quick_exits_back_off_to_the_cap(self) -> None:
        rule, now, waits = make(), 0.0, []
        for _ in range(9):
            rule.exited(now)
            at, action = follow(rule, now, "good", until=now + 1000)
            assert action == Restart("its client exited")
            waits.append(at - now)
            rule.restarted(at)
            see(rule, at, "good")
            now = at
        assert waits == [0, 1, 2, 4, 8, 16, 30, 30, 30]

    def test_a_client_that_ran_for_a_period_is_restarted_at_once_again(self) -> None:
        rule, now = make(), 0.0
        for pause, wait in [(0, 0), (10, 1), (59, 2), (61, 0), (10, 1)]:
            _, action = follow(rule, now, "good", until=now + pause)
            assert action is None
            now += pause
            rule.exited(now)
            at, action = follow(rule, now, "good", until=now + 1000)
            assert isinstance(action, Restart)
            assert at - now == pytest.approx(wait)
            now = at
            rule.restarted(now)
            see(rule, now, "good")
        assert rule.restarts == 5


class TestFailedRestarts:
    @pytest.mark.parametrize("answer", ["fails", "local down"])
    def test_a_failed_restart_is_tried_again_for_ever_with_a_growing_wait(self, answer: str) -> None:
        rule = make(give_up_after=None)
        rule.exited(0)
        times = []
        now = 0.0
        for _ in range(2000):
            rule.exited(now)  # said with each round, as keep_serving does
            now, action = follow(rule, now, answer, until=now + 1000)
            assert isinstance(action, Restart)
            times.append(now)
            rule.restart_failed(now, "connection refused", gone=False, running=False)
            assert rule.state.name == "restarting"
            assert "connection refused" in rule.state.reason
        gaps = [after - before for before, after in pairwise(times)]
        assert gaps[:6] == [1, 2, 4, 8, 16, 30]
        assert set(gaps[5:]) == {30}
        assert rule.restarts == 0

    def test_after_a_success_the_wait_is_short_again(self) -> None:
        rule = make()
        rule.exited(0)
        for now in (0, 1, 3, 7):
            assert isinstance(rule.decide(now), Restart)
            rule.restart_failed(now, "busy", gone=False, running=False)
        assert isinstance(rule.decide(15), Restart)
        rule.restarted(15)
        rule.exited(80)
        assert isinstance(rule.decide(80), Restart)
        rule.restart_failed(80, "busy", gone=False, running=False)
        see(rule, 80, "fails")
        assert rule.decide(80) == Wait(81)
        assert isinstance(rule.decide(81), Restart)

    def test_a_client_that_exits_while_its_restart_waits_does_not_shorten_the_wait(self) -> None:
        rule = make()
        see(rule, 60, "fails")
        see(rule, 120, "fails")
        assert isinstance(rule.decide(120), Restart)
        rule.restart_failed(120, "proxy already exists", gone=False, running=True)
        rule.exited(120.5)
        assert rule.decide(120.5) == Wait(121)
        assert isinstance(rule.decide(121), Restart)

    def test_after_a_good_probe_the_wait_is_short_again(self) -> None:
        rule = make(confirm_after=10)
        for now in (60.0, 200.0):
            see(rule, now, "fails")
            see(rule, now + 10, "fails")
            for wait in (1, 2, 4):
                assert isinstance(rule.decide(now + 10), Restart)
                rule.restart_failed(now + 10, "busy", gone=False, running=True)
                assert not isinstance(rule.decide(now + 10 + wait - 0.1), Restart)
                now += wait
            see(rule, now + 10, "good")


class TestGone:
    def refused(self, *, running: bool, exited: bool = False) -> PlainRule:
        rule = make(give_up_after=None)
        if exited:
            rule.exited(120)
        else:
            see(rule, 60, "fails")
            see(rule, 120, "fails")
        assert isinstance(rule.decide(120), Restart)
        rule.restart_failed(120, "no such tunnel", gone=True, running=running)
        return rule

    def test_refused_as_gone_and_no_client_is_gone_at_once(self) -> None:
        rule = self.refused(running=False)
        assert rule.decide(120) == GiveUp("no such tunnel")
        assert (rule.state.name, rule.state.reason) == ("gone", "no such tunnel")

    def test_gone_stays_gone(self) -> None:
        rule = self.refused(running=False)
        see(rule, 121, "good")
        assert rule.decide(121) == GiveUp("no such tunnel")
        assert rule.decide(10_000, in_use=False) == GiveUp("no such tunnel")
        assert rule.state.name == "gone"

    def test_refused_as_gone_while_a_client_runs_is_gone_only_once_the_url_fails_again(self) -> None:
        rule = self.refused(running=True)
        assert rule.decide(120) == Probe()  # asked at once
        assert rule.decide(500) == Probe()  # time alone decides nothing
        assert rule.state.name != "gone"
        see(rule, 500, "fails")
        assert rule.decide(500) == GiveUp("no such tunnel")

    @pytest.mark.parametrize("exited", [False, True], ids=["it was restarted for failing", "it had exited"])
    def test_refused_as_gone_but_the_url_serves_is_not_gone(self, exited: bool) -> None:
        rule = self.refused(running=True, exited=exited)
        see(rule, 121, "good")
        assert rule.state.name == "serving"
        assert follow(rule, 121, "good", until=10_000)[1] is None

    @pytest.mark.parametrize("exited", [False, True], ids=["it was restarted for failing", "it had exited"])
    def test_a_tunnel_that_was_not_gone_after_all_is_kept_as_before(self, exited: bool) -> None:
        rule = self.refused(running=True, exited=exited)
        see(rule, 121, "good")
        see(rule, 181, "fails")
        assert isinstance(rule.decide(181), Wait), "the old refusal no longer counts"
        rule.exited(200)
        assert isinstance(follow(rule, 200, "fails", until=240)[1], Restart)

    def test_a_passing_failure_of_a_restart_is_never_gone(self) -> None:
        rule = make(give_up_after=None)
        rule.exited(0)
        for running in (False, True) * 10:
            now, action = follow(rule, 0, "fails", until=1000)
            assert isinstance(action, Restart)
            rule.restart_failed(now, "proxy already exists", gone=False, running=running)

    def test_it_is_gone_also_when_giving_up_is_switched_off_and_nobody_uses_it(self) -> None:
        assert self.refused(running=False).decide(120, in_use=False) == GiveUp("no such tunnel")


class TestVerification:
    def test_after_a_restart_the_url_is_looked_at_often_until_it_serves(self) -> None:
        rule = make(give_up_after=None)
        rule.exited(100)
        assert isinstance(rule.decide(100), Restart)
        rule.restarted(100)
        assert rule.restarts == 1
        assert rule.state.name == "restarting"
        times = []
        for now in (100, 101, 103, 107, 115, 131):
            assert rule.decide(now) == Probe()
            times.append(now)
            see(rule, now, "fails")
            assert isinstance(rule.decide(now), Wait)
            assert rule.state.name == "restarting", "back is said only once it serves"
        assert rule.decide(131) == Wait(160)
        see(rule, 160, "good")
        assert rule.state.name == "serving"
        assert rule.decide(160) == Wait(220)

    def test_a_restart_that_did_not_help_is_repeated_confirm_after_later(self) -> None:
        rule = make(give_up_after=None)
        rule.exited(100)
        assert isinstance(rule.decide(100), Restart)
        rule.restarted(100)
        for again in (160, 220, 280):
            at, action = follow(rule, again - 60, "fails", until=10_000)
            assert at == again
            assert isinstance(action, Restart)
            rule.restarted(at)
        assert rule.restarts == 4

    def test_failures_before_a_restart_do_not_count_after_it(self) -> None:
        rule = make()
        see(rule, 60, "fails")
        rule.exited(119)
        assert isinstance(rule.decide(119), Restart)
        rule.restarted(119)
        see(rule, 121, "fails")
        assert not isinstance(rule.decide(121), Restart)

    def test_a_verified_tunnel_is_no_longer_looked_at_often(self) -> None:
        rule = make()
        rule.exited(100)
        rule.restarted(100)
        see(rule, 100, "good")
        assert rule.decide(100) == Wait(160)
        see(rule, 160, "fails")
        assert rule.decide(160) == Wait(220)
        assert rule.state.name == "suspect"

    def test_local_down_is_shown_no_longer_than_it_lasts(self) -> None:
        rule = make()
        rule.exited(100)
        rule.restarted(100)
        see(rule, 100, "local down")
        assert rule.state.name == "local_down"
        see(rule, 160, "fails")
        assert rule.state.name != "local_down"
        assert rule.state.name != "serving"


class TestGivingUp:
    """A tunnel that looks alive and serves nobody, for `give_up_after` = 600 s."""

    @dataclass
    class Case:
        answered: bool = True
        in_use: bool = True
        answer: str = "fails"
        give_up_after: float | None = 600
        can_restart: bool = True

    @pytest.mark.parametrize(
        ("case", "given_up"),
        [
            (Case(), True),
            (Case(answered=False), False),
            (Case(in_use=False), False),
            (Case(answer="local down"), False),
            (Case(answer="good"), False),
            (Case(give_up_after=None), False),
            (Case(can_restart=False), False),
        ],
        ids=str,
    )
    def test_each_condition_is_needed(self, case: Case, given_up: bool) -> None:
        rule = make(can_restart=case.can_restart, give_up_after=case.give_up_after, jitter=0.2)
        if case.answered:
            see(rule, 0, "good")
        now: float = 0
        action: Action | None = None
        for _ in range(200):
            now, action = follow(rule, now, case.answer, until=5000, in_use=case.in_use)
            if not isinstance(action, Restart):
                break
            rule.restarted(now)
        if given_up:
            assert isinstance(action, GiveUp)
            assert now == 600, "to the second: the wait ends there"
            assert rule.state.name == "gone"
        else:
            assert action is None

    @pytest.mark.parametrize(
        ("confirm_after", "text"),
        [
            (1000, "not serving for 600 s, 0 restarts"),
            (400, "not serving for 600 s, 1 restart"),
            (200, "not serving for 600 s, 2 restarts"),
        ],
    )
    def test_the_error_says_for_how_long_and_how_many_restarts(self, confirm_after: float, text: str) -> None:
        rule = make(confirm_after=confirm_after)
        see(rule, 0, "good")
        now, action = follow(rule, 0, "fails", until=5000)
        while isinstance(action, Restart):
            rule.restarted(now)
            now, action = follow(rule, now, "fails", until=5000)
        assert action == GiveUp(text)
        assert now == 600

    def test_arrivals_put_it_off(self) -> None:
        rule = make(confirm_after=10_000)
        see(rule, 0, "good")
        for at in (300, 590):
            assert follow(rule, at - 290, "fails", until=at)[1] is None
            rule.arrived(at)
        now, action = follow(rule, 590, "fails", until=5000)
        assert isinstance(action, GiveUp)
        assert now == 1190

    def test_a_request_is_an_answer_too(self) -> None:
        rule = make(confirm_after=10_000)
        rule.arrived(30)
        now, action = follow(rule, 30, "fails", until=5000)
        assert isinstance(action, GiveUp)
        assert now == 630

    def test_arrivals_do_not_count_as_probes(self) -> None:
        rule = make()
        see(rule, 60, "fails")
        rule.arrived(90)
        assert rule.state.name == "suspect"
        see(rule, 120, "fails")
        assert isinstance(rule.decide(120), Restart), "the plain rule goes by probes alone"

    def test_restarts_that_keep_failing_do_not_put_it_off(self) -> None:
        rule = make()
        see(rule, 0, "good")
        rule.exited(1)
        now: float = 1
        for _ in range(1000):
            now, action = follow(rule, now, "fails", until=5000)
            if isinstance(action, GiveUp):
                break
            rule.restart_failed(now, "connection refused", gone=False, running=False)
        assert action == GiveUp("not serving for 600 s, 0 restarts")
        assert now == 600

    def test_a_clock_that_jumped_is_no_evidence(self) -> None:
        rule = make()
        see(rule, 0, "good")
        assert rule.decide(100_000) == Probe(), "a host that slept asks first"
        see(rule, 100_000, "good")
        assert rule.decide(100_000) == Wait(100_060)

    def test_the_time_in_which_nobody_used_it_does_not_count(self) -> None:
        rule = make(confirm_after=10_000)
        see(rule, 0, "good")
        assert follow(rule, 0, "fails", until=2000, in_use=False)[1] is None
        assert not isinstance(rule.decide(2001, in_use=True), GiveUp)
        assert isinstance(follow(rule, 2001, "fails", until=3000)[1], GiveUp)

    def test_the_time_in_which_the_local_service_was_down_does_not_count(self) -> None:
        # The URL was asked a moment before the local service came back: that is no 600 s of a dead URL.
        rule = make(confirm_after=10_000)
        see(rule, 0, "good")
        assert follow(rule, 0, "local down", until=3000)[1] is None
        see(rule, 3001, "fails")
        assert not isinstance(rule.decide(3001), GiveUp)

    def test_a_local_service_last_seen_down_is_asked_again_first(self) -> None:
        rule = make(give_up_after=30)  # less than a period
        see(rule, 0, "good")
        see(rule, 60, "local down")
        assert rule.decide(119) == Wait(120)
        assert rule.decide(120) == Probe()


class TestWatchingOnly:
    """`can_restart=False`: a URL that is somebody else's to keep."""

    def test_it_never_restarts_and_never_gives_up(self) -> None:
        rule = make(can_restart=False)
        see(rule, 0, "good")
        for now in range(60, 100_000, 60):
            see(rule, now, "fails")
            rule.exited(now)
            assert isinstance(rule.decide(now), Wait | Probe)
            assert rule.state.name == "suspect"
        see(rule, 100_000, "good")
        assert rule.state.name == "serving"

    def test_a_url_that_fails_for_long_is_probed_once_a_period(self) -> None:
        times = probe_times(make(can_restart=False), 0, "fails", until=600)
        assert times == [60, 120, 180, 240, 300, 360, 420, 480, 540, 600]


# -- whatever happens --------------------------------------------------------------------------------

Outcome = Literal["done", "fails", "fails but runs", "gone", "gone but runs"]


@dataclass(frozen=True)
class Step:
    """A bit of the world's life: time passes (None: as long as the rule asked for), something happens, and should
    the rule probe or restart now, this is what comes of it."""

    passes: float | None
    event: Literal["", "exit", "arrival", "report"] = ""
    seen: str = "good"
    takes: float = 0.0
    outcome: Outcome = "done"
    in_use: bool = True


STEPS = st.lists(
    st.builds(
        Step,
        passes=st.none() | st.sampled_from([0.0, 0.5, 1.0, 30.0, 59.0, 60.0, 61.0, 600.0]) | st.floats(0, 700),
        event=st.sampled_from(["", "", "", "exit", "arrival", "report"]),
        seen=st.sampled_from(["good", "fails", "fails", "local down"]),
        takes=st.sampled_from([0.0, 0.1, 12.0]),
        outcome=st.sampled_from(get_args(Outcome)),
        in_use=st.booleans(),
    ),
    max_size=40,
)
POLICIES = st.builds(
    KeepAlivePolicy,
    jitter=st.sampled_from([0.0, 0.2]),
    confirm_after=st.sampled_from([5.0, 60.0, 200.0]),
    give_up_after=st.sampled_from([None, 100.0, 600.0]),
)


@dataclass
class Witness:
    """Drives a rule as `keep_serving` does, and keeps its own record of what would justify each decision."""

    rule: PlainRule
    policy: KeepAlivePolicy
    can_restart: bool
    now: float = 0.0
    running: bool = True
    exited: bool = False  # since the last restart
    failed_at: list[float] = field(default_factory=list)  # probes in a row, local service fine
    confirmed: bool = False  # a restart was due and has not been made yet
    answered: bool = False
    last_good: float = 0.0
    local_ok: bool = True
    refused: bool = False  # as gone, and no good probe since
    gone: bool = False
    given_up: bool = False
    retry_by: float | None = None

    def run(self, steps: list[Step], check: Callable[["Witness"], None] = lambda _: None) -> None:
        for step in steps:
            if self.given_up:
                return
            self.live(step)
            check(self)

    def live(self, step: Step) -> None:
        if step.passes is not None:
            self.now += step.passes
        else:
            self.jump(step.in_use)
        match step.event:
            case "exit":
                self.running = False
            case "arrival":
                self.rule.arrived(self.now)
                self.answered, self.last_good = True, self.now
            case "report":
                self.rule.reported(self.now)
        if not self.running:
            self.rule.exited(self.now)
            self.exited = True
        match self.rule.decide(self.now, in_use=step.in_use):
            case Wait(until):
                assert until > self.now, "a wait that is over already"
                if self.retry_by is not None:
                    assert until <= self.retry_by, "a failed restart is tried again within the cap"
            case Probe():
                self.now += step.takes
                self.probe(step.seen)
            case Restart():
                self.justify_restart()
                self.now += step.takes
                self.restart(step.outcome)
            case GiveUp(reason):
                self.justify_give_up(reason, step.in_use)
                self.given_up = True

    def jump(self, in_use: bool) -> None:
        """Waiting as told, with nothing coming in, leads to something to do: at most once past a deadline."""
        for _ in range(3):
            match self.rule.decide(self.now, in_use=in_use):
                case Wait(until):
                    assert until > self.now
                    self.now = until
                case _:
                    return
        raise AssertionError("it only ever waits")

    def probe(self, seen: str) -> None:
        url_ok, self.local_ok, _ = SEEN[seen]
        see(self.rule, self.now, seen)
        if url_ok:
            self.failed_at, self.confirmed, self.refused = [], False, False
            self.answered, self.last_good = True, self.now
            if self.running:
                self.retry_by = None
        elif self.refused and self.local_ok:
            self.gone = True
        elif self.local_ok:
            self.failed_at.append(self.now)
            # By the rule's own sum: a difference would be off by a rounding error.
            self.confirmed |= self.now >= self.failed_at[0] + self.policy.confirm_after and len(self.failed_at) > 1
        else:
            self.failed_at = []
            self.last_good = self.now  # time without a local service does not count
            if self.running:
                self.retry_by = None  # a restart would mend nothing now, so it is not tried again
        if not self.gone:
            assert self.rule.decide(self.now, in_use=False) != Probe(), "two probes without a pause between them"

    def restart(self, outcome: Outcome) -> None:
        self.retry_by = None
        self.running = outcome in ("done", "fails but runs", "gone but runs")
        match outcome:
            case "done":
                self.rule.restarted(self.now)
                self.exited, self.failed_at, self.confirmed = False, [], False
            case "gone" | "gone but runs":
                self.refused, self.gone, self.confirmed = True, not self.running, False
                self.rule.restart_failed(self.now, "refused for good", gone=True, running=self.running)
            case _:
                self.retry_by = self.now + self.policy.restart_backoff_max
                self.rule.restart_failed(self.now, "try later", gone=False, running=self.running)

    def justify_restart(self) -> None:
        assert self.can_restart, "not ours to restart"
        assert self.exited or self.confirmed, f"nothing called for a restart: {self}"

    def justify_give_up(self, reason: str, in_use: bool) -> None:
        if reason == "refused for good":
            assert self.refused
            assert self.gone
        else:
            assert self.can_restart
            assert self.policy.give_up_after is not None
            assert self.answered
            assert in_use
            assert self.local_ok
            assert self.now >= self.last_good + self.policy.give_up_after


PROPERTY = settings(max_examples=200, deadline=None)


@PROPERTY
@given(policy=POLICIES, steps=STEPS, can_restart=st.booleans(), seed=st.integers(0, 1000))
def test_every_decision_is_justified(policy: KeepAlivePolicy, steps: list[Step], can_restart: bool, seed: int) -> None:
    rule = PlainRule(policy, 0.0, can_restart=can_restart, rng=random.Random(seed))
    Witness(rule, policy, can_restart).run(steps)


@PROPERTY
@given(policy=POLICIES, steps=STEPS, can_restart=st.booleans())
def test_the_state_is_always_one_of_the_words_and_true(
    policy: KeepAlivePolicy, steps: list[Step], can_restart: bool
) -> None:
    rule = PlainRule(policy, 0.0, can_restart=can_restart, rng=random.Random(0))

    def check(witness: Witness) -> None:
        state = rule.state
        assert state.name in get_args(StateName)
        assert state.name not in ("idle", "path_fault"), "not the plain rule's to say"
        assert (state.name == "gone") == witness.given_up
        if state.name == "local_down":
            assert not witness.local_ok
        if state.name == "serving":
            assert not witness.failed_at
            assert witness.running or not can_restart
        assert state.reason or state.name == "serving", "everything but serving has a reason"

    Witness(rule, policy, can_restart).run(steps, check)


@PROPERTY
@given(policy=POLICIES, steps=STEPS)
def test_whatever_happened_a_url_that_serves_again_is_found_serving(policy: KeepAlivePolicy, steps: list[Step]) -> None:
    rule = PlainRule(policy, 0.0, rng=random.Random(0))
    witness = Witness(rule, policy, True)
    witness.run(steps)
    if not witness.given_up and not witness.gone:
        witness.run([Step(None)] * 12)  # nothing but good from here on
        assert rule.state.name in ("serving", "gone")
        assert rule.state.name == "serving" or witness.given_up
