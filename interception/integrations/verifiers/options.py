"""What an installation is told, and verifiers' own configs as ours."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from pydantic import ConfigDict, TypeAdapter
from verifiers.v1.interception import ElasticInterceptionPoolConfig as TheirElasticConfig
from verifiers.v1.interception import InterceptionServerConfig as TheirServerConfig
from verifiers.v1.interception import StaticInterceptionPoolConfig as TheirStaticConfig
from verifiers.v1.interception.tunnel import CustomTunnelConfig as TheirCustomConfig
from verifiers.v1.interception.tunnel import PrimeTunnelConfig as TheirPrimeConfig

from interception.config import (
    BaseInterceptionConfig,
    ElasticInterceptionPoolConfig,
    InterceptionConfig,
    InterceptionServerConfig,
    StaticInterceptionPoolConfig,
)
from tunnel import BaseTunnelConfig, CustomTunnelConfig, PrimeTunnelConfig, TunnelConfig

AnyConfig: TypeAlias = (
    TheirServerConfig
    | TheirStaticConfig
    | TheirElasticConfig
    | InterceptionServerConfig
    | StaticInterceptionPoolConfig
    | ElasticInterceptionPoolConfig
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Of one server or pool, or of an installation. Picklable: they travel to worker processes."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    tunnel: TunnelConfig = PrimeTunnelConfig()  # noqa: RUF009 - frozen
    """What is opened where verifiers' config says `prime`, and for tool servers: any of ours that can be made many
    times over, with its own policy."""
    interception: InterceptionConfig | None = None
    """A config of ours in the place of whatever verifiers' own config says; None: that one is followed."""
    grace: float = 2.0
    """Seconds for which a harness whose tunnel was lost may end by itself before it is ended."""
    broker: bool = False
    """verifiers' `serve_env` becomes that of `envserver`: a worker's death fails its own episodes, at once, and no
    others, another takes its place, and the address is told when a worker is ready."""
    broker_log: str | None = None
    """With `broker`: the file its process logs to, from its beginning; worker 2's is "NAME-worker-2.SUFFIX". None: it
    writes where its parent does, and its workers to files that go with it; their ends are in its errors."""

    def __post_init__(self) -> None:
        # verifiers' configs have the same names.
        if not isinstance(self.tunnel, BaseTunnelConfig):
            raise TypeError(f"tunnel must be a config from `tunnel`, like SshTunnelConfig, not {_kind(self.tunnel)}")
        if not isinstance(self.interception, BaseInterceptionConfig | None):
            raise TypeError(
                "interception must be a config from `interception`, like ElasticInterceptionPoolConfig, "
                f"not {_kind(self.interception)}"
            )
        if not isinstance(self.grace, int | float):
            raise TypeError(f"grace must be a number of seconds, not {self.grace!r}")
        ElasticInterceptionPoolConfig(tunnel=self.tunnel)  # it says what cannot be made many times over, and why
        if not self.grace >= 0:
            raise ValueError(f"grace must be 0 or more seconds, not {self.grace!r}")
        if self.broker_log is not None and not self.broker:
            raise ValueError("broker_log is the log of our broker: set broker=True as well")


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


_adapter = TypeAdapter(Options)


def options_from_json(fields: Mapping[str, Any]) -> Options:
    """Options from their fields as JSON values. Raises `ValueError` that names what is wrong or not known."""
    return _adapter.validate_python(dict(fields))


def options_as_json(options: Options) -> dict[str, Any]:
    fields: dict[str, Any] = _adapter.dump_python(options, mode="json")
    return fields


def as_ours(config: AnyConfig | None, options: Options) -> InterceptionConfig:
    """The config of ours that says the same: `prime` becomes `options.tunnel`, `custom` stays; ours pass."""
    match config:
        case InterceptionServerConfig() | StaticInterceptionPoolConfig() | ElasticInterceptionPoolConfig():
            return config
        case TheirServerConfig():
            return _server(config, options)
        case TheirStaticConfig():
            return StaticInterceptionPoolConfig(servers=[_server(server, options) for server in config.servers])
        case TheirElasticConfig():
            return ElasticInterceptionPoolConfig(multiplex=config.multiplex, tunnel=options.tunnel)
        case None:
            return InterceptionServerConfig(tunnel=options.tunnel)
        case _:
            raise TypeError(f"neither an interception config of verifiers nor one of ours: {type(config).__name__}")


def _server(config: TheirServerConfig, options: Options) -> InterceptionServerConfig:
    match config.tunnel:
        case TheirCustomConfig(url=url, port=port):
            return InterceptionServerConfig(tunnel=CustomTunnelConfig(url=url, port=port))
        case TheirPrimeConfig():
            return InterceptionServerConfig(tunnel=options.tunnel)
        case other:
            raise TypeError(f"a tunnel that is not known here: {type(other).__name__}")
