"""Agent programs, headless, against the echo model: a task of several turns with a tool call.

    python -m tests.clients.install --agents && pytest -m agents

The echo model calls the tool that the task names, and then answers with the tool's result.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from interception import InterceptionServer, RolloutSession, Trace, Upstream
from interception.echo import EchoModel
from interception.programs import launch
from interception.run import END_TIMEOUT
from interception.trace import Turn
from tests.clients import install
from tests.clients.proxy import CuttingProxy

pytestmark = [
    pytest.mark.agents,
    pytest.mark.skipif(
        bool(install.missing(agents=True)), reason=f"not installed: {install.COMMAND} --agents installs them"
    ),
]

TIMEOUT = 240.0
"""Seconds for one agent's run, of which a quiet machine needs fifteen at most."""

SHELL = "echo done-by-the-tool | tee -a made.txt"


@dataclass(frozen=True)
class Agent:
    name: str
    dialect: str
    turns: int
    """Of the task below."""
    command: Callable[[str], list[str]]
    """For a task."""
    tool: tuple[str, str]
    """The name of its shell tool, and of that tool's argument."""
    env: Mapping[str, str]
    cut: bytes
    """Comes in the middle of its first answer."""
    asked_anew: int
    """Turns that are made of a stream that was cut: they retry it unmarked. SDKs mark the retry of a whole answer."""

    @property
    def task(self) -> str:
        name, argument = self.tool
        return f"Please do this:\n!call {name} {json.dumps({argument: SHELL})}"

    def __str__(self) -> str:
        return self.name


AGENTS = [
    Agent(
        name="codex",
        dialect="responses",
        turns=2,
        # The echo model's name makes it offer its tools plainly; those of its own models write JavaScript.
        command=lambda task: [
            *(str(install.CODEX), "exec", "-m", "echo", "--skip-git-repo-check"),
            *("--dangerously-bypass-approvals-and-sandbox", task),
        ],
        tool=("exec_command", "cmd"),
        env={},
        cut=b"event: response.function_call_arguments.done",
        asked_anew=1,
    ),
    Agent(
        name="claude-code",
        dialect="messages",
        turns=2,
        command=lambda task: [str(install.CLAUDE), "-p", "--dangerously-skip-permissions", task],
        tool=("Bash", "command"),
        # IS_SANDBOX: as root it skips no permissions elsewhere.
        env={"IS_SANDBOX": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"},
        cut=b"event: content_block_stop",
        asked_anew=1,
    ),
    Agent(
        name="mini-swe-agent",
        dialect="chat completions",
        turns=3,  # it goes on until a tool call says that it is done: what it asks after the second turn makes that one
        command=lambda task: [
            *(str(install.MINI_PROGRAM), "-m", "openai/echo", "--yolo", "--exit-immediately", "-c", "mini.yaml"),
            "-c",
            'model.format_error_template=!call bash {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}',
            *("-t", task),
        ],
        tool=("bash", "command"),
        env={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        cut=b'"tool_calls"',
        asked_anew=0,
    ),
]


@pytest.fixture(params=AGENTS, ids=str)
def agent(request: pytest.FixtureRequest) -> Agent:
    return request.param  # type: ignore[no-any-return]


@dataclass
class Ran:
    status: int
    out: str
    err: str


class Desk:
    """Where an agent works: a home and a folder of its own."""

    def __init__(self, path: Path) -> None:
        self.home, self.work = path / "home", path / "work"
        self.home.mkdir()
        self.work.mkdir()

    def environ(self, agent: Agent) -> dict[str, str]:
        ours = ("OPENAI_", "ANTHROPIC_", "CLAUDE", "CODEX_", "MSWEA_", "XDG_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return {**kept, "HOME": str(self.home), **agent.env}

    async def run(self, command: list[str], env: Mapping[str, str]) -> Ran:
        async with _process(command, env, self.work) as process, asyncio.timeout(TIMEOUT):
            out, err = await process.communicate()
        assert process.returncode is not None
        return Ran(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))

    @property
    def made(self) -> str:
        """What the tool made of the file."""
        return (self.work / "made.txt").read_text()


@asynccontextmanager
async def _process(
    command: list[str], env: Mapping[str, str], folder: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *command,
        env=env,
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            # `interception run` ends the program, which is in a group of its own.
            process.terminate()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 2 * END_TIMEOUT)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def check_turns(agent: Agent, turns: list[Turn]) -> None:
    """These are the turns of the task, each with one answer, and each answer is in the next one's request."""
    assert [(turn.dialect, turn.status, len(turn.attempts)) for turn in turns] == [
        (agent.dialect, 200, 1)
    ] * agent.turns
    for turn, following in pairwise(turns):
        assert turn.response is not None
        said = _call_id(turn.response)
        assert said is None or said in str(following.request)
    assert _call_id(turns[0].response or {}) is not None
    assert "done-by-the-tool" in str(turns[1].response)
    assert all(turn.usage is not None for turn in turns)


def _call_id(answer: dict[str, object]) -> str | None:
    """The id of the tool call in an answer."""
    text = json.dumps(answer)
    for beginning in ('"call_', '"toolu_'):
        if (at := text.find(beginning)) >= 0:
            return text[at + 1 : text.index('"', at + 1)]
    return None


async def test_a_task_with_a_tool_call(agent: Agent, desk: Desk, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    ours = [sys.executable, "-m", "interception", "run", "--trace", str(file), "--"]
    ran = await desk.run([*ours, *agent.command(agent.task)], desk.environ(agent))
    assert ran.status == 0, ran.out + ran.err
    assert desk.made == "done-by-the-tool\n"
    turns = Trace.from_jsonl(file.read_text()).turns
    check_turns(agent, turns)
    assert all(turn.delivered for turn in turns)
    shown = [line for line in ran.err.splitlines() if line.startswith(f"interception: {agent.dialect}, ")]
    assert len(shown) == agent.turns


async def test_a_connection_cut_in_the_middle_of_an_answer(agent: Agent, desk: Desk) -> None:
    # With a delay, so that the server still writes when the reader is gone.
    async with EchoModel(chunk_delay=0.1) as echo, InterceptionServer() as server:
        session = RolloutSession(Upstream(base_url=echo.base_url))
        async with server.acquire(session) as slot, CuttingProxy(slot.base_url) as proxy:
            proxy.cut_at(agent.cut)
            command, env = launch(
                agent.command(agent.task), slot._replace(base_url=proxy.url).env(), desk.environ(agent)
            )
            ran = await desk.run(command, env)
            assert ran.status == 0, ran.out + ran.err
            assert proxy.cuts == 1
            calls = echo.calls
    assert desk.made == "done-by-the-tool\n"
    turns = session.trace.turns
    check_turns(agent, [turn for turn in turns if turn.delivered])
    assert [turn.delivered for turn in turns[: agent.asked_anew]] == [False] * agent.asked_anew
    assert len(turns) == calls == agent.turns + agent.asked_anew
