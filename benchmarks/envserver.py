"""Env servers whose workers die, and how much they serve when none does: our pool beside verifiers' and a bare server.

`ours` is our broker over four of our workers with a tiny env. verifiers' broker runs as installed, over four workers
that do the least a worker can; `direct` is one such worker without a broker, the floor. One client measures all. In a
round each subject is started, measured in turn, and killed at last.

`kill_to_error_*`: seconds from a worker's SIGKILL to the error of each request on it, 64 being under way.
`unanswered`: the most requests that one kill left without an answer. `fd_growth`, `rss_growth_mib`: of the broker, over
all kills of a round but the first ten; `zombies`: its dead children, a kill. `startup_crash_p95`: from the line that
raises while an env is loaded to the parent's exception. `broker_kill_max`: from the broker's SIGKILL until its workers
are gone. Nothing is shown where nothing came: verifiers' orphans, and its parent, wait for ever.

Below the table is which goals were met; what it is at is told on stderr.
"""

import asyncio
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.envserver_client import PATIENCE, connected, delta_frames_per_s, latencies, requests_per_s
from benchmarks.envserver_crashes import crashes
from benchmarks.envserver_goals import judged
from benchmarks.envserver_kills import Kills, kill_workers
from benchmarks.envserver_subjects import ROOT, Subject, started
from benchmarks.peers import Peer, PeerUnavailableError
from benchmarks.report import Figure, end_on_sigterm, parse, show, write

CASE = "–"

WORKERS = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    rounds: int
    seconds: float
    """For each rate."""
    kills: int
    """Of our workers, a round."""
    kill_seconds: float
    """No more of them after that: a busy machine kills fewer, and still comes to its end."""
    crashes: int
    """Of our servers while they start, a round."""
    patience: float
    """Seconds after which what has not come of the peer is taken never to come. (Its users wait for 600.)"""


FULL = Plan(rounds=3, seconds=4.0, kills=170, kill_seconds=110.0, crashes=10, patience=5.0)
QUICK = Plan(rounds=1, seconds=1.0, kills=16, kill_seconds=20.0, crashes=4, patience=2.0)


@dataclass(slots=True)
class Seen:
    """What all rounds showed of a subject."""

    rates: dict[str, list[float]] = field(default_factory=dict)
    kills: list[Kills] = field(default_factory=list)
    crashes: list[float] = field(default_factory=list)
    broker_kills: list[float | None] = field(default_factory=list)

    def add(self, measure: str, value: float) -> None:
        self.rates.setdefault(measure, []).append(value)


def run(python: Path, peer: str, plan: Plan) -> list[Figure]:
    """All figures, the peer's with the interpreter `python`."""
    subjects: dict[str, tuple[list[str | Path], int]] = {
        "ours": ([sys.executable, "-m", "benchmarks.envserver_ours"], WORKERS),
        peer: ([python, "-m", "benchmarks.envserver_verifiers", "serve"], WORKERS),
        "direct": ([sys.executable, "-m", "benchmarks.envserver_stub"], 0),
    }
    seen = {subject: Seen() for subject in subjects}
    began = time.monotonic()

    def at(what: str) -> None:
        print(f"{time.monotonic() - began:4.0f} s, round {number + 1} of {plan.rounds}: {what}", file=sys.stderr)

    for number in range(plan.rounds):
        at("all are started")
        with ExitStack() as stack:
            crashing = stack.enter_context(_PeerCrash(python, plan.patience))  # while nothing is measured
            running = {
                subject: stack.enter_context(started(command, workers))
                for subject, (command, workers) in subjects.items()
            }
            if (heard := crashing.result()) is not None:
                seen[peer].crashes.append(heard)
            for subject in list(running) if number % 2 == 0 else list(running)[::-1]:
                at(f"rates of {subject}")
                _measure_rates(running[subject], seen[subject], plan.seconds)
            for subject in ("ours", peer):
                ours = subject == "ours"
                kills, patience = (plan.kills, PATIENCE) if ours else (1, plan.patience)
                at(f"workers of {subject} are killed")
                seen[subject].kills.append(
                    kill_workers(running[subject], kills, seconds=plan.kill_seconds, replaced=ours, patience=patience)
                )
                seen[subject].broker_kills.append(running[subject].kill_broker(patience))
        at("crashes of ours at startup")
        seen["ours"].crashes += asyncio.run(crashes(plan.crashes))
    return [figure for subject in subjects for figure in _figures(subject, seen[subject])]


