"""Code of the user's that sees a rollout's requests and answers, and may rewrite them or stop the rollout."""

import asyncio
import copy
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from interception.sse import dumps
from interception.turn import Failure

if TYPE_CHECKING:
    from interception.session import RolloutSession

logger = logging.getLogger("interception")

Hook = Callable[["RolloutSession", dict[str, Any]], "dict[str, Any] | Awaitable[dict[str, Any] | None] | None"]
"""Called with the session and the body; may be async. What it returns replaces the body; None keeps it, with the
changes made in place."""


class StopRollout(Exception):
    """Raised by a hook: the rollout is over. The reason becomes the session's `stop_condition`."""


async def run_request_hooks(session: "RolloutSession", request: dict[str, Any]) -> dict[str, Any]:
    """The request as the hooks leave it. The end of the rollout ends them."""
    hooks = asyncio.ensure_future(_run(session, session.on_request, request))
    session.preparing.add(hooks)
    try:
        return await hooks
    except asyncio.CancelledError:
        if session.released and not _cancelled():
            session.check_open()  # raises what a call of a rollout that is over is told
        raise
    finally:
        session.preparing.discard(hooks)
        hooks.cancel()


async def run_response_hooks(session: "RolloutSession", response: dict[str, Any]) -> dict[str, Any] | None:
    """The answer as the hooks leave it; None where they changed nothing."""
    if not session.on_response:
        return None
    changed = await _run(session, session.on_response, copy.deepcopy(response))
    return None if changed == response else changed


async def _run(session: "RolloutSession", hooks: Iterable[Hook], body: dict[str, Any]) -> dict[str, Any]:
    for hook in hooks:
        try:
            result = hook(session, body)
            if inspect.isawaitable(result):
                result = await result
            if result is not None and not isinstance(result, dict):
                raise TypeError(f"a hook must return a dict or None, not {type(result).__name__}")
            body = body if result is None else result
            dumps(body)  # what is no JSON is the hook's fault, and told as that
        except StopRollout as stop:
            session.stop(str(stop) or "stopped by a hook")
            raise Failure(400, f"the rollout was stopped: {session.stop_condition}") from stop
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and _cancelled():
                raise  # it is us who are cancelled, not something the hook waited for
            logger.exception("a hook of session %s failed", session.id)
            session.fail(error if isinstance(error, Exception) else RuntimeError(f"a hook failed: {error!r}"))
            raise Failure(500, "a hook of the rollout failed", {"x-should-retry": "false"}) from error
    return body


def _cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
