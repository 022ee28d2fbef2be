"""Which tunnel to make, as data: pydantic models told apart by `type`."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tunnel.base import Tunnel
from tunnel.policy import KeepAlivePolicy

JUMP = re.compile(r"(?:[^-@:,\s][^@:,\s]*@)?(?:\[[^\]\s]+\]|[^-@:,\s\[][^@:,\s\[]*)(?::(\d{1,5}))?")

HOST = re.compile(r"[^-@/\s\x00-\x1f\[\]][^@/\s\x00-\x1f\[\]]*")
"""What could be taken for an option is no host: a ProxyCommand would hand it to a program."""

USER = re.compile(r"[^-\s\x00-\x1f][^\s\x00-\x1f]*")


def _public_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        good = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and "@" not in parts.netloc  # a password would show in reprs and logs
            and (parts.port is None or parts.port > 0)
            and not (parts.query or parts.fragment or any(mark.isspace() for mark in url))
        )
    except ValueError:  # a port that is no number, or too large
        good = False
    if not good:
        # It is not quoted back: a password may stand in it.
        raise ValueError("not a URL that agents could call: write http://HOST[:PORT] or https://HOST, no more")
    return url.rstrip("/")


class BaseTunnelConfig(BaseModel):
    """What all kinds share. Frozen: one config may serve many tunnels."""

    # Tokens travel in some fields, and an error must not quote them.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    policy: KeepAlivePolicy = KeepAlivePolicy()
    """When to probe, to restart and to give up."""

    mark: Literal["host", "path"] = "host"
    """What tells requests that came in through the URL: its own host in `Host` or `X-Forwarded-Host`, or, where a proxy
    on the way rewrites those, a random marker in the path of the URL handed out."""


class PrimeTunnelConfig(BaseTunnelConfig):
    """Prime's tunnel service (prime-tunnel SDK, frpc). Needs `PRIME_API_KEY` or `prime login`."""

    type: Literal["prime"] = "prime"
    keepalive: Literal["ours", "sdk"] = "ours"
    """`sdk` delegates to the SDK's own `keep_serving`, which prime-tunnel has from 0.1.16 on."""
    name: str | None = None
    team_id: str | None = None
    labels: tuple[str, ...] = ()
    connection_timeout: float = Field(30.0, gt=0)
    """Seconds for frpc to connect, as the SDK's own default."""
    stop_timeout: float = Field(20.0, gt=0)
    """Seconds for ending frpc and deleting the registration; what is left then is named in the log, and deleted by
    the next tunnel of this user that starts."""
    creates_per_minute: int | None = Field(100, gt=0)
    """How many creates all processes of this user may send in any minute (the service's documented limit is 100); the
    next ones wait. None: no limit of ours."""
    deletes_per_minute: int | None = Field(100, gt=0)
    """The same for deletes, each of which waits within `stop_timeout`."""


class CustomTunnelConfig(BaseTunnelConfig):
    """Bring your own URL: a tunnel or proxy that forwards to `port` of this host already. Nothing is opened."""

    type: Literal["custom"] = "custom"
    url: str
    """Public base URL; the model route is `{url}/v1`."""
    port: int = Field(ge=1, le=65535)
    """The local port your tunnel or proxy forwards to."""
    bind_host: str = "0.0.0.0"
    """Where the server listens: on all interfaces, since your proxy may run on another host."""

    _url = field_validator("url")(_public_url)


