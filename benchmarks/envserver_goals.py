"""What the env server is to reach, and whether it did: against fixed limits, and against the peer of the same run."""

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.report import Figure


@dataclass(frozen=True, slots=True)
class Goal:
    """Ours is at most, or at least, so much; or at least so many times the peer's."""

    measure: str
    at_most: float | None = None
    at_least_times_peer: float | None = None

    def judge(self, ours: float | None, peer: float | None) -> str:
        """A line. What was not measured is not met."""
        if self.at_least_times_peer is not None:
            wanted = f"at least {self.at_least_times_peer:g} times the peer's"
            ratio = None if ours is None or not peer else ours / peer
            is_met, is_ = ratio is not None and ratio >= self.at_least_times_peer, _times(ratio)
        else:
            assert self.at_most is not None
            wanted = f"at most {self.at_most:g}"
            is_met, is_ = ours is not None and ours <= self.at_most, "not measured" if ours is None else f"{ours:.4g}"
        return f"{'met   ' if is_met else 'MISSED'}  {self.measure}: {is_} ({wanted})"


GOALS = (
    Goal("kill_to_error_p95", at_most=0.025),
    Goal("kill_to_error_max", at_most=0.1),
    Goal("unanswered", at_most=0),
    Goal("fd_growth", at_most=0),
    Goal("rss_growth_mib", at_most=5),
    Goal("zombies", at_most=0),
    Goal("startup_crash_p95", at_most=0.25),
    Goal("requests_per_s", at_least_times_peer=2),
    Goal("delta_frames_per_s", at_least_times_peer=3),
    Goal("latency_p50", at_most=0.00035),
    Goal("broker_kill_max", at_most=1.5),
)


def judged(figures: Iterable[Figure], peer: str) -> list[str]:
    """A line for each goal."""
    values = {(figure.measure, figure.subject): figure.value for figure in figures}
    return [goal.judge(values.get((goal.measure, "ours")), values.get((goal.measure, peer))) for goal in GOALS]


def _times(ratio: float | None) -> str:
    return "not measured" if ratio is None else f"{ratio:.2f} times"
