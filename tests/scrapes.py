"""What Prometheus would read, and what its own linter would say of it."""

from typing import NamedTuple, Self

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as strict
from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]

UNITS = ("milliseconds", "minutes", "hours", "kilobytes", "megabytes", "percent")
"""No base units."""


class Scrape(NamedTuple):
    """One reading: values by name and labels, and which names are counters (the parts of histograms included)."""

    values: dict[tuple[str, Labels], float]
    counters: set[str]

    @classmethod
    def of(cls, registry: CollectorRegistry, prefixes: tuple[str, ...]) -> Self:
        """All of `registry`, which must be well-formed. The names begin with one of `prefixes`."""
        # The newer format's parser is the strict one: units, suffixes, the order and the buckets of histograms.
        list(strict(openmetrics(registry).decode()))
        return cls.read(generate_latest(registry).decode(), prefixes)

    @classmethod
    def read(cls, text: str, prefixes: tuple[str, ...]) -> Self:
        scrape = cls({}, set())
        families = [family for family in text_string_to_metric_families(text) if family.name.startswith(prefixes)]
        assert families
        assert len({family.name for family in families}) == len(families), "each has one TYPE line"
        for family in families:
            assert family.documentation.endswith("."), family.name
            assert family.type in ("counter", "gauge", "histogram"), family.name
            assert not any(unit in family.name for unit in UNITS), family.name
            for sample in family.samples:
                assert sample.name.endswith("_total") == (family.type == "counter"), sample.name
                key = sample.name, tuple(sorted(sample.labels.items()))
                assert key not in scrape.values, f"{key} stands there twice"
                scrape.values[key] = sample.value
                if family.type != "gauge":
                    scrape.counters.add(sample.name)
        return scrape

    def get(self, metric: str, /, **labels: str) -> float:
        """The sum over all that has these labels, whatever others it has; 0 where there is none."""
        wanted = set(labels.items())
        return sum(value for (one, has), value in self.values.items() if one == metric and wanted <= set(has))

    def labels(self, name: str) -> set[str]:
        """Every value of the label `name` in it."""
        return {value for _, labels in self.values for label, value in labels if label == name}

    def fell(self, later: Self) -> list[tuple[str, Labels]]:
        """Counters that are smaller in `later`, or not there any more."""
        counters = {key: value for key, value in self.values.items() if key[0] in self.counters}
        return [key for key, value in counters.items() if later.values.get(key, -1) < value]
