"""Rows of the sheet's table that are about the start of workers."""

import asyncio
import dataclasses
import os
import threading
from pathlib import Path

import psutil
import pytest

from envserver.child import EXEC_TARGET
from envserver.errors import EnvServerError, EnvServerStartupError
from envserver.pool import EnvServerPool
from tests.envserver import hardships
from tests.envserver.caller import Caller
from tests.envserver.test_pool import QUICK, children, pool_of, ready
from tests.helpers import until

HARD = "tests.envserver.hardships"

SLOW = """
import time
from pathlib import Path

gate = Path({gate!r})
gate.with_suffix(".seen").touch()
while not gate.exists():
    time.sleep(0.01)

from tests.envserver.envs import scripted
"""
"""A module that takes its time to be imported."""


async def test_row_17_a_worker_is_executed_and_inherits_no_lock_and_no_thread() -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with hardships.LOCK:
            held.set()
            done.wait()

    threads = [threading.Thread(target=hold), *(threading.Thread(target=done.wait) for _ in range(20))]
    for thread in threads:
        thread.start()
    try:
        await asyncio.to_thread(held.wait)
        async with pool_of(2, "fresh", module=HARD) as (pool, _):
            for worker in pool._dispatcher.ready:
                process = psutil.Process(worker.pid)
                assert str(EXEC_TARGET) in process.cmdline()
                assert process.num_threads() < 20
    finally:
        done.set()
        for thread in threads:
            thread.join()


async def test_row_24_a_slow_import_has_its_own_deadline_and_nothing_else_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = tmp_path / "gate"
    (tmp_path / "slow_to_import.py").write_text(SLOW.format(gate=str(gate)))
    monkeypatch.syspath_prepend(tmp_path)
    # All times but that of the start are over long before the import is.
    policy = dataclasses.replace(QUICK, burial_timeout=0.01, kill_grace=0.01, steady_after=0.01)
    pool = EnvServerPool("slow_to_import:scripted", max_workers=2, elastic=False, policy=policy)
    starting = asyncio.create_task(pool.start())
    try:
        await until((tmp_path / "gate.seen").exists)
        await asyncio.wait([starting], timeout=0.5)
        assert pool.states() == {"ready": 0, "starting": 2, "in flight": 0}
        assert not starting.done()
        gate.touch()
        await starting
        await ready(pool, 2)
        assert [slot.generation for slot in pool._slots.map.values()] == [1, 2], "the first ones"
        assert not [record for record in caplog.records if record.levelname != "INFO"]
    finally:
        await pool.stop()


async def test_row_24_a_start_that_never_ends_is_ended_and_told_with_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "never_imported.py").write_text(
        'print("loading the weights")\n' + SLOW.format(gate=str(tmp_path / "gate"))
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = children()
    policy = dataclasses.replace(QUICK, start_timeout=5.0)
    with pytest.raises(EnvServerStartupError, match="was not ready after 5 s") as caught:
        await EnvServerPool("never_imported:scripted", max_workers=2, elastic=False, policy=policy).start()
    if (tmp_path / "gate.seen").exists():  # on a machine that is very busy it has not come that far
        assert "loading the weights" in caught.value.tail
    assert children() == before


async def test_row_20_a_folder_too_long_for_a_socket_is_no_matter_also_when_the_environment_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for the workers themselves, who inherit TMPDIR."""
    long = tmp_path / ("x" * 100) / ("y" * 100)
    long.mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr("tempfile.tempdir", None)  # so that it is looked at again
    async with pool_of(1) as (pool, caller):
        assert (await caller.run())["success"]
        folder = pool._folder
        assert folder is not None
        environment = psutil.Process(pool._dispatcher.ready[0].pid).environ()
        assert environment["TMPDIR"] == str(long)
    assert not folder.path.exists()
    assert os.listdir(long) == []


async def test_an_address_is_told_only_once_a_worker_has_answered(tmp_path: Path) -> None:
    """Who guesses it before that waits, and is answered then."""
    gate = tmp_path / "gate"
    pool = EnvServerPool("tests.envserver.envs:gated", {"gate": str(gate)}, max_workers=2, policy=QUICK)
    starting = asyncio.create_task(pool.start())
    try:
        await until(lambda: pool.states().get("starting") == 1)
        with Caller(pool.address) as caller:
            early = asyncio.create_task(caller.run())
            await asyncio.wait([early, starting], timeout=0.5)
            assert not early.done()
            assert not starting.done()
            gate.write_text("open")
            await starting
            assert (await early)["success"]
    finally:
        await pool.stop()


async def test_a_pool_that_two_others_stop_while_it_starts_fails_its_start_and_leaves_nothing(tmp_path: Path) -> None:
    before = children(), psutil.Process().num_fds()
    pool = EnvServerPool("tests.envserver.envs:gated", {"gate": str(tmp_path / "gate")}, max_workers=2, policy=QUICK)
    starting = asyncio.create_task(pool.start())
    await until(lambda: pool.states().get("starting") == 1)
    await asyncio.gather(pool.stop(), pool.stop())
    with pytest.raises(EnvServerError, match="stopped before it was up"):
        await starting
    assert (children(), psutil.Process().num_fds()) == before
