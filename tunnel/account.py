"""Whose tunnels they are, and where this user keeps what outlives a process."""

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

import prime_tunnel

from tunnel.errors import TunnelError


@dataclass(frozen=True)
class Account:
    """One key at one address of Prime's API. Its limits are counted, and its tunnels recorded, apart from others'."""

    base_url: str = field(repr=False)  # a password may stand in it
    api_key: str = field(repr=False)

    @classmethod
    def current(cls) -> "Account":
        """As the SDK finds it: `PRIME_API_KEY`, `PRIME_API_BASE_URL`, the profile. Raises `TunnelError`."""
        try:
            config = prime_tunnel.Config()
        # PRIME_CONTEXT names a profile that is not there, it may not be read, or there is no home to look in.
        except (ValueError, OSError, RuntimeError) as error:
            raise TunnelError(f"the Prime profile cannot be read: {error}") from error
        return cls(config.base_url, config.api_key)

    @property
    def directory(self) -> Path:
        """Where its state lives, in this user's state directory: named after a hash, for a key is secret."""
        import platformdirs  # not needed by those who only import us

        named = hashlib.sha256(f"{self.base_url}\n{self.api_key}".encode()).hexdigest()[:16]
        # Absolute, for the sidecar has another working directory.
        return Path(platformdirs.user_state_path("interception-toolkit")).absolute() / f"prime-{named}"


def make_private(directory: Path) -> None:
    """Make a state directory that only its owner can look into, and one above it. Raises `OSError`, also where one is
    there that others may write to: what lies in it is acted on.
    """
    directory.parent.parent.mkdir(parents=True, exist_ok=True)
    for part in (directory.parent, directory):
        part.mkdir(mode=0o700, exist_ok=True)
        there = part.stat()
        if there.st_uid != os.geteuid() or there.st_mode & 0o022:
            raise PermissionError(f"{part} is another user's, or others may write to it")
