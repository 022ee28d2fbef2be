"""`interception run`, as a user runs it."""

import asyncio
import contextlib
import json
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from interception import Trace
from interception.cli import app
from interception.demo.relay import SshRelay
from interception.echo import EchoModel
from interception.programs import PROGRAMS, launch
from tests.helpers import until
from tests.scrapes import Scrape
from tests.sshd import free_port

RUN = [sys.executable, "-m", "interception", "run"]

IMPATIENT = """\
import sys, interception.cli, interception.run
interception.run.END_TIMEOUT = 0.3
sys.argv[0] = "interception"
interception.cli.main()
"""

AGENT = """\
import json, os, signal, subprocess, sys, urllib.error, urllib.request

def ask(text="hello", model="m"):
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

def say(*words):
    print(*words, flush=True)
"""


@dataclass
class Running:
    """`interception run`, and what it and its program have written."""

    process: asyncio.subprocess.Process

    async def line(self) -> str:
        """The next line of the program."""
        assert self.process.stdout is not None
        async with asyncio.timeout(60):
            return (await self.process.stdout.readline()).decode().rstrip("\n")

    async def ended(self) -> "Ran":
        async with asyncio.timeout(60):
            out, err = await self.process.communicate()
        assert self.process.returncode is not None
        return Ran(self.process.returncode, out.decode(), err.decode())


@dataclass
class Ran:
    status: int
    out: str
    err: str

    @property
    def said(self) -> list[str]:
        """The lines of `interception` itself."""
        return [line.removeprefix("interception: ") for line in self.err.splitlines()]


