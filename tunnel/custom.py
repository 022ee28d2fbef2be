"""A URL of your own: watched, never restarted, never gone."""

from tunnel.base import Tunnel
from tunnel.config import CustomTunnelConfig
from tunnel.errors import TunnelError
from tunnel.keepalive import TunnelClient


class CustomTunnel(Tunnel):
    """Hands out a URL that reaches this host's `port` already. Opens nothing; its state is probed and shown."""

    restartable = False

    def __init__(self, config: CustomTunnelConfig) -> None:
        super().__init__(config.policy, config.mark)
        self.config = config
        self.bind_host = config.bind_host
        self.bind_port = config.port

    async def _connect(self, port: int) -> TunnelClient:
        if port != self.config.port:
            raise TunnelError(
                f"{self.config.url} forwards to port {self.config.port}, but the server listens on {port}: "
                "bind it to the tunnel's bind_port"
            )
        return _Fixed(self.config.url)

    async def _disconnect(self) -> None:
        pass


class _Fixed:
    """A client that is somebody else's."""

    is_running = True

    def __init__(self, url: str) -> None:
        self.url: str | None = url

    async def restart(self) -> str:
        raise TunnelError(f"{self.url} is not ours to restart")
