"""What this process holds: taken before and after, to be compared."""

import asyncio
import contextlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True)
class Holdings:
    """Sets of plain words, but for the tasks."""

    files: frozenset[str]
    """What its file descriptors lead to: each socket and pipe has a number of its own."""
    threads: frozenset[str]
    processes: frozenset[str]
    """Its children, dead but not waited for included."""
    tasks: frozenset[Any]

    @classmethod
    def now(cls) -> Self:
        return cls(frozenset(_files()), frozenset(_threads()), frozenset(_children()), frozenset(asyncio.all_tasks()))

    def since(self, before: Self) -> list[str]:
        """What is held now and was not held before, in words."""
        return [
            *(f"file descriptor: {name}" for name in sorted(self.files - before.files)),
            *(f"thread: {name}" for name in sorted(self.threads - before.threads)),
            *(f"process: {name}" for name in sorted(self.processes - before.processes)),
            *(f"task: {task}" for task in self.tasks - before.tasks),
        ]


def _files() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own is closed again
            target = os.readlink(f"/proc/self/fd/{fd}")
            # Any number of event loops may have these, which have no number.
            found.append(f"{fd} {target}" if target.startswith("anon_inode") else target)
    return found


def _threads() -> list[str]:
    # An event loop's worker threads stay, up to their limit, until it is closed.
    return [f"{t.name} {t.ident}" for t in threading.enumerate() if not t.name.startswith("asyncio_")]


def _children() -> list[str]:
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            _, _, fields = (directory / "stat").read_text().rpartition(")")
            if int(fields.split()[1]) == os.getpid():
                command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                found.append(f"{directory.name} {command or 'zombie'}")
    return found
