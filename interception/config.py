"""Which interception to make, as data: pydantic models told apart by `type`."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

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


class StaticInterceptionPoolConfig(BaseInterceptionConfig):
    """A fixed set of servers, each with its own tunnel. No cap: the set is sized by whoever writes it."""

    type: Literal["static"] = "static"
    servers: list[InterceptionServerConfig] = Field(min_length=1)


class ElasticInterceptionPoolConfig(BaseInterceptionConfig):
    """Servers started on demand, one for every `multiplex` rollouts."""

    type: Literal["elastic"] = "elastic"
    multiplex: int = Field(32, ge=1)
    """Rollouts that share a server and its tunnel."""
    tunnel: TunnelConfig = PrimeTunnelConfig()
    serving: ServingPolicy = ServingPolicy()
    """How answers are served and how long they are kept."""

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


InterceptionConfig = Annotated[
    InterceptionServerConfig | StaticInterceptionPoolConfig | ElasticInterceptionPoolConfig,
    Field(discriminator="type"),
]
