"""Drives a rule by evidence as `keep_serving` does, in no time at all."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from tunnel import KeepAlivePolicy
from tunnel.detector import EvidenceRule
from tunnel.evidence import Action, GiveUp, Outcome, Probe, Restart, Seen, Wait
from tunnel.siblings import Siblings

OVERRIDES: dict[str, Any] = {}
"""Of the policy, for all rules made here: what the check of the tests' own sharpness sets."""

OK = Seen(Outcome.OK, True, "answered 200", is_200=True)
ORIGIN = Seen(Outcome.ORIGIN, True, "answered 503")
NO_ROUTE = Seen(Outcome.NO_ROUTE, True, "gateway 404")
HALF_OPEN = Seen(Outcome.HALF_OPEN, True, "slow gateway 404")
REFUSED = Seen(Outcome.REFUSED, True, "connection refused")
BAD_GATEWAY = Seen(Outcome.BAD_GATEWAY, True, "gateway 502", reference=True)
NO_ANSWER = Seen(Outcome.NO_ANSWER, True, "no answer within 12 s", reference=True)
NO_NAME = Seen(Outcome.NO_NAME, True, "no such name", reference=True)
PATH = Seen(Outcome.PATH, True, "no route to host")
AUTH = Seen(Outcome.AUTH, True, "gateway 403")
BUSY = Seen(Outcome.BUSY, True, "gateway 429")
WRONG = Seen(Outcome.WRONG, True, "200 from somebody else")
CLASSES = [NO_ROUTE, HALF_OPEN, REFUSED, BAD_GATEWAY, NO_ANSWER, NO_NAME]
"""Those that repeat, and then take a restart."""

UNRUN = Seen(Outcome.UNRUN, True, "too many open files")


def local_down(seen: Seen = NO_ROUTE) -> Seen:
    return replace(seen, local_ok=False, detail="the local service: answered 503")


def reference(seen: Seen, known: bool | None) -> Seen:
    return replace(seen, reference=known)


def make(
    now: float = 0.0,
    *,
    can_restart: bool = True,
    siblings: Siblings | None = None,
    name: object = None,
    seed: int = 0,
    **policy: Any,
) -> EvidenceRule:
    """A rule with the default policy but no jitter, so that times can be written down."""
    made = KeepAlivePolicy.model_validate({"jitter": 0.0, **policy}).model_copy(update=OVERRIDES)
    return EvidenceRule(made, now, can_restart=can_restart, rng=random.Random(seed), siblings=siblings, name=name)


@dataclass(frozen=True)
class Came:
    """What came of following a rule: when it stopped, at which action, and when it looked."""

    at: float
    action: Action | None
    looks: list[float]

    @property
    def restarts(self) -> bool:
        return isinstance(self.action, Restart)


def follow(
    rule: EvidenceRule,
    now: float,
    answer: Seen | Callable[[float], Seen],
    *,
    until: float,
    requests: Iterable[float] = (),
    takes: float = 0.0,
    in_use: bool = True,
) -> Came:
    """Do as the rule says: wait, and answer its probes (each of which `takes` so long), while requests come in.

    Stops at the first `Restart` or `GiveUp`, or when there is nothing to do before `until`.
    """
    arrivals = sorted(at for at in requests if at >= now)
    looks: list[float] = []

    def pass_to(at: float) -> float:
        while arrivals and arrivals[0] <= at:
            rule.arrived(arrivals.pop(0))
        return at

    for _ in range(200_000):
        match rule.decide(now, in_use=in_use):
            case Wait(at):
                assert at > now, f"a wait until {at}, and it is {now}"
                if arrivals and arrivals[0] < at:
                    now = arrivals[0]
                    pass_to(now)
                elif at > until:
                    return Came(now, None, looks)
                else:
                    now = at
            case Probe():
                looks.append(now)
                seen = answer(now) if callable(answer) else answer
                now = pass_to(now + takes)
                rule.looked(now, seen)
            case action:
                assert isinstance(action, Restart | GiveUp)
                return Came(now, action, looks)
        if now > until:
            return Came(now, None, looks)
    raise AssertionError(f"the rule goes round in circles at {now}")


def restart_at(rule: EvidenceRule, now: float, answer: Seen | Callable[[float], Seen], *, until: float) -> float | None:
    """When it restarts, if it does before `until`."""
    came = follow(rule, now, answer, until=until)
    return came.at if came.restarts else None


def every(seconds: float, start: float, end: float) -> list[float]:
    return [start + seconds * i for i in range(int((end - start) / seconds))]


def by_class(seen: Seen) -> str:
    return f"{seen.outcome.name}{'' if seen.reference is not None or seen.outcome is Outcome.NO_ROUTE else ', R ?'}"


def see(rule: EvidenceRule, seen: Seen, *times: float) -> None:
    for at in times:
        rule.looked(at, seen)


def lost(now: float = 0.0, **policy: Any) -> EvidenceRule:
    """A rule that has just seen enough for a restart: three 404s, the last at `now`."""
    rule = make(now - 10, **policy)
    see(rule, NO_ROUTE, now - 6, now - 5, now)
    return rule


def restarts(rule: EvidenceRule, now: float) -> bool:
    return isinstance(rule.decide(now), Restart)
