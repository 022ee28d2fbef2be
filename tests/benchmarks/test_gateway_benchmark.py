"""The benchmark of the gateway: that it says what it promises, not how fast the gateway is."""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gateway import __main__ as gateway
from benchmarks.gateway import canned, cases, load, memory, rounds, streams, upstream
from benchmarks.gateway.cases import CASES, UNITS, Amount, Case
from benchmarks.gateway.goals import GOALS, outcomes
from benchmarks.gateway.http import Connection, Reply
from benchmarks.gateway.processes import Cores, running
from benchmarks.gateway.rounds import Plan, run
from benchmarks.gateway.subjects import DIRECT, LOCAL, PEERS, Starting, Subject
from benchmarks.peers import Peer, PeerUnavailableError
from benchmarks.report import Figure

NOWHERE = Cores(frozenset(), frozenset(), frozenset())
"""Tests run side by side: nothing is pinned."""

TINY = Plan(rounds=1, amount=Amount(seconds=0.05, turns=64, sessions=20, streams_seconds=0.1))


@pytest.fixture(params=["C", "Python"])
def upstream_url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "Python":
        monkeypatch.setattr(upstream, "COMPILERS", ())
    elif not any(map(shutil.which, upstream.COMPILERS)):
        pytest.skip("no C compiler is here")
    with upstream.upstream(NOWHERE) as (url, built):
        assert built.startswith(request.param)
        yield url


@contextmanager
def python_upstream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Subject]:
    monkeypatch.setattr(upstream, "COMPILERS", ())
    with upstream.upstream(NOWHERE) as (url, _):
        yield Subject(DIRECT, url)


async def answers(url: str, *bodies: bytes) -> list[Reply]:
    """Of calls on one connection."""
    connection = await Connection.to(url)
    try:
        return [await connection.call(canned.post("/v1/chat/completions", "key", body)) for body in bodies]
    finally:
        connection.close()


async def test_each_answer_of_the_upstream_is_another(upstream_url: str) -> None:
    first, second, big = await answers(
        upstream_url, canned.request(), canned.request(), canned.request(size=canned.BIG_BYTES)
    )
    assert {first.status, second.status, big.status} == {200}
    assert len(first.body) == canned.ANSWER_BYTES
    assert len({canned.said(bytes(reply.body)) for reply in (first, second, big)}) == 3


async def test_the_upstream_streams_events_and_takes_the_next_call(upstream_url: str) -> None:
    stream, paced, whole = await answers(
        upstream_url,
        canned.request(stream=True),
        canned.request(stream=True, paced=1),
        canned.request(),
    )
    for reply in (stream, paced):
        events = bytes(reply.body).split(b"\n\n")
        assert len(events) == canned.EVENTS + 1
        assert all(event.startswith(b"data: ") for event in events[:-1])
        assert events[-2:] == [b"data: [DONE]", b""]
    assert paced.lasted >= canned.EVENTS * 0.001, "a millisecond before each event"
    assert canned.said(bytes(whole.body))


def test_what_is_asked_is_as_large_as_it_says() -> None:
    assert abs(len(canned.request(size=canned.BIG_BYTES)) - canned.BIG_BYTES) < 100
    answer = canned.answers()[0].partition(b"\r\n\r\n")[2]
    last = canned.conversation([canned.said(answer)] * (canned.TURNS - 1))
    assert abs(len(last) - canned.BIG_BYTES) < canned.BIG_BYTES / 10, "the last turn is as large as a big request"
    assert canned.stamped(canned.request(), 7).count(b"question 0000000007") == 1


def test_the_cases_are_those_of_the_design() -> None:
    throughput = ["json_c1", "json_c32", "json_c256", "big_c32", "stream_c32", "stream_c256"]
    others = ["first_byte", "multi_turn", "streams_4096", "memory", "idle_sessions"]
    assert [case.name for case in CASES] == throughput + others
    assert {goal.case for goal in GOALS} == set(throughput + others)


def test_every_kind_of_case_measures_what_it_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds.Cores, "of_machine", lambda: NOWHERE)
    monkeypatch.setattr(shutil, "which", lambda name: None)  # also without wrk and without a compiler
    monkeypatch.setattr(cases, "STREAMS", 32)
    monkeypatch.setattr(cases, "FIRST_BYTE_PACE", 1)
    monkeypatch.setattr(streams, "OPENING", 0.0)
    monkeypatch.setattr(canned, "TURNS", 3)
    skipped = {"json_c1", "json_c32", "json_c256", "big_c32", "stream_c256"}
    chosen = [
        replace(case, subjects=case.subjects and frozenset({"ours"})) for case in CASES if case.name not in skipped
    ]
    outcome = run(LOCAL, chosen, TINY)
    assert not outcome.missing
    assert any("wrk is not installed" in line for line in outcome.made_with)
    figures = outcome.figures()
    seen: dict[tuple[str, str], set[str]] = {}
    for figure in figures:
        seen.setdefault((figure.case, figure.subject), set()).add(figure.measure)
        assert figure.value is not None
    rates = {"requests_per_s", "p50_ms", "p99_ms", "cpu_us"}
    assert seen["stream_c32", "ours"] == seen["stream_c32", "bare"] == rates
    assert seen["stream_c32", "direct"] == rates - {"cpu_us"}
    assert seen["first_byte", "ours"] == rates | {"first_byte_ms"}
    assert seen["multi_turn", "ours"] == rates | {"turn1_ms", "turn80_ms", "turn80_over_turn1"}
    assert seen["streams_4096", "ours"] == {"first_byte_ms", "gap_max_ms", "rss_mib"}
    assert seen["memory", "ours"] == {"rss_mib", "later_over_earlier"}
    assert seen["idle_sessions", "ours"] == {"idle_session_kb"}
    assert {measure for measures in seen.values() for measure in measures} == set(UNITS)
    for one in outcomes(figures):
        assert (one.value is None) == (one.goal.case in skipped or one.goal.over == "verifiers"), str(one)


