"""`interception tunnel`, as a user runs it."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from typer.testing import CliRunner

import interception.cli
from interception.demo.relay import SshRelay
from tests.helpers import Switch, until
from tests.prime import FakePrime
from tests.scrapes import Scrape
from tests.sshd import Sshd, free_port, needs_sshd

USER = "agent"


class Exposed:
    """`interception tunnel`, while it runs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.told: list[str] = []
        """Its lines on stderr so far."""
        self._reading = asyncio.create_task(self._read())

    async def url(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(60):
            return (await self.process.stdout.readline()).decode().removesuffix("\n")

    async def ended(self) -> int:
        async with asyncio.timeout(60):
            await self._reading
            return await self.process.wait()

    def said(self, text: str) -> bool:
        return any(text in line for line in self.told)

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.told.append(line.decode().rstrip("\n"))


@contextlib.asynccontextmanager
async def exposed(*arguments: str, home: Path, **variables: str) -> AsyncIterator[Exposed]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PRIME_", "SSH_", "INTERCEPTION_"))
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "interception",
        "tunnel",
        *arguments,
        env={**kept, **variables, "HOME": str(home)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    running = Exposed(process)
    try:
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        await running.ended()
        assert not running.said("Traceback"), running.told


@pytest.fixture
async def local() -> AsyncIterator[Switch]:
    async with Switch() as local:
        yield local


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[SshRelay]:
    """With all that its user needs in the settings of `tmp_path`."""
    async with SshRelay() as relay:
        key = tmp_path / "key"
        key.write_text(relay.add_account(USER))
        key.chmod(0o600)
        known = relay.write_known_hosts(tmp_path / "known_hosts")
        (tmp_path / ".config").mkdir()
        (tmp_path / ".config" / "interception.toml").write_text(
            f'[tunnel]\ntype = "ssh"\n\n[ssh]\nhost = "127.0.0.1"\nport = {relay.port}\nusername = "{USER}"\n'
            f'client_keys = ["{key}"]\nknown_hosts = "{known}"\npolicy.exit_poll = 0.1\n'
        )
        yield relay


async def get(url: str) -> int:
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session, session.get(url + "/path") as response:
        return response.status


async def test_the_url_alone_on_stdout_and_what_happens_on_stderr(
    relay: SshRelay, local: Switch, tmp_path: Path
) -> None:
    async with exposed(str(local.port), home=tmp_path) as running:
        url = await running.url()
        assert url == f"http://127.0.0.1:{relay.forwards(USER)[0]}"
        assert await get(url) == 200
        await relay.cut(USER)
        await until(lambda: running.said("serving again"))
        assert running.said("its client exited; restarting the SSH connection")
        assert await get(url) == 200
        running.process.send_signal(signal.SIGINT)
        assert await running.ended() == 130
        assert running.process.stdout is not None
        assert await running.process.stdout.read() == b""
    await until(lambda: not relay.forwards(USER))


async def test_its_numbers_are_on_a_page_of_their_own(relay: SshRelay, local: Switch, tmp_path: Path) -> None:
    async with exposed(str(local.port), "--metrics-port", "0", home=tmp_path) as running:
        url = await running.url()
        await until(lambda: running.said("metrics are on "))
        page = next(line for line in running.told if "metrics are on " in line).rpartition(" ")[2]
        async with aiohttp.ClientSession() as session, session.get(page) as response:
            text = await response.text()
        scrape = Scrape.read(text, ("tunnel_",))
        assert scrape.get("tunnel_tunnels", name="interception", type="ssh", state="serving") == 1
        assert url not in text
        port = page.removesuffix("/metrics").rpartition(":")[2]
        async with exposed(str(local.port), "--metrics-port", port, home=tmp_path) as second:
            assert await second.ended() == 2
            assert second.said(f"port {port} cannot be had")


async def test_one_that_is_gone_is_told_in_a_line_and_a_status(relay: SshRelay, local: Switch, tmp_path: Path) -> None:
    async with exposed(str(local.port), home=tmp_path) as running:
        await running.url()
        await relay.revoke(USER)
        assert await running.ended() == 1
        assert running.told[-1].startswith("error: ")
        assert "refused the login key" in running.told[-1]


async def test_one_that_cannot_be_made(local: Switch, tmp_path: Path) -> None:
    async with exposed(str(local.port), "--type", f"ssh://me@127.0.0.1:{free_port()}", home=tmp_path) as running:
        assert await running.ended() == 1
        assert running.told[-1].startswith("error: no connection to the SSH relay me@127.0.0.1:")
        assert running.told[-1].endswith("connection refused")
        assert await running.url() == ""


async def test_without_credentials_for_prime(local: Switch, tmp_path: Path) -> None:
    async with exposed(str(local.port), home=tmp_path) as running:
        assert await running.ended() == 1
        assert running.told == ["error: no Prime credentials: set PRIME_API_KEY or run `prime login`"]


@pytest.mark.parametrize(
    "arguments", [["0"], ["8000", "--health", "x"], ["8000", "--type", "none"], ["8000", "--set", "x"]]
)
def test_a_wrong_argument_is_status_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(interception.cli.app, ["tunnel", *arguments]).exit_code == 2


async def test_settings_that_nobody_knows_are_status_2(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[tunel]\n")
    async with exposed("8000", home=tmp_path, INTERCEPTION_CONFIG=str(tmp_path / "mine.toml")) as running:
        assert await running.ended() == 2
        assert running.told == [f"error: {tmp_path}/mine.toml has what nobody knows: [tunel] (did you mean tunnel?)"]


@pytest.mark.parametrize("word", ["doctor", "tunnel"])
async def test_a_program_that_fails_is_quoted_in_lines_and_cannot_speak_to_the_terminal(
    word: str, tmp_path: Path
) -> None:
    program = tmp_path / "client"
    program.write_text("#!/bin/sh\nprintf 'one\\a\\302\\23331m\\ntwo\\n'; exit 3\n")
    program.chmod(0o755)
    arguments = ["doctor", "--tunnel"] if word == "doctor" else ["tunnel", "8000", "--type"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "interception", *arguments, "command"),
        *("--set", f"command={program}", "--set", "url_pattern=http.*"),
        env={**os.environ, "HOME": str(tmp_path)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said = (await process.communicate())[0].decode()
    assert process.returncode == 1
    lines = [line.strip() for line in said.splitlines()]
    assert lines[lines.index("one??31m") + 1] == "two"
    assert not {"\a", "\x9b"} & {*said}


async def test_a_terminal_that_is_closed_ends_it_as_ctrl_c_does(relay: SshRelay, local: Switch, tmp_path: Path) -> None:
    async with exposed(str(local.port), home=tmp_path) as running:
        await running.url()
        running.process.send_signal(signal.SIGHUP)
        assert await running.ended() == 129  # -1 is what it would be without a handler
        await until(lambda: relay.forwards(USER) == [])


async def test_prime(local: Switch, tmp_path: Path) -> None:
    with FakePrime(tmp_path, scale=0.1) as service:
        async with exposed(str(local.port), home=service.home, **service.env()) as running:
            assert await get(await running.url()) == 200
            running.process.send_signal(signal.SIGTERM)
            assert await running.ended() == 143
        assert (service.live(), service.frpc_pids(), service.config_files()) == ([], [], [])


class TestHealth:
    """Any service can be exposed, and its restarts are told from its tunnel's faults."""

    QUICK = ("--set", "policy.idle_spacing=0.2")

    async def test_a_service_of_its_own_kind(self, relay: SshRelay, local: Switch, tmp_path: Path) -> None:
        local.behaviour = 404
        async with exposed(str(local.port), *self.QUICK, home=tmp_path) as running:
            assert await get(await running.url()) == 404
            await until(lambda: local.paths.count("/") >= 2)
            assert not running.said("local_down")

    async def test_a_path_of_its_own(self, relay: SshRelay, local: Switch, tmp_path: Path) -> None:
        quick = [*self.QUICK, "--set", "policy.probe_timeout=1"]
        async with exposed(str(local.port), "--health", "/healthz", *quick, home=tmp_path) as running:
            await running.url()
            await until(lambda: local.paths.count("/healthz") >= 3)
            local.behaviour = "silent"
            await until(lambda: running.said("local_down"))
            local.behaviour = 200
            await until(lambda: running.said("serving again"))
            assert not running.said("restarting")

    async def test_a_path_that_it_does_not_have(self, relay: SshRelay, local: Switch, tmp_path: Path) -> None:
        local.behaviour = 404
        async with exposed(str(local.port), "--health", "/healthz", home=tmp_path) as running:
            await running.url()
            assert running.said("/healthz answers 404, not 200")

    async def test_one_that_is_not_there_yet(self, relay: SshRelay, tmp_path: Path) -> None:
        port = free_port()
        async with exposed(str(port), *self.QUICK, home=tmp_path) as running:
            url = await running.url()
            assert running.said(f"nothing answers at http://127.0.0.1:{port} yet")
            await until(lambda: running.said("local_down"))

            async def answer(request: web.BaseRequest) -> web.Response:
                return web.Response(status=403)

            runner = web.ServerRunner(web.Server(answer))
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            await until(lambda: running.said("serving again"))
            assert await get(url) == 403
            await runner.cleanup()


@needs_sshd
async def test_it_is_stopped_and_goes_on_under_the_same_url(local: Switch, tmp_path: Path) -> None:
    """SIGSTOP, as by Ctrl-Z or a laptop's lid; the relay has given its session up meanwhile."""
    with Sshd(tmp_path / "relay", ClientAliveInterval="1", ClientAliveCountMax="1") as sshd:
        relay = ["--type", f"ssh://127.0.0.1:{sshd.port}", "--set", f"client_keys={sshd.key}"]
        async with exposed(
            str(local.port), *relay, "--set", f"known_hosts={sshd.known_hosts}", home=tmp_path
        ) as running:
            url = await running.url()
            running.process.send_signal(signal.SIGSTOP)
            await until(lambda: not sshd.sessions())
            running.process.send_signal(signal.SIGCONT)
            await until(lambda: running.said("serving again"))
            assert await get(url) == 200
