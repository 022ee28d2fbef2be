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
from tunnel.record import HOST_PIDS, Entry, Place, Record, Running, read_all


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
    record = Record(directory or Account.current().directory, entry.model_copy(update=changes))
    record.write()
    return record


def reap() -> Reaper:
    account = Account.current()
    return Reaper(account, account.directory, None)


HOST = Place(host="host", machine="machine", boot="boot", pids=f"{HOST_PIDS} time:[4026531834]")


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
        service.api_status["GET"] = (503, {"detail": "no upstream"}, {})
        await round_
        assert record.path.exists()

    @pytest.mark.parametrize("ahead", [-0.1, 86400.0], ids=["right", "put back since"])
    async def test_that_ends_wherever_the_clock_was(
        self, service: FakePrime, ahead: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reaper, "SETTLE", 0.3)
        record = forge(asked_at=time.time() + ahead)
        await asyncio.wait_for(reap().run(), 30)
        assert not record.path.exists()

    async def test_all_who_start_share_one_round_which_ends_with_the_last_of_them(self, service: FakePrime) -> None:
        forge(asked_at=1.0)
        service.api_delay["GET"] = 600.0
        account = Account.current()
        first, second = reaper.begin(account, None), reaper.begin(account, None)
        assert first is not None
        assert first is second
        await until(lambda: service.api_calls("GET"))
        await first.leave()
        assert not first.has_ended
        await first.leave()
        assert first.has_ended
        assert service.api_calls("GET") == 1
        third = reaper.begin(account, None)
        assert third is not first, "one that was ended does not keep the next"
        assert third is not None
        await third.leave()

    async def test_while_the_api_is_away_a_few_look_ups_tell_and_the_next_round_is_far_off(
        self, service: FakePrime, caplog: pytest.LogCaptureFixture
    ) -> None:
        for number in range(30):
            forge(label=f"interception-{number}", asked_at=1.0)
        service.api_status["GET"] = (503, {"detail": "no upstream"}, {})
        account = Account.current()
        round_ = reaper.begin(account, None)
        assert round_ is not None
        await round_.wait(30)
        await round_.leave()
        assert (round_.found, round_.left, len(records(service))) == (30, 30, 30)
        assert service.api_calls("GET") <= 2 * reaper.AT_ONCE
        assert reaper.begin(account, None) is None
        (said,) = [record.getMessage() for record in caplog.records]
        assert "30 dead runs" in said
        service.api_status.clear()
        await reap().run()
        assert records(service) == []

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
        self, service: FakePrime, sleeper: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Place, "here", lambda: HOST)
        before = HOST.model_copy(update={"boot": "another"})
        record = forge(owner=sleeper, client=sleeper, place=before)
        assert not record.is_dead, "it was written since this host booted, so by another one that is named alike"
        os.utime(record.path, (1.0, 1.0))
        assert record.is_dead
        await reap().run()
        assert not record.path.exists()
        assert processes.surely_runs(sleeper.pid, sleeper.mark)

    @pytest.mark.parametrize(
        ("here", "there"),
        [
            ({}, {"boot": ""}),
            ({"boot": ""}, {}),
            ({}, {"boot": "another", "machine": ""}),
            ({"machine": ""}, {"boot": "another", "machine": ""}),
            ({}, {"boot": "another", "machine": "another"}),
            ({"pids": "pid:[7]"}, {"boot": "another", "pids": "pid:[7]"}),
            ({"pids": ""}, {"boot": "another", "pids": ""}),
            ({"pids": ""}, {"pids": ""}),
            ({"boot": ""}, {"boot": ""}),
        ],
    )
    def test_no_boot_is_told_of_and_no_pid_means_anything_where_a_part_of_the_place_is_not_known(
        self,
        service: FakePrime,
        sleeper: Running,
        here: dict[str, str],
        there: dict[str, str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(Place, "here", lambda: HOST.model_copy(update=here))
        record = forge(owner=Running(pid=sleeper.pid, mark="1"), place=HOST.model_copy(update=there))
        os.utime(record.path, (1.0, 1.0))
        assert not record.is_dead
        assert not record.is_here

    def test_a_process_without_descriptors_takes_nobody_for_dead_and_sees_clearly_once_it_has_some(
        self, service: FakePrime, sleeper: Running
    ) -> None:
        forge(owner=sleeper)
        program = """
import os, resource
from tunnel.account import Account
from tunnel.record import Place, read_all

(record,) = read_all(Account.current().directory)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
without = record.is_dead, Place.here().boot
for one in taken:
    os.close(one)
print(without, record.is_dead, Place.here() == record.entry.place)
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == "(False, '') False True\n"

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

    @pytest.mark.parametrize("fault", ["no directory", "open to others"])
    async def test_where_none_can_be_written_the_tunnel_serves_and_that_is_said_once(
        self, service: FakePrime, local: Switch, fault: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        if fault == "no directory":
            (service.home / "state").write_text("a file where the directory should be")
        else:
            theirs = Account.current().directory.parent
            theirs.mkdir(parents=True)
            theirs.chmod(0o777)
        async with PrimeTunnel(PrimeTunnelConfig(creates_per_minute=None, deletes_per_minute=None)).expose(local.port):
            pass
        assert caplog.text.count("should it be killed will not be ended") == 1
        assert service.live() == []

    def test_no_link_is_followed_when_one_is_written(self, service: FakePrime, tmp_path: Path) -> None:
        record, other = forge(), tmp_path / "other"
        other.write_text("of somebody")
        record.path.with_suffix(".new").symlink_to(other)
        record.write(asked_at=1.0)
        assert other.read_text() == "of somebody"

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


@pytest.mark.parametrize("proc", ["missing", "of another namespace"])
def test_a_process_that_cannot_be_looked_at_may_run(
    proc: str, tmp_path: Path, sleeper: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    if proc == "missing":
        monkeypatch.setattr(pytest.importorskip("psutil"), "PROCFS_PATH", str(tmp_path))
    else:
        (tmp_path / "self").symlink_to("1")
        other = tmp_path / str(sleeper.pid)
        other.mkdir()
        (other / "stat").write_text("1 (other) S" + " 5" * 30)
    monkeypatch.setattr(processes, "PROC", tmp_path)
    assert processes.mark_of(sleeper.pid) == ""
    assert processes.may_run(sleeper.pid, sleeper.mark)
    assert not processes.kill(sleeper.pid, sleeper.mark)
    os.kill(sleeper.pid, signal.SIGKILL)
    os.waitpid(sleeper.pid, 0)
    assert processes.mark_of(sleeper.pid) is None


def test_without_any_source_of_marks_nothing_is_certain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PROC", tmp_path)
    monkeypatch.setattr(processes, "_psutil", lambda: None)
    assert processes.mark_of(os.getpid()) == ""
    assert processes.may_run(os.getpid(), "5")
    assert not processes.surely_runs(os.getpid(), "")
    assert processes.with_last_arguments("x") == []
