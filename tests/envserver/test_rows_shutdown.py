"""Rows of the sheet's table that are about the end of the server, wanted or not."""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from envserver import EnvClient
from tests.envserver.caller import Caller
from tests.envserver.processes import alive
from tests.helpers import until

ROOT = Path(__file__).parents[2]

SERVER = """
import sys
from envserver import serve_env

class Out:
    def send(self, address):
        print(address, flush=True)

{before}
serve_env(
    "tests.envserver." + sys.argv[1], {kwargs}, max_workers=int(sys.argv[2]), elastic=False, address_queue=Out()
)
"""

BROKEN = """
from envserver.slots import Slots

def broken(*arguments):
    raise RuntimeError("a bug in the supervisor")

Slots.exited = broken
"""


@asynccontextmanager
async def broker(
    env: str, workers: int, *, before: str = "", kwargs: dict[str, str] | None = None
) -> AsyncIterator[tuple[Process, str]]:
    """A pool in a process of its own with all its workers ready, and its address."""
    code = SERVER.format(before=before, kwargs=kwargs)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, env, str(workers), stdout=PIPE, stderr=PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdout is not None
    family: list[psutil.Process] = []
    try:
        address = (await process.stdout.readline()).decode().strip()
        assert address, await process.stderr.read() if process.stderr else ""
        family = psutil.Process(process.pid).children(recursive=True)
        async with EnvClient(address) as client:
            while (await client.health(timeout=30))["ready"] < workers:  # noqa: ASYNC110 - each asks for the next
                await asyncio.sleep(0.05)
        yield process, address
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


async def test_row_09_with_its_launcher_killed_no_worker_is_left_whatever_it_is_doing(tmp_path: Path) -> None:
    """One has nothing to do, one is stopped, one is in C code that lets no other thread run."""
    async with broker("hardships:hard", 3) as (process, address):
        family = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
        assert len(family) == 3
        note = tmp_path / "note"
        with Caller(address) as caller:
            await caller.send("run", {"do": "hold the GIL", "note": str(note)})
            await until(lambda: note.exists() and note.read_text().endswith("\n"))
            busy = int(note.read_text())
            stopped = max(family - {busy})
            os.kill(stopped, signal.SIGSTOP)
            await until(lambda: psutil.Process(stopped).status() == psutil.STATUS_STOPPED)
            process.kill()
            await until(lambda: not any(alive(pid) for pid in family))


async def test_row_29_three_sigterms_in_a_row_clean_up_once_and_exit_0(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    async with broker("hardships:marked", 2, kwargs={"marks": str(marks)}) as (process, address):
        family = psutil.Process(process.pid).children(recursive=True)
        with Caller(address) as caller:
            held = [await caller.send("run", {"do": "hold"}) for _ in range(4)]
            await until(lambda: marks.exists() and marks.read_text().count("run") == 4)
            for _ in range(3):
                process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.05)
            for request_id in held:
                assert "shutting down" in (await caller.reply(request_id))["error"]
        assert process.stderr is not None
        said = (await process.stderr.read()).decode()
        assert await process.wait() == 0
        assert "Traceback" not in said
        assert "Error" not in said
        # The runs are held by both: a worker that is told to end cancels them and leaves `serving()`, once.
        lines = marks.read_text().splitlines()
        assert sorted(line.split()[0] for line in lines) == ["entered"] * 2 + ["left"] * 2 + ["run"] * 4
        assert not any(alive(child.pid) for child in family)


async def test_row_30_with_its_supervisor_crashed_a_server_fails_all_it_has_and_exits_with_a_failure() -> None:
    async with broker("envs:scripted", 2, before=BROKEN) as (process, address):
        family = psutil.Process(process.pid).children(recursive=True)
        with Caller(address) as caller:
            held = [await caller.send("run", {"do": "hold"}) for _ in range(8)]
            assert (await caller.run())["success"]
            os.kill(family[0].pid, signal.SIGKILL)
            for request_id in held:
                assert "a bug in the supervisor" in (await caller.reply(request_id))["error"]
        assert process.stderr is not None
        said = (await process.stderr.read()).decode()
        assert await process.wait() == 1
        assert "the pool's supervisor failed" in said
        assert "RuntimeError: a bug in the supervisor" in said
        assert not any(alive(child.pid) for child in family)
