"""Tools that cannot be served. Apart from the others, since these need no MCP SDK, which takes seconds to import."""

from typing import Any

nothing: list[Any] = []


def failing() -> None:
    raise LookupError("the tools' own database is down")


def failing_at_length() -> None:
    raise LookupError("x" * 2_000_000)
