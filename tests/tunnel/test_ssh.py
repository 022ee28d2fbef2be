"""SSH tunnels against a real relay, both on loopback: what ends one, what does not, and what is left behind."""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import asyncssh
import pytest
from aiohttp import web
from pydantic import ValidationError

from interception.demo.relay import SshRelay
from interception.demo.relay_process import RelayProcess
from tunnel import (
    HEALTH_PATH,
    KeepAlivePolicy,
    RestartFailed,
    SshTunnelConfig,
    TunnelError,
    TunnelEvent,
    TunnelGoneError,
    TunnelLimitError,
    UrlChangedError,
    make_tunnel,
)
from tunnel.ssh import SshTunnel

USER = "agent"
POLICY = (
    KeepAlivePolicy(rule="plain")
    .scaled(0.01)
    # What a loaded machine needs, not what the rules are about; nothing is given up behind a test's back.
    .model_copy(update={"probe_timeout": 5.0, "restart_timeout": 30.0, "give_up_after": None})
)


async def eventually(holds: Callable[[], Any], what: str, *, within: float = 30.0) -> None:
    deadline = time.monotonic() + within
    while not holds():
        assert time.monotonic() < deadline, f"not within {within:g} s: {what}"
        await asyncio.sleep(0.005)


def open_sockets() -> int:
    found = 0
    for fd in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # the listing's own is closed again
            found += stat.S_ISSOCK(os.fstat(int(fd)).st_mode)
    return found


async def cancelled_twice(work: Coroutine[Any, Any, Any], steps: int, gap: int) -> bool:
    """Cancel `work` after `steps` turns of the event loop and again `gap` later; whether it had ended before."""
    task = asyncio.create_task(work)
    for _ in range(steps):
        await asyncio.sleep(0)
    ended = task.done()
    task.cancel()
    for _ in range(gap):
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
        assert ended, "it swallowed the cancellation"
    return ended


def exists(pid: int | None) -> bool:
    """Whether there is such a process, dead but not waited for included."""
    assert pid is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Service:
    """The local service: its health route, and a call that takes until it is told to end."""

    def __init__(self) -> None:
        self.port = 0
        self.slow_calls = 0
        self.finish = asyncio.Event()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get(HEALTH_PATH, self._health)
        app.router.add_get("/slow", self._slow)
        app.router.add_post("/echo", self._echo)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _slow(self, request: web.Request) -> web.Response:
        self.slow_calls += 1
        await self.finish.wait()
        return web.Response(text="slow")

    async def _echo(self, request: web.Request) -> web.Response:
        return web.Response(body=await request.read())


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of the test's own: no ssh config, key, agent or known host of the user's."""
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return home


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    service = Service()
    await service.start()
    yield service
    await service.stop()


@pytest.fixture
async def relay() -> AsyncIterator[SshRelay]:
    async with SshRelay() as relay:
        yield relay


@pytest.fixture
def key(relay: SshRelay, tmp_path: Path) -> Path:
    return write_key(tmp_path, relay.add_account(USER))


def new_key() -> str:
    return asyncssh.generate_private_key("ssh-ed25519").export_private_key().decode()


def write_key(folder: Path, text: str) -> Path:
    path = folder / "key"
    path.write_text(text)
    path.chmod(0o600)
    return path


@pytest.fixture
def config(relay: SshRelay, key: Path, tmp_path: Path) -> SshTunnelConfig:
    return SshTunnelConfig(
        host="127.0.0.1",
        port=relay.port,
        username=USER,
        client_keys=(key,),
        known_hosts=relay.write_known_hosts(tmp_path / "known_hosts"),
        policy=POLICY,
    )


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    # Each request on a connection of its own, as another host's would be.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        yield session


async def get(http: aiohttp.ClientSession, url: str) -> str:
    async with http.get(url + HEALTH_PATH) as response:
        assert response.status == 200
        return await response.text()


async def start_again(relay: SshRelay) -> None:
    """Under its old port, which anybody's outgoing connection may have got for the moment."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return await relay.start()
        except OSError:
            assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def failed_restarts(tunnel: SshTunnel) -> list[RestartFailed]:
    """Fills as they happen."""
    failures: list[RestartFailed] = []

    def note(event: TunnelEvent) -> None:
        if isinstance(event, RestartFailed):
            failures.append(event)

    tunnel.on_event = note
    return failures


