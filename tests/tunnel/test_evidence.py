"""The fourteen rules of the tunnels sheet, one class each: evidence and the time go in, decisions come out.

Here rules 1 to 5; the others are in `test_evidence_rules.py`, rule 13 in `test_siblings.py`.
"""

from itertools import pairwise

import pytest

from tests.tunnel.driver import (
    AUTH,
    BAD_GATEWAY,
    BUSY,
    CLASSES,
    HALF_OPEN,
    NO_ANSWER,
    NO_NAME,
    NO_ROUTE,
    OK,
    ORIGIN,
    PATH,
    REFUSED,
    UNRUN,
    WRONG,
    by_class,
    every,
    follow,
    local_down,
    lost,
    make,
    reference,
    restart_at,
    restarts,
    see,
)
from tunnel import KeepAlivePolicy
from tunnel.detector import EvidenceRule, PlainRule, make_rule
from tunnel.evidence import GiveUp, Probe, Restart, Seen, Wait


def test_evidence_is_the_default_and_plain_can_be_chosen() -> None:
    assert isinstance(make_rule(KeepAlivePolicy(), 0), EvidenceRule)
    assert isinstance(make_rule(KeepAlivePolicy(rule="plain"), 0), PlainRule)


class TestRule1ClientExited:
    def test_it_is_restarted_at_once_and_nothing_is_waited_for(self) -> None:
        rule = make()
        rule.exited(3)
        assert rule.state.name != "serving"
        assert rule.decide(3) == Restart("its client exited", drain=False)
        assert rule.state.name == "restarting"

    def test_also_while_the_local_service_is_down_or_the_path_is_at_fault(self) -> None:
        for seen in (local_down(), PATH, AUTH, BUSY, UNRUN, reference(BAD_GATEWAY, False)):
            rule = make()
            see(rule, seen, 1)
            rule.exited(2)
            assert restarts(rule, 2), seen

    def test_also_while_its_log_shows_a_reconnect(self) -> None:
        rule = make()
        rule.reconnecting(1)
        rule.exited(2)
        assert restarts(rule, 2)

    def test_within_the_budget(self) -> None:
        rule = make()
        times = []
        now = 0.0
        while now < 3599:
            rule.exited(now)
            came = follow(rule, now, REFUSED, until=3599)
            if not came.restarts:
                break
            times.append(came.at)
            rule.restarted(came.at)
            now = came.at
        assert [round(at) for at in times[:4]] == [0, 15, 75, 375]
        assert len(times) == 6

    def test_what_is_held_back_is_shown(self) -> None:
        rule = make()
        rule.exited(0)
        assert restarts(rule, 0)
        rule.restarted(0)
        rule.exited(1)
        assert rule.decide(1) == Probe()  # the verification
        see(rule, REFUSED, 1)
        assert not restarts(rule, 1)
        assert rule.state.name == "suspect"
        assert rule.state.reason == "its client exited; no restart yet: the last one is not long ago"

    def test_a_late_request_of_the_old_client_does_not_revive_it(self) -> None:
        rule = make()
        rule.exited(0)
        rule.arrived(0.1)
        assert rule.state.name != "serving"
        assert restarts(rule, 0.1)

    def test_watching_only_an_exit_is_nothing(self) -> None:
        rule = make(can_restart=False)
        rule.exited(0)
        assert isinstance(rule.decide(0), Wait)


