"""One process that serves an env: requests come in over a ROUTER, each run is a task."""

import asyncio
import contextlib
import logging
import signal
from typing import Any, NoReturn, Self

import zmq

from envserver.checks import check_numbers
from envserver.env import Emit, Env, check_env, load_env
from envserver.errors import EnvServerError
from envserver.metrics import (
    CAPACITY,
    CLIENT_GONE,
    ENV,
    SHUTTING_DOWN,
    SLOTS,
    Metrics,
    Sample,
    samples_of_requests,
)
from envserver.numbers import PERIOD, NumbersLine
from envserver.outbox import BUDGET, Outbox
from envserver.teardown import run_to_end
from envserver.wire import (
    CANCEL,
    DELTA,
    HEALTH,
    REPLY,
    RUN,
    Part,
    Request,
    cancel_target,
    decode,
    encode,
    failure,
    parse_request,
    success,
    tells_failure,
)
from envserver.zsocket import TURN, ZSocket, check_address, listen, unlink_address

logger = logging.getLogger("envserver")

CANCEL_TIMEOUT = 5.0
"""Seconds that cancelled runs get to end when the server stops, and so a `serving()` that is cancelled at last."""

LEAVE_TIMEOUT = 30.0
"""Seconds that `serving()` gets to give back what it holds, until it is cancelled."""

FLUSH_TIMEOUT = 1.0
"""Seconds that the last answers get to leave."""


