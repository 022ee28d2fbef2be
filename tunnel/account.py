"""Whose tunnels they are, and where this user keeps what outlives a process."""

import hashlib
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
        except ValueError as error:  # PRIME_CONTEXT names a profile that is not there
            raise TunnelError(f"the Prime profile cannot be read: {error}") from error
        return cls(config.base_url, config.api_key)

    @property
    def directory(self) -> Path:
        """Where its state lives, in this user's state directory: named after a hash, for a key is secret."""
        import platformdirs  # not needed by those who only import us

        named = hashlib.sha256(f"{self.base_url}\n{self.api_key}".encode()).hexdigest()[:16]
        return Path(platformdirs.user_state_path("interception-toolkit")) / f"prime-{named}"


def make_private(directory: Path) -> None:
    """Make a state directory that only its owner can look into, and one above it. Raises `OSError`."""
    directory.parent.parent.mkdir(parents=True, exist_ok=True)
    for part in (directory.parent, directory):
        part.mkdir(mode=0o700, exist_ok=True)
