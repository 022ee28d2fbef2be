"""What a tunnel shows of itself: its state, and events as they happen."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from tunnel.errors import TunnelGoneError

StateName = Literal["idle", "serving", "suspect", "local_down", "path_fault", "restarting", "gone"]


@dataclass(frozen=True, slots=True)
class TunnelState:
    """Where a tunnel stands, in a word, and why, in plain words for a log line.

    `idle` nothing is exposed · `serving` · `suspect` the URL failed, not yet confirmed · `local_down` the service
    behind it does not answer · `path_fault` this host cannot reach the URL · `restarting` until it serves again ·
    `gone` for good.
    """

    name: StateName
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})" if self.reason else self.name


@dataclass(slots=True)
class Counters:
    """What a tunnel has seen and done since it was made, for metrics: each number only grows."""

    probes: int = 0
    """Of the public URL that ran to their end."""
    failed_probes: int = 0
    """Those that did not find it serving."""
    restarts: int = 0
    """Of the client that succeeded."""
    refused_restarts: int = 0
    """Tries of a restart that failed."""
    arrivals: int = 0
    """Requests that came in through the URL, without our own probes."""
    gone: int = 0
    """Times it became gone: once for each exposure at most."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Of the probes, by what they found (`tunnel.evidence.Outcome`)."""

    def add(self, other: "Counters") -> None:
        """Count what another tunnel has counted, too."""
        self.probes += other.probes
        self.failed_probes += other.failed_probes
        self.restarts += other.restarts
        self.refused_restarts += other.refused_restarts
        self.arrivals += other.arrivals
        self.gone += other.gone
        self.outcomes.update(other.outcomes.copy())

    def copy(self) -> Self:
        return replace(self, outcomes=self.outcomes.copy())


@dataclass(frozen=True, slots=True, kw_only=True)
class TunnelEvent:
    """Something happened to the tunnel at `url`. `at` is in unix seconds."""

    url: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChanged(TunnelEvent):
    """Its state went from `before` to `after`."""

    before: TunnelState
    after: TunnelState


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarted(TunnelEvent):
    """The client runs again under the same URL; the URL is verified next. `took` is in seconds."""

    reason: str
    took: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartFailed(TunnelEvent):
    """A restart wanted for `reason` failed with `error`; it is tried again, unless the tunnel is gone."""

    reason: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone(TunnelEvent):
    """Said once: the URL will never serve again."""

    error: TunnelGoneError
