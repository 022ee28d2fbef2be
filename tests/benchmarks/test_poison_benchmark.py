"""The benchmark of poisons, with few lives: that it says what it promises, and that its promise is kept in each."""

import json
import random
from pathlib import Path

import pytest

from benchmarks import poison
from benchmarks.report import Figure

CASES = {
    "1 poison",
    "1 poison, random kills",
    "2 poisons",
    "2 poisons, random kills",
    "1 poison, random kills, one task",
}


@pytest.fixture(scope="module")
def figures() -> list[Figure]:
    return poison.run(lives=5)


def test_every_case_has_a_row_with_all_measures_for_each_subject(figures: list[Figure]) -> None:
    assert {(figure.case, figure.subject, figure.measure) for figure in figures} == {
        (case, subject, measure)
        for case in CASES
        for subject in ("ours", "co-residents")
        for measure in ("deaths_until_refused", "innocents_refused", "deaths", "answered_after")
    }


def test_a_poison_is_refused_after_four_deaths_and_no_innocent_ever(figures: list[Figure]) -> None:
    value = {(figure.measure, figure.case, figure.subject): figure.value for figure in figures}
    for case in CASES:
        assert value["deaths_until_refused", case, "ours"] == 4
        assert value["innocents_refused", case, "ours"] == 0
    assert (value["innocents_refused", "2 poisons", "co-residents"] or 0) > 0, "it is no matter of course"


def test_chance_strikes_in_the_cases_that_say_so_and_everybody_is_told_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(poison, "KILL_EVERY", 60.0)
    struck = 0
    for seed in range(10):
        world = poison.World(poison.CASES[1], "ours", random.Random(seed))
        world.live()
        struck += world.deaths > 4
        assert all(client.refused or client.answered_at is not None for client in world.clients)
        assert all(client.refused for client in world.clients if client.poison)
    assert struck > 0


def test_the_command_writes_what_it_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], figures: list[Figure], tmp_path: Path
) -> None:
    asked: list[int] = []

    def run(lives: int) -> list[Figure]:
        asked.append(lives)
        return figures

    monkeypatch.setattr(poison, "run", run)
    file = tmp_path / "figures.json"
    poison.main(["--quick", "--json", str(file)])
    poison.main([])
    assert asked[0] < asked[1]
    assert "deaths_until_refused" in capsys.readouterr().out
    assert len(json.loads(file.read_text())) == len(figures)
