"""Pools of servers: each rollout gets a slot on one that serves, and the lost ones are retired."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from interception.base import Interception, PoolMember, Slot
from interception.config import (
    ElasticInterceptionPoolConfig,
    InterceptionConfig,
    InterceptionServerConfig,
    StaticInterceptionPoolConfig,
)
from interception.placement import ServerView, place
from interception.server import InterceptionServer, raise_if_lost
from interception.session import RolloutSession
from tunnel import TunnelError, TunnelEvent, TunnelLimitError
from tunnel.teardown import cancel_and_wait, run_to_end

logger = logging.getLogger("interception")

ServerFactory = Callable[[InterceptionServerConfig], PoolMember]


class _Pool(Interception):
    """What both pools do with their servers: start, watch, retire and stop them."""

    def __init__(self, server_factory: ServerFactory, requires_tunnel: bool, secrets: tuple[str, ...]) -> None:
        self.on_event: Callable[[TunnelEvent], None] | None = None
        """Called with each event of each server's tunnel."""
        if server_factory is InterceptionServer:
            server_factory = partial(InterceptionServer, requires_tunnel=requires_tunnel, state_service_secrets=secrets)
        self._factory = server_factory
        self._servers: list[PoolMember] = []
        self._retired: list[PoolMember] = []
        self._stopping: set[asyncio.Task[None]] = set()
        self._stop_lock = asyncio.Lock()
        self._reasons: list[str] = []  # why servers were lost, in order
        self._started = False

    @property
    def servers(self) -> list[PoolMember]:
        """Those that take rollouts, in the order they came."""
        return list(self._servers)

    @property
    def retired(self) -> int:
        """Servers lost so far."""
        return len(self._reasons)

    def _make(self, config: InterceptionServerConfig) -> PoolMember:
        server = self._factory(config)
        server.on_change = lambda: self._server_changed(server)
        if isinstance(server, InterceptionServer):
            server.on_event = self._tunnel_event
        return server

    def _tunnel_event(self, event: TunnelEvent) -> None:
        if self.on_event is not None:
            try:
                self.on_event(event)
            except Exception:
                logger.exception("on_event failed for %s", event)

    def _server_changed(self, server: PoolMember) -> None:
        if not server.healthy and _has(self._servers, server):
            self._servers = [other for other in self._servers if other is not server]
            self._retired.append(server)
            why = getattr(server, "lost", None) or "it is not healthy any more"
            self._reasons.append(f"{server.base_url}: {why}")
            logger.warning("server %s is retired with %d rollouts on it: %s", server.base_url, server.load, why)
            self._stop_if_empty(server)

    def _leave(self, server: PoolMember, slot: Slot) -> None:
        server.unregister(slot.model_secret, slot.state_secret)
        self._stop_if_empty(server)

    def _stop_if_empty(self, server: PoolMember) -> None:
        # Its last rollout does not wait for this, and nobody's cancellation reaches it: the task is the pool's own.
        if _has(self._retired, server) and server.load == 0:
            self._retired = [other for other in self._retired if other is not server]
            task = asyncio.create_task(self._stop_server(server), name=f"stop retired {server.base_url}")
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)

    async def _stop_server(self, server: PoolMember) -> None:
        try:
            await server.stop()
        except Exception:
            logger.exception("a server could not be stopped cleanly")

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
        servers = self._servers + self._retired
        self._servers, self._retired = [], []
        stopping = list(self._stopping)
        await asyncio.gather(*(self._stop_server(server) for server in servers), *stopping)


class StaticInterceptionPool(_Pool):
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

    async def start(self) -> None:
        """Starts all servers side by side. If one cannot start, all are stopped and its error is raised."""
        async with self._starting:
            if self._started:
                return
            await self._stopped()
            try:
                servers = self._servers = [self._make(config) for config in self.config.servers]
                async with asyncio.TaskGroup() as starting:
                    for server in servers:
                        starting.create_task(server.start())
                if self._servers is not servers:
                    raise TunnelError("the pool was stopped while it started")
            except BaseExceptionGroup as errors:
                await self.stop()
                raise _first(errors) from errors
            except BaseException:
                await self.stop()
                raise
            self._started = True

    @asynccontextmanager
    async def acquire(self, session: RolloutSession) -> AsyncIterator[Slot]:
        server, slot = self._seat(session)
        try:
            yield slot
        finally:
            self._leave(server, slot)
        raise_if_lost(session)

    def _seat(self, session: RolloutSession) -> tuple[PoolMember, Slot]:
        if not self._started:
            raise RuntimeError("the pool is not started")
        if not isinstance(session, RolloutSession):
            raise TypeError(f"not a RolloutSession: {type(session).__name__}")
        plan = place([ServerView(server.load, server.serving) for server in self._servers], 1, capacity=None)
        if not plan.assign:
            raise TunnelError("no server of the pool is left: " + "; ".join(self._reasons))
        server = self._servers[plan.assign[0]]
        return server, Slot(server.base_url, *server.register(session))