class EnvServer:
    """Serves `env` on `address`; `async with EnvServer(env) as server` from readiness to the end of all runs.

    `env` is an object with `serving()` and `run()`, or the name `package.module:factory`, which is loaded here and
    now, with `env_kwargs`. Port 0 is any free one: `server.address` says which once `start` has returned. `multiplex`
    is what health calls its capacity; no request is refused for it. `budget`: bytes of answers that a client may leave
    unread before it is cut off (None: any number). `numbers_period`: seconds between two log lines with its numbers
    (INFO; None: no lines).

    Hostile frames are counted (`dropped`) and have no other effect. Every other request gets exactly one reply.
    """

    def __init__(
        self,
        env: Env | str,
        env_kwargs: dict[str, Any] | None = None,
        *,
        address: str = "tcp://127.0.0.1:0",
        multiplex: int = 128,
        budget: int | None = BUDGET,
        numbers_period: float | None = PERIOD,
    ) -> None:
        if isinstance(env, str):
            env = load_env(env, env_kwargs)
        elif env_kwargs:
            raise EnvServerError("env_kwargs are for an env that is named, not for one that is made already")
        else:
            check_env(env, "the caller")
        check_address(address, "cannot listen on")
        check_numbers(1, False, 1, multiplex)
        self.address = address
        self.dropped = 0
        self._metrics = Metrics()
        self._env: Env = env
        self._multiplex = multiplex
        self._budget = budget
        self._running: dict[tuple[bytes, bytes], _Run] = {}
        self._idle = asyncio.Event()
        self._draining = False
        self._why: str | None = None
        self._ending = asyncio.Event()
        self._hurried = asyncio.Event()
        self._numbers = NumbersLine(self.samples, numbers_period)
        self._started = False
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._host: asyncio.Task[None] | None = None
        self._zsocket: ZSocket | None = None
        self._outbox: Outbox | None = None

    @property
    def in_flight(self) -> int:
        """Runs that have not been answered yet."""
        return len(self._running)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, enter `serving()`, and answer from then on. Raises `EnvServerError` if the address cannot be had, and
        whatever `serving()` raises; then nothing is left."""
        if self._started:
            raise EnvServerError("this server has been started before")
        self._started = True
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        up = asyncio.Event()
        try:
            # Before the env's resources are up: a port that is taken is told at once. Who connects already waits.
            self._socket, self.address = listen(self._context, self.address)
            # In one task from entry to exit, as task groups and cancel scopes want it.
            self._host = asyncio.create_task(self._serve(up))
            ready = asyncio.create_task(up.wait())
            try:
                await asyncio.wait([self._host, ready], return_when=asyncio.FIRST_COMPLETED)
            finally:
                ready.cancel()
            if self._host.done():
                self._host.result()
                raise EnvServerError("serving() of the env ended before it was up")
            self._zsocket = ZSocket(self._socket, self._received, self._flush)
            self._outbox = Outbox(self._zsocket, self._cut_off, self._budget)
            self._numbers.start()
        except BaseException:
            await self.stop()
            raise

    async def drain(self, timeout: float) -> None:
        """Take no new runs, and return when those under way have been answered, or after `timeout` seconds."""
        self._draining = True
        if self._running:
            self._idle.clear()
            logger.info("draining: %d runs are under way", len(self._running))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._idle.wait()

    async def stop(self) -> None:
        """Cancel what still runs, leave `serving()`, close. Whatever happens to the caller meanwhile.

        Runs that do not end within 5 s of their cancellation are left as they are. `serving()` is cancelled when it has
        not ended after 30 s, and left 5 s later.
        """
        await run_to_end(self._stop())

    def hurry(self) -> None:
        """A `serving()` that takes longer to end than 5 s is cancelled, now or then, not after 30."""
        self._hurried.set()

    def stop_patience(self, hurried: bool) -> float:
        """Seconds that `stop` takes at most; of them 5 are the runs'."""
        return 2 * CANCEL_TIMEOUT + (CANCEL_TIMEOUT if hurried else LEAVE_TIMEOUT) + 2 * FLUSH_TIMEOUT

    async def wait_failed(self) -> NoReturn:
        """Raises when the server can serve no longer: `serving()` has ended by itself. Never returns."""
        assert self._host is not None
        await asyncio.wait([self._host])
        if not self._host.cancelled() and (error := self._host.exception()) is not None:
            raise EnvServerError(f"serving() of the env failed: {_describe(error)}") from error
        raise EnvServerError("serving() of the env has ended")

    def states(self) -> dict[str, int]:
        """How many workers are in which state, and how many runs are in flight."""
        up = self._outbox is not None
        states = {"ready": int(up and not self._draining), "starting": int(not up), "draining": int(self._draining)}
        return {name: count for name, count in states.items() if count or name == "ready"} | {
            "in flight": self.in_flight
        }

    def samples(self) -> list[Sample]:
        """All its numbers, as `envserver.prometheus` shows them; also from another thread."""
        states = {name: count for name, count in self.states().items() if name != "in flight"}
        return [
            *[Sample(SLOTS, (state,), count) for state, count in states.items()],
            Sample(CAPACITY, (), self._multiplex * states["ready"]),
            *samples_of_requests(self._metrics, self.in_flight, self.dropped),
        ]

    async def _serve(self, up: asyncio.Event) -> None:
        try:
            async with self._env.serving():
                up.set()
                await self._ending.wait()
        except SystemExit as error:
            raise RuntimeError(f"serving() of the env called sys.exit({error.code!r})") from error

    async def _stop(self) -> None:
        self._draining = True
        self._numbers.stop()
        by_itself = self._zsocket is not None and self._host is not None and self._host.done()
        why = "serving() of the env has ended" if by_itself else "the env server is shutting down"
        self._why = f"cancelled: {why}"
        tasks = [run.task for run in self._running.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CANCEL_TIMEOUT)
            if late:
                logger.warning("%d runs do not end although they are cancelled", len(late))
        self._ending.set()
        if self._host is not None:
            if self._zsocket is None:  # not up yet
                self._host.cancel()
            await self._leave_serving(self._host)
            ended = self._host.done() and not self._host.cancelled()
            if self._zsocket is not None and ended and (error := self._host.exception()) is not None:
                logger.error("serving() of the env failed: %s", error, exc_info=error)
        socket, self._socket = self._socket, None
        if socket is not None:
            unlink_address(self.address)
        if self._zsocket is not None and self._outbox is not None:
            deadline = self._loop.time() + FLUSH_TIMEOUT
            while not self._outbox.empty and self._loop.time() < deadline:  # noqa: ASYNC110 - it sends by itself
                await asyncio.sleep(0.01)
            self._outbox.close()
            self._zsocket.close(linger=int(FLUSH_TIMEOUT * 1000))
        elif socket is not None:
            socket.close(0)
        context, self._context = self._context, None
        if context is not None:
            await asyncio.to_thread(context.term)  # waits for what was sent last

    async def _leave_serving(self, host: "asyncio.Task[None]") -> None:
        """It ends by itself, or is cancelled, or is left."""
        if (await asyncio.wait([host], timeout=CANCEL_TIMEOUT))[0]:
            return
        logger.warning("serving() of the env has not ended after %g s", CANCEL_TIMEOUT)
        hurried = asyncio.create_task(self._hurried.wait())
        patience = LEAVE_TIMEOUT - CANCEL_TIMEOUT
        await asyncio.wait([host, hurried], timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not host.done():
            logger.warning("serving() of the env is cancelled")
            host.cancel()
            if not (await asyncio.wait([host], timeout=CANCEL_TIMEOUT))[0]:
                logger.error("serving() of the env does not end although it is cancelled: it is left")

    def _received(self, parts: list[Part]) -> None:
        request = parse_request(parts)
        if request is None:
            self._drop("it is no request")
        elif request.method == RUN:
            self._start_run(request)
        elif request.method == HEALTH:
            counts = {"ready": 0 if self._draining else 1, "starting": 0, "capacity": self._multiplex}
            self._reply(request, success({**counts, "in_flight": len(self._running)}))
        elif request.method == CANCEL:
            self._cancel(request)
        else:
            self._reply(request, failure(f"unknown method {request.method!r}: it is health, run or cancel"))

    def _start_run(self, request: Request) -> None:
        if self._draining:
            self._metrics.requests += 1
            self._metrics.failed[SHUTTING_DOWN] += 1
            self._reply(request, failure("the env server is shutting down and takes no new runs"))
            return
        key = (request.client, request.id)
        if key in self._running:
            self._drop("a run with its id is under way")  # an answer would be taken for that one's
            return
        self._metrics.requests += 1
        try:
            payload = decode(request.payload)
        except ValueError as error:
            self._metrics.failed[ENV] += 1
            self._reply(request, failure(f"a bad request: {error}"))
            return
        run = _Run(request, self)
        self._running[key] = run
        run.task = self._loop.create_task(self._perform(payload, run.emit))
        run.task.add_done_callback(run.ended)

    async def _perform(self, payload: dict[str, Any], emit: Emit) -> dict[str, Any]:
        try:
            return await self._env.run(payload, emit)
        except SystemExit as error:  # as argparse does it: not meant for the process that serves everyone
            raise RuntimeError(f"the env called sys.exit({error.code!r})") from error
        except KeyboardInterrupt as error:
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                raise  # it may be a Ctrl-C
            raise RuntimeError("the env raised KeyboardInterrupt") from error

    def _ended(self, run: "_Run", task: "asyncio.Task[dict[str, Any]]") -> None:
        self._running.pop((run.request.client, run.request.id), None)
        if not self._running:
            self._idle.set()
        if task.cancelled():
            data = failure(run.why or self._why or "cancelled")
        elif (error := task.exception()) is not None:
            logger.warning("a run failed: %s", _describe(error), exc_info=error)
            data = failure(_describe(error))
        else:
            data = _checked(task.result())
        if task.cancelled() and not (run.why or self._why):
            self._metrics.cancelled += 1
        elif tells_failure(data):
            self._metrics.failed[ENV if not task.cancelled() else CLIENT_GONE if run.why else SHUTTING_DOWN] += 1
        self._reply(run.request, data)

    def _cancel(self, request: Request) -> None:
        try:
            target = cancel_target(request.payload)
        except ValueError as error:
            self._reply(request, failure(f"a bad request: {error}"))
            return
        run = self._running.get((request.client, target))
        if run is not None:
            run.task.cancel()
        self._reply(request, success({"cancelled": run is not None}))

    def _cut_off(self, client: bytes) -> None:
        for run in [run for run in self._running.values() if run.request.client == client]:
            run.why = "cut off: this client does not read its answers"
            run.task.cancel()

    def _reply(self, request: Request, data: bytes) -> None:
        if self._outbox is not None:
            self._outbox.send([request.client, request.id, REPLY, data])

    def _flush(self) -> None:
        if self._outbox is not None and not self._outbox.empty:
            self._outbox.flush()

    def _drop(self, why: str) -> None:
        self.dropped += 1
        if self.dropped & (self.dropped - 1) == 0:  # the 1st, 2nd, 4th, 8th …
            logger.warning("a message was dropped: %s (%d so far)", why, self.dropped)


class _Run:
    """A request under way."""

    __slots__ = ("_emitted", "_over", "_server", "request", "task", "why")

    task: "asyncio.Task[dict[str, Any]]"

    def __init__(self, request: Request, server: EnvServer) -> None:
        self.request = request._replace(payload=b"")  # which may be large, and has been read
        self.why: str | None = None
        self._server = server
        self._emitted = 0
        self._over = False

    async def emit(self, delta: dict[str, Any]) -> None:
        if self._over:
            raise EnvServerError("this request has been answered: nothing more can be emitted")
        if not isinstance(delta, dict):
            raise TypeError(f"a delta is a dict, not a {type(delta).__name__}")
        outbox = self._server._outbox
        assert outbox is not None
        client, request_id, _, _ = self.request
        outbox.send([client, request_id, DELTA, encode(delta)])
        self._emitted += 1
        if self._emitted % TURN == 0 or outbox.waits(client):
            await asyncio.sleep(0)  # an env that only emits leaves the others a turn

    def ended(self, task: "asyncio.Task[dict[str, Any]]") -> None:
        self._over = True
        self._server._ended(self, task)


def _checked(result: Any) -> bytes:
    """What `run` returned as a reply; as a failure if it cannot be one."""
    if not isinstance(result, dict):
        return failure(f"run() of the env returned a {type(result).__name__}, not a dict")
    if taken := [key for key in ("success", "error") if key in result]:
        return failure(f"run() of the env returned {' and '.join(taken)}, which the server adds")
    try:
        return success(result)
    except ValueError as error:
        return failure(f"what run() of the env returned is {error}")


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - whatever its own __str__ does
        return type(error).__name__
