"""What the system tells of a worker's processes, and of the stacks that it writes down."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from envserver import proc
from envserver.hung import Seen, cpu_share
from envserver.proc import Process, look, parse_stat
from envserver.stacks import MAX_BYTES, MAX_FRAMES, beat, read_stacks, wanted
from tests.helpers import until

BURN = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"

TREE = f"""
import subprocess, sys
burn = [sys.executable, "-c", {BURN + "print('burnt', flush=True); input()"!r}]
child = subprocess.Popen(burn, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print(child.stdout.readline(), end="", flush=True)
input()
child.communicate("\\n")  # it ends, and its exit status is collected
print("collected", flush=True)
input()
"""


@pytest.fixture(params=["/proc", "psutil"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "psutil":
        pytest.importorskip("psutil")
        monkeypatch.setattr(proc, "PROC", "/nowhere")
    elif not os.path.exists("/proc/self/stat"):
        pytest.skip("no /proc here")
    return str(request.param)


@pytest.fixture
def tree() -> Iterator["subprocess.Popen[str]"]:
    """A process with a child that has used 0.3 s of CPU, in a group of its own as a worker is."""
    process = subprocess.Popen(
        [sys.executable, "-c", TREE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    )
    with process:
        yield process
        os.killpg(process.pid, signal.SIGKILL)


def seen(pid: int) -> Seen:
    found = look([pid])[pid]
    assert found is not None
    return found


def step(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def go_on(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_the_cpu_of_children_counts_while_they_live_and_when_they_have_ended(
    system: str, tree: "subprocess.Popen[str]"
) -> None:
    nothing = Seen(time.monotonic(), "S")
    assert step(tree) == "burnt\n"
    living = seen(tree.pid)
    assert len(living.cpu) == 2
    assert sum(living.cpu.values()) >= 0.25
    assert cpu_share(nothing, living) * (living.at - nothing.at) >= 0.25
    go_on(tree)
    assert step(tree) == "collected\n"
    ended = seen(tree.pid)
    assert len(ended.cpu) == 1
    assert ended.reaped >= 0.25
    assert cpu_share(living, ended) * (ended.at - living.at) < 0.25, (
        "what moved to its parent's account is not counted twice"
    )


async def test_a_stopped_process_is_told_from_one_that_waits(system: str, tree: "subprocess.Popen[str]") -> None:
    assert step(tree) == "burnt\n"
    await until(lambda: seen(tree.pid).state == "S")
    tree.send_signal(signal.SIGSTOP)
    await until(lambda: seen(tree.pid).state == "T")
    tree.send_signal(signal.SIGCONT)
    await until(lambda: seen(tree.pid).state == "S")
    tree.kill()
    await until(lambda: seen(tree.pid).state == "Z")


def test_what_does_not_exist_cannot_be_seen(system: str) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert look([process.pid]) == {process.pid: None}


def test_one_that_lost_its_parent_is_still_of_the_group() -> None:
    if not os.path.exists("/proc/self/stat"):
        pytest.skip("no /proc here")
    script = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'])\nprint('on its own', flush=True)"
    )
    nested = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {script!r}])\ninput()"
    process = subprocess.Popen(
        [sys.executable, "-c", nested], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    )
    with process:
        assert step(process) == "on its own\n"
        assert len(seen(process.pid).cpu) >= 2
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("name", ["python", "a b", "evil) R 1 1", "ü\ufffd", ""])
def test_a_programs_name_may_be_anything(name: str) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    numbers = f"4 5 6 0 -1 0 0 0 0 0 {ticks} {2 * ticks} {3 * ticks} {4 * ticks} 20 0 1 0 777 0 0"
    assert parse_stat(f"12 ({name}) T {numbers}\n") == Process(12, "T", 4, 5, 3.0, 7.0, 777)


@pytest.mark.parametrize("text", ["", "12", "12 (x) S 1", "x (y) S " + "1 " * 30])
def test_what_is_no_stat_is_refused(text: str) -> None:
    with pytest.raises((ValueError, IndexError)):
        parse_stat(text)


# Stacks


def test_the_loops_thread_is_shown_first_and_what_is_ours_is_not(tmp_path: Path) -> None:
    frames = "".join(f'  File "/env/deep.py", line {n} in f{n}\n' for n in range(60))
    (tmp_path / "stacks").write_text(
        "Timeout (0:00:10)!\n"
        "Thread 0x00007f0000000003 (most recent call first):\n"
        '  File "/x/envserver/orphan.py", line 41 in watch\n\n'
        "Thread 0x00007f0000000002 (most recent call first):\n"
        '  File "/env/other.py", line 7 in work\n\n'
        f"Thread 0x00007f0000000001 (most recent call first):\n{frames}"
    )
    shown = read_stacks(tmp_path / "stacks").splitlines()
    assert shown[0] == "Thread 0x00007f0000000001 (most recent call first):"
    assert shown[1] == '  File "/env/deep.py", line 0 in f0'
    assert shown[MAX_FRAMES + 1] == "  … 30 more"
    assert shown[-1] == '  File "/env/other.py", line 7 in work'
    assert "orphan" not in "\n".join(shown)


@pytest.mark.parametrize("content", [None, b"", b"\xff\x00 no stacks"])
def test_where_there_are_no_stacks_none_are_read(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "stacks").write_bytes(content)
    assert read_stacks(tmp_path / "stacks") == ""


def test_many_stacks_are_cut(tmp_path: Path) -> None:
    thread = "Thread 0x1 (most recent call first):\n" + '  File "/env/deep.py", line 1 in f\n' * 20 + "\n"
    (tmp_path / "stacks").write_text(thread * 100)
    assert len(read_stacks(tmp_path / "stacks")) <= MAX_BYTES + 2


async def test_a_loop_that_stands_still_has_its_stacks_written_and_one_that_goes_round_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "stacks"
    beating = asyncio.create_task(beat(str(path), 0.5))
    await until(path.exists)
    deadline = time.monotonic() + 30
    while "in test_a_loop_that_stands_still" not in read_stacks(path) and time.monotonic() < deadline:
        time.sleep(0.01)  # noqa: ASYNC251 - this is what is tested
    assert "in test_a_loop_that_stands_still" in read_stacks(path)
    await until(lambda: path.read_bytes() == b"")
    assert "the event loop stood still for" in caplog.text
    beating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beating


async def test_without_a_file_the_stacks_are_on_stderr(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    beating = asyncio.create_task(beat(None, 0.1))
    await asyncio.sleep(0)
    shown, deadline = "", time.monotonic() + 30
    while "in test_without_a_file" not in shown and time.monotonic() < deadline:
        time.sleep(0.01)  # noqa: ASYNC251 - this is what is tested
        shown += capfd.readouterr().err
    assert "in test_without_a_file" in shown
    await until(lambda: "the event loop stood still for" in caplog.text)
    beating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beating
    monkeypatch.setattr(sys, "stderr", None)
    await beat(None, 0.1)  # nowhere to write: it ends


def test_the_switch() -> None:
    assert wanted({})
    assert wanted({"ENVSERVER_STACKS": "1"})
    assert not wanted({"ENVSERVER_STACKS": "0"})
