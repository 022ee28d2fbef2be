"""Full garbage collections are rarer while a server runs, and the program's own settings stay."""

import gc
from collections.abc import Iterator

import pytest

from interception import InterceptionServer
from interception.collector import DEFAULT, RARER, rare_full_searches


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, DEFAULT)
    yield
    gc.set_threshold(*before)


async def test_full_searches_are_rarer_while_a_server_runs() -> None:
    async with InterceptionServer():
        assert gc.get_threshold() == (700, 10, DEFAULT * RARER)
    assert gc.get_threshold() == (700, 10, DEFAULT)


def test_the_last_of_several_puts_the_threshold_back() -> None:
    first, second = rare_full_searches(), rare_full_searches()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, DEFAULT * RARER)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, DEFAULT)


@pytest.mark.parametrize("full", [0, 5, 1000])
def test_what_the_program_has_set_stays(full: int) -> None:
    gc.set_threshold(700, 10, full)
    with rare_full_searches():
        assert gc.get_threshold() == (700, 10, full)
    assert gc.get_threshold() == (700, 10, full)


def test_what_the_program_sets_meanwhile_stays() -> None:
    with rare_full_searches():
        gc.set_threshold(50_000, 20, 30)
    assert gc.get_threshold() == (50_000, 20, 30)
