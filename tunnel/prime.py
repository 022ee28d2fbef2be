"""Prime's tunnels: the prime-tunnel SDK (frpc), set up and torn down without leaving anything behind."""

import asyncio
import atexit
import contextlib
import logging
import os
import secrets
import subprocess
import weakref
from pathlib import Path
from urllib.parse import urlsplit

import prime_tunnel
from prime_tunnel.binary import get_frpc_path
from pydantic import ValidationError

from tunnel.base import Tunnel
from tunnel.config import PrimeTunnelConfig
from tunnel.errors import TunnelError, TunnelGoneError, TunnelLimitError
from tunnel.keepalive import TunnelClient
from tunnel.logs import install_log_handler
from tunnel.probe import answers_http, is_address
from tunnel.teardown import cancel_and_wait, protected, run_to_end

logger = logging.getLogger("tunnel")

REGISTER_TRIES = 3
KILL_TIMEOUT = 2.0
"""Seconds for a killed frpc to end, as the SDK's own."""

TERMINAL = ("expired", "terminated")  # deletion is soft: the record stays, with one of these
PROXY_VARIABLES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


class PrimeTunnel(Tunnel):
    """A tunnel of Prime's service. Missing credentials are a `TunnelLimitError` when it is made.

    With `keepalive="sdk"` the SDK keeps it serving by itself: of that, only its end is seen here (`gone`); `state`
    stays `serving` meanwhile, and `report` and `give_up_after` have nothing to act on.
    """

    def __init__(self, config: PrimeTunnelConfig | None = None) -> None:
        config = config or PrimeTunnelConfig()
        super().__init__(config.policy, config.mark)
        self.config = config
        try:
            api_key = prime_tunnel.Config().api_key
        except ValueError as error:  # PRIME_CONTEXT names a profile that is not there
            raise TunnelError(f"the Prime profile cannot be read: {error}") from error
        if not api_key:
            raise TunnelLimitError("no Prime credentials: set PRIME_API_KEY or run `prime login`")
        if api_key != api_key.strip() or not (api_key.isascii() and api_key.isprintable()):
            # The HTTP library would refuse it, and quote it.
            raise TunnelLimitError(
                "the Prime key (PRIME_API_KEY or `prime login`) has white space around it or characters that no key "
                "has: is there a line break at its end?"
            )
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
        _live.add(client)
        starting = protected(sdk.start())
        try:
            await asyncio.wait([starting])
        except asyncio.CancelledError:
            await run_to_end(client.abandon(starting))
            raise
        try:
            starting.result()
        except prime_tunnel.TunnelAuthError as error:
            raise TunnelLimitError(f"Prime refused the tunnel: {error}") from error
        except Exception as error:
            # Also after a refusal: the create may have been a repeated one, and the first have made a registration.
            await run_to_end(client.delete_registrations())
            _live.discard(client)
            if isinstance(invalid := error.__cause__, ValidationError):
                # Neither quoted nor chained, for it quotes the answer, with the tunnel's token and secret.
                raise TunnelError(f"no Prime tunnel: the answer is not as expected: {_faults(invalid)}") from None
            limit = isinstance(error, prime_tunnel.TunnelLimitReachedError) or "maximum number of" in str(error).lower()
            if limit:
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
            await self._client.sdk.keep_serving(self.health_path or "/")
        except prime_tunnel.TunnelGoneError as error:
            raise TunnelGoneError(str(error)) from error
        raise TunnelError("the SDK's keep_serving returned, which it should not")