def _measure_rates(subject: Subject, seen: Seen, seconds: float) -> None:
    with connected(subject.address) as client:
        requests_per_s(client, seconds / 4)  # warm
        seen.add("requests_per_s", requests_per_s(client, seconds))
        seen.add("delta_frames_per_s", delta_frames_per_s(client, seconds))
        seen.add("latency_p50", median(latencies(client, seconds)))


class _PeerCrash:
    """verifiers' crash at startup, in a process beside this one."""

    def __init__(self, python: Path, patience: float) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="benchmark-crash-")
        file = Path(self._folder.name, "crashed")
        self._process = subprocess.Popen(
            [str(python), "-m", "benchmarks.envserver_verifiers", "crash", str(file), str(patience)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def result(self) -> float | None:
        """Seconds from the crash to its parent's hearing of it; None if it never did."""
        out, error = self._process.communicate()
        if self._process.returncode:
            raise RuntimeError(f"verifiers' crash could not be measured:\n{error[-4000:]}")
        heard: float | None = json.loads(out)
        return heard

    def __enter__(self) -> "_PeerCrash":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()


def _figures(subject: str, seen: Seen) -> list[Figure]:
    figures = []
    if seen.kills:
        times = sorted(time for kills in seen.kills for time in kills.to_error)
        for name, share in (("p50", 0.5), ("p95", 0.95), ("max", 1.0)):
            figures.append(Figure(f"kill_to_error_{name}", CASE, subject, _quantile(times, share), "s"))
        most = max(kills.unanswered for kills in seen.kills)
        figures.append(Figure("unanswered", CASE, subject, most, "requests"))
        figures.append(_rounds("fd_growth", subject, [kills.fd_growth for kills in seen.kills], "fds"))
        figures.append(_rounds("rss_growth_mib", subject, [kills.rss_growth_mib for kills in seen.kills], "MiB"))
        a_kill: list[float | None] = [kills.zombies / kills.kills for kills in seen.kills]
        figures.append(_rounds("zombies", subject, a_kill, "a kill"))
        figures.append(Figure("startup_crash_p95", CASE, subject, _quantile(sorted(seen.crashes), 0.95), "s"))
    for measure, values in seen.rates.items():
        unit = "s" if measure == "latency_p50" else "1/s"
        figures.append(Figure.of_rounds(measure, CASE, subject, values, unit))
    if seen.broker_kills:
        gone = [time for time in seen.broker_kills if time is not None]
        worst = max(gone) if len(gone) == len(seen.broker_kills) else None
        figures.append(Figure("broker_kill_max", CASE, subject, worst, "s"))
    return figures


def _rounds(measure: str, subject: str, values: Sequence[float | None], unit: str) -> Figure:
    known = [value for value in values if value is not None]
    if not known:
        return Figure(measure, CASE, subject, None, unit)
    return Figure.of_rounds(measure, CASE, subject, known, unit)


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else None


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse("Env servers under killed workers and under load, beside verifiers'", arguments)
    peer = Peer.named("verifiers")
    try:
        python = peer.python()
    except PeerUnavailableError as error:
        raise SystemExit(str(error)) from None
    plan = QUICK if options.quick else FULL
    figures = run(python, peer.subject, plan)
    title = (
        f"Env servers beside {peer.subject}: {plan.rounds} rounds of up to {plan.kills} kills of ours and one of its; "
        f"median of the rounds (min to max); –: not in {plan.patience:g} s"
    )
    show(figures, title)
    print(*judged(figures, peer.subject), sep="\n")
    if options.json is not None:
        write(figures, options.json)


if __name__ == "__main__":
    end_on_sigterm()
    main()
