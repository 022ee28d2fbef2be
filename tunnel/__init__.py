"""Tunnels that keep serving: a local port made reachable, watched through its public URL, restarted when that helps."""

from typing import TYPE_CHECKING, Any

from tunnel import readymade
from tunnel.base import Tunnel
from tunnel.config import (
    BaseTunnelConfig,
    CommandTunnelConfig,
    CustomTunnelConfig,
    PrimeTunnelConfig,
    SshTunnelConfig,
    TunnelConfig,
    make_tunnel,
)
from tunnel.custom import CustomTunnel
from tunnel.errors import TunnelError, TunnelGoneError, TunnelLimitError, UrlChangedError
from tunnel.health import HEALTH_PATH, IDENTITY_HEADER, PROBE_HEADER
from tunnel.keepalive import TunnelClient, keep_serving
from tunnel.logs import TunnelLogHandler
from tunnel.policy import KeepAlivePolicy
from tunnel.serving import Entrance, add_health_route, health_middleware
from tunnel.state import (
    Counters,
    Gone,
    Restarted,
    RestartFailed,
    StateChanged,
    StateName,
    TunnelEvent,
    TunnelState,
)

if TYPE_CHECKING:
    from tunnel.command import CommandTunnel
    from tunnel.prime import PrimeTunnel
    from tunnel.ssh import SshTunnel

__all__ = [
    "HEALTH_PATH",
    "IDENTITY_HEADER",
    "PROBE_HEADER",
    "BaseTunnelConfig",
    "CommandTunnel",
    "CommandTunnelConfig",
    "Counters",
    "CustomTunnel",
    "CustomTunnelConfig",
    "Entrance",
    "Gone",
    "KeepAlivePolicy",
    "PrimeTunnel",
    "PrimeTunnelConfig",
    "RestartFailed",
    "Restarted",
    "SshTunnel",
    "SshTunnelConfig",
    "StateChanged",
    "StateName",
    "Tunnel",
    "TunnelClient",
    "TunnelConfig",
    "TunnelError",
    "TunnelEvent",
    "TunnelGoneError",
    "TunnelLimitError",
    "TunnelLogHandler",
    "TunnelState",
    "UrlChangedError",
    "add_health_route",
    "health_middleware",
    "keep_serving",
    "make_tunnel",
    "readymade",
]

_LAZY = {"CommandTunnel": "tunnel.command", "PrimeTunnel": "tunnel.prime", "SshTunnel": "tunnel.ssh"}


def __getattr__(name: str) -> Any:
    """The tunnels whose libraries take time to import are loaded when they are asked for."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
