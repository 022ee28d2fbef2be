"""Rollouts served from processes of their own, which fail fast and not silently."""

from typing import TYPE_CHECKING, Any

from envserver.client import EnvClient
from envserver.env import Emit, Env, load_env
from envserver.errors import EnvRequestError, EnvServerError, EnvServerStartupError
from envserver.serve import env_server, serve_env
from envserver.server import EnvServer
from envserver.startup import wait_for_address

if TYPE_CHECKING:
    from envserver.pool import EnvServerPool

__all__ = [
    "Emit",
    "Env",
    "EnvClient",
    "EnvRequestError",
    "EnvServer",
    "EnvServerError",
    "EnvServerPool",
    "EnvServerStartupError",
    "env_server",
    "load_env",
    "serve_env",
    "wait_for_address",
]


def __getattr__(name: str) -> Any:
    """The broker is loaded when it is asked for: no worker needs it."""
    if name == "EnvServerPool":
        from envserver.pool import EnvServerPool

        return EnvServerPool
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
