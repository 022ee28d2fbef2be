"""Serving an env until told to end: as the whole business of a process, or in a process made for it."""

import asyncio
import contextlib
import io
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envserver.checks import check_port, check_seconds
from envserver.child import Child
from envserver.ending import MARGIN, HardEnd, told_to_end
from envserver.env import Env
from envserver.errors import EnvServerError
from envserver.orphan import end_with_parent
from envserver.plan import Plan
from envserver.server import EnvServer
from envserver.stacks import SILENT_AFTER, beat, wanted
from envserver.startup import TIMEOUT, startup_error, traceback_path
from envserver.teardown import run_to_end

if TYPE_CHECKING:
    from envserver.pool import EnvServerPool

logger = logging.getLogger("envserver")

DRAIN_TIMEOUT = 30.0
"""Seconds that runs under way get to end by themselves after the first SIGTERM; a second one ends the wait."""

STOP_TIMEOUT = 10.0
"""Seconds that `env_server` gives its server to end before it is killed; half of it goes to the runs under way."""


def serve_env(
    env: Env | str,
    env_kwargs: dict[str, Any] | None = None,
    *,
    max_workers: int | None = 1,
    elastic: bool = True,
    multiplex: int = 128,
    address: str | None = None,
    address_queue: Any = None,
    death_pipe: Any = None,
    log_setup: Callable[[], None] | None = None,
    log_path: str | os.PathLike[str] | None = None,
    drain_timeout: float = DRAIN_TIMEOUT,
    kill_blocked_after: float | None = None,
    metrics_port: int | None = None,
    min_workers: int = 1,
    max_worker_rss: int | None = None,
    max_worker_age: float | None = None,
) -> None:
    """Serve an env until SIGTERM or SIGINT: what a script calls, or the target of a `multiprocessing.Process`.

    `env`: `package.module:factory`, called with `env_kwargs` (JSON values where there are workers); for a single
    server also the env itself. `max_workers` 1 serves from this process; more, or None for any number, from worker
    processes behind a broker: `min_workers` at first, more as load grows and fewer when it is gone for long, or all of
    them at once with `elastic=False`. A worker takes `multiplex` runs before another is started. A worker whose
    process has more than `max_worker_rss` bytes of resident memory, or has been ready for `max_worker_age` seconds, is
    replaced: the new one starts first, and the old one's runs end there. `address` None is a free port on 127.0.0.1.
    `kill_blocked_after`: a worker that does not answer is killed, and its runs fail, once its processes have used no
    CPU for so many seconds (at least 10). None: it is only reported, for it may be waiting for a slow answer.

    `address_queue` (a multiprocessing queue, or a connection to write to) is told the address once it serves;
    `wait_for_address` is the other end. `death_pipe` (a connection or a descriptor to read from): when its other end
    is closed this process ends within a second, as it does when the process that started it with multiprocessing has
    gone. `log_setup` is called here and in every worker. `log_path`: this process's stdout and stderr are appended to
    that file from now on. `metrics_port`: its numbers are at `http://127.0.0.1:PORT/metrics` for Prometheus (extra
    `prometheus`; 0 is any free port, which the log tells).

    At the first signal no new run is taken, and those under way get `drain_timeout` seconds; a second one ends the
    wait, more have no effect. What then does not end is not waited for without end: at last the process exits with
    status 1, and its threads' stacks on stderr. Raises `EnvServerError` if it cannot be served.
    """
    plan = Plan(
        env=env,
        env_kwargs=env_kwargs,
        max_workers=max_workers,
        elastic=elastic,
        multiplex=multiplex,
        address=address,
        log_setup=log_setup,
        log_path=log_path,
        kill_blocked_after=kill_blocked_after,
        min_workers=min_workers,
        max_worker_rss=max_worker_rss,
        max_worker_age=max_worker_age,
    )
    check_seconds("drain_timeout", drain_timeout)
    check_port("metrics_port", metrics_port)
    publish = None if address_queue is None else _publisher(address_queue)
    if log_path is not None:
        _redirect_output(log_path)
    try:
        _end_with_parent(death_pipe)
        if log_setup is not None:
            log_setup()
        serve_until_told(plan.make(), ready=publish, drain_timeout=drain_timeout, metrics_port=metrics_port)
    except BaseException:
        if log_path is not None:
            with contextlib.suppress(OSError):
                traceback_path(log_path).write_text(traceback.format_exc(), errors="backslashreplace")
        raise


