"""The benchmark of the pools: that it says what it promises, not how good the pools are."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from benchmarks import pool
from benchmarks.peers import Peer, PeerUnavailableError
from benchmarks.pool_load import Starts, freed_slot_wait
from benchmarks.report import Figure

CASES = {"1024 rollouts", "1024 rollouts, one start in ten hangs"}
MEASURES = {"all_slots_s", "freed_slot_wait_max_s", "servers", "acquires_per_s"}


def test_a_round_of_ours_measures_all_there_is_to_measure() -> None:
    figures = pool.measure(Path(sys.executable), "benchmarks.pool_ours", [0.05, 0.1])
    assert set(figures) == MEASURES
    assert figures["servers"] >= 32
    assert figures["all_slots_s"] >= 0.05, "no server starts sooner"
    assert figures["freed_slot_wait_max_s"] >= 0
    assert figures["acquires_per_s"] > 0


def test_a_round_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"No module named benchmarks\.no_such_side"):
        pool.measure(Path(sys.executable), "benchmarks.no_such_side", [1.0])


@pytest.mark.parametrize(
    ("freed", "taken", "wait"),
    [
        ([(1.0, "a")], [(1.25, "a")], 0.25),
        ([(1.0, "a"), (2.0, "b")], [(1.25, "a"), (2.5, "b")], 0.5),
        # Taken in the order they were freed, each by one.
        ([(1.0, "a"), (1.5, "a")], [(2.0, "a"), (2.25, "a")], 1.0),
        # A slot taken before it was freed here is another slot of that server.
        ([(1.0, "a")], [(0.5, "a"), (1.75, "a")], 0.75),
        # Never taken: somebody waited until the last one got a slot elsewhere.
        ([(1.0, "a")], [(4.0, "new")], 3.0),
        # Freed when nobody waited any more.
        ([(5.0, "a")], [(4.0, "new")], 0.0),
    ],
)
def test_how_long_a_slot_was_free_while_a_rollout_waited(
    freed: list[tuple[float, str]], taken: list[tuple[float, str]], wait: float
) -> None:
    assert freed_slot_wait(freed, taken) == wait


async def test_one_start_in_ten_hangs_and_the_first_when_it_begins_anew() -> None:
    starts = Starts(takes=1.0, hangs=10.0)
    assert [starts.next() for _ in range(20)].count(10.0) == 2
    assert starts.next() == 1.0
    starts = Starts(takes=0.0, hangs=10.0)
    await starts.start()
    await starts.begin_anew()
    assert [starts.next() for _ in range(10)] == [10.0] + 9 * [0.0]


async def test_it_begins_anew_when_no_start_is_under_way() -> None:
    starts = Starts(takes=0.0, hangs=None)
    first, second = asyncio.create_task(starts.start()), asyncio.create_task(starts.start())
    await starts.has_begun.wait()
    await starts.begin_anew()
    assert first.done()
    assert second.done()
    assert starts.begun == 2
    assert not starts.has_begun.is_set()


async def test_without_hanging_starts_all_take_the_same() -> None:
    starts = Starts(takes=1.0, hangs=None)
    assert [starts.next() for _ in range(20)] == 20 * [1.0]


def test_rounds_are_interleaved_and_their_medians_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[float]]] = []

    def measure(python: Path, module: str, times: list[float]) -> dict[str, float]:
        asked.append((module, times))
        return dict.fromkeys(MEASURES, float(len(asked)))

    monkeypatch.setattr(pool, "measure", measure)
    figures = pool.run({"ours": (Path("p"), "o"), "peer-1": (Path("q"), "v")}, rounds=3, quicker=2)
    assert [module for module, _ in asked] == ["o", "v", "o", "v", "v", "o", "v", "o", "o", "v", "o", "v"]
    assert {tuple(times) for _, times in asked} == {(0.5,), (0.5, 5.0)}
    assert {(figure.case, figure.subject, figure.measure) for figure in figures} == {
        (case, subject, measure) for case in CASES for subject in ("ours", "peer-1") for measure in MEASURES
    }
    ours = next(figure for figure in figures if figure.subject == "ours" and figure.case == "1024 rollouts")
    assert (ours.low, ours.value, ours.high) == (1, 6, 9)


def test_the_command_writes_what_it_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[int] = []

    def run(sides: dict[str, tuple[Path, str]], rounds: int, quicker: float) -> list[Figure]:
        asked.append(rounds)
        return [
            Figure.of_rounds(measure, case, subject, [1.0, 1.5, 4.0], "s")
            for case in CASES
            for subject in sides
            for measure in MEASURES
        ]

    monkeypatch.setattr(pool, "run", run)
    monkeypatch.setattr(Peer, "python", lambda peer: Path("python"))
    file = tmp_path / "figures.json"
    pool.main(["--quick", "--json", str(file)])
    shown = " ".join(capsys.readouterr().out.split())
    assert "starts in 0.1 s and hangs for 1 s" in shown
    assert "verifiers-0.4.0" in shown
    assert "(1 to 4)" in shown
    pool.main([])
    assert "starts in 1 s and hangs for 10 s" in " ".join(capsys.readouterr().out.split())
    assert asked[0] < asked[1], "fewer rounds"
    written = json.loads(file.read_text())
    assert {(entry["case"], entry["subject"], entry["measure"]) for entry in written} == {
        (case, subject, measure) for case in CASES for subject in ("ours", "verifiers-0.4.0") for measure in MEASURES
    }
    for entry in written:
        assert list(entry) == ["measure", "case", "subject", "value", "unit"]
        assert entry["value"] == 1.5


def test_without_the_peer_it_says_so_and_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def python(peer: Peer) -> Path:
        raise PeerUnavailableError("verifiers-0.4.0 cannot be installed here")

    monkeypatch.setattr(Peer, "python", python)
    with pytest.raises(SystemExit, match=r"verifiers-0\.4\.0 cannot be installed here"):
        pool.main(["--quick"])
