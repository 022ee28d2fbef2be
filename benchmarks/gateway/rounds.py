"""A run: every subject is started once, and every case measured on each of them in turn, round by round."""

import os
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from benchmarks.gateway.cases import UNITS, Amount, Case, Measured, settle
from benchmarks.gateway.load import generator
from benchmarks.gateway.processes import Cores
from benchmarks.gateway.subjects import DIRECT, Starting, Subject
from benchmarks.gateway.upstream import upstream
from benchmarks.report import Figure


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    rounds: int
    amount: Amount
    """In each."""


@dataclass(slots=True)
class Run:
    """What a run showed, and what it was made with."""

    made_with: list[str] = field(default_factory=list)
    """How upstream and load were made, and where they ran."""
    missing: dict[str, str] = field(default_factory=dict)
    """What could not be measured, and why: by subject, or by case and subject."""
    _seen: dict[tuple[str, str], list[Measured]] = field(default_factory=dict)

    def measure(self, case: Case, subject: Subject, amount: Amount) -> None:
        print(f"{case.name} {subject.name}", file=sys.stderr)
        try:
            settle(subject)
            measured = case.measure(subject, amount)
        except (RuntimeError, OSError, ExceptionGroup) as error:
            self.missing[f"{case.name} of {subject.name}"] = str(error)
        else:
            self._seen.setdefault((case.name, subject.name), []).append(measured)

    def figures(self) -> list[Figure]:
        """Medians of the rounds."""
        return [
            Figure.of_rounds(measure, case, subject, [measured[measure] for measured in rounds], unit)
            for (case, subject), rounds in self._seen.items()
            for measure, unit in UNITS.items()
            if measure in rounds[0]
        ]


def run(starting: Sequence[Starting], cases: Sequence[Case], plan: Plan) -> Run:
    """A case that is for some subjects only is measured once."""
    outcome = Run()
    cores = Cores.of_machine()
    with ExitStack() as stack:
        stack.enter_context(_pinned(cores))
        stack.enter_context(_many_files())
        url, built = stack.enter_context(upstream(cores))
        outcome.made_with += [f"upstream: {built}", f"load: {generator()}", f"cores: {cores}"]
        direct = Subject(DIRECT, url)
        if for_all := [case for case in cases if case.subjects is None]:
            with _started(starting, url, cores, outcome) as subjects:
                for number in range(plan.rounds):
                    in_turn = [direct, *subjects] if number % 2 == 0 else [*subjects[::-1], direct]
                    for case in for_all:
                        for subject in in_turn:
                            outcome.measure(case, subject, plan.amount)
        for case in cases:
            if case.subjects is None:
                continue
            if DIRECT in case.subjects:
                outcome.measure(case, direct, plan.amount)
            for start in starting:
                if start.name in case.subjects:
                    with _started([start], url, cores, outcome) as subjects:
                        for subject in subjects:
                            outcome.measure(case, subject, plan.amount)
    return outcome


@contextmanager
def _started(starting: Sequence[Starting], url: str, cores: Cores, outcome: Run) -> Iterator[list[Subject]]:
    """Those that start, side by side."""
    with ExitStack() as stack:
        begun = [(start, stack.enter_context(start.running(url, cores))) for start in starting]
        subjects = []
        for start, process in begun:
            try:
                subjects.append(start.started(process))
            except (RuntimeError, OSError) as error:
                outcome.missing[start.name] = str(error)
        yield subjects


@contextmanager
def _many_files() -> Iterator[None]:
    """As many open files as this process and those it starts may have: thousands of streams need two sockets each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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
