"""Are the tests of rule 5 sharp? Each condition is dropped in turn, and then the test named for it must fail."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.tunnel import driver
from tests.tunnel.driver import BAD_GATEWAY, HALF_OPEN, NO_ANSWER, NO_NAME, NO_ROUTE, REFUSED, reference
from tests.tunnel.test_evidence import TestRule5WhatTakesARestart as Rule5
from tunnel.clues import ClientNews, Repetition
from tunnel.detector import EvidenceRule
from tunnel.evidence import Outcome, Seen
from tunnel.policy import KeepAlivePolicy, Repeats

Mutation = Callable[[pytest.MonkeyPatch], None]
Check = Callable[[Rule5], None]


def policy(field: str, *, times: int = 0, span: float = 0.0) -> Mutation:
    """The condition moved by one, or by a tenth of a second."""
    asked: Repeats = getattr(KeepAlivePolicy(), field)
    return lambda patch: patch.setitem(driver.OVERRIDES, field, Repeats(asked.times + times, asked.span + span))


def local_service_is_not_asked(patch: pytest.MonkeyPatch) -> None:
    looked = EvidenceRule.looked
    patch.setattr(EvidenceRule, "looked", lambda self, now, seen: looked(self, now, replace(seen, local_ok=True)))


def requests_do_not_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EvidenceRule, "arrived", lambda self, now: None)


def nonces_do_not_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EvidenceRule, "probe_arrived", lambda self, now: None)


def any_class_goes_on(patch: pytest.MonkeyPatch) -> None:
    count = Repetition.count
    patch.setattr(Repetition, "count", lambda self, now, kind, known: count(self, now, self.kind or kind, known))


def count_is_never_begun_anew(patch: pytest.MonkeyPatch) -> None:
    """One class is counted on, whatever was seen in between."""

    def count(self: Repetition, now: float, kind: Outcome, known: bool | None) -> None:
        counts = self.__dict__.setdefault("counts", {})
        times, first = counts.get(kind, (0, now))
        counts[kind] = times + 1, first
        self.kind, self._count, self._first, self._last, self.reference = kind, times + 1, first, now, known

    patch.setattr(Repetition, "count", count)


def reference_is_not_asked(patch: pytest.MonkeyPatch) -> None:
    looked = EvidenceRule.looked
    patch.setattr(EvidenceRule, "looked", lambda self, now, seen: looked(self, now, replace(seen, reference=True)))


def unknown_reference_is_a_good_one(patch: pytest.MonkeyPatch) -> None:
    looked = EvidenceRule.looked

    def lenient(self: EvidenceRule, now: float, seen: Seen) -> None:
        looked(self, now, replace(seen, reference=seen.reference is not False))

    patch.setattr(EvidenceRule, "looked", lenient)


def any_connect_error_goes_on(patch: pytest.MonkeyPatch) -> None:
    failed = ClientNews.failed
    patch.setattr(ClientNews, "failed", lambda self, now, error: failed(self, now, "one"))


SEEN = {
    "no_route": (NO_ROUTE, 3, 5.0),
    "half_open": (HALF_OPEN, 3, 45.0),
    "refused": (REFUSED, 4, 45.0),
    "bad_gateway": (BAD_GATEWAY, 4, 45.0),
    "no_answer": (NO_ANSWER, 4, 60.0),
    "no_name": (NO_NAME, 2, 5.0),
}


def mutants() -> dict[str, tuple[Mutation, Check]]:
    found: dict[str, tuple[Mutation, Check]] = {}
    for field, (seen, times, span) in SEEN.items():
        for what, more in {"one less": -1, "one more": 1}.items():
            if times + more < 2:
                continue  # one look is over no time at all
            found[f"{field}: {what}"] = (
                policy(field, times=more),
                lambda rule5, seen=seen, times=times, span=span: rule5.check_times(seen, times, span),  # type: ignore[misc]
            )
        for what, length in {"sooner": -0.1, "later": 0.1}.items():
            found[f"{field}: {what}"] = (
                policy(field, span=length),
                lambda rule5, seen=seen, times=times, span=span: rule5.check_span(seen, times, span),  # type: ignore[misc]
            )
        name = seen.outcome.name
        found[f"{name}: L"] = (
            local_service_is_not_asked,
            lambda rule5, seen=seen: rule5.test_never_while_the_local_service_is_down(seen),  # type: ignore[misc]
        )
        found[f"{name}: L once"] = (
            local_service_is_not_asked,
            lambda rule5, seen=seen: rule5.test_a_local_service_that_was_down_once_starts_a_new_count(seen),  # type: ignore[misc]
        )
        found[f"{name}: requests"] = (
            requests_do_not_count,
            lambda rule5, seen=seen: rule5.test_never_while_requests_arrive(seen),  # type: ignore[misc]
        )
        found[f"{name}: nonces"] = (
            nonces_do_not_count,
            lambda rule5, seen=seen: rule5.test_never_while_the_probes_themselves_arrive(seen),  # type: ignore[misc]
        )
        other = REFUSED if seen is NO_ROUTE else NO_ROUTE
        for mutation in (any_class_goes_on, count_is_never_begun_anew):
            found[f"{name}: {mutation.__name__}"] = (
                mutation,
                lambda rule5, seen=seen, other=other: rule5.test_another_class_starts_a_new_count(seen, other),  # type: ignore[misc]
            )
    for seen in (BAD_GATEWAY, NO_ANSWER, NO_NAME):
        found[f"{seen.outcome.name}: R"] = (
            reference_is_not_asked,
            lambda rule5, seen=seen: rule5.test_never_while_the_reference_fails(seen),  # type: ignore[misc]
        )
    for seen in (BAD_GATEWAY, NO_ANSWER):
        found[f"{seen.outcome.name}: R once"] = (
            reference_is_not_asked,
            lambda rule5, seen=seen: rule5.test_a_reference_that_failed_once_starts_a_new_count(seen),  # type: ignore[misc]
        )
        found[f"{seen.outcome.name}: R not known"] = (
            unknown_reference_is_a_good_one,
            lambda rule5, seen=seen: rule5.test_without_a_reference_it_takes_more(seen),  # type: ignore[misc]
        )
        for what, more in {"one less": -1, "one more": 1}.items():
            found[f"{seen.outcome.name}: R not known, {what}"] = (
                policy("no_reference", times=more),
                lambda rule5, seen=seen: rule5.check_times(reference(seen, None), 6, 120.0),  # type: ignore[misc]
            )
        for what, length in {"sooner": -0.1, "later": 0.1}.items():
            found[f"{seen.outcome.name}: R not known, {what}"] = (
                policy("no_reference", span=length),
                lambda rule5, seen=seen: rule5.check_span(reference(seen, None), 6, 120.0),  # type: ignore[misc]
            )
    found |= {
        "NO_NAME: R not known": (
            unknown_reference_is_a_good_one,
            Rule5.test_a_name_that_is_lost_without_a_reference_is_the_hosts_own_trouble,
        ),
        "stuck login: one less": (policy("stuck_login", times=-1), Rule5.test_stuck_login_needs_three_errors),
        "stuck login: one more": (policy("stuck_login", times=1), Rule5.test_stuck_login),
        "stuck login: sooner": (policy("stuck_login", span=-0.1), Rule5.test_stuck_login_needs_45_s),
        "stuck login: later": (policy("stuck_login", span=0.1), Rule5.test_stuck_login),
        "stuck login: L": (local_service_is_not_asked, Rule5.test_stuck_login_needs_the_local_service),
        "stuck login: R": (reference_is_not_asked, Rule5.test_stuck_login_needs_the_reference),
        "stuck login: R not known": (unknown_reference_is_a_good_one, Rule5.test_stuck_login_needs_the_reference),
        "stuck login: requests": (requests_do_not_count, Rule5.test_stuck_login_is_over_with_a_request),
        "stuck login: one error": (any_connect_error_goes_on, Rule5.test_stuck_login_needs_one_error_that_repeats),
    }
    return found


MUTANTS = mutants()


@pytest.mark.parametrize("name", MUTANTS)
def test_without_this_condition_the_test_named_for_it_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation, check = MUTANTS[name]
    check(Rule5())  # it passes as things are
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        check(Rule5())
