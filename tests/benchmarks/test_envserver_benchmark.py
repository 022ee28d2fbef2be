"""The benchmark of the env servers: that it says what it promises, not how good they are."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import envserver
from benchmarks.envserver import Plan
from benchmarks.envserver_client import connected, delta_frames_per_s, latencies, requests_per_s, workers
from benchmarks.envserver_crashes import crashes
from benchmarks.envserver_goals import GOALS, judged
from benchmarks.envserver_kills import Kills, kill_workers
from benchmarks.envserver_subjects import started
from benchmarks.peers import Peer, PeerUnavailableError
from benchmarks.report import Figure

OURS = [sys.executable, "-m", "benchmarks.envserver_ours"]
STUB = [sys.executable, "-m", "benchmarks.envserver_stub"]

RATES = {"requests_per_s", "delta_frames_per_s", "latency_p50"}
MEASURES = RATES | {
    "kill_to_error_p50",
    "kill_to_error_p95",
    "kill_to_error_max",
    "unanswered",
    "fd_growth",
    "rss_growth_mib",
    "zombies",
    "startup_crash_p95",
    "broker_kill_max",
}


def test_the_orphans_of_killed_workers_are_counted_and_their_errors_timed() -> None:
    with started(OURS, 4) as ours:
        seen = kill_workers(ours, 2, seconds=60, replaced=True, patience=30)
        assert (seen.kills, seen.unanswered, seen.zombies) == (2, 0, 0)
        assert len(seen.to_error) == 32, "16 of 64 requests were on each"
        assert all(time > 0 for time in seen.to_error)
        assert seen.fd_growth is None, "two kills tell nothing of growth"
        seen = kill_workers(ours, 100, seconds=0.0, replaced=True, patience=30)
        assert seen.kills == 1, "they end with their time"
        assert ours.kill_broker(patience=30) is not None, "its workers went with it"


def test_requests_that_nobody_answers_are_counted() -> None:
    with started(STUB, 0) as stub:
        # A server without a broker, killed: the client's requests on it have nobody to fail them.
        with connected(stub.address) as client:
            (pid,) = workers(client, 1)
        stub.knows({pid})
        seen = kill_workers(stub, 1, seconds=60, replaced=False, patience=0.1)
        assert (seen.kills, seen.unanswered, seen.to_error) == (1, 64, [])


def test_the_rates_are_measured_of_any_server() -> None:
    with started(STUB, 0) as stub, connected(stub.address) as client:
        assert requests_per_s(client, 0.1) > 0
        assert delta_frames_per_s(client, 0.1) > 0
        assert min(latencies(client, 0.1)) > 0
        reply = client.ask(b"health")
        assert reply["success"], "nothing of the measures is left in the connection"


@pytest.mark.parametrize(
    ("measure", "ours", "peer", "says"),
    [
        ("latency_p50", 0.00034, 0.0005, "met     latency_p50: 0.00034 (at most 0.00035)"),
        ("latency_p50", 0.00036, 0.0005, "MISSED  latency_p50: 0.00036 (at most 0.00035)"),
        ("requests_per_s", 2000.0, 1000.0, "met     requests_per_s: 2.00 times (at least 2 times the peer's)"),
        ("requests_per_s", 1990.0, 1000.0, "MISSED  requests_per_s: 1.99 times (at least 2 times the peer's)"),
        ("requests_per_s", 1990.0, None, "MISSED  requests_per_s: not measured (at least 2 times the peer's)"),
        ("zombies", 0.0, None, "met     zombies: 0 (at most 0)"),
        ("unanswered", None, 16.0, "MISSED  unanswered: not measured (at most 0)"),
    ],
)
def test_a_goal_is_met_or_missed(measure: str, ours: float | None, peer: float | None, says: str) -> None:
    figures = [Figure(measure, "–", "ours", ours, ""), Figure(measure, "–", "peer", peer, "")]
    assert says in judged(figures, "peer")


def test_every_goal_is_of_something_that_is_measured() -> None:
    assert {goal.measure for goal in GOALS} < MEASURES


async def test_a_server_and_a_pool_that_crash_are_timed() -> None:
    times = await crashes(2)
    assert len(times) == 2
    assert all(time > 0 for time in times)


def test_what_prints_no_address_is_an_error_with_what_it_said() -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such thing')"]
    with pytest.raises(RuntimeError, match="no such thing"), started(command, 0):
        pass


def test_every_subject_has_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        def kill_broker(self, patience: float) -> float | None:
            return 0.25 if self.name == "ours" else None

    @contextmanager
    def start(command: list[str | Path], number: int) -> Iterator[Fake]:
        yield Fake("ours" if "benchmarks.envserver_ours" in command else "peer" if number else "direct")

    class NoCrash:
        def __init__(self, python: Path, patience: float) -> None: ...
        def __enter__(self) -> "NoCrash":
            return self

        def __exit__(self, *_: object) -> None: ...
        def result(self) -> None: ...

    def rates(subject: Fake, seen: envserver.Seen, seconds: float) -> None:
        measured.append(subject.name)
        for measure in RATES:
            seen.add(measure, float(len(measured)))

    def kills(subject: Fake, number: int, *, seconds: float, replaced: bool, patience: float) -> Kills:
        if replaced:
            return Kills(number, [0.01, 0.02], 0, 0, 0.5, 0)
        return Kills(1, [], 16, None, None, 1)

    async def crashed(number: int) -> list[float]:
        return number * [0.125]

    monkeypatch.setattr(envserver, "started", start)
    monkeypatch.setattr(envserver, "_PeerCrash", NoCrash)
    monkeypatch.setattr(envserver, "_measure_rates", rates)
    monkeypatch.setattr(envserver, "kill_workers", kills)
    monkeypatch.setattr(envserver, "crashes", crashed)
    figures = envserver.run(
        Path("python"), "peer", Plan(rounds=3, seconds=0.0, kills=5, kill_seconds=9.0, crashes=2, patience=0.0)
    )
    value = {(figure.subject, figure.measure): figure.value for figure in figures}
    assert {figure.case for figure in figures} == {"–"}
    assert set(value) == {
        *(("ours", measure) for measure in MEASURES),
        *(("peer", measure) for measure in MEASURES),
        *(("direct", measure) for measure in RATES),
    }
    assert measured == ["ours", "peer", "direct", "direct", "peer", "ours", "ours", "peer", "direct"]
    assert value["ours", "kill_to_error_p50"] == 0.01
    assert value["ours", "kill_to_error_max"] == 0.02
    assert value["ours", "startup_crash_p95"] == 0.125
    assert value["ours", "broker_kill_max"] == 0.25
    assert value["peer", "unanswered"] == 16
    assert value["peer", "zombies"] == 1
    for never in ("kill_to_error_p50", "fd_growth", "rss_growth_mib", "startup_crash_p95", "broker_kill_max"):
        assert value["peer", never] is None


def test_the_command_writes_what_it_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[Plan] = []

    def run(python: Path, peer: str, plan: Plan) -> list[Figure]:
        asked.append(plan)
        return [
            Figure.of_rounds("latency_p50", "–", "ours", [0.25, 0.5, 1.0], "s"),
            Figure("latency_p50", "–", peer, None, "s"),
        ]

    monkeypatch.setattr(envserver, "run", run)
    monkeypatch.setattr(Peer, "python", lambda peer: Path("python"))
    file = tmp_path / "figures.json"
    envserver.main(["--quick", "--json", str(file)])
    envserver.main([])
    shown = " ".join(capsys.readouterr().out.split())
    assert "verifiers-0.4.0" in shown
    assert "(0.25 to 1)" in shown
    assert "MISSED latency_p50: 0.5 (at most 0.00035)" in shown
    assert "MISSED requests_per_s: not measured (at least 2 times the peer's)" in shown
    quick, full = asked
    assert quick.rounds < full.rounds
    assert quick.kills < full.kills
    assert full.rounds * full.kills >= 500
    assert json.loads(file.read_text()) == [
        {"measure": "latency_p50", "case": "–", "subject": "ours", "value": 0.5, "unit": "s"},
        {"measure": "latency_p50", "case": "–", "subject": "verifiers-0.4.0", "value": None, "unit": "s"},
    ]


def test_without_the_peer_it_says_so_and_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def python(peer: Peer) -> Path:
        raise PeerUnavailableError("verifiers-0.4.0 cannot be installed here")

    monkeypatch.setattr(Peer, "python", python)
    with pytest.raises(SystemExit, match=r"verifiers-0\.4\.0 cannot be installed here"):
        envserver.main(["--quick"])
