"""Interception of model calls: servers that catch and record them, and pools that spread rollouts over healthy ones."""

from interception.base import CALL_ID_HEADER, STATE_ROUTE_HEADER, Interception, PoolMember, Slot
from interception.config import (
    BaseInterceptionConfig,
    ElasticInterceptionPoolConfig,
    InterceptionConfig,
    InterceptionServerConfig,
    StaticInterceptionPoolConfig,
)
from interception.pool import ElasticInterceptionPool, StaticInterceptionPool, make_interception
from interception.server import InterceptionServer
from interception.session import RolloutSession, Upstream
from interception.trace import Attempt, Trace, Turn

__all__ = [
    "CALL_ID_HEADER",
    "STATE_ROUTE_HEADER",
    "Attempt",
    "BaseInterceptionConfig",
    "ElasticInterceptionPool",
    "ElasticInterceptionPoolConfig",
    "Interception",
    "InterceptionConfig",
    "InterceptionServer",
    "InterceptionServerConfig",
    "PoolMember",
    "RolloutSession",
    "Slot",
    "StaticInterceptionPool",
    "StaticInterceptionPoolConfig",
    "Trace",
    "Turn",
    "Upstream",
    "make_interception",
]
