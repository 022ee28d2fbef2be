"""The benchmark of the rules, with hardly any lives: that it says what it promises, not how good the rules are."""

import json
from pathlib import Path

import pytest

from benchmarks import detector
from benchmarks.report import Figure, machine, show, write

CASES = {
    "route lost, 2 req/s",
    "route lost, 0.1 req/s",
    "route lost, 0 req/s",
    "half-open, 2 req/s",
    "half-open, 0.1 req/s",
    "half-open, 0 req/s",
    "loss 5 %, idle",
} | {
    f"{fault}, {lasts} s, {rate} req/s"
    for fault in (
        "host DNS",
        "host connect",
        "host stall",
        "host offline",
        "gateway 502",
        "local stalled",
        "this URL's path only",
    )
    for lasts in (20, 90, 600)
    for rate in (0, 2)
}


@pytest.fixture(scope="module")
def figures() -> list[Figure]:
    return detector.run(lives=2, hours=10)


def test_every_case_has_a_row_for_each_subject(figures: list[Figure]) -> None:
    assert {(figure.case, figure.subject) for figure in figures} == {
        (case, subject) for case in CASES for subject in ("evidence", "plain")
    }


def test_every_row_has_its_measures(figures: list[Figure]) -> None:
    for case in CASES:
        measures = {figure.measure for figure in figures if figure.case == case}
        assert {"needless_share", "probes_per_hour"} <= measures
        assert ({"restart_p50", "restart_p95", "restart_max"} <= measures) == case.startswith(
            ("route lost", "half-open")
        )


def test_the_json_is_a_list_of_figures(figures: list[Figure], tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    write(figures, file)
    read = json.loads(file.read_text())
    assert len(read) == len(figures)
    for entry in read:
        assert list(entry) == ["measure", "case", "subject", "value", "unit"]
        assert isinstance(entry["value"], int | float)
        assert entry["value"] >= 0
        assert entry["unit"]


def test_by_evidence_it_is_sooner_and_nothing_is_needless_that_can_be_told(figures: list[Figure]) -> None:
    value = {(figure.measure, figure.case, figure.subject): figure.value for figure in figures}
    for rate in ("2", "0"):
        evidence, plain = (value["restart_max", f"route lost, {rate} req/s", subject] for subject in detector.SUBJECTS)
        assert evidence is not None
        assert plain is not None
        assert evidence < plain
    for case in CASES - {f"this URL's path only, {lasts} s, 0 req/s" for lasts in (90, 600)}:
        assert value["needless_share", case, "evidence"] == 0, case
    assert value["needless_share", "host DNS, 600 s, 2 req/s", "plain"] == 1


def test_the_command_writes_what_it_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], figures: list[Figure], tmp_path: Path
) -> None:
    asked: list[tuple[int, int]] = []

    def run(lives: int, hours: int) -> list[Figure]:
        asked.append((lives, hours))
        return figures

    monkeypatch.setattr(detector, "run", run)
    detector.main(["--quick", "--json", str(tmp_path / "quick.json")])
    detector.main([])
    assert asked[0][0] < asked[1][0], "fewer rounds"
    shown = capsys.readouterr().out
    assert "loss 5 %, idle" in shown
    assert machine() in shown.replace("\n", " ") or machine().split(",")[0] in shown
    assert len(json.loads((tmp_path / "quick.json").read_text())) == len(figures)


def test_a_figure_that_could_not_be_measured_is_shown_as_none(capsys: pytest.CaptureFixture[str]) -> None:
    show([Figure("restart_p50", "a case", "ours", None, "s")], "Title")
    assert "–" in capsys.readouterr().out
