"""The numbers to watch of interception servers and pools, counted where calls end and read when somebody asks.

Labels are a dialect, an outcome, a state or a reason, all of which there are few: never a session, a secret, a model's
name or a URL.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from interception.base import AcquireTimeoutError, PoolMember
from interception.looplag import LoopLag
from interception.stats import PoolStats
from interception.trace import Turn
from interception.turn import Failure
from tunnel import Counters, Tunnel, TunnelError, TunnelLimitError
from tunnel.metrics import STATES, Family, Histogram, Sample, kind_of

SERVERS = Family("interception_servers", "Servers by the state of their tunnels; `starting` and `retired` ones apart.",
                 ("state",))  # fmt: skip
IN_USE = Family("interception_slots_in_use", "Rollouts that hold a slot, those on retired servers included.")
CAPACITY = Family("interception_slots_capacity", "Slots of the servers there are; not there if there is no limit.")
WAITING = Family("interception_acquires_waiting", "Rollouts that wait for a slot.")
LONGEST_WAIT = Family("interception_acquires_longest_wait_seconds", "Of the rollouts that wait now.")
ACQUIRES = Family("interception_acquires_total", "Slots handed out.")
ACQUIRE_ERRORS = Family("interception_acquire_errors_total", "Rollouts that got no slot, by why.", ("reason",))
STARTS = Family("interception_server_starts_total", "Tries to start a server.")
FAILED_STARTS = Family("interception_server_failed_starts_total", "Tries to start a server that failed.")
LOST = Family("interception_servers_retired_total", "Servers that were lost and take no more rollouts.")
IDLED = Family("interception_servers_idled_total", "Servers stopped because they had no rollout for long.")
REQUESTS = Family("interception_requests_in_flight", "HTTP requests that are being answered.")
CALLS = Family("interception_calls_total", "Attempts of model calls that have ended.", ("dialect", "outcome"))
TURNS = Family("interception_turns_total", "Turns recorded: calls without their retries.", ("dialect",))
FIRST_BYTE = Family("interception_upstream_first_byte_seconds", "From a call to the upstream's first answer.",
                    ("dialect",), counts_seconds=True)  # fmt: skip
DURATION = Family("interception_upstream_call_seconds", "From a call to the end of the upstream's answer.",
                  ("dialect",), counts_seconds=True)  # fmt: skip
LAG = Family("interception_loop_lag_seconds", "How late the event loop's last beat was, or is.")
MAX_LAG = Family("interception_loop_lag_max_seconds", "The latest beat of the event loop so far.")
STALLS = Family("interception_loop_stalls_total", "Times the event loop stood still for more than 0.25 s.")
STALLED = Family("interception_loop_stalled_seconds_total", "Seconds in all those.")

FAMILIES = (
    SERVERS, IN_USE, CAPACITY, WAITING, LONGEST_WAIT, ACQUIRES, ACQUIRE_ERRORS, STARTS, FAILED_STARTS, LOST, IDLED,
    REQUESTS, CALLS, TURNS, FIRST_BYTE, DURATION, LAG, MAX_LAG, STALLS, STALLED,
)  # fmt: skip

BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Seconds. Models answer within seconds, agents' longest turns within ten minutes (`Upstream.idle_timeout`)."""

SERVER_STATES = (*STATES, "not serving")
OTHER = "other"
"""A word of another framework's."""


def outcome_of(turn: Turn, failure: Failure | None) -> str:
    """Of the turn's last attempt, which has ended, in one of six words."""
    if failure is None:
        return "ok"
    match failure.status:
        case 409 if turn.attempts[-1].status != 409:  # else the upstream itself said so
            return "cancelled"
        case 429:
            return "rate limited"
        case 504:
            return "timeout"
        case status if 400 <= status < 500:
            return "client error"
    return "server error"


class Calls:
    """What became of model calls. Counts only grow."""

    def __init__(self) -> None:
        self.ended: Counter[tuple[str, str]] = Counter()
        """Attempts, by dialect and outcome."""
        self.turns: Counter[str] = Counter()
        """By dialect."""
        self.first_byte: dict[str, Histogram] = {}
        self.duration: dict[str, Histogram] = {}

    def attempt_ended(self, turn: Turn, failure: Failure | None) -> None:
        """The last attempt of `turn` has."""
        attempt, dialect = turn.attempts[-1], turn.dialect
        self.ended[dialect, outcome_of(turn, failure)] += 1
        if len(turn.attempts) == 1:
            self.turns[dialect] += 1
            if dialect not in self.duration:
                self.first_byte[dialect], self.duration[dialect] = Histogram(BOUNDS), Histogram(BOUNDS)
        # The wall clock may be set back meanwhile; what a failure took says more of timeouts than of the upstream.
        if attempt.started is not None and attempt.first_byte is not None:
            self.first_byte[dialect].observe(max(0.0, attempt.first_byte - attempt.started))
        if attempt.started is not None and attempt.ended is not None and failure is None:
            self.duration[dialect].observe(max(0.0, attempt.ended - attempt.started))

    def add(self, other: "Calls") -> None:
        self.ended.update(other.ended.copy())
        self.turns.update(other.turns.copy())
        for mine, theirs in ((self.first_byte, other.first_byte), (self.duration, other.duration)):
            for dialect, histogram in theirs.copy().items():
                mine.setdefault(dialect, Histogram(BOUNDS)).add(histogram)


