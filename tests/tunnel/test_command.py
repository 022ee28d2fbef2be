"""CommandTunnel: a real client program in front of a real server, and everything that can go wrong with either."""

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import tunnel.command as command_module
from tests.sshd import free_port
from tunnel import (
    HEALTH_PATH,
    CommandTunnel,
    CommandTunnelConfig,
    KeepAlivePolicy,
    Restarted,
    RestartFailed,
    TunnelError,
    TunnelEvent,
    TunnelGoneError,
    UrlChangedError,
    make_tunnel,
)

pytestmark = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="what is left is looked up in /proc")

DEADLINE = 30.0
SECRET = "tok-0123456789abcdef"

POLICY = KeepAlivePolicy(
    rule="plain",
    period=30,
    confirm_after=20,
    probe_timeout=500,
    report_gap=1,
    exit_poll=2,
    restart_timeout=3000,
    restart_backoff=5,
    restart_backoff_max=20,
    give_up_after=None,
).scaled(0.01)

QUIET = POLICY.model_copy(update={"period": 3600.0})

# Forwards a port of its own to the local one. Its behaviour is the entry of the JSON list for this run (the last entry
# for all later ones); each run leaves its process id, and the first one its port, in the directory it is given.
CLIENT = r"""
import json, os, signal, socket, subprocess, sys, threading, time
from pathlib import Path

folder, target, runs = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
run = len(list(folder.glob("run-*")))
how = runs[min(run, len(runs) - 1)]

def say(text):
    print(text, flush=True)

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.005)

def done(name, text=""):
    (folder / (name + ".part")).write_text(text)
    (folder / (name + ".part")).rename(folder / name)

def pump(a, b):
    try:
        while data := a.recv(65536):
            b.sendall(data)
        b.shutdown(socket.SHUT_WR)
    except OSError:
        pass

def serve(listener):
    while True:
        inner = listener.accept()[0]
        try:
            outer = socket.create_connection(("127.0.0.1", target))
        except OSError:
            inner.close()
            continue
        for pair in ((inner, outer), (outer, inner)):
            threading.Thread(target=pump, args=pair, daemon=True).start()

if how.get("ignore_term"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if words := how.get("last_words"):
    signal.signal(signal.SIGTERM, lambda *_: (say(words), os._exit(0)))
if how.get("grandchild"):
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    child = subprocess.Popen([sys.executable, "-IS", "-c", code, str(folder)], stdout=subprocess.PIPE)
    child.stdout.readline()
    done("grandchild", str(child.pid))
done(f"run-{run}", str(os.getpid()))
for line in how.get("say", []):
    say(os.path.expandvars(line))
if raw := how.get("raw"):
    with open(1, "wb", closefd=False) as out:
        out.write(bytes.fromhex(raw).replace(b"WIDE", b"x" * 300_000))
for piece in how.get("pieces", []):
    os.write(1, bytes.fromhex(piece))
    time.sleep(0.05)
for number in range(how.get("flood", 0)):
    print(f"line {number} of a flood of output that nobody asked for")
if name := how.get("late"):
    wait_for(name)
    for line in how.get("then", []):
        say(line)
if (status := how.get("exit")) is not None:
    sys.exit(status)
if (number := how.get("signal")) is not None:
    os.kill(os.getpid(), number)
if how.get("mute"):
    while True:
        signal.pause()

port_file = folder / "port"
known = int(port_file.read_text()) if port_file.exists() and not how.get("other_url") else 0
listener = socket.create_server(("127.0.0.1", known))
if not known:
    done("port", str(listener.getsockname()[1]))
threading.Thread(target=serve, args=(listener,), daemon=True).start()
if how.get("unasked"):
    signal.pause()
print("warning: to stderr", file=sys.stderr, flush=True)
say(f"\x1b[32mINF\x1b[0m your URL is http://127.0.0.1:{listener.getsockname()[1]}/ (forwarding {target})")
if name := how.get("ready_after"):
    wait_for(name)
    say("connected")
for number in range(how.get("flood_after", 0)):
    print(f"request {number} was forwarded")
done(f"flooded-{run}")
if name := how.get("deaf_when"):
    wait_for(name)
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
if name := how.get("gone_when"):
    wait_for(name)
    say("tunnel was deleted")
while True:
    signal.pause()
"""


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not condition():  # noqa: ASYNC110 - what other processes do sets no event
            await asyncio.sleep(0.01)


