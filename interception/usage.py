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
    return value if type(value) is int and value >= 0 else None


def usage_of(
    input_tokens: object, output_tokens: object, total: object, cached: object, reasoning: object
) -> Usage | None:
    """The usage made of an answer's fields, each of which may be missing or of any type; None if none is known."""
    given, made, known = count(input_tokens), count(output_tokens), count(total)
    read, thought = count(cached), count(reasoning)
    if given is made is known is read is thought is None:
        return None
    if known is None and given is not None and made is not None:
        known = given + made
    return Usage(given, made, known, read, thought)
