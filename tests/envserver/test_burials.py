"""A worker that has ended is buried once its connection has ended too, or after a while, and only once."""

import asyncio
from types import SimpleNamespace as Namespace
from typing import Any

from envserver.burials import Burials
from tests.helpers import until


class Dead(Namespace):
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class Grave:
    """What `Burials` has said."""

    def __init__(self, timeout: float) -> None:
        self.due: list[Any] = []
        self.lost: list[Any] = []
        self.burials = Burials(timeout, on_due=self.due.append, on_lost=self.lost.append)


def worker(*, requests: bool = True, connected: bool = True, returncode: int | None = -9) -> Any:
    return Dead(
        requests={b"1": None} if requests else {},
        connected=connected,
        closed=False,
        child=Namespace(returncode=returncode),
        look_at_connection=lambda: None,
    )


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_it_has_sent_is_read_until_its_connection_ends() -> None:
    grave, dead = Grave(timeout=3600), worker()
    grave.burials.exited(dead)
    await turns()
    assert grave.due == [], "something may still come"
    grave.burials.disconnected(dead)
    assert grave.due == [dead]
    await turns()
    assert grave.lost == []


async def test_a_connection_that_another_process_holds_open_is_not_waited_for_for_ever() -> None:
    grave, dead = Grave(timeout=0.01), worker()
    grave.burials.exited(dead)
    await until(lambda: grave.due == [dead])


async def test_with_nothing_to_wait_for_it_is_buried_at_once_but_not_in_the_same_call() -> None:
    for dead in (worker(requests=False), worker(connected=False)):
        grave = Grave(timeout=3600)
        grave.burials.exited(dead)
        assert grave.due == []
        await turns()
        assert grave.due == [dead]


async def test_one_that_lives_without_its_connection_is_told_of() -> None:
    grave, lives = Grave(timeout=0.01), worker(returncode=None)
    grave.burials.disconnected(lives)
    await until(lambda: grave.lost == [lives])
    assert grave.due == []


async def test_after_the_end_nobody_is_buried() -> None:
    grave, dead = Grave(timeout=0.01), worker()
    grave.burials.exited(dead)
    grave.burials.close()
    await asyncio.sleep(0.05)
    assert grave.due == []
