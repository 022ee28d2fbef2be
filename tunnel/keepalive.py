"""Keeping a tunnel serving: carries out what the detector decides."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import NoReturn, Protocol

from tunnel.detector import GiveUp, PlainRule, Probe, Restart, Wait
from tunnel.errors import TunnelError, TunnelGoneError
from tunnel.health import HEALTH_PATH
from tunnel.policy import KeepAlivePolicy
from tunnel.probe import Answer, probe
from tunnel.state import Gone, Restarted, RestartFailed, StateChanged, TunnelEvent, TunnelState

logger = logging.getLogger("tunnel")


class TunnelClient(Protocol):
    """The process or connection that carries a tunnel, as `keep_serving` drives it."""

    @property
    def url(self) -> str | None: ...

    @property
    def is_running(self) -> bool: ...

    async def restart(self) -> str:
        """Run again under the same URL, and return it.

        Raises `TunnelGoneError` if that is refused for good, else `TunnelError`.
        """
        ...


async def keep_serving(
    client: TunnelClient,
    path: str = HEALTH_PATH,
    *,
    local_url: str,
    policy: KeepAlivePolicy = KeepAlivePolicy(),  # noqa: B008 - frozen
    on_event: Callable[[TunnelEvent], None] | None = None,
) -> NoReturn:
    """Keep the URL of a started `client` serving until cancelled.

    Probes `path` through the URL and at `local_url`, and restarts the client when, and only when, that helps. Raises
    `TunnelGoneError` once, when the URL does not serve and a restart was refused as gone, or when it is given up
    (`KeepAlivePolicy.give_up_after`). `on_event` is called on the event loop.
    """
    await KeepAlive(client, path, local_url=local_url, policy=policy, on_event=on_event).run()


class KeepAlive:
    """`keep_serving` with handles: its state, and evidence that comes from outside.

    `can_restart=False` only watches: the state is kept, nothing is restarted and nothing is gone. `in_use` says
    whether anybody waits behind the URL.
    """

    def __init__(
        self,
        client: TunnelClient,
        path: str = HEALTH_PATH,
        *,
        local_url: str,
        policy: KeepAlivePolicy,
        on_event: Callable[[TunnelEvent], None] | None = None,
        can_restart: bool = True,
        in_use: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if client.url is None:
            raise TunnelError("the tunnel client has no URL yet: start it before keep_serving")
        self._client = client
        self._url = client.url.rstrip("/")
        self._probe_urls = self._url + path, local_url.rstrip("/") + path
        self._policy = policy
        self._on_event = on_event
        self._can_restart = can_restart
        self._in_use = in_use
        self._clock = clock
        self._rule = PlainRule(policy, clock(), can_restart=can_restart)
        self._shown = self._rule.state
        self._wake = asyncio.Event()

    @property
    def state(self) -> TunnelState:
        return self._shown

    @property
    def restarts(self) -> int:
        """Restarts of the client that succeeded so far."""
        return self._rule.restarts

    def report(self, reason: str) -> None:
        """A caller saw the URL fail: brings a probe forward."""
        logger.info("%s: a caller reports: %s", self._url, reason)
        self._rule.reported(self._clock())
        self._wake.set()

    def arrived(self) -> None:
        """A request came in through the URL."""
        self._rule.arrived(self._clock())

    async def run(self) -> NoReturn:
        while True:
            if not self._client.is_running:
                self._rule.exited(self._clock())
            action = self._rule.decide(self._clock(), in_use=self._in_use())
            self._show()
            match action:
                case Wait(until):
                    await self._sleep(until - self._clock())
                case Probe():
                    await self._probe()
                case Restart(reason):
                    await self._restart(reason)
                case GiveUp(reason):
                    error = TunnelGoneError(f"{self._url} is gone: {reason}")
                    self._tell(Gone(url=self._url, at=time.time(), error=error))
                    raise error

    async def _sleep(self, seconds: float) -> None:
        """Until `seconds` are over, something woke us, or it is time to look at the process again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, self._policy.exit_poll)):
                await self._wake.wait()
        self._wake.clear()

    async def _probe(self) -> None:
        through_url, local = self._probe_urls
        inside_asked = asyncio.ensure_future(probe(local, timeout=self._policy.probe_timeout, through_proxy=False))
        asked = {inside_asked}
        ran = self._client.is_running or not self._can_restart
        if ran:
            outside_asked = asyncio.ensure_future(
                probe(through_url, timeout=self._policy.probe_timeout, through_proxy=True)
            )
            asked.add(outside_asked)
        try:
            pending = set(asked)
            while pending:
                _, pending = await asyncio.wait(pending, timeout=self._policy.exit_poll)
                if ran and self._can_restart and not self._client.is_running:
                    return  # its restart comes first
        finally:
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)
        inside = inside_asked.result()
        # Without a client there is nothing to ask, and a relay that still holds its port would keep us waiting.
        outside = outside_asked.result() if ran else Answer(False, "its client is not running")
        detail = f"the URL: {outside.detail}" if inside.ok else f"the local service: {inside.detail}"
        self._rule.probed(self._clock(), url_ok=outside.ok, local_ok=inside.ok, detail=detail)

    async def _restart(self, reason: str) -> None:
        began = self._clock()
        try:
            async with asyncio.timeout(self._policy.restart_timeout):
                url = (await self._client.restart()).rstrip("/")
            if url != self._url:
                raise TunnelGoneError(f"the restarted client serves under another URL: {url} instead of {self._url}")
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # it is us who are cancelled, not something inside the client
            gone = isinstance(error, TunnelGoneError)
            if not isinstance(error, TunnelError | TimeoutError):
                logger.exception("%s: restarting the client failed in an unforeseen way", self._url)
            text = str(error) or type(error).__name__
            if isinstance(error, TimeoutError):
                text = f"no end within {self._policy.restart_timeout:g} s"
            # Another URL is final though a client runs: nobody was told of it.
            running = self._client.is_running and (self._client.url or "").rstrip("/") == self._url
            self._rule.restart_failed(self._clock(), text, gone=gone, running=running)
            self._tell(RestartFailed(url=self._url, at=time.time(), reason=reason, error=text))
        else:
            now = self._clock()
            self._rule.restarted(now)
            self._tell(Restarted(url=self._url, at=time.time(), reason=reason, took=now - began))
        self._show()

    def _show(self) -> None:
        before, after = self._shown, self._rule.state
        if before == after:
            return
        self._shown = after
        if before.name != after.name or after.name == "restarting":
            level = logging.INFO if after.name == "serving" else logging.WARNING
            logger.log(level, "%s: %s", self._url, "serving again" if after.name == "serving" else after)
        self._tell(StateChanged(url=self._url, at=time.time(), before=before, after=after))

    def _tell(self, event: TunnelEvent) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception:
            logger.exception("on_event failed for %s", event)