def serve_until_told(
    server: "EnvServer | EnvServerPool",
    *,
    ready: Callable[[str], None] | None = None,
    drain_timeout: float = DRAIN_TIMEOUT,
    alongside: Callable[[], Coroutine[Any, Any, None]] | None = None,
    metrics_port: int | None = None,
    stacks_path: str | None = None,
    stacks_after: float = SILENT_AFTER,
) -> None:
    """Run `server` until a signal, or until it fails. `ready` is told its address once it serves; `alongside` runs, and
    `metrics_port` is served, from before its start until after its end. Once the loop has been silent for
    `stacks_after` seconds the stacks of this process are in the file `stacks_path` (None: on stderr)."""
    hard_end = HardEnd()

    def on_told(count: int) -> None:
        if count <= 2:
            hard_end.within((drain_timeout if count == 1 else 0.0) + server.stop_patience(hurried=count > 1) + MARGIN)

    async def serve() -> None:
        besides = [] if alongside is None else [asyncio.create_task(alongside())]
        if wanted():
            besides.append(asyncio.create_task(beat(stacks_path, stacks_after)))
        try:
            await _serve(server, ready, drain_timeout, on_told)
        finally:
            for beside in besides:
                beside.cancel()
                await run_to_end(_ended(beside))

    try:
        with contextlib.nullcontext() if metrics_port is None else _metrics_of(server, metrics_port):
            asyncio.run(serve())
    finally:
        hard_end.call_off()


@contextmanager
def _metrics_of(server: "EnvServer | EnvServerPool", port: int) -> Iterator[None]:
    try:
        from envserver.prometheus import register, serving_metrics
    except ImportError as error:
        raise EnvServerError(f"no metrics: {error}") from None
    with contextlib.ExitStack() as stack:
        stack.callback(register(server))
        try:
            bound = stack.enter_context(serving_metrics(port))
        except (OSError, OverflowError) as error:
            raise EnvServerError(f"no metrics can be served on port {port} of 127.0.0.1: {error}") from None
        logger.info("metrics are on http://127.0.0.1:%d/metrics", bound)
        yield


async def _serve(
    server: "EnvServer | EnvServerPool",
    ready: Callable[[str], None] | None,
    drain_timeout: float,
    on_told: Callable[[int], None],
) -> None:
    with told_to_end(on_told) as (told, told_again):
        hurrying = asyncio.create_task(_hurry(server, told_again))
        try:
            starting = asyncio.create_task(server.start())
            if not await _first(starting, told):
                return
            logger.info("serving on %s", server.address)
            if ready is not None:
                ready(server.address)
            if await _first(asyncio.create_task(server.wait_failed()), told):
                return  # it has raised
            await _first(asyncio.create_task(server.drain(drain_timeout)), told_again)
        finally:
            await server.stop()
            hurrying.cancel()
            logger.info("no longer serving on %s", server.address)


async def _hurry(server: "EnvServer | EnvServerPool", told_again: asyncio.Event) -> None:
    await told_again.wait()
    server.hurry()


