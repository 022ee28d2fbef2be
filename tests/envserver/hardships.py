"""Envs for the table of thirty: runs that do what `envs.Scripted` does not, and workers that are hard to start.

Every worker imports this: nothing slow, as `tests.helpers` is, belongs here.
"""

import asyncio
import contextlib
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from envserver.env import Emit
from envserver.server import EnvServer
from tests.envserver.envs import Scripted, gated

GROWN: list[bytes] = []
"""What runs have left behind."""

LOCK = threading.Lock()
"""Held by a thread of the launcher, in a test of what its workers inherit."""


def hold_the_gil() -> None:
    re.match(r"(a+)+$", "a" * 100 + "b")  # for longer than the sun will shine


def spin() -> None:
    while True:
        pass


def sleep() -> None:
    time.sleep(3600)


def work_elsewhere() -> None:
    subprocess.run([sys.executable, "-c", "while True: pass"])


def deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # for ever


def block(gate: Path) -> None:
    """Until there is such a file."""
    while not gate.exists():
        time.sleep(0.02)


def hang_up() -> None:
    """End all connections of this process over unix sockets, as a broken system might; their ends do not close."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            if (
                connection.family == socket.AF_UNIX
                and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0
            ):
                connection.shutdown(socket.SHUT_RDWR)


class Hard(Scripted):
    async def run(self, request: dict[str, Any], emit: Emit) -> dict[str, Any]:
        if "note" in request:  # that it was run, and where
            _append(request["note"], f"{os.getpid()}\n")
        match request.get("do"):
            case "abort":
                os.abort()
            case "grow":
                GROWN.append(os.urandom(request["size"]))
            case "wait for":
                while not Path(request["path"]).exists():  # noqa: ASYNC110, ASYNC240 - made by another process
                    await asyncio.sleep(0.01)
            case "hold the GIL":
                hold_the_gil()
            case "spin":
                spin()
            case "sleep":
                sleep()
            case "subprocess":
                work_elsewhere()
            case "deadlock":
                deadlock()
            case "block":
                block(Path(request["gate"]))
            case "hang up":
                hang_up()
                await asyncio.Event().wait()
            case "send":
                # What no server of ours would: frames as they are, straight to the broker.
                (server,) = [found for found in gc.get_objects() if isinstance(found, EnvServer)]
                assert server._zsocket is not None
                ((broker, wire_id),) = server._running
                for parts in request["frames"]:
                    server._zsocket.send([broker, *(wire_id if part == b"its id" else part for part in parts)])
        return await super().run(request, emit)


def _append(path: str, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


def hard() -> Hard:
    return Hard()


def gated_hard(gate: str) -> Hard:
    gated(gate)
    return Hard()


class Marked(Hard):
    """Writes down when it begins, runs and ends."""

    def __init__(self, marks: str) -> None:
        self.marks = marks

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        _append(self.marks, f"entered {os.getpid()}\n")
        yield
        _append(self.marks, f"left {os.getpid()}\n")

    async def run(self, request: dict[str, Any], emit: Emit) -> dict[str, Any]:
        _append(self.marks, f"run {os.getpid()}\n")
        return await super().run(request, emit)


def marked(marks: str) -> Marked:
    return Marked(marks)


def every_other(counter: str) -> Hard:
    """Each second start of a worker is killed while it loads; `counter` is a file with a byte for each."""
    _append(counter, "x")
    if Path(counter).stat().st_size % 2 == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return Hard()


def fresh() -> Hard:
    """Refuses to be made in a process that has inherited a lock that is held, or a thread."""
    if not LOCK.acquire(blocking=False):
        raise RuntimeError("a lock that nobody will ever release")
    return Hard()


def loads_once(counter: str) -> Hard:
    """The first worker loads, the others do not, until the file says `open`."""
    path = Path(counter)
    if path.read_text() == "first":
        path.write_text("fail")
    elif path.read_text() != "open":
        raise RuntimeError("the gate says fail")
    return Hard()
