"""What a tunnel has, on disk: told before it has it, so that somebody can end it should its process be killed.

One JSON file a tunnel, named by the label its registrations carry; no secrets. It is removed when the tunnel has left
nothing; what it could not be rid of is let go, and then anybody's.
"""

import contextlib
import logging
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ValidationError

from tunnel import processes
from tunnel.account import make_private

logger = logging.getLogger("tunnel")

HOST_PIDS = "pid:[4026531836]"
"""The first pid namespace, which no container has (PROC_PID_INIT_INO in the kernel's proc_ns.h)."""


class Place(BaseModel):
    """Where a pid means something: a home directory may be shared by hosts and by containers. An empty part is one that
    could not be learned, and proves nothing.
    """

    host: str
    machine: str = ""
    boot: str
    pids: str
    """The namespaces of pids and of the clock that marks are read off."""

    @classmethod
    def here(cls) -> "Place":
        host = socket.gethostname()
        if sys.platform != "linux":  # neither boots nor namespaces are told apart there
            address = uuid.getnode()
            made_up = address >> 40 & 1  # random, as there is none to be found
            return cls(host=host, machine="" if made_up else f"{address:012x}", boot=sys.platform, pids=sys.platform)
        try:
            pids = os.readlink("/proc/self/ns/pid")
            with contextlib.suppress(FileNotFoundError):  # Linux has it from 5.6 on
                pids += f" {os.readlink('/proc/self/ns/time')}"
        except OSError:
            pids = ""
        return cls(
            host=host, machine=_read("/etc/machine-id"), boot=_read("/proc/sys/kernel/random/boot_id"), pids=pids
        )

    def has_pids_of(self, other: "Place") -> bool:
        """Whether a pid is the same process here and there."""
        known = self.boot and self.pids and (self.machine or sys.platform == "linux")
        return bool(known) and self == other

    def is_before_boot_of(self, other: "Place") -> bool:
        """Whether the host of `other` has booted since. Never told of a container: its machine's id may have come with
        its image, and so be another's as well.
        """
        same = (self.host, self.machine, self.pids) == (other.host, other.machine, other.pids)
        known = self.boot and self.machine and self.pids.startswith(HOST_PIDS)
        return bool(same and known and other.boot) and self.boot != other.boot


class Running(BaseModel):
    """A process, by its pid and the mark of `tunnel.processes`."""

    pid: int
    mark: str

    @classmethod
    def of(cls, pid: int) -> "Running":
        return cls(pid=pid, mark=processes.mark_of(pid) or "")


class Entry(BaseModel):
    label: str
    team_id: str | None = None
    asked_at: float = 0.0
    """When a registration was last asked for, in unix seconds."""
    tunnel_id: str | None = None
    client: Running | None = None
    config_dir: str
    """Where the client's config files are, each named by a tunnel id."""
    config_file: str | None = None
    place: Place
    owner: Running | None
    """Who sees to it; None: nobody."""


class Record:
    """The file of one tunnel. Writing it never fails: where it cannot be written that is said once."""

    def __init__(self, directory: Path, entry: Entry) -> None:
        self.path = directory / f"{entry.label}.json"
        self.entry = entry
        self._removed = False

    def write(self, **changes: object) -> None:
        if self._removed:
            return
        self.entry = self.entry.model_copy(update=changes)
        written = self.path.with_suffix(".new")
        try:
            make_private(self.path.parent)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            with os.fdopen(os.open(written, flags, 0o600), "w") as file:
                file.write(self.entry.model_dump_json())
            written.replace(self.path)
        except OSError as error:
            _warn_once(self.path.parent, error)

    def remove(self) -> None:
        self._removed = True
        for path in (self.path, self.path.with_suffix(".new")):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                _warn_once(self.path.parent, error)

    def let_go(self) -> None:
        """The next tunnel of this user that starts shall see to it."""
        self.write(owner=None)

    @property
    def is_dead(self) -> bool:
        """Whether it is certain that nobody sees to it any more."""
        entry, here = self.entry, Place.here()
        if entry.owner is None or (entry.place.is_before_boot_of(here) and self._is_older_than_boot()):
            return True
        return entry.place.has_pids_of(here) and not processes.may_run(entry.owner.pid, entry.owner.mark)

    def _is_older_than_boot(self) -> bool:
        """Whether it was last written before this host booted: if not, it is another's that passes for this one, such
        as a copy of the same virtual machine.
        """
        try:
            return self.path.stat().st_mtime < time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        except OSError:
            return False

    @property
    def is_here(self) -> bool:
        """Whether its pids are this host's."""
        return self.entry.place.has_pids_of(Place.here())


def read_all(directory: Path) -> Iterator[Record]:
    """The records there are, also the living ones'; what cannot be read is said and left."""
    for path in sorted(directory.glob("*.json")):
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_uid != os.geteuid():
                    continue  # root must not kill and unlink what others tell it to
                record = Record(directory, Entry.model_validate_json(file.read()))
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError as error:
            logger.warning("%s, which tells what a tunnel has, cannot be read: %s", path, error)
            continue
        except ValidationError as error:
            logger.warning("%s, which tells what a tunnel left behind, is damaged (%s): delete it", path, error)
            continue
        if record.path == path:
            yield record


def _read(file: str) -> str:
    try:
        return Path(file).read_text().strip()
    except OSError:
        return ""


_warned: set[Path] = set()


def _warn_once(directory: Path, error: OSError) -> None:
    if directory not in _warned:
        _warned.add(directory)
        logger.warning(
            "%s cannot be written (%s): what this process leaves behind should it be killed will not be ended",
            directory,
            error,
        )
