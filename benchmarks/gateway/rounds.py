"""A run: every subject is started once, and every case measured on each of them in turn, round by round."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from benchmarks.gateway.cases import UNITS, Case, Measured, settle
from benchmarks.gateway.load import generator
from benchmarks.gateway.processes import Cores, running
from benchmarks.gateway.subjects import DIRECT, Starting, Subject
from benchmarks.gateway.upstream import upstream
from benchmarks.report import Figure


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    rounds: int
    seconds: float
    """For each case and subject, in each round."""


@dataclass(slots=True)
class Run:
    """What a run showed, and what it was made with."""

    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """How upstream and load were made; which subject was not measured, and why."""


def run(starting: Sequence[Starting], cases: Sequence[Case], plan: Plan) -> Run:
    """All figures: medians of the rounds."""
    outcome = Run()
    cores = Cores.of_machine()
    seen: dict[tuple[str, str], list[Measured]] = {}
    with ExitStack() as stack:
        stack.enter_context(_pinned(cores))
        url, built = stack.enter_context(upstream(cores))
        outcome.notes += [f"upstream: {built}", f"load: {generator()}", f"cores: {cores}"]
        subjects = [Subject(DIRECT, url)]
        for start in starting:
            process = stack.enter_context(running(start.command(url), cores.subject))
            base_url = process.answer()
            assert isinstance(base_url, str)
            subjects.append(Subject(start.name, base_url, process))
        for number in range(plan.rounds):
            for case in cases:
                for subject in subjects if number % 2 == 0 else subjects[::-1]:
                    print(f"round {number + 1} of {plan.rounds}: {case.name} {subject.name}", file=sys.stderr)
                    settle(subject)
                    seen.setdefault((case.name, subject.name), []).append(case.measure(subject, plan.seconds))
    outcome.figures = [
        Figure.of_rounds(measure, case, subject, [measured[measure] for measured in rounds], unit)
        for (case, subject), rounds in seen.items()
        for measure, unit in UNITS.items()
        if measure in rounds[0]
    ]
    return outcome


@contextmanager
def _pinned(cores: Cores) -> Iterator[None]:
    """This process and what makes the load, which it starts, on their core."""
    if not cores.load:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores.load)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