class Home:
    """A user's directory, with the programs that the test writes into it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trace_file = path / "trace.jsonl"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PRIME_", "SSH_"))}
        self.env = {**kept, "HOME": str(path), "PYTHONUNBUFFERED": "1"}

    @property
    def trace(self) -> Trace:
        return Trace.from_jsonl(self.trace_file.read_text())

    def agent(self, code: str) -> list[str]:
        """A command that runs `code`, which can `ask` the model."""
        file = self.path / "agent.py"
        file.write_text(AGENT + code)
        return [sys.executable, str(file)]

    @asynccontextmanager
    async def running(self, *arguments: str, run: Sequence[str] = RUN, **variables: str) -> AsyncIterator[Running]:
        process = await asyncio.create_subprocess_exec(
            *run,
            *arguments,
            env={**self.env, **variables},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            yield Running(process)
        finally:
            if process.returncode is None:
                # Its program as well, which would keep the pipes open and the test waiting.
                for one in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
                await process.wait()

    async def run(self, *arguments: str, **variables: str) -> Ran:
        async with self.running(*arguments, **variables) as running:
            return await running.ended()


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def alive(pid: str | int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


# -- what the program is given, and what is seen of it -------------------------------------------------


async def test_each_turn_is_shown_and_recorded_and_the_status_is_the_programs(home: Home) -> None:
    agent = home.agent("print(ask('one two')); print(ask('three')); sys.exit(7)")
    ran = await home.run("--trace", str(home.trace_file), "--", *agent)
    assert (ran.status, ran.out) == (7, "one two\nthree\n")
    no_upstream, where, first, second, written = ran.said
    assert no_upstream == "no --upstream given: the program talks to an echo model"
    assert where.startswith("model calls are caught at http://127.0.0.1:")
    assert first.startswith("chat completions, m: status 200, 2 tokens in, 2 out, 0.")
    assert first.endswith(" s")
    assert second.startswith("chat completions, m: status 200, 1 tokens in, 1 out, 0.")
    assert written == f"2 turns written to {home.trace_file}"
    assert [turn.request["messages"][0]["content"] for turn in home.trace.turns] == ["one two", "three"]
    assert all(turn.complete and turn.delivered for turn in home.trace.turns)
    assert home.trace.sealed


async def test_the_variables_are_the_programs_alone_and_lead_nowhere_else(home: Home) -> None:
    agent = home.agent("ask(); print(json.dumps(dict(os.environ)))")
    outside = {
        "OPENAI_BASE_URL": "https://elsewhere.test/v1",
        "OPENAI_API_KEY": "sk-of-the-user",
        "ANTHROPIC_AUTH_TOKEN": "sk-ant-of-the-user",
        "OPENAI_API_BASE": "https://elsewhere.test/v1",
        "UPSTREAM_API_KEY": "sk-of-the-upstream",
        "NO_PROXY": "intern.test",
        "KEPT": "as it was",
    }
    ran = await home.run("--", *agent, **outside)
    assert ran.status == 0, ran.err
    given = json.loads(ran.out)
    url = ran.said[1].rpartition(" ")[2]
    assert given["OPENAI_BASE_URL"] == f"{url}/v1"
    assert given["ANTHROPIC_BASE_URL"] == url
    assert given["OPENAI_API_KEY"] == given["ANTHROPIC_API_KEY"]
    assert given["NO_PROXY"] == given["no_proxy"] == "intern.test,127.0.0.1,localhost"
    assert given["KEPT"] == "as it was"
    assert not {"ANTHROPIC_AUTH_TOKEN", "OPENAI_API_BASE", "UPSTREAM_API_KEY"} & set(given)
    assert "sk-" not in ran.out + ran.err


async def test_the_key_reaches_the_upstream_and_nobody_else(home: Home) -> None:
    agent = home.agent("print(ask(model='mine')); print(dict(os.environ))")
    async with EchoModel(api_key="sk-secret") as model:
        ran = await home.run(
            *("--upstream", model.base_url, "--model", "ours", "--trace", str(home.trace_file), "--", *agent),
            UPSTREAM_API_KEY="sk-secret",
        )
        assert ran.status == 0, ran.err
        assert model.calls == 1
    assert ran.out.startswith("hello\n")
    assert not any("echo model" in line for line in ran.said)
    assert ran.said[1].startswith("chat completions, ours: status 200")
    [turn] = home.trace.turns
    assert (turn.request["model"], turn.complete) == ("ours", True)
    assert "sk-secret" not in ran.out + ran.err + home.trace_file.read_text()


async def test_its_numbers_are_on_a_page_while_the_program_runs(home: Home) -> None:
    port = str(free_port())
    page = f"print(urllib.request.urlopen('http://127.0.0.1:{port}/metrics').read().decode())"
    ran = await home.run("--metrics-port", port, "--", *home.agent(f"ask(); {page}"))
    assert ran.status == 0, ran.err
    assert f"metrics are on http://127.0.0.1:{port}/metrics" in ran.said
    scrape = Scrape.read(ran.out, ("interception_", "tunnel_"))
    assert scrape.get("interception_calls_total", name="interception", outcome="ok") == 1


async def test_no_call_is_a_finding_and_a_status_of_its_own(home: Home) -> None:
    finding = "0 calls seen: the harness never called its model here"
    idle = await home.run("--", "true")
    assert (idle.status, idle.said[2:]) == (3, [finding])
    failed = await home.run("--", "sh", "-c", "exit 9")
    assert (failed.status, failed.said[2:]) == (9, [finding])


async def test_what_it_asked_for_in_vain_is_told(home: Home) -> None:
    agent = home.agent(
        "ask(); os.environ['OPENAI_BASE_URL'] += '/nowhere'\ntry: ask()\nexcept urllib.error.HTTPError: pass"
    )
    ran = await home.run("--", *agent)
    assert ran.status == 0
    assert ran.said[-1] == "POST /v1/nowhere/chat/completions was asked for 1 times, and is not served"


async def test_an_upstream_that_refuses_connections_is_named(home: Home) -> None:
    async with EchoModel() as model:
        closed = model.base_url
    agent = home.agent("try: ask()\nexcept urllib.error.HTTPError as error: sys.exit(error.code - 500)")
    ran = await home.run("--upstream", closed, "--trace", str(home.trace_file), "--", *agent)
    assert ran.status == 3  # the program's own: it saw a 503
    assert "status -, ? tokens" in ran.said[1]
    assert f" s, the upstream {closed} cannot be reached: " in ran.said[1]
    assert (home.trace.turns[0].error or "").startswith(f"the upstream {closed} cannot be reached: ")


# -- commands that do not run --------------------------------------------------------------------------


async def test_a_command_that_is_not_there(home: Home) -> None:
    ran = await home.run("--trace", str(home.trace_file), "--", "no-such-program", "--flag")
    assert ran.status == 127
    assert ran.said[2:] == [
        "no-such-program cannot be run: No such file or directory",
        f"0 turns written to {home.trace_file}",
    ]


@pytest.mark.parametrize("name", ["plain.txt", "."])
def test_a_command_that_is_no_program(tmp_path: Path, name: str) -> None:
    (tmp_path / "plain.txt").write_text("no program")
    command = str(tmp_path / name)
    ran = CliRunner().invoke(app, ["run", "--", command])
    assert ran.exit_code == 126
    assert ran.stderr.splitlines()[2:] == [f"interception: {command} cannot be run: Permission denied"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--upstream", "localhost:8000"], "--upstream: not an endpoint: write http://HOST[:PORT]/v1"),
        (["--upstream", "https://me:pass@host/v1"], "--upstream: credentials do not belong into base_url"),
        (["--api-key-env", "NOT_SET"], "--api-key-env: NOT_SET is not set"),
        (
            ["--tunnel", "carrier-pigeon"],
            "--tunnel: write none, prime, ssh://[USER@]HOST[:PORT], ssh, command, custom,",
        ),
        (
            ["--tunnel", "ssh://me@host:99999"],
            "--tunnel: write none, prime, ssh://[USER@]HOST[:PORT], ssh, command, custom,",
        ),
        (["--tunnel", "ssh://me:pass@host"], "--tunnel: SSH logs in with a key, not by password"),
        (["--trace", "/proc/none/trace.jsonl"], "--trace: /proc/none/trace.jsonl cannot be written: No such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_option_is_told_before_anything_runs(tmp_path: Path, arguments: list[str], message: str) -> None:
    ran = CliRunner().invoke(app, ["run", *arguments, "--", "touch", str(tmp_path / "ran")], env={"COLUMNS": "200"})
    assert ran.exit_code == 2
    told = " ".join(ran.stderr.replace("│", " ").split())
    assert message in told
    assert "me:pass" not in told
    assert not (tmp_path / "ran").exists()


def test_help_tells_what_a_user_must_know() -> None:
    ran = CliRunner().invoke(app, ["run", "--help"])
    assert ran.exit_code == 0
    for words in ("COMMAND", "--upstream", "--tunnel", "--trace", "Exit status", "echo model", "codex exec"):
        assert words in ran.stdout


# -- signals -------------------------------------------------------------------------------------------

WAITS = "ask(); say(os.getpid()); signal.pause()"
PARENT = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(['sleep', '600'])
ask()
say(os.getpid(), child.pid)
signal.pause()
"""


