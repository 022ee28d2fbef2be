"""An env served from worker processes: around `slots.Slots`, which decides, and `Dispatcher`, which forwards."""

import asyncio
import contextlib
import logging
import math
import os
import random
import signal
from collections.abc import Callable
from typing import Any, NoReturn, Self

import zmq

from envserver.burials import Burials
from envserver.checks import check_limits, check_numbers
from envserver.chronicle import Chronicle
from envserver.dispatch import Dispatcher
from envserver.errors import EnvServerError
from envserver.folder import ShortFolder, remove_left_behind
from envserver.frontend import Frontend
from envserver.limits import PoolPolicy
from envserver.memory import rss_of
from envserver.metrics import LONE, Sample, health_of, samples_of
from envserver.numbers import NumbersLine
from envserver.quarantine import Quarantine
from envserver.recipe import Recipe
from envserver.slot import Action, Bury, Drain, GiveUp, Slot, Spawn, State, Terminate
from envserver.slots import Slots
from envserver.teardown import run_to_end
from envserver.watch import Watch
from envserver.wire import Part, decode, encode
from envserver.worker import Worker
from envserver.zsocket import check_address

logger = logging.getLogger("envserver")

PROBE_AGAIN = 1.0
"""Seconds until a worker that says that it is not well is asked again."""


