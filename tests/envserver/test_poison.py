"""Who is suspected, who runs alone, who is refused, and whose turn it is: tables, and what always holds."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envserver.limits import PoolPolicy
from envserver.poison import LISTED, Death, Records, Suspects, Verdict

POLICY = PoolPolicy()
HOUR = POLICY.poison_forgotten_after

FREE, ALONE, REFUSED = Verdict.FREE, Verdict.ALONE, Verdict.REFUSED
BESIDE, LONE, WELL = "died beside others", "died alone", "went well"


def death(pid: int = 7) -> Death:
    return Death(pid, "was killed by SIGABRT", 1_000_000_000.0 + pid)


def after(*events: str, task: bytes = b"task", records: Records | None = None) -> Records:
    records = Records(POLICY) if records is None else records
    for pid, event in enumerate(events):
        if event == WELL:
            records.succeeded(task)
        else:
            records.died([task], death(pid), 0.0, alone=event == LONE)
    return records


@pytest.mark.parametrize(
    ("events", "verdict"),
    [
        ((), FREE),
        ((BESIDE,), FREE),
        ((BESIDE, BESIDE), ALONE),
        ((BESIDE,) * 50, ALONE),
        ((BESIDE, WELL, BESIDE), FREE),
        ((BESIDE, BESIDE, WELL), FREE),
        ((BESIDE, BESIDE, LONE), ALONE),
        ((BESIDE, BESIDE, LONE, LONE), REFUSED),
        ((BESIDE, BESIDE, LONE, BESIDE, BESIDE), ALONE),
        ((BESIDE, BESIDE, LONE, WELL, BESIDE, BESIDE, LONE), ALONE),
        ((BESIDE, BESIDE, LONE, LONE, WELL), FREE),
        ((LONE,), ALONE),
    ],
)
def test_two_deaths_make_a_suspect_two_lone_ones_convict_and_a_success_clears(
    events: tuple[str, ...], verdict: Verdict
) -> None:
    assert after(*events).verdict(b"task", 0.0) is verdict


def test_many_runs_of_a_task_on_one_worker_are_one_death() -> None:
    records = Records(POLICY)
    records.died([b"task"] * 16, death(), 0.0, alone=False)
    assert records.verdict(b"task", 0.0) is FREE
    for _ in range(10):
        records.died([b"task"] * 16, death(), 0.0, alone=False)
    assert records.verdict(b"task", 0.0) is ALONE, "whatever dies under them, none of that convicts"


def test_a_task_is_forgotten_an_hour_after_its_last_death() -> None:
    records = after(BESIDE, BESIDE, LONE, LONE)
    assert records.verdict(b"task", HOUR - 1) is REFUSED, "which is no death, and makes it no longer"
    assert records.verdict(b"task", HOUR) is FREE
    assert len(records) == 0
    records = after(BESIDE)
    records.died([b"task"], death(), HOUR - 1, alone=False)
    assert records.verdict(b"task", HOUR + 1) is ALONE


def test_of_too_many_tasks_the_one_is_forgotten_that_was_longest_not_heard_of() -> None:
    records = after(BESIDE, BESIDE)
    for number in range(POLICY.poison_records + 10):
        records.died([b"%d" % number], death(), 0.0, alone=False)
        assert records.verdict(b"task", 0.0) is ALONE, "it comes again and again"
    assert len(records) == POLICY.poison_records
    for number in range(POLICY.poison_records):
        records.died([b"another %d" % number], death(), 0.0, alone=False)
    assert records.verdict(b"task", 0.0) is FREE


def test_a_crowd_of_new_ones_does_not_push_out_the_one_that_was_known() -> None:
    records = after(BESIDE)
    records.died([b"task", *(b"%d" % number for number in range(POLICY.poison_records - 1))], death(), 0.0, alone=False)
    records.died([b"more"], death(), 0.0, alone=False)
    assert records.verdict(b"task", 0.0) is ALONE


def test_the_text_of_a_refusal_lists_the_deaths() -> None:
    text = after(BESIDE, BESIDE, LONE, LONE).refusal(b"task")
    pids = [f"pid {pid} was killed by SIGABRT at 2001-09-09 01:46:4{pid} UTC" for pid in range(4)]
    assert text == (
        f"refused: this task has killed 2 workers that ran nothing else ({pids[2]}; {pids[3]}), and was running when "
        f"2 others died ({pids[0]}; {pids[1]}). It is refused for 60 minutes after the last of them"
    )
    text = after(*[BESIDE] * 30, LONE, LONE).refusal(b"task")
    assert "30 others died (22 more; pid 22 " in text
    assert text.count("SIGABRT") == LISTED + 2


# Turns


def suspects_of(*tasks: bytes, policy: PoolPolicy = POLICY) -> tuple[Records, Suspects[int]]:
    records = Records(policy)
    for task in tasks:
        after(BESIDE, BESIDE, task=task, records=records)
    return records, Suspects(policy, records)


def test_one_run_of_a_task_at_a_time_and_the_tasks_in_turn() -> None:
    _, suspects = suspects_of(b"a", b"b")
    for number, task in enumerate([b"a", b"a", b"a", b"b", b"b"]):
        suspects.wait(task, number)
    order = []
    while (taken := suspects.take()) is not None:
        order.append(taken)
        suspects.ended(taken[0])
    assert order == [(b"a", 0), (b"b", 3), (b"a", 1), (b"b", 4), (b"a", 2)]
    assert (suspects.wanted, suspects.waiting) == (0, 0)


def test_with_more_lone_workers_different_tasks_run_side_by_side() -> None:
    policy = dataclasses.replace(POLICY, lone_workers=3)
    _, suspects = suspects_of(b"a", b"b", policy=policy)
    for number, task in enumerate([b"a", b"a", b"b"]):
        suspects.wait(task, number)
    assert suspects.wanted == 2
    assert [suspects.take(), suspects.take(), suspects.take()] == [(b"a", 0), (b"b", 2), None]
    assert suspects.wanted == 2
    suspects.ended(b"b")
    assert suspects.wanted == 1
    assert suspects.take() is None
    suspects.ended(b"a")
    assert suspects.take() == (b"a", 1)


def test_who_waits_is_released_by_a_success_a_conviction_or_the_hour() -> None:
    records, suspects = suspects_of(b"a", b"b", b"c")
    for number, task in enumerate([b"a", b"a", b"b", b"c"]):
        suspects.wait(task, number)
    assert suspects.released(0.0) == []
    records.succeeded(b"a")
    assert suspects.released(0.0) == [(b"a", FREE, 0), (b"a", FREE, 1)]
    after(LONE, LONE, task=b"b", records=records)
    assert suspects.released(0.0) == [(b"b", REFUSED, 2)]
    assert suspects.due_at() == HOUR
    assert suspects.released(HOUR) == [(b"c", FREE, 3)]
    assert (suspects.wanted, suspects.waiting, suspects.due_at()) == (0, 0, float("inf"))


def test_who_is_withdrawn_waits_no_more() -> None:
    _, suspects = suspects_of(b"a")
    suspects.wait(b"a", 1)
    suspects.wait(b"a", 2)
    assert suspects.withdraw(b"a", 1)
    assert not suspects.withdraw(b"a", 1)
    assert suspects.take() == (b"a", 2)
    assert not suspects.withdraw(b"a", 2), "it runs"


def test_the_line_has_an_end() -> None:
    policy = dataclasses.replace(POLICY, suspects_waiting=2)
    _, suspects = suspects_of(b"a", policy=policy)
    suspects.wait(b"a", 1)
    assert not suspects.full
    suspects.wait(b"a", 2)
    assert suspects.full
    assert suspects.clear() == [1, 2]
    assert not suspects.full


# What always holds

TASKS = st.sampled_from([b"a", b"b", b"c", b"d"])


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["come", "take", "well", "fail", "die", "crash", "withdraw", "wait"]),
            st.lists(TASKS, min_size=1, max_size=4),
        ),
        max_size=150,
    ),
    lone_workers=st.integers(1, 3),
    limit=st.sampled_from([2, 1024]),
)
def test_only_lone_deaths_convict_and_nobody_is_lost_or_run_beside_himself(
    steps: list[tuple[str, list[bytes]]], lone_workers: int, limit: int
) -> None:
    policy = dataclasses.replace(POLICY, lone_workers=lone_workers, poison_records=limit)
    records = Records(policy)
    suspects: Suspects[int] = Suspects(policy, records)
    now = 0.0
    runs = itertools.count()
    waiting: dict[int, bytes] = {}
    alone: dict[bytes, int] = {}
    lone_deaths: dict[bytes, int] = {}
    pids = itertools.count()
    for what, tasks in steps:
        task = tasks[0]
        match what:
            case "come":
                if records.verdict(task, now) is ALONE:
                    waiting[run := next(runs)] = task
                    suspects.wait(task, run)
            case "take" if len(alone) < suspects.wanted:
                taken = suspects.take()
                if taken is not None:
                    assert waiting.pop(taken[1]) == taken[0]
                    assert taken[0] not in alone
                    alone[taken[0]] = taken[1]
            case "well":  # of a run anywhere
                records.succeeded(task)
                lone_deaths.pop(task, None)
                if alone.pop(task, None) is not None:
                    suspects.ended(task)
            case "fail" if alone.pop(task, None) is not None:
                suspects.ended(task)
            case "die" if alone.pop(task, None) is not None:
                records.died([task], death(next(pids)), now, alone=True)
                lone_deaths[task] = lone_deaths.get(task, 0) + 1
                suspects.ended(task)
            case "crash":  # of a worker that they all share
                records.died(tasks, death(next(pids)), now, alone=False)
            case "withdraw" if waiting:
                run, of = waiting.popitem()
                assert suspects.withdraw(of, run)
            case "wait":
                now += 1000.0
        for of, verdict, run in suspects.released(now):
            assert waiting.pop(run) == of
            assert verdict is not ALONE
        for one in (b"a", b"b", b"c", b"d"):
            if records.verdict(one, now) is REFUSED:
                assert lone_deaths.get(one, 0) >= 2
                assert "SIGABRT" in records.refusal(one)
        assert suspects.waiting == len(waiting)
        assert len(alone) <= lone_workers
        assert suspects.wanted == min(lone_workers, len({*alone, *waiting.values()}))
        assert len(records) <= limit
        assert suspects.due_at() <= now + HOUR or not waiting
    # However many wait, each has its turn.
    for _ in range(len(waiting)):
        for one in [*alone]:
            del alone[one]
            suspects.ended(one)
        taken = suspects.take()
        assert taken is not None
        alone[taken[0]] = taken[1]
        del waiting[taken[1]]
    assert not waiting