async def test_a_signal_that_ends_the_program(home: Home) -> None:
    ran = await home.run("--", *home.agent("ask(); os.kill(os.getpid(), signal.SIGKILL)"))
    assert ran.status == 128 + 9


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
async def test_a_signal_to_us_ends_the_program_and_the_trace_is_written(home: Home, number: signal.Signals) -> None:
    agent = home.agent("signal.signal(signal.SIGINT, signal.SIG_DFL)\n" + WAITS)
    async with home.running("--trace", str(home.trace_file), "--", *agent) as running:
        pid = await running.line()
        running.process.send_signal(number)
        ran = await running.ended()
    assert ran.status == 128 + number
    assert not alive(pid)
    assert len(home.trace.turns) == 1
    assert "Traceback" not in ran.err


async def test_a_program_that_is_deaf_to_it_is_killed_with_all_it_started(home: Home) -> None:
    impatient = [sys.executable, "-c", IMPATIENT, "run"]
    async with home.running("--trace", str(home.trace_file), "--", *home.agent(PARENT), run=impatient) as running:
        pids = (await running.line()).split()
        running.process.terminate()
        ran = await running.ended()
    assert ran.status == 128 + 9
    await until(lambda: not any(alive(pid) for pid in pids))
    assert len(home.trace.turns) == 1
    assert "Traceback" not in ran.err


async def test_a_program_may_end_well_when_it_is_told_to_end(home: Home) -> None:
    agent = home.agent("signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n" + WAITS)
    async with home.running("--", *agent) as running:
        await running.line()
        running.process.terminate()
        assert (await running.ended()).status == 0


ON_A_TERMINAL = """\
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "interception", "run", *sys.argv[1:]])
"""


async def test_on_a_terminal_ctrl_c_is_the_programs_affair(home: Home) -> None:
    # It hears of it once, from the terminal, may read from that, and goes on if it likes.
    agent = home.agent(
        "heard = []; signal.signal(signal.SIGINT, lambda *_: heard.append(1))\n"
        "ask(); say('ready')\nwhile not heard: signal.pause()\n"
        "say(f'Ctrl-C, then {input()}, heard {len(heard)}'); sys.exit(5)"
    )
    ours, theirs = pty.openpty()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", ON_A_TERMINAL, "--trace", str(home.trace_file), "--", *agent),
            env=home.env,
            stdin=theirs,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        running = Running(process)
        assert await running.line() == "ready"
        os.write(ours, b"\x03")
        os.write(ours, b"a line\n")
        ran = await running.ended()
    finally:
        os.close(ours)
        os.close(theirs)
    assert ran.status == 5, ran.err
    assert ran.out == "Ctrl-C, then a line, heard 1\n"
    assert len(home.trace.turns) == 1


