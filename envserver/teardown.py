"""The one idiom for work that must end whatever happens to the caller."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

logger = logging.getLogger("envserver")

T = TypeVar("T")


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end and return its result, however often the caller is cancelled meanwhile.

    The cancellation is raised once the work has ended; a failure of the work is then logged, for nobody is left to
    catch it.
    """
    task = asyncio.ensure_future(work)
    asyncio.tasks._unregister_task(task)  # only its owner cancels it: not `asyncio.run` at a second Ctrl-C
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