def processes(marker: str) -> dict[int, list[str]]:
    """Live processes with `marker` in their command line (that of a zombie is empty)."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if any(marker in argument for argument in arguments):
                    found[int(entry.name)] = arguments
    return found


class Program:
    """The client program of one test, by what it leaves behind in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "client.py"
        self.path.write_text(CLIENT)

    def tunnel(self, *runs: dict[str, Any], policy: KeepAlivePolicy = POLICY, **options: Any) -> CommandTunnel:
        if "url" not in options:
            options.setdefault("url_pattern", r"your URL is (\S+)")
        config = CommandTunnelConfig(
            command=(sys.executable, "-IS", str(self.path), str(self.folder), "{port}", json.dumps(runs or [{}])),
            policy=policy,
            **options,
        )
        made = make_tunnel(config)
        assert isinstance(made, CommandTunnel)
        return made

    @property
    def runs(self) -> int:
        return len(list(self.folder.glob("run-?")))

    def pid(self, run: int = 0) -> int:
        return int((self.folder / f"run-{run}").read_text())

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def signal(self, name: str) -> None:
        (self.folder / name).touch()

    @property
    def alive(self) -> dict[int, list[str]]:
        """The program, its grandchildren and its watchdogs."""
        return processes(str(self.folder))

    @property
    def watchdog(self) -> int:
        (pid,) = (pid for pid, arguments in self.alive.items() if "_watchdog.py" in " ".join(arguments[:3]))
        return pid


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    made = Program(tmp_path)
    yield made
    # A process that was sent SIGKILL is given a moment to be gone.
    end = time.monotonic() + DEADLINE
    while made.alive and time.monotonic() < end:
        time.sleep(0.01)
    left = made.alive
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """A server that answers the health route."""

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_get(HEALTH_PATH, health)
    async with TestServer(app, host="127.0.0.1") as server:
        assert server.port is not None
        yield server.port


def app_of(answer: Callable[[web.Request], Awaitable[web.Response]]) -> web.Application:
    app = web.Application()
    app.router.add_route("GET", "/{path:.*}", answer)
    return app


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_module, "TERM_GRACE", 0.3)


async def serves(url: str) -> bool:
    async with aiohttp.ClientSession() as session, session.get(url + HEALTH_PATH) as response:
        return response.status == 200 and await response.text() == "ok"


async def refused(exposing: Awaitable[str]) -> str:
    """The text of the plain TunnelError with which an exposure fails."""
    with pytest.raises(TunnelError) as failure:
        await exposing
    assert type(failure.value) is TunnelError
    return str(failure.value)


def of(kind: type[TunnelEvent], events: list[TunnelEvent]) -> list[TunnelEvent]:
    return [event for event in events if isinstance(event, kind)]


# -- start ------------------------------------------------------------------------------------------


async def test_url_found_in_output_serves(program: Program, port: int) -> None:
    tunnel = program.tunnel()
    async with tunnel.expose(port) as url:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url)
        assert await serves(url)
        assert tunnel.state.name == "serving"
    assert tunnel.state.name == "idle"
    await until(lambda: not program.alive)


async def test_exposed_again_after_the_end(program: Program, port: int) -> None:
    tunnel = program.tunnel()
    for _ in range(2):
        async with tunnel.expose(port) as url:
            assert await serves(url)
    assert program.runs == 2


@pytest.mark.parametrize(
    "pattern", [r"http://[\d.:]+", r"your URL is (\S+)", r"(?:tunnel at (\S+))|(?:your URL is (\S+))"]
)
async def test_first_group_else_whole_match(program: Program, port: int, pattern: str) -> None:
    async with program.tunnel(url_pattern=pattern).expose(port) as url:
        assert await serves(url)


