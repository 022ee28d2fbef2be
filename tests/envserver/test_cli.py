"""`python -m envserver`: what it says, on a terminal and elsewhere, and its exit status."""

import asyncio
import contextlib
import os
import pty
import re
import signal
import sys
import urllib.request
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from envserver import EnvServer
from tests.envserver.scripted import MAKE, ScriptedEnv
from tests.scrapes import Scrape

ADDRESS = re.compile(r"serving on (tcp://127\.0\.0\.1:\d+)")


async def run(*arguments: str, cwd: Path | None = None) -> tuple[int | None, str, str]:
    """Its exit status, and what it said on stdout and stderr."""
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "envserver", *arguments, stdout=PIPE, stderr=PIPE, cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
    )  # fmt: skip
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@contextlib.asynccontextmanager
async def serving(*arguments: str) -> AsyncIterator[tuple[Process, str, list[str]]]:
    """The server, its address, and the lines it has said on stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "envserver", "serve", MAKE, "--address", "tcp://127.0.0.1:0", *arguments, stderr=PIPE
    )
    assert process.stderr is not None
    lines: list[str] = []
    try:
        async with asyncio.timeout(60):
            while not (found := ADDRESS.search("".join(lines))):
                line = (await process.stderr.readline()).decode()
                assert line, lines
                lines.append(line)
        yield process, found[1], lines
        lines += (await process.stderr.read()).decode().splitlines(keepends=True)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_it_serves_until_a_signal(number: int) -> None:
    async with serving() as (process, address, lines):
        status, out, _ = await run("health", address)
        assert (status, out) == (0, "ready 1, starting 0, capacity 128, in flight 0\n")
        status, out, _ = await run("health", address.removeprefix("tcp://"))
        assert status == 0
        process.send_signal(number)
        assert await process.wait() == 0
    assert "Traceback" not in "".join(lines)
    assert any("1 starting" in line for line in lines)


async def test_a_terminal_that_is_closed_ends_it_as_any_signal_does_and_nohup_keeps_it() -> None:
    async with serving("--workers", "2") as (process, _, lines):
        process.send_signal(signal.SIGHUP)
        assert await process.wait() == 0
    assert "no longer serving" in "".join(lines)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does it
    try:
        async with serving() as (process, address, _):
            process.send_signal(signal.SIGHUP)
            assert (await run("health", address))[0] == 0
            process.terminate()
            assert await process.wait() == 0
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_workers_are_shown_as_they_come(tmp_path: Path) -> None:
    async with serving("--workers", "2") as (process, address, lines):
        async with asyncio.timeout(60):
            assert process.stderr is not None
            while "2 ready" not in "".join(lines):
                lines.append((await process.stderr.readline()).decode())
        assert "capacity 256" in (await run("health", address))[1]
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_on_a_terminal_there_is_one_live_line() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "envserver", "serve", MAKE, "--address", "tcp://127.0.0.1:0"]
    process = await asyncio.create_subprocess_exec(
        *command, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    )
    os.close(theirs)
    shown = b""
    try:
        async with asyncio.timeout(60):
            while b"1 ready, 0 in flight" not in shown:
                shown += await asyncio.to_thread(os.read, ours, 4096)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # a terminal that nobody holds any more
            while data := await asyncio.to_thread(os.read, ours, 4096):
                shown += data
        assert await process.wait() == 0
        assert b"\x1b[2K" in shown or b"\r" in shown
        assert b"Traceback" not in shown
    finally:
        os.close(ours)


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["serve", "nowhere:make"], 1, "error: nowhere:make: there is no module 'nowhere'"),
        (["serve", "no colon"], 1, "error: an env is named package.module:factory"),
        (["serve", MAKE, "--kwargs", "{"], 2, "not JSON"),
        (["serve", MAKE, "--kwargs", "[]"], 2, "write a JSON object"),
        (["serve", MAKE, "--workers", "0"], 2, "--workers"),
        (["serve", MAKE, "--workers", "2", "--kill-blocked-after", "3"], 2, "--kill-blocked-after"),
        (["serve", MAKE, "--kill-blocked-after", "20"], 1, "error: kill_blocked_after is for worker processes"),
        (["serve", MAKE, "--max-worker-rss", "500"], 1, "error: max_worker_rss is for worker processes"),
        (
            ["serve", MAKE, "--workers", "2", "--elastic", "--min-workers", "3"],
            1,
            "error: min_workers is at least 1 and",
        ),
        (["serve", MAKE, "--address", "tcp://300.0.0.1:1"], 1, "error: cannot listen on"),
        (["health", "127.0.0.1:1", "--timeout", "0.1"], 1, "error: no answer from tcp://127.0.0.1:1 within 0.1 s"),
        (["health", "http://127.0.0.1:1"], 1, "error: cannot connect to http://127.0.0.1:1"),
    ],
)
async def test_a_foreseeable_fault_is_one_line(arguments: list[str], status: int, says: str) -> None:
    code, _, err = await run(*arguments)
    assert code == status
    assert says in err
    assert "Traceback" not in err


async def test_what_the_env_itself_raises_is_shown_with_its_own_lines() -> None:
    code, _, err = await run("serve", "tests.envserver.scripted:misbehave", "--kwargs", '{"how": "raise"}')
    assert code == 1
    assert "scripted.py" in err
    assert "envserver/env.py" not in err
    assert err.splitlines()[-1].endswith("could not be loaded: ValueError: the weights are missing")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("sys.exit", "error: tests.envserver.scripted:misbehave called sys.exit(0) instead of making an env"),
        ("serving raises", "misbehave could not be served: ValueError: the weights are missing"),
        ("serving exits", "misbehave could not be served: RuntimeError: serving() of the env called sys.exit(0)"),
    ],
)
async def test_an_env_that_prevents_its_serving_is_an_error_in_short(how: str, says: str) -> None:
    arguments = ["tests.envserver.scripted:misbehave", "--kwargs", f'{{"how": "{how}"}}', "--address", "127.0.0.1:0"]
    code, _, err = await run("serve", *arguments)
    assert code == 1
    assert err.splitlines()[-1].endswith(says)
    assert not any(part in err for part in ("Traceback", "asyncio/", "typer", "envserver/server.py"))


async def test_an_env_in_the_current_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text("from tests.envserver.scripted import misbehave\n")
    _, _, err = await run("serve", "my_env:misbehave", "--kwargs", '{"how": "raise"}', cwd=tmp_path)
    assert "the weights are missing" in err


async def test_a_server_without_a_ready_worker_is_not_healthy() -> None:
    async with EnvServer(ScriptedEnv()) as server:
        await server.drain(0)
        status, out, _ = await run("health", server.address)
    assert status == 1
    assert out.startswith("ready 0")


async def test_its_numbers_are_on_a_page_of_their_own() -> None:
    async with serving("--metrics-port", "0", "--workers", "2") as (process, _, lines):
        (url,) = re.findall(r"metrics are on (http://127\.0\.0\.1:\d+/metrics)", "".join(lines))
        page = (await asyncio.to_thread(urllib.request.urlopen, url, timeout=30)).read().decode()
        assert Scrape.read(page, ("envserver_",)).get("envserver_worker_starts_total", name="envserver") == 2
        process.terminate()
        assert await process.wait() == 0
