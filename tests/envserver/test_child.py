"""A process of ours, from exec until it has been reaped: how it ended, what it said last, and what is left of it."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import envserver.child as child_module
from envserver import EnvServerError
from envserver.child import TAIL_BYTES, TAIL_LINES, Child, last_lines
from tests.envserver.processes import alive, descriptors, exists, read_pid
from tests.helpers import until

MISBEHAVE = "tests.envserver.scripted:misbehave"


def spawn(folder: Path, how: str, *, on_exit: Any = None, **kwargs: Any) -> tuple[Child, asyncio.Event]:
    """A child whose env does `how` while it is made."""
    ended = asyncio.Event()

    def exited(child: Child) -> None:
        assert child.returncode is not None
        assert not exists(child.pid), "reaped before it is told"
        ended.set()

    job = {
        "role": "worker",
        "env": MISBEHAVE,
        "env_kwargs": {"how": how, "folder": str(folder), **kwargs},
        "address": f"ipc://{folder}/s",
        "multiplex": 1,
        "log_setup": None,
        "drain_timeout": 0.0,
        "stacks_path": None,
        "stacks_after": 10.0,
    }
    return Child.spawn(job, log_path=folder / "log", on_exit=on_exit or exited), ended


async def end_of(child: Child, ended: asyncio.Event) -> Child:
    async with asyncio.timeout(60):
        await ended.wait()
    child.close()
    return child


@pytest.mark.parametrize(
    ("how", "number", "returncode", "reason"),
    [
        ("exit", 0, 0, "exited with status 0"),
        ("exit", 3, 3, "exited with status 3"),
        ("kill", signal.SIGKILL, -9, "killed by SIGKILL"),
        ("kill", signal.SIGSEGV, -11, "killed by SIGSEGV"),
        ("kill", signal.SIGRTMIN + 3, -(signal.SIGRTMIN + 3), f"killed by signal {signal.SIGRTMIN + 3}"),
        ("abort", 0, -6, "killed by SIGABRT"),
        ("raise", 0, 1, "exited with status 1"),
    ],
)
async def test_how_it_ended_is_known_at_once(
    tmp_path: Path, how: str, number: int, returncode: int, reason: str
) -> None:
    """Row 8."""
    child = await end_of(*spawn(tmp_path, how, number=int(number)))
    assert child.returncode == returncode
    assert child.exit_reason == reason
    assert child.seconds > 0


async def test_without_pidfds_it_is_found_by_looking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(pid: int) -> int:
        raise PermissionError("seccomp")

    monkeypatch.setattr(os, "pidfd_open", refused)
    child, ended = spawn(tmp_path, "wait")
    await read_pid(tmp_path / "waiting")
    child.send_signal(signal.SIGKILL)
    assert (await end_of(child, ended)).exit_reason == "killed by SIGKILL"


async def test_a_status_that_somebody_else_collected_is_no_crash(tmp_path: Path) -> None:
    child, ended = spawn(tmp_path, "wait")
    child.send_signal(signal.SIGKILL)
    os.waitpid(child.pid, 0)  # noqa: ASYNC222 - the loop must not be faster
    await end_of(child, ended)
    assert child.returncode == child_module.UNKNOWN_STATUS
    assert "something else in this process has collected" in child.exit_reason


async def test_its_last_words_are_its_traceback(tmp_path: Path) -> None:
    child = await end_of(*spawn(tmp_path, "raise"))
    assert child.tail().splitlines()[-1] == "ValueError: the weights are missing"
    assert child.tail().count("the weights are missing") == 2  # the line of code, and the error: told once


async def test_chatter_does_not_push_the_traceback_out(tmp_path: Path) -> None:
    child = await end_of(*spawn(tmp_path, "raise and chatter"))
    assert "chatter\nchatter" in child.tail()
    assert child.tail().splitlines()[-1] == "ValueError: the weights are missing"


async def test_a_native_abort_leaves_its_stack(tmp_path: Path) -> None:
    child = await end_of(*spawn(tmp_path, "abort"))
    assert "Fatal Python error: Aborted" in child.tail()
    assert "scripted.py" in child.tail()


async def test_the_tail_is_of_this_child_only_and_can_be_shown(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("what another one said\n")
    said = b"\x1b[31mred\x1b[0m and \xff\xfe\x00 bytes\n"
    child = await end_of(*spawn(tmp_path, "exit", say=said.hex()))
    assert child.tail() == "red and \ufffd\ufffd\ufffd bytes"
    assert (tmp_path / "log").read_bytes().startswith(b"what another one said\n")


def test_a_tail_is_at_most_50_lines_and_8_kib() -> None:
    assert last_lines(b"".join(b"line %d\n" % n for n in range(1000))).splitlines() == [
        f"line {n}" for n in range(1000 - TAIL_LINES, 1000)
    ]
    long = last_lines(b"".join(b"%d " % n * 100 + b"\n" for n in range(1000, 1100)))
    assert len(long) <= TAIL_BYTES
    assert {len(line.split()) for line in long.splitlines()} == {100}, "only whole lines"
    assert len(last_lines(b"x" * 100_000)) == TAIL_BYTES
    assert last_lines(b"") == ""


async def test_a_flood_of_output_does_not_block_it_nor_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 19: 200 MB."""
    monkeypatch.setattr(child_module, "LOG_CAP", 4 << 20)
    monkeypatch.setattr(child_module, "LOG_CHECK", 0.05)
    child, ended = spawn(tmp_path, "flood", say=b"the head of it\n".hex(), number=200_000_000)
    await until(lambda: (tmp_path / "flooded").exists(), 120)
    log = tmp_path / "log"
    await until(lambda: log.stat().st_size <= 4 << 20)
    text = log.read_bytes()
    assert text.startswith(b"the head of it\n")
    assert b"bytes were cut here" in text
    child.send_signal(signal.SIGKILL)
    await end_of(child, ended)
    assert {*child.tail().splitlines()[-1]} == {"x"}  # perhaps not all of it: what comes while it is cut may be lost


