"""A rollout's record on a server: where its calls go, what was seen of it, and how it ended."""

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator
from pydantic_core import to_json

from interception.dialects.base import Dialect
from interception.growth import Growth
from interception.headers import Sending
from interception.hooks import Hook
from interception.ledger import Ledger
from interception.limits import RolloutLimits
from interception.sse import dumps
from interception.state import SharedState
from interception.trace import Trace, Turn
from interception.turn import Failure, refused_for_good
from tunnel.teardown import cancel_and_wait, run_to_end

logger = logging.getLogger("interception")

T = TypeVar("T")


SECRET_LENGTH = 8
"""Characters from which on a value is taken for a secret: shorter ones stand in innocent texts too."""


class InterceptionError(Exception):
    """A rollout cannot be recorded as its session asks."""


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

    def redacted(self, text: str) -> str:
        """`text` of the upstream's without our key and header values: an upstream that quotes them back must not bring
        them into a sandbox, a trace or a log."""
        for secret in self._secrets():
            text = text.replace(secret, "***")
        return text

    def _secrets(self) -> list[str]:
        found = [self.api_key.get_secret_value()] if self.api_key else []
        for value in self.headers.values():
            found += [value, value.partition(" ")[2]]  # also without the word before a token
        return sorted({secret for secret in found if len(secret) >= SECRET_LENGTH}, key=len, reverse=True)

    @field_validator("api_key")
    @classmethod
    def _key(cls, key: SecretStr | None) -> SecretStr | None:
        if key is None:
            return None
        stripped = key.get_secret_value().strip()  # a line break at the end of a file
        if not stripped.isprintable():
            raise ValueError("the api_key has characters that no header can carry")
        return SecretStr(stripped) if stripped else None

    @field_validator("headers")
    @classmethod
    def _headers(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            if not (name and name.isascii() and name.isprintable() and value.isprintable()) or ":" in name:
                raise ValueError("a header has characters that no header can carry")
        return headers

    @field_validator("base_url")
    @classmethod
    def _http(cls, url: str) -> str:
        # The URL is not quoted back: a password may stand in it.
        try:
            parts = urlsplit(url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            (parts.hostname or "").encode("idna")
        except ValueError:  # a port that is no number, or too large; a host that no DNS can have
            good = False
        if not good or parts.query or parts.fragment or any(mark.isspace() for mark in url):
            raise ValueError("not an endpoint: write http://HOST[:PORT]/v1 or https://HOST/v1")
        if "@" in parts.netloc:
            raise ValueError("credentials do not belong into base_url: use api_key or headers")
        return url.rstrip("/")


def check_usable(session: object, kind: type = object) -> None:
    """Raises `TypeError` or `ValueError` for what cannot be registered, on any server. `kind`: what the servers take;
    another framework's sessions are theirs to look at."""
    if not isinstance(session, kind):
        raise TypeError(f"not a {kind.__name__}: {type(session).__name__}")
    if not isinstance(session, RolloutSession):
        return
    if session.registered:
        raise ValueError(f"session {session.id} has been used already: make a new one for each rollout")
    if session.streaming == "live" and session.on_response:
        raise ValueError(
            "on_response hooks see an answer before the harness does, so its streams cannot be live: "
            "leave streaming at 'auto'"
        )


class RolloutSession:
    """One rollout on a server. `model` and `sampling` (JSON fields) override what the harness asks for.

    `streaming`: `live` streams begin at the upstream's first event; `whole` ones when the turn is complete, so that a
    failure keeps its status and a client's SDK tries again; `auto` is `whole` behind a tunnel and `live` without one.
    `state` is what its tools share and `task` what they may read, both JSON or a pydantic model. `state_type`, a model
    or any type pydantic knows, is what the state must be of; where `state` is a model, it is of that model.
    `on_request` and `on_response` hooks see each body, see `interception.hooks.Hook`.
    """

    def __init__(
        self,
        upstream: Upstream,
        *,
        id: str | None = None,
        model: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        limits: RolloutLimits | None = None,
        state: Any = None,
        state_type: Any = None,
        task: Any = None,
        streaming: Literal["auto", "live", "whole"] = "auto",
        on_request: Iterable[Hook] = (),
        on_response: Iterable[Hook] = (),
    ) -> None:
        if not isinstance(upstream, Upstream):
            raise TypeError(f"upstream must be an Upstream, not {type(upstream).__name__}: Upstream(base_url=...)")
        try:
            dumps(dict(sampling or {}))
        except (TypeError, ValueError) as error:
            raise ValueError(f"sampling must be fields of a JSON request: {error}") from None
        if streaming not in ("auto", "live", "whole"):
            raise ValueError(f"streaming must be 'auto', 'live' or 'whole', not {streaming!r}")
        if fixed := {"stream", "messages", "input"} & set(sampling or {}):
            raise ValueError(f"sampling cannot set {', '.join(sorted(fixed))}: that is the harness's to say")
        if limits is not None and not isinstance(limits, RolloutLimits):
            raise TypeError(f"limits must be RolloutLimits, not {type(limits).__name__}")
        try:
            to_json(task)
        except ValueError as error:
            raise ValueError(f"the task is no JSON: {error}") from None
        on_request, on_response = tuple(on_request), tuple(on_response)
        if not all(callable(hook) for hook in (*on_request, *on_response)):
            raise TypeError("hooks must be callable")
        if id is not None and not id.isprintable():
            raise ValueError("a session's id stands in headers and logs: it cannot have line breaks")
        self.upstream = upstream
        self.id = id or uuid.uuid4().hex
        self.model = model
        self.sampling = dict(sampling or {})
        self.limits = limits or RolloutLimits()
        self.shared = SharedState(state, state_type)
        """`state`, as its tools reach it."""
        self.task = task
        self.streaming = streaming
        self.on_request = on_request
        self.on_response = on_response
        self.trace = Trace(self.id)
        self.growth = Growth(self.trace)
        """Its newest bodies, by which the next is read."""
        self.stop_condition: str | None = None
        """Why the rollout was stopped short: a limit, a hook's reason, or `prompt_too_long`."""
        self.error: Exception | None = None
        """What ended the rollout: a lost tunnel, a hook. Set once; a failure of the provider is on the attempt."""
        self.failed = asyncio.Event()
        """Set with `error`."""
        self.on_turn: Callable[[Turn], None] | None = None
        """Called when an attempt of a turn has ended, however; if it raises, that is logged."""
        self.registered = False
        self.local_url: str | None = None
        """The server's URL on its own host, for tool servers there: their state needs no detour through a tunnel."""
        self.released = False
        """Its secrets are revoked, its calls ended, its trace sealed."""
        self.sending: Sending | None = None
        """How its last call was sent on: most are sent as the one before."""
        self.ledger = Ledger()
        """Its calls, as far as a retry may ask for them."""
        self.calls_seen = 0
        """Model calls that were admitted, retries included."""
        self.unknown_paths: Counter[str] = Counter()
        """Routes the harness asked for that are not served, with how often."""
        self.preparing: set[asyncio.Future[Any]] = set()
        """Request hooks under way: their calls are in no ledger yet."""
        self._stopped = False

    @property
    def state(self) -> Any:
        """What its tools share, as they left it. A write of theirs replaces it: look at it anew each time."""
        return self.shared.value

    @state.setter
    def state(self, value: Any) -> None:
        self.shared.value = value

    @property
    def findings(self) -> list[str]:
        """What is worth telling of how the harness used its slot, in plain words."""
        found = []
        if not self.calls_seen:
            found.append("0 calls seen: the harness never called its model here")
        for path, times in sorted(self.unknown_paths.items()):
            found.append(f"{path} was asked for {times} times, and is not served")
        if self.trace.stragglers:
            found.append(f"{self.trace.stragglers} calls came after the end of the rollout, and were refused")
        return found

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

    # -- what ends it --------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """The rollout is over because of `error`; the first one stays."""
        if self.error is None:
            self.error = error
            self.failed.set()

    def stop(self, reason: str) -> None:
        """No further turn: each is refused with a 400 that says why."""
        self._stopped = True
        self.stop_condition = reason

    def truncated(self) -> None:
        """The prompt became too long for the model. A harness that shortens it goes on."""
        if self.stop_condition is None:
            self.stop_condition = "prompt_too_long"

    def release(self, reason: str) -> int:
        """End the calls in flight, recorded as cancelled because of `reason`; nothing is recorded after this.

        Returns how many there were.
        """
        if self.released:
            return 0
        self.released = True
        pending = sum(call.exchange.cancel(refused_for_good(f"cancelled: {reason}")) for call in self.ledger)
        for hooks in self.preparing:
            hooks.cancel()
        self.ledger.clear()
        self.growth.clear()
        self.sending = None
        self.trace.seal()
        if pending:
            logger.info("session %s: %d calls were in flight at its end, recorded as cancelled", self.id, pending)
        for finding in self.findings:
            logger.warning("session %s: %s", self.id, finding)
        return pending

    # -- its turns -----------------------------------------------------------------------------

    def check_open(self) -> None:
        """Whether the rollout still runs; raises the `Failure` that a call admitted before its end is told.

        To be asked again after each wait of a request's. One that comes too late is counted, for no turn tells of it.
        """
        if self.released:
            self.trace.stragglers += 1
        if self.released or self.error is not None:
            raise refused_for_good("the rollout is over")

    def check_turn(self) -> None:
        """Whether another turn may begin; raises the `Failure` that says why not."""
        self.check_open()
        if not self._stopped and (limit := self.limits.reached(self.trace.turns, self.ledger.in_flight)):
            self.stop(limit)
        if self._stopped:
            raise Failure(400, f"the rollout was stopped: {self.stop_condition}")

    def recorded(self, turn: Turn, dialect: Dialect, answer: Mapping[str, Any]) -> None:
        """A turn's answer was recorded, and is about to be served."""
        if self.stop_condition == "prompt_too_long":
            self.stop_condition = None  # the harness shortened its prompt
        if self.sampling.get("return_token_ids") and (missing := dialect.missing_token_ids(dict(answer))):
            self.fail(
                InterceptionError(
                    f"the session asks for token ids, but the upstream's answer has no {missing}: "
                    "is it vLLM with return_token_ids, and does a router in between strip the field?"
                )
            )
        if mismatch := dialect.token_ids_mismatch(dict(answer)):
            logger.warning("session %s: turn %s: %s", self.id, turn.id, mismatch)

    def attempt_ended(self, turn: Turn) -> None:
        if self.on_turn is not None:
            try:
                self.on_turn(turn)
            except Exception:
                logger.exception("on_turn failed in session %s", self.id)

    def __repr__(self) -> str:
        ended = f" failed: {self.error!r}" if self.error else " released" if self.released else ""
        return f"<RolloutSession {self.id} {len(self.trace.turns)} turns{ended}>"
