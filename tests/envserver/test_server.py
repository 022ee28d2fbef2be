"""One server, spoken to by clients that do nothing but the protocol, and by some that do not keep to it."""

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio

from envserver import EnvClient, EnvServer, EnvServerError
from envserver.wire import MAX_ID
from tests.envserver.caller import Caller
from tests.envserver.processes import descriptors
from tests.envserver.scripted import MAKE, NoEnv, ScriptedEnv
from tests.helpers import until


@pytest.fixture
async def env() -> ScriptedEnv:
    return ScriptedEnv()


@pytest.fixture
async def server(env: ScriptedEnv) -> AsyncIterator[EnvServer]:
    async with EnvServer(env) as server:
        yield server


@pytest.fixture
async def caller(server: EnvServer) -> AsyncIterator[Caller]:
    with Caller(server.address) as caller:
        yield caller


async def test_a_run_is_answered_with_what_the_env_returned(caller: Caller) -> None:
    reply = await caller.run(value=[1, {"a": None}])
    assert reply.pop("pid")
    assert reply == {"success": True, "error": None, "echo": [1, {"a": None}]}


async def test_health_counts_one_worker(caller: Caller, server: EnvServer) -> None:
    assert await caller.ask("health") == {
        "success": True,
        "error": None,
        "ready": 1,
        "starting": 0,
        "capacity": 128,
        "in_flight": 0,
    }
    assert server.states() == {"ready": 1, "in flight": 0}


async def test_deltas_come_in_order_and_before_the_reply(caller: Caller) -> None:
    answers = await caller.answers(await caller.send("run", {"deltas": 1000, "value": "end"}))
    assert [kind for kind, _ in answers] == [b"delta"] * 1000 + [b"reply"]
    assert [data["number"] for _, data in answers[:-1]] == list(range(1000))
    assert answers[-1][1]["echo"] == "end"


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        ({"do": "raise", "text": "no such task"}, "RuntimeError: no such task"),
        ({"do": "exit"}, "RuntimeError: the env called sys.exit(3)"),
        ({"do": "interrupt"}, "RuntimeError: the env raised KeyboardInterrupt"),
        ({"do": "return", "what": {"success": True}}, "run() of the env returned success, which the server adds"),
        ({"do": "return", "what": {"error": None, "success": 1}}, "returned success and error, which the server adds"),
        ({"do": "return", "what": None}, "run() of the env returned a NoneType, not a dict"),
        ({"do": "return list"}, "run() of the env returned a list, not a dict"),
        ({"do": "return object"}, "what run() of the env returned is not serialisable as msgpack"),
    ],
)
async def test_a_run_that_goes_wrong_is_a_reply_that_says_how(
    caller: Caller, server: EnvServer, request_: dict[str, Any], error: str
) -> None:
    reply = await caller.run(**request_)
    assert reply["success"] is False
    assert error in reply["error"]
    assert (await caller.run(value=1))["success"] is True
    assert server.in_flight == 0


async def test_what_an_env_raises_is_logged_with_traceback(caller: Caller, caplog: pytest.LogCaptureFixture) -> None:
    await caller.run(do="raise", text="no such task")
    assert "no such task" in caplog.text
    assert "scripted.py" in caplog.text


async def test_an_error_whose_text_fails_is_still_answered(env: ScriptedEnv, caller: Caller) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    async def run(request: dict[str, Any], emit: object) -> dict[str, Any]:
        raise Odd

    env.run = run  # type: ignore[method-assign, assignment]
    assert (await caller.run())["error"] == "Odd"


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\xa3abc"])
async def test_a_payload_that_is_no_map_is_answered(caller: Caller, payload: bytes) -> None:
    for method in (b"run", b"cancel"):
        await caller.socket.send_multipart([method + b"-id", method, payload])
        reply = await caller.reply(method + b"-id")
        assert reply["success"] is False
        assert "bad request" in reply["error"]


async def test_an_unknown_method_is_answered(caller: Caller) -> None:
    assert "unknown method b'walk'" in (await caller.ask("walk"))["error"]