async def _first(work: "asyncio.Task[Any]", event: asyncio.Event) -> bool:
    """Whether `work` has ended (or its failure) before `event` is set; it is cancelled if not."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait([work, waiting], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        if not work.done():
            work.cancel()
            await run_to_end(_ended(work))
    if work.cancelled():
        return False
    work.result()
    return True


async def _ended(work: "asyncio.Task[Any]") -> None:
    await asyncio.wait([work])


def _redirect_output(log_path: str | os.PathLike[str]) -> None:
    traceback_path(log_path).unlink(missing_ok=True)
    try:
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise EnvServerError(f"the log {os.fspath(log_path)} cannot be written: {error.strerror}") from None
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # which flushes, so that what came before goes where it belongs
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _end_with_parent(death_pipe: Any) -> None:
    fds: list[int] = []
    if death_pipe is not None:
        fds.append(death_pipe if isinstance(death_pipe, int) else death_pipe.fileno())
    parent = multiprocessing.parent_process()
    if parent is not None:
        fds.append(int(parent.sentinel))
    if fds:
        end_with_parent(fds, None, kill_group=False)


def _publisher(address_queue: Any) -> Callable[[str], None]:
    """What has the address on its way before anything can happen to this process."""

    def put(address: str) -> None:
        address_queue.put(address)
        # A queue hands over to a thread, whose unsent bytes die with the process. Closing it flushes; only ours, and
        # the parent's end is another.
        if hasattr(address_queue, "join_thread") and multiprocessing.parent_process() is not None:
            address_queue.close()
            address_queue.join_thread()

    if hasattr(address_queue, "put"):
        return put
    if hasattr(address_queue, "send"):
        return lambda address: address_queue.send(address)
    raise EnvServerError(f"address_queue is a queue of multiprocessing or a connection, not {address_queue!r}")


@asynccontextmanager
async def env_server(
    env: str,
    env_kwargs: dict[str, Any] | None = None,
    *,
    max_workers: int | None = 1,
    elastic: bool = True,
    multiplex: int = 128,
    address: str | None = None,
    log_setup: Callable[[], None] | None = None,
    log_path: str | os.PathLike[str] | None = None,
    kill_blocked_after: float | None = None,
    timeout: float = TIMEOUT,
    stop_timeout: float = STOP_TIMEOUT,
    metrics_port: int | None = None,
    min_workers: int = 1,
    max_worker_rss: int | None = None,
    max_worker_age: float | None = None,
) -> AsyncIterator[str]:
    """A server in a process of its own: `async with env_server("package.module:factory") as address`.

    The arguments are those of `serve_env`; what nothing can work with is an `EnvServerError`. Raises
    `EnvServerStartupError` in the moment the process dies, or after `timeout` seconds. On leaving the process is told
    to end, and killed `stop_timeout` seconds later if it has not; also when the caller is cancelled, any number of
    times. Without `log_path` the log is a temporary file, kept only after a failure.
    """
    plan = Plan(
        env=env,
        env_kwargs=env_kwargs,
        max_workers=max_workers,
        elastic=elastic,
        multiplex=multiplex,
        address=address,
        log_setup=log_setup,
        log_path=log_path,
        kill_blocked_after=kill_blocked_after,
        min_workers=min_workers,
        max_worker_rss=max_worker_rss,
        max_worker_age=max_worker_age,
    )
    for name, seconds in (("timeout", timeout), ("stop_timeout", stop_timeout)):
        check_seconds(name, seconds)
    check_port("metrics_port", metrics_port)
    job = {"role": "server", "plan": plan.packed(), "stop_timeout": stop_timeout, "metrics_port": metrics_port}
    server = _ServerProcess(log_path)
    try:
        yield await server.start(job, timeout)
    finally:
        await run_to_end(server.stop(stop_timeout))


class _ServerProcess:
    """A child with the role `server`, from its start to its end."""

    def __init__(self, log_path: str | os.PathLike[str] | None) -> None:
        try:
            self._folder = None if log_path is not None else tempfile.mkdtemp(prefix="envserver-")
        except OSError as error:
            raise EnvServerError(f"no folder for the server's log can be made, so give a log_path: {error}") from None
        self._log_path = Path(self._folder or "", log_path or "server.log")
        self._child: Child | None = None
        self._ended = asyncio.Event()
        self._address: str | None = None
        self._changed = asyncio.Event()
        self._stopping = False
        self._failed = False

    async def start(self, job: dict[str, Any], timeout: float) -> str:
        self._child = Child.spawn(job, log_path=self._log_path, on_exit=self._exited, on_report=self._reported)
        try:
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        except TimeoutError:
            self._failed = True
            raise startup_error(
                f"reported no address within {timeout:g} s",
                pid=self._child.pid,
                seconds=self._child.seconds,
                tail=self._child.tail(),
                log_path=self._log_path,
            ) from None
        if self._ended.is_set() or self._address is None:
            self._failed = True
            raise startup_error(
                self._child.exit_reason,
                pid=self._child.pid,
                seconds=self._child.seconds,
                tail=self._child.tail(),
                log_path=self._log_path,
                returncode=self._child.returncode,
                address=self._address,
            )
        return self._address

    async def stop(self, timeout: float) -> None:
        self._stopping = True
        if self._child is not None:
            self._child.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(timeout):
                    await self._ended.wait()
            except TimeoutError:
                logger.warning("the env server (pid %d) did not end within %g s: killed", self._child.pid, timeout)
                self._child.send_signal(signal.SIGKILL)
                await self._ended.wait()
            self._child.close()
        if self._folder is not None and not self._failed:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _reported(self, line: str) -> None:
        self._address = line
        self._changed.set()

    def _exited(self, child: Child) -> None:
        if self._address is not None and not self._stopping:
            self._failed = True
            logger.error("the env server (pid %d) %s\n%s", child.pid, child.exit_reason, child.tail())
        self._ended.set()
        self._changed.set()
