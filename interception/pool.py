"""What all pools of servers do: a slot on a server that serves for each rollout; and the pool with a fixed set."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from interception.base import Interception, PoolMember, Slot
from interception.config import InterceptionServerConfig, StaticInterceptionPoolConfig
from interception.looplag import LoopWatch
from interception.metrics import (
    AcquireErrors,
    Calls,
    Past,
    numbers_line,
    samples_of_calls,
    samples_of_lag,
    samples_of_pool,
    tunnel_of,
)
from interception.placement import place
from interception.server import InterceptionServer, raise_if_lost
from interception.session import RolloutSession, check_usable
from interception.stats import PoolStats, ServerStats, url_of
from tunnel import TunnelError, TunnelEvent
from tunnel.metrics import Sample
from tunnel.metrics import samples_of as samples_of_tunnels
from tunnel.teardown import cancel_and_wait, run_to_end

logger = logging.getLogger("interception")

ServerFactory = Callable[[InterceptionServerConfig], PoolMember]

STOP_TIMEOUT = 120.0
"""Seconds for a server to stop: ours take 20 at most (of their tunnel), another framework's may hang."""

REASONS_KEPT = 64
"""Why servers were lost, the last ones: a pool may run for weeks."""


class Pool(Interception):
    """What both pools do with their servers: start, watch, retire and stop them."""

    def __init__(self, server_factory: ServerFactory, requires_tunnel: bool, secrets: tuple[str, ...]) -> None:
        self.on_event: Callable[[TunnelEvent], None] | None = None
        """Called with each event of each server's tunnel."""
        # What another framework's server registers is for it to say.
        self._session_type: type = RolloutSession if server_factory is InterceptionServer else object
        if server_factory is InterceptionServer:
            server_factory = partial(InterceptionServer, requires_tunnel=requires_tunnel, state_service_secrets=secrets)
        self._factory = server_factory
        self._servers: list[PoolMember] = []
        self._retired: list[PoolMember] = []
        self._stopping: set[asyncio.Task[None]] = set()
        self._stop_lock = asyncio.Lock()
        self._lost = 0
        self._reasons: deque[str] = deque(maxlen=REASONS_KEPT)  # why servers were lost, in order
        self._acquired = 0
        self._started = False
        self._made = 0
        self._acquire_errors = AcquireErrors()
        # Replaced as one: a scrape in another thread must not find a server in both, or in neither.
        self._counted: tuple[tuple[PoolMember, ...], Past] = (), Past()
        self._watch: LoopWatch | None = None
        self._watching = False
        self._numbers_timer: asyncio.TimerHandle | None = None

    @property
    def servers(self) -> list[PoolMember]:
        """Those that take rollouts, in the order they came."""
        return list(self._servers)

    @property
    def retired(self) -> int:
        """Servers lost so far."""
        return self._lost

    def stats(self) -> PoolStats:
        """Where its rollouts are, and why one waits: `print(pool.stats())`."""
        return PoolStats(
            servers=tuple(ServerStats.of(server) for server in self._servers),
            retired=tuple(ServerStats.of(server) for server in self._retired),
            starting=(),
            capacity=None,
            waiting=0,
            longest_wait=0.0,
            acquired=self._acquired,
            lost=self._lost,
            idled=0,
            failed_starts=0,
            last_error=None,
            lag=None if self._watch is None else self._watch.lag,
        )

    def samples(self) -> list[Sample]:
        """Its numbers, as `interception.prometheus` shows them; also from another thread."""
        stats = self.stats()
        members, past = self._counted
        calls = Calls()
        calls.add(past.calls)
        for member in members:
            if isinstance(theirs := getattr(member, "calls", None), Calls):
                calls.add(theirs)
        in_flight = sum(getattr(member, "in_flight", 0) for member in members)
        lag = [] if stats.lag is None else samples_of_lag(stats.lag)
        return [
            *samples_of_pool(stats, self._made, self._acquire_errors),
            *samples_of_calls(calls, in_flight),
            *lag,
        ]

    def tunnel_samples(self) -> list[Sample]:
        """Those of its servers' tunnels, of servers that are no more too."""
        members, past = self._counted
        tunnels = (tunnel for member in members if (tunnel := tunnel_of(member)) is not None)
        return samples_of_tunnels(tunnels, past.tunnels)

    def _begin_watching(self, numbers_period: float | None) -> None:
        if not self._watching:
            self._watching = True
            self._watch = LoopWatch.join()
            if numbers_period is not None:
                self._set_numbers_timer(numbers_period)

    def _set_numbers_timer(self, period: float) -> None:
        self._numbers_timer = asyncio.get_running_loop().call_later(period, self._tell_numbers, period)

    def _tell_numbers(self, period: float) -> None:
        logger.info("numbers: %s", numbers_line(self.stats(), [*self.samples(), *self.tunnel_samples()]))
        self._set_numbers_timer(period)

    def _end_watching(self) -> None:
        if self._numbers_timer is not None:
            self._numbers_timer.cancel()
            self._numbers_timer = None
        if self._watching and self._watch is not None:
            self._watching = False
            self._watch.leave()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.stats().summary}>"

    def _make(self, config: InterceptionServerConfig) -> PoolMember:
        server = self._factory(config)
        server.on_change = lambda: self._server_changed(server)
        if isinstance(server, InterceptionServer):
            server.on_event = self._tunnel_event
        members, past = self._counted
        self._counted = (*members, server), past
        self._made += 1
        return server

    def _tunnel_event(self, event: TunnelEvent) -> None:
        if self.on_event is not None:
            try:
                self.on_event(event)
            except Exception:
                logger.exception("on_event failed for %s", event)

    def _server_changed(self, server: PoolMember) -> None:
        if not server.healthy and has(self._servers, server):
            self._servers = [other for other in self._servers if other is not server]
            self._retired.append(server)
            self._lost += 1
            why = getattr(server, "lost", None) or "it is not healthy any more"
            self._reasons.append(f"{url_of(server)}: {why}")
            logger.warning("server %s is retired with %d rollouts on it: %s", url_of(server), server.load, why)
            self._stop_if_empty(server)

    def _take(self, server: PoolMember, session: RolloutSession) -> Slot:
        slot = Slot(server.base_url, *server.register(session))
        self._acquired += 1
        return slot

    def _leave(self, server: PoolMember, slot: Slot) -> None:
        try:
            server.unregister(slot.model_secret, slot.state_secret)
        finally:
            self._stop_if_empty(server)

    def _stop_if_empty(self, server: PoolMember) -> None:
        # Its last rollout does not wait for this, and nobody's cancellation reaches it: the task is the pool's own.
        if has(self._retired, server) and server.load == 0:
            self._retired = [other for other in self._retired if other is not server]
            self._stop_apart(server)

    def _stop_apart(self, server: PoolMember) -> None:
        task = asyncio.create_task(self._stop_server(server), name=f"stop {url_of(server)}")
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    async def _stop_server(self, server: PoolMember) -> None:
        try:
            async with asyncio.timeout(STOP_TIMEOUT):
                await server.stop()
        except Exception:
            logger.exception("a server could not be stopped cleanly")
        finally:
            members, past = self._counted
            if has(members, server):
                self._counted = tuple(other for other in members if other is not server), past.and_of(server)

    async def stop(self) -> None:
        await run_to_end(self._stop_once())

    async def _stopped(self) -> None:
        """Returns once no stop is under way."""
        async with self._stop_lock:
            pass

    async def _stop_once(self) -> None:
        async with self._stop_lock:  # a second caller waits for what the first one stops
            await self._stop()

    async def _stop(self) -> None:
        self._started = False
        self._end_watching()
        servers = self._servers + self._retired
        self._servers, self._retired = [], []
        stopping = list(self._stopping)
        await asyncio.gather(*(self._stop_server(server) for server in servers), *stopping)