async def test_10_000_fuzzed_messages_are_dropped_or_answered_and_good_ones_served(
    caller: Caller, server: EnvServer, caplog: pytest.LogCaptureFixture
) -> None:
    luck = random.Random(6)
    words = [b"run", b"cancel", b"health", b"", b"reply", b"\xff\xfe", b"\x80", msgpack.packb({"request_id": "1"})]
    with Caller(server.address) as hostile:
        for _ in range(10_000):
            parts = [
                luck.choice(words) if luck.random() < 0.7 else luck.randbytes(luck.choice([0, 1, 9, MAX_ID, 300]))
                for _ in range(luck.randint(1, 6))
            ]
            await hostile.socket.send_multipart(parts)
        for number in range(50):
            assert (await caller.run(value=number))["echo"] == number
        await until(lambda: server.dropped > 5000)
        await until(lambda: server.in_flight == 0)
    drops = [record for record in caplog.records if "dropped" in record.getMessage()]
    assert 0 < len(drops) < 30, "told, but not each time"


async def test_ids_are_bytes_like_any_and_belong_to_their_client(server: EnvServer, caller: Caller) -> None:
    with Caller(server.address) as other:
        for request_id in (b"\xff\xfe", b"", b"i" * MAX_ID, b"same"):
            await caller.send("run", {"value": "mine"}, request_id)
            await other.send("run", {"value": "its"}, request_id)
            assert (await caller.reply(request_id))["echo"] == "mine"
            assert (await other.reply(request_id))["echo"] == "its"


async def test_an_id_that_is_under_way_is_not_taken_twice(server: EnvServer, caller: Caller) -> None:
    await caller.send("run", {"do": "wait"}, b"one")
    await caller.send("run", {"value": "another"}, b"one")
    await until(lambda: server.dropped == 1)
    await caller.ask("cancel", {"request_id": "one"})
    assert "cancelled" in (await caller.reply(b"one"))["error"]


# Cancelling


async def test_a_cancelled_run_gets_its_one_reply(caller: Caller, env: ScriptedEnv) -> None:
    run = await caller.send("run", {"do": "wait"})
    await until(lambda: env.started == 1)
    assert await caller.ask("cancel", {"request_id": run.decode()}) == {
        "success": True,
        "error": None,
        "cancelled": True,
    }
    assert await caller.reply(run) == {"success": False, "error": "cancelled"}
    assert env.cancelled == 1


async def test_a_thousand_runs_cancelled_at_once_are_all_answered(caller: Caller, server: EnvServer) -> None:
    """Also those that are cancelled before they have taken a single step."""
    pairs = []
    for _ in range(1000):
        run = await caller.send("run", {"do": "wait"})
        pairs.append((run, await caller.send("cancel", {"request_id": run.decode()})))
    for run, cancel in pairs:
        assert await caller.reply(run) == {"success": False, "error": "cancelled"}
        assert (await caller.reply(cancel))["cancelled"] is True
    assert server.in_flight == 0


async def test_a_cancel_before_its_run_or_of_another_clients_does_no_harm(caller: Caller, server: EnvServer) -> None:
    assert (await caller.ask("cancel", {"request_id": "later"}))["cancelled"] is False
    await caller.send("run", {"value": 1}, b"later")
    assert (await caller.reply(b"later"))["echo"] == 1
    await caller.send("run", {"do": "wait"}, b"mine")
    with Caller(server.address) as other:
        assert (await other.ask("cancel", {"request_id": "mine"}))["cancelled"] is False
    assert server.in_flight == 1


# Emitting


async def test_nothing_can_be_emitted_for_a_request_that_was_answered(caller: Caller, env: ScriptedEnv) -> None:
    await caller.run()
    with pytest.raises(EnvServerError, match="has been answered"):
        await env.emits[0]({"too": "late"})


