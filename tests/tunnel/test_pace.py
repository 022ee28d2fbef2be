"""No more requests a minute than the service allows, counted over all processes, and no wait where none is needed."""

import asyncio
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from tests.helpers import until
from tunnel import pace
from tunnel.pace import Pacer

NEVER = 3600.0
"""An interval within which no permit comes back."""


def make(path: Path, limit: int, interval: float = NEVER) -> Pacer:
    return Pacer(path, limit, interval=interval, what="creates of tunnels", setting="creates_per_minute")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ours" / "account" / "creates.sqlite"


PROCESS = """
import asyncio, sys
from pathlib import Path
from tunnel.pace import Pacer

path, limit, interval, permits = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])

class Noted(Pacer):
    def _decide(self, bucket):
        pause = super()._decide(bucket)
        if not pause:
            print(bucket.peek(0).timestamp, flush=True)  # ours, for the file is locked
        return pause

async def main():
    pacer = Noted(path, limit, interval=interval, what="", setting="")
    input()
    await asyncio.gather(*(pacer.wait() for _ in range(permits)))

asyncio.run(main())
"""


def test_several_processes_together_never_exceed_the_limit_in_any_window(path: Path) -> None:
    limit, interval, permits, processes = 5, 0.6, 6, 3
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(path), str(limit), str(interval), str(permits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(processes)
    ]
    for process in running:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0] * processes
    times = sorted(int(line) for text in said for line in text.split())
    assert len(times) == permits * processes
    for first, after in zip(times, times[limit:], strict=False):
        assert after - first > 1000 * interval


async def test_a_burst_up_to_the_limit_passes_at_once_and_the_next_one_waits(path: Path) -> None:
    pacer = make(path, 20)
    await asyncio.gather(*(pacer.wait() for _ in range(20)))
    late = asyncio.create_task(pacer.wait())
    other = asyncio.create_task(make(path, 20).wait())  # of another process, as far as anything is shared
    await until(lambda: pacer._said > 0)
    assert not late.done()
    assert not other.done()
    for task in (late, other):
        task.cancel()
    await asyncio.wait([late, other])


async def test_permits_come_back_and_those_who_wait_are_served_in_order(path: Path) -> None:
    pacer, served = make(path, 1, interval=0.1), []

    async def be_served(number: int) -> None:
        await pacer.wait()
        served.append(number)

    await asyncio.gather(*(be_served(number) for number in range(5)))
    assert served == list(range(5))


@pytest.mark.parametrize("times", [1, 2])
async def test_whoever_is_cancelled_while_it_waits_takes_no_permit(path: Path, times: int) -> None:
    pacer = make(path, 1, interval=1.5)
    await pacer.wait()
    first, second = asyncio.create_task(pacer.wait()), asyncio.create_task(pacer.wait())
    await until(lambda: pacer._said > 0)  # the first looks at the file, the second waits for its turn
    third = asyncio.create_task(pacer.wait())
    for _ in range(times):
        first.cancel()
        second.cancel()
        await asyncio.sleep(0)
    await asyncio.wait([first, second])
    assert first.cancelled()
    assert second.cancelled()
    await third


async def test_the_loop_goes_on_while_another_process_holds_the_file(path: Path) -> None:
    pacer = make(path, 1)
    path.parent.mkdir(parents=True)
    with FileLock(path.with_suffix(".lock")):
        waiting = asyncio.create_task(pacer.wait())
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not waiting.done()
    await waiting


async def test_only_a_wait_of_more_than_a_moment_is_said_and_only_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short = make(path.with_name("short.sqlite"), 1, interval=0.1)
    for _ in range(3):
        await short.wait()
    assert caplog.text == ""
    pacer = make(path, 1)
    await pacer.wait()
    waiting = [asyncio.create_task(pacer.wait()) for _ in range(3)]
    await until(lambda: caplog.records)
    waiting[0].cancel()
    await asyncio.wait([waiting[0]])
    for _ in range(20):
        await asyncio.sleep(0.005)
    (record,) = caplog.records
    assert "creates of tunnels wait" in record.getMessage()
    assert "creates_per_minute" in record.getMessage()
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)


async def test_a_clock_that_was_put_back_stops_nobody(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pacer = make(path, 1, interval=60.0)
    now = pace.time.time_ns()
    monkeypatch.setattr(pace.time, "time_ns", lambda: now + 10**9 * 3600)
    await pacer.wait()
    monkeypatch.undo()
    await pacer.wait()


@pytest.mark.parametrize("fault", ["damaged", "no directory", "held for ever"])
async def test_a_file_that_cannot_be_used_is_said_once_and_this_process_counts_for_itself(
    path: Path, fault: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = FileLock(path.with_suffix(".lock"))
    if fault == "no directory":
        path.parent.parent.write_text("a file where the directory should be")
    else:
        path.parent.mkdir(parents=True)
    if fault == "damaged":
        path.write_bytes(b"this is no database" * 1000)  # noqa: ASYNC240 - nobody waits for the loop
    elif fault == "held for ever":
        monkeypatch.setattr(pace, "LOCK_TIMEOUT", 0.05)
        held.acquire()
    pacer = make(path, 3)
    await asyncio.gather(*(pacer.wait() for _ in range(3)))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(path) in record.getMessage()
    late = asyncio.create_task(pacer.wait())
    await until(lambda: pacer._said > 0)
    assert not late.done()
    late.cancel()
    await asyncio.wait([late])
    held.release()


async def test_nobody_else_can_read_the_state(path: Path) -> None:
    await make(path, 1).wait()
    assert (path.parent.stat().st_mode & 0o777, path.parent.parent.stat().st_mode & 0o777) == (0o700, 0o700)
    assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}


def test_one_process_has_one_pacer_for_each_account_and_none_where_there_is_no_limit(tmp_path: Path) -> None:
    assert pace.creates(tmp_path, 5) is pace.creates(tmp_path, 5)
    assert pace.creates(tmp_path, 5) is not pace.creates(tmp_path / "other", 5)
    assert pace.creates(tmp_path, 5) is not pace.deletes(tmp_path, 5)
    assert pace.creates(tmp_path, None) is None
