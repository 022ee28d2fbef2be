"""Logging in to an SSH relay: as `~/.ssh/config` says, through its jump hosts, with every refusal in plain words."""

import asyncio
import logging
import os
import socket
from typing import Any, NamedTuple

import asyncssh

from tunnel.config import SshTunnelConfig
from tunnel.errors import TunnelError, TunnelLimitError

logger = logging.getLogger("tunnel")

UNANSWERED_MAX = 3
"""Keepalives in a row that may go unanswered; asyncssh ends the connection when the next one is due."""

CLOSE_TIMEOUT = 5.0
"""Seconds for closing a connection. Ours needs no answer, but one through a jump host closes that one as well."""

PORT_MAX = 65535

HOPS_MAX = 8
"""Hosts on the way, the relay included. More is a loop in `~/.ssh/config`."""


class LoginRefusedError(TunnelError):
    """A host on the way takes none of our keys. Asking again does not help."""


class Hop(NamedTuple):
    """A host to log in to on the way, the relay last."""

    host: str
    port: int | None = None
    """None: as `~/.ssh/config` says, else 22."""
    username: str | None = None
    ours: bool = True
    """Named by our config, so that its keys and known hosts count; a hop of `~/.ssh/config` goes by that alone."""


class Login:
    """The way to the relay of `config`, walked anew by each `connect`."""

    def __init__(self, config: SshTunnelConfig) -> None:
        self.config = config
        port = f":{config.port}" if "port" in config.model_fields_set else ""
        self.relay = f"the SSH relay {f'{config.username}@' if config.username else ''}{config.host}{port}"
        """What messages call it."""
        self.first_peer: tuple[str, int] | None = None
        """Address and port of the first host on the way, once it was reached; None also behind a ProxyCommand."""

    async def first_address(self) -> tuple[str, int] | None:
        """Host and port of the first connection on the way, as `~/.ssh/config` resolves them; None where a ProxyCommand
        makes it."""
        hop = (await self._route(self._target, frozenset()))[0]
        options = await self._resolved(hop)
        return None if options.proxy_command else (options.host, options.port)

    async def connect(self, *, reconnect: bool = False) -> asyncssh.SSHClientConnection:
        """Log in. Whoever closes the connection closes those to its jump hosts with it.

        `LoginRefusedError` for a refused key; `TunnelLimitError` for a key file that cannot be used, which on a
        `reconnect` is a mere `TunnelError` (it may be being replaced), as is all else.
        """
        connection: asyncssh.SSHClientConnection | None = None
        try:
            for hop in await self._route(self._target, frozenset()):
                connection = await self._log_in(hop, connection, reconnect)
        except BaseException:
            if connection is not None:
                await end(connection)
            raise
        assert connection is not None
        return connection

    @property
    def _target(self) -> Hop:
        config = self.config
        return Hop(config.host, config.port if "port" in config.model_fields_set else None, config.username)

    async def _route(self, hop: Hop, seen: frozenset[Hop]) -> list[Hop]:
        """The hosts to log in to, in order."""
        if hop in seen or len(seen) >= HOPS_MAX:
            raise TunnelError(f"the jump hosts of {self.relay} go round in a circle: {hop.host} comes up again")
        ours = hop == self._target and self.config.jump is not None
        # asyncssh would log in to those of ~/.ssh/config itself, but leave them open where it is cancelled on the way.
        jump = self.config.jump if ours else await self._jump_of(hop)
        if not jump:
            return [hop]
        first, *others = [_parse(part, ours) for part in jump.split(",")]
        return [*await self._route(first, seen | {hop}), *others, hop]

    async def _jump_of(self, hop: Hop) -> str | None:
        tunnel = (await self._resolved(hop)).tunnel
        return tunnel if isinstance(tunnel, str) else None

    async def _resolved(self, hop: Hop) -> asyncssh.SSHClientConnectionOptions:
        """What `~/.ssh/config` says of it."""
        try:
            options: asyncssh.SSHClientConnectionOptions = await asyncssh.SSHClientConnectionOptions.construct(
                config=(), host=hop.host, **_named(hop), known_hosts=None, client_keys=None, agent_path=None
            )
        except (OSError, ValueError, RuntimeError, asyncssh.Error) as error:
            raise TunnelError(f"~/.ssh/config cannot be used for {hop.host}: {error}") from error
        return options

    async def _log_in(
        self, hop: Hop, via: asyncssh.SSHClientConnection | None, reconnect: bool
    ) -> asyncssh.SSHClientConnection:
        what = self.relay if hop == self._target else f"the jump host {hop.host} of {self.relay}"
        witness = _Witness()
        options = await self._options(hop, reconnect)
        try:
            connection = await asyncssh.connect(hop.host, tunnel=via, client_factory=lambda: witness, **options)
        except asyncssh.PermissionDenied as error:
            raise LoginRefusedError(f"{what} refused the login key: {error}") from error
        except asyncssh.HostKeyNotVerifiable as error:
            raise TunnelError(f"{what} {self._host_key_refused(hop, witness, error)}") from error
        except asyncssh.ChannelOpenError as error:
            raise TunnelError(
                f"no connection to {what}: the jump host before it does not lead there ({error.reason}): it may be "
                "down, or AllowTcpForwarding or PermitOpen of the jump host's sshd_config forbid it"
            ) from error
        except (OSError, ValueError, RuntimeError, asyncssh.Error) as error:  # RuntimeError: no home directory
            raise TunnelError(f"no connection to {what}: {why(error)}") from error
        if via is None:
            peer = connection.get_extra_info("peername")
            self.first_peer = (str(peer[0]), int(peer[1])) if peer else None
        else:
            connection.set_tunnel(via)  # closed together
        return connection

    async def _options(self, hop: Hop, reconnect: bool) -> dict[str, Any]:
        config = self.config
        options: dict[str, Any] = {
            "keepalive_interval": config.keepalive_interval,
            "keepalive_count_max": UNANSWERED_MAX,
            "password_auth": False,
            "kbdint_auth": False,
            **_named(hop),
        }
        if not hop.ours:
            return options
        if config.client_keys:
            # Loaded here, so that a file of ours that cannot be read is told apart from a relay out of reach.
            keys = [str(key) for key in config.client_keys]
            options["client_keys"] = await asyncio.to_thread(self._load_keys, keys, reconnect)
            options["agent_path"] = options["pkcs11_provider"] = None
        if config.known_hosts == "unchecked":
            options["known_hosts"] = None
        elif config.known_hosts is not None:
            path = str(config.known_hosts)
            options["known_hosts"] = await asyncio.to_thread(self._load_known_hosts, path)
        return options

    def _load_keys(self, paths: list[str], reconnect: bool) -> object:
        try:
            return asyncssh.load_keypairs([os.path.expanduser(path) for path in paths])
        except (OSError, ValueError, RuntimeError) as error:
            # On a reconnect the relay has refused nothing.
            kind = TunnelError if reconnect else TunnelLimitError
            raise kind(
                f"the login key for {self.relay} cannot be used ({_of_file(error)}): an encrypted one belongs into the "
                "ssh agent, which is asked when client_keys is not set"
            ) from error

    def _load_known_hosts(self, path: str) -> object:
        try:
            return asyncssh.read_known_hosts(os.path.expanduser(path))
        except (OSError, ValueError, RuntimeError) as error:
            raise TunnelError(f"the known_hosts file {path} cannot be used: {_of_file(error)}") from error

    def _host_key_refused(self, hop: Hop, witness: "_Witness", error: asyncssh.HostKeyNotVerifiable) -> str:
        file = "~/.ssh/known_hosts"
        if hop.ours and self.config.known_hosts is not None:
            file = str(self.config.known_hosts)
        if witness.key is None:
            return f"shows a host key that is not to be trusted ({error}); see {file}"
        name = witness.host if witness.port == 22 else f"[{witness.host}]:{witness.port}"
        shown = f"{witness.key.get_algorithm()} {witness.key.get_fingerprint()}"
        if witness.others_known:
            return (
                f"shows ANOTHER host key ({shown}) than {file} has for it: it was set up anew, or somebody sits in "
                f"between. Only if you know why: `ssh-keygen -f {file} -R '{name}'`, then take the new one in"
            )
        return (
            f"shows a host key that known_hosts does not vouch for ({shown}): compare its fingerprint, "
            f"then `ssh-keyscan -p {witness.port} {witness.host} >> {file}`, or set known_hosts to a file that has it"
        )