async def test_port_is_filled_in_and_other_braces_left_alone(program: Program, port: int) -> None:
    # The arguments hold JSON, braces and all, and the words that are said hold the placeholder.
    words = 'URL for {port}: {"a": {}} {0} {name}'
    tunnel = program.tunnel({"say": [words], "exit": 3})
    text = await refused(tunnel.expose(port).__aenter__())
    assert words.replace("{port}", str(port)) in text


async def test_known_url_waits_for_the_ready_pattern(program: Program, port: int) -> None:
    tunnel = program.tunnel(
        {"ready_after": "go"}, url="http://relay.invalid/", ready_pattern="^connected$", policy=QUIET
    )
    exposure = tunnel.expose(port)
    entering = asyncio.create_task(exposure.__aenter__())
    await until(lambda: program.has("port"))
    assert not entering.done()
    program.signal("go")
    assert await entering == "http://relay.invalid"
    await exposure.__aexit__(None, None, None)


async def test_url_and_ready_pattern_are_both_waited_for(program: Program, port: int) -> None:
    tunnel = program.tunnel({"say": ["connected"], "late": "go"}, ready_pattern="connected")
    exposure = tunnel.expose(port)
    entering = asyncio.create_task(exposure.__aenter__())
    await until(lambda: program.runs == 1)
    assert not entering.done()
    program.signal("go")
    assert await serves(await entering)
    await exposure.__aexit__(None, None, None)


