"""The stand-in for Prime's service as these tests use it."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from tests.chaos.run import POLICY
from tests.prime import FakePrime
from tunnel import PrimeTunnelConfig, make_tunnel

Serve = Callable[[], AbstractContextManager[FakePrime]]
"""A service while it is entered; all of them have one home."""


async def first_tunnel() -> None:
    """What the first tunnel of a process sets up for all the others is no leak."""
    async with make_tunnel(PrimeTunnelConfig(policy=POLICY)).expose(1):
        pass
