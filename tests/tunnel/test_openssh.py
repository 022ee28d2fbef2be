"""`SshTunnel` and `ssh -R` as a `CommandTunnel`, both through a real OpenSSH server, with the faults that end one."""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pydantic import ValidationError

from tests.helpers import Switch, until
from tests.sshd import Cable, Sshd, free_port, needs_ssh, needs_sshd
from tunnel import (
    CommandTunnel,
    KeepAlivePolicy,
    RestartFailed,
    SshTunnel,
    SshTunnelConfig,
    Tunnel,
    TunnelError,
    TunnelEvent,
    TunnelGoneError,
    TunnelLimitError,
    make_tunnel,
    readymade,
)

pytestmark = [needs_sshd, needs_ssh]

POLICY = (
    KeepAlivePolicy(rule="plain")
    .scaled(0.01)
    # What a loaded machine needs, not what the rules are about; nothing is given up behind a test's back.
    .model_copy(update={"probe_timeout": 5.0, "restart_timeout": 30.0, "give_up_after": None})
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No ssh config, key, agent or known host of the user's: asyncssh goes by HOME, and `ssh` gets none (-F)."""
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return home


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    # It ends sessions whose client says nothing, after two seconds: Debian's never does.
    with Sshd(tmp_path / "relay", ClientAliveInterval="1", ClientAliveCountMax="1") as sshd:
        yield sshd


@pytest.fixture
async def local() -> AsyncIterator[Switch]:
    async with Switch() as local:
        yield local


Make = Callable[..., Tunnel]


def by_asyncssh(sshd: Sshd, *, port: int | None = None, remote_port: int = 0, **fields: Any) -> SshTunnel:
    config = SshTunnelConfig(
        host="127.0.0.1",
        port=port or sshd.port,
        client_keys=(sshd.key,),
        known_hosts=sshd.known_hosts,
        remote_port=remote_port,
        keepalive_interval=0.2,
        start_timeout=fields.pop("start_timeout", 30.0),
        policy=POLICY,
        **fields,
    )
    tunnel = make_tunnel(config)
    assert isinstance(tunnel, SshTunnel)
    return tunnel


def by_command(
    sshd: Sshd, *, port: int | None = None, remote_port: int = 0, jump: str | None = None, **fields: Any
) -> CommandTunnel:
    remote_port = remote_port or free_port()
    options = ["-F", "none", "-p", str(port or sshd.port), "-i", str(sshd.key), "-o", "IdentitiesOnly=yes"]
    options += ["-o", f"UserKnownHostsFile={sshd.known_hosts}", "-o", "ServerAliveInterval=1"]
    config = readymade.ssh(
        "127.0.0.1", url=f"http://127.0.0.1:{remote_port}", remote_port=remote_port, options=tuple(options)
    )
    tunnel = make_tunnel(config.model_copy(update={"policy": POLICY, **fields}))
    assert isinstance(tunnel, CommandTunnel)
    return tunnel


both = pytest.mark.parametrize("make", [by_asyncssh, by_command])


async def get(url: str) -> int:
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session, session.get(url + "/path") as response:
        return response.status


def restarted(tunnel: Tunnel) -> bool:
    return tunnel.counters.restarts > 0 and tunnel.state.name == "serving"


def failures_of(tunnel: Tunnel) -> list[RestartFailed]:
    """Fills as they happen."""
    failures: list[RestartFailed] = []

    def note(event: TunnelEvent) -> None:
        if isinstance(event, RestartFailed):
            failures.append(event)

    tunnel.on_event = note
    return failures


def processes(program: str, folder: Path) -> list[int]:
    """Those of `program` whose arguments name a file in `folder`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name, _, arguments = (entry / "cmdline").read_text().partition("\0")
            if name == program and str(folder) in arguments:
                found.append(int(entry.name))
    return found


@both
async def test_it_serves_and_leaves_no_session(make: Make, sshd: Sshd, local: Switch) -> None:
    tunnel = make(sshd)
    async with tunnel.expose(local.port) as url:
        assert await asyncio.gather(*(get(url) for _ in range(20))) == [200] * 20
        assert local.paths.count("/path") == 20
    await until(lambda: not sshd.sessions())
    with pytest.raises(aiohttp.ClientConnectorError):
        await get(url)


@both
async def test_a_key_that_is_refused(make: Make, sshd: Sshd, local: Switch) -> None:
    sshd.revoke()
    with pytest.raises(TunnelError, match=r"Permission denied|refused the login key") as raised:
        async with make(sshd).expose(local.port):
            pass
    assert isinstance(raised.value, TunnelLimitError) == (make is by_asyncssh)


@both
async def test_a_forward_that_is_forbidden(make: Make, tmp_path: Path, local: Switch) -> None:
    with (
        Sshd(tmp_path / "other", AllowTcpForwarding="no") as sshd,
        pytest.raises(TunnelError, match=r"AllowTcpForwarding|remote port forwarding failed"),
    ):
        async with make(sshd, **({"start_timeout": 0.5} if make is by_asyncssh else {})).expose(local.port):
            pass


async def test_a_port_that_the_relay_keeps_to_itself_is_explained(tmp_path: Path, local: Switch) -> None:
    """GatewayPorts `no` refuses nothing: sshd listens on loopback, whatever it was asked for."""
    with Sshd(tmp_path / "other", ListenAddress="127.0.0.2") as sshd:
        sshd.vouch("127.0.0.2", sshd.port)
        config = by_asyncssh(sshd).config.model_copy(update={"host": "127.0.0.2"})
        with pytest.raises(TunnelError, match=r"GatewayPorts .* is `no`.*clientspecified"):
            async with SshTunnel(config).expose(local.port):
                pass
        await until(lambda: not sshd.sessions())
        with pytest.raises(TunnelError, match=r"listens on 127\.0\.0\.1 only: leave remote_host empty"):
            async with SshTunnel(config.model_copy(update={"remote_host": "127.0.0.1"})).expose(local.port):
                pass
        # A proxy in front of it, which is all we can say of a URL of the user's own.
        behind = SshTunnelConfig(**{**dict(config), "url": "http://127.0.0.1:{port}"})
        async with SshTunnel(behind).expose(local.port) as url:
            assert await get(url) == 200


async def test_gateway_ports_open_it_to_others(tmp_path: Path, local: Switch) -> None:
    with Sshd(tmp_path / "other", ListenAddress="127.0.0.2", GatewayPorts="clientspecified") as sshd:
        sshd.vouch("127.0.0.2", sshd.port)
        config = by_asyncssh(sshd).config.model_copy(update={"host": "127.0.0.2"})
        async with SshTunnel(config).expose(local.port) as url:
            assert url.startswith("http://127.0.0.2:")
            assert await get(url) == 200


@both
async def test_a_port_held_by_a_half_open_session_is_had_again(make: Make, sshd: Sshd, local: Switch) -> None:
    async with Cable(sshd.port) as cable:
        sshd.vouch("127.0.0.1", cable.port)
        tunnel = make(sshd, port=cable.port, remote_port=free_port())
        failures = failures_of(tunnel)
        async with tunnel.expose(local.port) as url:
            cable.tear()
            await until(lambda: restarted(tunnel))
            assert tunnel.url == url
            assert await get(url) == 200
            assert tunnel.gone is None
        # It was in use for a while: the relay learns of its client's end later than we of the relay's.
        refusals = [failure for failure in failures if "forward" in failure.error]
        assert refusals or make is by_command


@both
async def test_a_relay_that_is_restarted(make: Make, sshd: Sshd, local: Switch) -> None:
    tunnel = make(sshd)
    async with tunnel.expose(local.port) as url:
        sshd.stop()
        await until(lambda: tunnel.state.name == "restarting")
        sshd.start()
        await until(lambda: restarted(tunnel))
        assert (tunnel.url, tunnel.gone) == (url, None)
        assert await get(url) == 200


@both
async def test_a_session_that_is_killed(make: Make, sshd: Sshd, local: Switch) -> None:
    tunnel = make(sshd)
    async with tunnel.expose(local.port) as url:
        sshd.end_sessions()
        await until(lambda: restarted(tunnel))
        assert tunnel.url == url
        assert await get(url) == 200


@both
async def test_a_relay_that_is_stopped_is_noticed_and_had_again(make: Make, sshd: Sshd, local: Switch) -> None:
    tunnel = make(sshd)
    failures = failures_of(tunnel)
    async with tunnel.expose(local.port) as url:
        sshd.freeze()
        await until(lambda: tunnel.state.name == "restarting")
        sshd.thaw()
        await until(lambda: restarted(tunnel))
        assert tunnel.url == url
        assert await get(url) == 200
        assert not any("gone" in failure.error for failure in failures)


async def test_an_ssh_that_is_stopped_is_replaced(sshd: Sshd, local: Switch, tmp_path: Path) -> None:
    tunnel = by_command(sshd)
    async with tunnel.expose(local.port) as url:
        [ssh] = processes("ssh", tmp_path)
        os.kill(ssh, signal.SIGSTOP)
        tunnel.report("a rollout's call hangs")
        await until(lambda: restarted(tunnel), 60.0)
        assert ssh not in processes("ssh", tmp_path)
        assert await get(url) == 200


@both
async def test_another_host_key_is_refused_and_never_final(make: Make, sshd: Sshd, local: Switch) -> None:
    tunnel = make(sshd)
    failures = failures_of(tunnel)
    async with tunnel.expose(local.port) as url:
        sshd.stop()
        old = sshd.new_host_key()
        sshd.start()
        await until(lambda: len(failures) >= 2)
        assert any(
            "ANOTHER host key" in failure.error or "IDENTIFICATION HAS CHANGED" in failure.error for failure in failures
        )
        assert tunnel.gone is None
        sshd.stop()
        sshd.host_key = old
        sshd.start()
        await until(lambda: restarted(tunnel))
        assert await get(url) == 200


@both
async def test_an_unknown_host_key_at_the_first_start(make: Make, sshd: Sshd, local: Switch) -> None:
    sshd.known_hosts.write_text("")
    with pytest.raises(TunnelError, match=r"does not vouch for|Host key verification failed"):
        async with make(sshd).expose(local.port):
            pass


@both
async def test_a_key_that_is_revoked_is_gone(make: Make, sshd: Sshd, local: Switch) -> None:
    tunnel = make(sshd)
    async with tunnel.expose(local.port):
        sshd.revoke()
        await until(lambda: tunnel.gone)
        assert isinstance(tunnel.gone, TunnelGoneError)
        assert "ermission denied" in str(tunnel.gone)


@pytest.mark.skipif(shutil.which("ssh-agent") is None, reason="no ssh-agent here")
async def test_a_key_with_a_passphrase_is_for_the_agent(
    sshd: Sshd, local: Switch, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of `~/.ssh` it is passed over, for it would have to be asked for; the agent has it without a question."""
    default = home / ".ssh" / "id_ed25519"
    default.write_bytes(sshd.key.read_bytes())
    default.chmod(0o600)
    (home / ".ssh" / "known_hosts").write_text(sshd.known_hosts.read_text())
    config = SshTunnelConfig(host="127.0.0.1", port=sshd.port, policy=POLICY)
    socket = tmp_path / "agent"
    agent = await asyncio.create_subprocess_exec(
        "ssh-agent", "-D", "-a", str(socket), stdout=asyncio.subprocess.DEVNULL
    )
    try:
        await until(socket.exists)
        await ran("ssh-add", "-q", str(default), SSH_AUTH_SOCK=str(socket))
        await ran("ssh-keygen", "-q", "-p", "-N", "a secret", "-f", str(default))
        with pytest.raises(TunnelLimitError, match="refused the login key"):
            async with SshTunnel(config).expose(local.port):
                pass
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        async with SshTunnel(config).expose(local.port) as url:
            assert await get(url) == 200
    finally:
        agent.terminate()
        await agent.wait()


async def ran(*command: str, **env: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, **env}, stdin=asyncio.subprocess.DEVNULL
    )
    assert await process.wait() == 0


