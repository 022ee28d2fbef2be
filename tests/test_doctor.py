"""`interception doctor`: what it finds, what it says of it, and that its exit status is the truth."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from interception.demo.relay import SshRelay
from interception.doctor import Finding, examine, works
from tests.prime import FakePrime
from tests.sshd import Sshd, needs_sshd
from tunnel import CommandTunnelConfig, CustomTunnelConfig, PrimeTunnelConfig, SshTunnelConfig, TunnelConfig


async def found(config: TunnelConfig | None) -> dict[str, Finding]:
    findings = await examine(config, lambda finding: None)
    return {finding.check: finding for finding in findings}


def good(findings: dict[str, Finding]) -> bool:
    return works(list(findings.values()))


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "home" / ".ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return tmp_path / "home"


class TestPrime:
    @pytest.fixture
    def service(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePrime]:
        with FakePrime(tmp_path, scale=0.1) as service:
            for name, value in service.env().items():
                monkeypatch.setenv(name, value)
            yield service

    async def test_all_is_well(self, service: FakePrime) -> None:
        findings = await found(PrimeTunnelConfig())
        assert good(findings), findings
        assert [*findings] == [
            "python", "packages", "files", "ports", "proxy", "credentials", "dns", "api", "clock", "frpc", "tunnel",
        ]  # fmt: skip
        assert "takes the key" in findings["api"].detail
        assert findings["clock"].status == "ok"
        assert "leads here" in findings["tunnel"].detail
        assert (service.live(), service.frpc_pids(), service.config_files()) == ([], [], [])

    async def test_no_credentials(self, service: FakePrime, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("PRIME_API_KEY")
        findings = await found(PrimeTunnelConfig())
        assert not good(findings)
        assert "prime login" in findings["credentials"].detail
        assert (findings["api"].status, findings["tunnel"].status) == ("skip", "skip")
        assert service.created == []

    async def test_a_key_that_is_refused_is_not_shown(
        self, service: FakePrime, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PRIME_API_KEY", "sk-not-the-right-one")
        findings = await found(PrimeTunnelConfig())
        assert "refuses the key" in findings["api"].detail
        assert not good(findings)
        assert "sk-not-the-right-one" not in str(findings)

    async def test_an_api_out_of_reach(self, service: FakePrime) -> None:
        service.api_down()
        findings = await found(PrimeTunnelConfig())
        assert findings["api"].status == "fail"
        assert "firewall" in (findings["api"].remedy or "")

    async def test_an_api_without_a_name(self, service: FakePrime, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PRIME_API_BASE_URL", "http://api.invalid")
        findings = await found(PrimeTunnelConfig())
        assert "api.invalid does not resolve" in findings["dns"].detail
        assert (findings["api"].status, findings["tunnel"].status) == ("skip", "skip")

    async def test_behind_a_proxy_the_name_is_left_to_it(
        self, service: FakePrime, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        api = os.environ["PRIME_API_BASE_URL"]
        asked: list[str] = []

        async def forward(request: web.BaseRequest) -> web.Response:
            asked.append(request.host)
            async with (
                aiohttp.ClientSession() as client,
                client.request(
                    request.method, api + request.rel_url.path_qs, headers=request.headers, data=await request.read()
                ) as answer,
            ):
                return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)

        async with RawTestServer(forward, host="127.0.0.1") as proxy:
            monkeypatch.setenv("PRIME_API_BASE_URL", "http://api.invalid")
            monkeypatch.setenv("http_proxy", f"http://me:sk-of-the-proxy@127.0.0.1:{proxy.port}")
            monkeypatch.setattr("interception.doctor.URL_TIMEOUT", 0.1)
            findings = await found(PrimeTunnelConfig())
        assert findings["dns"].detail == "api.invalid is left to the proxy; 127.0.0.1 is an address"
        assert findings["api"].status == findings["dns"].status == "ok", findings
        assert "api.invalid" in asked
        assert "sk-of-the-proxy" not in str(findings)

    async def test_a_proxy_without_a_name(self, service: FakePrime, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PRIME_API_BASE_URL", "http://api.invalid")
        monkeypatch.setenv("http_proxy", "http://proxy.invalid:3128")
        findings = await found(PrimeTunnelConfig())
        assert "proxy.invalid does not resolve" in findings["dns"].detail
        monkeypatch.setenv("no_proxy", "api.invalid")
        findings = await found(PrimeTunnelConfig())
        assert findings["dns"].detail.startswith("api.invalid does not resolve")

    async def test_a_quota_that_is_spent(self, service: FakePrime) -> None:
        service.refuse_creates(429, "You have reached the maximum number of tunnels")
        findings = await found(PrimeTunnelConfig())
        assert findings["tunnel"].status == "fail"
        assert "maximum number of" in findings["tunnel"].detail

    async def test_proxy_variables_are_told(self, service: FakePrime, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        monkeypatch.setattr("interception.doctor.URL_TIMEOUT", 0.1)  # asked through that proxy, as agents' hosts do
        findings = await found(PrimeTunnelConfig())
        assert (findings["proxy"].status, findings["proxy"].remedy) == (
            "warn",
            "if it cannot connect: unset http_proxy",
        )

    @pytest.mark.parametrize(("fault", "status", "said"), [
        ("missing", "warn", "not there yet"), ("old", "warn", "of version 0.0.1"), ("broken", "fail", "cannot be run"),
        ("liar", "warn", "says '9.9.9'"),
    ])  # fmt: skip
    async def test_frpc(self, service: FakePrime, fault: str, status: str, said: str) -> None:
        from interception.doctor import _frpc

        frpc = service.home / ".prime" / "bin" / "frpc"
        match fault:
            case "missing":
                frpc.unlink()
            case "old":
                frpc.with_name(".frpc_version").write_text("0.0.1")
            case "broken":
                frpc.unlink()
                frpc.write_text("not for this machine")
            case "liar":
                frpc.unlink()
                frpc.write_text("#!/bin/sh\necho 9.9.9\n")
                frpc.chmod(0o755)
        finding = await _frpc()
        assert (finding.status, said in finding.detail) == (status, True), finding

    @pytest.mark.parametrize("fault", ["no folder can be made", "nothing can be written"])
    async def test_a_home_that_cannot_be_written(self, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
        from interception.doctor import _frpc

        monkeypatch.setenv("HOME", "/dev/null" if fault == "no folder can be made" else str(Path.home()))
        if fault == "nothing can be written":
            monkeypatch.setattr("os.access", lambda path, mode: False)  # as root may write anywhere
            monkeypatch.setattr("prime_tunnel.Config.bin_dir", Path("/nowhere"))
        finding = await _frpc()
        assert (finding.status, finding.remedy) == ("fail", "set HOME to a folder that you may write to")


class TestSsh:
    @pytest.fixture
    async def relay(self) -> AsyncIterator[SshRelay]:
        async with SshRelay() as relay:
            yield relay

    @pytest.fixture
    def config(self, relay: SshRelay, home: Path, tmp_path: Path) -> SshTunnelConfig:
        key = tmp_path / "key"
        key.write_text(relay.add_account("agent"))
        key.chmod(0o600)
        return SshTunnelConfig(
            host="127.0.0.1",
            port=relay.port,
            username="agent",
            client_keys=(key,),
            known_hosts=relay.write_known_hosts(tmp_path / "known_hosts"),
            start_timeout=1.0,
        )

    async def test_all_is_well(self, config: SshTunnelConfig, relay: SshRelay) -> None:
        findings = await found(config)
        assert good(findings), findings
        assert [*findings] == ["python", "packages", "files", "ports", "dns", "login", "tunnel"]
        assert "AsyncSSH" in findings["login"].detail
        assert relay.forwards("agent") == []

    async def test_a_key_that_is_refused(self, config: SshTunnelConfig, relay: SshRelay) -> None:
        await relay.revoke("agent")
        findings = await found(config)
        assert "refused the login key" in findings["login"].detail
        assert "authorized_keys" in (findings["login"].remedy or "")
        assert (findings["tunnel"].status, good(findings)) == ("skip", False)

    @pytest.mark.parametrize("key", ["none", "~nobody-of-this-name/key"])
    async def test_a_key_file_that_is_not_there(self, config: SshTunnelConfig, key: str) -> None:
        """Told as that, and not as a relay that may be down."""
        login = (await found(config.model_copy(update={"client_keys": (Path(key),)})))["login"]
        assert (login.status, login.remedy) == ("fail", None)
        assert "cannot be used" in login.detail

    async def test_no_right_to_forward(self, config: SshTunnelConfig, relay: SshRelay) -> None:
        relay.refuse_forwards("agent", True)
        findings = await found(config)
        assert findings["login"].status == "ok"
        assert "AllowTcpForwarding" in findings["tunnel"].detail
        assert not good(findings)

    async def test_an_unknown_host_key(self, config: SshTunnelConfig, tmp_path: Path) -> None:
        (tmp_path / "known_hosts").write_text("")
        assert "ssh-keyscan" in (await found(config))["login"].detail

    async def test_nobody_there(self, config: SshTunnelConfig, relay: SshRelay) -> None:
        await relay.stop()
        assert (await found(config))["login"].detail.endswith("connection refused")

    async def test_no_such_name(self, home: Path) -> None:
        findings = await found(SshTunnelConfig(host="relay.invalid"))
        assert "relay.invalid does not resolve" in findings["dns"].detail
        assert "login" not in findings

    async def test_an_ssh_config_that_cannot_be_read(self, home: Path) -> None:
        (home / ".ssh" / "config").write_text("Port what\n")
        findings = await found(SshTunnelConfig(host="relay.invalid"))
        assert "~/.ssh/config cannot be used" in findings["login"].detail

    @needs_sshd
    async def test_gateway_ports_of_a_real_sshd(self, home: Path, tmp_path: Path) -> None:
        with Sshd(tmp_path / "relay", ListenAddress="127.0.0.2") as sshd:
            sshd.vouch("127.0.0.2", sshd.port)
            findings = await found(
                SshTunnelConfig(host="127.0.0.2", port=sshd.port, client_keys=(sshd.key,), known_hosts=sshd.known_hosts)
            )
        assert "OpenSSH" in findings["login"].detail
        assert "GatewayPorts" in findings["tunnel"].detail
        assert not good(findings)


class TestOthers:
    async def test_without_a_tunnel(self) -> None:
        findings = await found(None)
        assert good(findings)
        assert findings["tunnel"].status == "skip"

    async def test_a_program_that_is_not_there(self) -> None:
        findings = await found(CommandTunnelConfig(command=("no-such-program",), url="http://a.example"))
        assert findings["program"] == Finding(
            "program", "fail", "there is no program no-such-program", "install it, or give its whole path"
        )
        assert not good(findings)

    async def test_a_program_that_leads_elsewhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("interception.doctor.URL_TIMEOUT", 0.1)

        async def other(request: web.Request) -> web.Response:
            return web.Response(text="not you")

        runner = web.ServerRunner(web.Server(other))  # type: ignore[arg-type]
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        findings = await found(CommandTunnelConfig(command=("sleep", "60"), url=url))
        await runner.cleanup()
        assert "somebody else answers there" in findings["tunnel"].detail
        assert not good(findings)

    async def test_a_custom_url_whose_port_is_taken(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            findings = await found(CustomTunnelConfig(url=f"http://127.0.0.1:{port}", port=port, bind_host="127.0.0.1"))
        assert "cannot listen on" in findings["ports"].detail
        assert (findings["tunnel"].status, good(findings)) == ("skip", False)

    async def test_a_custom_url_that_leads_here(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        findings = await found(CustomTunnelConfig(url=f"http://127.0.0.1:{port}", port=port, bind_host="127.0.0.1"))
        assert good(findings), findings


def run(*arguments: str, home: Path) -> "subprocess.CompletedProcess[str]":
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PRIME_", "INTERCEPTION_"))}
    return subprocess.run(
        [sys.executable, "-m", "interception", "doctor", *arguments],
        env={**env, "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_what_a_user_sees(tmp_path: Path) -> None:
    ran = run("--tunnel", "ssh://me@relay.invalid", home=tmp_path)
    assert (ran.returncode, ran.stderr) == (1, "")
    lines = ran.stdout.splitlines()
    assert lines[0].startswith("ok   python       3.")
    [dns] = [number for number, line in enumerate(lines) if line.startswith("fail dns")]
    assert lines[dns + 1].startswith(" " * 18 + "→ ")
    assert lines[-1] == "The ssh tunnel would not work: 1 check failed."


def test_json_is_one_object_and_nothing_else(tmp_path: Path) -> None:
    ran = run("--tunnel", "none", "--json", home=tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    told = json.loads(ran.stdout)
    assert (told["tunnel"], told["works"]) == ("none", True)
    assert {"check", "status", "detail", "remedy"} == set(told["checks"][0])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_told_in_a_line() -> None:
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "interception", "doctor", "--tunnel", "none"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert ran.stderr == "interception: what it has to say could not be written: No space left on device\n"
    assert ran.returncode == 1
