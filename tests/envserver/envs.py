"""Envs for the tests of the pool: what they do is in the request, or was told when they were made."""

import asyncio
import gc
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import zmq

from envserver.env import Emit
from envserver.outbox import Outbox


class Scripted:
    """Does what `request["do"]` says; every reply has the worker's `pid`."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    async def run(self, request: dict[str, Any], emit: Emit) -> dict[str, Any]:
        for number in range(request.get("deltas", 0)):
            await emit({"number": number, "blob": b"x" * request.get("size", 0)})
        match request.get("do", "reply"):
            case "hold":
                await asyncio.Event().wait()
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "deliver and die":
                # All that was sent is in the kernel before it dies.
                (outbox,) = [found for found in gc.get_objects() if isinstance(found, Outbox)]
                while not outbox.empty:  # noqa: ASYNC110 - it sends by itself
                    await asyncio.sleep(0.01)
                (router,) = [x for x in gc.get_objects() if isinstance(x, zmq.Socket) and x.type == zmq.ROUTER]
                context = router.context
                router.close(linger=-1)
                context.term()
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(request["status"])
            case "fork and die":
                # A child that holds all of this process's descriptors, and outlives it outside of its group.
                if os.fork() == 0:
                    os.setsid()
                    signal.pthread_sigmask(signal.SIG_SETMASK, [])
                    signal.sigtimedwait([signal.SIGUSR1], request["seconds"])
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGKILL)
        return {"pid": os.getpid(), "echo": request.get("echo"), "size": len(request.get("blob", b""))}


def scripted() -> Scripted:
    return Scripted()


def failing(message: str) -> Scripted:
    print("about to fail")
    raise RuntimeError(message)


def killed(counter: str, times: int) -> Scripted:
    """Is killed while it loads, so many times; `counter` is a file that remembers how often it was."""
    path = Path(counter)
    done = len(path.read_text()) if path.exists() else 0
    if done < times:
        path.write_text("x" * (done + 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return Scripted()


def gated(gate: str) -> Scripted:
    """Loads for as long as there is no file `gate`, or fails if that says so."""
    path = Path(gate)
    while not path.exists():
        time.sleep(0.01)
    if path.read_text() == "fail":
        raise RuntimeError("the gate says fail")
    return Scripted()
