"""A server that is told to end ends, whatever its env does: in good order where that is possible."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.envserver.processes import read_pid

ROOT = Path(__file__).parents[2]

SERVER = """
import asyncio, contextlib, os, pathlib, sys, threading, time
from envserver import ending, serve_env, server

server.CANCEL_TIMEOUT = server.FLUSH_TIMEOUT = 0.05
server.LEAVE_TIMEOUT = 3600
ending.LOOK = 0.02
import envserver.serve
envserver.serve.MARGIN = 60 if sys.argv[1] == "an await" else 0.2

class Watched(ending.HardEnd):
    times = 0

    def within(self, seconds):
        super().within(seconds)
        Watched.times += 1
        mark("told")

envserver.serve.HardEnd = Watched
beat = envserver.serve.beat
envserver.serve.beat = lambda path, after: beat(path, after / 200)
how, marks = sys.argv[1], pathlib.Path(sys.argv[2])

def mark(name):
    (marks / name).write_text(str(os.getpid()))

def block():
    while True:  # not one long sleep: a signal that comes just before that begins would not interrupt it
        time.sleep(0.05)

class Env:
    @contextlib.asynccontextmanager
    async def serving(self):
        if how == "a thread":
            threading.Thread(target=time.sleep, args=(3600,)).start()
        if how == "its start":
            mark("up")
            block()
        asyncio.get_running_loop().call_later(0.05, mark, "up")
        yield
        mark("leaving")
        while how == "a thread" and Watched.times < 2:  # once the server has returned signals are ignored
            time.sleep(0.01)
        if how == "an await":
            await asyncio.sleep(3600)
        while how == "a deaf await":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
        if how == "a worker thread":
            await asyncio.to_thread(time.sleep, 3600)
        if how == "a call":
            block()

    async def run(self, request, emit):
        return {}

serve_env(Env(), drain_timeout=0.1)
mark("returned")
"""


@pytest.mark.parametrize(
    ("how", "status", "says"),
    [
        ("an await", 0, "serving() of the env is cancelled"),
        ("a deaf await", 1, "it is left"),
        ("a worker thread", 1, "ended hard"),
        ("a call", 1, " in serving"),
        ("its start", 1, "Timeout (0:00:00.05"),
        ("a thread", 1, "ended hard"),
    ],
)
async def test_the_second_sigterm_ends_a_server_whose_env_hangs(
    tmp_path: Path, how: str, status: int, says: str
) -> None:
    """`how`: in what its `serving()` hangs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, how, str(tmp_path),
        stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        await read_pid(tmp_path / "up")
        process.send_signal(signal.SIGTERM)
        if how == "its start":
            await read_pid(tmp_path / "told")
        else:
            await read_pid(tmp_path / "leaving")
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            _, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == status, err.decode()
    assert says in err.decode()
    assert (tmp_path / "returned").exists() == (how in ("an await", "a thread"))
