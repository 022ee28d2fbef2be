"""Prime's tunnels: the prime-tunnel SDK (frpc), set up and torn down without leaving anything behind."""

import asyncio
import atexit
import contextlib
import logging
import os
import random
import secrets
import subprocess
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import prime_tunnel
from prime_tunnel.binary import get_frpc_path
from pydantic import ValidationError

from tunnel import pace, reaper
from tunnel.account import Account
from tunnel.base import Tunnel
from tunnel.config import PrimeTunnelConfig
from tunnel.errors import TunnelError, TunnelGoneError, TunnelLimitError
from tunnel.keepalive import TunnelClient
from tunnel.logs import install_log_handler
from tunnel.probe import answers_http, is_address
from tunnel.reaper import Reaper
from tunnel.record import Entry, Place, Record, Running
from tunnel.registrations import Deletion, PacedApi
from tunnel.sidecar import sidecar
from tunnel.teardown import cancel_and_wait, protected, run_to_end

logger = logging.getLogger("tunnel")

REGISTER_TRIES = 3
KILL_TIMEOUT = 2.0
"""Seconds for a killed frpc to end, as the SDK's own."""

OUTAGE = 60.0
"""Seconds for which no other failed create says that it may have left something."""

REAPING_TIMEOUT = 10.0
"""Seconds for which a create that met the quota waits for what dead runs left behind to be deleted."""

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
        api_key = Account.current().api_key
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
        self._starting: _Client | None = None
        self._reaping: Reaper | None = None

    @property
    def queued(self) -> bool:
        """See `Tunnel.queued`."""
        return self._starting is not None and self._starting.waits_to_create

    async def _connect(self, port: int) -> TunnelClient:
        if found := [name for name in PROXY_VARIABLES if os.environ.get(name)]:
            logger.warning("frpc inherits %s: if it cannot connect, unset them", ", ".join(found))
        try:
            # Apart from start(), which may then be waited for: this can be a download, and may be cancelled.
            await asyncio.to_thread(get_frpc_path)
        except (prime_tunnel.TunnelError, OSError) as error:
            raise TunnelError(f"frpc cannot be installed: {error}") from error
        account = Account.current()
        self._reaping = reaper.begin(account, self.config.deletes_per_minute)
        try:
            try:
                self._client = await self._register_persistently(port, account)
            except TunnelLimitError:
                if not await self._quota_was_freed():
                    raise
                self._client = await self._register_persistently(port, account)
        except BaseException:
            self._starting = None  # with it go the pipes of an frpc that did not connect
            await run_to_end(self._leave_reaping())
            raise
        return self._client

    async def _register_persistently(self, port: int, account: Account) -> "_Client":
        # The label finds registrations whose answer was lost: the SDK repeats a create on a dropped connection. One for
        # all tries: what any of them left is on one record, and deleted with what the last one makes.
        label = f"interception-{secrets.token_hex(8)}"
        client, unsure = None, 0
        try:
            for attempt in range(1, REGISTER_TRIES + 1):
                client = self._starting = self._new_client(port, account, label, unsure)
                try:
                    await self._register(client)
                    return client
                except TunnelLimitError:
                    raise
                except TunnelError as error:
                    if attempt == REGISTER_TRIES:
                        error.tries = REGISTER_TRIES
                        raise
                    logger.warning("no tunnel yet, trying again: %s", error)
                unsure = client.may_have_left
                # Jittered, for many start at once and are refused at once.
                await asyncio.sleep(self.policy.restart_backoff * 4 ** (attempt - 1) * random.uniform(0.5, 1.5))
        except BaseException:
            if client is not None:
                client.let_go()
            raise
        raise AssertionError("unreachable")

    async def _quota_was_freed(self) -> bool:
        """Whether there were registrations of dead runs, which may have filled the quota and are deleted by now."""
        if self._reaping is None:
            return False
        await self._reaping.wait(REAPING_TIMEOUT)
        return self._reaping.found > 0

    async def _leave_reaping(self) -> None:
        reaping, self._reaping = self._reaping, None
        if reaping is not None:
            await reaping.leave()

    def _new_client(self, port: int, account: Account, label: str, unsure: int) -> "_Client":
        sdk = prime_tunnel.Tunnel(
            port,
            local_addr="127.0.0.1",
            name=self.config.name,
            team_id=self.config.team_id,
            labels=[label, *self.config.labels],
            connection_timeout=self.config.connection_timeout,
        )
        client = _Client(sdk, label, self.config, account, unsure)
        _live.add(client)
        return client

    async def _register(self, client: "_Client") -> None:
        """Start it; if that fails, nothing is left of it but, unless that is certain, its record, still ours."""
        starting = protected(client.start())
        try:
            await asyncio.wait([starting])
        except asyncio.CancelledError:
            await run_to_end(client.abandon(starting))
            raise
        try:
            starting.result()
        except Exception as error:
            # Also after a refusal: the create may have been a repeated one, and the first have made a registration.
            await run_to_end(client.discard(again=True))
            if isinstance(invalid := error.__cause__, ValidationError):
                # Neither quoted nor chained, for it quotes the answer, with the tunnel's token and secret.
                raise TunnelError(f"no Prime tunnel: the answer is not as expected: {_faults(invalid)}") from None
            limits = (prime_tunnel.TunnelAuthError, prime_tunnel.TunnelLimitReachedError)
            if isinstance(error, limits) or "maximum number of" in str(error).lower():
                raise TunnelLimitError(f"Prime refused the tunnel: {error}") from error
            raise TunnelError(f"no Prime tunnel: {error}") from error

    async def _disconnect(self) -> None:
        client, self._client, self._starting = self._client, None, None
        await self._leave_reaping()
        if client is not None:
            await client.stop()

    async def _keep(self, client: TunnelClient, local_url: str) -> None:
        if self.config.keepalive == "ours" or self._client is None:
            return await super()._keep(client, local_url)
        try:
            await self._client.sdk.keep_serving(self.health_path or self.any_path)
        except prime_tunnel.TunnelGoneError as error:
            raise TunnelGoneError(str(error)) from error
        raise TunnelError("the SDK's keep_serving returned, which it should not")


