"""What ours must reach, as ratios within one run; where what it is measured against is absent, nothing is said."""

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.gateway.subjects import BARE, DIRECT, OURS
from benchmarks.report import Figure


@dataclass(frozen=True, slots=True)
class Goal:
    """`measure` of ours, in a case; over that of another subject where one is named, less it where `difference`."""

    measure: str
    case: str
    limit: float
    over: str | None = None
    at_least: bool = False
    difference: bool = False

    def __str__(self) -> str:
        word = " over " if not self.difference else " beyond "
        return f"{self.case}: {self.measure}" + (f"{word}{self.over}" if self.over else "")

    @property
    def wanted(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Outcome:
    goal: Goal
    value: float | None
    """None: not measured."""

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.goal.limit if self.goal.at_least else self.value <= self.goal.limit

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.goal}: not measured (goal {self.goal.wanted})"
        return f"{self.goal}: {self.value:.3g} (goal {self.goal.wanted}) {'met' if self.met else 'MISSED'}"


VERIFIERS = "verifiers"
"""A peer is meant whatever its version."""

CONCURRENT = ("json_c1", "json_c32", "json_c256", "big_c32", "stream_c32", "stream_c256")

GOALS = (
    Goal("requests_per_s", "json_c32", 0.75, over=BARE, at_least=True),
    Goal("requests_per_s", "json_c32", 12, over=VERIFIERS, at_least=True),
    Goal("requests_per_s", "big_c32", 0.6, over=BARE, at_least=True),
    Goal("requests_per_s", "big_c32", 40, over=VERIFIERS, at_least=True),
    Goal("requests_per_s", "stream_c32", 0.8, over=BARE, at_least=True),
    Goal("requests_per_s", "stream_c32", 7, over=VERIFIERS, at_least=True),
    Goal("first_byte_ms", "first_byte", 1.0, over=DIRECT, difference=True),
    *(Goal("p99_ms", case, 2.0, over=BARE) for case in CONCURRENT),
    Goal("turn80_over_turn1", "multi_turn", 1.5, over=BARE),
    Goal("gap_max_ms", "streams_4096", 1000.0),
    Goal("rss_mib", "memory", 400e6 / 2**20),
    Goal("later_over_earlier", "memory", 1.25),
    Goal("idle_session_kb", "idle_sessions", 10.0),
)


def outcomes(figures: Iterable[Figure]) -> list[Outcome]:
    values = {
        (figure.measure, figure.case, VERIFIERS if figure.subject.startswith(f"{VERIFIERS}-") else figure.subject): (
            figure.value
        )
        for figure in figures
    }
    return [Outcome(goal, _value(goal, values)) for goal in GOALS]


def _value(goal: Goal, values: dict[tuple[str, str, str], float | None]) -> float | None:
    ours = values.get((goal.measure, goal.case, OURS))
    if ours is None or goal.over is None:
        return ours
    other = values.get((goal.measure, goal.case, goal.over))
    if other is None:
        return None
    if goal.difference:
        return ours - other
    return ours / other if other else None
