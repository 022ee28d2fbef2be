"""What a pool says of itself: enough to see at a glance where its rollouts are and why one waits."""

from dataclasses import dataclass

from interception.base import PoolMember
from interception.looplag import LoopLag

LINE = 300
"""Characters of an error that are shown; the whole of it is in the log."""


def url_of(server: PoolMember) -> str:
    """For logs: one that has no URL, or cannot say it any more, must not hold up what the pool does with it."""
    try:
        return server.base_url
    except Exception:  # noqa: BLE001
        return "(no URL)"


def in_a_line(error: object) -> str:
    text = " ".join(str(error).split()) or (type(error).__name__ if isinstance(error, Exception) else "")
    return text if len(text) <= LINE else text[: LINE - 1] + "…"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


@dataclass(frozen=True, slots=True)
class ServerStats:
    """One server. `state` is its tunnel's (see `tunnel.TunnelState`); of a server without one `serving`, of a lost one
    `gone`. `idle_for`: seconds without a rollout, None while it has some."""

    base_url: str
    load: int
    state: str
    reason: str
    restarts: int
    idle_for: float | None

    @classmethod
    def of(cls, server: PoolMember, idle_for: float | None = None) -> "ServerStats":
        tunnel = getattr(server, "tunnel", None)
        state = getattr(tunnel, "state", None)
        if not server.healthy:
            name = "gone"
        elif state is None:
            name = "serving" if server.serving else "not serving"
        else:
            name = str(getattr(state, "name", state))
        return cls(
            base_url=url_of(server),
            load=server.load,
            state=name,
            reason=in_a_line(getattr(server, "lost", None) or getattr(state, "reason", "")),
            restarts=getattr(tunnel, "restarts", 0),
            idle_for=idle_for,
        )

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason else ""
        restarts = f", {_count(self.restarts, 'restart')}" if self.restarts else ""
        idle = "" if self.idle_for is None else f", idle for {self.idle_for:.0f} s"
        return f"{self.base_url}: {_count(self.load, 'rollout')}, {self.state}{reason}{restarts}{idle}"


@dataclass(frozen=True, slots=True)
class StartStats:
    """A server that is being started: for how many `seconds`, at which try, whether it waits for its turn within the
    creation limit (`queued`) or for its next try, why the last try failed, and whether it is `late`: then another one
    is begun in its stead, if one may be."""

    seconds: float
    tries: int
    queued: bool
    error: str | None
    late: bool = False
    between_tries: bool = False

    def __str__(self) -> str:
        if self.queued:
            what = "waits for its turn within the creation limit"
        elif self.between_tries:
            what = f"waits for its next try (tries: {self.tries})"
        else:
            what = f"try {self.tries}" + (", takes longer than usual" if self.late else "")
        return f"starting for {self.seconds:.1f} s, {what}" + (f"; the last one: {self.error}" if self.error else "")


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A pool at one moment; `print` it, or take the fields. Times are in seconds."""

    servers: tuple[ServerStats, ...]
    """Those that take rollouts."""
    retired: tuple[ServerStats, ...]
    """Those that were lost and still have rollouts."""
    starting: tuple[StartStats, ...]
    capacity: int | None
    """Slots of the servers there are; None: no limit."""
    waiting: int
    """Rollouts without a slot."""
    longest_wait: float
    """Of those that wait now."""
    acquired: int
    """Slots handed out so far, and so are the counts below."""
    lost: int
    idled: int
    failed_starts: int
    """Tries that failed."""
    last_error: str | None
    """Of those."""
    lag: LoopLag | None = None
    """Of the event loop it runs on; None: it was never started."""
    last_failed: float | None = None
    """How long ago the last try failed."""
    pause: float = 0.0
    """For how long no server is started while there are others, as a limit (quota, credentials) was met."""
    bound: int | None = None
    """`max_servers`, while there are, or are being started, so many."""

    @property
    def in_use(self) -> int:
        """Slots that are held on servers that take rollouts."""
        return sum(server.load for server in self.servers)

    @property
    def summary(self) -> str:
        """One line."""
        serving = sum(server.state == "serving" for server in self.servers)
        parts = [
            f"{_count(len(self.servers), 'server')} ({serving} serving)",
            f"{self.in_use}{'' if self.capacity is None else f' of {self.capacity}'} slots in use",
        ]
        if self.starting:
            queued = sum(start.queued for start in self.starting)
            late = sum(start.late for start in self.starting)
            turn = f" ({queued} of them wait for their turn within the creation limit)" if queued else ""
            slow = f" ({late} of them longer than usual)" if late else ""
            parts.append(f"{len(self.starting)} starting{turn}{slow}")
        if self.waiting:
            parts.append(f"{self.waiting} waiting (the longest for {self.longest_wait:.1f} s)")
            if self.bound is not None:
                parts.append(f"max_servers is {self.bound}")
            if self.pause:
                parts.append(f"a limit was met: none is started for {self.pause:.0f} s")
        if self.lost:
            rest = sum(server.load for server in self.retired)
            parts.append(f"{self.lost} lost" + (f" ({_count(rest, 'rollout')} still on them)" if rest else ""))
        if self.last_error is not None:
            ago = "" if self.last_failed is None else f" {self.last_failed:.0f} s ago"
            parts.append(f"{_count(self.failed_starts, 'failed start')}, the last{ago}: {self.last_error}")
        return ", ".join(parts)

    def __str__(self) -> str:
        lines: list[object] = [*self.servers, *self.retired, *self.starting]
        return "\n  ".join([self.summary, *map(str, lines)])
