"""Numbers to watch: their shape, for all that is behind a tunnel, and those of the tunnels themselves.

Nothing here is of Prometheus: `tunnel.prometheus` shows samples, and so may anything else. A label is a state, a kind
or an outcome, of which there are few: never a URL (a secret may stand in it), an id or a pid.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import NamedTuple, get_args

from tunnel.base import Tunnel
from tunnel.state import Counters, StateName


class Histogram:
    """How many observations were at most as large as each of `bounds` (ascending), and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Of each bucket by itself; the last one has no bound."""
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add(self, other: "Histogram") -> None:
        self.counts = [mine + more for mine, more in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum


class Family(NamedTuple):
    """A number by name: a histogram if it `counts_seconds`, a counter if its name says so (`_total`), else a gauge."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    counts_seconds: bool = False


class Sample(NamedTuple):
    """What a family's number is for these values of its labels."""

    family: Family
    labels: tuple[str, ...]
    value: float | Histogram


STATES = get_args(StateName)

TUNNELS = Family("tunnel_tunnels", "Tunnels by state.", ("type", "state"))
PROBES = Family("tunnel_probes_total", "Probes of public URLs, by what they found.", ("type", "outcome"))
RESTARTS = Family("tunnel_restarts_total", "Restarts of tunnel clients that succeeded.", ("type",))
REFUSED = Family("tunnel_restarts_refused_total", "Tries to restart a tunnel client that failed.", ("type",))
ARRIVALS = Family("tunnel_requests_total", "Requests that came in through public URLs, without our probes.", ("type",))
GONE = Family("tunnel_gone_total", "Tunnels that will never serve again, or were given up.", ("type",))

FAMILIES = (TUNNELS, PROBES, RESTARTS, REFUSED, ARRIVALS, GONE)


def kind_of(tunnel: Tunnel) -> str:
    return type(tunnel).__name__.removesuffix("Tunnel").lower()


def samples_of(tunnels: Iterable[Tunnel], past: Mapping[str, Counters]) -> list[Sample]:
    """Those of `tunnels`, together with the counts of others of their kinds that are no more."""
    states: dict[tuple[str, str], int] = {(kind, state): 0 for kind in past for state in STATES}
    counters = {kind: counted.copy() for kind, counted in past.items()}
    for tunnel in tunnels:
        kind = kind_of(tunnel)
        for state in STATES:
            states.setdefault((kind, state), 0)
        states[kind, tunnel.state.name] += 1
        counters.setdefault(kind, Counters()).add(tunnel.counters)
    samples = [Sample(TUNNELS, labels, count) for labels, count in states.items()]
    for kind, counted in counters.items():
        samples += [Sample(PROBES, (kind, outcome), count) for outcome, count in counted.outcomes.items()]
        samples += [
            Sample(RESTARTS, (kind,), counted.restarts),
            Sample(REFUSED, (kind,), counted.refused_restarts),
            Sample(ARRIVALS, (kind,), counted.arrivals),
            Sample(GONE, (kind,), counted.gone),
        ]
    return samples
