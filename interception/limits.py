"""How much a rollout may use, checked before each of its turns."""

from collections.abc import Iterable
from functools import cached_property

from pydantic import BaseModel, ConfigDict, Field

from interception.trace import Turn
from interception.turn import Call


class RolloutLimits(BaseModel):
    """None: no cap. Turns that the agent was answered count, and turns in flight; tokens as far as they are known."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_turns: int | None = Field(None, ge=0)
    max_input_tokens: int | None = Field(None, ge=0)
    """Summed over the turns."""
    max_output_tokens: int | None = Field(None, ge=0)
    max_total_tokens: int | None = Field(None, ge=0)

    @cached_property
    def _any(self) -> bool:
        return any(cap is not None for cap in self.model_dump().values())

    def reached(self, turns: Iterable[Turn], in_flight: Iterable[Call]) -> str | None:
        """The name of the limit that leaves no room for another turn, or None."""
        if not self._any:
            return None
        answered = [turn for turn in turns if turn.delivered and turn.complete]
        begun = {id(turn) for turn in answered} | {id(call.turn) for call in in_flight}
        if self.max_turns is not None and len(begun) >= self.max_turns:
            return "max_turns"
        used = [turn.usage for turn in answered if turn.usage is not None]
        for name, cap, tokens in (
            ("max_input_tokens", self.max_input_tokens, sum(usage.input_tokens or 0 for usage in used)),
            ("max_output_tokens", self.max_output_tokens, sum(usage.output_tokens or 0 for usage in used)),
            ("max_total_tokens", self.max_total_tokens, sum(usage.total_tokens or 0 for usage in used)),
        ):
            if cap is not None and tokens >= cap:
                return name
        return None
