"""Nothing is lost, doubled, stuck or left behind while tunnels of two kinds are broken at random.

`pytest -m chaos` is the full size. It prints its seed; `CHAOS_SEED=7 pytest -m chaos` draws the same load and the same
faults again, though the machine's timing is its own.
"""

import asyncio
import contextlib
import gc
import io
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.leaks import Holdings
from tests.chaos.run import HANG, POLICY, Chaos, Size
from tests.chaos.serve import Serve, first_tunnel
from tests.helpers import until

SEED = int(os.environ.get("CHAOS_SEED", "0"))


async def ended(work: Coroutine[Any, Any, None], seconds: float) -> None:
    """`work` has come to its end; a failure that shows where everything hangs, if it has not for so long."""
    task = asyncio.create_task(work)
    await asyncio.wait([task], timeout=seconds)
    if not task.done():
        where = io.StringIO()
        for other in asyncio.all_tasks():
            other.print_stack(file=where)
        task.cancel()
        pytest.fail(f"no end after {seconds:g} s:\n{where.getvalue()}")
    task.result()


async def survive(size: Size, serve: Serve, folder: Path, caplog: pytest.LogCaptureFixture) -> str:
    """The report of a run in which every promise was kept."""
    with serve():
        await ended(first_tunnel(), HANG)
    gc.collect()
    before = Holdings.now()

    with serve() as service:
        chaos = Chaos(size, service, folder)
        await ended(chaos.run(), size.seconds + 10 * HANG)
        print(report := chaos.report())
        assert not (wrong := chaos.wrong()), "\n".join([*wrong, report])
        assert all(side.breaker.counts for side in chaos.sides), report
        assert any(outcome.agent and outcome.agent.retries for _, outcome in chaos.outcomes), report
        assert service.live() == []
        assert service.frpc_pids() == []
        assert service.config_files() == []
    del chaos

    def left() -> list[str]:
        caplog.clear()  # its records keep the errors that were logged, and with them the frames they came through
        gc.collect()  # the SDK leaves frpc's pipes to it
        return Holdings.now().since(before)

    with contextlib.suppress(AssertionError):  # what is left says more than that something is
        await until(lambda: not left())
    assert not (found := left()), "\n".join([*found, report])
    return report


@pytest.mark.chaos
async def test_a_thousand_rollouts_while_tunnels_are_broken_for_two_minutes(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    size = Size(
        rollouts=int(os.environ.get("CHAOS_ROLLOUTS", "1024")),
        seconds=float(os.environ.get("CHAOS_SECONDS", "120")),
        multiplex=16,
        pause=3.0,
        every=0.8,
        seed=SEED,
        at_once=160,
    )
    report = await survive(size, serve, tmp_path, caplog)
    with capfd.disabled():
        # A worker of pytest-xdist has no other way to the terminal.
        print(f"\n{report}", file=sys.stderr, flush=True)


async def test_a_few_rollouts_while_tunnels_are_broken(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # One that is often broken in so short a time would wait longer for its restarts than all the rest takes.
    policy = POLICY.model_copy(update={"cooldowns": (0.0, 0.5, 1.0)})
    size = Size(rollouts=64, seconds=10.0, multiplex=6, pause=0.6, every=0.5, seed=SEED, at_once=48, policy=policy)
    await survive(size, serve, tmp_path, caplog)
