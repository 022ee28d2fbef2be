"""What dead runs left behind is ended by the next tunnel that starts, once; what the living have is left alone."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers import Switch, until
from tests.prime import FakePrime
from tests.prime.owner import Owner, records, sidecars
from tunnel import PrimeTunnel, PrimeTunnelConfig, TunnelLimitError, processes, reaper
from tunnel.account import Account
from tunnel.reaper import Reaper
from tunnel.record import Entry, Place, Record, Running, read_all


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePrime]:
    with FakePrime(tmp_path, scale=0.1) as service:
        for name, value in service.env().items():
            monkeypatch.setenv(name, value)
        yield service


@pytest.fixture
def own(service: FakePrime) -> Iterator[Callable[[], Owner]]:
    owners: list[Owner] = []

    def make() -> Owner:
        owners.append(Owner(service))
        return owners[-1]

    yield make
    for owner in owners:
        for pid in sidecars(owner.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        owner.kill()


@pytest.fixture
async def local() -> AsyncIterator[Switch]:
    async with Switch() as local:
        yield local


@pytest.fixture
def sleeper() -> Iterator[Running]:
    """A process that has nothing to do with any tunnel."""
    process = subprocess.Popen([sys.executable, "-ISc", "import time; time.sleep(600)"])
    yield Running.of(process.pid)
    process.kill()
    process.wait()


def leave(service: FakePrime, owner: Owner) -> str:
    """Kill it and its sidecar; the id of what it leaves behind."""
    owner.served()
    for pid in sidecars(owner.pid):
        os.kill(pid, signal.SIGKILL)
    owner.kill()
    (tunnel_id,) = service.live()
    assert service.frpc_pids()
    assert service.config_files()
    return tunnel_id


def forge(directory: Path | None = None, **changes: object) -> Record:
    """A record as a run would write it that has not got far."""
    entry = Entry(label="interception-forged", config_dir="/nowhere", place=Place.here(), owner=None)
    record = Record(directory or Account.current().directory, entry)
    record.write(**changes)
    return record


def reap() -> Reaper:
    account = Account.current()
    return Reaper(account, account.directory, None)


class TestDead:
    async def test_all_that_a_killed_run_left_is_ended_by_the_next_start(
        self, service: FakePrime, own: Callable[[], Owner], local: Switch
    ) -> None:
        dead = leave(service, own())
        async with PrimeTunnel().expose(local.port):
            await until(lambda: dead in service.deletes)
            ours = service.created[-1]
            await until(lambda: len(records(service)) == 1)
            assert service.live() == [ours]
            assert [file.stem for file in service.config_files()] == [ours]
            assert len(service.frpc_pids()) == 1
        assert records(service) == []
        assert sorted(service.deletes) == sorted(service.created)

    async def test_several_who_start_at_once_end_each_thing_once(
        self, service: FakePrime, own: Callable[[], Owner], local: Switch
    ) -> None:
        dead = leave(service, own())
        service.api_delay["DELETE"] = 0.3
        others = [own() for _ in range(2)]
        await asyncio.gather(*(reap().run() for _ in range(4)))
        for other in others:
            other.served()
        await until(lambda: dead in service.deletes)
        await until(lambda: len(records(service)) == 2)
        assert service.deletes == [dead]

    async def test_the_first_tunnel_does_not_wait_for_it(
        self, service: FakePrime, own: Callable[[], Owner], local: Switch
    ) -> None:
        dead = leave(service, own())
        service.api_delay["DELETE"] = 600.0
        async with PrimeTunnel().expose(local.port):
            assert dead in service.live()
            service.api_delay.clear()
        assert dead in service.live()
        assert len(records(service)) == 1, "what was not done stays on record"
        await reap().run()
        assert (service.live(), records(service)) == ([], [])

    async def test_a_quota_that_they_fill_is_freed_first(
        self, service: FakePrime, own: Callable[[], Owner], local: Switch
    ) -> None:
        leave(service, own())
        service.limit_tunnels(1)
        async with PrimeTunnel().expose(local.port):
            assert service.live() == service.created[-1:]

    async def test_a_quota_that_the_living_fill_is_said(
        self, service: FakePrime, own: Callable[[], Owner], local: Switch
    ) -> None:
        own().served()
        service.limit_tunnels(1)
        with pytest.raises(TunnelLimitError, match="maximum number"):
            await PrimeTunnel().expose(local.port).__aenter__()
        assert len(service.live()) == 1

    async def test_what_cannot_be_deleted_is_said_once_and_stays_on_record(
        self, service: FakePrime, own: Callable[[], Owner], caplog: pytest.LogCaptureFixture
    ) -> None:
        dead = leave(service, own())
        service.api_status["DELETE"] = (503, {"detail": "no upstream"}, {})
        round_ = reap()
        await round_.run()
        assert round_.left == 1
        (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert dead in said
        assert "no upstream" in said
        assert service.frpc_pids() == []
        assert len(records(service)) == 1
        service.api_status.clear()
        await reap().run()
        assert (service.live(), records(service)) == ([], [])

    async def test_what_a_stop_could_not_delete_is_deleted_by_the_next_start(
        self, service: FakePrime, local: Switch, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with PrimeTunnel(PrimeTunnelConfig(stop_timeout=0.3)).expose(local.port):
            service.api_delay["DELETE"] = 600.0
        (left,) = service.live()
        assert left in caplog.text
        service.api_delay.clear()
        async with PrimeTunnel().expose(local.port):
            await until(lambda: left in service.deletes and len(records(service)) == 1)
        assert (service.live(), records(service)) == ([], [])

    async def test_a_create_that_may_still_be_under_way_is_looked_out_for(
        self, service: FakePrime, local: Switch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reaper, "LOOK_AGAIN", 0.01)
        record = forge(asked_at=time.time())
        round_ = asyncio.create_task(reap().run())
        seen = service.api_calls("GET")
        await until(lambda: service.api_calls("GET") > seen + 2)
        assert record.path.exists()
        monkeypatch.setattr(reaper, "SETTLE", 0.0)
        await round_
        assert not record.path.exists()

    @pytest.mark.parametrize("times", [1, 2])
    async def test_cancelled_it_leaves_the_record_to_the_next(
        self, service: FakePrime, own: Callable[[], Owner], times: int
    ) -> None:
        leave(service, own())
        service.api_delay["DELETE"] = 600.0
        task = asyncio.create_task(reap().run())
        await until(lambda: service.api_calls("DELETE"))
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([task])
        assert task.cancelled()
        service.api_delay.clear()
        await reap().run()
        assert (service.live(), records(service)) == ([], [])


class TestLiving:
    async def test_nothing_of_a_run_that_lives_is_touched(
        self, service: FakePrime, own: Callable[[], Owner], local: Switch
    ) -> None:
        owner = own()
        owner.served()
        (record,) = records(service)
        before, frpc = record.read_bytes(), service.frpc_pids()
        round_ = reap()
        await round_.run()
        assert round_.found == 0
        assert (record.read_bytes(), service.frpc_pids(), service.deletes) == (before, frpc, [])
        owner.stop()
        owner.process.wait(30)
        assert (service.live(), records(service), sidecars(owner.pid)) == ([], [], [])

    async def test_a_pid_that_was_given_to_another_program_proves_nothing_and_is_not_killed(
        self, service: FakePrime, sleeper: Running
    ) -> None:
        gone = sleeper.model_copy(update={"mark": "1"})
        record = forge(owner=gone, client=gone, tunnel_id="t-none")
        assert record.is_dead
        await reap().run()
        assert not record.path.exists()
        assert processes.surely_runs(sleeper.pid, sleeper.mark)

    async def test_a_process_whose_identity_is_not_known_is_taken_for_alive_and_never_killed(
        self, service: FakePrime, sleeper: Running
    ) -> None:
        unknown = sleeper.model_copy(update={"mark": ""})
        assert not forge(owner=unknown).is_dead
        record = forge(client=unknown)
        await reap().run()
        assert not record.path.exists()
        assert processes.surely_runs(sleeper.pid, sleeper.mark)

    @pytest.mark.parametrize("part", ["host", "pids"])
    async def test_of_another_host_or_container_nothing_is_known(
        self, service: FakePrime, sleeper: Running, part: str
    ) -> None:
        elsewhere = Place.here().model_copy(update={part: "another"})
        record = forge(owner=Running(pid=sleeper.pid, mark="1"), client=sleeper, place=elsewhere)
        assert not record.is_dead
        await reap().run()
        assert record.path.exists()

    async def test_from_before_a_boot_nothing_lives_and_no_pid_means_anything(
        self, service: FakePrime, sleeper: Running
    ) -> None:
        before = Place.here().model_copy(update={"boot": "another"})
        record = forge(owner=sleeper, client=sleeper, place=before)
        assert record.is_dead
        await reap().run()
        assert not record.path.exists()
        assert processes.surely_runs(sleeper.pid, sleeper.mark)

    @pytest.mark.parametrize("other", [{"base_url": "http://elsewhere"}, {"api_key": "another"}])
    async def test_records_of_another_account_are_left_alone(self, service: FakePrime, other: dict[str, str]) -> None:
        account = Account.current()
        directory = Account(**{"base_url": account.base_url, "api_key": account.api_key} | other).directory
        record = forge(directory)
        await reap().run()
        assert record.path.exists()


class TestRecords:
    async def test_they_are_private_and_hold_no_secret(self, service: FakePrime, local: Switch) -> None:
        async with PrimeTunnel().expose(local.port):
            (record,) = records(service)
            assert record.stat().st_mode & 0o777 == 0o600
            assert record.parent.stat().st_mode & 0o777 == 0o700
            (config,) = service.config_files()
            private = [
                line.partition(" = ")[2].strip('"') for line in config.read_text().splitlines() if "token" in line
            ]
            for secret in (*private, os.environ["PRIME_API_KEY"]):
                assert secret not in record.read_text()
                assert secret not in str(record)

    async def test_one_that_cannot_be_read_is_said_and_does_not_keep_others(
        self, service: FakePrime, caplog: pytest.LogCaptureFixture
    ) -> None:
        record = forge()
        damaged = record.path.with_name("damaged.json")
        damaged.write_text("{")
        await reap().run()
        assert not record.path.exists()
        assert caplog.text.count(str(damaged)) == 1

    async def test_where_none_can_be_written_the_tunnel_serves_and_that_is_said_once(
        self, service: FakePrime, local: Switch, caplog: pytest.LogCaptureFixture
    ) -> None:
        (service.home / "state").write_text("a file where the directory should be")
        async with PrimeTunnel(PrimeTunnelConfig(creates_per_minute=None, deletes_per_minute=None)).expose(local.port):
            pass
        assert caplog.text.count("should it be killed will not be ended") == 1
        assert service.live() == []

    def test_another_users_record_is_nothing_to_act_on(
        self, service: FakePrime, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        record = forge()
        assert len(list(read_all(record.path.parent))) == 1
        monkeypatch.setattr("tunnel.record.os.geteuid", lambda: os.getuid() + 1)
        assert list(read_all(record.path.parent)) == []


@pytest.mark.parametrize("proc", [True, False], ids=["proc", "psutil"])
class TestProcesses:
    @pytest.fixture(autouse=True)
    def _without_proc(self, proc: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        if not proc:
            pytest.importorskip("psutil")
            monkeypatch.setattr(processes, "PROC", tmp_path)

    def test_the_right_one_is_killed_and_no_other(self) -> None:
        process = subprocess.Popen([sys.executable, "-ISc", "import time; time.sleep(600)", "-c", "/some/file"])
        try:
            mark = processes.mark_of(process.pid)
            assert mark
            assert not processes.kill(process.pid, mark + "0")
            assert not processes.kill(process.pid, "")
            assert processes.may_run(process.pid, "")
            assert not processes.may_run(process.pid, mark + "0")
            assert (process.pid, mark) in processes.with_last_arguments("-c", "/some/file")
            assert processes.with_last_arguments("-c", "/some") == []
            assert processes.kill(process.pid, mark)
            assert not processes.may_run(process.pid, mark), "a zombie has ended"
        finally:
            process.kill()
            process.wait()
        assert processes.mark_of(process.pid) is None
        assert not processes.kill(process.pid, mark)


def test_without_any_source_of_marks_nothing_is_certain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PROC", tmp_path)
    monkeypatch.setattr(processes, "_psutil", lambda: None)
    assert processes.mark_of(os.getpid()) == ""
    assert processes.may_run(os.getpid(), "5")
    assert not processes.surely_runs(os.getpid(), "")
    assert processes.with_last_arguments("x") == []
