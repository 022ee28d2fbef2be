"""Envs that do what a test asks of them, also in processes of their own: `tests.envserver.scripted:make`."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from envserver import Emit

MAKE = "tests.envserver.scripted:make"


class ScriptedEnv:
    """A run does what its request says: `do`, and what that needs."""

    def __init__(self, marks: str | None = None) -> None:
        self.marks = None if marks is None else Path(marks)
        self.emits: list[Emit] = []
        self.started = 0
        self.cancelled = 0

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        self._mark("entered")
        try:
            yield
        finally:
            self._mark("left")

    async def run(self, request: dict[str, Any], emit: Emit) -> dict[str, Any]:
        self.started += 1
        self.emits.append(emit)
        for number in range(request.get("deltas", 0)):
            await emit({"number": number, "text": "x" * request.get("size", 0)})
        match request.get("do"):
            case "raise":
                raise RuntimeError(request["text"])
            case "exit":
                sys.exit(3)
            case "die":
                os.kill(os.getpid(), getattr(signal, request.get("signal", "SIGKILL")))
            case "block":
                time.sleep(request["seconds"])  # noqa: ASYNC251 - on purpose
            case "spawn":
                sleep = [sys.executable, "-c", "import time; time.sleep(3600)"]
                return {"pid": os.getpid(), "spawned": (await asyncio.create_subprocess_exec(*sleep)).pid}
            case "wait":
                self._mark("waiting")
                try:
                    await asyncio.sleep(request.get("seconds", 3600))
                except asyncio.CancelledError:
                    self.cancelled += 1
                    raise
            case "interrupt":
                raise KeyboardInterrupt
            case "return":
                return request["what"]  # type: ignore[no-any-return]
            case "return object":
                return {"it": object()}
            case "return list":
                return [1, 2]  # type: ignore[return-value]
        return {"echo": request.get("value"), "pid": os.getpid()}

    def _mark(self, name: str) -> None:
        if self.marks is not None:
            (self.marks / name).write_text(str(os.getpid()))


class Unservable(ScriptedEnv):
    """Its `serving()` does what its name says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        if self.how == "serving raises":
            raise ValueError("the weights are missing")
        if self.how == "serving exits":
            sys.exit(0)
        yield
        await asyncio.sleep(3600)


def make(marks: str | None = None) -> ScriptedEnv:
    return ScriptedEnv(marks)


def misbehave(how: str, say: str = "", folder: str = "", number: int = 0) -> ScriptedEnv:
    """Does not become an env, or only after a while."""
    if say:
        sys.stdout.buffer.write(bytes.fromhex(say))
        sys.stdout.buffer.flush()
    match how:
        case "raise":
            raise ValueError("the weights are missing")
        case "raise and chatter":
            try:
                raise ValueError("the weights are missing")
            finally:
                import atexit

                atexit.register(lambda: print("chatter\n" * 20_000))
        case "exit":
            os._exit(number)
        case "sys.exit":
            sys.exit(number)
        case "serving raises" | "serving exits" | "serving lingers":
            return Unservable(how)
        case "kill":
            os.kill(os.getpid(), number)
        case "abort":
            os.abort()
        case "flood":
            lines = ("x" * 99 + "\n") * 100
            for _ in range(number // 10_000):
                sys.stdout.write(lines)
            sys.stdout.flush()
            (Path(folder) / "flooded").touch()
            threading.Event().wait()
        case "grandchild":
            # A process that holds whatever it inherited, and is no part of our group.
            grandchild = subprocess.Popen(
                [sys.executable, "-c", "import time; time.sleep(3600)"], close_fds=False, start_new_session=True
            )
            (Path(folder) / "grandchild").write_text(str(grandchild.pid))
            os.kill(os.getpid(), signal.SIGKILL)
        case "straggler":
            straggler = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
            (Path(folder) / "straggler").write_text(str(straggler.pid))
            os._exit(0)
        case "block":
            (Path(folder) / "blocking").write_text(str(os.getpid()))
            while True:
                pass
        case "wait":
            (Path(folder) / "waiting").write_text(str(os.getpid()))
            threading.Event().wait()
    return ScriptedEnv()


class NoEnv:
    """Has no `run`."""

    def serving(self) -> None: ...
