"""How soon a thousand rollouts hold a slot, and who waits for whom: our elastic pool beside verifiers'.

The fake tunnel under both takes 1 s to start; in the second case one start in ten takes 10 s. Each round of a side runs
in an interpreter and a home of its own, ours and verifiers' in turn; `benchmarks.pool_load` is what is done and
measured. With `--quick` the tunnel starts ten times as fast, for both: verifiers alone needs more than a minute else.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers import Peer, PeerUnavailableError
from benchmarks.report import Figure, end_on_sigterm, parse, show, write

ROOT = Path(__file__).parents[1]

CASES = {"1024 rollouts": False, "1024 rollouts, one start in ten hangs": True}

TAKES, HANGS = 1.0, 10.0
"""Seconds a start takes, and one that hangs."""

QUICKER = 10.0
"""How much faster the fake tunnel is in a quick run."""

ROUNDS = 3

UNITS = {"all_slots_s": "s", "freed_slot_wait_max_s": "s", "servers": "servers", "acquires_per_s": "1/s"}

ROUND_TIMEOUT = 300.0
"""Seconds in which a round of either side must be over: several times what the slower one needs."""


def measure(python: Path, module: str, times: Sequence[float]) -> dict[str, float]:
    """One round: the figures that `module` prints, run by `python` with the fake tunnel's `times`."""
    command = [str(python), "-m", module, *map(str, times)]
    with tempfile.TemporaryDirectory(prefix="benchmark-home-") as home:
        # Both keep what limits their creations in the user's folders: a round must not wait for the one before it.
        # A side's configuration, credentials included, is none of the other's business either.
        env = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "PRIME_", "VF_"))}
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=env | {"HOME": home, "XDG_RUNTIME_DIR": home},
                capture_output=True,
                text=True,
                timeout=ROUND_TIMEOUT,
                check=True,
            )
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"{module} failed:\n{error.stderr[-4000:]}") from None
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def run(sides: dict[str, tuple[Path, str]], rounds: int, quicker: float = 1.0) -> list[Figure]:
    """All figures of the `sides`, given as subject: (interpreter, module); medians of the rounds."""
    seen: dict[tuple[str, str], list[dict[str, float]]] = {(case, subject): [] for case in CASES for subject in sides}
    for number in range(rounds):
        in_turn = list(sides) if number % 2 == 0 else list(sides)[::-1]
        for case, hangs in CASES.items():
            for subject in in_turn:
                times = [TAKES / quicker, *([HANGS / quicker] if hangs else [])]
                seen[case, subject].append(measure(*sides[subject], times))
    return [
        Figure.of_rounds(name, case, subject, [figures[name] for figures in measured], unit)
        for (case, subject), measured in seen.items()
        for name, unit in UNITS.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse("Elastic pools under 1,024 rollouts, beside verifiers'", arguments)
    peer = Peer.named("verifiers")
    try:
        sides = {
            "ours": (Path(sys.executable), "benchmarks.pool_ours"),
            peer.subject: (peer.python(), "benchmarks.pool_verifiers"),
        }
    except PeerUnavailableError as error:
        raise SystemExit(str(error)) from None
    quicker, rounds = (QUICKER, 1) if options.quick else (1.0, ROUNDS)
    figures = run(sides, rounds, quicker)
    title = (
        f"Elastic pools beside {peer.subject}: a fake tunnel that starts in {TAKES / quicker:g} s and hangs for "
        f"{HANGS / quicker:g} s; median of {rounds} (min to max)"
    )
    show(figures, title)
    if options.json is not None:
        write(figures, options.json)


if __name__ == "__main__":
    end_on_sigterm()
    main()