class SshTunnelConfig(BaseTunnelConfig):
    """Reverse port forwarding (`ssh -R`) to any sshd you can log in to without a password."""

    type: Literal["ssh"] = "ssh"
    host: str
    """The relay's name or address."""
    port: int = Field(22, ge=1, le=65535)
    username: str | None = None
    """None: as `ssh` would choose."""
    jump: str | None = None
    """Hosts to go through, `[USER@]HOST[:PORT]`, several with commas between, as `ssh -J` takes them. `client_keys` and
    `known_hosts` count for them, too. None: as `~/.ssh/config` says (ProxyJump, ProxyCommand)."""
    client_keys: tuple[Path, ...] | None = None
    """Private key files. None: the agent and the default keys of `~/.ssh`."""
    known_hosts: Path | Literal["unchecked"] | None = None
    """File with the relay's host key. None: `~/.ssh/known_hosts`; `unchecked` trusts any relay."""
    remote_host: str = ""
    """Address the relay listens on; empty: all of its interfaces (sshd needs `GatewayPorts`)."""
    remote_port: int = Field(0, ge=0, le=65535)
    """Port the relay listens on; 0: the relay chooses, once."""
    url: str = "http://{host}:{port}"
    """Public URL with `{host}` (the relay) and `{port}` (the forwarded one) filled in, e.g. of a reverse proxy."""
    start_timeout: float = Field(30.0, gt=0)
    """Seconds until the first forward must stand."""
    forward_retry: float = Field(180.0, gt=0)
    """Seconds for which a reconnect whose forward is refused is tried again: a relay that still holds the old
    session refuses the same port, and SSH gives no reason. After that the tunnel is gone."""
    keepalive_interval: float = Field(2.5, gt=0)
    """Seconds between keepalives; three in a row unanswered end the connection when the next is due, after 10 s."""

    @field_validator("host")
    @classmethod
    def _host(cls, host: str) -> str:
        if not HOST.fullmatch(host):
            raise ValueError("not a host: write its name or address alone (a user belongs into username)")
        return host

    @field_validator("username")
    @classmethod
    def _user(cls, username: str | None) -> str | None:
        if username is not None and not USER.fullmatch(username):
            raise ValueError("not a user name")
        return username

    @field_validator("jump")
    @classmethod
    def _hops(cls, jump: str | None) -> str | None:
        hops = [] if jump is None else [JUMP.fullmatch(hop) for hop in jump.split(",")]
        if not all(hop is not None and 0 < int(hop[1] or 22) <= 65535 for hop in hops):
            raise ValueError("not jump hosts: write [USER@]HOST[:PORT], several with commas between")
        return jump

    @field_validator("url")
    @classmethod
    def _template(cls, url: str) -> str:
        try:
            _public_url(url.format(host="relay.example", port=1))
        except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
            # It is not quoted back: a password may stand in it.
            raise ValueError(f"not a URL template: only {{host}} and {{port}} are filled in ({error})") from None
        return url.rstrip("/")


class CommandTunnelConfig(BaseTunnelConfig):
    """Any client program that makes `127.0.0.1:{port}` public: cloudflared, ngrok, frpc, ssh."""

    type: Literal["command"] = "command"
    command: tuple[str, ...] = Field(min_length=1, repr=False)
    """Program and arguments; `{port}` in any of them is replaced by the local port. Tokens belong into `env`, where
    they are kept out of quoted output too."""
    url: str | None = None
    """The public URL, where it is known beforehand."""
    url_pattern: str | None = None
    """Regular expression that finds the URL in the program's output (its first group, else the whole match)."""
    ready_pattern: str | None = None
    """Output that says the tunnel serves. Without it: as soon as the URL leads to the local service, or at once if this
    host cannot tell (the name does not resolve here, the local service is down)."""
    gone_pattern: str | None = None
    """Output that says the registration can never serve again."""
    env: dict[str, str] = Field(default_factory=dict, repr=False)
    """Added to the program's environment (kept out of reprs: tokens travel here)."""
    start_timeout: float = Field(30.0, gt=0)
    """Seconds until the URL must be known and the tunnel up. A restart takes as long, and up to 5 s for ending the
    old program, so keep both within `policy.restart_timeout`."""

    @field_validator("url")
    @classmethod
    def _known(cls, url: str | None) -> str | None:
        return None if url is None else _public_url(url)

    @field_validator("url_pattern", "ready_pattern", "gone_pattern")
    @classmethod
    def _pattern(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.url is None) == (self.url_pattern is None):
            raise ValueError("give either url (known beforehand) or url_pattern (found in the program's output)")
        return self


TunnelConfig = Annotated[
    PrimeTunnelConfig | CustomTunnelConfig | SshTunnelConfig | CommandTunnelConfig, Field(discriminator="type")
]


def make_tunnel(config: TunnelConfig) -> Tunnel:
    """The tunnel a config describes. Opens nothing; missing credentials are a `TunnelError` at once."""
    # Imported here so that nobody pays for the libraries of a tunnel that is not used.
    match config:
        case PrimeTunnelConfig():
            from tunnel.prime import PrimeTunnel

            return PrimeTunnel(config)
        case CustomTunnelConfig():
            from tunnel.custom import CustomTunnel

            return CustomTunnel(config)
        case SshTunnelConfig():
            from tunnel.ssh import SshTunnel

            return SshTunnel(config)
        case CommandTunnelConfig():
            from tunnel.command import CommandTunnel

            return CommandTunnel(config)
        case _:
            raise TypeError(f"not a tunnel config: {type(config).__name__}")
