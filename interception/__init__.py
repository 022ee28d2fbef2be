"""Interception of model calls: servers that catch and record them, and pools that spread rollouts over healthy ones."""

from typing import TYPE_CHECKING, Any

from interception.base import (
    STATE_ROUTE_HEADER,
    AcquireTimeoutError,
    Interception,
    PoolMember,
    Slot,
)
from interception.config import (
    BaseInterceptionConfig,
    ElasticInterceptionPoolConfig,
    InterceptionConfig,
    InterceptionServerConfig,
    StaticInterceptionPoolConfig,
)
from interception.elastic import ElasticInterceptionPool
from interception.headers import CALL_ID_HEADER
from interception.hooks import Hook, StopRollout
from interception.limits import RolloutLimits
from interception.make import make_interception
from interception.policy import ServingPolicy
from interception.pool import StaticInterceptionPool
from interception.server import InterceptionServer
from interception.session import InterceptionError, RolloutSession, Upstream
from interception.stats import PoolStats, ServerStats, StartStats
from interception.trace import Attempt, Trace, Turn
from interception.usage import Usage

if TYPE_CHECKING:
    from interception.state_client import StateClient, StateConflictError, StateError

__all__ = [
    "CALL_ID_HEADER",
    "STATE_ROUTE_HEADER",
    "AcquireTimeoutError",
    "Attempt",
    "BaseInterceptionConfig",
    "ElasticInterceptionPool",
    "ElasticInterceptionPoolConfig",
    "Hook",
    "Interception",
    "InterceptionConfig",
    "InterceptionError",
    "InterceptionServer",
    "InterceptionServerConfig",
    "PoolMember",
    "PoolStats",
    "RolloutLimits",
    "RolloutSession",
    "ServerStats",
    "ServingPolicy",
    "Slot",
    "StartStats",
    "StateClient",
    "StateConflictError",
    "StateError",
    "StaticInterceptionPool",
    "StaticInterceptionPoolConfig",
    "StopRollout",
    "Trace",
    "Turn",
    "Upstream",
    "Usage",
    "make_interception",
]

_LAZY = ("StateClient", "StateConflictError", "StateError")


def __getattr__(name: str) -> Any:
    """The client of the state channel is for tool servers, and is loaded when it is asked for."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module("interception.state_client"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
