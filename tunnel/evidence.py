"""What can be seen of a tunnel, and what can be done about it: the words between the decision and its carrying out."""

# ruff: noqa: B027 - a rule that does not weigh a kind of evidence just leaves it
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum

from tunnel.policy import KeepAlivePolicy
from tunnel.state import TunnelState


class Outcome(StrEnum):
    """What a probe of the public URL found."""

    OK = "ok"
    ORIGIN = "origin"
    """The server behind it answered, with another status: alive."""
    NO_ROUTE = "no route"
    """A 404 at once that is not ours."""
    HALF_OPEN = "half open"
    """The same after `slow_404`."""
    BAD_GATEWAY = "bad gateway"
    NO_ANSWER = "no answer"
    """Connected, then silence."""
    REFUSED = "refused"
    """Connection refused: an answer from the far end."""
    NO_NAME = "no such name"
    """DNS knows no such name."""
    PATH = "path"
    """This host's way there: DNS, routing, TLS."""
    AUTH = "auth"
    BUSY = "busy"
    WRONG = "wrong"
    """200 from somebody else."""
    UNRUN = "not run"
    """The probe itself could not run: says nothing."""


GOOD = frozenset({Outcome.OK, Outcome.ORIGIN})
NOT_SERVING = frozenset({Outcome.NO_ROUTE, Outcome.HALF_OPEN, Outcome.BAD_GATEWAY, Outcome.REFUSED, Outcome.NO_NAME})
"""The URL does not serve, whoever asks."""
NEED_REFERENCE = frozenset({Outcome.BAD_GATEWAY, Outcome.NO_ANSWER, Outcome.NO_NAME})
"""May be everybody's trouble."""
NOTHING_IN_FLIGHT = frozenset({Outcome.NO_ROUTE, Outcome.REFUSED})
"""No request can be on its way through the tunnel: a restart need not wait for any."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one look at a tunnel found. `reference`: whether the gateway answers for other names; None: not known."""

    outcome: Outcome
    local_ok: bool
    detail: str
    reference: bool | None = None
    is_200: bool = False
    """All that the plain rule asks of the URL."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before `until` (unless evidence comes in earlier)."""

    until: float


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask the URL and the local service now, and the reference where the answer needs it."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Restart the client under the same URL; `drain`: requests may be in flight, wait for them first."""

    reason: str
    drain: bool = False


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The tunnel is gone, or as good as."""

    reason: str


Action = Wait | Probe | Restart | GiveUp


class Rule(ABC):
    """Decides for one tunnel. Evidence and the time (any clock that only goes forward) are passed in."""

    state: TunnelState
    restarts: int = 0
    """Restarts that succeeded."""

    @abstractmethod
    def looked(self, now: float, seen: Seen) -> None:
        """A probe ended."""

    @abstractmethod
    def arrived(self, now: float) -> None:
        """A request came in through the URL."""

    @abstractmethod
    def reported(self, now: float) -> None:
        """A caller saw the URL fail: brings a probe forward, no more."""

    @abstractmethod
    def exited(self, now: float) -> None:
        """The client process is not running (said as often as the caller likes)."""

    @abstractmethod
    def restarted(self, now: float) -> None:
        """The restart that was asked for succeeded."""

    @abstractmethod
    def restart_failed(self, now: float, error: str, *, gone: bool, running: bool) -> None:
        """It failed. `gone`: it was refused for good; `running`: a client is there all the same."""

    @abstractmethod
    def decide(self, now: float, *, in_use: bool = True) -> Action:
        """What to do at `now`. `in_use`: somebody waits behind the URL (a tunnel nobody uses is never given up)."""

    # What only a rule that weighs evidence asks for:

    def probe_arrived(self, now: float) -> None:
        """The probe's own nonce came in, whatever became of the answer."""

    def logged_in(self, now: float) -> None:
        """The client's log: connected to the service (again)."""

    def reconnecting(self, now: float) -> None:
        """The client's log: it is connecting again by itself."""

    def connect_failed(self, now: float, error: str) -> None:
        """The client's log: it could not connect."""

    def said_gone(self, now: float, text: str) -> None:
        """The client's log says that the registration is over."""

    def wants_record(self, now: float) -> bool:
        """Whether the control API should be asked for its record now."""
        return False

    def record(self, now: float, status: str | None) -> None:
        """The control API's answer: a status, or None where it has no record."""

    def clock_jumped(self, now: float) -> None:
        """The host was suspended: what was seen before says nothing of now."""

    def left(self) -> None:
        """The tunnel is not watched any more."""

    def notes(self) -> list[str]:
        """What is to be said once, beside the changes of state, in plain words; taken away by asking."""
        return []


def give_up_text(policy: KeepAlivePolicy, restarts: int) -> str:
    return f"not serving for {policy.give_up_after:g} s, {restarts} restart{'' if restarts == 1 else 's'}"