class _Closing:
    """A pipe that is closed once it was read to its end: the SDK leaves that to the garbage collector."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def __iter__(self) -> Iterator[str]:
        with self._pipe:
            yield from self._pipe

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)


class _Client:
    """The SDK's tunnel as `keep_serving` drives it, and the way to be rid of it."""

    program = "frpc"

    def __init__(
        self, sdk: "prime_tunnel.Tunnel", label: str, config: PrimeTunnelConfig, account: Account, unsure: int
    ) -> None:
        """`unsure`: registrations that an earlier try may have left under the same label."""
        directory = account.directory
        self.sdk = sdk
        self._label = label
        self._stop_timeout = config.stop_timeout
        self.may_have_left = 0
        """Registrations that could not be looked for, or not be deleted."""
        self._record = record = Record(
            directory,
            Entry(
                label=label,
                config_dir=str(Path.home() / ".prime" / "tunnels"),
                place=Place.here(),
                owner=Running.of(os.getpid()),
            ),
        )
        self._api = PacedApi(
            account,
            pace.creates(directory, config.creates_per_minute),
            pace.deletes(directory, config.deletes_per_minute),
            # On record first: a create that its owner did not live to see answered is found by the label.
            before_create=lambda: record.write(asked_at=time.time()),
        )
        self._api.may_have_made = unsure
        self._team_id = config.team_id if config.team_id is not None else self._api.config.team_id
        record.entry.team_id = self._team_id
        sidecar.hold(account, directory, config.deletes_per_minute)
        self._put_on_record()

    async def start(self) -> None:
        if hasattr(self.sdk, "_client"):
            self.sdk._client = self._api
        else:
            await self._api.may_create()
            self._api.may_have_made += 1
        await self.sdk.start()

    @property
    def url(self) -> str | None:
        url: str | None = self.sdk.url
        return url

    @property
    def is_running(self) -> bool:
        running: bool = self.sdk.is_running
        return running

    @property
    def waits_to_create(self) -> bool:
        return self._api.waits_to_create

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
        if hasattr(self.sdk, "_tunnel_info"):
            self.sdk._tunnel_info = None  # sync_stop would delete it unpaced, and swallow a delete that failed
        with contextlib.suppress(TimeoutError):  # what is left then is named below
            async with asyncio.timeout_at(deadline):
                await asyncio.to_thread(self.sdk.sync_stop)  # blocks
        self._remove_config_file()
        await self.discard(deadline, known)

    def stop_at_exit(self) -> None:
        """What can still be done when the interpreter ends and nobody stopped it."""
        if self._process is not None:
            self._process.kill()
        with contextlib.suppress(Exception):
            self.sdk.sync_stop()
        self._remove_config_file()

    async def abandon(self, starting: "asyncio.Task[None]") -> None:
        """Be rid of a tunnel whose start is no longer wanted."""
        # A create in flight is never cancelled: the registration could be made without our learning its id.
        while not starting.done() and self.sdk.tunnel_id is None:
            if self._api.waits_to_create:
                starting.cancel()
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
            await self.discard(known=known)

    async def discard(self, deadline: float | None = None, known: str | None = None, *, again: bool = False) -> None:
        """Delete what carries our label and is not deleted yet; what cannot be deleted is named in the log, and left
        on record. `known` is the id of one of them; `again`: the label is used again, and the record stays ours.
        """
        deletion = Deletion(self._api, self._label, self._team_id, known)
        deletion.reason = f"no answer within {self._stop_timeout:g} s"
        clean = not self._api.may_have_made
        try:
            async with asyncio.timeout_at(deadline or self._deadline()), self._api:
                clean = clean or await deletion.run()
        except TimeoutError:
            pass
        except Exception as error:  # noqa: BLE001 - teardown goes on whatever happens
            deletion.reason = f"{type(error).__name__}: {error}"
        self.may_have_left = 0 if clean else self._api.may_have_made
        if clean:
            self._record.remove()
        else:
            self._say_what_is_left(deletion)
            if not again:
                self.let_go()
        vars(self.sdk).pop("_start_output_reader", None)
        _live.discard(self)
        await sidecar.release()

    def let_go(self) -> None:
        """What it may have left is for the next tunnel that starts to see to."""
        self._record.let_go()

    def _say_what_is_left(self, deletion: Deletion) -> None:
        now = time.monotonic()
        if not deletion.left:
            # Most likely nothing is: once for all the creates that fail while the API is away.
            if now < _unsure_until.get(self._api.base_url, 0.0):
                return
            _unsure_until[self._api.base_url] = now + OUTAGE
        logger.error(
            "the registrations labelled %s may be left behind (%s), for the next tunnel that starts to delete: %s",
            self._label,
            ", ".join(deletion.left) or "unknown",
            deletion.reason,
        )

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._stop_timeout

    # -- the SDK's private parts; one that lacks them is stopped all the same, only later ----------

    @property
    def _process(self) -> "subprocess.Popen[str] | None":
        return getattr(self.sdk, "_process", None)

    def _put_on_record(self) -> None:
        """Have each frpc recorded as soon as it runs, also those that the SDK restarts of its own accord."""
        sdk, record, read_output = self.sdk, self._record, getattr(self.sdk, "_start_output_reader", None)
        if read_output is None:
            return  # a reaper finds it by its command line

        def started(process: Any) -> None:
            file: Path | None = getattr(sdk, "_config_file", None)
            record.write(
                tunnel_id=sdk.tunnel_id, client=Running.of(process.pid), config_file=None if file is None else str(file)
            )
            process.stdout, process.stderr = _Closing(process.stdout), _Closing(process.stderr)
            read_output(process)

        sdk._start_output_reader = started

    def _remove_config_file(self) -> None:
        """It holds the tunnel's token. The SDK removes it last, and so not at all if it was stopped before that."""
        config_file: Path | None = getattr(self.sdk, "_config_file", None)
        if config_file is not None:
            with contextlib.suppress(OSError):
                config_file.unlink()


_unsure_until: dict[str, float] = {}
"""When it is said again, by the API, that something may have been left there."""

_live: "weakref.WeakSet[_Client]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_live.clear)  # they are the parent's


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