class _Client:
    """The SDK's tunnel as `keep_serving` drives it, and the way to be rid of it."""

    program = "frpc"

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
        old = self._process
        restarting = asyncio.ensure_future(self.sdk.restart())
        try:
            await asyncio.wait([restarting])
        except asyncio.CancelledError:
            await run_to_end(_break_off(restarting, old))
            raise
        try:
            url: str = restarting.result()
            return url
        except prime_tunnel.TunnelGoneError as error:
            raise TunnelGoneError(str(error)) from error
        except prime_tunnel.TunnelError as error:
            raise TunnelError(str(error)) from error

    async def log_lines(self) -> list[str]:
        # Of an frpc that has just exited the SDK waits for the last lines, and blocks.
        return await asyncio.to_thread(lambda: list(self.sdk.recent_output))

    async def record_status(self) -> str | None:
        """The service's word on the registration; None: it has no record."""
        status: str | None = (await self.sdk.status()).registration
        if status is None and await self.sdk.check_registered():
            return ""  # there is a record, and it gives no status
        return status

    async def reference_ok(self, timeout: float) -> bool | None:
        """Whether the gateway is well for a name that cannot exist, beside ours; for a bare address nothing tells."""
        parts = urlsplit(self.url or "")
        _, _, domain = (parts.hostname or "").partition(".")
        if not domain or is_address(parts.hostname or ""):
            return None
        port = f":{parts.port}" if parts.port else ""
        return await answers_http(f"{parts.scheme}://{secrets.token_hex(8)}.{domain}{port}/", timeout=timeout)

    async def stop(self) -> None:
        """End frpc, delete the registration and the config file, all within the stop timeout."""
        deadline = self._deadline()
        known = self.sdk.tunnel_id
        # Over TCP frpc does nothing at SIGTERM that it would not at SIGKILL, and the SDK waits 5 s for one that hangs.
        if self._process is not None:
            await _end(self._process)
        with contextlib.suppress(TimeoutError):  # what is left then is named below
            async with asyncio.timeout_at(deadline):
                await asyncio.to_thread(self.sdk.sync_stop)  # blocks
        self._remove_config_file()
        # sync_stop swallows a delete that failed.
        await self.delete_registrations(deadline, known)
        _live.discard(self)

    def stop_at_exit(self) -> None:
        """What can still be done when the interpreter ends and nobody stopped it."""
        if self._process is not None:
            self._process.kill()
        with contextlib.suppress(Exception):
            self.sdk.sync_stop()
        self._remove_config_file()

    async def abandon(self, starting: "asyncio.Task[str]") -> None:
        """Be rid of a tunnel whose start is no longer wanted."""
        # A create in flight is never cancelled: the registration could be made without our learning its id.
        while not starting.done() and self.sdk.tunnel_id is None:
            await asyncio.wait([starting], timeout=0.02)
        known = self.sdk.tunnel_id
        if self._process is not None:
            self._process.kill()  # the SDK waits for its end on the event loop
            starting.cancel()
        # Else the SDK cleans up after a failure of its own, and cancelled it would leave the config file.
        await asyncio.wait([starting], timeout=self._stop_timeout)
        if not starting.done():
            await cancel_and_wait(starting)
        if not starting.cancelled() and starting.exception() is None:
            await self.stop()
        else:
            self._remove_config_file()
            await self.delete_registrations(known=known)
            _live.discard(self)

    async def delete_registrations(self, deadline: float | None = None, known: str | None = None) -> None:
        """Delete what carries our label and is not deleted yet; what cannot be deleted is named in the log.

        `known` is the id of one of them, for the log alone.
        """
        left = [known] if known else []
        reason = f"no answer within {self._stop_timeout:g} s"
        try:
            async with asyncio.timeout_at(deadline or self._deadline()), self._api as api:
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
                    except prime_tunnel.TunnelAuthError:
                        raise
                    except prime_tunnel.TunnelError as error:
                        reason = str(error)
                    if wait is not None:
                        await asyncio.sleep(wait)
        except TimeoutError:
            pass
        except Exception as error:  # noqa: BLE001 - teardown goes on whatever the API answers
            reason = f"{type(error).__name__}: {error}"
        logger.error(
            "the registrations labelled %s may be left behind (%s): %s",
            self._label,
            ", ".join(left) or "unknown",
            reason,
        )

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._stop_timeout

    # -- the SDK's private parts; one that lacks them is stopped all the same, only later ----------

    @property
    def _process(self) -> "subprocess.Popen[str] | None":
        return getattr(self.sdk, "_process", None)

    @property
    def _api(self) -> "prime_tunnel.TunnelClient":
        # sync_stop leaves the SDK's own client open, and another one costs a TLS set-up on the event loop.
        return getattr(self.sdk, "_client", None) or prime_tunnel.TunnelClient()

    def _remove_config_file(self) -> None:
        """It holds the tunnel's token. The SDK removes it last, and so not at all if it was stopped before that."""
        config_file: Path | None = getattr(self.sdk, "_config_file", None)
        if config_file is not None:
            with contextlib.suppress(OSError):
                config_file.unlink()


_live: "weakref.WeakSet[_Client]" = weakref.WeakSet()


@atexit.register
def _stop_what_is_left() -> None:
    """A program that ends without leaving its `expose` would leave frpc running and the token on disk."""
    for client in list(_live):
        client.stop_at_exit()


async def _break_off(restarting: "asyncio.Task[str]", old: "subprocess.Popen[str] | None") -> None:
    await cancel_and_wait(restarting)
    if old is not None:
        await _end(old)  # the SDK lets go of it before it has ended it


async def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(KILL_TIMEOUT):
            # Waited for, or it would stay as a zombie; by looking, for a thread to wait in may not be free.
            while process.poll() is None:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


def _faults(invalid: ValidationError) -> str:
    return ", ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in invalid.errors())