class EnvServerPool:
    """Serves the env `package.module:factory` on `address` from worker processes; speaks what `EnvServer` speaks.

    `elastic`: `min_workers` at first, and more, up to `max_workers` (None: no limit), as the requests in flight reach
    90 % of `multiplex` for each ready worker, and fewer again when that is more than they need for long. Else
    `max_workers` at once; the pool is up when one of them is ready.
    `env_kwargs` are JSON values. `log_setup`, a function of a module, is called in each worker; with `log_path`
    "env.log" worker 2 writes to "env-worker-2.log", without it to a file that goes with the pool.

    A worker's death fails the runs it had, with `success=False` and its pid and signal, and nothing else; another takes
    its place by the rules of `slots`. Nothing is run twice. A run that finds no ready worker fails at once. A task that
    was there at two deaths runs alone, on one worker more, and is refused after two deaths there (`poison`).
    `policy` has all figures, and what makes a worker be replaced while it is well: its age or its memory.
    """

    def __init__(
        self,
        env: str,
        env_kwargs: dict[str, Any] | None = None,
        *,
        max_workers: int | None,
        elastic: bool = True,
        min_workers: int = 1,
        multiplex: int = 128,
        address: str = "tcp://127.0.0.1:0",
        log_setup: Callable[[], None] | None = None,
        log_path: str | os.PathLike[str] | None = None,
        policy: PoolPolicy | None = None,
    ) -> None:
        self._policy = policy or PoolPolicy()
        check_numbers(max_workers, elastic, min_workers, multiplex)
        check_limits(self._policy)
        check_address(address, "cannot listen on")
        self.address = address
        """Where it listens; concrete once `start` has returned."""
        self._recipe = Recipe(env, env_kwargs, multiplex, log_setup, log_path, self._policy)
        self._slots = Slots(
            self._policy,
            max_workers=max_workers,
            elastic=elastic,
            min_workers=min_workers,
            multiplex=multiplex,
            luck=iter(random.random, None),
        )
        self._dispatcher = Dispatcher(
            on_missed=self._missed,
            on_load=self._tick,
            on_health=self._health,
            on_idle=self._idle,
            on_withdrawn=lambda run: self._quarantine.withdrawn(run),
        )
        self._quarantine = Quarantine(
            self._policy,
            self._slots,
            self._dispatcher,
            now=lambda: self._now,
            lone=lambda: (worker for slot, worker in self._workers.items() if slot.lone),
            retire=lambda worker: self._supervise(lambda: self._slots.retire(worker.slot, self._now)),
            wake=self._look_soon,
        )
        self._slots.on_move = self._dispatcher.metrics.moved
        self._workers: dict[Slot, Worker] = {}
        """Of each slot that has one, until it is buried."""
        self._chronicle = Chronicle()
        self._frontend = Frontend()
        self._folder: ShortFolder | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._wake: asyncio.Handle | None = None
        self._watch = Watch(
            self._policy,
            on_suspect=lambda worker: self._supervise(lambda: self._slots.silent(worker.slot, self._now)),
            on_back=lambda worker: self._supervise(lambda: self._slots.answered(worker.slot, self._now)),
            on_hung=lambda worker, why: self._supervise(lambda: self._slots.hung(worker.slot, self._now, why)),
            on_failure=self._crashed,
        )
        self._numbers = NumbersLine(self.samples, self._policy.numbers_period)
        self._burials = Burials(
            self._policy.burial_timeout,
            on_due=self._watched(self._bury),
            on_lost=lambda worker: self._supervise(lambda: self._slots.lost(worker.slot, self._now)),
        )
        self._up: asyncio.Future[None] | None = None
        self._changed = asyncio.Event()
        self._draining = False
        self._crash: Exception | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start the first workers and return when one is ready; from then on requests are answered.

        Raises `EnvServerStartupError` as soon as a worker ends by an exception or an exit, or for the third time by a
        signal, or is not ready within 600 s; `EnvServerError` if the address cannot be had or no process be started.
        Then nothing is left.
        """
        if self._up is not None:
            raise EnvServerError("this pool has been started before")
        self._loop = asyncio.get_running_loop()
        self._up = self._loop.create_future()
        try:
            await asyncio.to_thread(remove_left_behind)
            if self._up.done():  # it was stopped meanwhile
                await self._up
            # Before any worker: an address that is taken is told at once. Who connects now waits for the first answer.
            self.address = self._frontend.open(self.address)
            self._folder = ShortFolder()
            self._supervise(lambda: self._slots.start(self._now))
            await self._up
            self._dispatcher.outbox = self._frontend.serve(
                self._dispatcher.on_request, self._dispatcher.cut_off, self._policy.client_budget
            )
            if self._policy.max_worker_rss is not None:
                self._measure()
            self._numbers.start()
        except BaseException:
            await self.stop()
            raise

    async def drain(self, timeout: float) -> None:
        """Take no new runs, and return when those under way have been answered, or after `timeout` seconds."""
        if not self._draining:
            self._close_doors()
            logger.info("draining: %d requests are in flight", self.in_flight)
            self._supervise(lambda: self._slots.shut_down(self._now, timeout))
            for worker in [*self._workers.values()]:
                self._idle(worker)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._until(lambda: not self.in_flight)

    async def stop(self) -> None:
        """End the workers and all that they still run, at once. Idempotent, and whatever happens to the caller."""
        await run_to_end(self._stop())

    def hurry(self) -> None:
        """Nothing: `stop` waits for no run, and kills what does not end."""

    def stop_patience(self, hurried: bool) -> float:
        """Seconds that `stop` takes at most."""
        return self._policy.kill_grace + self._policy.stop_timeout + 2 * self._policy.flush_timeout

    async def wait_failed(self) -> NoReturn:
        """Raises when the pool cannot go on, because what watches over its workers has failed. Never returns."""
        await self._until(lambda: self._crash is not None)
        raise EnvServerError(f"the pool's supervisor failed: {self._crash!r}") from self._crash

    @property
    def in_flight(self) -> int:
        """Requests that workers have and have not answered."""
        return sum(len(worker.requests) for worker in self._workers.values())

    @property
    def dropped(self) -> int:
        """Messages that were none, or nobody's."""
        return self._dispatcher.dropped

    def states(self) -> dict[str, int]:
        """How many slots are in which state, how many requests are in flight, and, where there are suspects, how many
        lone workers and runs that wait for one."""
        counts = {state.value: self._slots.count(state) for state in State}
        counts |= {LONE: self._slots.lone, "waiting": self._quarantine.waiting}
        shown = {name: count for name, count in counts.items() if count or name == State.READY.value}
        return {**shown, "in flight": self.in_flight}

    def samples(self) -> list[Sample]:
        """All its numbers, as `envserver.prometheus` shows them; also from another thread."""
        loads = {worker.number: len(worker.requests) for worker in [*self._workers.values()]}
        return samples_of(self._dispatcher.metrics, self._slots, loads, self.dropped, self._quarantine.waiting)

    # Carrying out what the slots decide

    @property
    def _now(self) -> float:
        return self._loop.time()

    def _supervise(self, step: Callable[[], list[Action]]) -> None:
        """Tell the slots something and do what they say. A failure in here is the end: a pool whose slots are in
        disorder would only look alive."""
        if self._crash is not None:
            return
        try:
            self._refresh(step())
        except Exception as error:  # noqa: BLE001
            self._crashed(error)

    def _watched(self, callback: Callable[[Worker], None]) -> Callable[[Worker], None]:
        """`callback` for the loop, whose failure is a failure of the supervisor."""

        def guarded(worker: Worker) -> None:
            try:
                callback(worker)
            except Exception as error:  # noqa: BLE001
                self._crashed(error)

        return guarded

    def _refresh(self, actions: list[Action]) -> None:
        # Who may get runs first: nothing that follows may offer one to a worker that has gone.
        self._refresh_ready()
        for action in actions:
            match action:
                case Spawn(slot):
                    self._spawn(slot)
                case Terminate(slot, hard):
                    self._terminate(slot, hard)
                case Drain(slot):
                    self._drain_worker(self._workers[slot])
                case Bury(slot):
                    self._burials.exited(self._workers[slot])
                case GiveUp(slot):
                    self._give_up(slot)
        self._refresh_ready()
        if self._timer is not None:
            self._timer.cancel()
        due = min(self._slots.due_at(), self._quarantine.due_at())
        self._timer = None if due == math.inf else self._loop.call_at(due, self._tick)

    def _refresh_ready(self) -> None:
        offered = [
            (slot.state, worker) for slot, worker in self._workers.items() if worker.dispatchable and not slot.lone
        ]
        self._dispatcher.ready = [worker for state, worker in offered if state is State.READY]
        self._dispatcher.suspect = [worker for state, worker in offered if state is State.SUSPECT]
        self._dispatcher.load_limit = self._slots.scale_up_at
        well = self._crash is None and not self._draining
        self._dispatcher.health = encode(health_of(self._slots, None if well else self._dispatcher.refusal))
        self._notify()

    def _tick(self) -> None:
        self._wake = None
        before = self._slots.own
        self._supervise(self._look)
        if (more := self._slots.own - before) > 0:
            logger.info("%d more worker(s): %d requests in flight", more, self.in_flight)

    def _spawn(self, slot: Slot) -> None:
        assert self._folder is not None
        try:
            worker = self._recipe.make(
                slot,
                self._frontend.context,
                self._folder,
                on_message=self._dispatcher.on_answer,
                on_lost=self._watched(self._lost),
                on_exit=self._watched(self._exited),
            )
        except (EnvServerError, zmq.ZMQError) as error:  # no processes, descriptors or sockets left
            self._chronicle.not_started(slot, error)
            if self._up is not None and not self._up.done():
                self._up.set_exception(EnvServerError(str(error)))
            report = self._slots.spawn_failed
        else:
            self._workers[slot] = worker
            self._chronicle.starting(worker, self._workers, self._now)
            report = self._slots.spawned
        self._refresh(report(slot, self._now))
        self._tell_next(slot)

    def _terminate(self, slot: Slot, hard: bool) -> None:
        worker = self._workers[slot]
        self._chronicle.killing(worker, self._policy)
        worker.child.send_signal(signal.SIGKILL if hard else signal.SIGTERM)

    def _give_up(self, slot: Slot) -> None:
        if self._up is None or self._up.done():
            return
        self._up.set_exception(self._recipe.failure(self._workers[slot]))

    # What workers do

    def _health(self, worker: Worker, data: Part) -> None:
        if worker.slot.state is not State.STARTING:
            self._watch.answered(worker)
            return
        try:
            well = decode(data).get("success") is True
        except ValueError:
            well = False
        if not well:
            self._loop.call_later(PROBE_AGAIN, self._probe, worker)
            return
        worker.dispatchable = True
        self._watch.add(worker)
        self._chronicle.ready(worker)
        self._supervise(lambda: self._slots.answered(worker.slot, self._now))
        if self._up is not None and not self._up.done() and self._slots.up:
            self._up.set_result(None)
        if worker.slot.lone:
            self._quarantine.look()

    def _probe(self, worker: Worker) -> None:
        if not worker.closed:
            worker.probe()

    def _idle(self, worker: Worker) -> None:
        worker.slot.idle_since = self._now
        if worker.slot.lone:
            self._quarantine.idle(worker)
        if worker.slot.state is State.DRAINING and not worker.requests:
            self._supervise(lambda: self._slots.empty(worker.slot, self._now))
        if self._draining:
            self._notify()

    def _drain_worker(self, worker: Worker) -> None:
        """It gets no more runs and ends after its last one, for another has taken its place or none is needed."""
        if not worker.slot.lone:
            logger.info("%s is ended, with %d requests on it that it may finish", worker, len(worker.requests))
        if not worker.requests:
            self._refresh(self._slots.empty(worker.slot, self._now))

    def _lost(self, worker: Worker) -> None:
        self._refresh_ready()
        self._burials.disconnected(worker)

    def _exited(self, worker: Worker) -> None:
        worker.dispatchable = False
        self._watch.drop(worker)
        slot = worker.slot
        self._chronicle.ended(worker)
        if self._crash is not None:
            worker.close()
            self._workers.pop(slot, None)
            self._notify()
            return
        self._supervise(lambda: self._slots.exited(slot, self._now, worker.child.returncode or 0))

    def _bury(self, worker: Worker) -> None:
        """Nothing more comes from a worker that has ended: what it has not answered fails."""
        slot = worker.slot
        worker.read_rest()
        worker.connected = False
        ended = f"{worker} of the env server {worker.end}"
        if self._draining:
            ended += ", as the server is shutting down"
        runs = [request for request in worker.requests.values() if request.target is None]
        self._dispatcher.fail(worker, f"{ended}; this request was running there and is not run again")
        worker.close()
        self._workers.pop(slot, None)
        if not self._draining:
            self._quarantine.buried(worker, runs)
        self._supervise(lambda: self._slots.closed(slot, self._now))
        self._tell_next(slot)
        self._look_soon()  # the load may have waited for its place

    def _tell_next(self, slot: Slot) -> None:
        self._chronicle.goes_on(slot, self._now)
        if slot.lone and slot.state is State.RETIRED:
            self._quarantine.failed(self._chronicle.last)

    def _missed(self) -> str:
        """A run has found no worker. Why, for its error."""
        self._look_soon()
        if self._dispatcher.ready or self._dispatcher.suspect:
            return "no worker takes a request: too many bytes wait for each of them"
        states = ", ".join(f"{count} {name}" for name, count in self.states().items() if count and name != "in flight")
        last = f"; last: {self._chronicle.last}" if self._chronicle.last else ""
        return f"no worker is ready ({states or 'none is left; the next start is due later'}){last}"

    def _look(self) -> list[Action]:
        self._quarantine.look()
        for slot, worker in self._workers.items():
            if worker.requests:
                slot.idle_since = math.inf
        return self._slots.tick(self._now, self._dispatcher.load)

    def _look_soon(self) -> None:
        if self._wake is None and self._crash is None:
            self._wake = self._loop.call_soon(self._tick)

    def _measure(self) -> None:
        """See how much memory the workers take."""
        if self._draining:
            return
        for slot, worker in self._workers.items():
            slot.rss = rss_of(worker.pid) or 0
        self._tick()
        self._loop.call_later(self._policy.load_look, self._measure)

    # Ends

    def _crashed(self, error: Exception) -> None:
        logger.critical("the pool's supervisor failed; all requests fail", exc_info=error)
        self._crash = error
        self._watch.close()
        self._close_doors(f"the env server's supervisor failed: {error!r}")
        for slot, worker in [*self._workers.items()]:
            worker.dispatchable = False
            worker.child.send_signal(signal.SIGKILL)
            self._dispatcher.fail(worker, f"the env server's supervisor failed: {error!r}")
            if worker.child.returncode is not None:
                worker.close()
                self._workers.pop(slot, None)
        self._burials.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._up is not None and not self._up.done():
            self._up.set_exception(EnvServerError(f"the pool's supervisor failed: {error!r}"))
        self._refresh_ready()

    def _close_doors(self, why: str = "the env server is shutting down and takes no new runs") -> None:
        self._draining = True
        self._dispatcher.refusal = why
        self._quarantine.close(why)
        self._refresh_ready()

    async def _stop(self) -> None:
        if self._up is not None and not self._up.done():
            self._up.set_exception(EnvServerError("the pool was stopped before it was up"))
        if self._up is not None and not self._up.cancelled():
            self._up.exception()  # whoever waited for it has it
        self._close_doors()
        if self._workers or self._slots.map:
            self._supervise(lambda: self._slots.shut_down(self._now, 0.0))
            self._supervise(lambda: self._slots.hurry(self._now))
            patience = self._policy.kill_grace + self._policy.stop_timeout
            try:
                async with asyncio.timeout(patience):
                    await self._until(lambda: not self._workers)
            except TimeoutError:
                logger.error("%d worker(s) do not end although they were killed", len(self._workers))
        for worker in [*self._workers.values()]:
            self._dispatcher.fail(worker, f"{worker} does not end; the env server is shutting down")
            worker.close()
        self._workers.clear()
        self._watch.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._numbers.stop()
        await self._frontend.close(self._policy.flush_timeout)
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    def _notify(self) -> None:
        """Wake who waits in `_until`."""
        self._changed.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            changed = self._changed
            if changed.is_set():
                changed = self._changed = asyncio.Event()
            await changed.wait()
