"""A process that is killed at any moment leaves no registration, no frpc and no token: its sidecar sees to that."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest

from tests.helpers import Switch, until
from tests.prime import FakePrime
from tests.prime.owner import Owner, records, sidecars
from tunnel import PrimeTunnel
from tunnel.sidecar import sidecar


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePrime]:
    with FakePrime(tmp_path, scale=0.1) as service:
        for name, value in service.env().items():
            monkeypatch.setenv(name, value)
        yield service


@pytest.fixture
def own(service: FakePrime) -> Iterator[Callable[..., Owner]]:
    owners: list[Owner] = []

    def make(extra: str = "") -> Owner:
        owners.append(Owner(service, extra))
        return owners[-1]

    yield make
    for owner in owners:
        owner.kill()
        # One whose owner was killed in a create looks out for that for half a minute.
        for pid in sidecars(owner.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def nothing_is_left(service: FakePrime) -> None:
    await until(lambda: service.created and not service.live())
    await until(lambda: not service.frpc_pids() and not service.config_files())
    assert len(service.deletes) == len(set(service.deletes))


def pipes() -> set[str]:
    """Those that this process has open."""
    gc.collect()  # the SDK leaves its own to the garbage collector
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return {name for name in found if name.startswith("pipe:")}


class TestKilled:
    async def test_while_its_create_has_not_been_carried_out(
        self, service: FakePrime, own: Callable[..., Owner]
    ) -> None:
        service.api_delay["POST"] = 1.0
        owner = own()
        await until(lambda: service.api_calls("POST"))
        owner.kill()
        assert service.created == []
        await nothing_is_left(service)

    async def test_while_its_create_is_being_answered(self, service: FakePrime, own: Callable[..., Owner]) -> None:
        service.after_delay["POST"] = 600.0
        owner = own()
        await until(lambda: service.created)
        owner.kill()
        await nothing_is_left(service)

    @pytest.mark.parametrize(
        "moment",
        [
            "sdk.Tunnel._write_frpc_config = die",
            "write = sdk.Tunnel._write_frpc_config\nsdk.Tunnel._write_frpc_config = lambda self: die(write(self))",
            # The process is there, and nobody has had the time to put it on record.
            "run = sdk.subprocess.Popen\nsdk.subprocess = type('', (), {'PIPE': -1,"
            " 'Popen': lambda *args, **kwargs: die(run(*args, **kwargs))})",
            "sdk.Tunnel._start_output_reader = die",
        ],
        ids=["before its config file", "before its frpc", "before its frpc is on record", "as its frpc starts"],
    )
    async def test_between_its_create_and_its_frpc(
        self, service: FakePrime, own: Callable[..., Owner], moment: str
    ) -> None:
        owner = own(moment)
        assert owner.process.wait(30) == -signal.SIGKILL
        await nothing_is_left(service)

    async def test_while_it_serves(self, service: FakePrime, own: Callable[..., Owner]) -> None:
        owner = own()
        owner.served()
        assert len(sidecars(owner.pid)) == 1
        owner.kill()
        await nothing_is_left(service)
        await until(lambda: not sidecars(owner.pid))
        assert records(service) == []

    async def test_after_a_restart_of_its_frpc(self, service: FakePrime, own: Callable[..., Owner]) -> None:
        owner = own()
        owner.served()
        os.kill(service.frpc_pids()[0], signal.SIGKILL)
        await until(lambda: service.logins(service.created[0]) == 2)
        (frpc,) = service.frpc_pids()
        (record,) = records(service)
        assert f'"pid":{frpc},' in record.read_text()
        owner.kill()
        await nothing_is_left(service)

    async def test_while_it_stops(self, service: FakePrime, own: Callable[..., Owner]) -> None:
        service.api_delay["DELETE"] = 600.0
        owner = own()
        owner.served()
        owner.stop()
        await until(lambda: service.api_calls("DELETE"))
        service.api_delay.clear()
        owner.kill()
        await nothing_is_left(service)

    async def test_while_the_api_is_down_for_a_while(self, service: FakePrime, own: Callable[..., Owner]) -> None:
        owner = own()
        owner.served()
        service.api_down()
        owner.kill()
        await until(lambda: not service.frpc_pids() and not service.config_files())
        assert service.live()
        service.api_up()
        await nothing_is_left(service)

    async def test_together_with_its_process_group_or_while_a_forked_child_lives_on(
        self, service: FakePrime, own: Callable[..., Owner]
    ) -> None:
        # The child keeps a copy of the pipe to the sidecar, which it would not if all forks went through Python.
        fork = """
