"""What a tunnel has, on disk: told before it has it, so that somebody can end it should its process be killed.

One JSON file a tunnel, named by the label its registrations carry; no secrets. It is removed when the tunnel has left
nothing; what it could not be rid of is let go, and then anybody's.
"""

import functools
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ValidationError

from tunnel import processes
from tunnel.account import make_private

logger = logging.getLogger("tunnel")


class Place(BaseModel):
    """Where a pid means something: a home directory may be shared by hosts and by containers."""

    host: str
    boot: str
    pids: str
    """The pid namespace."""

    @classmethod
    def here(cls) -> "Place":
        return _here(os.getpid())


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
            with os.fdopen(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
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
        if entry.owner is None:
            return True
        if entry.place.host != here.host:
            return False
        if entry.place.boot != here.boot:
            return True
        return entry.place.pids == here.pids and not processes.may_run(entry.owner.pid, entry.owner.mark)

    @property
    def is_here(self) -> bool:
        """Whether its pids are this host's."""
        return self.entry.place == Place.here()


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
        except (OSError, ValidationError) as error:
            logger.warning("%s, which tells what a tunnel left behind, cannot be read (%s): delete it", path, error)
            continue
        if record.path == path:
            yield record


@functools.cache
def _here(pid: int) -> Place:  # by pid: a child may live in a namespace of its own
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pids = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = pids = ""
    return Place(host=socket.gethostname(), boot=boot, pids=pids)


_warned: set[Path] = set()


def _warn_once(directory: Path, error: OSError) -> None:
    if directory not in _warned:
        _warned.add(directory)
        logger.warning(
            "%s cannot be written (%s): what this process leaves behind should it be killed will not be ended",
            directory,
            error,
        )
