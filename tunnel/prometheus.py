"""Numbers for Prometheus (extra `prometheus`), of tunnels and of all that is behind one.

A scrape reads what has been counted anyway; between two of them it costs nothing. It comes in a thread of its own, and
is answered also while the event loop stands still.
"""

import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import accumulate
from weakref import WeakKeyDictionary

from tunnel.base import Tunnel
from tunnel.metrics import FAMILIES, Family, Histogram, Sample, samples_of

try:
    from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.utils import floatToGoString
except ImportError:
    raise ImportError("prometheus-client is not installed: pip install 'interception-toolkit[prometheus]'") from None

__all__ = ["REGISTRY", "CollectorRegistry", "Shown", "register", "serve_page", "show"]

Metric = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily

Read = Callable[[], Iterable[Sample]]

TRIES = 100
"""To go through what the event loop changes meanwhile."""


class Shown:
    """The numbers of a set of families, of any number of sources, which the label `name` tells apart."""

    def __init__(self, families: tuple[Family, ...]) -> None:
        self._families = families
        self._sources: dict[str, Read] = {}

    def add(self, name: str, read: Read) -> None:
        if self._sources.setdefault(name, read) != read:
            raise ValueError(f"the name {name!r} is another's in this registry: give each a name of its own")

    def remove(self, name: str, read: Read) -> None:
        if self._sources.get(name) == read:
            del self._sources[name]

    def describe(self) -> list[Metric]:
        return [_made(family, {}) for family in self._families]

    def collect(self) -> list[Metric]:
        samples: dict[Family, dict[tuple[str, ...], float | Histogram]] = {family: {} for family in self._families}
        for name, read in list(self._sources.items()):
            for family, labels, value in _patiently(read):
                samples[family][name, *labels] = value
        return [_made(family, values) for family, values in samples.items()]


_shown: "WeakKeyDictionary[CollectorRegistry, dict[tuple[Family, ...], Shown]]" = WeakKeyDictionary()
_lock = threading.Lock()


def show(families: tuple[Family, ...], name: str, read: Read, registry: CollectorRegistry) -> Callable[[], None]:
    """Have `registry` show what `read` returns (samples of `families`) under `name`. Returns what takes it out again.

    Raises `ValueError` where another source has that name.
    """
    with _lock:
        here = _shown.setdefault(registry, {})
        if families not in here:
            made = Shown(families)
            registry.register(made)
            here[families] = made
        here[families].add(name, read)
    return lambda: here[families].remove(name, read)


def register(tunnel: Tunnel, name: str, registry: CollectorRegistry = REGISTRY) -> Callable[[], None]:
    """Show one tunnel's numbers (`tunnel_…`) with the label `name`, exposed or not, until what is returned is called.

    The tunnels of interception servers and pools are shown together with those: `interception.prometheus.register`.
    """
    return show(FAMILIES, name, _Reading(tunnel), registry)


def serve_page(stack: ExitStack, port: int, registry: CollectorRegistry = REGISTRY) -> str:
    """Have `/metrics` served on 127.0.0.1 (port 0: any free one) until `stack` is closed; its URL.

    From a thread, so that it answers also while the event loop does not. Raises `OSError` if the port cannot be had.
    """
    server, thread = start_http_server(port, "127.0.0.1", registry)
    stack.callback(server.server_close)
    stack.callback(thread.join)
    stack.callback(server.shutdown)
    return f"http://127.0.0.1:{server.server_port}/metrics"


class _Reading:
    """Of one tunnel; two of the same are equal."""

    def __init__(self, tunnel: Tunnel) -> None:
        self._tunnel = tunnel

    def __call__(self) -> list[Sample]:
        return samples_of([self._tunnel], {})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Reading) and other._tunnel is self._tunnel

    __hash__ = None  # type: ignore[assignment]


def _patiently(read: Read) -> list[Sample]:
    for _ in range(TRIES - 1):
        try:
            return list(read())
        except RuntimeError:  # "changed size during iteration"
            continue
    return list(read())


def _made(family: Family, values: dict[tuple[str, ...], float | Histogram]) -> Metric:
    names = ["name", *family.labels]
    if family.counts_seconds:
        histogram = HistogramMetricFamily(family.name, family.help, labels=names)
        for labels, value in values.items():
            assert isinstance(value, Histogram)
            bounds = [*map(floatToGoString, value.bounds), "+Inf"]
            histogram.add_metric(labels, [*zip(bounds, accumulate(value.counts), strict=True)], value.sum)
        return histogram
    plain: CounterMetricFamily | GaugeMetricFamily = (
        CounterMetricFamily(family.name, family.help, labels=names)
        if family.name.endswith("_total")
        else GaugeMetricFamily(family.name, family.help, labels=names)
    )
    for labels, value in values.items():
        assert not isinstance(value, Histogram)
        plain.add_metric(labels, value)
    return plain
