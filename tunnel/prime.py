"""Prime's tunnels: the prime-tunnel SDK (frpc), set up and torn down without leaving anything behind."""

import asyncio
import contextlib
import logging
import os
import secrets

import prime_tunnel
from prime_tunnel.binary import get_frpc_path

from tunnel.base import Tunnel
from tunnel.config import PrimeTunnelConfig
from tunnel.errors import TunnelError, TunnelGoneError, TunnelLimitError
from tunnel.health import HEALTH_PATH
from tunnel.keepalive import TunnelClient
from tunnel.logs import install_log_handler
from tunnel.teardown import run_to_end

logger = logging.getLogger("tunnel")

REGISTER_TRIES = 3
TERMINAL = ("expired", "terminated")  # deletion is soft: the record stays, with one of these
PROXY_VARIABLES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


class PrimeTunnel(Tunnel):
    """A tunnel of Prime's service. Missing credentials are a `TunnelLimitError` when it is made."""

    def __init__(self, config: PrimeTunnelConfig | None = None) -> None:
        config = config or PrimeTunnelConfig()
        super().__init__(config.policy)
        self.config = config
        try:
            api_key = prime_tunnel.Config().api_key
        except ValueError as error:  # PRIME_CONTEXT names a profile that is not there
            raise TunnelError(f"the Prime profile cannot be read: {error}") from error
        if not api_key:
            raise TunnelLimitError("no Prime credentials: set PRIME_API_KEY or run `prime login`")
        if config.keepalive == "sdk" and not hasattr(prime_tunnel.Tunnel, "keep_serving"):
            raise TunnelError(
                f"prime-tunnel {prime_tunnel.__version__} has no keep_serving (it came with 0.1.16): "
                "upgrade it, or leave keepalive at 'ours'"
            )
        install_log_handler()
        self._client: _Client | None = None

    async def _connect(self, port: int) -> TunnelClient:
        if found := [name for name in PROXY_VARIABLES if os.environ.get(name)]:
            logger.warning("frpc inherits %s: if it cannot connect, unset them", ", ".join(found))
        try:
            # Apart from start(), which may then be waited for: this can be a download, and may be cancelled.
            await asyncio.to_thread(get_frpc_path)
        except (prime_tunnel.TunnelError, OSError) as error:
            raise TunnelError(f"frpc cannot be installed: {error}") from error
        for attempt in range(REGISTER_TRIES):
            try:
                self._client = await self._register(port)
                return self._client
            except TunnelLimitError:
                raise
            except TunnelError as error:
                if attempt == REGISTER_TRIES - 1:
                    raise
                logger.warning("no tunnel yet, trying again: %s", error)
            await asyncio.sleep(self.policy.restart_backoff * 2**attempt)
        raise AssertionError("unreachable")

    async def _register(self, port: int) -> "_Client":
        # The label finds registrations whose answer was lost: the SDK repeats a create on a dropped connection.
        label = f"interception-{secrets.token_hex(8)}"
        sdk = prime_tunnel.Tunnel(
            port,
            local_addr="127.0.0.1",
            name=self.config.name,
            team_id=self.config.team_id,
            labels=[label, *self.config.labels],
            connection_timeout=self.config.connection_timeout,
        )
        client = _Client(sdk, label, self.config.stop_timeout)
        starting = asyncio.ensure_future(sdk.start())
        try:
            await asyncio.wait([starting])
        except asyncio.CancelledError:
            await run_to_end(client.abandon(starting))
            raise
        try:
            starting.result()
        except (prime_tunnel.TunnelAuthError, prime_tunnel.TunnelLimitReachedError) as error:
            raise TunnelLimitError(f"Prime refused the tunnel: {error}") from error
        except Exception as error:
            await run_to_end(client.delete_registrations())
            if "maximum number of" in str(error).lower():
                raise TunnelLimitError(f"Prime refused the tunnel: {error}") from error
            raise TunnelError(f"no Prime tunnel: {error}") from error
        return client

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.stop()

    async def _keep(self, client: TunnelClient, local_url: str) -> None:
        if self.config.keepalive == "ours" or self._client is None:
            return await super()._keep(client, local_url)
        try:
            await self._client.sdk.keep_serving(HEALTH_PATH)
        except prime_tunnel.TunnelGoneError as error:
            raise TunnelGoneError(str(error)) from error
        raise TunnelError("the SDK's keep_serving returned, which it should not")