@dataclass(slots=True, eq=False)
class _Waiter:
    session: RolloutSession
    seat: "asyncio.Future[tuple[PoolMember, Slot]]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class ElasticInterceptionPool(_Pool):
    """Servers started on demand, `multiplex` rollouts on each. One is warmed up at start."""

    def __init__(
        self,
        config: ElasticInterceptionPoolConfig | None = None,
        requires_tunnel: bool = False,
        state_service_secrets: tuple[str, ...] = (),
        *,
        server_factory: ServerFactory = InterceptionServer,
    ) -> None:
        super().__init__(server_factory, requires_tunnel, state_service_secrets)
        self.config = config or ElasticInterceptionPoolConfig()
        if not isinstance(self.config, ElasticInterceptionPoolConfig):
            raise TypeError(f"not an ElasticInterceptionPoolConfig: {type(config).__name__}")
        self._waiters: deque[_Waiter] = deque()
        self._starting: set[asyncio.Task[Exception | None]] = set()
        self._warmup: asyncio.Task[Exception | None] | None = None

    async def start(self) -> None:
        """Warms one server up. A limit (quota, credentials) is raised; another failure is tried again by `acquire`."""
        await self._stopped()
        if self._warmup is None:
            self._started = True
            self._warmup = asyncio.create_task(self._grow(), name="start the first interception server")
            self._starting.add(self._warmup)
        warmup = self._warmup
        try:
            await asyncio.wait([warmup])
        except asyncio.CancelledError:
            await self.stop()
            raise
        if warmup.cancelled():
            raise TunnelError("the pool was stopped while it started")
        error = warmup.result()
        if isinstance(error, TunnelError) and not isinstance(error, TunnelLimitError):
            logger.warning("the first server could not be started, the first rollout tries again: %s", error)
        elif error is not None:
            await self.stop()
            raise error

    @asynccontextmanager
    async def acquire(self, session: RolloutSession) -> AsyncIterator[Slot]:
        server, slot = await self._seat(session)
        try:
            yield slot
        finally:
            self._leave(server, slot)
            self._balance()
        raise_if_lost(session)

    async def _seat(self, session: RolloutSession) -> tuple[PoolMember, Slot]:
        if not self._started:
            raise RuntimeError("the pool is not started")
        if not isinstance(session, RolloutSession):
            raise TypeError(f"not a RolloutSession: {type(session).__name__}")
        waiter = _Waiter(session)
        self._waiters.append(waiter)
        self._balance()
        try:
            return await waiter.seat
        except asyncio.CancelledError:
            if waiter.seat.done() and not waiter.seat.cancelled() and waiter.seat.exception() is None:
                self._leave(*waiter.seat.result())  # seated, but cancelled before it knew
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            self._balance()
            raise

    def _server_changed(self, server: PoolMember) -> None:
        super()._server_changed(server)
        self._balance()

    def _balance(self, *, failure: Exception | None = None) -> None:
        """Seat waiters where there is room, start servers for the rest. `failure`: why no server can be started now."""
        if not self._started:
            return
        # A waiter that was cancelled has a cancelled future before its task runs again and takes it away.
        self._waiters = deque(waiter for waiter in self._waiters if not waiter.seat.done())
        plan = place(
            [ServerView(server.load, server.serving) for server in self._servers],
            len(self._waiters),
            capacity=self.config.multiplex,
            starting=len(self._starting),
            can_start=failure is None,
        )
        for server in [self._servers[index] for index in plan.assign]:
            waiter = self._waiters.popleft()
            try:
                waiter.seat.set_result((server, Slot(server.base_url, *server.register(waiter.session))))
            except Exception as error:  # noqa: BLE001 - whatever a server says to a session is that rollout's to hear
                waiter.seat.set_exception(error)
        for _ in range(plan.start):
            task = asyncio.create_task(self._grow(), name="start an interception server")
            self._starting.add(task)
        if failure is not None:
            # Those that no server being started will serve hear why.
            while len(self._waiters) > len(self._starting) * self.config.multiplex:
                self._waiters.pop().seat.set_exception(_told_anew(failure))

    async def _grow(self) -> Exception | None:
        """Start a server and seat who waits for it; why it could not be started, if so."""
        failure: Exception | None = None
        try:
            await self._start_server()
        except Exception as error:  # noqa: BLE001 - the waiters it would have served hear it
            failure = error
            logger.warning("a server could not be started: %s", error)
        finally:
            task = asyncio.current_task()
            assert task is not None
            self._starting.discard(task)
        self._balance(failure=failure)
        return failure

    async def _start_server(self) -> None:
        server = self._make(InterceptionServerConfig(tunnel=self.config.tunnel, serving=self.config.serving))
        try:
            await server.start()
        except BaseException:
            await run_to_end(self._stop_server(server))
            raise
        self._servers.append(server)
        self._server_changed(server)

    async def _stop(self) -> None:
        self._started = False
        self._warmup = None
        while self._waiters:
            seat = self._waiters.popleft().seat
            if not seat.done():
                seat.set_exception(TunnelError("the pool was stopped"))
        starting = list(self._starting)
        await asyncio.gather(*(cancel_and_wait(task) for task in starting))
        await super()._stop()


def make_interception(
    config: InterceptionConfig, *, requires_tunnel: bool, state_service_secrets: tuple[str, ...] = ()
) -> Interception:
    """The server or pool a config describes; it opens nothing before `start`."""
    match config:
        case InterceptionServerConfig():
            return InterceptionServer(config, requires_tunnel, state_service_secrets)
        case StaticInterceptionPoolConfig():
            return StaticInterceptionPool(config, requires_tunnel, state_service_secrets)
        case ElasticInterceptionPoolConfig():
            return ElasticInterceptionPool(config, requires_tunnel, state_service_secrets)
        case _:
            raise TypeError(f"not an interception config: {type(config).__name__}")


def _has(servers: list[PoolMember], server: PoolMember) -> bool:
    """By identity: members need neither be hashable nor differ."""
    return any(other is server for other in servers)


def _told_anew(failure: Exception) -> TunnelError:
    """An error of its own for each rollout that hears why no server could be started."""
    error = (TunnelLimitError if isinstance(failure, TunnelLimitError) else TunnelError)(str(failure))
    error.__cause__ = failure
    return error


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that came first, out of nested groups: what a caller can catch by its type."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