class SilentRelay:
    """A port that takes connections and never says a word."""

    def __init__(self) -> None:
        self.taken = 0
        self.ended = 0

    async def __aenter__(self) -> "SilentRelay":
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.taken += 1
        with contextlib.suppress(ConnectionError):
            await reader.read()
        self.ended += 1
        writer.close()


class TestServing:
    async def test_url_serves_and_the_port_closes_on_leaving(
        self, config: SshTunnelConfig, relay: SshRelay, service: Service, http: aiohttp.ClientSession
    ) -> None:
        tunnel = make_tunnel(config)
        async with tunnel.expose(service.port) as url:
            assert relay.forwards(USER) == [int(url.rpartition(":")[2])]
            assert url == f"http://127.0.0.1:{relay.forwards(USER)[0]}"
            assert await get(http, url) == "ok"
            assert tunnel.state.name == "serving", tunnel.state
        await eventually(lambda: not relay.forwards(USER), "the relay closes the port")
        with pytest.raises(aiohttp.ClientConnectorError):
            await get(http, url)
        assert tunnel.gone is None
        assert repr(tunnel) == "<SshTunnel not exposed idle>"

    async def test_large_bodies_come_through_whole(
        self, config: SshTunnelConfig, service: Service, http: aiohttp.ClientSession
    ) -> None:
        body = os.urandom(900_000)
        async with SshTunnel(config).expose(service.port) as url:
            for _ in range(3):
                async with http.post(url + "/echo", data=body) as response:
                    assert await response.read() == body

    async def test_same_tunnel_can_be_exposed_again(
        self, config: SshTunnelConfig, service: Service, http: aiohttp.ClientSession
    ) -> None:
        tunnel = SshTunnel(config)
        for _ in range(2):
            async with tunnel.expose(service.port) as url:
                assert await get(http, url) == "ok"

    async def test_second_expose_while_exposed_is_an_error(self, config: SshTunnelConfig, service: Service) -> None:
        tunnel = SshTunnel(config)
        async with tunnel.expose(service.port) as url:
            with pytest.raises(TunnelError, match="exposed already"):
                async with tunnel.expose(service.port):
                    pass
            assert tunnel.url == url

    async def test_remote_port_and_url_template_are_honoured(
        self, config: SshTunnelConfig, relay: SshRelay, service: Service
    ) -> None:
        port = free_port()
        own = config.model_copy(update={"remote_port": port, "url": "https://{host}/{port}"})
        async with SshTunnel(own).expose(service.port) as url:
            assert url == f"https://127.0.0.1/{port}"
            assert relay.forwards(USER) == [port]

    async def test_alias_port_user_key_and_known_hosts_of_the_users_ssh_config(
        self, relay: SshRelay, key: Path, home: Path, service: Service, http: aiohttp.ClientSession
    ) -> None:
        relay.write_known_hosts(home / ".ssh" / "known_hosts")
        (home / ".ssh" / "config").write_text(
            f"Host relay\n  HostName 127.0.0.1\n  Port {relay.port}\n  User {USER}\n  IdentityFile {key}\n"
        )
        async with SshTunnel(SshTunnelConfig(host="relay", policy=POLICY)).expose(service.port) as url:
            assert url.startswith("http://127.0.0.1:")
            assert await get(http, url) == "ok"

    async def test_the_reference_is_the_relays_ssh_port_wherever_an_alias_leads(
        self, relay: SshRelay, key: Path, home: Path, service: Service
    ) -> None:
        relay.write_known_hosts(home / ".ssh" / "known_hosts")
        (home / ".ssh" / "config").write_text(
            f"Host relay\n  HostName 127.0.0.1\n  Port {relay.port}\n  User {USER}\n  IdentityFile {key}\n"
        )
        tunnel = SshTunnel(SshTunnelConfig(host="relay", policy=POLICY))
        async with tunnel.expose(service.port):
            assert tunnel._client is not None
            assert await tunnel._client.reference_ok(30.0)
            await relay.stop()
            assert not await tunnel._client.reference_ok(30.0)

    async def test_explicit_keys_are_the_only_ones_offered(
        self, config: SshTunnelConfig, key: Path, home: Path, tmp_path: Path, service: Service
    ) -> None:
        os.rename(key, home / ".ssh" / "id_ed25519")  # would be let in
        other = write_key(tmp_path, new_key())
        with pytest.raises(TunnelLimitError):
            async with SshTunnel(config.model_copy(update={"client_keys": (other,)})).expose(service.port):
                pass
        async with SshTunnel(config.model_copy(update={"client_keys": None})).expose(service.port):
            pass

    async def test_unchecked_trusts_any_relay(self, config: SshTunnelConfig, service: Service) -> None:
        async with SshTunnel(config.model_copy(update={"known_hosts": "unchecked"})).expose(service.port):
            pass

    async def test_local_service_down_restarts_nothing(
        self, config: SshTunnelConfig, relay: SshRelay, service: Service, http: aiohttp.ClientSession
    ) -> None:
        tunnel = SshTunnel(config)
        async with tunnel.expose(service.port) as url:
            await service.stop()
            with pytest.raises(aiohttp.ClientConnectionError):
                await get(http, url)
            await eventually(lambda: tunnel.state.name == "local_down", "the keepalive sees the service down")
            await service.start()
            await eventually(lambda: tunnel.state.name == "serving", "the keepalive sees it up")
            assert await get(http, url) == "ok"
            assert (tunnel.restarts, relay.logins(USER)) == (0, 1)


