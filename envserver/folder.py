"""Where a pool's sockets and logs live."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from envserver.errors import EnvServerError
from envserver.zsocket import MAX_PATH

SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
"""Where worker sockets may go, whatever TMPDIR is: that may be too long for them."""

PREFIX = "envserver-"

LOCK = "lock"
"""The file whose lock says that the folder's owner lives. A folder without one is not ours to judge."""

UNLOCKED = 60.0
"""Seconds that a new folder may take to be locked."""


class ShortFolder:
    """A new folder of ours alone, with a name short enough for sockets in it."""

    def __init__(self) -> None:
        tried: list[str] = []
        for parent in _parents():
            try:
                self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            except OSError as error:
                tried.append(f"{parent}: {error.strerror}")
                continue
            try:
                self._lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
            except OSError as error:
                shutil.rmtree(self.path, ignore_errors=True)
                tried.append(f"{self.path}: {error.strerror}")
                continue
            with contextlib.suppress(OSError):  # a file system without locks: nobody will take it for left behind
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        raise EnvServerError(f"no folder for the workers' sockets can be made: {'; '.join(tried)}")

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _parents() -> list[str]:
    places = dict.fromkeys((*SHORT_FOLDERS, tempfile.gettempdir()))
    return [parent for parent in places if len(os.fsencode(parent)) <= MAX_PATH - 40]


def remove_left_behind() -> None:
    """Remove what owners of the same user that were killed have left behind. May be called from any thread."""
    for parent in _parents():
        with contextlib.suppress(OSError), os.scandir(parent) as entries:
            for entry in entries:
                if entry.name.startswith(PREFIX):
                    with contextlib.suppress(OSError):
                        _remove_if_left_behind(Path(entry.path))


def _remove_if_left_behind(path: Path) -> None:
    lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        folder, held = os.lstat(path), os.fstat(lock)
        ours = stat.S_ISDIR(folder.st_mode) and folder.st_uid == held.st_uid == os.getuid()
        if ours and held.st_mtime < time.time() - UNLOCKED:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)