async def expose_and_fork():
    from tunnel.sidecar import sidecar
    tunnel = PrimeTunnel()
    async with tunnel.expose(1) as url:
        os.dup(sidecar._pipe)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            signal.sigwait([signal.SIGUSR1])
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        print(url, flush=True)
        await asyncio.sleep(3600)
main = expose_and_fork
print("starting", flush=True)
"""
        owner = own(fork)
        owner.served()
        os.killpg(owner.pid, signal.SIGTERM)
        try:
            await nothing_is_left(service)
        finally:
            os.killpg(owner.pid, signal.SIGKILL)  # the child, which has held out


class TestAlive:
    async def test_a_forked_child_that_ends_takes_nothing_from_its_parent(
        self, service: FakePrime, own: Callable[..., Owner]
    ) -> None:
        fork = """
async def expose_and_fork():
    async with PrimeTunnel().expose(1) as url:
        child = os.fork()
        if child == 0:
            import atexit
            atexit._run_exitfuncs()  # as a program ends
            os._exit(0)
        os.waitpid(child, 0)
        print(url, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
main = expose_and_fork
print("starting", flush=True)
"""
        owner = own(fork)
        url = owner.served()
        assert url == service.urls[service.created[0]]
        assert service.live() == service.created
        assert len(service.frpc_pids()) == len(sidecars(owner.pid)) == len(records(service)) == 1
        owner.stop()
        owner.process.wait(30)
        assert (service.live(), sidecars(owner.pid), records(service)) == ([], [], [])

    async def test_there_is_one_while_there_are_tunnels_and_it_is_waited_for(self, service: FakePrime) -> None:
        assert sidecar.pid is None
        before = pipes()
        async with Switch() as local, PrimeTunnel().expose(local.port):
            pid = sidecar.pid
            async with PrimeTunnel().expose(local.port):
                assert sidecar.pid == pid
                assert sidecars(os.getpid()) == [pid]
            assert sidecar.pid == pid
        assert sidecar.pid is None
        assert sidecars(os.getpid()) == []
        assert records(service) == []
        assert pipes() == before

    async def test_it_has_nothing_of_ours_but_the_pipe_and_no_key_among_its_arguments(self, service: FakePrime) -> None:
        async with Switch() as local, PrimeTunnel().expose(local.port):
            proc = Path(f"/proc/{sidecar.pid}")
            await until(lambda: len(os.listdir(proc / "fd")) == 4)
            kinds = {number: os.readlink(proc / "fd" / number) for number in os.listdir(proc / "fd")}
            assert kinds.pop("0").startswith("pipe:")
            assert kinds.pop("1") == kinds.pop("2") == "/dev/null"
            assert set(kinds.values()) == {"anon_inode:[pidfd]"}
            assert os.getsid(sidecar.pid or 0) == sidecar.pid
            assert os.environ["PRIME_API_KEY"] not in (proc / "cmdline").read_text()

    async def test_one_that_was_killed_is_replaced_with_the_next_tunnel(self, service: FakePrime) -> None:
        async with Switch() as local, PrimeTunnel().expose(local.port):
            first = sidecar.pid
            os.kill(first or 0, signal.SIGKILL)
            await until(lambda: sidecar.pid is None)
            async with PrimeTunnel().expose(local.port):
                assert sidecar.pid not in (None, first)
        assert sidecar.pid is None

    async def test_where_none_can_be_started_the_tunnel_serves_all_the_same(
        self, service: FakePrime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("tunnel.sidecar.sys.executable", "/nowhere/python")
        async with (
            Switch() as local,
            PrimeTunnel().expose(local.port) as url,
            aiohttp.ClientSession() as session,
            session.get(url) as response,
        ):
            assert response.status == 200
        assert caplog.text.count("no sidecar") == 1
        assert service.live() == []

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    async def test_signals_do_not_end_it_before_its_owner(self, service: FakePrime, number: signal.Signals) -> None:
        async with Switch() as local, PrimeTunnel().expose(local.port):
            pid = sidecar.pid
            assert pid is not None
            await until(lambda: len(os.listdir(f"/proc/{pid}/fd")) == 4)  # it is past its start
            os.kill(pid, number)
            async with PrimeTunnel().expose(local.port):
                assert sidecar.pid == pid
