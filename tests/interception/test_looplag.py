"""The event loop's lag: measured, and what it stood still in is told by place, never by value."""

import asyncio
import logging
import threading
import time
import weakref

import pytest

from interception import InterceptionServer
from interception.looplag import LIMIT, PERIOD, QUIET, LoopWatch
from tests.helpers import until

SECRET = "sk-this-must-not-be-told"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for record in caplog.records if (text := record.getMessage()).startswith("the event loop")]


def block(seconds: float, key: str) -> str:
    time.sleep(seconds)
    return key


def watchers() -> int:
    return sum(thread.name == "event loop lag" for thread in threading.enumerate())


async def test_a_call_that_blocks_is_told_by_its_place_and_how_long(caplog: pytest.LogCaptureFixture) -> None:
    watch = LoopWatch.join()
    try:
        # Again, should the other thread not have got a look on a busy machine.
        for _ in range(20):
            watch._told_at = -QUIET
            await asyncio.sleep(PERIOD)
            block(0.6, SECRET)
            stalls = watch.lag.stalls
            await until(lambda stalls=stalls: watch.lag.stalls > stalls)
            if "test_looplag.py" in lines(caplog)[-1]:
                break
        line = lines(caplog)[-1]
        assert "stood still for" in line
        assert " in interception/test_looplag.py:" in line
        assert " block < interception/test_looplag.py:" in line
        assert SECRET not in caplog.text
        assert watch.lag.max > LIMIT
        assert watch.lag.stalled >= watch.lag.stalls * LIMIT
    finally:
        watch.leave()


async def test_what_it_stood_in_is_not_kept() -> None:
    class Held:
        pass

    def hold() -> weakref.ref[Held]:
        held = Held()
        block(0.6, SECRET)
        return weakref.ref(held)

    watch = LoopWatch.join()
    try:
        await asyncio.sleep(PERIOD)
        held = hold()
        # Else it waits in the frames that the watch still has.
        await until(lambda: held() is None)
    finally:
        watch.leave()


async def test_while_it_stands_still_another_thread_reads_how_late_it_is() -> None:
    watch = LoopWatch.join()
    seen: list[float] = []
    reader = threading.Timer(0.4, lambda: seen.append(watch.lag.last))
    reader.start()
    block(0.8, "")
    reader.join()
    watch.leave()
    assert seen[0] > 0.2


class Moments:
    """A clock, and a loop that calls nothing by itself."""

    def __init__(self) -> None:
        self.now = 100.0
        self.watch = LoopWatch(lambda: self.now)
        self.loop = asyncio.get_running_loop()
        self.watch._next(self.loop)

    def beat(self, late: float, seen: str | None = None) -> None:
        assert self.watch._timer is not None
        self.watch._timer.cancel()
        self.now += PERIOD + late
        self.watch._seen = seen
        self.watch._beat(self.loop)

    def end(self) -> None:
        assert self.watch._timer is not None
        self.watch._timer.cancel()


async def test_what_is_counted_and_how_often_it_is_told(caplog: pytest.LogCaptureFixture) -> None:
    moments = Moments()
    moments.beat(0.0)
    moments.beat(0.2)
    assert (moments.watch.lag.last, moments.watch.lag.stalls) == (pytest.approx(0.2), 0)
    moments.beat(0.5, "a.py:1 f")
    moments.beat(0.3, "a.py:1 f")
    moments.beat(0.3, "a.py:1 f")
    moments.beat(0.1)
    assert len(lines(caplog)) == 1
    moments.beat(QUIET)
    lag = moments.watch.lag
    assert (lag.last, lag.max, lag.stalls, lag.stalled) == pytest.approx((QUIET, QUIET, 4, 1.1 + QUIET))
    assert lines(caplog) == [
        "the event loop stood still for 0.50 s in a.py:1 f",
        "the event loop stood still for 10.00 s in what let no other thread run meanwhile (2 more since the last line)",
    ]
    moments.end()


async def test_a_loop_that_nobody_ran_was_not_late(caplog: pytest.LogCaptureFixture) -> None:
    moments = Moments()
    moments.watch._paused = True
    moments.beat(60.0)
    assert moments.watch.lag.stalls == 0
    assert not lines(caplog)
    moments.end()


async def test_one_watch_a_loop_and_none_when_the_last_server_has_stopped() -> None:
    async with InterceptionServer():
        async with InterceptionServer():
            assert watchers() >= 1
            mine = LoopWatch.join()
            assert mine._users == 3
            mine.leave()
            ended = mine._ended
        assert not ended.is_set()
    assert ended.is_set()
    assert mine._timer is None
    await until(lambda: watchers() == 0)


async def test_without_a_thread_it_is_measured_all_the_same(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr("threading.Thread.start", start)
        watch = LoopWatch.join()
    assert "can't start new thread" in caplog.text
    block(LIMIT + 2 * PERIOD, "")
    await until(lambda: watch.lag.stalls == 1)
    watch.leave()


def test_a_server_that_is_never_stopped_leaves_no_thread_behind_its_loop(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    async def abandoned() -> None:
        LoopWatch.join()

    asyncio.run(abandoned())
    deadline = time.monotonic() + 30
    while watchers() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert watchers() == 0
    assert not lines(caplog)
