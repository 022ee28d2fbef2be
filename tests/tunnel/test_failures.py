"""The thirty ways a tunnel dies, as far as a detector can tell them: evidence over time, and what it does.

The numbers are those of the tunnels sheet. Rows 15, 16, 26, 29 and 30 are not evidence but setting up and tearing down.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.tunnel.driver import (
    AUTH,
    BUSY,
    HALF_OPEN,
    NO_ANSWER,
    NO_NAME,
    NO_ROUTE,
    OK,
    ORIGIN,
    PATH,
    REFUSED,
    UNRUN,
    WRONG,
    Came,
    every,
    follow,
    local_down,
    make,
    reference,
)
from tunnel.clientlog import ClientLog
from tunnel.detector import EvidenceRule
from tunnel.evidence import GiveUp, Probe, Restart, Seen

START = 100.0
"""When the failure begins: the URL has served until then."""


@dataclass(frozen=True)
class Row:
    """`looks`: what probes see from `START` on. `tells`: other evidence, fed by time (after `START`)."""

    name: str
    looks: Seen | Callable[[float], Seen]
    does: str
    """nothing, restart or gone."""
    shows: str = ""
    """The state at the end."""
    between: tuple[float, float] = (0.0, 0.0)
    """When it does that, in seconds after `START`."""
    tells: tuple[tuple[float, Callable[[EvidenceRule, float], Any]], ...] = ()
    requests: Iterable[float] = ()
    for_long: float = 500.0
    refuses: str = ""
    """What a restart answers: gone, or else "already exists"."""


def said(line: str) -> Callable[[EvidenceRule, float], None]:
    return lambda rule, now: rule.said_gone(now, line)


def record(status: str | None) -> Callable[[EvidenceRule, float], None]:
    return lambda rule, now: rule.record(now, status)


def connect_error(rule: EvidenceRule, now: float) -> None:
    rule.connect_failed(now, "i/o timeout")


def login(rule: EvidenceRule, now: float) -> None:
    rule.logged_in(now)


def after(seconds: float, first: Seen, then: Seen) -> Callable[[float], Seen]:
    return lambda now: first if now < START + seconds else then


def in_turns(*seen: Seen) -> Callable[[float], Seen]:
    looks = iter(range(10**9))
    return lambda now: seen[next(looks) % len(seen)]


ARRIVING = tuple(every(0.5, START, START + 600))
LOGINS = tuple((t, login) for t in range(-98, 500, 30))
STUCK = tuple((t, connect_error) for t in (1, 25, 50))
ERRORS = tuple((t, connect_error) for t in range(0, 500, 20))
REPORTS = tuple((t, lambda rule, now: rule.reported(now)) for t in range(0, 500, 3))

ROWS = [
    Row("1 route lost", NO_ROUTE, "restart", "restarting", (5, 37)),
    Row(
        "1 route lost, with requests until then",
        NO_ROUTE,
        "restart",
        "restarting",
        (5, 15),
        requests=every(0.5, 1, 100),
    ),
    Row(
        "2 expired, client alive: by the record",
        NO_ROUTE,
        "gone",
        "gone",
        (0, 35),
        ((32, record("expired")),),
        refuses="gone",
    ),
    Row(
        "2 expired, client alive: by its log",
        NO_ROUTE,
        "gone",
        "gone",
        (0, 35),
        ((32, said("tunnel is inactive")),),
        refuses="gone",
    ),
    Row(
        "3 soft delete, still serving",
        OK,
        "nothing",
        "serving",
        tells=((1, record("terminated")), (200, record("terminated"))),
    ),
    Row(
        "3 soft delete, requests arrive",
        NO_ANSWER,
        "nothing",
        "serving",
        tells=((31, record("terminated")),),
        requests=ARRIVING,
    ),
    Row("3 soft delete, not serving", NO_ROUTE, "gone", "gone", (0, 35), ((32, record("terminated")),), refuses="gone"),
    Row("4 login stuck", NO_ANSWER, "restart", "restarting", (50, 50), STUCK),
    Row("4 login stuck, but everybody's", reference(NO_ANSWER, False), "nothing", "path_fault", tells=ERRORS),
    Row("6 half open", HALF_OPEN, "restart", "restarting", (45, 110)),
    Row("6 half open, mended by itself", after(40.6, HALF_OPEN, OK), "nothing", "serving"),
    Row(
        "7 suspend and resume",
        after(12, PATH, OK),
        "nothing",
        "serving",
        tells=((0, lambda rule, now: rule.clock_jumped(now)),),
    ),
    Row("8 nothing behind it", local_down(), "nothing", "local_down"),
    Row("8 nothing behind it, for a while", after(60, local_down(), OK), "nothing", "serving"),
    Row("9 probes that cannot run", UNRUN, "nothing", "path_fault"),
    Row("9 probes that cannot run, at times", in_turns(UNRUN, OK), "nothing", ""),
    Row("10 the host cannot reach its own URL", PATH, "nothing", "serving", requests=ARRIVING),
    Row("10 nor get an answer", NO_ANSWER, "nothing", "serving", requests=ARRIVING),
    Row("11 only far clients fail", OK, "nothing", "serving", tells=REPORTS),
    Row("12 host DNS down", PATH, "nothing", "path_fault"),
    Row("12 host DNS down, no such name for the reference either", reference(NO_NAME, False), "nothing", "path_fault"),
    Row("13 this name is gone", NO_NAME, "restart", "restarting", (5, 45)),
    Row("13 this name is gone, and the restart yields another URL", NO_NAME, "gone", "gone", (5, 45), refuses="gone"),
    Row("14 certificate expired", PATH, "nothing", "path_fault"),
    Row("17 429 from the gateway", BUSY, "nothing", "path_fault"),
    Row("17 403 from the gateway", AUTH, "nothing", "path_fault"),
    Row(
        "18 the same without logins",
        in_turns(NO_ROUTE, NO_ROUTE, NO_ROUTE, NO_ROUTE, OK),
        "restart",
        "restarting",
        (5, 60),
    ),
    Row("18 flapping", in_turns(NO_ROUTE, NO_ROUTE, NO_ROUTE, NO_ROUTE, OK), "nothing", "", tells=LOGINS),
    Row("19 the server keeps the dead client's port", REFUSED, "restart", "restarting", (45, 110)),
    Row("20 ssh connected, forward failed", REFUSED, "restart", "restarting", (45, 110)),
    Row("21 a stranger under our URL", WRONG, "restart", "restarting", (0, 36)),
    Row("25 a shared URL that serves", OK, "nothing", "serving"),
    Row("25 a shared URL that serves, the service behind it answers 503", ORIGIN, "nothing", "serving"),
    Row("27 a failed login", OK, "nothing", "serving", tells=((1, connect_error), (2, login))),
]


def live(row: Row, *, jitter: float, seed: int) -> tuple[Came, EvidenceRule]:
    rule = make(jitter=jitter, seed=seed, give_up_after=None)
    now = 0.0
    rule.looked(0, OK)
    tells = sorted(row.tells, key=lambda tell: tell[0])
    looks = row.looks if callable(row.looks) else lambda now: row.looks
    seen = lambda now: OK if now < START else looks(now)  # noqa: E731
    requests = list(row.requests)
    for at, tell in [*tells, (row.for_long, None)]:
        came = follow(rule, now, seen, until=START + at, requests=requests)
        if came.action is not None:
            return came, rule
        now = START + at
        requests = [request for request in requests if request > now]
        if tell is not None:
            tell(rule, now)
    return came, rule


@pytest.mark.parametrize("jitter", [0.0, 0.2])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row(row: Row, jitter: float) -> None:
    for seed in range(20 if jitter else 1):
        came, rule = live(row, jitter=jitter, seed=seed)
        if row.does == "nothing":
            assert came.action is None
        else:
            assert isinstance(came.action, Restart)
            first, last = row.between
            assert START + first <= came.at <= START + last * (1 + jitter)
        if row.does == "gone":
            assert row.refuses == "gone"
            rule.restart_failed(came.at, "refused as gone", gone=True, running=False)
            assert isinstance(rule.decide(came.at), GiveUp)
        if row.shows:
            assert rule.state.name == row.shows


def test_5_restart_refused_and_the_old_session_held_for_41_s() -> None:
    rule = make()
    rule.looked(0, OK)
    came = follow(rule, 0, NO_ROUTE, until=100)
    assert came.restarts
    began, tries = came.at, 0
    while came.at < began + 41:
        rule.restart_failed(came.at, "proxy already exists", gone=False, running=False)
        rule.exited(came.at)
        came = follow(rule, came.at, REFUSED, until=began + 60)
        assert came.restarts
        tries += 1
    assert 8 <= tries <= 14
    rule.restarted(came.at)
    assert rule.restarts == 1
    assert rule.decide(came.at) == Probe()
    rule.looked(came.at, OK)
    assert rule.state.name == "serving"


def test_7_suspended_for_a_night() -> None:
    rule = make()
    rule.looked(0, OK)
    rule.looked(30, PATH)
    rule.clock_jumped(31)  # the monotonic clock stood still
    assert rule.decide(31) == Probe()
    came = follow(rule, 31, NO_ROUTE, until=40.9)
    assert came.action is None, "the client is given a moment to come back"


def test_10_is_warned_of_once() -> None:
    rule = make()
    for start in range(0, 3000, 100):
        follow(rule, start, PATH, until=start + 100, requests=every(0.5, start, start + 100))
    assert rule.notes() == ["requests arrive, but this host's own probes have failed for 60 s: no route to host"]
    assert rule.state.name == "serving"


def test_11_a_report_while_the_url_fails_finds_it_sooner() -> None:
    rule = make()
    rule.looked(0, OK)
    rule.reported(2)
    came = follow(rule, 2, NO_ROUTE, until=30)
    assert came.restarts
    assert came.at <= 10


def test_13_the_name_is_looked_up_twice() -> None:
    rule = make()
    rule.looked(0, NO_NAME)
    assert not isinstance(rule.decide(0), Restart)


def test_22_a_restart_that_never_returned_is_tried_again() -> None:
    rule = make()
    rule.exited(0)
    assert isinstance(rule.decide(0), Restart)
    rule.restart_failed(60, "no end within 60 s", gone=False, running=False)
    assert follow(rule, 60, REFUSED, until=100).restarts


def test_23_no_counter_survives_a_restart() -> None:
    rule = make()
    now = 0.0
    for _ in range(2):
        now = follow(rule, now, NO_ROUTE, until=now + 100).at
        rule.restarted(now)
    looks = follow(rule, now, NO_ROUTE, until=now + 300).looks
    assert len(looks) >= 3, "three more"


@pytest.mark.parametrize("seen", [NO_ROUTE, HALF_OPEN, REFUSED, NO_ANSWER, PATH, WRONG, UNRUN, local_down()])
def test_24_one_failed_look_is_enough_not_to_be_chosen(seen: Seen) -> None:
    rule = make()
    rule.looked(0, OK)
    rule.looked(30, seen)
    assert rule.state.name != "serving"


def test_28_late_lines_of_a_replaced_client_count_for_nothing() -> None:
    lines = [
        "start frpc service",
        "try to connect to server...",
        "login to server success",
    ]
    rule = make()
    log = ClientLog()
    for at in range(20):  # the same lines, looked at again and again
        log.read(lines, rule, at)
    assert rule.notes() == []
    rule.looked(0, OK)
    assert rule.state.reason == "", "one login"
