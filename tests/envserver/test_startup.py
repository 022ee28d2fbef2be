"""Waiting for an address: it comes, or it is known at once, and why, that it will not."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from envserver import EnvServerError, EnvServerStartupError, wait_for_address
from tests.envserver.processes import descriptors, read_pid
from tests.helpers import until

SPAWN = multiprocessing.get_context("spawn")
FORKSERVER = multiprocessing.get_context("forkserver")


def child(how: str, queue: Any, folder: str) -> None:
    """The process that is waited for."""
    log = os.open(Path(folder) / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    match how:
        case "address":
            queue.put("tcp://127.0.0.1:1")
            time.sleep(3600)
        case "send":
            queue.send("tcp://127.0.0.1:1")
            time.sleep(3600)
        case "say and exit":
            os.write(1, b"loading\n\x1b[31mno weights\x1b[0m\n")
            os._exit(3)
        case "exit 0":
            os._exit(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "put and die":
            queue.put("tcp://127.0.0.1:1")
            queue.close()
            queue.join_thread()
            os.kill(os.getpid(), signal.SIGKILL)
        case "grandchild":
            grandchild = subprocess.Popen(
                [sys.executable, "-c", "import time; time.sleep(3600)"], close_fds=False, start_new_session=True
            )
            (Path(folder) / "grandchild").write_text(str(grandchild.pid))
            os.kill(os.getpid(), signal.SIGKILL)
        case "close and wait":
            queue.close()
            time.sleep(3600)
        case "wait":
            os.write(1, b"still loading\n")
            time.sleep(3600)


class Started:
    """A process with a queue, ended whatever the test does."""

    def __init__(self, folder: Path, how: str, *, context: Any = SPAWN, queue: Any = None) -> None:
        self.queue = context.Queue() if queue is None else queue
        self.process = context.Process(target=child, args=(how, self.queue, str(folder)))
        self.log = folder / "log"

    def __enter__(self) -> "Started":
        self.process.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        if hasattr(self.queue, "cancel_join_thread"):
            self.queue.close()

    async def address(self, timeout: float = 120) -> str:
        return await wait_for_address(self.process, self.queue, timeout=timeout, log_path=self.log)


async def test_the_address_is_returned_and_nothing_is_left_of_the_wait(tmp_path: Path) -> None:
    with Started(tmp_path, "address") as started:
        before = descriptors()
        assert await started.address() == "tcp://127.0.0.1:1"
        assert descriptors() == before
        assert started.process.is_alive()


async def test_a_connection_does_as_well(tmp_path: Path) -> None:
    reader: Connection
    reader, writer = SPAWN.Pipe(duplex=False)
    with reader, Started(tmp_path, "send", queue=writer) as started:
        writer.close()
        assert await wait_for_address(started.process, reader) == "tcp://127.0.0.1:1"


@pytest.mark.parametrize("context", [SPAWN, FORKSERVER], ids=["spawn", "forkserver"])
async def test_a_death_is_told_with_its_reason_and_the_last_words(tmp_path: Path, context: Any) -> None:
    with Started(tmp_path, "say and exit", context=context) as started:
        with pytest.raises(EnvServerStartupError, match="exited with status 3 after") as caught:
            await started.address()
        error = caught.value
        assert error.exit_reason == "exited with status 3"
        assert error.returncode == 3
        assert error.seconds is not None
        assert error.seconds > 0
        assert error.tail == "loading\nno weights"
        assert error.log_path == str(started.log)
        assert str(error).endswith(f"({started.log}):\nloading\nno weights")
        assert f"(pid {started.process.pid})" in str(error)


async def test_an_exit_with_status_0_before_it_serves_is_an_error_too(tmp_path: Path) -> None:
    said = r"exited with status 0 .* before it was ready; no output"
    with Started(tmp_path, "exit 0") as started, pytest.raises(EnvServerStartupError, match=said):
        await started.address()


async def test_a_silent_sigkill_makes_one_think_of_memory(tmp_path: Path) -> None:
    with (
        Started(tmp_path, "kill") as started,
        pytest.raises(EnvServerStartupError, match=r"killed by SIGKILL.*no output; SIGKILL, perhaps out of memory"),
    ):
        await started.address()


async def test_the_address_of_a_dead_process_is_no_address(tmp_path: Path) -> None:
    with Started(tmp_path, "put and die") as started:
        started.process.join()
        with pytest.raises(EnvServerStartupError, match=r"killed by SIGKILL .* just after it had reported tcp://"):
            await started.address()


async def test_a_process_that_it_forked_does_not_hide_its_death(tmp_path: Path) -> None:
    with Started(tmp_path, "grandchild") as started:
        try:
            with pytest.raises(EnvServerStartupError, match="killed by SIGKILL"):
                await started.address()
        finally:
            os.kill(await read_pid(tmp_path / "grandchild"), signal.SIGKILL)


async def test_one_that_takes_too_long_is_told_and_left_alone(tmp_path: Path) -> None:
    with Started(tmp_path, "wait") as started:
        await until(lambda: started.log.exists() and started.log.read_text())
        with pytest.raises(EnvServerStartupError, match=r"reported no address within 0\.1 s") as caught:
            await started.address(timeout=0.1)
        assert caught.value.tail == "still loading"
        assert caught.value.returncode is None
        assert started.process.is_alive()


async def test_a_closed_connection_does_not_keep_the_loop_busy(tmp_path: Path) -> None:
    reader, writer = SPAWN.Pipe(duplex=False)
    with reader, Started(tmp_path, "close and wait", queue=writer) as started:
        writer.close()
        spent = time.process_time()
        with pytest.raises(EnvServerStartupError, match="reported no address"):
            await wait_for_address(started.process, reader, timeout=3)
        assert time.process_time() - spent < 1.5


async def test_without_a_log_it_says_where_to_look(tmp_path: Path) -> None:
    with Started(tmp_path, "exit 0") as started, pytest.raises(EnvServerStartupError, match="it has no log_path"):
        await wait_for_address(started.process, started.queue)


async def test_a_popen_does_as_well() -> None:
    reader, writer = SPAWN.Pipe(duplex=False)
    code = (
        "import sys, time; from multiprocessing.connection import Connection;"
        "Connection(int(sys.argv[1])).send('tcp://127.0.0.1:1'); time.sleep(3600)"
    )
    with (
        reader,
        subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-c", code, str(writer.fileno())], pass_fds=[writer.fileno()]
        ) as process,
    ):
        try:
            writer.close()
            assert await wait_for_address(process, reader) == "tcp://127.0.0.1:1"
        finally:
            process.kill()
        with pytest.raises(EnvServerStartupError, match="killed by SIGKILL"):
            await wait_for_address(process, reader)


async def test_a_process_that_was_not_started_is_a_mistake_and_told_so() -> None:
    with pytest.raises(EnvServerError, match="has not been started"):
        await wait_for_address(SPAWN.Process(target=child), SPAWN.Queue())


async def test_a_cancelled_wait_leaves_nothing(tmp_path: Path) -> None:
    with Started(tmp_path, "wait") as started:
        before = descriptors()
        waiting = asyncio.create_task(started.address())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert descriptors() == before
