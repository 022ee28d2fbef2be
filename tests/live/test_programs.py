"""The ready-made configs with the programs themselves, at their own pace. `python -m tests.live.install` first."""

import asyncio
import contextlib
import os
import platform
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import prime_tunnel
import pytest

from tests.helpers import Switch, until
from tests.live.install import FRPC, LT, LT_SERVER
from tests.prime.wire import WirePrime
from tests.sshd import Sshd, free_port, needs_ssh, needs_sshd
from tunnel import (
    CommandTunnel,
    CommandTunnelConfig,
    KeepAlivePolicy,
    SshTunnelConfig,
    Tunnel,
    TunnelError,
    TunnelEvent,
    UrlChangedError,
    make_tunnel,
    readymade,
)

pytestmark = pytest.mark.live

# The programs' own times are what they are, and so is the policy; only the looks at a healthy URL come more often.
POLICY = KeepAlivePolicy(idle_spacing=3.0, exit_poll=0.2)
LONG = 120.0

needs_frpc = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or not FRPC.exists(),
    reason="no real frpc here (linux-x64): python -m tests.live.install",
)
needs_localtunnel = pytest.mark.skipif(
    not LT_SERVER.exists() or shutil.which("node") is None, reason="no localtunnel here: python -m tests.live.install"
)


@pytest.fixture
async def local() -> AsyncIterator[Switch]:
    async with Switch() as local:
        yield local


def quick(config: CommandTunnelConfig, **policy: Any) -> CommandTunnel:
    made = make_tunnel(config.model_copy(update={"policy": POLICY.model_copy(update=policy)}))
    assert isinstance(made, CommandTunnel)
    return made


async def get(url: str) -> int:
    connector = aiohttp.TCPConnector(force_close=True, resolver=aiohttp.ThreadedResolver())
    async with aiohttp.ClientSession(connector=connector) as session, session.get(url + "/path") as response:
        return response.status


def restarted(tunnel: Tunnel) -> bool:
    return tunnel.counters.restarts > 0 and tunnel.state.name == "serving"


class TestFrpc:
    """`frpc -c CONFIG`, as its owner writes it, against a relay that speaks frps's protocol."""

    pytestmark = needs_frpc

    @pytest.fixture
    def service(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WirePrime]:
        with WirePrime(tmp_path, FRPC) as service:
            for name, value in service.env().items():
                monkeypatch.setenv(name, value)
            yield service

    @pytest.fixture
    async def config(self, service: WirePrime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandTunnelConfig:
        async with prime_tunnel.TunnelClient() as api:
            record = await api.create_tunnel(1)
        toml = tmp_path / "frpc.toml"
        toml.write_text(
            f'serverAddr = "{record.server_host}"\nserverPort = {record.server_port}\n'
            f'user = "{record.tunnel_id}"\nauth.token = "{record.frp_token}"\nloginFailExit = false\n'
            f'metadatas.binding_secret = "{record.binding_secret}"\n[[proxies]]\nname = "{record.tunnel_id}"\n'
            f'type = "http"\nlocalIP = "127.0.0.1"\nlocalPort = {{{{ .Envs.LOCAL_PORT }}}}\n'
            f'subdomain = "{record.tunnel_id}"\n'
        )
        # A third party's build runs without rights, as everywhere here.
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "frpc").write_text(
            f"#!{sys.executable}\nimport os, sys\nconfig = os.memfd_create('frpc.toml', 0)\n"
            "os.write(config, open(sys.argv[2], 'rb').read())\n"
            "if os.geteuid() == 0:\n    os.setgroups([])\n    os.setgid(65534)\n    os.setuid(65534)\n"
            f"os.execve({str(FRPC.resolve())!r}, ['frpc', '-c', f'/proc/self/fd/{{config}}'], "
            "{'PATH': '/usr/bin:/bin', 'LOCAL_PORT': os.environ['LOCAL_PORT']})\n"
        )
        (tmp_path / "bin" / "frpc").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
        return readymade.frpc(toml, url=record.url)

    async def test_it_serves_and_is_restarted(
        self, config: CommandTunnelConfig, service: WirePrime, local: Switch
    ) -> None:
        tunnel = quick(config)
        async with tunnel.expose(local.port) as url:
            assert await asyncio.gather(*(get(url) for _ in range(10))) == [200] * 10
            service.lose_route(service.created[0])
            await until(lambda: restarted(tunnel), LONG)
            assert tunnel.url == url
            assert await get(url) == 200


