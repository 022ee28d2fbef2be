"""Reverse port forwarding (`ssh -R`) over asyncssh: any sshd that lets us in without a password is a tunnel."""

import asyncio
import itertools
import logging
from typing import Any

import asyncssh

from tunnel.base import Tunnel
from tunnel.config import SshTunnelConfig
from tunnel.errors import TunnelError, TunnelGoneError, TunnelLimitError
from tunnel.keepalive import TunnelClient
from tunnel.probe import accepts_tcp
from tunnel.teardown import cancel_and_wait, run_to_end

logger = logging.getLogger("tunnel")

LOGIN_TIMEOUT = 20.0
"""Seconds for one connection, login and forward. Well under one is usual, but an sshd that looks us up in a DNS that
does not answer takes ten or more."""

UNANSWERED_MAX = 3
"""Keepalives in a row that may go unanswered; asyncssh ends the connection when the next one is due."""

CLOSE_TIMEOUT = 5.0
"""Seconds for closing a connection. Ours needs no answer, but one through a jump host closes that one as well."""


class SshTunnel(Tunnel):
    """A port of a relay's that is forwarded to ours. Reads `~/.ssh/config` and never asks for a password.

    The relay's port is settled by the first `expose`; every reconnect asks for the same one, so the URL stays.
    """

    def __init__(self, config: SshTunnelConfig) -> None:
        super().__init__(config.policy, config.mark)
        self.config = config
        self._client: _Client | None = None

    async def _connect(self, port: int) -> TunnelClient:
        client = _Client(self.config, port)
        await client.start()
        self._client = client
        return client

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.stop()


class _ForwardRefused(TunnelError):
    """The relay does not forward the port. SSH gives no reason, so this alone is never final."""


