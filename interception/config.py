"""Which interception to make, as data: pydantic models told apart by `type`."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from interception.policy import ServingPolicy
from tunnel import CommandTunnelConfig, CustomTunnelConfig, PrimeTunnelConfig, SshTunnelConfig, TunnelConfig


class BaseInterceptionConfig(BaseModel):
    """What all kinds share."""

    # Tokens travel in some tunnels' configs, and an error must not quote them.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class InterceptionServerConfig(BaseInterceptionConfig):
    """One server, and the tunnel it is exposed through where one is required."""

    type: Literal["server"] = "server"
    tunnel: TunnelConfig = PrimeTunnelConfig()
    serving: ServingPolicy = ServingPolicy()
    """How answers are served and how long they are kept."""
    bind_host: str | None = None
    """Where it listens when no tunnel is required, for sandboxes that are containers on this host. None: loopback."""


class BasePoolConfig(BaseInterceptionConfig):
    """What the pools share."""

    numbers_period: float | None = Field(None, gt=0)
    """Seconds between two log lines (INFO) with the pool's numbers, say 30. None: no lines."""


class StaticInterceptionPoolConfig(BasePoolConfig):
    """A fixed set of servers, each with its own tunnel. No cap: the set is sized by whoever writes it."""

    type: Literal["static"] = "static"
    servers: list[InterceptionServerConfig] = Field(min_length=1)


class ElasticInterceptionPoolConfig(BasePoolConfig):
    """Servers started on demand, one for every `multiplex` rollouts."""

    type: Literal["elastic"] = "elastic"
    multiplex: int = Field(32, ge=1)
    """Rollouts that share a server and its tunnel."""
    tunnel: TunnelConfig = PrimeTunnelConfig()
    serving: ServingPolicy = ServingPolicy()
    """How answers are served and how long they are kept."""
    min_servers: int = Field(1, ge=0)
    """Warmed up at the start, and kept when idle. One that is lost is replaced when a rollout needs it."""
    max_servers: int | None = Field(None, ge=1)
    """Servers at a time, those being started included; beyond that rollouts wait. None: no bound."""
    idle_timeout: float | None = Field(300.0, ge=0)
    """Seconds after which a server without a rollout is stopped. None: it stays until the pool is stopped."""
    start_tries: int = Field(3, ge=1)
    """Times a server is tried to be started before its waiters hear why it cannot be; those by its tunnel count, and
    Prime's asks three times itself. A limit (quota, credentials) is never tried again."""
    start_backoff: float = Field(0.5, gt=0)
    """Seconds before the second try, doubled for each one after it up to 10, with as much jitter."""
    start_patience: float = Field(5.0, gt=0)
    """Seconds for which a start is counted on; then another one is begun in its stead, and what it yields in the end is
    used, too. Once it is known how long starts take, a few are replaced earlier (see `placement.overdue` and
    `placement.counted_on`), and at `max_servers` a try that takes twice as long is given up for the next one."""

    @field_validator("tunnel")
    @classmethod
    def _can_be_minted(cls, tunnel: TunnelConfig) -> TunnelConfig:
        if isinstance(tunnel, CustomTunnelConfig):
            raise ValueError(
                "a custom tunnel has one URL and one port, so an elastic pool cannot make more of it: "
                "use a static pool with one server for each URL"
            )
        if isinstance(tunnel, CommandTunnelConfig) and tunnel.url is not None:
            raise ValueError(
                "a command tunnel with a fixed url cannot be made twice: give url_pattern, or a static pool"
            )
        if isinstance(tunnel, SshTunnelConfig) and tunnel.remote_port != 0:
            raise ValueError(
                "an ssh tunnel with a fixed remote_port cannot be made twice: leave it 0, or a static pool"
            )
        return tunnel

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.max_servers is not None and self.min_servers > self.max_servers:
            raise ValueError(f"min_servers ({self.min_servers}) is more than max_servers ({self.max_servers})")
        return self


InterceptionConfig = Annotated[
    InterceptionServerConfig | StaticInterceptionPoolConfig | ElasticInterceptionPoolConfig,
    Field(discriminator="type"),
]