async def test_its_death_is_seen_while_a_process_it_forked_holds_all_it_inherited(tmp_path: Path) -> None:
    child, ended = spawn(tmp_path, "grandchild")
    await end_of(child, ended)
    grandchild = await read_pid(tmp_path / "grandchild")
    assert alive(grandchild), "the test has shown nothing"
    os.kill(grandchild, signal.SIGKILL)
    assert child.exit_reason == "killed by SIGKILL"


async def test_what_it_leaves_behind_in_its_group_goes_with_it(tmp_path: Path) -> None:
    await end_of(*spawn(tmp_path, "straggler"))
    straggler = await read_pid(tmp_path / "straggler")
    await until(lambda: not alive(straggler))


async def test_signals_reach_it_and_nobody_else_once_it_has_ended(tmp_path: Path) -> None:
    child, ended = spawn(tmp_path, "wait")
    await read_pid(tmp_path / "waiting")
    child.send_signal(signal.SIGTERM)
    await end_of(child, ended)
    assert child.exit_reason == "killed by SIGTERM"
    child.send_signal(signal.SIGKILL)  # no error, and no process with that id is looked for


async def test_many_kills_leave_no_descriptor_no_zombie_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = descriptors()
    for _ in range(10):
        children = [spawn(tmp_path, "wait") for _ in range(2)]
        for child, _ in children:
            child.send_signal(signal.SIGKILL)  # also before it has read its configuration
        for child, ended in children:
            await end_of(child, ended)
            assert not exists(child.pid)
    assert descriptors() == before
    assert [*folder.iterdir()] == []


async def test_closing_one_that_runs_ends_and_reaps_it(tmp_path: Path) -> None:
    before = descriptors()
    told: list[Child] = []
    child, _ = spawn(tmp_path, "wait", on_exit=told.append)
    child.close()
    await until(lambda: not exists(child.pid))
    await until(lambda: descriptors() == before)
    assert told == []


@pytest.mark.parametrize("kwargs", [{"it": object()}, {"it": {1, 2}}, {"it": b"bytes"}])
async def test_a_configuration_that_is_not_json_is_an_error_here_and_leaves_nothing(
    tmp_path: Path, kwargs: dict[str, Any]
) -> None:
    before = descriptors()
    with pytest.raises(EnvServerError, match="must be JSON"):
        spawn(tmp_path, "wait", **kwargs)
    assert descriptors() == before
    assert os.listdir(tmp_path) == []


async def test_a_process_that_cannot_be_started_is_an_error_here_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descriptors()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(EnvServerError, match="cannot be started"):
        spawn(tmp_path, "wait")
    with pytest.raises(EnvServerError, match=r"the log .* cannot be written"):
        spawn(tmp_path / "no such folder", "wait")
    assert descriptors() == before


async def test_no_secret_of_the_configuration_can_be_seen_from_outside(tmp_path: Path) -> None:
    child, ended = spawn(tmp_path, "wait", say=b"sk-0123456789".hex())
    pid = await read_pid(tmp_path / "waiting")
    outside = b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))  # noqa: ASYNC240
    assert b"sk-0123456789".hex().encode() not in outside
    child.send_signal(signal.SIGKILL)
    await end_of(child, ended)


PARENT = """
import asyncio, sys
from pathlib import Path
from tests.envserver.test_child import spawn

async def main():
    spawn(Path(sys.argv[1]), sys.argv[2])
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["block", "wait"])
async def test_it_ends_with_its_parent_also_while_python_code_blocks_it(tmp_path: Path, how: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), how])  # noqa: ASYNC220
    pid = await read_pid(tmp_path / ("blocking" if how == "block" else "waiting"))
    parent.kill()
    await asyncio.to_thread(parent.wait)
    await until(lambda: not alive(pid))


async def test_it_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    """Row 10. The kernel's death signal is tied to that thread: it must not be armed then."""
    children: list[Child] = []

    async def start() -> None:
        children.append(spawn(tmp_path, "wait", on_exit=lambda child: None)[0])

    thread = threading.Thread(target=lambda: asyncio.run(start()))
    thread.start()
    await asyncio.to_thread(thread.join)
    pid = await read_pid(tmp_path / "waiting")  # written after it was armed or not, and after the thread had ended
    assert alive(pid)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)  # noqa: ASYNC222 - it is being killed
    children[0]._process.returncode = 0  # its loop has gone: nobody else tells subprocess that it was reaped
    children[0]._files.close()


async def test_starting_one_does_not_hold_up_the_loop(tmp_path: Path) -> None:
    """A configuration larger than a pipe takes: a start that waits for its reader would never end."""
    started = time.monotonic()
    child, ended = spawn(tmp_path, "wait", say="00" * 2_000_000)
    assert time.monotonic() - started < 30
    child.send_signal(signal.SIGKILL)
    await end_of(child, ended)