class TestJumpHosts:
    @pytest.fixture
    def jump(self, tmp_path: Path) -> Iterator[Sshd]:
        with Sshd(tmp_path / "jump") as jump:
            yield jump

    def trusted(self, sshd: Sshd, jump: Sshd) -> None:
        """One key and one file of known hosts for both, as `jump` of our config takes them."""
        (jump.folder / "authorized_keys").write_text((sshd.folder / "key.pub").read_text())
        with sshd.known_hosts.open("a") as file:
            file.write(jump.known_hosts.read_text())

    async def test_named_in_our_config(self, sshd: Sshd, jump: Sshd, local: Switch) -> None:
        self.trusted(sshd, jump)
        tunnel = by_asyncssh(sshd, jump=f"{jump.user}@127.0.0.1:{jump.port}")
        async with tunnel.expose(local.port) as url:
            assert await get(url) == 200
            assert jump.sessions()
            assert tunnel._client is not None
            assert tunnel._client._login.first_peer == ("127.0.0.1", jump.port)
            assert await tunnel._client.reference_ok(30.0)
            jump.end_sessions()
            await until(lambda: restarted(tunnel))
            assert await get(url) == 200
        await until(lambda: not jump.sessions() and not sshd.sessions())

    async def test_named_in_the_users_ssh_config(self, sshd: Sshd, jump: Sshd, home: Path, local: Switch) -> None:
        (home / ".ssh" / "config").write_text(
            f"Host relay\n  HostName 127.0.0.1\n  Port {sshd.port}\n  IdentityFile {sshd.key}\n"
            f"  UserKnownHostsFile {sshd.known_hosts}\n  ProxyJump jump\n"
            f"Host jump\n  HostName 127.0.0.1\n  Port {jump.port}\n  IdentityFile {jump.key}\n"
            f"  UserKnownHostsFile {jump.known_hosts}\n"
        )
        async with make_tunnel(SshTunnelConfig(host="relay", policy=POLICY)).expose(local.port) as url:
            assert await get(url) == 200
            assert jump.sessions()
        await until(lambda: not jump.sessions() and not sshd.sessions())

    async def test_one_that_refuses_us_is_named(self, sshd: Sshd, jump: Sshd, local: Switch) -> None:
        with sshd.known_hosts.open("a") as file:
            file.write(jump.known_hosts.read_text())
        with pytest.raises(TunnelLimitError, match=r"the jump host 127\.0\.0\.1 of the SSH relay .* refused the login"):
            async with by_asyncssh(sshd, jump=f"127.0.0.1:{jump.port}").expose(local.port):
                pass

    async def test_one_that_does_not_lead_to_the_relay(self, sshd: Sshd, jump: Sshd, local: Switch) -> None:
        self.trusted(sshd, jump)
        sshd.stop()
        with pytest.raises(TunnelError, match="the jump host before it does not lead there"):
            async with by_asyncssh(sshd, jump=f"127.0.0.1:{jump.port}").expose(local.port):
                pass
        await until(lambda: not jump.sessions())

    async def test_a_circle_is_told(self, home: Path, local: Switch) -> None:
        (home / ".ssh" / "config").write_text("Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n")
        with pytest.raises(TunnelError, match="in a circle"):
            async with make_tunnel(SshTunnelConfig(host="a", policy=POLICY)).expose(local.port):
                pass

    @pytest.mark.parametrize("jump", ["", "host:door", "@:22", "a,,b", "me@", "fe80::1", "me:pass@host", "a b"])
    def test_what_is_none_is_told(self, jump: str) -> None:
        with pytest.raises(ValidationError, match="not jump hosts") as raised:
            SshTunnelConfig(host="relay", jump=jump)
        assert "pass" not in str(raised.value)

    @pytest.mark.parametrize("jump", ["gate", "me@gate:2222,inner", "[fe80::1]:22", "me@[::1]"])
    def test_what_ssh_takes_is_taken(self, jump: str) -> None:
        assert SshTunnelConfig(host="relay", jump=jump).jump == jump

    async def test_one_of_the_users_ssh_config_that_is_none_is_told(self, home: Path, local: Switch) -> None:
        (home / ".ssh" / "config").write_text("Host relay\n  ProxyJump gate:door\n")
        with pytest.raises(TunnelError, match="'gate:door' is not a jump host"):
            async with make_tunnel(SshTunnelConfig(host="relay", policy=POLICY)).expose(local.port):
                pass

    @pytest.mark.parametrize("steps", [40, 80, 160, 320])
    async def test_cancelled_on_the_way_leaves_no_session(
        self, sshd: Sshd, jump: Sshd, local: Switch, steps: int
    ) -> None:
        self.trusted(sshd, jump)
        sshd.freeze()  # it gets no further than the handshake with the relay
        tunnel = by_asyncssh(sshd, jump=f"127.0.0.1:{jump.port}")
        task = asyncio.create_task(tunnel.expose(local.port).__aenter__())
        await until(lambda: jump.sessions() or task.done())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        sshd.thaw()
        await until(lambda: not jump.sessions() and not sshd.sessions())