class TestRule2Gone:
    def test_a_refusal_as_gone_and_no_client_is_gone(self) -> None:
        rule = lost()
        assert restarts(rule, 0)
        rule.restart_failed(1, "the registration is over", gone=True, running=False)
        assert rule.decide(1) == GiveUp("the registration is over")
        assert rule.state.name == "gone"

    @pytest.mark.parametrize("seen", [NO_ROUTE, HALF_OPEN, BAD_GATEWAY, REFUSED, NO_NAME], ids=by_class)
    def test_a_refusal_as_gone_while_a_client_runs_needs_a_url_that_does_not_serve(self, seen: Seen) -> None:
        rule = self.refused()
        assert rule.decide(1) == Probe(), "asked at once"
        see(rule, seen, 1.1)
        assert rule.decide(1.1) == GiveUp("the registration is over")

    @pytest.mark.parametrize(
        "seen",
        [NO_ANSWER, PATH, AUTH, BUSY, WRONG, UNRUN, local_down(), reference(BAD_GATEWAY, False)],
        ids=lambda seen: seen.detail,
    )
    def test_what_is_not_the_urls_own_fault_does_not_make_it_gone(self, seen: Seen) -> None:
        rule = self.refused()
        see(rule, seen, 1.1)
        assert not isinstance(rule.decide(1.1), GiveUp)

    @pytest.mark.parametrize("how", ["request", "good probe", "nonce"])
    def test_while_the_url_serves_it_is_kept(self, how: str) -> None:
        rule = self.refused()
        if how == "request":
            rule.arrived(1.05)
        elif how == "nonce":
            rule.probe_arrived(1.05)
            see(rule, NO_ROUTE, 1.1)
        else:
            see(rule, OK, 1.1)
        assert rule.state.name == "serving"
        see(rule, NO_ROUTE, 2)
        assert not isinstance(rule.decide(2), GiveUp), "the refusal is forgotten"

    def test_a_client_that_dies_after_a_refusal_as_gone_is_gone(self) -> None:
        rule = self.refused()
        rule.exited(1.2)
        assert isinstance(rule.decide(1.2), GiveUp)

    def refused(self) -> EvidenceRule:
        rule = lost()
        assert restarts(rule, 0)
        rule.restart_failed(1, "the registration is over", gone=True, running=True)
        return rule

    @pytest.mark.parametrize("hint", ["log", "expired", "terminated", "404 twice"])
    def test_a_hint_brings_one_restart_forward_past_the_counts(self, hint: str) -> None:
        rule = make()
        see(rule, NO_ROUTE, 0)
        assert not restarts(rule, 0.5)
        self.hint(rule, 0.5, hint)
        at = 10.5 if hint == "404 twice" else 0.5
        assert restarts(rule, at)
        rule.restarted(at)
        see(rule, NO_ROUTE, at + 16)
        self.hint(rule, at + 16, hint)
        assert not restarts(rule, at + 30), "one"

    def hint(self, rule: EvidenceRule, now: float, hint: str) -> None:
        if hint == "log":
            rule.said_gone(now, "its client was told: tunnel is inactive")
        elif hint == "404 twice":
            rule.record(now, None)
            rule.record(now + 10, None)
        else:
            rule.record(now, hint)

    @pytest.mark.parametrize("hint", ["log", "expired", "terminated", "404 twice"])
    @pytest.mark.parametrize("seen", [NO_ANSWER, PATH, BUSY, local_down()], ids=lambda seen: seen.detail)
    def test_a_hint_does_nothing_unless_the_url_does_not_serve(self, hint: str, seen: Seen) -> None:
        rule = make()
        see(rule, seen, 0)
        self.hint(rule, 1, hint)
        assert not isinstance(rule.decide(11), Restart | GiveUp)

    @pytest.mark.parametrize("hint", ["log", "expired", "terminated", "404 twice"])
    def test_a_hint_never_decides_alone(self, hint: str) -> None:
        rule = make()
        for at in range(0, 600, 30):
            self.hint(rule, at, hint)
            came = follow(rule, at, OK, until=at + 30, requests=[at + 5])
            assert came.action is None
            assert rule.state.name == "serving"

    def test_a_hint_while_requests_came_in_a_moment_ago_waits_for_silence(self) -> None:
        # A restart that is refused as gone would take a tunnel away that serves, for one lost probe.
        rule = make()
        rule.arrived(0)
        see(rule, NO_ROUTE, 1)
        rule.said_gone(1, "its client was told: tunnel is inactive")
        assert not restarts(rule, 9.9)
        assert restarts(rule, 10)

    def test_two_404s_of_the_api_count_only_10_s_apart_and_in_a_row(self) -> None:
        for times, brought_forward in [
            ([(0, None), (9.9, None)], False),
            ([(0, None), (10, None)], True),
            ([(0, None), (5, "connected"), (10, None)], False),
            ([(0, "connected"), (20, "connected")], False),
        ]:
            rule = make()
            see(rule, NO_ROUTE, 0)
            for at, status in times:
                rule.record(at, status)
            assert restarts(rule, 20) == brought_forward, times

    def test_the_api_is_asked_only_when_suspicious_and_at_most_every_20_s(self) -> None:
        rule = make()
        assert not rule.wants_record(0)
        see(rule, NO_ROUTE, 1)
        assert rule.wants_record(1)
        assert not rule.wants_record(20.9)
        assert rule.wants_record(21)
        rule.arrived(22)
        assert not rule.wants_record(60)
        rule.exited(61)
        assert rule.wants_record(61)
        assert not make(can_restart=False).wants_record(0)

    def test_an_answer_of_the_api_that_comes_after_the_url_served_again_is_too_late(self) -> None:
        rule = make()
        see(rule, NO_ROUTE, 0)
        rule.arrived(1)
        rule.record(2, "terminated")
        see(rule, NO_ROUTE, 30)
        assert not restarts(rule, 30)

    def test_gone_is_the_last_word(self) -> None:
        rule = self.refused()
        see(rule, NO_ROUTE, 2)
        action = rule.decide(2)
        assert isinstance(action, GiveUp)
        rule.arrived(3)
        see(rule, OK, 4)
        rule.exited(5)
        rule.logged_in(5)
        assert rule.state.name == "gone"
        assert rule.decide(6) == action


