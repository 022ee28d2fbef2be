"""How soon a rule of the keepalive restarts a tunnel that is lost, and how often one that is not: in virtual time.

A Monte Carlo over the faults and traffic rates of the tunnels sheet, with the real rule classes. Each life serves for a
while, then a fault begins. `restart_p50`, `restart_p95` and `restart_max` are seconds from then to the decision to
restart, where a restart mends the fault. `needless_share` is the share of lives with a restart that mends nothing: any
restart where none can, and one before the fault where one can. In `loss 5 %, idle` it is that of an hour's idle life,
and `needless_restarts` their number in 1,000 hours. 0.2 % of healthy probes are lost everywhere else.
"""

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.report import Figure, parse, show, write
from tunnel.detector import EvidenceRule
from tunnel.evidence import GiveUp, Outcome, Probe, Restart, Rule, Seen, Wait
from tunnel.plain import PlainRule
from tunnel.policy import KeepAlivePolicy

SUBJECTS = ("evidence", "plain")

BEFORE = 300.0
"""Seconds a life serves, at least, before its fault; a random part of a period is added."""

AFTER = 200.0
"""Seconds it is looked at when the fault is over: a restart may come late."""

LOSS = 0.002
"""Share of healthy probes that are lost."""

HEALTHY = Seen(Outcome.OK, True, "answered 200", reference=True, is_200=True)
LOST = Seen(Outcome.NO_ANSWER, True, "no answer", reference=True)


@dataclass(frozen=True, slots=True)
class Fault:
    """`seen` by each probe, which `takes` so many seconds; `arrives`: rollouts' own requests come through all the same.

    `lasts`: None where a restart mends it, else so many seconds.
    """

    seen: Seen
    takes: float
    arrives: bool
    lasts: float | None = None


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    fault: Fault
    rate: float
    """Requests a second."""


@dataclass(slots=True)
class Life:
    """What became of one."""

    restarted_after: float | None = None
    """The fault began."""
    needless: bool = False
    probes: int = 0
    """Before the fault."""
    served: float = 0.0
    """Seconds before the fault."""


STALL = 12.0
"""A probe's timeout."""

LASTING = {
    "host DNS": Fault(Seen(Outcome.PATH, True, "no DNS", reference=False), 2.0, True),
    "host connect": Fault(Seen(Outcome.PATH, True, "no route", reference=False), STALL, True),
    "host stall": Fault(Seen(Outcome.NO_ANSWER, True, "no answer", reference=False), STALL, True),
    "host offline": Fault(Seen(Outcome.PATH, True, "no route", reference=False), STALL, False),
    "gateway 502": Fault(Seen(Outcome.BAD_GATEWAY, True, "gateway 502", reference=False), 0.2, False),
    "local stalled": Fault(Seen(Outcome.NO_ANSWER, False, "no answer", reference=True), STALL, False),
    "this URL's path only": Fault(Seen(Outcome.NO_ANSWER, True, "no answer", reference=True), STALL, True),
}
"""A restart mends none of these."""

MENDABLE = {
    "route lost": Fault(Seen(Outcome.NO_ROUTE, True, "gateway 404"), 0.1, False),
    "half-open": Fault(Seen(Outcome.HALF_OPEN, True, "slow gateway 404"), 10.0, False),
}


def cases() -> Iterator[Case]:
    for name, fault in MENDABLE.items():
        for rate in (2, 0.1, 0):
            yield Case(f"{name}, {rate:g} req/s", fault, rate)
    for name, fault in LASTING.items():
        for lasts in (20, 90, 600):
            for rate in (2, 0):
                lasting = Fault(fault.seen, fault.takes, fault.arrives, lasts)
                yield Case(f"{name}, {lasts} s, {rate:g} req/s", lasting, rate)


def make_rule(subject: str, rng: random.Random) -> Rule:
    policy = KeepAlivePolicy(rule="plain" if subject == "plain" else "evidence", give_up_after=None)
    return PlainRule(policy, 0.0, rng=rng) if subject == "plain" else EvidenceRule(policy, 0.0, rng=rng)


