"""Keeping a tunnel serving: carries out what the detector decides."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, NoReturn, Protocol, Self

from tunnel.clientlog import ClientLog
from tunnel.detector import make_rule
from tunnel.errors import TunnelError, TunnelGoneError, UrlChangedError
from tunnel.evidence import GOOD, NEED_REFERENCE, GiveUp, Outcome, Probe, Restart, Seen, Wait
from tunnel.health import HEALTH_PATH
from tunnel.policy import KeepAlivePolicy
from tunnel.probe import Answer, classify, describe, new_nonce, probe
from tunnel.siblings import Siblings
from tunnel.state import Counters, Gone, Restarted, RestartFailed, StateChanged, TunnelEvent, TunnelState
from tunnel.teardown import cancel_and_wait, run_to_end

logger = logging.getLogger("tunnel")

SIBLINGS = Siblings()
"""The tunnels of this process, which see together what none of them sees alone."""

ASIDE_TIMEOUT = 5.0
"""Seconds for evidence that is fetched beside the probes: the client's log, the control API."""

DRAIN_POLL = 0.05
"""Seconds between two looks at the requests in flight."""


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
    path: str | None = HEALTH_PATH,
    *,
    local_url: str,
    policy: KeepAlivePolicy = KeepAlivePolicy(),  # noqa: B008 - frozen
    on_event: Callable[[TunnelEvent], None] | None = None,
) -> NoReturn:
    """Keep the URL of a started `client` serving until cancelled.

    Probes `path` through the URL and at `local_url`, and restarts the client when, and only when, that helps. A `path`
    of None is for a service without a health route: any HTTP answer of its `/` will do. Raises `TunnelGoneError` once,
    when the URL does not serve and a restart was refused as gone, or when it is given up
    (`KeepAlivePolicy.give_up_after`). `on_event` is called on the event loop.

    A cancelled restart leaves no client, so one that is under way when this is cancelled ends first, within
    `KeepAlivePolicy.restart_timeout`. Several of these over one client restart it once.
    """
    keepalive = KeepAlive(
        client, path, local_url=local_url, policy=policy, on_event=on_event, breaks_off_restarts=False
    )
    await keepalive.run()


class _Restarts:
    """The restarts of one client: one at a time, shared by all that keep it serving."""

    _all: ClassVar[dict[int, Self]] = {}  # by the id of the client, which need not be hashable

    def __init__(self, client: TunnelClient) -> None:
        self._client = client
        self._users = 0
        self._task: asyncio.Task[str] | None = None
        self.count = 0
        """Those that succeeded so far."""

    @classmethod
    def join(cls, client: TunnelClient) -> Self:
        restarts = cls._all.setdefault(id(client), cls(client))
        restarts._users += 1
        return restarts

    def leave(self) -> None:
        self._users -= 1
        if not self._users:
            del self._all[id(self._client)]

    @property
    def under_way(self) -> bool:
        return self._task is not None

    def begin(self, timeout: float) -> asyncio.Task[str]:
        """The restart under way, or else a new one; its result is the URL."""
        if self._task is None:
            self._task = asyncio.create_task(self._restart(timeout), name="restart a tunnel client")
            self._task.add_done_callback(self._ended)
        return self._task

    async def _restart(self, timeout: float) -> str:
        async with asyncio.timeout(timeout):
            return (await self._client.restart()).rstrip("/")

    def _ended(self, task: asyncio.Task[str]) -> None:
        self._task = None
        if not task.cancelled() and task.exception() is None:
            self.count += 1


