"""What is read out of frpc's log, and each line once."""

from collections import deque
from typing import Any

import pytest

from tunnel.clientlog import ClientLog
from tunnel.evidence import Action, Rule, Seen, Wait

LOGIN = "login to server success, get run id [{}]"


class Told(Rule):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def logged_in(self, now: float) -> None:
        self.said.append(("logged in", now))

    def reconnecting(self, now: float) -> None:
        self.said.append(("reconnecting", now))

    def connect_failed(self, now: float, error: str) -> None:
        self.said.append(("connect failed", now, error))

    def said_gone(self, now: float, text: str) -> None:
        self.said.append(("gone", now, text))

    def looked(self, now: float, seen: Seen) -> None: ...
    def arrived(self, now: float) -> None: ...
    def reported(self, now: float) -> None: ...
    def exited(self, now: float) -> None: ...
    def restarted(self, now: float) -> None: ...
    def restart_failed(self, now: float, error: str, *, gone: bool, running: bool) -> None: ...

    def decide(self, now: float, *, in_use: bool = True) -> Action:
        return Wait(now)


class Frpc:
    """A client that prints, of whose output the last 50 lines are kept, as the SDK does."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=50)
        self.log, self.rule = ClientLog(), Told()
        self._stamp = 0

    def prints(self, *messages: str, level: str = "I", source: str = "client/service.go:320") -> None:
        for message in messages:
            self._stamp += 1
            stamp = f"2026-01-30 12:{self._stamp // 60000:02d}:{self._stamp // 1000 % 60:02d}.{self._stamp % 1000:03d}"
            self.lines.append(f"\x1b[1;34m{stamp} [{level}] [{source}] [a1b2c3] {message}\x1b[0m")

    def starts(self) -> None:
        self.prints("start frpc service for config file [/x.toml]", "try to connect to server...", LOGIN.format("a"))
        self.prints("proxy added: [t-1]", "[t-1] start proxy success")

    def read(self, now: float) -> list[tuple[Any, ...]]:
        """What is told of it now."""
        self.rule.said.clear()
        self.log.read(list(self.lines), self.rule, now)
        return list(self.rule.said)


@pytest.fixture
def frpc() -> Frpc:
    frpc = Frpc()
    frpc.starts()
    frpc.read(0.0)
    return frpc


class TestLines:
    def test_a_start_is_no_reconnect(self) -> None:
        frpc = Frpc()
        frpc.starts()
        assert frpc.read(1.0) == []
        assert not frpc.log.troubled

    def test_what_came_after_the_login_of_a_start_counts(self) -> None:
        frpc = Frpc()
        frpc.starts()
        frpc.prints("try to connect to server...", LOGIN.format("b"))
        assert frpc.read(1.0) == [("reconnecting", 1.0), ("logged in", 1.0)]

    def test_a_log_that_has_run_past_its_start_is_read_whole(self) -> None:
        frpc = Frpc()
        frpc.starts()
        frpc.prints(*["a line of a flood"] * 60)
        frpc.prints("connect to server error: EOF", level="W")
        assert frpc.read(1.0) == [("connect failed", 1.0, "EOF")]

    def test_a_reconnect(self, frpc: Frpc) -> None:
        frpc.prints("try to connect to server...")
        assert frpc.read(1.0) == [("reconnecting", 1.0)]
        frpc.prints(LOGIN.format("b"))
        assert frpc.read(2.0) == [("logged in", 2.0)]

    def test_a_connect_error_is_told_without_its_prefix(self, frpc: Frpc) -> None:
        frpc.prints("connect to server error: dial tcp 203.0.113.7:7000: i/o timeout", level="W")
        assert frpc.read(1.0) == [("connect failed", 1.0, "dial tcp 203.0.113.7:7000: i/o timeout")]
        assert frpc.log.troubled

    def test_one_error_is_the_same_though_our_port_is_another(self, frpc: Frpc) -> None:
        for port in (51234, 51240):
            frpc.prints(f"connect to server error: read tcp 10.0.0.2:{port}->203.0.113.7:7000: i/o timeout")
        [(_, _, first), (_, _, second)] = frpc.read(1.0)
        assert first == second == "read tcp 203.0.113.7:7000: i/o timeout"

    @pytest.mark.parametrize("reason", ["tunnel is inactive", "tunnel not registered", "Tunnel is inactive"])
    @pytest.mark.parametrize("words", ["connect to server error: {}", "[t-1] start error: {}"])
    def test_gone_reasons(self, frpc: Frpc, words: str, reason: str) -> None:
        frpc.prints(words.format(reason), level="W")
        assert frpc.read(1.0) == [("gone", 1.0, f"its client was told that the {reason.lower()}")]
        assert frpc.log.troubled

    def test_a_reason_in_another_line_is_none(self, frpc: Frpc) -> None:
        frpc.prints("http request for /tunnel not registered: tunnel is inactive")
        assert frpc.read(1.0) == []

    def test_a_refused_proxy_is_trouble_but_no_connect_error(self, frpc: Frpc) -> None:
        frpc.prints("[t-1] start error: proxy [t-1] already exists", level="W")
        assert frpc.read(1.0) == []
        assert frpc.log.troubled

    @pytest.mark.parametrize("end", [LOGIN.format("b"), "[t-1] start proxy success"])
    def test_trouble_ends(self, frpc: Frpc, end: str) -> None:
        frpc.prints("connect to server error: EOF", level="W")
        frpc.read(1.0)
        frpc.prints(end)
        frpc.read(2.0)
        assert not frpc.log.troubled

    def test_colours_inside_a_line_hide_nothing(self, frpc: Frpc) -> None:
        frpc.prints("\x1b[0mconnect to \x1b[1;31mserver error: \x1b[0mEOF")
        assert frpc.read(1.0) == [("connect failed", 1.0, "EOF")]

    def test_other_lines_say_nothing(self, frpc: Frpc) -> None:
        frpc.prints("", "connect to local service [127.0.0.1:1] error: connection refused", "\udcff binary \x00")
        assert frpc.read(1.0) == []
        assert not frpc.log.troubled


class TestOnce:
    def test_each_line_is_told_once(self, frpc: Frpc) -> None:
        frpc.prints("connect to server error: EOF")
        assert len(frpc.read(1.0)) == 1
        assert frpc.read(2.0) == []
        frpc.prints("connect to server error: EOF")
        assert len(frpc.read(3.0)) == 1

    def test_one_at_a_time_past_what_is_kept(self, frpc: Frpc) -> None:
        for now in range(200):
            frpc.prints("connect to server error: EOF")
            assert len(frpc.read(float(now))) == 1

    @pytest.mark.parametrize("burst", [1, 2, 7, 44, 49, 50])
    def test_bursts_that_are_kept_whole(self, frpc: Frpc, burst: int) -> None:
        for now in range(5):
            frpc.prints(*["connect to server error: EOF"] * burst)
            assert len(frpc.read(float(now))) == burst

    def test_a_burst_larger_than_what_is_kept_is_told_as_far_as_it_is_kept(self, frpc: Frpc) -> None:
        frpc.prints(*["connect to server error: EOF"] * 500)
        assert len(frpc.read(1.0)) == 50

    def test_lines_without_a_time_are_rather_taken_for_old(self) -> None:
        log, rule = ClientLog(), Told()
        log.read([], rule, 0.0)
        log.read(["connect to server error: EOF"] * 3, rule, 1.0)
        log.read(["connect to server error: EOF"] * 3, rule, 2.0)
        assert len(rule.said) == 3

    def test_nothing_printed_is_nothing_told(self) -> None:
        log, rule = ClientLog(), Told()
        for now in range(3):
            log.read([], rule, float(now))
        assert rule.said == []
