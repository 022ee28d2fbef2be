"""Our pools as verifiers' `Interception`s, over verifiers' own servers."""

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

from verifiers.v1.interception import ElasticInterceptionPoolConfig as TheirElasticConfig
from verifiers.v1.interception import Interception
from verifiers.v1.interception import StaticInterceptionPoolConfig as TheirStaticConfig
from verifiers.v1.session import RolloutSession

from interception import config as configs
from interception import elastic, pool
from interception.base import PoolMember
from interception.integrations.verifiers.losses import as_theirs, watch_of
from interception.integrations.verifiers.options import AnyConfig, Options, as_ours
from interception.integrations.verifiers.server import InterceptionServer, Member
from interception.integrations.verifiers.verdict import serves
from interception.stats import PoolStats
from tunnel import TunnelEvent


class _Pool(Interception):  # type: ignore[misc] # untyped
    """What both do: hand slots through, and turn our errors into verifiers' own."""

    def __init__(
        self, config: AnyConfig, requires_tunnel: bool, state_service_secrets: tuple[str, ...], options: Options | None
    ) -> None:
        super().__init__()
        self.config = config
        self.requires_tunnel = requires_tunnel
        self.state_service_secrets = tuple(state_service_secrets)
        self.options = options or Options()
        self.on_event: Callable[[TunnelEvent], None] | None = None
        """Called with each event of each server's tunnel."""
        self.pool = self._make_pool()
        """The pool of ours behind it."""

    @abstractmethod
    def _make_pool(self) -> pool.Pool: ...

    def _make_server(self, config: configs.InterceptionServerConfig) -> PoolMember:
        server = Member(config, self.requires_tunnel, self.state_service_secrets, options=self.options)
        server.on_event = self._tunnel_event
        return cast(PoolMember, server)

    def _tunnel_event(self, event: TunnelEvent) -> None:
        if self.on_event is not None:
            self.on_event(event)

    @property
    def servers(self) -> list[Any]:
        """Those that take rollouts."""
        return list(self.pool.servers)

    def stats(self) -> PoolStats:
        """Where its rollouts are, and why one waits."""
        return self.pool.stats()

    @property
    def tunnel(self) -> object | None:
        """What an entered agent of verifiers asks of the server it keeps: not None if it is reached from elsewhere."""
        return self.options.tunnel if self.requires_tunnel else None

    async def start(self) -> None:
        with as_theirs():
            await self.pool.start()

    async def stop(self) -> None:
        await self.pool.stop()

    @asynccontextmanager
    async def acquire(self, session: RolloutSession) -> AsyncIterator[tuple[str, str, str]]:
        """A slot on a server that serves, until the context is left; verifiers' `TunnelError` if there is none, and at
        its end if the slot's tunnel was lost."""
        async with AsyncExitStack() as stack:
            with as_theirs():
                slot = await stack.enter_async_context(self.pool.acquire(session))
            watched = watch_of(session.trace.id)
            assert watched is not None
            watched.entered()
            yield slot.base_url, slot.model_secret, slot.state_secret
            await serves(watched)
        watched.raise_if_unrecorded()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.stats().summary}>"


class StaticInterceptionPool(_Pool):
    """A fixed set of servers; a rollout goes to the least loaded one that serves."""

    def __init__(
        self,
        config: TheirStaticConfig | configs.StaticInterceptionPoolConfig,
        requires_tunnel: bool = False,
        state_service_secrets: tuple[str, ...] = (),
        *,
        options: Options | None = None,
    ) -> None:
        super().__init__(config, requires_tunnel, state_service_secrets, options)

    def _make_pool(self) -> pool.Pool:
        ours = as_ours(self.config, self.options)
        assert isinstance(ours, configs.StaticInterceptionPoolConfig)
        return pool.StaticInterceptionPool(ours, server_factory=self._make_server)


class ElasticInterceptionPool(_Pool):
    """Servers started on demand, side by side, `multiplex` rollouts on each."""

    def __init__(
        self,
        config: TheirElasticConfig | configs.ElasticInterceptionPoolConfig | None = None,
        requires_tunnel: bool = False,
        state_service_secrets: tuple[str, ...] = (),
        *,
        options: Options | None = None,
    ) -> None:
        super().__init__(config or TheirElasticConfig(), requires_tunnel, state_service_secrets, options)

    def _make_pool(self) -> pool.Pool:
        ours = as_ours(self.config, self.options)
        assert isinstance(ours, configs.ElasticInterceptionPoolConfig)
        return elastic.ElasticInterceptionPool(ours, server_factory=self._make_server)


def make_interception(
    config: AnyConfig | None = None,
    *,
    requires_tunnel: bool,
    state_service_secrets: tuple[str, ...] = (),
    options: Options | None = None,
) -> Interception:
    """What a config of verifiers (or of ours) describes, to be given to `make_agent(…, interception=…)`.

    `requires_tunnel`: some harness or tool server runs where this host's loopback cannot be reached.
    """
    options = options or Options()
    chosen = options.interception or (config if config is not None else TheirElasticConfig())
    match as_ours(chosen, options):
        case configs.InterceptionServerConfig():
            return InterceptionServer(chosen, requires_tunnel, state_service_secrets, options=options)
        case configs.StaticInterceptionPoolConfig():
            return StaticInterceptionPool(chosen, requires_tunnel, state_service_secrets, options=options)
        case configs.ElasticInterceptionPoolConfig():
            return ElasticInterceptionPool(chosen, requires_tunnel, state_service_secrets, options=options)