class _Client:
    """The SDK's tunnel as `keep_serving` drives it, and the way to be rid of it."""

    def __init__(self, sdk: "prime_tunnel.Tunnel", label: str, stop_timeout: float) -> None:
        self.sdk = sdk
        self._label = label
        self._stop_timeout = stop_timeout

    @property
    def url(self) -> str | None:
        url: str | None = self.sdk.url
        return url

    @property
    def is_running(self) -> bool:
        running: bool = self.sdk.is_running
        return running

    async def restart(self) -> str:
        try:
            url: str = await self.sdk.restart()
            return url
        except prime_tunnel.TunnelGoneError as error:
            raise TunnelGoneError(str(error)) from error
        except prime_tunnel.TunnelError as error:
            raise TunnelError(str(error)) from error

    async def stop(self) -> None:
        """End frpc, delete the registration and the config file. The SDK blocks while it does, so in a thread."""
        process = getattr(self.sdk, "_process", None)
        try:
            async with asyncio.timeout(self._stop_timeout):
                await asyncio.to_thread(self.sdk.sync_stop)
        except TimeoutError:
            logger.error("stopping the tunnel %s did not end within %g s", self._label, self._stop_timeout)
            if process is not None:
                process.kill()
        # sync_stop leaves the SDK's HTTP client open, and swallows a delete that failed.
        await self._close_http()
        await self.delete_registrations()

    async def abandon(self, starting: "asyncio.Task[str]") -> None:
        """Be rid of a tunnel whose start is no longer wanted."""
        # A create in flight is never cancelled: the registration could be made without our learning its id.
        while not starting.done() and self.sdk.tunnel_id is None:
            await asyncio.wait([starting], timeout=0.02)
        if not starting.done():
            # The SDK waits for frpc's end on the event loop; a killed one does not keep it waiting.
            if (process := getattr(self.sdk, "_process", None)) is not None:
                process.kill()
            starting.cancel()
            await asyncio.wait([starting])
        if not starting.cancelled() and starting.exception() is None:
            await self.stop()
        else:
            await self.delete_registrations()

    async def delete_registrations(self) -> None:
        """Delete what carries our label and is not deleted yet; what cannot be deleted is named in the log."""
        left: list[str] = []
        reason = ""
        try:
            async with asyncio.timeout(self._stop_timeout), prime_tunnel.TunnelClient() as api:
                for wait in (0.2, 1.0, 3.0, None):
                    try:
                        records = await api.list_tunnels(labels=[self._label], team_id=self.sdk.team_id)
                        left = [
                            record.tunnel_id
                            for record in records
                            # Filtered here as well: a service that ignored the label would have us delete it all.
                            if self._label in record.labels and (record.status or "").lower() not in TERMINAL
                        ]
                        while left:
                            await api.delete_tunnel(left[0])
                            left.pop(0)
                        return
                    except prime_tunnel.TunnelError as error:
                        reason = str(error)
                    if wait is not None:
                        await asyncio.sleep(wait)
        except TimeoutError:
            reason = reason or f"no answer within {self._stop_timeout:g} s"
        except Exception as error:  # noqa: BLE001 - teardown goes on whatever the API answers
            reason = f"{type(error).__name__}: {error}"
        logger.error(
            "the registrations labelled %s may be left behind (%s): %s",
            self._label,
            ", ".join(left) or "unknown",
            reason,
        )

    async def _close_http(self) -> None:
        client = getattr(self.sdk, "_client", None)
        if client is not None:
            with contextlib.suppress(Exception):
                await client.close()