class _Client:
    """The connection to the relay as `keep_serving` drives it."""

    program = "the SSH connection"

    def __init__(self, config: SshTunnelConfig, local_port: int) -> None:
        self.url: str | None = None
        self._config = config
        self._local_port = local_port
        self._port = config.remote_port  # what is asked for; 0 only until the relay has chosen
        self._connection: asyncssh.SSHClientConnection | None = None
        self._peer = config.host, config.port  # by address, once it is known: ~/.ssh/config may have an alias
        self._refused_since: float | None = None  # the first refused forward in a row, by the loop's clock

    @property
    def is_running(self) -> bool:
        # The forward ends with its connection and not before: SSH has no message that takes it back.
        return self._connection is not None and not self._connection.is_closed()

    async def reference_ok(self, timeout: float) -> bool:
        """Whether the relay takes a connection on its ssh port."""
        host, port = self._peer
        return await accepts_tcp(host, port, timeout=timeout)

    async def start(self) -> None:
        """Connect for the first time; a refused forward is asked for again until `start_timeout`.

        Raises `TunnelLimitError` for a refused or unusable key, else `TunnelError`.
        """
        config, refused = self._config, None
        try:
            async with asyncio.timeout(config.start_timeout):
                for attempt in itertools.count():
                    try:
                        port = await self._open()
                        break
                    except _ForwardRefused as error:
                        refused = error
                        logger.warning("no tunnel yet, trying again: %s", error)
                    policy = config.policy
                    await asyncio.sleep(min(policy.restart_backoff_max, policy.restart_backoff * 2.0**attempt))
        except TimeoutError:
            if refused is not None:
                raise TunnelError(f"{refused} (asked for {config.start_timeout:g} s)") from refused
            raise TunnelError(f"{self._relay} did not let us in within {config.start_timeout:g} s") from None
        except asyncssh.PermissionDenied as error:
            raise TunnelLimitError(self._key_refused(error)) from error
        self._port, self.url = port, self._url_of(port)

    async def restart(self) -> str:
        """Connect anew and have the same port forwarded.

        Raises `TunnelGoneError` for a refused key, for a forward refused for `forward_retry`, and for another port;
        `TunnelError` for all that may pass.
        """
        await self.stop()
        try:
            port = await self._open()
        except asyncssh.PermissionDenied as error:
            raise TunnelGoneError(self._key_refused(error)) from error
        except _ForwardRefused as error:
            # The old session may hold the port until the relay notices that it is dead.
            now = asyncio.get_running_loop().time()
            if self._refused_since is None:
                self._refused_since = now
            if now - self._refused_since < self._config.forward_retry:
                raise
            raise TunnelGoneError(f"{error} (asked for {now - self._refused_since:.0f} s)") from error
        except TunnelError:
            self._refused_since = None
            raise
        self._refused_since = None
        if (url := self._url_of(port)) != self.url:
            await self.stop()
            raise TunnelGoneError(f"{self._relay} forwards another port now: {url} instead of {self.url}")
        return url

    async def stop(self) -> None:
        """End the connection and with it the forward; does nothing when there is none."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await run_to_end(_end(connection))

    # -- parts ---------------------------------------------------------------------------------

    async def _open(self) -> int:
        """Log in and have the port forwarded; returns the relay's port. Leaves nothing if it fails or is cancelled.

        Raises asyncssh's `PermissionDenied` as it is, for only the caller knows what it means; else `TunnelError`.
        """
        timeout = min(self._config.start_timeout, LOGIN_TIMEOUT)
        # A task of its own, so that asyncssh sees one cancellation at most and can finish cleaning up after it.
        opening = asyncio.ensure_future(self._log_in_and_forward())
        try:
            async with asyncio.timeout(timeout):
                connection, port = await asyncio.shield(opening)
            self._connection = connection
            if peer := connection.get_extra_info("peername"):
                self._peer = str(peer[0]), int(peer[1])
            return port
        except BaseException as error:
            await run_to_end(_abandon(opening))
            match error:
                case asyncssh.PermissionDenied() | TunnelError():
                    raise
                case asyncssh.HostKeyNotVerifiable():
                    raise TunnelError(self._host_key_refused(error)) from error
                case OSError() | asyncssh.Error() | ValueError():
                    reason = str(error) or f"no login within {timeout:g} s"
                    raise TunnelError(f"no connection to {self._relay}: {reason}") from error
            raise

    async def _log_in_and_forward(self) -> tuple[asyncssh.SSHClientConnection, int]:
        connection = await self._log_in()

        async def reach_local(orig_host: str, orig_port: int) -> Any:
            forwarder = await connection.forward_connection("127.0.0.1", self._local_port)
            if connection.is_closed():  # asyncssh would forget this one, and leave its socket open
                forwarder.close()
                raise asyncssh.ChannelOpenError(asyncssh.OPEN_CONNECT_FAILED, "the SSH connection is closed")
            return forwarder

        try:
            try:
                listener = await connection.create_server(reach_local, self._config.remote_host, self._port)
            except asyncssh.ChannelListenError as error:
                await asyncio.sleep(0)  # a connection lost meanwhile is told in the same words, and shows a step later
                if connection.is_closed():
                    raise TunnelError(f"{self._relay} closed the connection") from error
                raise _ForwardRefused(self._forward_refused()) from error
        except BaseException:
            await _end(connection)
            raise
        return connection, listener.get_port()

    async def _log_in(self) -> asyncssh.SSHClientConnection:
        config = self._config
        options: dict[str, object] = {
            "keepalive_interval": config.keepalive_interval,
            "keepalive_count_max": UNANSWERED_MAX,
            "password_auth": False,
            "kbdint_auth": False,
        }
        if "port" in config.model_fields_set:  # else what ~/.ssh/config has for this host may stand
            options["port"] = config.port
        if config.username is not None:
            options["username"] = config.username
        if config.client_keys:
            # Loaded here, so that a file of ours that cannot be read is told apart from a relay out of reach.
            options["client_keys"] = await asyncio.to_thread(self._load_keys, [str(key) for key in config.client_keys])
            options["agent_path"] = options["pkcs11_provider"] = None
        if config.known_hosts == "unchecked":
            options["known_hosts"] = None
        elif config.known_hosts is not None:
            options["known_hosts"] = await asyncio.to_thread(self._load_known_hosts, str(config.known_hosts))
        return await asyncssh.connect(config.host, **options)

    def _load_keys(self, paths: list[str]) -> object:
        try:
            return asyncssh.load_keypairs(paths)
        except (OSError, ValueError) as error:
            # On a reconnect too: the key may be being replaced, and the relay has refused nothing.
            kind = TunnelLimitError if self.url is None else TunnelError
            raise kind(
                f"the login key for {self._relay} cannot be used ({error}): an encrypted one belongs into the ssh "
                "agent, which is asked when client_keys is not set"
            ) from error

    def _load_known_hosts(self, path: str) -> object:
        try:
            return asyncssh.read_known_hosts(path)
        except (OSError, ValueError) as error:
            raise TunnelError(f"the known_hosts file {path} cannot be used: {error}") from error

    def _url_of(self, port: int) -> str:
        assert self._connection is not None
        # As ~/.ssh/config resolves an alias; an older asyncssh does not say.
        host = str(self._connection.get_extra_info("host", self._config.host))
        return self._config.url.format(host=f"[{host}]" if ":" in host else host, port=port)

    @property
    def _relay(self) -> str:
        config = self._config
        return f"the SSH relay {config.username + '@' if config.username else ''}{config.host}:{config.port}"

    def _key_refused(self, error: asyncssh.PermissionDenied) -> str:
        return f"{self._relay} refused the login key: {error}"

    def _forward_refused(self) -> str:
        return (
            f"{self._relay} refused to forward {f'port {self._port}' if self._port else 'a port'}: it may be in use by "
            "an old session, or AllowTcpForwarding, PermitListen or GatewayPorts of its sshd_config forbid it"
        )

    def _host_key_refused(self, error: asyncssh.HostKeyNotVerifiable) -> str:
        config = self._config
        return (
            f"{self._relay} shows a host key that known_hosts does not vouch for ({error}): compare its fingerprint, "
            f"then `ssh-keyscan -p {config.port} {config.host} >> {config.known_hosts or '~/.ssh/known_hosts'}`, or "
            "set known_hosts to a file that has it"
        )


async def _end(connection: asyncssh.SSHClientConnection) -> None:
    connection.close()
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT):
            await connection.wait_closed()
    except TimeoutError:
        logger.error("an SSH connection did not close within %g s", CLOSE_TIMEOUT)


async def _abandon(opening: asyncio.Task[tuple[asyncssh.SSHClientConnection, int]]) -> None:
    """Be rid of a connection nobody waits for any more, also of one that stood just as we were cancelled."""
    await cancel_and_wait(opening)
    if not opening.cancelled() and opening.exception() is None:
        await _end(opening.result()[0])