class TestRule3WhatClearsTheCounts:
    @pytest.mark.parametrize("how", ["request", "OK", "ORIGIN", "nonce"])
    @pytest.mark.parametrize("seen", CLASSES, ids=by_class)
    def test_one_sign_of_life_clears_every_count(self, seen: Seen, how: str) -> None:
        rule = make()
        see(rule, seen, 0, 30, 60)
        for at in (1, 30, 60):
            rule.connect_failed(at, "i/o timeout")
        if how == "request":
            rule.arrived(61)
        elif how == "nonce":
            rule.probe_arrived(61)
            see(rule, NO_ANSWER, 61)
        else:
            see(rule, OK if how == "OK" else ORIGIN, 61)
        assert rule.state.name == "serving"
        see(rule, seen, 120)
        assert not restarts(rule, 120)
        assert rule.state.name == "suspect"

    def test_a_probe_that_arrives_and_whose_answer_is_lost_is_a_good_one(self) -> None:
        rule = make()
        for at in range(0, 600, 30):
            rule.probe_arrived(at)
            see(rule, NO_ANSWER, at)
            assert rule.state.name == "serving"
            assert not isinstance(rule.decide(at), Restart | Probe)

    def test_the_nonce_of_one_probe_says_nothing_of_the_next(self) -> None:
        rule = make()
        rule.probe_arrived(30)
        assert rule.decide(30) == Probe(), "the probe was broken off, so there is another one"
        see(rule, NO_ROUTE, 30.1)
        assert rule.state.name == "suspect"

    def test_it_clears_a_restart_that_is_held_back(self) -> None:
        rule = lost()
        rule.reconnecting(0)
        assert not restarts(rule, 0)
        rule.arrived(20)
        assert not restarts(rule, 46)

    def test_it_clears_a_restart_under_way(self) -> None:
        rule = lost()
        assert restarts(rule, 0)  # it is being drained
        rule.arrived(1)
        assert rule.state.name == "serving"
        assert isinstance(rule.decide(1), Wait)
        see(rule, NO_ROUTE, 31, 32, 36)
        assert restarts(rule, 36), "and has cost nothing"


