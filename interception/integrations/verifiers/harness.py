"""A harness whose tunnel was lost: it is ended, and its rollout hears why."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from verifiers.v1.errors import RolloutError
from verifiers.v1.harness import HarnessSession

from interception.integrations.verifiers.losses import watch_of
from interception.integrations.verifiers.verdict import was_at_fault
from tunnel.teardown import run_to_end

logger = logging.getLogger("interception")

END_TIMEOUT = 30.0
"""Seconds that ending a harness may take (a remote runtime is asked for it); then its rollout goes on without it."""

Turn = Callable[..., Awaitable[None]]


def guarded(turn: Turn, grace: float) -> Turn:
    """`HarnessSession.turn` that raises verifiers' `TunnelError` soon after a tunnel of its rollout was lost.

    A harness behind a dead URL hangs or gives up, and exits as it likes. It has `grace` seconds to end by itself. What
    is cancelled then is a task of ours: a cancelled rollout would end the whole eval.
    """

    async def guarded_turn(self: HarnessSession, messages: Any = None) -> None:
        watched = watch_of(self.trace.id)
        if watched is None:  # not on a server of ours
            return await turn(self, messages)
        work = asyncio.ensure_future(turn(self, messages))
        lost = asyncio.create_task(watched.lost.wait())
        try:
            await asyncio.wait([work, lost], return_when=asyncio.FIRST_COMPLETED)
            if watched.error is not None:
                await asyncio.wait([work], timeout=grace)
        finally:
            lost.cancel()
            if not work.done():
                await run_to_end(_end(work, self.trace.id))
        failure = None if work.cancelled() else work.exception()
        if watched.error is None and isinstance(failure, RolloutError) and await was_at_fault(watched):
            # Mended meanwhile, perhaps; this harness has not lived to see it.
            watched.lose(f"the tunnel was lost: it did not serve when the harness failed: {failure}", failure)
        if watched.error is not None:
            # Raised here, so that verifiers need not find it there and make it its own cause.
            watched.session.error = None
            raise watched.error
        return work.result()

    return guarded_turn


async def _end(work: "asyncio.Future[None]", trace_id: str) -> None:
    work.cancel()
    await asyncio.wait([work], timeout=END_TIMEOUT)
    if not work.done():
        logger.error("rollout %s: its harness did not end within %.0f s of its cancellation", trace_id, END_TIMEOUT)
    elif not work.cancelled():
        work.exception()