class StaticInterceptionPool(Pool):
    """A fixed set of servers, all started up front; a rollout goes to the least loaded one that serves."""

    def __init__(
        self,
        config: StaticInterceptionPoolConfig,
        requires_tunnel: bool = False,
        state_service_secrets: tuple[str, ...] = (),
        *,
        server_factory: ServerFactory = InterceptionServer,
    ) -> None:
        super().__init__(server_factory, requires_tunnel, state_service_secrets)
        self.config = config
        self._starting = asyncio.Lock()
        self._launch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts all servers side by side. If one cannot start, all are stopped and its error is raised."""
        async with self._starting:
            if self._started:
                return
            await self._stopped()
            self._begin_watching(self.config.numbers_period)
            lost = self._lost
            try:
                self._servers = [self._make(config) for config in self.config.servers]
                self._launch = asyncio.create_task(_start_all(self._servers), name="start the pool's servers")
                await asyncio.wait([self._launch])
                if self._launch.cancelled():
                    raise TunnelError("the pool was stopped while it started")
                self._launch.result()
                if self._lost > lost:
                    raise TunnelError(f"a server was lost while the pool started: {self._reasons[-1]}")
            except BaseExceptionGroup as errors:
                await self.stop()
                raise _first(errors) from errors
            except BaseException:
                await self.stop()
                raise
            self._started = True

    async def _stop(self) -> None:
        if self._launch is not None:
            await cancel_and_wait(self._launch)
        await super()._stop()

    @asynccontextmanager
    async def acquire(self, session: RolloutSession, *, timeout: float | None = None) -> AsyncIterator[Slot]:
        """See `Interception.acquire`; there is no cap, and so nothing to wait for."""
        with self._acquire_errors.counted():
            server, slot = self._seat(session)
        try:
            yield slot
        finally:
            self._leave(server, slot)
        raise_if_lost(session)

    def _seat(self, session: RolloutSession) -> tuple[PoolMember, Slot]:
        if not self._started:
            raise RuntimeError("the pool is not started")
        check_usable(session, self._session_type)
        plan = place(self._servers, 1, capacity=None)
        if not plan.assign:
            raise TunnelError("no server of the pool is left: " + "; ".join(self._reasons))
        server = self._servers[plan.assign[0]]
        return server, self._take(server, session)


async def _start_all(servers: list[PoolMember]) -> None:
    async with asyncio.TaskGroup() as starting:
        for server in servers:
            starting.create_task(server.start())


def has(servers: Sequence[PoolMember], server: PoolMember) -> bool:
    """By identity: members need neither be hashable nor differ."""
    return any(other is server for other in servers)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that came first, out of nested groups: what a caller can catch by its type."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