class TestReconnect:
    async def test_by_evidence_too_a_cut_connection_is_restarted(
        self,
        config: SshTunnelConfig,
        relay: SshRelay,
        service: Service,
        http: aiohttp.ClientSession,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        tunnel = SshTunnel(config.model_copy(update={"policy": POLICY.model_copy(update={"rule": "evidence"})}))
        async with tunnel.expose(service.port) as url:
            await relay.cut(USER)
            await eventually(lambda: tunnel.restarts and tunnel.state.name == "serving", "it serves again")
            assert await get(http, url) == "ok"
        assert f"; restarting the SSH connection under {url}" in caplog.text

    async def test_cut_connection_is_restarted_under_the_same_url(
        self, config: SshTunnelConfig, relay: SshRelay, service: Service, http: aiohttp.ClientSession
    ) -> None:
        tunnel = SshTunnel(config)
        async with tunnel.expose(service.port) as url:
            in_flight = asyncio.create_task(get(http, url + "/slow#"))
            await eventually(lambda: service.slow_calls, "the slow call arrives")
            await relay.cut(USER)
            with pytest.raises(aiohttp.ClientError):
                await in_flight
            await eventually(lambda: tunnel.restarts, "the client is restarted")
            await eventually(lambda: tunnel.state.name == "serving", "the URL is verified")
            assert await get(http, url) == "ok"
            assert tunnel.url == url
            assert (tunnel.restarts, relay.logins(USER)) == (1, 2)

    async def test_relay_down_for_long_is_never_gone(
        self, config: SshTunnelConfig, relay: SshRelay, service: Service, http: aiohttp.ClientSession
    ) -> None:
        tunnel = SshTunnel(config.model_copy(update={"forward_retry": 0.01}))
        failures = failed_restarts(tunnel)
        async with tunnel.expose(service.port) as url:
            await relay.stop()
            await eventually(lambda: len(failures) >= 5, "five restarts fail")
            assert tunnel.gone is None
            assert tunnel.state.name == "restarting"
            await start_again(relay)
            await eventually(lambda: tunnel.state.name == "serving", "it serves again")
            assert await get(http, url) == "ok"

    async def test_forward_held_by_the_old_session_is_asked_for_again(
        self, config: SshTunnelConfig, relay: SshRelay, service: Service, http: aiohttp.ClientSession
    ) -> None:
        tunnel = SshTunnel(config)
        failures = failed_restarts(tunnel)
        async with tunnel.expose(service.port) as url:
            relay.hold(USER)
            await relay.cut(USER)
            await eventually(lambda: len(failures) >= 3, "it asks again and again")
            assert tunnel.gone is None
            assert all("old session" in failure.error for failure in failures)
            relay.let_go(USER)
            await eventually(lambda: tunnel.state.name == "serving", "it serves again")
            assert await get(http, url) == "ok"
            assert relay.forwards(USER) == [int(url.rpartition(":")[2])]

    async def test_forward_refused_for_longer_than_forward_retry_is_gone_once(
        self, config: SshTunnelConfig, relay: SshRelay, service: Service
    ) -> None:
        told: list[str] = []
        tunnel = SshTunnel(config.model_copy(update={"forward_retry": 0.3}))
        tunnel.on_gone = lambda: told.append(tunnel.state.name)
        async with tunnel.expose(service.port):
            relay.refuse_forwards(USER, True)
            await relay.cut(USER)
            await eventually(lambda: tunnel.gone, "it is gone")
            assert "refused to forward" in str(tunnel.gone)
            assert relay.logins(USER) > 2  # it was tried more than once
            logins = relay.logins(USER)
        assert told == ["gone"]
        assert relay.logins(USER) == logins

    async def test_refusals_before_and_after_an_outage_are_not_in_a_row(
        self, config: SshTunnelConfig, relay: SshRelay, service: Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A relay that came back after a long outage has its whole `forward_retry` again."""
        tunnel = SshTunnel(config)
        client = await tunnel._connect(service.port)
        clock = asyncio.get_running_loop()
        relay.refuse_forwards(USER, True)
        with pytest.raises(TunnelError, match="refused to forward"):
            await client.restart()
        await relay.stop()
        with pytest.raises(TunnelError, match="no connection"):
            await client.restart()
        await start_again(relay)
        with monkeypatch.context() as patch:
            patch.setattr(clock, "time", lambda: time.monotonic() + config.forward_retry + 1)
            with pytest.raises(TunnelError) as refusal:
                await client.restart()
        assert not isinstance(refusal.value, TunnelGoneError)
        await tunnel._disconnect()

    async def test_key_refused_on_a_reconnect_is_gone_once(
        self, config: SshTunnelConfig, relay: SshRelay, service: Service
    ) -> None:
        told: list[str] = []
        tunnel = SshTunnel(config)
        tunnel.on_gone = lambda: told.append(tunnel.state.name)
        async with tunnel.expose(service.port):
            await relay.revoke(USER)
            await eventually(lambda: tunnel.gone, "it is gone")
            assert "refused the login key" in str(tunnel.gone)
        assert told == ["gone"]

    async def test_another_port_than_the_first_is_gone(
        self, config: SshTunnelConfig, relay: SshRelay, service: Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tunnel = SshTunnel(config)
        client = await tunnel._connect(service.port)
        monkeypatch.setattr("asyncssh.listener.SSHTCPClientListener.get_port", lambda self: 9)
        with pytest.raises(UrlChangedError, match=f"http://127.0.0.1:9 instead of {client.url}"):
            await client.restart()
        assert not client.is_running
        await tunnel._disconnect()

    async def test_half_open_relay_shows_by_keepalives(
        self, config: SshTunnelConfig, service: Service, tmp_path: Path
    ) -> None:
        async with RelayProcess(tmp_path) as relay:
            own = config.model_copy(
                update={
                    "port": relay.port,
                    "client_keys": (await relay.account("stopped"),),
                    "username": "stopped",
                    "known_hosts": relay.known_hosts,
                    "keepalive_interval": 0.2,
                }
            )
            tunnel = SshTunnel(own)
            client = await tunnel._connect(service.port)
            assert client.is_running
            assert relay.pid is not None
            os.kill(relay.pid, signal.SIGSTOP)
            try:
                began = time.monotonic()
                await eventually(lambda: not client.is_running, "the silence shows")
                assert time.monotonic() - began >= 3 * 0.2
            finally:
                os.kill(relay.pid, signal.SIGCONT)
            assert await client.restart() == client.url
            await tunnel._disconnect()


class TestFirstStart:
    async def expose(self, config: SshTunnelConfig, port: int = 9) -> None:
        tunnel = SshTunnel(config)
        async with tunnel.expose(port):
            pytest.fail("exposed")

    async def test_refused_key_is_a_limit_at_once(
        self, config: SshTunnelConfig, relay: SshRelay, tmp_path: Path
    ) -> None:
        await relay.revoke(USER)
        with pytest.raises(TunnelLimitError, match="refused the login key"):
            await self.expose(config.model_copy(update={"start_timeout": 60.0}))
        assert relay.logins(USER) == 0

    async def test_encrypted_key_never_prompts(self, config: SshTunnelConfig, tmp_path: Path) -> None:
        private = asyncssh.generate_private_key("ssh-ed25519")
        write_key(tmp_path, private.export_private_key("pkcs8-pem", "secret", pbe_version=2).decode())
        with pytest.raises(TunnelLimitError, match="ssh agent"):
            await self.expose(config)

    async def test_missing_key_file_is_a_limit(self, config: SshTunnelConfig, tmp_path: Path) -> None:
        with pytest.raises(TunnelLimitError, match="nowhere"):
            await self.expose(config.model_copy(update={"client_keys": (tmp_path / "nowhere",)}))

    async def test_refused_forward_is_asked_for_until_start_timeout(
        self, config: SshTunnelConfig, relay: SshRelay
    ) -> None:
        relay.refuse_forwards(USER, True)
        began = time.monotonic()
        with pytest.raises(TunnelError, match=r"old session.*AllowTcpForwarding.*GatewayPorts") as raised:
            await self.expose(config.model_copy(update={"start_timeout": 1.5}))
        assert not isinstance(raised.value, TunnelGoneError | TunnelLimitError)
        assert time.monotonic() - began >= 1.5
        assert relay.logins(USER) > 1
        assert relay.forwards(USER) == []

    async def test_port_held_by_an_old_session_is_waited_for(
        self, config: SshTunnelConfig, relay: SshRelay, service: Service, http: aiohttp.ClientSession
    ) -> None:
        port = free_port()
        own = config.model_copy(update={"remote_port": port})
        old = SshTunnel(own)
        await old._connect(service.port)
        relay.hold(USER)
        await relay.cut(USER)
        tunnel = SshTunnel(own)
        exposure = tunnel.expose(service.port)
        entering = asyncio.create_task(exposure.__aenter__())
        await eventually(lambda: relay.logins(USER) >= 3, "it is refused, and logs in again")
        assert not entering.done()
        relay.let_go(USER)
        assert await get(http, await entering) == "ok"
        await exposure.__aexit__(None, None, None)
        await old._disconnect()

    @pytest.mark.parametrize("known", ["", "another relay's", "missing"])
    async def test_unknown_host_key_names_the_remedy(
        self, config: SshTunnelConfig, relay: SshRelay, tmp_path: Path, known: str
    ) -> None:
        path = tmp_path / "known_hosts"
        if known == "missing":
            path.unlink()
        elif known:
            path.write_text(
                relay.known_hosts_line.rpartition("ssh-ed25519")[0]
                + asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode()
            )
        else:
            path.write_text("")
        with pytest.raises(TunnelError, match="known_hosts") as raised:
            await self.expose(config)
        assert type(raised.value) is TunnelError
        shown = relay.known_hosts_line.split(maxsplit=1)[1]
        fingerprint = asyncssh.import_public_key(shown).get_fingerprint()
        assert known == "missing" or fingerprint in str(raised.value)
        if known == "":
            assert f"ssh-keyscan -p {relay.port} 127.0.0.1 >> {path}" in str(raised.value)
        elif known != "missing":
            assert "ANOTHER host key" in str(raised.value)
            assert f"ssh-keygen -f {path} -R '[127.0.0.1]:{relay.port}'" in str(raised.value)
        assert relay.logins(USER) == 0

    async def test_without_known_hosts_the_users_own_file_is_asked(
        self, config: SshTunnelConfig, relay: SshRelay
    ) -> None:
        with pytest.raises(TunnelError, match=r"known_hosts does not vouch.*>> ~/.ssh/known_hosts"):
            await self.expose(config.model_copy(update={"known_hosts": None}))

    async def test_unreachable_relay(self, config: SshTunnelConfig) -> None:
        with pytest.raises(TunnelError, match="no connection to the SSH relay") as raised:
            await self.expose(config.model_copy(update={"port": free_port()}))
        assert type(raised.value) is TunnelError

    async def test_name_that_does_not_resolve(self, config: SshTunnelConfig) -> None:
        with pytest.raises(TunnelError, match="no connection to the SSH relay"):
            await self.expose(config.model_copy(update={"host": "no host has this name"}))

    async def test_relay_that_says_nothing(self, config: SshTunnelConfig) -> None:
        async with SilentRelay() as silent:
            with pytest.raises(TunnelError, match=r"within 0\.3 s"):
                await self.expose(config.model_copy(update={"port": silent.port, "start_timeout": 0.3}))
            await eventually(lambda: silent.ended == 1, "the connection is closed")

    async def test_relay_that_hangs_up(self, config: SshTunnelConfig) -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            with pytest.raises(TunnelError, match="no connection to the SSH relay"):
                await self.expose(config.model_copy(update={"port": server.sockets[0].getsockname()[1]}))

    async def test_relay_lost_while_the_forward_is_asked_for_is_not_a_refusal(
        self, config: SshTunnelConfig, relay: SshRelay, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def cut_instead(session: Any, host: str, port: int) -> bool:
            await relay.cut(USER)
            return False

        monkeypatch.setattr("interception.demo.relay._Session.server_requested", cut_instead)
        with pytest.raises(TunnelError, match="closed the connection"):
            await self.expose(config)
        assert relay.logins(USER) == 1

    async def test_no_secret_shows(
        self, config: SshTunnelConfig, relay: SshRelay, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("DEBUG")
        text = relay.add_account(USER)
        write_key(tmp_path, text)
        tunnel = SshTunnel(config)
        async with tunnel.expose(9):
            shown = repr(tunnel) + repr(tunnel._client) + repr(config) + caplog.text
        assert not any(line in shown for line in text.splitlines()[1:-1])

    def test_password_fields_do_not_exist(self) -> None:
        with pytest.raises(ValidationError):
            SshTunnelConfig(host="relay", password="x")  # type: ignore[call-arg]


class TestCancellation:
    async def test_cancelled_twice_while_the_relay_says_nothing(self, config: SshTunnelConfig) -> None:
        before = asyncio.all_tasks()
        async with SilentRelay() as silent:
            tunnel = SshTunnel(config.model_copy(update={"port": silent.port}))
            entering = asyncio.create_task(tunnel.expose(9).__aenter__())
            await eventually(lambda: silent.taken, "the relay is connected to")
            entering.cancel()
            await asyncio.sleep(0)
            entering.cancel()
            with pytest.raises(asyncio.CancelledError):
                await entering
            await eventually(lambda: silent.ended, "the connection is closed")
            await eventually(lambda: asyncio.all_tasks() <= before, "no task is left")
            assert tunnel.url is None
            assert tunnel.state.name == "idle"

    async def test_cancelled_twice_while_the_relay_does_not_answer_the_forward(
        self, config: SshTunnelConfig, relay: SshRelay, service: Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked, answer = asyncio.Event(), asyncio.Event()

        async def wait(session: Any, host: str, port: int) -> bool:
            asked.set()
            await answer.wait()
            return False

        monkeypatch.setattr("interception.demo.relay._Session.server_requested", wait)
        before = asyncio.all_tasks()
        entering = asyncio.create_task(SshTunnel(config).expose(service.port).__aenter__())
        await asked.wait()
        assert await cancelled_twice(asyncio.wait_for(entering, 60), 1, 1) is False
        await eventually(lambda: not relay._connections, "the connection is closed")
        answer.set()
        await eventually(lambda: asyncio.all_tasks() <= before, "no task is left")

    @pytest.mark.parametrize("gap", [1, 3])
    async def test_cancelled_twice_at_any_step_of_a_start(
        self, config: SshTunnelConfig, relay: SshRelay, service: Service, gap: int
    ) -> None:
        before_tasks, before_sockets = asyncio.all_tasks(), open_sockets()
        tunnel = SshTunnel(config)
        for steps in itertools.count():
            exposure = tunnel.expose(service.port)
            if entered := await cancelled_twice(exposure.__aenter__(), steps, gap):
                await exposure.__aexit__(None, None, None)
            await eventually(lambda: not relay._connections, f"the relay sees the connection end ({steps})")
            await eventually(lambda: asyncio.all_tasks() <= before_tasks, f"no task is left ({steps})")
            if entered:
                break
        await eventually(lambda: open_sockets() <= before_sockets, "no socket is left")

    @pytest.mark.parametrize("gap", [1, 3])
    async def test_cancelled_twice_at_any_step_of_a_restart(
        self, config: SshTunnelConfig, relay: SshRelay, service: Service, gap: int
    ) -> None:
        before_tasks, before_sockets = asyncio.all_tasks(), open_sockets()
        tunnel = SshTunnel(config)
        client = await tunnel._connect(service.port)
        for steps in itertools.count():
            if await cancelled_twice(client.restart(), steps, gap):
                break
            # Without a step it has not begun; later the old connection is closed and a new one must not stay.
            assert client.is_running == (steps == 0), steps
            await eventually(lambda: client.is_running or not relay._connections, f"no connection is left ({steps})")
        assert client.is_running
        await tunnel._disconnect()
        await eventually(lambda: not relay._connections, "the connection is closed")
        await eventually(lambda: asyncio.all_tasks() <= before_tasks, "no task is left")
        await eventually(lambda: open_sockets() <= before_sockets, "no socket is left")

    async def test_connection_that_comes_in_at_any_step_of_leaving(
        self, config: SshTunnelConfig, relay: SshRelay, service: Service
    ) -> None:
        before_tasks, before_sockets = asyncio.all_tasks(), open_sockets()
        for steps in range(30):
            async with SshTunnel(config).expose(service.port):
                port = relay.forwards(USER)[0]
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET ")
                for _ in range(steps):
                    await asyncio.sleep(0)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            await eventually(lambda: not relay._connections, "the connection is closed")
            await eventually(lambda: asyncio.all_tasks() <= before_tasks, "no task is left", within=10)
            await eventually(lambda: open_sockets() <= before_sockets, f"no socket is left ({steps})", within=5)

    async def test_cancelled_twice_while_leaving_still_closes(
        self, config: SshTunnelConfig, relay: SshRelay, service: Service
    ) -> None:
        tunnel = SshTunnel(config)
        exposure = tunnel.expose(service.port)
        await exposure.__aenter__()
        leaving = asyncio.create_task(exposure.__aexit__(None, None, None))
        for _ in range(2):
            await asyncio.sleep(0)
            leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await eventually(lambda: not relay._connections, "the connection is closed")
        assert tunnel.url is None


class TestRelay:
    @pytest.mark.skipif(sys.platform != "linux", reason="needs a second loopback address")
    async def test_nothing_but_remote_forwarding(self, relay: SshRelay, key: Path) -> None:
        async with asyncssh.connect(
            "127.0.0.1", relay.port, username=USER, client_keys=[str(key)], known_hosts=None
        ) as connection:
            with pytest.raises(asyncssh.ChannelOpenError):
                await connection.run("true")
            with pytest.raises(asyncssh.ChannelOpenError):
                await connection.start_sftp_client()
            with pytest.raises(asyncssh.ChannelOpenError):
                await connection.open_connection("127.0.0.1", relay.port)
            listener = await connection.forward_remote_port("0.0.0.0", 0, "127.0.0.1", 9)
            with socket.create_server(("127.0.0.2", listener.get_port())):
                pass  # it does not listen on all addresses, else this one were taken

    async def test_one_account_cannot_take_anothers_port_or_key(self, relay: SshRelay, tmp_path: Path) -> None:
        first, second = relay.add_account("first"), relay.add_account("second")
        options: dict[str, Any] = {"known_hosts": None, "agent_path": None}
        own = asyncssh.import_private_key(first)
        with pytest.raises(asyncssh.PermissionDenied):
            await asyncssh.connect("127.0.0.1", relay.port, username="second", client_keys=[own], **options)
        async with (
            asyncssh.connect("127.0.0.1", relay.port, username="first", client_keys=[own], **options) as one,
            asyncssh.connect(
                "127.0.0.1",
                relay.port,
                username="second",
                client_keys=[asyncssh.import_private_key(second)],
                **options,
            ) as two,
        ):
            port = (await one.forward_remote_port("", 0, "127.0.0.1", 9)).get_port()
            with pytest.raises(asyncssh.ChannelListenError):
                await two.forward_remote_port("", port, "127.0.0.1", 9)
            assert (relay.forwards("first"), relay.forwards("second")) == ([port], [])

    async def test_unknown_account_is_named(self, relay: SshRelay) -> None:
        with pytest.raises(ValueError, match="'nobody'"):
            await relay.cut("nobody")


class TestRelayProcess:
    async def test_serves_cuts_revokes_and_ends(
        self, service: Service, http: aiohttp.ClientSession, tmp_path: Path
    ) -> None:
        async with RelayProcess(tmp_path) as relay:
            pid = relay.pid
            assert pid is not None
            assert os.getsid(pid) == pid  # a terminal's Ctrl-C does not reach it
            key = await relay.account(USER)
            assert stat.S_IMODE(key.stat().st_mode) == 0o600
            tunnel = SshTunnel(
                SshTunnelConfig(
                    host="127.0.0.1",
                    port=relay.port,
                    username=USER,
                    client_keys=(key,),
                    known_hosts=relay.known_hosts,
                    policy=POLICY,
                )
            )
            async with tunnel.expose(service.port) as url:
                assert await get(http, url) == "ok"
                await relay.cut(USER)
                await eventually(lambda: tunnel.restarts == 1, "the client is restarted")
                assert await get(http, url) == "ok"
                await relay.revoke(USER)
                await eventually(lambda: tunnel.gone, "it is gone")
            with pytest.raises(RuntimeError, match="'nobody'"):
                await relay.cut("nobody")
        assert not exists(pid)
        assert relay.pid is None
        with pytest.raises(RuntimeError, match="not started"):
            await relay.cut(USER)

    async def test_sigterm_ends_it_without_a_traceback(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        async with RelayProcess(tmp_path) as relay:
            assert relay.pid is not None
            assert relay._process is not None
            os.kill(relay.pid, signal.SIGTERM)
            assert await relay._process.wait() == 0
            with pytest.raises(RuntimeError, match="has ended"):
                await relay.account(USER)
        assert capfd.readouterr().err == ""

    async def test_cancelled_twice_while_starting_leaves_no_process(self, tmp_path: Path) -> None:
        relay = RelayProcess(tmp_path)
        entering = asyncio.create_task(relay.__aenter__())
        await eventually(lambda: relay.pid, "the process is there")
        pid = relay.pid
        for _ in range(2):
            entering.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await entering
        assert not exists(pid)

    async def test_one_that_does_not_end_is_killed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("interception.demo.relay_process.END_TIMEOUT", 0.2)
        async with RelayProcess(tmp_path) as relay:
            pid = relay.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
        assert not exists(pid)
