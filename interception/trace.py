"""The record of a rollout: its turns, in order, each with every attempt made for it."""

from dataclasses import dataclass, field
from typing import Any

import orjson


@dataclass(slots=True)
class Attempt:
    """One request to the upstream. Times are in unix seconds; None: not known, or not reached."""

    call_id: str
    status: int | None = None
    error: str | None = None
    started: float | None = None
    first_byte: float | None = None
    ended: float | None = None


@dataclass(slots=True)
class Turn:
    """One model call, recorded once: the request as the harness sent it, the answer as the upstream gave it."""

    id: str
    dialect: str
    request_body: bytes = field(repr=False)
    response_body: bytes = field(default=b"", repr=False)
    streamed: bool = False
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def request(self) -> dict[str, Any]:
        """The request, parsed anew at each reading."""
        return orjson.loads(self.request_body)  # type: ignore[no-any-return]

    @property
    def response(self) -> dict[str, Any] | None:
        """The answer, parsed anew at each reading; None for a streamed one, a failed one or one not finished."""
        if self.streamed or self.error is not None:
            return None
        try:
            answer = orjson.loads(self.response_body)
        except orjson.JSONDecodeError:
            return None
        return answer if isinstance(answer, dict) else None

    @property
    def status(self) -> int | None:
        return self.attempts[-1].status if self.attempts else None

    @property
    def error(self) -> str | None:
        return self.attempts[-1].error if self.attempts else None

    @property
    def ended(self) -> float | None:
        return self.attempts[-1].ended if self.attempts else None

    @property
    def complete(self) -> bool:
        """The upstream answered 2xx and the answer arrived whole."""
        return self.ended is not None and self.error is None and self.status is not None and self.status < 300


class Trace:
    """The turns of one rollout. Sealed once the rollout is over: nothing is added after that."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.turns: list[Turn] = []
        self.sealed = False

    def add(self, turn: Turn) -> None:
        if self.sealed:
            raise RuntimeError(f"trace {self.id} is sealed")
        self.turns.append(turn)

    def __repr__(self) -> str:
        return f"<Trace {self.id}: {len(self.turns)} turns{', sealed' if self.sealed else ''}>"