@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed")
def test_wrk_sends_what_our_own_client_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    with python_upstream(monkeypatch) as direct:
        assert load.generator().startswith("wrk")
        seen = load.load(direct.base_url, direct.sessions(4), canned.request(), 4, 0.2)
    assert seen.requests > 0
    assert seen.errors == 0
    assert 0 < seen.p50_ms <= seen.p99_ms


def test_calls_that_fail_are_no_figure() -> None:
    nothing_there = "http://127.0.0.1:1"
    with running([sys.executable, "-m", "benchmarks.gateway.subject_bare", nothing_there], frozenset()) as process:
        base_url = process.answer()
        assert isinstance(base_url, str)
        subject = Subject("bare", base_url, process)
        with pytest.raises(RuntimeError, match="failed"):
            memory.recorded(subject, 8)
        with pytest.raises(RuntimeError, match="calls failed"):
            load.load(base_url, subject.sessions(1), canned.request(), 1, 0.05)
        with pytest.raises(RuntimeError, match="answers a call with 5"):
            subject.check()


def test_a_subject_that_does_not_start_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds.Cores, "of_machine", lambda: NOWHERE)
    measured: list[str] = []

    def measure(subject: Subject, amount: Amount) -> dict[str, float]:
        measured.append(subject.name)
        if subject.name == "bare":
            raise RuntimeError("it is broken")
        return {"requests_per_s": float(len(measured))}

    starting = [Starting("peer-1", "benchmarks.gateway.no_such_subject"), LOCAL[1]]
    outcome = run(starting, [Case("case", measure)], Plan(rounds=3, amount=TINY.amount))
    assert measured == ["direct", "bare", "bare", "direct", "direct", "bare"], "in turn"
    assert "No module named" in outcome.missing["peer-1"]
    assert outcome.missing["case of bare"] == "it is broken"
    (figure,) = outcome.figures()
    assert (figure.subject, figure.low, figure.value, figure.high) == ("direct", 1, 4, 5)


def test_goals_are_ratios_of_one_run() -> None:
    figures = [
        Figure("requests_per_s", "json_c32", "ours", 80.0, "1/s"),
        Figure("requests_per_s", "json_c32", "bare", 100.0, "1/s"),
        Figure("requests_per_s", "json_c32", "verifiers-0.4.0", 8.0, "1/s"),
        Figure("first_byte_ms", "first_byte", "ours", 11.5, "ms"),
        Figure("first_byte_ms", "first_byte", "direct", 10.0, "ms"),
        Figure("idle_session_kb", "idle_sessions", "ours", 9.0, "kB"),
    ]
    said = [str(one) for one in outcomes(figures)]
    assert len(said) == len(GOALS)
    assert "json_c32: requests_per_s over bare: 0.8 (goal >= 0.75) met" in said
    assert "json_c32: requests_per_s over verifiers: 10 (goal >= 12) MISSED" in said
    assert "first_byte: first_byte_ms beyond direct: 1.5 (goal <= 1) MISSED" in said
    assert "idle_sessions: idle_session_kb: 9 (goal <= 10) met" in said
    assert "multi_turn: turn80_over_turn1 over bare: not measured (goal <= 1.5)" in said


def test_a_quick_run_makes_no_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def python(peer: Peer) -> Path:
        made.append(peer.name)
        if peer.name == "litellm":
            raise PeerUnavailableError("no index")
        return Path("python")

    monkeypatch.setattr(Peer, "python", python)
    monkeypatch.setattr(Peer, "is_made", lambda peer: peer.name == "verifiers")
    found, missing = gateway.peers(list(PEERS), make=False)
    assert [start.name for start in found] == ["verifiers-0.4.0"]
    assert made == ["verifiers"]
    assert all("not there yet" in why for why in missing.values())
    found, missing = gateway.peers(list(PEERS), make=True)
    assert [start.name.split("-")[0] for start in found] == ["verifiers", "rllm"]
    assert list(missing.values()) == ["no index"]


def test_the_command_writes_what_it_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[tuple[list[str], list[str], int]] = []

    def fake(starting: list[Starting], chosen: list[Case], plan: Plan) -> rounds.Run:
        asked.append(([start.name for start in starting], [case.name for case in chosen], plan.rounds))
        outcome = rounds.Run(made_with=["upstream: C"], missing={"litellm-1": "it is too slow"})
        for subject in (DIRECT, "ours", "bare"):
            outcome.measure(Case("json_c32", lambda *_: {"requests_per_s": 100.0}), Subject(subject, ""), plan.amount)
        return outcome

    monkeypatch.setattr(gateway, "run", fake)
    file = tmp_path / "figures.json"
    gateway.main(["--quick", "--peers", "none", "--cases", "json_c32,memory", "--json", str(file)])
    assert asked == [(["ours", "bare"], ["json_c32", "memory"], 1)]
    shown = " ".join(capsys.readouterr().out.split())
    assert "upstream: C" in shown
    assert "not measured: litellm-1: it is too slow" in shown
    assert "json_c32: requests_per_s over bare: 1 (goal >= 0.75) met" in shown
    written = json.loads(file.read_text())
    assert {entry["subject"] for entry in written if entry["measure"] != "goal"} == {"direct", "ours", "bare"}
    assert len([entry for entry in written if entry["measure"] == "goal"]) == len(GOALS)
    with pytest.raises(SystemExit):
        gateway.main(["--cases", "json_c33"])
    assert "json_c33: there is json_c1" in capsys.readouterr().err
