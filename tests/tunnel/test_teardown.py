"""Work that must end whatever happens to the caller, however often it is cancelled."""

import asyncio
import gc
import logging

import pytest

from tests.helpers import until
from tunnel.teardown import cancel_and_wait, run_to_end


class Work:
    """Begins, waits to be let go, ends; fails with `failure` if there is one."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.begun = self.ended = 0
        self.go = asyncio.Event()
        self._failure = failure

    async def __call__(self) -> str:
        self.begun += 1
        await self.go.wait()
        await asyncio.sleep(0)
        self.ended += 1
        if self._failure is not None:
            raise self._failure
        return "released"


class TestRunToEnd:
    async def test_the_result_comes_back(self) -> None:
        work = Work()
        work.go.set()
        assert await run_to_end(work()) == "released"

    async def test_a_failure_comes_back_and_is_not_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        work = Work(OSError("port stuck"))
        work.go.set()
        with pytest.raises(OSError, match="port stuck"):
            await run_to_end(work())
        assert not caplog.records

    @pytest.mark.parametrize("times", [1, 2, 20])
    async def test_however_often_the_caller_is_cancelled_the_work_ends_first(self, times: int) -> None:
        before = asyncio.all_tasks()
        work = Work()
        caller = asyncio.create_task(run_to_end(work()))
        await until(lambda: work.begun)
        for _ in range(times):
            caller.cancel()
            for _ in range(3):
                await asyncio.sleep(0)
            assert not caller.done()
            assert not work.ended
        work.go.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert caller.cancelled()
        assert (work.begun, work.ended) == (1, 1)
        assert asyncio.all_tasks() == before

    async def test_a_caller_that_was_cancelled_beforehand_still_does_the_work(self) -> None:
        work = Work()
        work.go.set()

        async def cancelled_already() -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await run_to_end(work())

        caller = asyncio.create_task(cancelled_already())
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert work.ended == 1

    async def test_the_reason_of_the_cancellation_is_kept(self) -> None:
        work = Work()
        caller = asyncio.create_task(run_to_end(work()))
        await until(lambda: work.begun)
        caller.cancel("the rollout was stopped")
        await asyncio.sleep(0)
        work.go.set()
        with pytest.raises(asyncio.CancelledError, match="the rollout was stopped"):
            await caller

    async def test_a_timeout_of_the_caller_is_a_timeout_once_the_work_has_ended(self) -> None:
        work = Work()

        async def impatient() -> None:
            async with asyncio.timeout(0):
                await run_to_end(work())

        caller = asyncio.create_task(impatient())
        await until(lambda: work.begun)
        work.go.set()
        with pytest.raises(TimeoutError):
            await caller
        assert work.ended == 1

    async def test_a_failure_after_a_cancellation_is_logged_and_the_cancellation_raised(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        work = Work(OSError("port stuck"))
        caller = asyncio.create_task(run_to_end(work()))
        await until(lambda: work.begun)
        caller.cancel()
        await asyncio.sleep(0)
        work.go.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        [record] = caplog.records
        assert (record.name, record.levelno) == ("tunnel", logging.ERROR)
        assert "port stuck" in record.getMessage()
        assert record.exc_info is not None

    async def test_a_success_after_a_cancellation_is_not_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        work = Work()
        caller = asyncio.create_task(run_to_end(work()))
        await until(lambda: work.begun)
        caller.cancel()
        await asyncio.sleep(0)
        work.go.set()
        await asyncio.wait([caller])
        assert caller.cancelled()
        assert not caplog.records


class TestCancelAndWait:
    async def test_it_returns_once_the_task_has_ended(self) -> None:
        ended = False
        begun = asyncio.Event()

        async def slow_to_end() -> None:
            nonlocal ended
            try:
                begun.set()
                await asyncio.Event().wait()
            finally:
                for _ in range(5):
                    await asyncio.sleep(0)
                ended = True

        task = asyncio.create_task(slow_to_end())
        await begun.wait()
        await cancel_and_wait(task)
        assert ended
        assert task.cancelled()

    async def test_a_task_that_never_ran_or_has_ended_is_no_trouble(self) -> None:
        async def quick() -> str:
            return "done"

        never_ran = asyncio.create_task(quick())
        await cancel_and_wait(never_ran)
        assert never_ran.cancelled()
        ended = asyncio.create_task(quick())
        await ended
        await cancel_and_wait(ended)
        assert ended.result() == "done"

    async def test_a_failure_of_the_task_is_dropped(self, caplog: pytest.LogCaptureFixture) -> None:
        begun = asyncio.Event()

        async def fails_when_cancelled() -> None:
            try:
                begun.set()
                await asyncio.Event().wait()
            finally:
                raise OSError("port stuck")

        task = asyncio.create_task(fails_when_cancelled())
        await begun.wait()
        await cancel_and_wait(task)
        del task
        gc.collect()  # now it would be said that "Task exception was never retrieved"
        assert not caplog.records

    async def test_inside_run_to_end_a_cancelled_caller_leaves_no_task(self) -> None:
        before = asyncio.all_tasks()
        release = asyncio.Event()
        begun = asyncio.Event()

        async def slow_to_end() -> None:
            try:
                begun.set()
                await asyncio.Event().wait()
            finally:
                await release.wait()

        task = asyncio.create_task(slow_to_end())
        await begun.wait()
        caller = asyncio.create_task(run_to_end(cancel_and_wait(task)))
        for _ in range(3):
            await asyncio.sleep(0)
            caller.cancel()
        assert not task.done()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert asyncio.all_tasks() == before
