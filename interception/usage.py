"""Tokens of one model call, as the upstream counted them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts in tokens. None: the upstream did not say; never 0 for that."""

    input_tokens: int | None
    """All of the prompt, from a cache or not. Anthropic reports the three kinds apart: here is their sum."""
    output_tokens: int | None
    """Reasoning included."""
    total_tokens: int | None
    """As the upstream gave it, else the sum of the two if both are known."""
    cached_input_tokens: int | None = None
    """The part of `input_tokens` that was read from a cache."""
    reasoning_tokens: int | None = None
    """The part of `output_tokens` that was reasoning."""


def count(value: object) -> int | None:
    """`value` if it is a count of tokens."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def usage_of(
    input_tokens: object, output_tokens: object, total: object, cached: object, reasoning: object
) -> Usage | None:
    """The usage made of an answer's fields, each of which may be missing or of any type; None if none is known."""
    given, made = count(input_tokens), count(output_tokens)
    summed = None if given is None or made is None else given + made
    known = count(total)
    usage = Usage(given, made, summed if known is None else known, count(cached), count(reasoning))
    return None if usage == Usage(None, None, None) else usage
