"""What a pool says of itself: enough to see at a glance where its rollouts are and why one waits."""

from dataclasses import dataclass

from interception.base import PoolMember


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
            name = str(state.name)
        try:
            base_url = server.base_url
        except RuntimeError:  # it is not started
            base_url = "(no URL)"
        return cls(
            base_url=base_url,
            load=server.load,
            state=name,
            reason=str(getattr(server, "lost", None) or getattr(state, "reason", "")),
            restarts=getattr(tunnel, "restarts", 0),
            idle_for=idle_for,
        )

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason else ""
        restarts = f", {self.restarts} restarts" if self.restarts else ""
        idle = "" if self.idle_for is None else f", idle for {self.idle_for:.0f} s"
        return f"{self.base_url}: {self.load} rollouts, {self.state}{reason}{restarts}{idle}"


@dataclass(frozen=True, slots=True)
class StartStats:
    """A server that is being started: for how many `seconds`, at which try, whether it waits for its turn within the
    creation limit (`queued`), and why the last try failed."""

    seconds: float
    tries: int
    queued: bool
    error: str | None

    def __str__(self) -> str:
        what = "waits for its turn within the creation limit" if self.queued else f"try {self.tries}"
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

    @property
    def in_use(self) -> int:
        """Slots that are held on servers that take rollouts."""
        return sum(server.load for server in self.servers)

    @property
    def summary(self) -> str:
        """One line."""
        serving = sum(server.state == "serving" for server in self.servers)
        parts = [
            f"{len(self.servers)} servers ({serving} serving)",
            f"{self.in_use}{'' if self.capacity is None else f' of {self.capacity}'} slots in use",
        ]
        if self.starting:
            parts.append(f"{len(self.starting)} starting")
        if self.waiting:
            parts.append(f"{self.waiting} waiting (the longest for {self.longest_wait:.1f} s)")
        if self.lost:
            rest = sum(server.load for server in self.retired)
            parts.append(f"{self.lost} lost" + (f" ({rest} rollouts are still on them)" if rest else ""))
        if self.last_error is not None:
            parts.append(f"{self.failed_starts} failed starts, the last: {self.last_error}")
        return ", ".join(parts)

    def __str__(self) -> str:
        lines: list[object] = [*self.servers, *self.retired, *self.starting]
        return "\n  ".join([self.summary, *map(str, lines)])