async def test_a_url_that_cannot_be_judged_from_here_is_taken_at_its_word(
    program: Program, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with program.tunnel({"mute": True}, url="http://relay.invalid", policy=QUIET).expose(port) as url:
        assert url == "http://relay.invalid"
    assert "http://relay.invalid cannot be reached from here (no such name)" in caplog.text


@pytest.mark.parametrize("known", [True, False], ids=["known beforehand", "printed"])
async def test_without_a_ready_pattern_it_is_up_once_its_url_leads_here(
    program: Program, port: int, known: bool
) -> None:
    place = free_port()
    (program.folder / "port").write_text(str(place))
    options = {"url": f"http://127.0.0.1:{place}"} if known else {"url_pattern": "soon at (.+)"}
    tunnel = program.tunnel({"say": [f"soon at http://127.0.0.1:{place}"], "late": "go"}, **options)
    exposure = tunnel.expose(port)
    entering = asyncio.create_task(exposure.__aenter__())
    await until(lambda: program.runs == 1)
    await asyncio.wait([entering], timeout=0.2)
    assert not entering.done()
    program.signal("go")
    assert await serves(await entering)
    assert tunnel.restarts == 0
    await exposure.__aexit__(None, None, None)


async def test_a_url_that_never_leads_here_is_an_error_that_quotes_the_output(program: Program, port: int) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    tunnel = program.tunnel({"say": ["dialling"], "mute": True}, url=url, start_timeout=0.5)
    text = await refused(tunnel.expose(port).__aenter__())
    assert f"runs, but {url} does not lead here after 0.5 s (connection refused)" in text
    assert "dialling" in text
    assert not program.alive


async def test_a_url_that_leads_to_somebody_else_is_not_taken(program: Program, port: int) -> None:
    """Its name may still be held by the client of a process that is no more."""

    async def nothing(_: web.Request) -> web.Response:
        raise web.HTTPNotFound

    async with TestServer(app_of(nothing), host="127.0.0.1") as other:
        tunnel = program.tunnel({"mute": True}, url=f"http://127.0.0.1:{other.port}", start_timeout=0.5)
        assert "does not lead here after 0.5 s (gateway 404)" in await refused(tunnel.expose(port).__aenter__())


async def test_a_local_service_that_is_down_is_not_waited_for(program: Program) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    async with program.tunnel({"mute": True}, url=url, policy=QUIET).expose(free_port()) as exposed:
        assert exposed == url


@pytest.mark.parametrize(
    ("end", "said"),
    [({"exit": 0}, r"exited with status 0 before it was ready \(it must stay in the foreground\)"),
     ({"then": ["tunnel was deleted"], "mute": True}, "says that its tunnel is gone")],
    ids=["exits", "is gone"],
)  # fmt: skip
async def test_one_that_ends_while_its_url_is_looked_at_is_an_error_at_once(
    program: Program, end: dict[str, Any], said: str
) -> None:
    asked, never = asyncio.Event(), asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        asked.set()
        await never.wait()
        return web.Response()

    async with TestServer(app_of(hang), host="127.0.0.1") as server:
        assert server.port is not None
        tunnel = program.tunnel(
            {"late": "go", **end},
            {},
            url=f"http://127.0.0.1:{server.port}",
            gone_pattern="was deleted",
            policy=QUIET.model_copy(update={"probe_timeout": 300.0}),
            start_timeout=20,
        )
        entering = asyncio.create_task(refused(tunnel.expose(server.port).__aenter__()))
        await asked.wait()
        program.signal("go")
        assert re.search(said, await entering)
        never.set()


async def test_url_without_match_quotes_the_output(program: Program, port: int) -> None:
    tunnel = program.tunnel({"say": ["dialling", "no free edge"], "mute": True}, start_timeout=1.0)
    text = await refused(tunnel.expose(port).__aenter__())
    assert "showed no URL within 1 s" in text
    assert "dialling\n  no free edge" in text
    assert not program.alive


async def test_ready_pattern_without_match_quotes_the_output(program: Program, port: int) -> None:
    tunnel = program.tunnel(ready_pattern="connected", start_timeout=1.0)
    text = await refused(tunnel.expose(port).__aenter__())
    assert "was not ready within 1 s" in text
    assert "your URL is" in text
    assert "warning: to stderr" in text


async def test_silent_program_is_said_to_be_silent(program: Program, port: int) -> None:
    text = await refused(program.tunnel({"mute": True}, start_timeout=0.5).expose(port).__aenter__())
    assert text.endswith(
        "(some hold back what they print where it is no terminal: run it by `stdbuf -oL`?); it printed nothing"
    )


async def test_question_without_a_line_end_is_quoted(program: Program, port: int) -> None:
    tunnel = program.tunnel({"raw": b"Password: ".hex(), "mute": True}, start_timeout=1.0)
    assert "Password:" in await refused(tunnel.expose(port).__aenter__())


async def test_a_url_without_a_line_end_is_seen(program: Program, port: int) -> None:
    (program.folder / "port").write_text(str(place := free_port()))
    raw = f"your URL is http://127.0.0.1:{place}".encode().hex()
    async with program.tunnel({"raw": raw, "unasked": True}, url_pattern="your URL is (.+)").expose(port) as url:
        assert url == f"http://127.0.0.1:{place}"
        assert await serves(url)


async def test_a_url_that_comes_in_two_pieces_is_taken_whole(program: Program, port: int) -> None:
    pieces = [b"your URL is http://relay.inv".hex(), b"alid/t \n".hex()]
    async with program.tunnel({"pieces": pieces, "mute": True}, policy=QUIET).expose(port) as url:
        assert url == "http://relay.invalid/t"


async def test_match_that_is_no_url(program: Program, port: int) -> None:
    text = await refused(program.tunnel(url_pattern=r"(forwarding) \d+").expose(port).__aenter__())
    assert "'forwarding' is not a URL" in text


async def test_exit_before_ready_is_an_error_at_once(program: Program, port: int) -> None:
    began = time.monotonic()
    text = await refused(program.tunnel({"say": ["bad token"], "exit": 7}).expose(port).__aenter__())
    assert "exited with status 7 before it was ready" in text
    assert "bad token" in text
    assert time.monotonic() - began < 10  # start_timeout is 30


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGABRT, "SIGABRT"), (40, "signal 40")]
)
async def test_end_by_signal_is_named(program: Program, port: int, number: int, name: str) -> None:
    text = await refused(program.tunnel({"say": ["ouch"], "signal": int(number)}).expose(port).__aenter__())
    assert f"was ended by {name} before it was ready" in text
    assert "ouch" in text


async def test_program_that_is_not_there(port: int, tmp_path: Path) -> None:
    for url_options in ({"url": "http://relay.invalid"}, {"url_pattern": "http.*"}):
        config = CommandTunnelConfig(command=("no-such-tunnel-program", "--token", SECRET), **url_options)
        text = await refused(CommandTunnel(config).expose(port).__aenter__())
        assert text == "the tunnel program 'no-such-tunnel-program' cannot be started: No such file or directory"


