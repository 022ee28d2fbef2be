"""What a server and the pools have in common: a slot for each rollout."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from interception.session import RolloutSession
from tunnel import TunnelError

STATE_ROUTE_HEADER = "X-VF-State-Route"
"""Names the session a shared tool server speaks for."""


class Slot(NamedTuple):
    """What `acquire` hands out: where a rollout's harness sends its calls, and the two secrets that route them.

    `base_url` has no trailing slash and no `/v1`: models are at `base_url + "/v1"`, state at `base_url + "/state"`.
    """

    base_url: str
    model_secret: str
    state_secret: str

    def env(self) -> dict[str, str]:
        """The environment variables by which the OpenAI and Anthropic SDKs find their way here."""
        return {
            "OPENAI_BASE_URL": f"{self.base_url}/v1",
            "OPENAI_API_KEY": self.model_secret,
            "ANTHROPIC_BASE_URL": self.base_url,
            "ANTHROPIC_API_KEY": self.model_secret,
        }

    def __repr__(self) -> str:
        return f"Slot(base_url={self.base_url!r}, model_secret='***', state_secret='***')"


class AcquireTimeoutError(TunnelError, TimeoutError):
    """No slot became free in time; the text says what the pool was waiting for."""


class Interception(ABC):
    """Catches rollouts' model calls. `start` and `stop` bound its life (or `async with`), both are idempotent."""

    @abstractmethod
    async def start(self) -> None:
        """Raises `TunnelError` if it cannot be made reachable; then nothing is left running."""

    @abstractmethod
    async def stop(self) -> None:
        """Releases everything, also when cancelled meanwhile."""

    @abstractmethod
    def acquire(self, session: RolloutSession, *, timeout: float | None = None) -> AbstractAsyncContextManager[Slot]:
        """Register `session` and hold its slot until the context is left.

        Raises `TunnelError` when no server can take it, `AcquireTimeoutError` (one as well) when none has taken it
        within `timeout` seconds (None: it waits as long as it takes). Leaving without an exception after the slot's
        tunnel was lost raises that `TunnelError`: a harness that exits 0 on a dead URL is no success.
        """

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


class PoolMember(Protocol):
    """All a pool asks of a server, so that another framework's server can sit in our pools.

    `start` and `stop` are idempotent and may run in different tasks; `register` and `unregister` are synchronous, so
    that nothing comes between choosing a server and registering there.
    """

    on_change: Callable[[], None] | None
    """Called on the event loop when `healthy` or `serving` changed."""

    @property
    def base_url(self) -> str: ...

    @property
    def healthy(self) -> bool:
        """Takes rollouts; once false it stays false."""
        ...

    @property
    def serving(self) -> bool:
        """Healthy, and reachable just now."""
        ...

    @property
    def load(self) -> int:
        """Sessions registered and not yet unregistered."""
        ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def register(self, session: RolloutSession) -> tuple[str, str]:
        """The model secret and the state secret; `TunnelError` when not healthy."""
        ...

    def unregister(self, model_secret: str, state_secret: str) -> None: ...
