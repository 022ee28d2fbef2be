"""The numbers of env servers for Prometheus (extra `prometheus`).

Nothing is counted here: a scrape reads what is there, so that watching costs a server nothing between two scrapes.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from envserver.metrics import FAMILIES, Family, Sample

try:
    from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
except ImportError:
    raise ImportError("prometheus-client is not installed: pip install 'interception-toolkit[prometheus]'") from None

LOOPBACK = "127.0.0.1"


class Source(Protocol):
    """An `EnvServerPool` or an `EnvServer`."""

    def samples(self) -> list[Sample]: ...


class EnvServerCollector:
    """Shows any number of env servers in one registry, told apart by the label `name`."""

    def __init__(self) -> None:
        self._sources: dict[str, Source] = {}

    def add(self, name: str, source: Source) -> None:
        if self._sources.setdefault(name, source) is not source:
            raise ValueError(f"an env server is registered as {name!r} already: give each a name of its own")

    def remove(self, name: str, source: Source) -> None:
        if self._sources.get(name) is source:
            del self._sources[name]

    def describe(self) -> list[CounterMetricFamily | GaugeMetricFamily]:
        return [_empty(family) for family in FAMILIES]

    def collect(self) -> list[CounterMetricFamily | GaugeMetricFamily]:
        shown = {family: _empty(family) for family in FAMILIES}
        for name, source in [*self._sources.items()]:
            for family, labels, value in _read(source):
                shown[family].add_metric([name, *labels], value)
        return [*shown.values()]


_collectors: "weakref.WeakKeyDictionary[CollectorRegistry, EnvServerCollector]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def register(server: Source, name: str = "envserver", registry: CollectorRegistry = REGISTRY) -> Callable[[], None]:
    """Show `server` (an `EnvServerPool` or `EnvServer`, started or not) in `registry` from now on, its numbers with the
    label `name`. Returns what takes it out again. Raises `ValueError` where another one has that name."""
    with _lock:
        collector = _collectors.get(registry)
        if collector is None:
            collector = EnvServerCollector()
            registry.register(collector)
            _collectors[registry] = collector
        collector.add(name, server)
    return lambda: collector.remove(name, server)


@contextmanager
def serving_metrics(port: int, address: str = LOOPBACK, registry: CollectorRegistry = REGISTRY) -> Iterator[int]:
    """`/metrics` on a port of its own (0: any free one; yielded), from a thread: it answers also while the event loop
    does not. Raises `OSError` if the port cannot be had."""
    server, thread = start_http_server(port, addr=address, registry=registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _empty(family: Family) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if family.name.endswith("_total") else GaugeMetricFamily
    return kind(family.name, family.help, labels=("name", *family.labels))


def _read(source: Source) -> list[Sample]:
    # A scrape comes in a thread of its own, and what it goes through may change its size meanwhile.
    for _ in range(100):
        with contextlib.suppress(RuntimeError):
            return source.samples()
    return source.samples()
