"""The ready-made configs, on output that their programs have printed: no program is needed for that."""

import inspect
import re
from collections.abc import Callable

import pytest

from tunnel import CommandTunnelConfig, make_tunnel, readymade

CLOUDFLARED_2023 = """\
2023-04-18T14:06:46Z INF Requesting new quick Tunnel on trycloudflare.com...
2023-04-18T14:06:49Z INF |  Your quick Tunnel has been created! Visit it at (it may take some time to be reachable):  |
2023-04-18T14:06:49Z INF |  https://buffalo-marco-cardiff-motel.trycloudflare.com                                     |
2023-04-18T14:06:50Z INF Registered tunnel connection connIndex=0 connection=6f1f location=mad05 protocol=http2
"""
CLOUDFLARED_2022 = """\
2022-06-01T16:23:10Z INF |  https://four-dashed-word-url.trycloudflare.com                                            |
2022-06-01T16:23:12Z INF Connection c206cf44-945f-4c3c-a85c-af60c6338dc2 registered connIndex=0 location=ORD
"""
CLOUDFLARED_OFFLINE = """\
2026-02-03T13:19:49Z INF Requesting new quick Tunnel on trycloudflare.com...
failed to request quick Tunnel: Post "https://api.trycloudflare.com/tunnel": dial tcp: lookup: no such host
"""
NGROK = """\
t=2026-01-02T10:00:00+0000 lvl=info msg="client session established" obj=tunnels.session
t=2026-01-02T10:00:01+0000 lvl=info msg="started tunnel" obj=tunnels name=command_line addr=http://127.0.0.1:8000 \
url=https://ab12-203-0-113-7.ngrok-free.app
"""
NGROK_REFUSED = """\
t=2026-01-02T10:00:00+0000 lvl=eror msg="failed to reconnect session" err="authentication failed: ERR_NGROK_107"
"""
FRPC = """\
2026-01-02 10:00:00.000 [I] [client/service.go:331] [1f] login to server success, get run id [1f]
2026-01-02 10:00:00.010 [I] [client/control.go:172] [1f] [web] start proxy success
"""
SSH = """\
debug1: Authentication succeeded (publickey).
debug1: remote forward success for: listen 18080, connect 127.0.0.1:8000
"""
SSH_REFUSED = "me@relay.example: Permission denied (publickey).\n"
SSH_IN_USE = "Error: remote port forwarding failed for listen port 18080\n"


def by_ssh() -> CommandTunnelConfig:
    return readymade.ssh("relay", url="http://relay.example:18080", remote_port=18080)


def by_frpc() -> CommandTunnelConfig:
    return readymade.frpc("frpc.toml", url="https://a.example")


ALL: list[Callable[[], CommandTunnelConfig]] = [by_ssh, by_frpc, *readymade.BY_NAME.values()]


def url_in(config: CommandTunnelConfig, output: str) -> str | None:
    """As `CommandTunnel` finds it: in the first line that matches."""
    for line in output.splitlines():
        if config.url_pattern is not None and (match := re.search(config.url_pattern, line)):
            return next(filter(None, match.groups()), match[0])
    return None


def has(pattern: str | None, output: str) -> bool:
    return any(re.search(pattern or "(?!)", line) for line in output.splitlines())


@pytest.mark.parametrize(("config", "output", "url"), [
    (readymade.cloudflared(), CLOUDFLARED_2023, "https://buffalo-marco-cardiff-motel.trycloudflare.com"),
    (readymade.cloudflared(), CLOUDFLARED_2022, "https://four-dashed-word-url.trycloudflare.com"),
    (readymade.cloudflared(), CLOUDFLARED_OFFLINE, None),
    (readymade.ngrok(), NGROK, "https://ab12-203-0-113-7.ngrok-free.app"),
    (readymade.ngrok(), NGROK_REFUSED, None),
    (readymade.localtunnel(), "your url is: https://short-quail-44.loca.lt\n", "https://short-quail-44.loca.lt"),
])  # fmt: skip
def test_the_url_is_found(config: CommandTunnelConfig, output: str, url: str | None) -> None:
    assert url_in(config, output) == url


@pytest.mark.parametrize(("config", "output", "ready"), [
    (readymade.cloudflared(), CLOUDFLARED_2023, True), (readymade.cloudflared(), CLOUDFLARED_2022, True),
    (readymade.cloudflared(), CLOUDFLARED_OFFLINE, False), (by_frpc(), FRPC, True), (by_ssh(), SSH, True),
    (by_ssh(), SSH_IN_USE, False), (by_ssh(), SSH_REFUSED, False),
])  # fmt: skip
def test_what_says_that_it_serves(config: CommandTunnelConfig, output: str, ready: bool) -> None:
    assert has(config.ready_pattern, output) == ready


@pytest.mark.parametrize(("config", "output", "gone"), [
    (by_ssh(), SSH_REFUSED, True), (by_ssh(), SSH_IN_USE, False), (by_ssh(), SSH, False),
    (readymade.ngrok(), NGROK_REFUSED, True), (readymade.ngrok(), NGROK, False),
])  # fmt: skip
def test_what_is_final(config: CommandTunnelConfig, output: str, gone: bool) -> None:
    assert has(config.gone_pattern, output) == gone


@pytest.mark.parametrize("ready_made", ALL)
def test_each_is_a_config_that_gets_the_port(ready_made: Callable[[], CommandTunnelConfig]) -> None:
    config = ready_made()
    assert CommandTunnelConfig.model_validate(config.model_dump()) == config
    assert any("{port}" in argument for argument in config.command)
    assert not any("localhost:" in argument for argument in config.command)
    assert config.start_timeout < config.policy.restart_timeout
    make_tunnel(config)


def test_a_token_is_in_no_argument_and_no_repr() -> None:
    config = readymade.ngrok(token="a-token-of-mine")
    assert config.env == {"NGROK_AUTHTOKEN": "a-token-of-mine"}
    assert "a-token-of-mine" not in repr(config) + " ".join(config.command)


@pytest.mark.parametrize("destination", ["", "-oProxyCommand=touch /tmp/x"])
def test_a_destination_that_ssh_would_take_for_an_option_is_refused(destination: str) -> None:
    with pytest.raises(ValueError, match="not a destination"):
        readymade.ssh(destination, url="http://a.example", remote_port=1)


def test_a_name_that_looks_like_an_option_stays_a_value() -> None:
    assert readymade.localtunnel(subdomain="--host").command[-1] == "--subdomain=--host"
    assert "--url=--log" in readymade.ngrok(url="--log").command


@pytest.mark.parametrize("ready_made", ALL)
def test_no_output_keeps_a_pattern_busy(ready_made: Callable[[], CommandTunnelConfig]) -> None:
    """A gap without a bound takes the square of the line's length, and the event loop stands still meanwhile."""
    config = ready_made()
    for pattern in filter(None, (config.url_pattern, config.ready_pattern, config.gone_pattern)):
        assert ".*" not in pattern
        assert ".+" not in pattern


def test_options_of_ssh_win_over_ours() -> None:
    config = readymade.ssh("relay", url="http://a.example", remote_port=1, options=("-o", "ServerAliveInterval=9"))
    assert config.command.index("ServerAliveInterval=9") < config.command.index("ServerAliveInterval=3")


@pytest.mark.parametrize("name", ["ssh", "cloudflared", "ngrok", "frpc", "localtunnel"])
def test_each_says_whether_it_was_run(name: str) -> None:
    assert re.search(r"\*(?:Not )?[Rr]un here\*", inspect.getdoc(getattr(readymade, name)) or "")
