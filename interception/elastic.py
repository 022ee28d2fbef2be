"""The pool that grows with its rollouts: servers started on demand, side by side, and stopped when they are idle."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from time import monotonic

from tenacity import AsyncRetrying, retry_if_exception, wait_exponential, wait_random

from interception.base import AcquireTimeoutError, PoolMember, Slot
from interception.config import ElasticInterceptionPoolConfig, InterceptionServerConfig
from interception.placement import idle_too_long, place
from interception.pool import Pool, ServerFactory, has
from interception.server import InterceptionServer, raise_if_lost
from interception.session import RolloutSession, check_usable
from interception.starts import Start, Starts
from interception.stats import PoolStats, ServerStats, StartStats, in_a_line, url_of
from tunnel import TunnelError, TunnelLimitError
from tunnel.teardown import cancel_and_wait, run_to_end

logger = logging.getLogger("interception")

BACKOFF_CAP = 10.0
"""Seconds between two tries to start a server, at most (and as much jitter): waiters hear within half a minute."""

LIMIT_PAUSE = 30.0
"""Seconds without a start after a limit (quota, credentials) was met, while there are servers whose slots become free:
what is refused is not asked for once for each batch of waiters."""


@dataclass(slots=True, eq=False)
class _Waiter:
    session: RolloutSession
    since: float
    seat: "asyncio.Future[tuple[PoolMember, Slot]]"


class ElasticInterceptionPool(Pool):
    """Servers started on demand, `multiplex` rollouts on each."""

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
        self._starts = Starts(self.config.start_patience)
        self._warm: asyncio.Future[Exception | None] | None = None  # done: the first server is there, or why not
        self._idle_since: dict[int, float] = {}  # by id: members need not be hashable
        self._timer: asyncio.TimerHandle | None = None
        self._limited_until = 0.0
        self._idled = 0
        self._failed_starts = 0
        self._last_error: str | None = None
        self._last_failed = 0.0

    async def start(self) -> None:
        """Warms `min_servers` up, side by side, and returns when the first one serves.

        A limit (quota, credentials) is raised; after another `TunnelError` the pool is up and `acquire` tries again.
        """
        await self._stopped()
        if not self._started:
            self._started = True
            self._begin_watching(self.config.numbers_period)
            self._warm = asyncio.get_running_loop().create_future()
            for _ in range(self.config.min_servers):
                self._begin_start()
            if not self._starts:
                self._warm.set_result(None)
            self._balance()
        warm = self._warm
        assert warm is not None
        try:
            await asyncio.wait([warm])
        except asyncio.CancelledError:
            await self.stop()
            raise
        error = warm.result()
        if isinstance(error, TunnelError) and not isinstance(error, TunnelLimitError | _Stopped):
            logger.warning("the first server could not be started, the first rollout tries again: %s", error)
        elif error is not None:
            if self._warm is warm:
                await self.stop()
            raise error

    @asynccontextmanager
    async def acquire(self, session: RolloutSession, *, timeout: float | None = None) -> AsyncIterator[Slot]:
        """See `Interception.acquire`."""
        with self._acquire_errors.counted():
            server, slot = await self._seat(session, timeout)
        try:
            yield slot
        finally:
            self._leave(server, slot)
        raise_if_lost(session)

    def stats(self) -> PoolStats:
        """See `Pool.stats`."""
        now = monotonic()
        waiters = [waiter for waiter in self._waiters if not waiter.seat.done()]
        late = self._starts.limit(now)
        return replace(
            super().stats(),
            servers=tuple(ServerStats.of(server, self._idle_for(server, now)) for server in self._servers),
            starting=tuple(
                StartStats(
                    now - start.since,
                    start.tries,
                    start.queued,
                    start.error,
                    late=start.age(now) > late,
                    between_tries=start.between_tries,
                )
                for start in self._starts
            ),
            capacity=len(self._servers) * self.config.multiplex,
            waiting=len(waiters),
            longest_wait=max((now - waiter.since for waiter in waiters), default=0.0),
            idled=self._idled,
            failed_starts=self._failed_starts,
            last_error=self._last_error,
            last_failed=None if self._last_error is None else now - self._last_failed,
            pause=max(0.0, self._limited_until - now),
            bound=self.config.max_servers if self._at_the_bound else None,
        )

    # -- rollouts ------------------------------------------------------------------------------

    async def _seat(self, session: RolloutSession, timeout: float | None) -> tuple[PoolMember, Slot]:
        if not self._started:
            raise RuntimeError("the pool is not started")
        check_usable(session, self._session_type)
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout is a number of seconds, 0 or more, or None; not {timeout!r}")
        loop = asyncio.get_running_loop()
        waiter = _Waiter(session, monotonic(), loop.create_future())
        self._waiters.append(waiter)
        self._balance()
        timer = None
        if timeout is not None and not waiter.seat.done():
            timer = loop.call_later(timeout, self._time_is_up, waiter, timeout)
        try:
            return await waiter.seat
        except asyncio.CancelledError:
            if waiter.seat.done() and not waiter.seat.cancelled() and waiter.seat.exception() is None:
                self._leave(*waiter.seat.result())  # seated, but cancelled before it knew
            else:
                self._forget(waiter)
            self._balance()
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _time_is_up(self, waiter: _Waiter, timeout: float) -> None:
        if waiter.seat.done():
            return
        stats = self.stats()
        self._forget(waiter)
        waiter.seat.set_exception(AcquireTimeoutError(f"no slot within {timeout:g} s: {stats.summary}"))

    def _forget(self, waiter: _Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)

    def _leave(self, server: PoolMember, slot: Slot) -> None:
        try:
            super()._leave(server, slot)
        finally:
            if server.load == 0 and has(self._servers, server):
                self._idle_since[id(server)] = monotonic()
                self._set_timer()
            if self._waiters:
                self._balance()

    def _server_changed(self, server: PoolMember) -> None:
        super()._server_changed(server)
        if not server.healthy:
            self._idle_since.pop(id(server), None)
        self._balance()

    # -- what placement decides, carried out ---------------------------------------------------

    def _balance(self) -> None:
        """Seat waiters where there is room, and start servers for the rest."""
        if not self._started:
            return
        start = self._seat_waiters(self._may_start())
        if start and any(waiter.seat.done() for waiter in self._waiters):
            # A waiter that was cancelled has a cancelled future before its task runs again and takes it away.
            self._waiters = deque(waiter for waiter in self._waiters if not waiter.seat.done())
            start = self._seat_waiters(self._may_start())
        while start:
            for _ in range(start):
                self._begin_start()
            start = self._seat_waiters(self._may_start())  # of these some may hang, too
        if self._waiters and self._at_the_bound:
            self._give_hopeless_up()
        self._set_timer()

    def _may_start(self) -> int | None:
        if monotonic() < self._limited_until and (self._servers or self._starts):
            return 0
        bound = self.config.max_servers
        return None if bound is None else bound - len(self._servers) - len(self._starts)

    @property
    def _at_the_bound(self) -> bool:
        bound = self.config.max_servers
        return bound is not None and len(self._servers) + len(self._starts) >= bound

    def _give_hopeless_up(self) -> None:
        """Where none may be begun in the stead of a start that hangs, its try is ended, and the next one made; the last
        one is left to its end, for all may have become slow."""
        now = monotonic()
        hopeless = [start for start in self._starts.hopeless(now) if start.tries < self.config.start_tries]
        missing = -(-len(self._waiters) // self.config.multiplex) - self._starts.counted_on(now)
        for start in hopeless[: max(0, missing)]:
            start.given_up = start.between_tries = True
            start.task.cancel()

    def _seat_waiters(self, may_start: int | None) -> int:
        """Seats who can be seated now; how many servers to start for the others."""
        plan = place(
            self._servers,
            max(len(self._waiters), int(self._warming)),
            capacity=self.config.multiplex,
            starting=self._starts.counted_on(monotonic()),
            may_start=may_start,
        )
        for server in [self._servers[index] for index in plan.assign]:
            while self._waiters and not self._seat_first(server):
                pass  # the place is the next one's
        return plan.start

    def _seat_first(self, server: PoolMember) -> bool:
        """Whether the first waiter has used up a place on `server`."""
        waiter = self._waiters.popleft()
        if waiter.seat.done():  # cancelled, and its task has not run yet
            return False
        try:
            waiter.seat.set_result((server, self._take(server, waiter.session)))
        except Exception as error:  # noqa: BLE001 - whatever a server says to a session is that rollout's to hear
            waiter.seat.set_exception(error)
            return isinstance(error, TunnelError)  # the server's fault: the next one would hear the same
        self._idle_since.pop(id(server), None)
        return True

    def _tick(self) -> None:
        self._timer = None
        self._stop_idle()
        self._balance()

    def _stop_idle(self) -> None:
        timeout = self.config.idle_timeout
        if timeout is None:
            return
        now = monotonic()
        idle = [self._idle_for(server, now) for server in self._servers]
        surplus = idle_too_long(idle, floor=self.config.min_servers, timeout=timeout)
        for server in [self._servers[index] for index in surplus]:
            logger.info("server %s is stopped: no rollout for %.0f s", url_of(server), timeout)
            self._servers = [other for other in self._servers if other is not server]
            self._idle_since.pop(id(server), None)
            self._idled += 1
            self._stop_apart(server)

    def _set_timer(self) -> None:
        """For the next moment at which something changes by itself: a start is overdue, a server idle too long."""
        moments: list[float] = []
        if self._waiters or self._warming:
            look = self._starts.next_look(monotonic())
            if look is not None:
                moments.append(look)
        timeout = self.config.idle_timeout
        if timeout is not None and self._idle_since and len(self._servers) > self.config.min_servers:
            now = monotonic()
            moments += [timeout - idle for server in self._servers if (idle := self._idle_for(server, now)) is not None]
        if self._waiters and self._limited_until > monotonic():
            moments.append(self._limited_until - monotonic())
        if not moments:
            return
        loop = asyncio.get_running_loop()
        # A little later, for at the moment itself it is not over yet.
        when = loop.time() + max(0.0, min(moments)) + 0.01
        if self._timer is not None:
            if self._timer.when() <= when:
                return  # it looks again then
            self._timer.cancel()
        self._timer = loop.call_at(when, self._tick)

    @property
    def _warming(self) -> bool:
        return self._warm is not None and not self._warm.done()

    def _idle_for(self, server: PoolMember, now: float) -> float | None:
        since = self._idle_since.get(id(server))
        return None if since is None or server.load else now - since

    # -- growth --------------------------------------------------------------------------------

    def _begin_start(self) -> None:
        start = self._starts.begin(monotonic())
        start.task = asyncio.create_task(self._grow(start), name="start an interception server")

    async def _grow(self, start: Start) -> None:
        failure: Exception | None = None
        backoff = self.config.start_backoff
        pause = wait_exponential(backoff, BACKOFF_CAP) + wait_random(0, backoff)
        try:
            async for attempt in AsyncRetrying(
                stop=lambda _: start.tries >= self.config.start_tries,
                wait=lambda state: 0.0 if start.given_up else pause(state),
                retry=retry_if_exception(lambda error: self._failed(start, error)),
                reraise=True,
            ):
                with attempt:
                    self._starts.try_again(start, monotonic())
                    await self._start_server(start)
        except Exception as error:  # noqa: BLE001 - the waiters it would have served hear it
            failure = error
        except asyncio.CancelledError:
            if start.task.cancelling():
                raise
            failure = TunnelError("the start of the server was cancelled from within")
        finally:
            self._starts.ended(start)
        if failure is not None:
            self._start_failed(start, failure)

    def _failed(self, start: Start, error: BaseException) -> bool:
        """Notes a try that failed; whether another one is worth it."""
        if not isinstance(error, Exception):
            return False
        start.error = self._last_error = in_a_line(error)
        self._last_failed = monotonic()
        self._failed_starts += 1
        if isinstance(error, TunnelError):
            start.tries += error.tries - 1
        again = self._started and isinstance(error, TunnelError) and not isinstance(error, TunnelLimitError)
        # Who waited may have been seated elsewhere meanwhile.
        again = again and (bool(self._waiters) or len(self._servers) < self.config.min_servers)
        if again and start.tries < self.config.start_tries:
            logger.warning("a server could not be started, trying again: %s", error)
        start.between_tries = again
        return again

    async def _start_server(self, start: Start) -> None:
        server = self._make(InterceptionServerConfig(tunnel=self.config.tunnel, serving=self.config.serving))
        start.server = server
        try:
            await server.start()
            if not server.healthy:
                raise TunnelError(f"it was lost while it started: {getattr(server, 'lost', None) or 'not healthy'}")
        except BaseException:
            start.between_tries = True
            await run_to_end(self._stop_server(server))
            # That was the pool itself, and nobody else besides.
            if start.given_up and not start.task.uncancel():
                raise TunnelError("it took too long, and no other could be started beside it") from None
            raise
        self._starts.succeeded(start, monotonic())
        self._servers.append(server)
        self._idle_since[id(server)] = monotonic()
        self._warmed(None)
        self._server_changed(server)

    def _start_failed(self, start: Start, error: Exception) -> None:
        """After its last try: those whom it would have served hear why, and nobody else."""
        logger.warning("a server could not be started (tries: %d): %s", start.tries, error)
        counted = self._starts.counted_on(monotonic())
        if not counted:
            self._warmed(error)
        self._waiters = deque(waiter for waiter in self._waiters if not waiter.seat.done())
        self._seat_waiters(may_start=0)  # a server that does not serve just now is better than none
        beyond = len(self._waiters) - counted * self.config.multiplex
        if isinstance(error, TunnelLimitError) and (self._servers or self._starts):
            self._limited_until = monotonic() + LIMIT_PAUSE
        if not isinstance(error, TunnelLimitError) or self._servers or self._starts:
            beyond = min(beyond, self.config.multiplex)  # else there is nobody to serve the others either
        for _ in range(beyond):
            self._waiters.pop().seat.set_exception(_told_anew(error))
        self._balance()

    def _warmed(self, error: Exception | None) -> None:
        if self._warm is not None and not self._warm.done():
            self._warm.set_result(error)

    # -- the end -------------------------------------------------------------------------------

    async def _stop(self) -> None:
        self._started = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._warmed(_Stopped("the pool was stopped while it started"))
        self._warm = None
        while self._waiters:
            seat = self._waiters.popleft().seat
            if not seat.done():
                seat.set_exception(TunnelError("the pool was stopped"))
        await asyncio.gather(*(cancel_and_wait(start.task) for start in self._starts))
        self._idle_since.clear()
        self._limited_until = 0.0
        await super()._stop()


class _Stopped(TunnelError):
    pass


def _told_anew(failure: Exception) -> TunnelError:
    """An error of its own for each rollout that hears why no server could be started."""
    error = (TunnelLimitError if isinstance(failure, TunnelLimitError) else TunnelError)(
        str(failure) or type(failure).__name__
    )
    error.__cause__ = failure
    return error
