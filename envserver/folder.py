"""Where a pool's sockets and logs live."""

import os
import tempfile
from pathlib import Path

from envserver.errors import EnvServerError

MAX_PATH = 107
"""Bytes of a unix socket's path."""

SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
"""Where worker sockets may go, whatever TMPDIR is: that may be too long for them."""


def short_folder() -> Path:
    """A new folder of ours alone, with a name short enough for sockets in it."""
    tried: list[str] = []
    for parent in (*SHORT_FOLDERS, tempfile.gettempdir()):
        if len(os.fsencode(parent)) > MAX_PATH - 40:
            continue
        try:
            return Path(tempfile.mkdtemp(prefix="envserver-", dir=parent))
        except OSError as error:
            tried.append(f"{parent}: {error.strerror}")
    raise EnvServerError(f"no folder for the workers' sockets can be made: {'; '.join(tried)}")