class KeepAlive:
    """`keep_serving` with handles: its state, and evidence that comes from outside.

    `any_path` is asked for where there is no health route: best one whose answer is no gateway's own 404.
    `can_restart=False` only watches: the state is kept, nothing is restarted and nothing is gone.
    `breaks_off_restarts`: the client ends together with its keepalive, so that a restart need not be awaited when that
    is cancelled. `in_use` says whether anybody waits behind the URL, `in_flight` how many requests are being answered.

    A client may offer more evidence than `TunnelClient` asks for, each as an async method: `log_lines()` (its last
    lines of output), `record_status()` (the control API's word, None for no record) and `reference_ok(timeout)`
    (whether the gateway answers for other names; None: not known). `program` is what log lines call it.
    """

    def __init__(
        self,
        client: TunnelClient,
        path: str | None = HEALTH_PATH,
        *,
        local_url: str,
        policy: KeepAlivePolicy,
        any_path: str = "/",
        on_event: Callable[[TunnelEvent], None] | None = None,
        can_restart: bool = True,
        breaks_off_restarts: bool = True,
        in_use: Callable[[], bool] = lambda: True,
        in_flight: Callable[[], int] = lambda: 0,
        counters: Counters | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        siblings: Siblings = SIBLINGS,
    ) -> None:
        if client.url is None:
            raise TunnelError("the tunnel client has no URL yet: start it before keep_serving")
        self._client = client
        self._url = client.url.rstrip("/")
        self._probe_urls = self._url + (path or any_path), local_url.rstrip("/") + (path or any_path)
        self._has_health = path is not None
        self._policy = policy
        self._on_event = on_event
        self._can_restart = can_restart
        self._breaks_off_restarts = breaks_off_restarts
        self._in_use = in_use
        self._in_flight = in_flight
        self._counters = counters or Counters()
        self._clock = clock
        self._wall_clock = wall_clock
        self._ahead = wall_clock() - clock()
        self._rule = make_rule(policy, clock(), can_restart=can_restart, siblings=siblings, name=self)
        self._restarts = _Restarts(client)  # nobody else's until `run`
        self._restarts_seen = 0
        self._refusal: TunnelGoneError | None = None  # of the last restart
        self._shown = self._rule.state
        self._logged: set[str] = set()  # since the state's name changed
        self._wake = asyncio.Event()
        self._nonce: str | None = None  # of the probe under way
        self._log = ClientLog()
        self._aside: set[asyncio.Task[None]] = set()

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

    def arrived(self, nonce: str | None = None) -> None:
        """A request came in through the URL; `nonce`: it is a probe."""
        if self._restarts.under_way:
            return  # of which client, nobody knows; the new one is verified next
        if nonce is None:
            self._rule.arrived(self._clock())
        elif nonce == self._nonce:
            self._rule.probe_arrived(self._clock())
        if self._rule.state != self._shown:
            self._show()

    async def run(self) -> NoReturn:
        self._restarts = _Restarts.join(self._client)
        self._restarts_seen = self._restarts.count
        try:
            while True:
                await self._step()
        finally:
            self._rule.left()
            self._restarts.leave()
            await run_to_end(self._end_aside())

    async def _step(self) -> None:
        now = self._clock()
        self._watch_clocks()
        if self._restarts.count != self._restarts_seen:
            await self._forget_old_client()
        elif not self._client.is_running:
            self._rule.exited(now)
        self._look_aside(now)
        action = self._rule.decide(now, in_use=self._in_use())
        for note in self._rule.notes():
            logger.warning("%s: %s", self._url, note)
        match action:
            case Wait(until):
                self._show()
                await self._sleep(until - now)
            case Probe():
                self._show()
                await self._probe()
            case Restart(reason, drain):
                program = getattr(self._client, "program", "its client")
                self._show(f"{reason}; restarting {program} under {self._url}")
                await self._restart(reason, drain)
            case GiveUp(reason):
                self._show()
                error = TunnelGoneError(f"{self._url} is gone: {reason}")
                if isinstance(self._refusal, UrlChangedError):
                    error = self._refusal
                self._tell(Gone(url=self._url, at=time.time(), error=error))
                raise error

    async def _sleep(self, seconds: float) -> None:
        """Until `seconds` are over, something woke us, or it is time to look at the process again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, self._policy.exit_poll)):
                await self._wake.wait()
        self._wake.clear()

    # -- evidence ------------------------------------------------------------------------------

    def _watch_clocks(self) -> None:
        before = self._clock()
        wall = self._wall_clock()
        after = self._clock()
        # However long this thread was kept from running in between, it is not taken for a jump.
        jump = wall - after - self._ahead
        if jump > self._policy.clock_jump:
            logger.warning("%s: the clock jumped by %.0f s: was this host suspended?", self._url, jump)
            self._rule.clock_jumped(after)
        self._ahead = wall - before

    def _look_aside(self, now: float) -> None:
        """The client's log and the control API, beside the probes; whichever does not answer in time says nothing."""
        if self._policy.rule == "plain":
            return
        self._aside = {task for task in self._aside if not task.done()}
        if self._aside:
            return
        client: Any = self._client
        if hasattr(client, "log_lines") and client.is_running:
            self._aside.add(asyncio.create_task(self._aside_of(self._read_log(client.log_lines))))
        if hasattr(client, "record_status") and self._rule.wants_record(now):
            self._aside.add(asyncio.create_task(self._aside_of(self._read_record(client.record_status))))

    async def _aside_of(self, reading: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(ASIDE_TIMEOUT):
                await reading
        except Exception as error:  # noqa: BLE001 - an API or a log that cannot be read is no verdict
            logger.debug("%s: no evidence from aside: %s", self._url, str(error) or type(error).__name__)

    async def _read_log(self, log_lines: Callable[[], Awaitable[list[str]]]) -> None:
        lines = await log_lines()
        self._log.read(lines, self._rule, self._clock())

    async def _read_record(self, record_status: Callable[[], Awaitable[str | None]]) -> None:
        status = await record_status()
        self._rule.record(self._clock(), status)

    async def _end_aside(self) -> None:
        for task in self._aside:
            await cancel_and_wait(task)
        self._aside.clear()

    async def _probe(self) -> None:
        ran = self._client.is_running
        looking = asyncio.create_task(self._look(ran=ran or not self._can_restart))
        try:
            while not looking.done():
                await asyncio.wait([looking], timeout=self._policy.exit_poll)
                if self._restarts.count != self._restarts_seen:
                    return  # what was seen is of the old client
                if ran and self._can_restart and not self._client.is_running:
                    return  # its restart comes first
        finally:
            self._nonce = None
            if not looking.done():
                await run_to_end(cancel_and_wait(looking))
        self._rule.looked(self._clock(), looking.result())

    async def _look(self, *, ran: bool) -> Seen:
        through_url, local = self._probe_urls
        timeout = self._policy.probe_timeout
        if ran:
            self._nonce = new_nonce()
            outside, inside = await asyncio.gather(
                probe(through_url, timeout=timeout, through_proxy=True, nonce=self._nonce),
                probe(local, timeout=timeout, through_proxy=False),
            )
        else:
            # Without a client there is nothing to ask, and a relay that still holds its port would keep us waiting.
            outside = Answer(None, None, Outcome.REFUSED, "its client is not running")
            inside = await probe(local, timeout=timeout, through_proxy=False)
        outcome = classify(outside, inside, self._policy.slow_404)
        local_ok = inside.ok if self._has_health else inside.status is not None
        if ran:
            self._counters.probes += 1
            self._counters.failed_probes += outcome not in GOOD
            self._counters.outcomes[outcome.value] += 1
        return Seen(
            outcome=outcome,
            local_ok=local_ok,
            detail=describe(outcome, outside) if local_ok else f"the local service: {inside.detail}",
            reference=await self._reference(outcome),
            is_200=outside.ok if self._has_health else outcome in GOOD,
        )

    async def _reference(self, outcome: Outcome) -> bool | None:
        client: Any = self._client
        if self._policy.rule == "plain" or not hasattr(client, "reference_ok"):
            return None
        if outcome not in NEED_REFERENCE and not self._log.troubled:
            return None
        try:
            known: bool | None = await client.reference_ok(self._policy.probe_timeout)
        except Exception:
            logger.exception("%s: the reference could not be asked", self._url)
            return None
        return known

    # -- restarts ------------------------------------------------------------------------------

    async def _restart(self, reason: str, drain: bool) -> None:
        if drain and not await self._drained():
            return  # it serves again, or another has restarted it
        began = self._clock()
        restart = self._restarts.begin(self._policy.restart_timeout)
        await self._end_of(restart)
        try:
            url = restart.result()
            if url != self._url:
                raise UrlChangedError(self._url, url)
        except (Exception, asyncio.CancelledError) as error:  # the latter is of something inside the client
            gone = isinstance(error, TunnelGoneError)
            self._refusal = error if isinstance(error, TunnelGoneError) else None
            if not isinstance(error, TunnelError | TimeoutError):
                logger.exception("%s: restarting the client failed in an unforeseen way", self._url)
            text = str(error) or type(error).__name__
            if isinstance(error, TimeoutError):
                text = f"no end within {self._policy.restart_timeout:g} s"
            # Another URL is final though a client runs: nobody was told of it.
            running = self._client.is_running and (self._client.url or "").rstrip("/") == self._url
            self._restarts_seen = self._restarts.count
            self._counters.refused_restarts += 1
            self._rule.restart_failed(self._clock(), text, gone=gone, running=running)
            self._tell(RestartFailed(url=self._url, at=time.time(), reason=reason, error=text))
        else:
            await self._forget_old_client()
            self._tell(Restarted(url=self._url, at=time.time(), reason=reason, took=self._clock() - began))
        self._show()

    async def _end_of(self, restart: asyncio.Task[str]) -> None:
        """Wait for the end of a restart. When we are cancelled it is broken off, or else awaited first."""
        try:
            await asyncio.wait([restart])
        except asyncio.CancelledError:
            if self._breaks_off_restarts:
                await run_to_end(cancel_and_wait(restart))
            else:
                with contextlib.suppress(asyncio.CancelledError):  # once more; the first one is raised
                    await run_to_end(_wait(restart))
                if not restart.cancelled() and (failure := restart.exception()) is not None:
                    logger.warning("%s: its last restart failed: %s", self._url, str(failure) or type(failure).__name__)
            raise

    async def _forget_old_client(self) -> None:
        """The client was restarted, by us or by another that keeps it serving."""
        await self._end_aside()  # what it reads is of the old client
        self._log = ClientLog()
        self._restarts_seen = self._restarts.count
        self._counters.restarts += 1
        self._rule.restarted(self._clock())

    async def _drained(self) -> bool:
        """Wait for the requests in flight, which a restart would fail. False: it is not needed any more."""
        deadline = self._clock() + self._policy.drain
        while self._in_flight() and self._client.is_running and self._clock() < deadline:
            await asyncio.sleep(min(DRAIN_POLL, self._policy.drain))
            if self._rule.state.name == "serving" or self._restarts.count != self._restarts_seen:
                return False
        return True

    # -- what is shown -------------------------------------------------------------------------

    def _show(self, line: str | None = None) -> None:
        """Tell of a change of state; `line` is what is logged of it, instead of its own words."""
        before, after = self._shown, self._rule.state
        if before == after:
            return
        self._shown = after
        changed = before.name != after.name
        if changed:
            self._logged.clear()
        if after.name == "serving":
            line = f"{self._url}: serving{f', {after.reason}' if after.reason else ' again'}"
        line = line or f"{self._url}: {after}"
        # A restart goes through several reasons, some of them again and again.
        if changed or (after.name == "restarting" and line not in self._logged):
            self._logged.add(line)
            logger.log(logging.INFO if after.name == "serving" else logging.WARNING, "%s", line)
        self._tell(StateChanged(url=self._url, at=time.time(), before=before, after=after))

    def _tell(self, event: TunnelEvent) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception:
            logger.exception("on_event failed for %s", event)


async def _wait(task: asyncio.Task[Any]) -> None:
    await asyncio.wait([task])