@dataclass(frozen=True, slots=True)
class Past:
    """What servers that are no more have counted."""

    calls: Calls = field(default_factory=Calls)
    tunnels: dict[str, Counters] = field(default_factory=dict)

    def and_of(self, server: PoolMember) -> "Past":
        """With that server's counts. A new one: whoever reads this in another thread sees the old or the new."""
        calls = Calls()
        calls.add(self.calls)
        if isinstance(theirs := getattr(server, "calls", None), Calls):
            calls.add(theirs)
        tunnels = {kind: counters.copy() for kind, counters in self.tunnels.items()}
        if (tunnel := tunnel_of(server)) is not None:
            tunnels.setdefault(kind_of(tunnel), Counters()).add(tunnel.counters)
        return Past(calls, tunnels)


def tunnel_of(server: PoolMember) -> Tunnel | None:
    """Ours; another framework's counts nothing that could be shown."""
    tunnel = getattr(server, "tunnel", None)
    return tunnel if isinstance(tunnel, Tunnel) else None


class AcquireErrors(Counter[str]):
    """Why rollouts got no slot, with how often."""

    @contextmanager
    def counted(self) -> Iterator[None]:
        try:
            yield
        except AcquireTimeoutError:
            self["timeout"] += 1
            raise
        except TunnelLimitError:
            self["limit"] += 1
            raise
        except TunnelError:
            self["no server"] += 1
            raise
        except Exception:
            self["unusable"] += 1  # the session
            raise
        except BaseException:
            self["cancelled"] += 1
            raise


def samples_of_pool(stats: PoolStats, starts: int, errors: Counter[str]) -> list[Sample]:
    states = Counter(dict.fromkeys((*SERVER_STATES, "starting", "retired"), 0))
    states.update(server.state if server.state in SERVER_STATES else OTHER for server in stats.servers)
    states.update(starting=len(stats.starting), retired=len(stats.retired))
    samples = [Sample(SERVERS, (state,), count) for state, count in states.items()]
    if stats.capacity is not None:
        samples.append(Sample(CAPACITY, (), stats.capacity))
    return [
        *samples,
        Sample(IN_USE, (), stats.in_use + sum(server.load for server in stats.retired)),
        Sample(WAITING, (), stats.waiting),
        Sample(LONGEST_WAIT, (), stats.longest_wait),
        Sample(ACQUIRES, (), stats.acquired),
        *[Sample(ACQUIRE_ERRORS, (reason,), count) for reason, count in errors.copy().items()],
        Sample(STARTS, (), starts),
        Sample(FAILED_STARTS, (), stats.failed_starts),
        Sample(LOST, (), stats.lost),
        Sample(IDLED, (), stats.idled),
    ]


def samples_of_calls(calls: Calls, in_flight: int) -> list[Sample]:
    return [
        Sample(REQUESTS, (), in_flight),
        *[Sample(CALLS, labels, count) for labels, count in calls.ended.copy().items()],
        *[Sample(TURNS, (dialect,), count) for dialect, count in calls.turns.copy().items()],
        *[Sample(FIRST_BYTE, (dialect,), seconds) for dialect, seconds in calls.first_byte.copy().items()],
        *[Sample(DURATION, (dialect,), seconds) for dialect, seconds in calls.duration.copy().items()],
    ]


def samples_of_lag(lag: LoopLag) -> list[Sample]:
    return [
        Sample(LAG, (), lag.last),
        Sample(MAX_LAG, (), lag.max),
        Sample(STALLS, (), lag.stalls),
        Sample(STALLED, (), lag.stalled),
    ]


def numbers_line(stats: PoolStats, samples: Iterable[Sample]) -> str:
    """The pool's numbers for a log: where its rollouts are, and what was counted that is not 0."""
    counts: dict[str, Counter[str]] = {}
    for family, labels, value in samples:
        if family.name.endswith("_total") and value and not isinstance(value, Histogram):
            name = family.name.removeprefix("interception_").removesuffix("_total").replace("_", " ")
            counts.setdefault(name, Counter())[labels[-1] if len(labels) > 0 else ""] += round(value)
    told = (
        f"{name} {', '.join(f'{label} {count}'.strip() for label, count in values.items())}"
        for name, values in counts.items()
    )
    return "; ".join([stats.summary, *told])
