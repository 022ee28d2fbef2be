"""Who is measured: the subjects by name, each a process that runs for the whole of a run, or the upstream itself."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gateway.processes import Process

OURS, BARE, DIRECT = "ours", "bare", "direct"


@dataclass(slots=True)
class Subject:
    """One that is measured. `process` is None for the upstream itself: what it costs is none of a proxy's."""

    name: str
    base_url: str
    process: Process | None = None

    def sessions(self, number: int) -> list[str]:
        """The keys of so many new sessions; those before are over."""
        if self.process is None:
            return ["key"] * number
        self.process.tell(str(number))
        keys = self.process.answer()
        assert isinstance(keys, list)
        return keys


@dataclass(frozen=True, slots=True)
class Starting:
    """How a subject is started: `module` in the interpreter `python`."""

    name: str
    module: str
    python: Path = field(default_factory=lambda: Path(sys.executable))

    def command(self, upstream: str) -> list[str | Path]:
        return [self.python, "-m", self.module, upstream]


LOCAL = (
    Starting(OURS, "benchmarks.gateway.subject_ours"),
    Starting(BARE, "benchmarks.gateway.subject_bare"),
)
"""Those that need no environment of their own."""