class TestLocaltunnel:
    pytestmark = needs_localtunnel

    @pytest.fixture(autouse=True)
    def names(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every name below localhost is this host, as many systems have it and Debian has not."""
        real = socket.getaddrinfo

        def resolve(host: Any, *arguments: Any, **options: Any) -> Any:
            return real("127.0.0.1" if str(host).endswith(".localhost") else host, *arguments, **options)

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        monkeypatch.setenv("PATH", f"{LT.parent}{os.pathsep}{os.environ['PATH']}")

    @pytest.fixture
    def port(self) -> int:
        return free_port()

    @contextlib.asynccontextmanager
    async def server(self, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
        process = await asyncio.create_subprocess_exec(
            "node", str(LT_SERVER), str(port), "localhost", stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        async with asyncio.timeout(60):
            assert await process.stdout.readline() == b"listening\n"
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    async def test_it_serves_and_is_restarted_under_its_own_name(self, port: int, local: Switch) -> None:
        async with self.server(port):
            config = readymade.localtunnel(host=f"http://localhost:{port}", subdomain="interception")
            tunnel = quick(config)
            async with tunnel.expose(local.port) as url:
                assert url == f"http://interception.localhost:{port}"
                assert [await get(url) for _ in range(5)] == [200] * 5
                assert local.paths.count("/path") == 5
                await self.kill_client(tunnel)
                # The server keeps a name for a second after its client has gone: one that is back sooner gets another.
                await until(lambda: restarted(tunnel) or tunnel.gone, LONG)
                assert isinstance(tunnel.gone, UrlChangedError) if tunnel.gone else await get(url) == 200

    async def test_another_name_after_a_restart_is_gone_and_says_which(self, port: int, local: Switch) -> None:
        async with self.server(port):
            tunnel = quick(readymade.localtunnel(host=f"http://localhost:{port}"))
            async with tunnel.expose(local.port) as url:
                assert await get(url) == 200
                assert "/path" in local.paths
                await self.kill_client(tunnel)
                await until(lambda: tunnel.gone, LONG)
                assert isinstance(tunnel.gone, UrlChangedError)
                assert tunnel.gone.old == url
                assert tunnel.gone.new.endswith(f".localhost:{port}")
                assert tunnel.gone.new != url

    async def test_a_server_that_is_not_there(self, port: int, local: Switch) -> None:
        """Its client says nothing of that, and tries on."""
        config = readymade.localtunnel(host=f"http://localhost:{port}").model_copy(update={"start_timeout": 5.0})
        with pytest.raises(TunnelError, match=r"'lt' showed no URL within 5 s .*; it printed nothing"):
            async with quick(config).expose(local.port):
                pass

    async def kill_client(self, tunnel: CommandTunnel) -> None:
        assert tunnel._client is not None
        assert tunnel._client._program is not None
        assert tunnel._client._program._process is not None
        watchdog = tunnel._client._program._process.pid
        children = Path(f"/proc/{watchdog}/task/{watchdog}/children").read_text().split()  # noqa: ASYNC240
        os.kill(int(children[0]), signal.SIGKILL)


@needs_sshd
@needs_ssh
class TestStoppedRelay:
    """A stopped relay is noticed within ten seconds, by both, as they are."""

    @pytest.mark.parametrize("kind", ["asyncssh", "ssh"])
    async def test_noticed_within_ten_seconds(self, kind: str, local: Switch, tmp_path: Path) -> None:
        with Sshd(tmp_path / "relay") as sshd:
            if kind == "asyncssh":
                tunnel: Tunnel = make_tunnel(
                    SshTunnelConfig(
                        host="127.0.0.1", port=sshd.port, client_keys=(sshd.key,), known_hosts=sshd.known_hosts
                    )
                )
            else:
                port = free_port()
                options = ("-F", "none", "-p", str(sshd.port), "-i", str(sshd.key))
                options += ("-o", f"UserKnownHostsFile={sshd.known_hosts}")
                tunnel = make_tunnel(
                    readymade.ssh("127.0.0.1", url=f"http://127.0.0.1:{port}", remote_port=port, options=options)
                )
            events: list[TunnelEvent] = []
            tunnel.on_event = events.append
            async with tunnel.expose(local.port) as url:
                assert await get(url) == 200
                began = time.monotonic()
                sshd.freeze()
                await until(lambda: tunnel.state.name == "restarting", LONG)
                took = time.monotonic() - began
                sshd.thaw()
                await until(lambda: restarted(tunnel), LONG)
                assert await get(url) == 200
        # The keepalive's own second at most, and what a busy machine adds.
        assert took < 13.0, took
