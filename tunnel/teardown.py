"""The one idiom for work that must end whatever happens to the caller."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

logger = logging.getLogger("tunnel")

T = TypeVar("T")


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end and return its result, however often the caller is cancelled meanwhile.

    The cancellation is raised once the work has ended; a failure of the work is then logged, for nobody is left
    to catch it. Everything that releases a resource (a registration, a process, a port) goes through here.
    """
    task = protected(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled() and (failure := task.exception()) is not None:
        logger.error("teardown failed after a cancellation: %s", failure, exc_info=failure)
    raise cancelled


def protected(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that only its owner cancels. `asyncio.run` cancels all it knows of when it is left early, as at a second
    Ctrl-C, and then waits for them: a task it does not know of is waited for by whoever waits for its result."""
    task = asyncio.ensure_future(work)
    asyncio.tasks._unregister_task(task)
    return task


async def cancel_and_wait(task: asyncio.Task[Any]) -> None:
    """Cancel `task` and return once it has ended; its result or failure is dropped. Call it inside `run_to_end`."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()
