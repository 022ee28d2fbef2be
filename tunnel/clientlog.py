"""What a tunnel client's own log says of its connection (frpc's words)."""

import re

from tunnel.evidence import Rule

ANSI = re.compile(r"\x1b\[[0-9;]*m")
EPHEMERAL = re.compile(r"\S+:\d+->")
"""Our end of a connection, which is another one each time: `read tcp 10.0.0.2:51234->203.0.113.7:7000: i/o timeout`."""

LOGGED_IN = "login to server success"
STARTED = "start proxy success"
RECONNECTING = "try to connect to server"
CONNECT_ERROR = "connect to server error: "
START_ERROR = "start error: "
GONE_REASONS = ("tunnel is inactive", "tunnel not registered")


class ClientLog:
    """Reads the last lines of one client, of which most were there the last time. A restarted client has a new log."""

    def __init__(self) -> None:
        self._seen: list[str] | None = None
        self.troubled = False
        """Its last word on its connection was an error."""

    def read(self, lines: list[str], rule: Rule, now: float) -> None:
        """Tell `rule` what is new in `lines`, the client's last ones, oldest first."""
        clean = [ANSI.sub("", line) for line in lines]
        fresh = _after_login(clean) if self._seen is None else _fresh(self._seen, clean)
        self._seen = clean
        for line in fresh:
            self._read(line, rule, now)

    def _read(self, line: str, rule: Rule, now: float) -> None:
        if LOGGED_IN in line:
            self.troubled = False
            rule.logged_in(now)
        elif STARTED in line:
            self.troubled = False
        elif RECONNECTING in line:
            rule.reconnecting(now)
        elif CONNECT_ERROR in line or START_ERROR in line:
            self.troubled = True
            reason = line.partition(CONNECT_ERROR)[2] or line.partition(START_ERROR)[2]
            if gone := next((text for text in GONE_REASONS if text in line.lower()), None):
                rule.said_gone(now, f"its client was told that the {gone}")
            elif CONNECT_ERROR in line:
                rule.connect_failed(now, EPHEMERAL.sub("", reason))


def _after_login(lines: list[str]) -> list[str]:
    """What a client that has just been started says after its first login: it logs in, which is no reconnect."""
    first = next((at for at, line in enumerate(lines) if LOGGED_IN in line), None)
    return lines if first is None else lines[first + 1 :]


def _fresh(seen: list[str], lines: list[str]) -> list[str]:
    """Those after the longest end of what was seen that `lines` begin with; all, if that is gone from them."""
    for start in range(len(seen)):
        tail = seen[start:]
        if lines[: len(tail)] == tail:
            return lines[len(tail) :]
    return lines
