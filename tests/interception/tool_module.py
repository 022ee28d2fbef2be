"""Tools for tests, served in this process or, as `tests.interception.tool_module:tools`, in one of their own.

Those that take a `folder` say there that they run (a line in `ran`), and wait there for a file `go`.
"""

import os
import subprocess
import time
from pathlib import Path
from typing import Any

from mcp.server import MCPServer
from mcp.types import ToolAnnotations

from interception.tools import State, Task, with_state
from tests.helpers import until

SPEC = "tests.interception.tool_module"


def ran(folder: str) -> int:
    """How often a tool has run there."""
    file = Path(folder, "ran")
    return len(file.read_text().splitlines()) if file.exists() else 0


def _note_that_it_runs(folder: str) -> None:
    with Path(folder, "ran").open("a") as file:
        file.write(f"{os.getpid()}\n")


async def _wait(folder: str) -> None:
    await until(Path(folder, "go").exists)


def note(text: str, state: State[dict[str, Any]]) -> str:
    """Write a note down."""
    state.setdefault("notes", []).append(text)
    return f"note {len(state['notes'])}: {text}"


async def question(task: Task[dict[str, str]]) -> str:
    """What is asked."""
    return task["question"]


async def pay(folder: str, state: State[dict[str, Any]]) -> str:
    """Must not run twice."""
    _note_that_it_runs(folder)
    await _wait(folder)
    state["paid"] = state.get("paid", 0) + 1
    return "paid"


async def look(folder: str) -> str:
    """May run twice."""
    _note_that_it_runs(folder)
    await _wait(folder)
    return "seen"


def pid() -> int:
    """Of the process it runs in."""
    return os.getpid()


def crash(status: int) -> None:
    """Takes its process with it."""
    os._exit(status)


async def hold() -> None:
    """Holds the event loop of its process for ever."""
    time.sleep(3600)  # noqa: ASYNC251 - that is what it is for


def child() -> int:
    """Starts a process, and leaves it."""
    return subprocess.Popen(["sleep", "3600"]).pid


def daemon() -> int:
    """Starts a process as daemons are: in a session of its own, and its parent ends."""
    starter = subprocess.run(["setsid", "sh", "-c", "sleep 3600 >&- & echo $!"], stdout=subprocess.PIPE, check=True)
    return int(starter.stdout)


tools = [note, question, pay, pid, crash, hold, child, daemon]


def server() -> MCPServer:
    """The same, with what a list of functions cannot say."""
    made: MCPServer = MCPServer("test")
    for tool in tools:
        made.add_tool(with_state(tool))
    made.add_tool(look, annotations=ToolAnnotations(idempotent_hint=True))
    return made