class _Witness(asyncssh.SSHClient):
    """Remembers which host key was not trusted."""

    def __init__(self) -> None:
        self.key: asyncssh.SSHKey | None = None
        self.host = ""
        self.port = 22
        self.others_known = False
        self._connection: asyncssh.SSHClientConnection | None = None

    def connection_made(self, conn: asyncssh.SSHClientConnection) -> None:
        self._connection = conn

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        self.host, self.port, self.key = host, port, key
        self.others_known = bool(getattr(self._connection, "_trusted_host_keys", None))
        return False


def why(error: Exception) -> str:
    """An error's reason without the internals that asyncio puts around it."""
    if isinstance(error, socket.gaierror):
        return f"its name does not resolve: {(error.strerror or str(error)).lower()}"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return str(error) or type(error).__name__


def _of_file(error: Exception) -> str:
    """The same of one that may be any of several files."""
    return f"{error.filename}: {why(error)}" if isinstance(error, OSError) and error.filename else str(error)


async def end(connection: asyncssh.SSHClientConnection) -> None:
    """Close it and wait for that, but not for ever."""
    connection.close()
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT):
            await connection.wait_closed()
    except TimeoutError:
        logger.error("an SSH connection did not close within %g s", CLOSE_TIMEOUT)


def _parse(text: str, ours: bool) -> Hop:
    """`[USER@]HOST[:PORT]`, or the same as an ssh URL, as OpenSSH takes it."""
    username, _, place = text.strip().removeprefix("ssh://").rpartition("@")
    host, port = place, ""
    if place.startswith("["):
        host, _, port = place[1:].partition("]")
    elif place.count(":") == 1:
        host, _, port = place.partition(":")
    port = port.removeprefix(":")
    if not host or (port and not (port.isdecimal() and 0 < int(port) <= PORT_MAX)):
        raise TunnelError(f"{text!r} is not a jump host: write [USER@]HOST[:PORT]")
    return Hop(host, int(port) if port else None, username or None, ours)


def _named(hop: Hop) -> dict[str, Any]:
    """What is said of a hop; what is not may stand in `~/.ssh/config`."""
    named = {"port": hop.port, "username": hop.username}
    return {name: value for name, value in named.items() if value is not None}
