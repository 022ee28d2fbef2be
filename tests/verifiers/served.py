"""An env whose answers verifiers 0.4.0's client understands: deltas of a trace, then an episode."""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from envserver import Emit

ENDED = "SERVED_ENV_ENDED"
"""Names a file that is made when a run that hangs is cancelled."""


class ServedEnv:
    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    async def run(self, request: dict[str, Any], emit: Emit) -> dict[str, Any]:
        task = request["task_data"]
        # Made by hand: importing verifiers takes ten seconds, and each worker would.
        name, of_task = uuid.uuid4().hex, {"type": "Task", "data": task}
        header = {"version": 1, "id": name, "verifiers": {"version": "0.4.0"}, "task": of_task}
        await emit({"trace": name, "open": header, "set": {"agent": {"config": {}}, "info": {"pid": os.getpid()}}})
        match task["prompt"]:
            case "die":
                os.abort()
            case "raise":
                raise LookupError("no such task")
            case "hang":
                try:
                    await asyncio.Event().wait()
                finally:
                    Path(os.environ[ENDED]).touch()  # noqa: ASYNC240
        await emit({"trace": name, "set": {"rewards": {"right": {"score": 1.0}}, "info": {"model": request["model"]}}})
        head = {"id": name, "env": {"id": "served"}, "task": of_task, "ok": True}
        return {"head": head, "traces": [{"id": name, "nodes": 0, "calls": 0}]}


def make() -> ServedEnv:
    return ServedEnv()
