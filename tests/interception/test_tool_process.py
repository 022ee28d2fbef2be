"""Tools in a process of their own: how it starts, how it ends, and that nothing of it is left."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from interception.tools import OutcomeUnknownError, ToolServer
from tests.helpers import until
from tests.interception.fakes import FakeTunnel, other_tasks
from tests.interception.tool_module import SPEC
from tests.interception.tool_rollouts import Rollout, rollout, text
from tunnel import (
    TunnelError,
)

FAILING = "tests.interception.failing_tools"


class TestItsProcess:
    async def test_one_that_crashes_ends_its_rollouts_with_a_reason(self) -> None:
        async def play() -> None:
            async with rollout(ToolServer(f"{SPEC}:tools")) as running:
                with pytest.raises(OutcomeUnknownError):
                    await running.client().call("crash", {"status": 3})
                await running.session.failed.wait()

        with pytest.raises(TunnelError, match="its process exited with status 3"):
            await play()

    async def test_one_that_is_killed_too(self) -> None:
        server = ToolServer(f"{SPEC}:tools")

        async def play() -> None:
            async with rollout(server) as running:
                os.kill(int(text(await running.client().call("pid"))), signal.SIGKILL)
                await running.session.failed.wait()

        with pytest.raises(TunnelError, match="its process was ended by signal 9"):
            await play()
        with pytest.raises(TunnelError, match="make a new one"):
            await server.start()

    @pytest.mark.parametrize(
        ("spec", "why"),
        [
            ("tests.interception.no_such_module:tools", "ModuleNotFoundError"),
            (f"{FAILING}:no_such_tools", "AttributeError"),
            (f"{FAILING}:nothing", "TypeError: tools must be a list of functions"),
            (f"{FAILING}:failing", "LookupError: the tools' own database is down"),
            (f"{FAILING}:failing_at_length", "LookupError: xxx"),
        ],
    )
    async def test_one_that_cannot_start_says_why_and_leaves_nothing(self, spec: str, why: str) -> None:
        before, tasks = children(), other_tasks()
        server = ToolServer(spec)
        with pytest.raises(TunnelError, match=why):
            await server.start()
        assert (children(), other_tasks()) == (before, tasks)
        await server.stop()

    async def test_stopping_leaves_neither_it_nor_what_its_tools_started(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("PYTHONWARNINGS", "always::ResourceWarning")
        before = children()
        async with rollout(ToolServer(f"{SPEC}:tools")) as running:
            client = running.client()
            pids = [int(text(await client.call(tool))) for tool in ("pid", "child", "daemon")]
        await until(lambda: not any(alive(pid) for pid in pids))
        assert children() == before
        assert "unclosed" not in capfd.readouterr().err

    async def test_one_whose_tool_holds_it_for_ever_is_stopped_all_the_same(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("interception.tools.process.STOP_TIMEOUT", 0.5)
        async with rollout(ToolServer(f"{SPEC}:tools")) as running:
            client = running.client()
            pid = int(text(await client.call("pid")))
            held = asyncio.create_task(client.call("hold"))
            await until(lambda: psutil.Process(pid).status() == psutil.STATUS_SLEEPING and running_count(running) == 1)
        with pytest.raises(OutcomeUnknownError):
            await held
        await until(lambda: not alive(pid))

    async def test_its_launcher_is_killed_and_it_is_gone_with_all_it_started(self, tmp_path: Path) -> None:
        """One that serves, one that a tool holds, and one that is about to start."""
        (tmp_path / "endless.py").write_text(ENDLESS)
        launcher = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", LAUNCHER, f"{SPEC}:tools", str(tmp_path)),
            stdout=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        assert launcher.stdout is not None
        pids = [int(pid) for pid in (await launcher.stdout.readline()).split()]
        family = [process.pid for process in psutil.Process(launcher.pid).children(recursive=True)]
        assert set(pids) <= set(family)
        assert len(family) >= 8, "three watchdogs, their three programs, and what a tool started"
        launcher.kill()
        await launcher.wait()
        await until(lambda: not any(alive(pid) for pid in family))

    @pytest.mark.parametrize("steps", [0, 1, 2, 4, 8, 16, 48, 112])
    async def test_a_start_that_is_cancelled_twice_leaves_nothing(self, steps: int) -> None:
        before, tasks = children(), other_tasks()
        server = ToolServer(f"{SPEC}:tools", tunnel=FakeTunnel(held=steps % 16 == 0))
        starting = asyncio.create_task(server.start())
        for _ in range(steps):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await until(lambda: children() == before)
        assert other_tasks() == tasks

    async def test_a_start_that_is_cancelled_waits_for_no_import(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "endless.py").write_text(ENDLESS)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr("interception.tools.process.STOP_TIMEOUT", 3600.0)
        before = children()
        starting = asyncio.create_task(ToolServer("endless:tools").start())
        await until((tmp_path / "begun").exists)
        starting.cancel()
        async with asyncio.timeout(30):
            await asyncio.wait([starting])
        assert starting.cancelled()
        assert children() == before


ENDLESS = """
import pathlib, time
pathlib.Path(__file__).with_name("begun").touch()
time.sleep(3600)
"""

LAUNCHER = """
import asyncio, pathlib, sys
from interception import InterceptionServer
from interception.tools import ToolClient, ToolServer
from tests.interception.fakes import new_session

async def main():
    spec, folder = sys.argv[1:]
    sys.path.append(folder)
    starting = asyncio.create_task(ToolServer("endless:tools").start())
    session = new_session()
    async with InterceptionServer() as server, server.acquire(session) as slot, ToolServer(spec) as idle:
        async with idle.acquire(session, slot) as one, ToolServer(spec) as busy, busy.acquire(session, slot) as two:
            client = ToolClient(one)
            pids = [(await client.call(tool)).structured_content["result"] for tool in ("pid", "child", "daemon")]
            pids.append((await ToolClient(two).call("pid")).structured_content["result"])
            holding = asyncio.create_task(ToolClient(two).call("hold"))
            while not pathlib.Path(folder, "begun").exists():
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            print(*pids, flush=True)
            await asyncio.sleep(3600)

asyncio.run(main())
"""


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True) if alive(process.pid)}


def running_count(running: Rollout) -> int:
    host = running.server._host
    return getattr(host, "_in_flight", 0)
