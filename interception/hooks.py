"""Code of the user's that sees a rollout's requests and answers, and may rewrite them or stop the rollout."""

import copy
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

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
    """The request as the hooks leave it."""
    return await _run(session, session.on_request, request)


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
        except StopRollout as stop:
            session.stop(str(stop) or "stopped by a hook")
            raise Failure(400, f"the rollout was stopped: {session.stop_condition}") from stop
        except Exception as error:
            logger.exception("a hook of session %s failed", session.id)
            session.fail(error)
            raise Failure(500, "a hook of the rollout failed", {"x-should-retry": "false"}) from error
        if result is not None:
            body = result
    return body