class World:
    """One tunnel's time: requests come in, probes are answered, as long as the rule only waits and probes."""

    def __init__(self, rule: Rule, rng: random.Random, rate: float, loss: float) -> None:
        self.now = 0.0
        self.probes = 0
        self._rule, self._rng, self._rate, self._loss = rule, rng, rate, loss
        self._fault: Fault | None = None
        self._begin = self._end = float("inf")
        self._requests: list[float] = []
        if rate:
            heapq.heappush(self._requests, rng.expovariate(rate))

    def strike(self, fault: Fault, begin: float) -> None:
        self._fault, self._begin = fault, begin
        self._end = float("inf") if fault.lasts is None else begin + fault.lasts

    def live(self, until: float) -> bool:
        """True: it stopped at a restart, before `until`."""
        rule = self._rule
        while self.now < until:
            match rule.decide(self.now):
                case Wait(at):
                    # A request may change what the rule waits for, so it is asked again after each.
                    self._pass(min(at, until), stop=True)
                case Probe():
                    self._probe()
                case Restart():
                    return True
                case GiveUp(reason):
                    raise AssertionError(reason)
        return False

    def _probe(self) -> None:
        self.probes += 1
        fault = self._fault if self._begin <= self.now < self._end else None
        seen, takes = (HEALTHY, 0.1) if fault is None else (fault.seen, fault.takes)
        if fault is None and self._rng.random() < self._loss:
            seen, takes = LOST, STALL
        self._pass(self.now + takes, stop=False)
        self._rule.looked(self.now, seen)

    def _pass(self, until: float, *, stop: bool) -> None:
        """Time goes on `until` then, or to the next request that arrives."""
        while self._requests and self._requests[0] <= until:
            at = heapq.heapreplace(self._requests, self._requests[0] + self._rng.expovariate(self._rate))
            in_fault = self._begin <= at < self._end
            if not in_fault or (self._fault is not None and self._fault.arrives):
                self._rule.arrived(at)
                if stop:
                    self.now = max(self.now, at)
                    return
        self.now = max(self.now, until)


def live(case: Case, subject: str, seed: int) -> Life:
    rng = random.Random(f"{case.name} {seed}")
    rule = make_rule(subject, rng)
    world = World(rule, rng, case.rate, LOSS)
    life = Life(served=BEFORE + rng.uniform(0, 120))
    world.strike(case.fault, life.served)
    while world.live(life.served):
        life.needless = True
        rule.restarted(world.now)
    life.probes = world.probes
    end = life.served + (900.0 if case.fault.lasts is None else case.fault.lasts + AFTER)
    if world.live(end):
        life.restarted_after = world.now - life.served
        life.needless |= case.fault.lasts is not None
    return life


def measure(case: Case, subject: str, lives: int) -> list[Figure]:
    lived = [live(case, subject, seed) for seed in range(lives)]
    figures = []
    if case.fault.lasts is None:
        times = sorted(life.restarted_after for life in lived if life.restarted_after is not None)
        missed = len(times) < lives
        for name, share in (("restart_p50", 0.5), ("restart_p95", 0.95), ("restart_max", 1.0)):
            value = None if missed else times[math.ceil(share * lives) - 1]
            figures.append(Figure(name, case.name, subject, value, "s"))
    needless = sum(life.needless for life in lived) / lives
    figures.append(Figure("needless_share", case.name, subject, needless, "share"))
    served = sum(life.served for life in lived)
    per_hour = sum(life.probes for life in lived) / served * 3600
    figures.append(Figure("probes_per_hour", case.name, subject, per_hour, "1/h"))
    return figures


def measure_loss(subject: str, hours: int, loss: float = 0.05) -> list[Figure]:
    """Idle lives of ten hours each, in which nothing is wrong but that probes are lost at random."""
    case = f"loss {loss * 100:g} %, idle"
    length = min(10, hours)
    restarts = bad_hours = probes = 0
    for seed in range(hours // length):
        rng = random.Random(f"loss {seed}")
        rule = make_rule(subject, rng)
        world = World(rule, rng, 0.0, loss)
        struck = set()
        while world.live(length * 3600.0):
            restarts += 1
            struck.add(int(world.now // 3600))
            rule.restarted(world.now)
        bad_hours += len(struck)
        probes += world.probes
    lived = hours // length * length
    return [
        Figure("needless_share", case, subject, bad_hours / lived, "share"),
        Figure("needless_restarts", case, subject, restarts / lived * 1000, "1/1000 h"),
        Figure("probes_per_hour", case, subject, probes / lived, "1/h"),
    ]


def run(lives: int, hours: int) -> list[Figure]:
    """All figures: from so many lives a case, twice as many where times are measured, and so many idle hours."""
    figures = []
    for case in cases():
        for subject in SUBJECTS:
            figures += measure(case, subject, lives if case.fault.lasts is not None else 2 * lives)
    for subject in SUBJECTS:
        figures += measure_loss(subject, hours)
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse("Monte Carlo of the keepalive's rules, in virtual time", arguments)
    figures = run(20, 1000) if options.quick else run(500, 1000)
    show(figures, "Restarts: how soon, and how often needlessly")
    if options.json is not None:
        write(figures, options.json)


if __name__ == "__main__":
    main()
