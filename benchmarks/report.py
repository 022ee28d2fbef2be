"""What the benchmarks share: their command line, their table, their JSON, and the name of the machine."""

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

WIDTH = 140
"""Columns of text that a table may take at least."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value. `subject`: `ours`, `direct`, `bare`, a variant of ours, or a peer as `name-version`.

    A `value` of None: there was nothing to measure. Where it is the median of several rounds, `low` and `high` are
    their least and greatest: the table shows them, the JSON does not.
    """

    measure: str
    case: str
    subject: str
    value: float | None
    unit: str
    low: float | None = None
    high: float | None = None

    @classmethod
    def of_rounds(cls, measure: str, case: str, subject: str, values: Sequence[float], unit: str) -> "Figure":
        """The median of what so many rounds gave."""
        return cls(measure, case, subject, median(values), unit, min(values), max(values))


def parse(
    description: str,
    arguments: Sequence[str] | None = None,
    add: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> argparse.Namespace:
    """The options every benchmark takes: `quick` (fewer rounds, never fewer rows) and `json` (a path or None).

    `add` adds those of its own.
    """
    parser = argparse.ArgumentParser(description=description)
    add(parser)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, never fewer rows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    return parser.parse_args(arguments)


def end_on_sigterm() -> None:
    """SIGTERM, as of `timeout`, unwinds the program as Ctrl-C does, so that it ends what it has started."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def machine() -> str:
    """What the figures were measured on."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_cpu()}, {usable} cores, Python {platform.python_version()}, {platform.system()} {platform.release()}"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def show(figures: Iterable[Figure], title: str, *, console: Console | None = None) -> None:
    """A table with one row a case and subject, and one column a measure; of a single case, one row a measure."""
    measures: dict[str, str] = {}
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for figure in figures:
        measures.setdefault(figure.measure, figure.unit)
        rows.setdefault((figure.case, figure.subject), {})[figure.measure] = _text(figure)
    table = Table(title=f"{title}\n{machine()}", title_justify="left")
    if len({case for case, _ in rows}) == 1:
        table.add_column("measure", no_wrap=True)
        table.add_column("unit")
        for _, subject in rows:
            table.add_column(subject, justify="right")
        for measure, unit in measures.items():
            table.add_row(measure, unit, *(values.get(measure, "") for values in rows.values()))
    else:
        table.add_column("case", no_wrap=True)
        table.add_column("subject", no_wrap=True)
        for measure, unit in measures.items():
            table.add_column(f"{measure}\n{unit}", justify="right")
        for (case, subject), values in rows.items():
            table.add_row(case, subject, *(values.get(measure, "") for measure in measures))
    # Where there is no terminal to be narrow, or a narrow one, a figure is still worth more than a tidy table.
    (console or Console(width=max(Console().width, WIDTH))).print(table)


def _text(figure: Figure) -> str:
    if figure.value is None:
        return "–"
    if figure.low is None or figure.high is None or figure.low == figure.high:
        return _number(figure.value)
    return f"{_number(figure.value)}\n({_number(figure.low)} to {_number(figure.high)})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def write(figures: Iterable[Figure], path: Path) -> None:
    """The figures as a JSON list."""
    keys = ("measure", "case", "subject", "value", "unit")
    entries = [{key: getattr(figure, key) for key in keys} for figure in figures]
    path.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n")
