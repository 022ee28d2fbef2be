"""A server as the whole business of a process: its address, its end, and what becomes of it when its parent dies."""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest
import zmq
import zmq.asyncio

from envserver import EnvClient, EnvServerError, EnvServerStartupError, env_server, serve_env, wait_for_address
from envserver.plan import Plan
from tests.envserver.caller import Caller
from tests.envserver.processes import alive, descriptors, exists, read_pid
from tests.envserver.scripted import MAKE
from tests.helpers import until

ROOT = Path(__file__).parents[2]
SPAWN = multiprocessing.get_context("spawn")
MISBEHAVE = "tests.envserver.scripted:misbehave"


def to_stderr() -> None:
    """A `log_setup`."""
    logging.basicConfig(level=logging.INFO, format="LOG %(name)s %(message)s")


class Serving:
    """`serve_env` in a process of multiprocessing."""

    def __init__(self, folder: Path, env: str = MAKE, env_kwargs: dict[str, Any] | None = None, **options: Any) -> None:
        self.queue: Any = SPAWN.Queue()
        self.log = folder / "log"
        options = {"address_queue": self.queue, "log_path": str(self.log), "log_setup": to_stderr, **options}
        self.process = SPAWN.Process(target=serve_env, args=(env, env_kwargs), kwargs=options)

    def __enter__(self) -> "Serving":
        self.process.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.queue.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    async def address(self) -> str:
        return await wait_for_address(self.process, self.queue, timeout=120, log_path=self.log)

    async def exitcode(self) -> int | None:
        await asyncio.to_thread(self.process.join, 60)
        return self.process.exitcode


async def test_a_process_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    with Serving(tmp_path, env_kwargs={"marks": str(tmp_path)}) as serving:
        async with EnvClient(await serving.address()) as client:
            assert (await client.run({"value": 1}))["pid"] == serving.pid
            os.kill(serving.pid, signal.SIGTERM)
            assert await serving.exitcode() == 0
    assert (tmp_path / "left").exists()
    assert "LOG envserver serving on tcp://" in serving.log.read_text()


async def test_the_first_sigterm_lets_runs_end(tmp_path: Path) -> None:
    with Serving(tmp_path, env_kwargs={"marks": str(tmp_path)}) as serving:
        async with EnvClient(await serving.address()) as client:
            run = asyncio.create_task(client.run({"do": "wait", "seconds": 1, "value": 7}))
            await read_pid(tmp_path / "waiting")
            os.kill(serving.pid, signal.SIGTERM)
            assert (await run)["echo"] == 7
            assert await serving.exitcode() == 0


async def test_the_second_sigterm_does_not_and_more_have_no_effect(tmp_path: Path) -> None:
    with Serving(tmp_path, env_kwargs={"marks": str(tmp_path)}) as serving:
        async with EnvClient(await serving.address()) as client:
            run = asyncio.create_task(client.run({"do": "wait"}))
            await read_pid(tmp_path / "waiting")
            for _ in range(20):  # until after its end
                with contextlib.suppress(ProcessLookupError):
                    os.kill(serving.pid, signal.SIGTERM)
                await asyncio.sleep(0.02)
            with pytest.raises(EnvServerError, match="the env server is shutting down"):
                await run
            assert await serving.exitcode() == 0
    assert (tmp_path / "left").exists(), "cleaned up"
    assert "Traceback" not in serving.log.read_text()


async def test_an_env_that_cannot_be_loaded_is_a_startup_error_with_its_traceback(tmp_path: Path) -> None:
    with (
        Serving(tmp_path, MISBEHAVE, {"how": "raise and chatter"}) as serving,
        pytest.raises(EnvServerStartupError, match="exited with status 1") as caught,
    ):
        await serving.address()
    assert "ValueError: the weights are missing" in caught.value.tail


async def test_a_second_start_does_not_tell_of_the_first_ones_failure(tmp_path: Path) -> None:
    with Serving(tmp_path, MISBEHAVE, {"how": "raise"}) as serving:
        await serving.exitcode()
    with Serving(tmp_path, MISBEHAVE, {"how": "exit", "number": 4}) as serving:
        with pytest.raises(EnvServerStartupError, match="exited with status 4"):
            await serving.address()
        assert not (tmp_path / "log.traceback").exists()


OWNER = """
import multiprocessing, sys, time
from envserver import serve_env

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    kwargs = {}
    if sys.argv[2] == "pipe":
        reader, writer = spawn.Pipe(duplex=False)
        kwargs["death_pipe"] = reader
    queue = spawn.Queue()
    process = spawn.Process(
        target=serve_env, args=("tests.envserver.scripted:make", {"marks": sys.argv[1]}),
        kwargs={"address_queue": queue, "max_workers": int(sys.argv[3]), **kwargs}
    )
    process.start()
    queue.get()
    print(process.pid, flush=True)
    time.sleep(3600)
"""


