"""Starts that hang and starts that only take long, in a time of the tests' own: who is replaced, and when."""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

import pytest

from interception.placement import place
from interception.starts import QUEUE_LOOK, Start, Starts

MULTIPLEX = 32
PATIENCE = 5.0


@dataclass
class Server:
    load: int = 0
    serving: bool = True
    queued: bool = False


def grow(rollouts: int, takes: Callable[[int], float], known: float | None = 1.0) -> tuple[float, int]:
    """When as many `rollouts` have a slot, and how many servers were begun for them; `takes`: seconds, by number.
    `known`: how long a start before them took.
    """
    starts, servers, waiting, begun, now = Starts(PATIENCE), [], rollouts, 0, 0.0
    if known is not None:
        starts.succeeded(starts.begin(-known - 1), -1.0)
    ends: list[tuple[float, int, Start]] = []
    while True:
        while True:
            plan = place(servers, waiting, capacity=MULTIPLEX, starting=starts.counted_on(now))
            for index in plan.assign:
                servers[index].load += 1
            waiting -= len(plan.assign)
            if not plan.start:
                break
            for _ in range(plan.start):
                start = starts.begin(now)
                starts.try_again(start, now)
                heappush(ends, (now + takes(begun), begun, start))
                begun += 1
        if not waiting:
            return now, begun
        look = starts.next_look(now)
        if look is not None and now + look < ends[0][0]:
            now += look + 0.01
            continue
        now, _, ended = heappop(ends)
        starts.succeeded(ended, now)
        servers.append(Server())


def one_in_ten_hangs(number: int) -> float:
    return 10.0 if number % 10 == 1 else 1.0


def test_a_burst_takes_as_long_as_one_start() -> None:
    assert grow(1024, lambda number: 1.0) == (1.0, 32)


def test_where_one_in_ten_hangs_a_burst_takes_little_more_than_two_starts_though_a_replacement_hangs_too() -> None:
    at, begun = grow(31 * MULTIPLEX, one_in_ten_hangs)
    assert [number for number in range(31, 36) if one_in_ten_hangs(number) > 1.0] == [31]
    assert at == pytest.approx(2.1, abs=0.05)
    assert begun == 31 + 3 + 1  # those that hang, and one to spare


def test_starts_that_take_as_long_as_they_like_are_replaced_now_and_then() -> None:
    """Between 1 and 2 s, evenly: nothing hangs, and what is begun in vain is little."""
    at, begun = grow(1024, lambda number: 1.0 + (number * 7 % 32) / 32)
    assert at <= 2.0
    assert begun <= 34


def test_of_starts_that_all_became_slow_two_are_tried_and_in_the_end_a_quarter() -> None:
    assert grow(1024, lambda number: 4.0) == (4.0, 34)
    at, begun = grow(1024, lambda number: 8.0)
    assert at == 8.0
    assert begun == 32 + 11


def test_a_single_start_that_hangs_is_replaced_after_half_as_long_again_as_usual() -> None:
    at, begun = grow(1, lambda number: 1.0 if number else 99.0)
    assert at == pytest.approx(2.5, abs=0.05)
    assert begun == 2


def test_where_nothing_is_known_it_is_replaced_when_patience_ends() -> None:
    at, begun = grow(1, lambda number: 1.0 if number else 99.0, known=None)
    assert at == pytest.approx(PATIENCE + 1.0, abs=0.05)
    assert begun == 2


def test_the_time_in_the_queue_of_the_creation_limit_does_not_count() -> None:
    starts = Starts(PATIENCE)
    start = starts.begin(0.0)
    starts.try_again(start, 0.0)
    start.server = Server(queued=True)  # type: ignore[assignment]
    assert starts.counted_on(60.0) == 1
    assert starts.next_look(60.0) == QUEUE_LOOK
    start.server.queued = False  # type: ignore[union-attr]
    assert starts.counted_on(60.0 + PATIENCE) == 1
    assert starts.counted_on(60.1 + PATIENCE) == 0
    starts.succeeded(start, 66.0)
    starts.begin(70.0)
    assert starts.next_look(70.0) == 9.0  # half as long again as the 6 s that it took


def test_a_failed_try_begins_a_new_time_and_the_pause_after_it_does_not_count() -> None:
    starts = Starts(PATIENCE)
    start = starts.begin(0.0)
    starts.try_again(start, 0.0)
    start.between_tries = True
    assert starts.counted_on(9.0) == 1
    starts.try_again(start, 10.0)
    assert starts.counted_on(10.0 + PATIENCE) == 1
    assert starts.counted_on(10.1 + PATIENCE) == 0
    assert start.tries == 2


def test_none_is_hopeless_before_it_is_known_how_long_starts_take() -> None:
    starts = Starts(PATIENCE)
    first, late, later = (starts.begin(float(number)) for number in range(3))
    assert starts.hopeless(60.0) == []
    starts.succeeded(first, 2.0)
    assert starts.hopeless(6.9) == []
    assert starts.hopeless(7.1) == [late]
    assert starts.hopeless(9.0) == [late, later]


def test_one_that_ended_twice_has_ended() -> None:
    starts = Starts(PATIENCE)
    start = starts.begin(0.0)
    starts.succeeded(start, 1.0)
    starts.ended(start)
    assert len(starts) == 0
    assert starts.next_look(1.0) is None