# -- through a tunnel ----------------------------------------------------------------------------------


async def test_prime_without_credentials_is_one_clear_line(home: Home) -> None:
    ran = await home.run("--tunnel", "prime", "--", "true")
    assert ran.status == 1
    assert ran.err.splitlines()[1:] == ["error: no Prime credentials: set PRIME_API_KEY or run `prime login`"]


@pytest.fixture
async def relay(home: Home) -> AsyncIterator[SshRelay]:
    ssh = home.path / ".ssh"
    ssh.mkdir()
    async with SshRelay() as relay:
        relay.write_known_hosts(ssh / "known_hosts")
        key = ssh / "id_ed25519"
        key.write_text(relay.add_account("me"))
        key.chmod(0o600)
        yield relay


async def test_through_an_ssh_relay(home: Home, relay: SshRelay) -> None:
    agent = home.agent("print(os.environ['OPENAI_BASE_URL']); print(ask())")
    ran = await home.run("--tunnel", f"ssh://me@127.0.0.1:{relay.port}", "--", *agent)
    assert ran.status == 0, ran.err
    url, answer = ran.out.splitlines()
    assert url == ran.said[1].rpartition(" ")[2] + "/v1"
    assert answer == "hello"
    assert relay.logins("me") == 1
    assert relay.forwards("me") == []


async def test_a_lost_tunnel_ends_the_program_and_the_trace_is_written(home: Home, relay: SshRelay) -> None:
    arguments = ("--tunnel", f"ssh://me@127.0.0.1:{relay.port}", "--trace", str(home.trace_file))
    async with home.running(*arguments, "--", *home.agent(WAITS)) as running:
        pid = await running.line()
        await relay.revoke("me")
        ran = await running.ended()
    assert ran.status == 1
    assert ran.said[-2] == f"1 turns written to {home.trace_file}"
    assert ran.said[-1].startswith("error: the tunnel was lost: ")
    assert "Traceback" not in ran.err
    assert not alive(pid)
    assert len(home.trace.turns) == 1


async def test_a_relay_that_is_not_there(home: Home, relay: SshRelay) -> None:
    await relay.stop()
    ran = await home.run("--tunnel", f"ssh://me@127.0.0.1:{relay.port}", "--trace", str(home.trace_file), "--", "true")
    assert ran.status == 1
    assert ran.said[-1].startswith(f"error: no connection to the SSH relay me@127.0.0.1:{relay.port}: ")


async def test_a_signal_while_the_tunnel_is_being_made(home: Home) -> None:
    reached = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with home.running("--tunnel", f"ssh://me@127.0.0.1:{port}", "--", "true") as running:
        await asyncio.wait_for(reached.wait(), 60)
        running.process.terminate()
        ran = await running.ended()
    server.close()
    await server.wait_closed()
    assert ran.status == 128 + 15
    assert "Traceback" not in ran.err


# -- programs that need more than variables --------------------------------------------------------------

SLOT = {
    "OPENAI_BASE_URL": "http://here/v1",
    "OPENAI_API_KEY": "secret",
    "ANTHROPIC_BASE_URL": "http://here",
    "ANTHROPIC_API_KEY": "secret",
}


def test_a_program_of_the_table_gets_its_own_flags_and_variables() -> None:
    command, env = launch(["/opt/bin/codex", "exec", "task"], SLOT, {"PATH": "/bin"})
    assert command == ["/opt/bin/codex", "-c", "openai_base_url=http://here/v1", "exec", "task"]
    assert env["CODEX_API_KEY"] == "secret"
    _, env = launch(["claude", "-p", "task"], SLOT, {"CLAUDE_CODE_USE_BEDROCK": "1", "ANTHROPIC_AUTH_TOKEN": "mine"})
    assert not {"CLAUDE_CODE_USE_BEDROCK", "ANTHROPIC_AUTH_TOKEN"} & set(env)


def test_any_other_program_runs_as_it_is() -> None:
    environ = {"PATH": "/bin", "HIDDEN": "key", "no_proxy": "a,b"}
    command, env = launch(["my-codex", "exec"], SLOT, environ, hidden=["HIDDEN"])
    assert command == ["my-codex", "exec"]
    no_proxy = "a,b,127.0.0.1,localhost"
    assert env == {"PATH": "/bin", **SLOT, "NO_PROXY": no_proxy, "no_proxy": no_proxy}
    assert environ["HIDDEN"] == "key"


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_table_refers_to_variables_that_every_slot_has(name: str) -> None:
    launch([name], SLOT, {})