@pytest.mark.parametrize("how", ["pipe", "multiprocessing"])
@pytest.mark.parametrize("workers", [1, 2])
async def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path, how: str, workers: int) -> None:
    (tmp_path / "owner.py").write_text(OWNER)
    owner = await asyncio.create_subprocess_exec(
        sys.executable,
        str(tmp_path / "owner.py"),
        str(tmp_path),
        how,
        str(workers),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert owner.stdout is not None
    pid = int(await owner.stdout.readline())
    family = [pid, *(child.pid for child in psutil.Process(pid).children())]
    assert len(family) == (1 if workers == 1 else 2)
    owner.kill()
    await owner.wait()
    await until(lambda: not any(alive(one) for one in family))
    assert (tmp_path / "left").exists(), "it cleaned up"


USER = """
import asyncio, sys
from envserver import EnvClient, env_server

async def main():
    async with env_server("tests.envserver.scripted:make", max_workers=int(sys.argv[1])) as address:
        async with EnvClient(address) as client:
            reply = await client.run({"do": "spawn"})
            print(reply["pid"], reply["spawned"], flush=True)
            await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.parametrize("workers", [1, 2])
async def test_nothing_of_the_tree_is_left_when_its_user_is_killed(workers: int) -> None:
    """Row 9."""
    user = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        USER,
        str(workers),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert user.stdout is not None
    worker, spawned = map(int, (await user.stdout.readline()).split())
    tree = {worker, spawned, *(child.pid for child in psutil.Process(user.pid).children(recursive=True))}
    assert len(tree) == workers + 1
    user.kill()
    await user.wait()
    await until(lambda: not any(alive(pid) for pid in tree))


async def test_what_cannot_be_served_is_told() -> None:
    for arguments, why in (
        ({"max_workers": 0}, "max_workers is at least 1"),
        ({"multiplex": 0}, "multiplex is at least 1"),
        ({"max_workers": None, "elastic": False}, "give their number"),
        ({"log_path": "/no/such/folder/log"}, "cannot be written"),
        ({"address": "tcp://300.0.0.1:0"}, "cannot listen on"),
    ):
        with pytest.raises(EnvServerError, match=why):
            await asyncio.to_thread(serve_env, MAKE, **arguments)  # type: ignore[arg-type]


# The context manager


async def test_a_server_of_ones_own_serves_and_is_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = descriptors()
    async with env_server(MAKE, {"marks": str(tmp_path)}) as address, EnvClient(address) as client:
        pid = (await client.run({}))["pid"]
    assert pid != os.getpid()
    assert not exists(pid)
    assert (tmp_path / "left").exists()
    assert descriptors() <= before
    assert os.listdir(folder) == []


async def test_a_pool_of_ones_own_serves_and_is_gone_afterwards(tmp_path: Path) -> None:
    async with env_server(MAKE, max_workers=2, elastic=False) as address, EnvClient(address) as client:
        health = await client.health()
        assert health["ready"] + health["starting"] == 2
        pid = (await client.run({}))["pid"]
    assert not alive(pid)


def test_when_blocked_workers_are_killed_is_the_pools_to_know() -> None:
    made = {
        limit: Plan(env=MAKE, max_workers=2, kill_blocked_after=limit).make(kill_grace=2.0) for limit in (None, 60.0)
    }
    assert {limit: pool._policy.kill_blocked_after for limit, pool in made.items()} == {None: None, 60.0: 60.0}  # type: ignore[union-attr]
    with pytest.raises(EnvServerError, match="kill_blocked_after is at least 10 s"):
        Plan(env=MAKE, max_workers=2, kill_blocked_after=1.0)


def test_its_repr_tells_nothing_of_what_the_env_is_given() -> None:
    assert "tell-nobody" not in repr(Plan(env=MAKE, env_kwargs={"api_key": "tell-nobody"}))


def test_how_workers_come_and_go_is_the_pools_to_know() -> None:
    options = {"max_worker_rss": 1 << 30, "max_worker_age": 3600.0}
    pool = Plan(env=MAKE, max_workers=4, min_workers=2, **options).make()  # type: ignore[arg-type]
    assert pool._slots.floor == 2  # type: ignore[union-attr]
    assert {name: getattr(pool._policy, name) for name in options} == options  # type: ignore[union-attr]
    for name in options:
        with pytest.raises(EnvServerError, match=f"{name} is more than 0"):
            Plan(env=MAKE, max_workers=2, **{name: 0})  # type: ignore[arg-type]
        with pytest.raises(EnvServerError, match=f"{name} is for worker processes"):
            Plan(env=MAKE, max_workers=1, **{name: 1})  # type: ignore[arg-type]
    for few in (0, 3):
        with pytest.raises(EnvServerError, match=f"min_workers is at least 1 and at most max_workers .2., not {few}"):
            Plan(env=MAKE, max_workers=2, min_workers=few)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_workers": "2"}, "max_workers is a whole number, or None for any number; not '2'"),
    ({"max_workers": 2.5}, "max_workers is a whole number, or None for any number; not 2.5"),
    ({"max_workers": True}, "max_workers is a whole number, or None for any number; not True"),
    ({"max_workers": -1}, "max_workers is at least 1"),
    ({"multiplex": "8"}, "multiplex is a whole number, not '8'"),
    ({"max_workers": 2, "min_workers": None}, "min_workers is a whole number, not None"),
    ({"elastic": "no"}, "elastic is True or False, not 'no'"),
    ({"kill_blocked_after": 60.0}, "kill_blocked_after is for worker processes"),
    ({"max_workers": 2, "kill_blocked_after": "60"}, "kill_blocked_after is a number, or None: never; not '60'"),
    ({"max_workers": 2, "max_worker_rss": "1G"}, "max_worker_rss is a number, or None for no limit; not '1G'"),
    ({"max_workers": 2, "max_worker_age": float("nan")}, "max_worker_age is a number, or None for no limit; not nan"),
    ({"env_kwargs": ["split"]}, "env_kwargs are the factory's arguments, a dict by their names"),
    ({"env_kwargs": {1: 2}}, "env_kwargs are the factory's arguments, a dict by their names"),
    ({"address": 5000}, "cannot listen on 5000: an address is like tcp://127.0.0.1:5000"),
    ({"address": "tcp://127.0.0.1:99999"}, "ports end at 65535"),
    ({"log_setup": "basicConfig"}, "log_setup is a function, called without arguments; not 'basicConfig'"),
    ({"log_path": 7}, "log_path is a path, not 7"),
    ({"metrics_port": "9090"}, "metrics_port is a whole number, or None for none; not '9090'"),
    ({"metrics_port": 70_000}, "metrics_port is 0 to 65535"),
]


@pytest.mark.parametrize(("arguments", "says"), BAD)
async def test_what_nothing_can_work_with_is_one_error_where_it_is_given(
    arguments: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", None)  # no process is made
    with pytest.raises(EnvServerError, match=re.escape(says)) as caught:
        async with env_server(MAKE, **arguments):
            raise AssertionError("it came up")
    assert not isinstance(caught.value, EnvServerStartupError)
    with pytest.raises(EnvServerError, match=re.escape(says)):
        serve_env(MAKE, **arguments)


@pytest.mark.parametrize("name", ["timeout", "stop_timeout"])
@pytest.mark.parametrize("value", ["10", None, -1.0])
async def test_a_time_that_is_none_is_told(name: str, value: Any) -> None:
    with pytest.raises(EnvServerError, match=f"{name} is a"):
        async with env_server(MAKE, **{name: value}):
            raise AssertionError("it came up")


def test_where_an_address_cannot_be_told_is_told() -> None:
    with pytest.raises(EnvServerError, match="address_queue is a queue of multiprocessing or a connection, not 'q'"):
        serve_env(MAKE, address_queue="q")
    with pytest.raises(EnvServerError, match="drain_timeout is a number, not None"):
        serve_env(MAKE, drain_timeout=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"how": "exit", "number": 0}, "exited with status 0"),
        ({"how": "exit", "number": 3}, "exited with status 3"),
        ({"how": "sys.exit"}, "misbehave called sys.exit(0) instead of making an env"),
        ({"how": "serving exits"}, "serving() of the env called sys.exit(0)"),
        ({"how": "kill", "number": 9}, "no output; SIGKILL, perhaps out of memory"),
        ({"how": "abort"}, "killed by SIGABRT"),
        ({"how": "raise"}, "ValueError: the weights are missing"),
    ],
)
async def test_a_server_that_does_not_come_up_is_told_and_leaves_its_log(kwargs: dict[str, Any], reason: str) -> None:
    """Row 2."""
    before = descriptors()
    with pytest.raises(EnvServerStartupError) as caught:
        async with env_server(MISBEHAVE, kwargs):
            raise AssertionError("it came up")
    assert reason in str(caught.value)
    assert caught.value.log_path is not None
    assert os.path.exists(caught.value.log_path)  # noqa: ASYNC240
    assert descriptors() <= before


async def test_one_that_takes_too_long_is_told_and_ended(tmp_path: Path) -> None:
    with pytest.raises(EnvServerStartupError, match=r"\(pid \d+\) reported no address within 0.5 s") as caught:
        async with env_server(MISBEHAVE, {"how": "wait", "folder": str(tmp_path)}, timeout=0.5):
            pass
    (pid,) = re.findall(r"\(pid (\d+)\)", str(caught.value))
    assert not exists(int(pid))


async def test_a_name_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(EnvServerStartupError, match="there is no module 'nowhere'"):
        async with env_server("nowhere:make"):
            pass
    with pytest.raises(EnvServerError, match="must be JSON"):
        async with env_server(MAKE, {"it": object()}):
            pass
    with pytest.raises(EnvServerError, match="log_setup must be a function of a module"):
        async with env_server(MAKE, log_setup=lambda: None):
            pass


@pytest.mark.parametrize("workers", [1, 2])
async def test_where_no_log_can_be_written_that_is_told_and_no_descriptor_lost(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descriptors()
    with pytest.raises(EnvServerError, match="the log /no/such/folder/log cannot be written: No such file"):
        async with env_server(MAKE, max_workers=workers, log_path="/no/such/folder/log"):
            raise AssertionError("it came up")
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    with pytest.raises(EnvServerError, match="no folder for the server's log can be made, so give a log_path"):
        async with env_server(MAKE, max_workers=workers):
            raise AssertionError("it came up")
    assert descriptors() == before


async def test_log_setup_is_called_over_there(tmp_path: Path) -> None:
    async with env_server(MAKE, log_setup=to_stderr, log_path=tmp_path / "log"):
        pass
    assert "LOG envserver serving on tcp://" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("cancels", [1, 2])
@pytest.mark.parametrize("when", ["starting", "serving"])
async def test_cancelled_it_still_ends_its_server(tmp_path: Path, cancels: int, when: str) -> None:
    before = descriptors()

    async def serve() -> None:
        kwargs = {"how": "wait" if when == "starting" else "none", "folder": str(tmp_path)}
        async with env_server(MISBEHAVE, kwargs) as address, EnvClient(address) as client:
            pid.append((await client.run({}))["pid"])
            await asyncio.sleep(3600)

    pid: list[int] = []
    serving = asyncio.create_task(serve())
    if when == "starting":
        pid.append(await read_pid(tmp_path / "waiting"))
    await until(lambda: pid)
    for _ in range(cancels):
        serving.cancel()
        await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert not exists(pid[0])
    await until(lambda: descriptors() <= before)


async def test_a_server_that_will_not_end_is_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with env_server(MAKE, stop_timeout=0.5) as address, Caller_(address) as caller:
        pid = (await caller.run())["pid"]
        await caller.send("run", {"do": "block", "seconds": 3600})
        await caller.send("run", {"do": "block", "seconds": 3600})
        await asyncio.sleep(0)
    assert not exists(pid)
    assert "did not end within 0.5 s: killed" in caplog.text


async def test_a_pool_whose_workers_will_not_end_kills_them_itself_and_leaves_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kwargs = {"how": "serving lingers"}
    async with env_server(MISBEHAVE, kwargs, max_workers=2, stop_timeout=10) as address:
        async with EnvClient(address) as client:
            pid = (await client.run({}))["pid"]
        paths = [Path(socket.laddr) for socket in psutil.Process(pid).net_connections("unix") if socket.laddr]
        folders = {path.parent for path in paths if path.parent.name.startswith("envserver-")}
        assert len(folders) == 1
    assert not exists(pid)
    assert not folders.pop().exists()
    assert "did not end within" not in caplog.text


class Caller_(Caller):
    async def __aenter__(self) -> "Caller_":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.socket.close(1000)
        await asyncio.to_thread(self._context.term)


async def test_the_death_of_a_server_in_use_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async with env_server(MAKE) as address, EnvClient(address) as client:
        with pytest.raises(EnvServerError, match="was lost"):
            await client.run({"do": "die", "signal": "SIGABRT"})
        await until(lambda: "killed by SIGABRT" in caplog.text)
    assert "Fatal Python error: Aborted" in caplog.text


async def test_a_client_that_never_reads_600_mib_costs_the_server_256_at_most(tmp_path: Path) -> None:
    async with env_server(MAKE) as address, EnvClient(address) as client:
        server = psutil.Process((await client.run({}))["pid"])
        before = peak = server.memory_info().rss
        context: zmq.asyncio.Context = zmq.asyncio.Context()
        deaf = context.socket(zmq.DEALER)
        deaf.setsockopt(zmq.RCVHWM, 1)
        deaf.connect(address)
        await deaf.send_multipart([b"id", b"run", msgpack.packb({"deltas": 600, "size": 1 << 20})])
        deadline = time.monotonic() + 60
        in_flight = None
        while in_flight != 0 and time.monotonic() < deadline:
            peak = max(peak, server.memory_info().rss)
            in_flight = (await client.health(timeout=30))["in_flight"] if in_flight is not None else 1
            await asyncio.sleep(0.01)
        assert in_flight == 0, "cut off"
        assert peak - before < 256 << 20
        deaf.close(0)
        context.term()
