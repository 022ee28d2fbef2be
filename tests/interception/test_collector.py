"""Garbage collections are rarer while a server runs, and the program's own settings stay."""

import gc
from collections.abc import Iterator

import pytest

from interception import InterceptionServer
from interception.collector import DEFAULTS, RARE, rare_searches


@pytest.fixture(autouse=True, params=sorted(DEFAULTS), ids=str)
def own(request: pytest.FixtureRequest) -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    gc.set_threshold(*request.param)
    yield request.param
    gc.set_threshold(*before)


async def test_searches_are_rarer_while_a_server_runs(own: tuple[int, int, int]) -> None:
    async with InterceptionServer():
        assert gc.get_threshold() == RARE
    assert gc.get_threshold() == own


def test_they_are_rarer_than_python_has_them(own: tuple[int, int, int]) -> None:
    assert all(ours >= pythons for ours, pythons in zip(RARE, own, strict=True))


def test_the_last_of_several_puts_the_thresholds_back(own: tuple[int, int, int]) -> None:
    first, second = rare_searches(), rare_searches()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold() == RARE
    second.__exit__(None, None, None)
    assert gc.get_threshold() == own


@pytest.mark.parametrize("theirs", [(700, 10, 0), (700, 10, 5), (50_000, 10, 10), (0, 10, 10), RARE], ids=str)
def test_what_the_program_has_set_stays(theirs: tuple[int, int, int]) -> None:
    gc.set_threshold(*theirs)
    with rare_searches():
        assert gc.get_threshold() == theirs
    assert gc.get_threshold() == theirs


def test_what_the_program_sets_meanwhile_stays() -> None:
    with rare_searches():
        gc.set_threshold(50_000, 20, 30)
    assert gc.get_threshold() == (50_000, 20, 30)