async def test_what_cannot_be_emitted_is_told_to_the_env(caller: Caller, env: ScriptedEnv) -> None:
    run = await caller.send("run", {"do": "wait"})
    await until(lambda: env.emits)
    with pytest.raises(TypeError, match="a delta is a dict, not a list"):
        await env.emits[0]([1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not serialisable"):
        await env.emits[0]({"it": object()})
    await caller.ask("cancel", {"request_id": run.decode()})


async def test_an_env_that_does_nothing_but_emit_leaves_others_their_turn(caller: Caller, server: EnvServer) -> None:
    run = await caller.send("run", {"deltas": 10**9})
    with Caller(server.address) as other:
        assert (await other.run(value=1))["echo"] == 1
    await caller.send("cancel", {"request_id": run.decode()})
    await until(lambda: server.in_flight == 0)


# Clients that leave, and clients that do not read


async def test_a_client_that_left_is_no_error(server: EnvServer, env: ScriptedEnv, caller: Caller) -> None:
    leaver = Caller(server.address)
    for _ in range(20):
        await leaver.send("run", {"do": "wait", "seconds": 0.2, "deltas": 3})
        await leaver.send("health")
    await until(lambda: env.started == 20)
    leaver.close()
    await until(lambda: server.in_flight == 0)
    assert (await caller.run(value=1))["echo"] == 1


async def test_a_deaf_clients_runs_end_with_a_reply_that_says_why(env: ScriptedEnv) -> None:
    async with EnvServer(env, budget=1 << 20) as server:
        context: zmq.asyncio.Context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.setsockopt(zmq.RCVBUF, 4096)
        socket.connect(server.address)
        payload = msgpack.packb({"deltas": 10**9, "size": 50_000})
        await socket.send_multipart([b"id", b"run", payload])
        await until(lambda: env.started == 1)
        await until(lambda: server.in_flight == 0)
        received = 0
        while (frames := await socket.recv_multipart())[1] == b"delta":
            received += 1
        assert "cut off" in msgpack.unpackb(frames[2])["error"]
        assert received < 10_000
        socket.close(0)
        context.term()


# Starting and ending


async def test_nobody_is_answered_before_serving_is_up() -> None:
    gate = asyncio.Event()

    class Slow(ScriptedEnv):
        @contextlib.asynccontextmanager
        async def serving(self) -> AsyncIterator[None]:
            await gate.wait()
            yield

    server = EnvServer(Slow())
    starting = asyncio.create_task(server.start())
    await until(lambda: not server.address.endswith(":0"))
    assert server.states()["ready"] == 0
    with Caller(server.address) as caller:
        asked = asyncio.create_task(caller.ask("health"))
        await asyncio.wait([asked], timeout=0.2)
        assert not asked.done()
        gate.set()
        assert (await asked)["ready"] == 1
        await starting
    await server.stop()


async def test_serving_is_entered_and_left_in_one_task() -> None:
    tasks: list[object] = []

    class Grouped(ScriptedEnv):
        @contextlib.asynccontextmanager
        async def serving(self) -> AsyncIterator[None]:
            async with asyncio.TaskGroup() as group:
                helper = group.create_task(asyncio.sleep(3600))
                tasks.append(asyncio.current_task())
                yield
                tasks.append(asyncio.current_task())
                helper.cancel()

    async with EnvServer(Grouped()):
        pass
    assert tasks[0] is tasks[1]


async def test_an_env_that_cannot_start_serving_is_raised_and_leaves_nothing() -> None:
    class Broken(ScriptedEnv):
        @contextlib.asynccontextmanager
        async def serving(self) -> AsyncIterator[None]:
            raise ConnectionError("no model")
            yield

    before = descriptors()
    with pytest.raises(ConnectionError, match="no model"):
        await EnvServer(Broken()).start()
    assert descriptors() == before


async def test_an_env_whose_resources_fail_later_fails_the_server() -> None:
    broken = asyncio.Event()

    class Fragile(ScriptedEnv):
        @contextlib.asynccontextmanager
        async def serving(self) -> AsyncIterator[None]:
            async def watch() -> None:
                await broken.wait()
                raise ConnectionError("the model has gone")

            async with asyncio.TaskGroup() as group:
                group.create_task(watch())
                yield

    async with EnvServer(Fragile()) as server:
        with Caller(server.address) as caller:
            await caller.send("run", {"do": "wait"})
            await until(lambda: server.in_flight)
            failing = asyncio.create_task(server.wait_failed())
            broken.set()
            with pytest.raises(EnvServerError, match=r"serving.* failed"):
                await failing
            await server.stop()
            _, _, reply = await caller.receive()
            assert reply["error"] == "cancelled: serving() of the env has ended"


async def test_an_address_that_is_taken_is_told_before_anything_is_loaded(server: EnvServer, tmp_path: Path) -> None:
    before = descriptors()
    with pytest.raises(EnvServerError, match=f"cannot listen on {server.address}: Address already in use"):
        await EnvServer(MAKE, {"marks": str(tmp_path)}, address=server.address).start()
    assert not (tmp_path / "entered").exists()
    assert descriptors() == before


async def test_a_serving_that_does_not_end_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envserver.server.CANCEL_TIMEOUT", 0.01)
    end = asyncio.Event()  # it takes longer than most

    class Lingering(ScriptedEnv):
        @contextlib.asynccontextmanager
        async def serving(self) -> AsyncIterator[None]:
            yield
            await end.wait()

    server = EnvServer(Lingering())
    await server.start()
    stopping = asyncio.create_task(server.stop())
    await until(lambda: "serving() of the env has not ended" in caplog.text)
    assert not stopping.done()
    end.set()
    await stopping
    assert "serving() of the env is cancelled" not in caplog.text


class Clinging(ScriptedEnv):
    """Its `serving()` never ends by itself; it minds so many cancellations not at all."""

    def __init__(self, deaf_to: int) -> None:
        super().__init__()
        self.deaf_to = deaf_to

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield
        for _ in range(self.deaf_to):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        await asyncio.Event().wait()


@pytest.mark.parametrize("told", ["by the time", "to hurry while it ends", "to hurry before"])
async def test_a_serving_that_never_ends_is_cancelled(
    told: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envserver.server.CANCEL_TIMEOUT", 0.01)
    if told == "by the time":
        monkeypatch.setattr("envserver.server.LEAVE_TIMEOUT", 0.02)
    before = descriptors()
    server = EnvServer(Clinging(deaf_to=0))
    await server.start()
    if told == "to hurry before":
        server.hurry()
    stopping = asyncio.create_task(server.stop())
    if told == "to hurry while it ends":
        await until(lambda: "serving() of the env has not ended" in caplog.text)
        server.hurry()
    async with asyncio.timeout(20):  # not 30
        await stopping
    assert "serving() of the env is cancelled" in caplog.text
    assert descriptors() == before


async def test_a_serving_that_no_cancellation_ends_is_left(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envserver.server.CANCEL_TIMEOUT", 0.01)
    monkeypatch.setattr("envserver.server.LEAVE_TIMEOUT", 0.02)
    before = descriptors()
    server = EnvServer(Clinging(deaf_to=1))
    await server.start()
    await server.stop()
    assert "does not end although it is cancelled: it is left" in caplog.text
    assert descriptors() == before
    assert server._host is not None
    server._host.cancel()
    await asyncio.wait([server._host])


async def test_a_path_is_given_back(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/socket"
    for _ in range(2):
        async with EnvServer(ScriptedEnv(), address=address), EnvClient(address) as client:
            assert (await client.run({"value": 1}))["echo"] == 1
            with pytest.raises(EnvServerError, match="Address already in use"):
                await EnvServer(ScriptedEnv(), address=address).start()
        assert os.listdir(tmp_path) == []


async def test_draining_takes_nothing_new_and_waits_for_what_runs(server: EnvServer, caller: Caller) -> None:
    run = await caller.send("run", {"do": "wait", "seconds": 0.3})
    await until(lambda: server.in_flight == 1)
    draining = asyncio.create_task(server.drain(60))
    await until(lambda: server.states()["ready"] == 0)
    assert "shutting down" in (await caller.run())["error"]
    assert (await caller.ask("health"))["ready"] == 0
    assert (await caller.reply(run))["success"] is True
    await draining


async def test_stopping_cancels_what_still_runs_and_tells_it(tmp_path: Path) -> None:
    async with EnvServer(MAKE, {"marks": str(tmp_path)}) as server:
        caller = Caller(server.address)
        runs = [await caller.send("run", {"do": "wait"}) for _ in range(3)]
        await until(lambda: server.in_flight == 3)
        await server.drain(0)
    for run in runs:
        assert await caller.reply(run) == {"success": False, "error": "cancelled: the env server is shutting down"}
    caller.close()
    assert (tmp_path / "left").exists()


@pytest.mark.parametrize("cancels", [1, 2])
async def test_a_cancelled_stop_still_ends(tmp_path: Path, cancels: int) -> None:
    before = descriptors()
    server = EnvServer(MAKE, {"marks": str(tmp_path)})
    await server.start()
    stopping = asyncio.create_task(server.stop())
    for _ in range(cancels):
        await asyncio.sleep(0)
        stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert (tmp_path / "left").exists()
    assert descriptors() == before
    await server.stop()  # again: no harm


async def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    class Never(ScriptedEnv):
        @contextlib.asynccontextmanager
        async def serving(self) -> AsyncIterator[None]:
            await asyncio.Event().wait()
            yield

    before = descriptors()
    server = EnvServer(Never())
    starting = asyncio.create_task(server.start())
    await until(lambda: not server.address.endswith(":0"))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert descriptors() == before


async def test_a_run_that_will_not_end_does_not_keep_the_server_from_ending(
    env: ScriptedEnv, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envserver.server.CANCEL_TIMEOUT", 0.1)
    release = asyncio.Event()

    async def stubborn(request: dict[str, Any], emit: object) -> dict[str, Any]:
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()
        return {}

    env.run = stubborn  # type: ignore[method-assign, assignment]
    async with EnvServer(env) as server:
        with Caller(server.address) as caller:
            await caller.send("run")
            await until(lambda: server.in_flight == 1)
    assert "do not end although they are cancelled" in caplog.text
    release.set()
    await until(lambda: server.in_flight == 0)


# Naming an env


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("no colon", "named package.module:factory"),
        (":make", "named package.module:factory"),
        ("../my_env:make", "named package.module:factory"),
        (".my_env:make", "named package.module:factory"),
        ("tests.nowhere:make", "no module 'tests.nowhere'"),
        ("nowhere_at_all.deep:make", "no module 'nowhere_at_all'"),
        ("tests.envserver.scripted:nothing", "has no 'nothing'"),
        ("tests.envserver.scripted:MAKE", "not something to call"),
        ("tests.envserver.scripted:NoEnv", "which has no run()"),
        ("__main__:make", "cannot import the main program"),
    ],
)
def test_an_env_that_is_not_there_is_told(name: str, error: str) -> None:
    with pytest.raises(EnvServerError) as caught:
        EnvServer(name)
    assert error in str(caught.value)


def test_what_a_factory_raises_comes_through() -> None:
    with pytest.raises(ValueError, match="the weights are missing"):
        EnvServer("tests.envserver.scripted:misbehave", {"how": "raise"})


def test_an_env_is_any_object_with_the_two_methods() -> None:
    with pytest.raises(EnvServerError, match=r"has no run\(\)"):
        EnvServer(NoEnv())  # type: ignore[arg-type]
    with pytest.raises(EnvServerError, match="env_kwargs"):
        EnvServer(ScriptedEnv(), {"marks": "x"})


async def test_the_loggers_name_is_the_packages(caller: Caller, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="envserver"):
        await caller.run(do="raise", text="x")
    assert {record.name for record in caplog.records} == {"envserver"}