async def test_program_that_is_not_executable(port: int, tmp_path: Path) -> None:
    path = tmp_path / "client"
    path.write_text("not a program")
    config = CommandTunnelConfig(command=(str(path),), url="http://relay.invalid")
    assert f"'{path}' cannot be started: Permission denied" in await refused(
        CommandTunnel(config).expose(port).__aenter__()
    )
    path.chmod(0o755)
    assert f"'{path}' cannot be started: Exec format error" in await refused(
        CommandTunnel(config).expose(port).__aenter__()
    )


async def test_argument_that_no_program_can_get(port: int) -> None:
    config = CommandTunnelConfig(command=("true", "a\0b"), url="http://relay.invalid")
    assert "'true' cannot be started" in await refused(CommandTunnel(config).expose(port).__aenter__())


async def test_gone_line_at_the_first_start_is_a_plain_error(program: Program, port: int) -> None:
    tunnel = program.tunnel({"say": ["hello", "tunnel was deleted"], "mute": True}, gone_pattern="was deleted")
    text = await refused(tunnel.expose(port).__aenter__())
    assert "'tunnel was deleted'" in text
    assert tunnel.gone is None


async def test_program_gets_environment_and_no_input(port: int, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; "
        "print(repr(sys.stdin.read()), os.environ['MODE'], os.environ['HOME'], sorted(os.listdir('/proc/self/fd')), "
        "signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, os.getsid(0) != os.getsid(os.getppid()))"
    )
    config = CommandTunnelConfig(
        command=(sys.executable, "-IS", "-c", code), env={"MODE": "fast"}, url_pattern="http.*"
    )
    text = await refused(CommandTunnel(config).expose(port).__aenter__())
    # 0, 1, 2, and the one that lists them: no descriptor of ours.
    assert f"'' fast {os.environ['HOME']} ['0', '1', '2', '3'] True False" in text


def ignored_signals(status: str) -> int:
    (mask,) = re.findall(r"SigIgn:\s*(\w+)", status)
    return int(mask, 16)


def signals_ignored_here() -> int:
    return ignored_signals(Path("/proc/self/status").read_text())


async def test_program_ignores_no_signal_that_only_python_does(port: int) -> None:
    config = CommandTunnelConfig(command=("grep", "SigIgn", "/proc/self/status"), url_pattern="http.*")
    text = await refused(CommandTunnel(config).expose(port).__aenter__())
    pythons_own = 1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1
    assert ignored_signals(text) == signals_ignored_here() & ~pythons_own


# -- output -----------------------------------------------------------------------------------------


async def test_flood_of_output_blocks_nothing(program: Program, port: int) -> None:
    tunnel = program.tunnel({"flood": 60_000, "flood_after": 60_000}, gone_pattern="was deleted")
    async with tunnel.expose(port) as url:
        await until(lambda: program.has("flooded-0"))
        assert await serves(url)
        assert tunnel.restarts == 0


async def test_last_50_lines_are_quoted(program: Program, port: int) -> None:
    text = await refused(program.tunnel({"flood": 1000, "exit": 1}).expose(port).__aenter__())
    quoted = text.splitlines()[1:]
    assert len(quoted) == 50
    assert quoted[0].startswith("  line 950 ")
    assert quoted[-1].startswith("  line 999 ")


async def test_odd_output_is_made_presentable(program: Program, port: int) -> None:
    raw = (
        b"\x1b[1;31mred\x1b[0m\r\n"
        b"\xff\xfe bytes\n"
        b"spin 1\rspin 2\r\n\n\n"
        b"\x1b]8;;http://x\x07link\x1b]8;;\x07\n" + b"WIDE" + b"\nno line end"
    )
    text = await refused(program.tunnel({"raw": raw.hex(), "exit": 1}).expose(port).__aenter__())
    *short, long, last = (line.removeprefix("  ") for line in text.splitlines()[1:])
    assert short == ["red", "�� bytes", "spin 1", "spin 2", "link"]
    assert long == "x" * 1999 + "…"
    assert last == "no line end"