class TestRule4Spacing:
    def test_idle_it_looks_every_30_s(self) -> None:
        assert follow(make(), 0, OK, until=300).looks == [30, 60, 90, 120, 150, 180, 210, 240, 270, 300]

    def test_with_traffic_every_120_s(self) -> None:
        looks = follow(make(), 0, OK, until=1000, requests=every(0.5, 0.1, 1000)).looks
        assert looks == [30, 150, 270, 390, 510, 630, 750, 870, 990]

    @pytest.mark.parametrize(("ago", "spacing"), [(9.9, 120), (10, 30), (11, 30)])
    def test_traffic_is_a_request_in_the_last_10_s(self, ago: float, spacing: float) -> None:
        rule = make()
        rule.arrived(30 - ago)
        see(rule, OK, 30)
        assert rule.decide(30) == Wait(30 + spacing)

    def test_after_failures_1_2_4_8_15_15(self) -> None:
        looks = follow(make(), 0, local_down(), until=120).looks
        assert [b - a for a, b in pairwise(looks)] == [1, 2, 4, 8, 15, 15, 15, 15, 15]

    def test_requests_do_not_make_it_look_oftener(self) -> None:
        # The host's own path is broken, while the rollouts' requests arrive.
        looks = follow(make(), 0, PATH, until=130, requests=every(0.5, 0.1, 140)).looks
        assert [b - a for a, b in pairwise(looks)] == [1, 2, 4, 8, 15, 15, 15, 15, 15]

    def test_a_good_probe_starts_that_anew(self) -> None:
        rule = make()
        see(rule, NO_ROUTE, 0, 1, 3)
        see(rule, OK, 4)
        see(rule, NO_ROUTE, 34)
        assert rule.decide(34) == Wait(35)

    @pytest.mark.parametrize(
        ("gap", "after"),
        [
            (0.1, 3),  # no sooner than that
            (0.5, 4.5),  # nine gaps
            (2, 18),
            (5, 30),  # no later than idle
        ],
    )
    def test_an_odd_silence_brings_a_probe_forward(self, gap: float, after: float) -> None:
        rule = make(busy_spacing=10_000)
        requests = every(gap, 31, 231)
        came = follow(rule, 0, OK, until=requests[-1] + after + 0.01, requests=requests)
        assert came.looks[-1] == pytest.approx(requests[-1] + after)

    def test_too_little_traffic_makes_no_silence_odd(self) -> None:
        for requests, odd in [(10, False), (11, True)]:
            rule = make()
            see(rule, OK, 0)
            for i in range(requests):
                rule.arrived(i * 0.1)
            assert (rule.decide(9) == Probe()) == odd

    def test_each_good_probe_doubles_the_patience_until_the_next_request(self) -> None:
        rule = make(idle_spacing=100, busy_spacing=10_000)
        requests = every(0.5, 101, 151)
        looks = follow(rule, 0, OK, until=400, requests=requests).looks
        gaps = [b - a for a, b in pairwise([requests[-1], *(at for at in looks if at > requests[-1])])]
        assert gaps[:4] == pytest.approx([4.5, 9, 18, 36])

    def test_silence_alone_restarts_nothing(self) -> None:
        came = follow(make(), 0, OK, until=10_000, requests=every(0.5, 1, 600))
        assert came.action is None

    def test_a_report_brings_a_probe_forward_but_not_closer_than_1_s_to_the_last_one(self) -> None:
        rule = make()
        rule.reported(5)
        assert rule.decide(5) == Probe()
        see(rule, OK, 5.2)
        rule.reported(5.5)
        assert rule.decide(5.5) == Wait(6.2)

    def test_every_wait_is_jittered(self) -> None:
        first = {round(follow(make(seed=seed, jitter=0.2), 0, OK, until=40).looks[0], 3) for seed in range(50)}
        assert len(first) > 40
        assert min(first) >= 24
        assert max(first) <= 36


