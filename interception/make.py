"""From a config to what it describes."""

from interception.base import Interception
from interception.config import (
    ElasticInterceptionPoolConfig,
    InterceptionConfig,
    InterceptionServerConfig,
    StaticInterceptionPoolConfig,
)
from interception.elastic import ElasticInterceptionPool
from interception.pool import StaticInterceptionPool
from interception.server import InterceptionServer


def make_interception(
    config: InterceptionConfig, *, requires_tunnel: bool, state_service_secrets: tuple[str, ...] = ()
) -> Interception:
    """The server or pool a config describes; it opens nothing before `start`."""
    match config:
        case InterceptionServerConfig():
            return InterceptionServer(config, requires_tunnel, state_service_secrets)
        case StaticInterceptionPoolConfig():
            return StaticInterceptionPool(config, requires_tunnel, state_service_secrets)
        case ElasticInterceptionPoolConfig():
            return ElasticInterceptionPool(config, requires_tunnel, state_service_secrets)
        case _:
            raise TypeError(f"not an interception config: {type(config).__name__}")