async def test_secrets_are_masked_everywhere(program: Program, port: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    second = "a second secret\nover two lines"
    env = {"TOKEN": SECRET, "LONGER": SECRET + "-and-more", "KEY": second, "LEVEL": "info"}
    say = ["token $LONGER, $TOKEN refused at level $LEVEL", "$KEY", "x" * 1990 + "$TOKEN"]
    options: dict[str, Any] = {"env": env, "gone_pattern": "was deleted"}
    first = program.tunnel({"say": say, "exit": 1}, **options)
    text = await refused(first.expose(port).__aenter__())
    assert "token ***, *** refused at level info\n  ***\n  ***\n" in text

    (program.folder / "run-0").unlink()
    gone = program.tunnel({}, {"say": ["tunnel $TOKEN was deleted"]}, **options)
    events: list[TunnelEvent] = []
    gone.on_event = events.append
    async with gone.expose(port):
        os.kill(program.pid(0), signal.SIGKILL)
        await until(lambda: gone.gone)
    assert "tunnel *** was deleted" in str(gone.gone)
    shown = text + repr(first) + repr(first.config) + repr(gone) + str(gone.gone) + repr(events) + caplog.text
    assert SECRET[:8] not in shown
    assert "second secret" not in shown


# -- restart ----------------------------------------------------------------------------------------


async def test_killed_program_is_restarted_under_the_same_url(
    program: Program, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    tunnel = program.tunnel()
    events: list[TunnelEvent] = []
    tunnel.on_event = events.append
    async with tunnel.expose(port) as url:
        os.kill(program.pid(0), signal.SIGKILL)
        await until(lambda: of(Restarted, events))
        await until(lambda: tunnel.state.name == "serving")
        assert tunnel.url == url
        assert await serves(url)
        assert program.runs == 2
        assert tunnel.gone is None
    assert "was ended by SIGKILL" in caplog.text


async def test_failed_restart_is_tried_again(program: Program, port: int) -> None:
    tunnel = program.tunnel({}, {"say": ["no route"], "exit": 4}, {})
    events: list[TunnelEvent] = []
    tunnel.on_event = events.append
    async with tunnel.expose(port) as url:
        os.kill(program.pid(0), signal.SIGKILL)
        await until(lambda: of(Restarted, events))
        assert await serves(url)
    (failed,) = of(RestartFailed, events)
    assert isinstance(failed, RestartFailed)
    assert "exited with status 4" in failed.error
    assert "no route" in failed.error


async def test_program_that_hangs_is_restarted_and_its_group_ended(
    program: Program, port: int, short_grace: None
) -> None:
    policy = POLICY.model_copy(update={"probe_timeout": 0.5})
    tunnel = program.tunnel({"grandchild": True}, {}, policy=policy)
    async with tunnel.expose(port) as url:
        grandchild = int((program.folder / "grandchild").read_text())
        os.kill(program.pid(0), signal.SIGSTOP)
        await until(lambda: tunnel.restarts == 1)
        assert await serves(url)
        await until(lambda: not {program.pid(0), grandchild} & set(program.alive))


async def test_gone_line_in_a_restart_is_gone(program: Program, port: int) -> None:
    tunnel = program.tunnel({}, {"say": ["hello", "tunnel was deleted"], "exit": 1}, gone_pattern="was deleted")
    told: list[str] = []
    tunnel.on_gone = lambda: told.append("gone")
    async with tunnel.expose(port):
        os.kill(program.pid(0), signal.SIGKILL)
        await until(lambda: tunnel.gone)
        assert isinstance(tunnel.gone, TunnelGoneError)
        assert "'tunnel was deleted'" in str(tunnel.gone)
        assert tunnel.state.name == "gone"
        assert told == ["gone"]
        assert program.runs == 2
        await until(lambda: not program.alive)


async def test_gone_line_without_a_line_end_counts(program: Program, port: int) -> None:
    """The last words of a program that exits are waited for, though its exit may be seen before them."""
    last = {"raw": b"tunnel was deleted".hex(), "exit": 1}
    text = await refused(program.tunnel(last, gone_pattern="was deleted").expose(port).__aenter__())
    assert "says that its tunnel is gone: 'tunnel was deleted'" in text


async def test_other_url_after_a_restart_is_gone(program: Program, port: int) -> None:
    tunnel = program.tunnel({}, {"other_url": True})
    async with tunnel.expose(port) as url:
        os.kill(program.pid(0), signal.SIGKILL)
        await until(lambda: tunnel.gone)
        other = f"http://127.0.0.1:{(program.folder / 'port').read_text()}"
        assert other != url
        assert isinstance(tunnel.gone, UrlChangedError)
        assert (tunnel.gone.old, tunnel.gone.new) == (url, other)
        assert f"under another URL: {other} instead of {url}" in str(tunnel.gone)
        await until(lambda: not program.alive)


async def test_gone_line_while_serving_only_brings_a_probe_forward(
    program: Program, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tunnel")
    tunnel = program.tunnel({"gone_when": "go"}, gone_pattern="was deleted", policy=QUIET)
    async with tunnel.expose(port) as url:
        program.signal("go")
        await until(lambda: "says 'tunnel was deleted'" in caplog.text)
        assert await serves(url)
        assert tunnel.gone is None
        assert program.runs == 1


async def test_late_lines_of_a_replaced_program_count_for_nothing(
    program: Program, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tunnel")
    first = {"last_words": "tunnel was deleted", "deaf_when": "go"}
    tunnel = program.tunnel(first, {}, gone_pattern="was deleted")
    async with tunnel.expose(port) as url:
        program.signal("go")
        await until(lambda: tunnel.restarts == 1 and tunnel.state.name == "serving")
        assert await serves(url)
        assert "was deleted" not in caplog.text


@pytest.mark.parametrize("fault", ["killed", "deaf"])
async def test_by_evidence_it_is_restarted_too(
    program: Program, port: int, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = (
        KeepAlivePolicy(give_up_after=None)
        .scaled(0.02)
        .model_copy(update={"probe_timeout": 5.0, "restart_timeout": 30.0, "clock_jump": 2.0, "exit_poll": 0.05})
    )
    tunnel = program.tunnel({"deaf_when": "go"}, {}, policy=policy)
    async with tunnel.expose(port) as url:
        if fault == "killed":
            os.kill(program.pid(0), signal.SIGKILL)
        else:
            program.signal("go")
        await until(lambda: tunnel.restarts == 1 and tunnel.state.name == "serving")
        assert await serves(url)
        assert program.runs == 2
    assert f"; restarting {sys.executable} under {url}" in caplog.text


# -- end --------------------------------------------------------------------------------------------


async def test_program_that_ignores_sigterm_is_killed(program: Program, port: int, short_grace: None) -> None:
    async with program.tunnel({"ignore_term": True}).expose(port):
        pass
    assert program.pid(0) not in program.alive


async def test_grandchildren_end_with_the_tunnel(program: Program, port: int) -> None:
    async with program.tunnel({"grandchild": True}).expose(port):
        assert int((program.folder / "grandchild").read_text()) in program.alive
    await until(lambda: not program.alive)


async def test_grandchildren_end_with_a_program_that_fails(program: Program, port: int) -> None:
    await refused(program.tunnel({"grandchild": True, "exit": 1}).expose(port).__aenter__())
    await until(lambda: not program.alive)


async def test_error_of_the_body_passes_and_the_program_ends(program: Program, port: int) -> None:
    with pytest.raises(LookupError):
        async with program.tunnel().expose(port):
            raise LookupError
    await until(lambda: not program.alive)


async def test_killed_watchdog_takes_the_program_with_it(program: Program, port: int) -> None:
    tunnel = program.tunnel({"grandchild": True}, {})
    async with tunnel.expose(port) as url:
        os.kill(program.watchdog, signal.SIGKILL)
        await until(lambda: tunnel.restarts == 1)
        assert await serves(url)
        await until(lambda: program.pid(0) not in program.alive)


async def test_hanging_watchdog_does_not_hold_up_the_end(
    program: Program, port: int, short_grace: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_module, "HANG_GRACE", 0.2)
    async with program.tunnel().expose(port):
        os.kill(program.watchdog, signal.SIGSTOP)
    await until(lambda: not program.alive)


@pytest.mark.parametrize("fork", [False, True], ids=["alone", "with a forked process"])
async def test_program_ends_when_this_process_is_killed(program: Program, port: int, fork: bool) -> None:
    """A process forked from the owner holds copies of all its descriptors, and must not keep the program alive."""
    config = program.tunnel({"grandchild": True}).config
    script = program.folder / "owner.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import asyncio, os, signal, sys
            from tunnel import CommandTunnel, CommandTunnelConfig

            async def main():
                config = CommandTunnelConfig.model_validate_json({config.model_dump_json()!r})
                async with CommandTunnel(config).expose({port}) as url:
                    if {fork} and os.fork() == 0:
                        signal.pause()
                    print(url, flush=True)
                    await asyncio.Event().wait()

            asyncio.run(main())
            """
        )
    )
    owner = await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(command_module.__file__).parents[1])},
    )
    try:
        assert owner.stdout is not None
        url = (await owner.stdout.readline()).decode().strip()
        assert await serves(url)
        owner.kill()
        await until(lambda: not {*program.alive} & {program.pid(0), int((program.folder / "grandchild").read_text())})
        await until(lambda: not any("_watchdog.py" in " ".join(arguments) for arguments in program.alive.values()))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(owner.pid, signal.SIGKILL)
        await owner.communicate()


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50, 100, 200])
async def test_cancelled_twice_at_any_step_of_the_start(
    program: Program, port: int, short_grace: None, steps: int
) -> None:
    tunnel = program.tunnel({"ignore_term": True, "mute": True})
    entering = asyncio.ensure_future(tunnel.expose(port).__aenter__())
    for _ in range(steps):
        await asyncio.sleep(0)
    entering.cancel()
    await asyncio.sleep(0)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert not program.alive
    assert tunnel.state.name == "idle"


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_cancelled_while_it_waits_for_the_url(program: Program, port: int, short_grace: None, times: int) -> None:
    tunnel = program.tunnel({"ignore_term": True, "grandchild": True, "mute": True})
    entering = asyncio.ensure_future(tunnel.expose(port).__aenter__())
    await until(lambda: program.runs == 1)
    for _ in range(times):
        entering.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert program.pid(0) not in program.alive


async def test_cancelled_twice_while_it_stops(program: Program, port: int, short_grace: None) -> None:
    exposure = program.tunnel({"ignore_term": True}).expose(port)
    await exposure.__aenter__()
    leaving = asyncio.ensure_future(exposure.__aexit__(None, None, None))
    for _ in range(2):
        await asyncio.sleep(0)
        leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert program.pid(0) not in program.alive


async def test_left_in_the_midst_of_a_restart(program: Program, port: int) -> None:
    tunnel = program.tunnel({}, {"mute": True})
    async with tunnel.expose(port):
        os.kill(program.pid(0), signal.SIGKILL)
        await until(lambda: program.runs == 2)
        assert tunnel.state.name == "restarting"
    await until(lambda: not program.alive)


async def test_no_descriptor_and_no_task_is_left(program: Program, port: int) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async with program.tunnel().expose(port):  # what the loop opens once and keeps
        pass
    before, tasks = descriptors(), asyncio.all_tasks()
    for _ in range(3):
        async with program.tunnel({"grandchild": True}, policy=QUIET).expose(port):
            pass
        await refused(program.tunnel({"exit": 1}).expose(port).__aenter__())
        config = CommandTunnelConfig(command=("no-such-tunnel-program",), url="http://relay.invalid")
        await refused(CommandTunnel(config).expose(port).__aenter__())
    await until(lambda: descriptors() <= before)
    assert asyncio.all_tasks() == tasks


async def test_many_side_by_side(tmp_path: Path, port: int) -> None:
    programs = []
    for number in range(8):
        (folder := tmp_path / f"{number}").mkdir()
        programs.append(Program(folder))
    async with contextlib.AsyncExitStack() as stack:
        urls = await asyncio.gather(
            *(stack.enter_async_context(made.tunnel(policy=QUIET).expose(port)) for made in programs)
        )
        assert len(set(urls)) == 8
        assert all(await asyncio.gather(*map(serves, urls)))
    await until(lambda: not processes(str(tmp_path)))
