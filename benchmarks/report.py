"""What the benchmarks share: their command line, their table, their JSON, and the name of the machine."""

import argparse
import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

WIDTH = 140
"""Columns of text that a table may take at least."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value. `subject`: `ours`, `direct`, `bare`, a variant of ours, or a peer as `name-version`.

    A `value` of None: there was nothing to measure.
    """

    measure: str
    case: str
    subject: str
    value: float | None
    unit: str


def parse(description: str, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options every benchmark takes: `quick` (fewer rounds, never fewer rows) and `json` (a path or None)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, never fewer rows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    return parser.parse_args(arguments)


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
    """A table with one row a case and subject, and one column a measure."""
    measures: dict[str, str] = {}
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for figure in figures:
        measures.setdefault(figure.measure, figure.unit)
        text = "–" if figure.value is None else f"{figure.value:,.4g}"
        rows.setdefault((figure.case, figure.subject), {})[figure.measure] = text
    table = Table(title=f"{title}\n{machine()}", title_justify="left")
    table.add_column("case", no_wrap=True)
    table.add_column("subject", no_wrap=True)
    for measure, unit in measures.items():
        table.add_column(f"{measure}\n{unit}", justify="right")
    for (case, subject), values in rows.items():
        table.add_row(case, subject, *(values.get(measure, "") for measure in measures))
    # Where there is no terminal to be narrow, or a narrow one, a figure is still worth more than a tidy table.
    (console or Console(width=max(Console().width, WIDTH))).print(table)


def write(figures: Iterable[Figure], path: Path) -> None:
    """The figures as a JSON list."""
    path.write_text(json.dumps([asdict(figure) for figure in figures], indent=1, ensure_ascii=False) + "\n")