class TestRule5WhatTakesARestart:
    """Each condition has a test that fails without it: see `test_sharpness.py`."""

    @pytest.mark.parametrize(
        ("seen", "times", "span"),
        [
            (NO_ROUTE, 3, 5),
            (HALF_OPEN, 3, 45),
            (REFUSED, 4, 45),
            (BAD_GATEWAY, 4, 45),
            (NO_ANSWER, 4, 60),
            (NO_NAME, 2, 5),
            (reference(BAD_GATEWAY, None), 6, 120),
            (reference(NO_ANSWER, None), 6, 120),
        ],
        ids=["NO_ROUTE", "HALF_OPEN", "REFUSED", "BAD_GATEWAY", "NO_ANSWER", "NO_NAME", "BAD_GATEWAY ?", "NO_ANSWER ?"],
    )
    def test_so_many_over_so_long(self, seen: Seen, times: int, span: float) -> None:
        self.check_span(seen, times, span)
        self.check_times(seen, times, span)

    def check_span(self, seen: Seen, times: int, span: float) -> None:
        rule = make(give_up_after=None)
        see(rule, seen, *(i * 0.1 for i in range(times + 5)))
        see(rule, seen, span - 0.1)
        assert not restarts(rule, span - 0.1), "often enough, but not for long enough"
        see(rule, seen, span)
        assert restarts(rule, span)

    def check_times(self, seen: Seen, times: int, span: float) -> None:
        rule = make(give_up_after=None)
        see(rule, seen, *(span * i for i in range(times - 1)))
        assert not restarts(rule, span * (times - 2)), "for long enough, but not often enough"
        see(rule, seen, span * times)
        assert restarts(rule, span * times)

    @pytest.mark.parametrize("seen", CLASSES, ids=by_class)
    def test_never_while_the_local_service_is_down(self, seen: Seen) -> None:
        assert restart_at(make(), 0, local_down(seen), until=2000) is None

    @pytest.mark.parametrize("seen", CLASSES, ids=by_class)
    def test_a_local_service_that_was_down_once_starts_a_new_count(self, seen: Seen) -> None:
        rule = make()
        see(rule, seen, 0, 30, 60)
        see(rule, local_down(seen), 119)
        see(rule, seen, 120)
        assert not restarts(rule, 120)

    @pytest.mark.parametrize("seen", CLASSES, ids=by_class)
    def test_never_while_requests_arrive(self, seen: Seen) -> None:
        # One request between any two probes is enough.
        rule = make()
        for at in range(0, 1500, 15):
            see(rule, seen, at)
            assert not restarts(rule, at)
            rule.arrived(at + 7)

    @pytest.mark.parametrize("seen", CLASSES, ids=by_class)
    def test_never_while_the_probes_themselves_arrive(self, seen: Seen) -> None:
        rule = make()
        for at in range(0, 1500, 15):
            rule.probe_arrived(at)
            see(rule, seen, at)
            assert not restarts(rule, at)

    def test_a_request_before_the_first_failure_is_no_hindrance(self) -> None:
        rule = make()
        rule.arrived(0)
        see(rule, NO_ROUTE, 0.1, 1, 5.1)
        assert restarts(rule, 5.1)

    @pytest.mark.parametrize("other", [*CLASSES, PATH, AUTH, BUSY, WRONG], ids=lambda seen: seen.outcome.name)
    @pytest.mark.parametrize("seen", CLASSES, ids=by_class)
    def test_another_class_starts_a_new_count(self, seen: Seen, other: Seen) -> None:
        if seen is other:
            return
        rule = make()
        times = {NO_ROUTE: 3, HALF_OPEN: 3, REFUSED: 4, BAD_GATEWAY: 4, NO_ANSWER: 4, NO_NAME: 2}[seen]
        see(rule, seen, *(60 * i / times for i in range(times - 1)))
        see(rule, other, 61)
        see(rule, seen, 62)
        assert not restarts(rule, 62)

    @pytest.mark.parametrize("seen", [BAD_GATEWAY, NO_ANSWER, NO_NAME], ids=by_class)
    def test_never_while_the_reference_fails(self, seen: Seen) -> None:
        rule = make()
        assert restart_at(rule, 0, reference(seen, False), until=2000) is None
        assert rule.state.name == "path_fault"

    @pytest.mark.parametrize("seen", [BAD_GATEWAY, NO_ANSWER], ids=by_class)
    def test_a_reference_that_failed_once_starts_a_new_count(self, seen: Seen) -> None:
        rule = make()
        see(rule, seen, 0, 30, 60)
        see(rule, reference(seen, False), 100)
        see(rule, seen, 101)
        assert not restarts(rule, 101)

    @pytest.mark.parametrize("seen", [BAD_GATEWAY, NO_ANSWER], ids=by_class)
    def test_without_a_reference_it_takes_more(self, seen: Seen) -> None:
        rule = make()
        see(rule, reference(seen, None), 0, 30, 60, 90)
        assert not restarts(rule, 90)
        see(rule, reference(seen, None), 110, 119)
        assert not restarts(rule, 119)
        see(rule, reference(seen, None), 120)
        assert restarts(rule, 120)

    def test_a_name_that_is_lost_without_a_reference_is_the_hosts_own_trouble(self) -> None:
        assert restart_at(make(), 0, reference(NO_NAME, None), until=2000) is None

    # -- a login stuck behind a silent old session

    def stuck(self, *, times: int = 3, span: float = 45, known: bool | None = True, seen: Seen = NO_ROUTE) -> bool:
        """Whether so many connect errors over `span` restart a client whose URL failed once a moment ago."""
        rule = make()
        for i in range(times):
            rule.connect_failed(i * span / (times - 1), "i/o timeout")
        see(rule, reference(seen, known), span)
        return restarts(rule, span)

    def test_stuck_login(self) -> None:
        assert self.stuck()
        assert self.stuck(seen=NO_ANSWER)

    def test_stuck_login_needs_three_errors(self) -> None:
        assert not self.stuck(times=2)

    def test_stuck_login_needs_45_s(self) -> None:
        assert not self.stuck(times=10, span=44.9)

    def test_stuck_login_needs_the_reference(self) -> None:
        assert not self.stuck(known=False)
        assert not self.stuck(known=None)

    def test_stuck_login_needs_the_local_service(self) -> None:
        assert not self.stuck(seen=local_down())

    def test_stuck_login_needs_a_url_that_fails(self) -> None:
        assert not self.stuck(seen=OK)
        assert not self.stuck(seen=PATH)

    def test_stuck_login_needs_one_error_that_repeats(self) -> None:
        rule = make()
        for at, error in [(0, "i/o timeout"), (20, "connection refused"), (45, "i/o timeout"), (60, "i/o timeout")]:
            rule.connect_failed(at, error)
        see(rule, reference(NO_ROUTE, True), 60)
        assert not restarts(rule, 60)

    def test_stuck_login_is_over_with_a_login(self) -> None:
        rule = make()
        for at in (0, 20, 45):
            rule.connect_failed(at, "i/o timeout")
        rule.logged_in(46)
        see(rule, reference(NO_ROUTE, True), 46)
        assert not restarts(rule, 46)

    def test_stuck_login_is_over_with_a_request(self) -> None:
        rule = make()
        for at in (0, 20, 45):
            rule.connect_failed(at, "i/o timeout")
        rule.arrived(46)
        see(rule, reference(NO_ROUTE, True), 47)
        assert not restarts(rule, 47)

    # -- in plain words

    @pytest.mark.parametrize(
        ("seen", "reason"),
        [
            (NO_ROUTE, "route lost: 3 gateway 404s in 61 s, local service fine"),
            (HALF_OPEN, "half open: 3 slow gateway 404s in 61 s, local service fine"),
            (REFUSED, "refused: 4 refused connections in 61 s, local service fine"),
            (BAD_GATEWAY, "no way through the gateway: 4 of its errors in 61 s, local service and gateway fine"),
            (NO_ANSWER, "silent: 4 probes without an answer in 61 s, local service and gateway fine"),
            (NO_NAME, "name lost: 2 look-ups that found none in 61 s, local service and gateway fine"),
        ],
        ids=lambda value: value.outcome.name if isinstance(value, Seen) else "",
    )
    def test_the_reason_is_in_plain_words(self, seen: Seen, reason: str) -> None:
        rule = make()
        times = int(reason.split(": ")[1].split()[0])
        see(rule, seen, *range(times - 1), 61)
        action = rule.decide(61)
        assert isinstance(action, Restart)
        assert action.reason == reason
        assert (rule.state.name, rule.state.reason) == ("restarting", reason)
