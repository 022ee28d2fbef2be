"""A rollout's record on a server: where its calls go, what was seen of it, and how it ended."""

import asyncio
import uuid
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from interception.trace import Trace
from interception.turn import Exchange
from tunnel.teardown import cancel_and_wait, run_to_end

T = TypeVar("T")


class Upstream(BaseModel):
    """The model endpoint a session's turns are forwarded to, in the dialect they came in: nothing is translated.

    `base_url` is what an SDK would be given: `https://api.openai.com/v1`, `http://localhost:8000/v1`,
    `https://api.anthropic.com`. A URL without any path gets `/v1`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    base_url: str
    api_key: SecretStr | None = None
    """Sent as `Authorization: Bearer` (OpenAI dialects) or `x-api-key` (messages)."""
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    """Sent with every call, over what the harness sent (kept out of reprs: tokens travel here)."""
    connect_timeout: float = Field(30.0, gt=0)
    """Seconds to connect."""
    idle_timeout: float | None = Field(600.0, gt=0)
    """Seconds without a byte from the upstream after which a call has failed; None: never. There is no total limit."""

    @field_validator("base_url")
    @classmethod
    def _http(cls, url: str) -> str:
        # The URL is not quoted back: a password may stand in it.
        try:
            parts = urlsplit(url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number, or too large
            good = False
        if not good or parts.query or parts.fragment or any(mark.isspace() for mark in url):
            raise ValueError("not an endpoint: write http://HOST[:PORT]/v1 or https://HOST/v1")
        if "@" in parts.netloc:
            raise ValueError("credentials do not belong into base_url: use api_key or headers")
        return url.rstrip("/")


class RolloutSession:
    """One rollout on a server. `model` and `sampling` (JSON fields) override what the harness asks for."""

    def __init__(
        self,
        upstream: Upstream,
        *,
        id: str | None = None,
        model: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        state: Any = None,
    ) -> None:
        self.upstream = upstream
        self.id = id or uuid.uuid4().hex
        self.model = model
        self.sampling = dict(sampling or {})
        self.state = state
        self.trace = Trace(self.id)
        self.error: Exception | None = None
        """What ended the rollout: a lost tunnel, for one. Set once; a failure of the provider is on the attempt."""
        self.failed = asyncio.Event()
        """Set with `error`."""
        self.registered = False
        self.released = False
        """Its secrets are revoked, its calls ended, its trace sealed."""
        self.exchanges: set[Exchange] = set()
        """Its calls in flight."""

    async def guard(self, awaitable: Awaitable[T]) -> T:
        """The awaitable's result, or `error` raised as soon as it is set; the awaitable is then cancelled and awaited.

        Run the harness under it, so that a rollout whose tunnel is lost ends at once.
        """
        work = asyncio.ensure_future(awaitable)
        failed = asyncio.ensure_future(self.failed.wait())
        try:
            await asyncio.wait([work, failed], return_when=asyncio.FIRST_COMPLETED)
            if self.error is not None:
                raise self.error
            return work.result()
        finally:
            failed.cancel()
            if not work.done():
                await run_to_end(cancel_and_wait(work))
            elif not work.cancelled():
                work.exception()  # seen, also where `error` goes before it

    def fail(self, error: Exception) -> None:
        """The rollout is over because of `error`; the first one stays."""
        if self.error is None:
            self.error = error
            self.failed.set()

    def release(self, reason: str) -> None:
        """End the calls in flight, recorded as cancelled because of `reason`; nothing is recorded after this."""
        if self.released:
            return
        self.released = True
        for exchange in list(self.exchanges):
            exchange.cancel(reason)
        self.exchanges.clear()
        self.trace.sealed = True

    def __repr__(self) -> str:
        ended = f" failed: {self.error!r}" if self.error else " released" if self.released else ""
        return f"<RolloutSession {self.id} {len(self.trace.turns)} turns{ended}>"
