"""The envs of the env server benchmark: one that does what a request of its client says, one that cannot be loaded."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from envserver import Emit


class Tiny:
    """See `benchmarks.envserver_client` for its requests."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    async def run(self, request: dict[str, Any], emit: Emit) -> dict[str, Any]:
        for _ in range(request["deltas"]):
            await emit({"pid": os.getpid(), "text": request["text"]})
        if request["hold"]:
            await asyncio.Event().wait()
        return {"pid": os.getpid()}


def crashing(file: str) -> Tiny:
    """Writes when it did not come up to `file`."""
    Path(file).write_text(str(time.monotonic()))
    raise RuntimeError("the env cannot be loaded")
