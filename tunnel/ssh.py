"""Reverse port forwarding (`ssh -R`) over asyncssh: any sshd that lets us in without a password is a tunnel."""

import asyncio
import itertools
import logging
from typing import Any

import asyncssh

from tunnel.base import Tunnel, in_url
from tunnel.config import SshTunnelConfig
from tunnel.errors import TunnelError, TunnelGoneError, TunnelLimitError, UrlChangedError
from tunnel.evidence import Outcome
from tunnel.keepalive import TunnelClient
from tunnel.probe import accepts_tcp, probe
from tunnel.ssh_login import Login, LoginRefusedError, end, why
from tunnel.teardown import cancel_and_wait, run_to_end

logger = logging.getLogger("tunnel")

LOGIN_TIMEOUT = 20.0
"""Seconds for one connection, login and forward. Well under one is usual, but an sshd that looks us up in a DNS that
does not answer takes ten or more."""

FIRST_LOOK_TIMEOUT = 2.0
"""Seconds for the first look at a forwarded port from here: what a start takes where a firewall drops it."""

PRIVILEGED = 1024

EVERYWHERE = ("", "*", "0.0.0.0", "::")
"""Addresses to listen on that mean all interfaces."""


class SshTunnel(Tunnel):
    """A port of a relay's that is forwarded to ours. Reads `~/.ssh/config` (aliases, keys, ProxyJump, ProxyCommand),
    asks the agent, checks the host key, and never asks for a password.

    The relay's port is settled by the first `expose`; every reconnect asks for the same one, so the URL stays. A relay
    that has stopped is noticed within 10 s. `expose` also raises `TunnelError` where sshd takes the forward but then
    listens on its loopback alone (`GatewayPorts no`, its default), unless `url` says that a proxy of yours is in front.
    """

    def __init__(self, config: SshTunnelConfig) -> None:
        super().__init__(config.policy, config.mark)
        self.config = config
        self._client: _Client | None = None

    async def _connect(self, port: int) -> TunnelClient:
        client = _Client(self.config, port)
        try:
            await client.start()
            if "url" not in self.config.model_fields_set:
                await client.look()
        except BaseException:
            await run_to_end(client.stop())
            raise
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
        self._login = Login(config)
        self._refused_since: float | None = None  # the first refused forward in a row, by the loop's clock

    @property
    def is_running(self) -> bool:
        # The forward ends with its connection and not before: SSH has no message that takes it back.
        return self._connection is not None and not self._connection.is_closed()

    async def reference_ok(self, timeout: float) -> bool | None:
        """Whether the relay, or the first jump host before it, takes a connection on its ssh port; None: not known."""
        if self._login.first_peer is None:
            return None
        host, port = self._login.first_peer
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
        except LoginRefusedError as error:
            raise TunnelLimitError(str(error)) from error
        self._port, self.url = port, self._url_of(port)

    async def look(self) -> None:
        """Raises `TunnelError` if the port is closed to us: sshd takes a forward that it then keeps to itself."""
        assert self.url is not None
        seen = await probe(self.url + "/", timeout=FIRST_LOOK_TIMEOUT, through_proxy=True)
        if seen.fault is Outcome.REFUSED:
            listens = self._config.remote_host
            why = (
                "GatewayPorts of its sshd_config is `no` (the default), so it listens on its own loopback only: set it "
                "to `clientspecified` or `yes`"
                if listens in EVERYWHERE
                else f"it listens on {listens} only: leave remote_host empty"
            )
            raise TunnelError(
                f"{self._relay} forwards the port, but {self.url} refuses connections. Most likely {why}; or put a "
                "reverse proxy in front of it there and give its `url`"
            )
        if seen.fault is Outcome.PATH:
            logger.warning(
                "%s cannot be reached from here (%s): is the port open in its firewall?", self.url, seen.detail
            )

    async def restart(self) -> str:
        """Connect anew and have the same port forwarded.

        Raises `TunnelGoneError` for a refused key, for a forward refused for `forward_retry`, and for another port;
        `TunnelError` for all that may pass.
        """
        await self.stop()
        try:
            port = await self._open()
        except LoginRefusedError as error:
            raise TunnelGoneError(str(error)) from error
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
            assert self.url is not None
            raise UrlChangedError(self.url, url)
        return url

    async def stop(self) -> None:
        """End the connection and with it the forward; does nothing when there is none."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await run_to_end(end(connection))

    # -- parts ---------------------------------------------------------------------------------

    async def _open(self) -> int:
        """Log in and have the port forwarded; returns the relay's port. Leaves nothing if it fails or is cancelled.

        Raises `TunnelError`: a `LoginRefusedError` or `_ForwardRefused` where that is known.
        """
        timeout = min(self._config.start_timeout, LOGIN_TIMEOUT)
        # A task of its own, so that asyncssh sees one cancellation at most and can finish cleaning up after it.
        opening = asyncio.ensure_future(self._log_in_and_forward())
        try:
            async with asyncio.timeout(timeout):
                connection, port = await asyncio.shield(opening)
            self._connection = connection
            return port
        except BaseException as error:
            await run_to_end(_abandon(opening))
            if isinstance(error, TimeoutError):
                raise TunnelError(f"no connection to {self._relay}: no login within {timeout:g} s") from error
            if isinstance(error, OSError | asyncssh.Error):
                raise TunnelError(f"no connection to {self._relay}: {why(error)}") from error
            raise

    async def _log_in_and_forward(self) -> tuple[asyncssh.SSHClientConnection, int]:
        connection = await self._login.connect(reconnect=self.url is not None)

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
            await end(connection)
            raise
        return connection, listener.get_port()

    def _url_of(self, port: int) -> str:
        assert self._connection is not None
        # As ~/.ssh/config resolves an alias; an older asyncssh does not say.
        host = str(self._connection.get_extra_info("host", self._config.host))
        return self._config.url.format(host=in_url(host), port=port)

    @property
    def _relay(self) -> str:
        return self._login.relay

    def _forward_refused(self) -> str:
        return (
            f"{self._relay} refused to forward {f'port {self._port}' if self._port else 'a port'}: it may be in use by "
            "an old session, or AllowTcpForwarding, PermitListen or GatewayPorts of its sshd_config forbid it"
            + (", or it takes root there, as every port below 1024" if 0 < self._port < PRIVILEGED else "")
        )


async def _abandon(opening: asyncio.Task[tuple[asyncssh.SSHClientConnection, int]]) -> None:
    """Be rid of a connection nobody waits for any more, also of one that stood just as we were cancelled."""
    await cancel_and_wait(opening)
    if not opening.cancelled() and opening.exception() is None:
        await end(opening.result()[0])
