"""The client: every request is answered once, or fails with a reason; nothing waits for a server that is not there."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import zmq
import zmq.asyncio

from envserver import EnvClient, EnvRequestError, EnvServer, EnvServerError, env_server
from envserver.wire import decode, encode, failure
from tests.envserver.processes import descriptors
from tests.envserver.scripted import MAKE, ScriptedEnv
from tests.helpers import until


@pytest.fixture
async def env() -> ScriptedEnv:
    return ScriptedEnv()


@pytest.fixture
async def server(env: ScriptedEnv) -> AsyncIterator[EnvServer]:
    async with EnvServer(env) as server:
        yield server


@pytest.fixture
async def client(server: EnvServer) -> AsyncIterator[EnvClient]:
    async with EnvClient(server.address) as client:
        yield client


class Scripted:
    """A ROUTER that answers what the test says."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self.router = self._context.socket(zmq.ROUTER)
        self.router.bind("tcp://127.0.0.1:0")
        self.address = self.router.getsockopt_string(zmq.LAST_ENDPOINT)

    async def __aenter__(self) -> "Scripted":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.router.close(0)
        self._context.term()


async def test_a_run_returns_what_the_env_returned_and_nothing_else(client: EnvClient) -> None:
    assert await client.run({"value": {"a": [1]}}) == {"echo": {"a": [1]}, "pid": os.getpid()}


async def test_deltas_are_told_in_order_before_the_result(client: EnvClient) -> None:
    deltas: list[int] = []
    await client.run({"deltas": 500}, lambda delta: deltas.append(delta["number"]))
    assert deltas == list(range(500))


async def test_a_failed_run_raises_the_servers_words(client: EnvClient) -> None:
    with pytest.raises(EnvRequestError, match="RuntimeError: no such task"):
        await client.run({"do": "raise", "text": "no such task"})


async def test_health_says_how_many_are_ready(client: EnvClient) -> None:
    assert await client.health() == {"ready": 1, "starting": 0, "capacity": 128, "in_flight": 0}


async def test_20_000_requests_are_each_answered_once(client: EnvClient, env: ScriptedEnv) -> None:
    async def some(start: int) -> None:
        for value in range(start, 20_000, 64):
            assert (await client.run({"value": value}))["echo"] == value

    await asyncio.gather(*(some(start) for start in range(64)))
    assert env.started == 20_000
    assert client.in_flight == 0


async def test_a_burst_larger_than_zmqs_own_queue_is_answered(client: EnvClient) -> None:
    replies = await asyncio.gather(*(client.run({"value": value}) for value in range(5000)))
    assert [reply["echo"] for reply in replies] == list(range(5000))


@pytest.mark.parametrize("how", ["cancel", "timeout", "on_delta"])
async def test_a_run_that_is_given_up_here_is_cancelled_there(client: EnvClient, env: ScriptedEnv, how: str) -> None:
    def refuse(delta: dict[str, Any]) -> None:
        raise LookupError("not what I want")

    match how:
        case "cancel":
            run = asyncio.create_task(client.run({"do": "wait"}))
            await until(lambda: env.started == 1)
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
        case "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await client.run({"do": "wait"})
        case "on_delta":
            with pytest.raises(LookupError, match="not what I want"):
                await client.run({"do": "wait", "deltas": 3}, refuse)
    await until(lambda: env.cancelled == env.started)
    assert client.in_flight == 0
    assert (await client.run({"value": 1}))["echo"] == 1


async def test_closing_fails_what_is_in_flight_and_cancels_it_there(client: EnvClient, env: ScriptedEnv) -> None:
    """Row 27."""
    runs = [asyncio.create_task(client.run({"do": "wait"})) for _ in range(5)]
    await until(lambda: env.started == 5)
    await client.close()
    for run in runs:
        with pytest.raises(EnvServerError, match="the client was closed"):
            await run
    await until(lambda: env.cancelled == 5)
    with pytest.raises(EnvServerError, match="this client is closed"):
        await client.run({})
    await client.close()


async def test_a_killed_server_fails_what_is_in_flight_at_once_and_its_successor_is_found() -> None:
    """Row 27."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    async with EnvClient(address) as client:
        async with env_server(MAKE, address=address):
            pid = (await client.run({}))["pid"]
            runs = [asyncio.create_task(client.run({"do": "wait"})) for _ in range(5)]
            await asyncio.sleep(0)
            os.kill(pid, signal.SIGKILL)
            for run in runs:
                with pytest.raises(EnvServerError, match=f"the connection to {address} was lost"):
                    await run
        async with env_server(MAKE, address=address):
            assert (await client.run({"value": 2}))["echo"] == 2


async def test_replies_that_arrived_before_the_loss_count() -> None:
    async with Scripted() as scripted, EnvClient(scripted.address) as client:
        runs = [asyncio.create_task(client.run({"number": number})) for number in range(10)]
        for number in range(10):
            client_id, request_id, _, _ = await scripted.router.recv_multipart()
            if number < 9:
                answer = encode({"success": True, "error": None, "number": number})
                await scripted.router.send_multipart([client_id, request_id, b"reply", answer])
        scripted.router.close(linger=1000)
        for number, run in enumerate(runs[:9]):
            assert (await run)["number"] == number
        with pytest.raises(EnvServerError, match="was lost"):
            await runs[9]


async def test_nobody_at_the_address_is_told_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    async with EnvClient(address, connect_timeout=0.2) as client:
        with pytest.raises(EnvServerError, match=r"nobody answers at .*: no connection within 0\.2 s"):
            await client.run({})
        with pytest.raises(EnvServerError, match=r"no answer from .* within 0\.05 s"):
            await client.health(timeout=0.05)


async def test_a_listener_that_speaks_something_else_is_told() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n" * 10)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        async with EnvClient(f"tcp://127.0.0.1:{port}", connect_timeout=0.5) as client:
            with pytest.raises(EnvServerError, match=r"nobody answers|was lost"):
                await client.run({})


@pytest.mark.parametrize("address", ["nonsense", "tcp://", "http://127.0.0.1:1", "tcp://x", "tcp://127.0.0.1:70000", 5])
async def test_an_address_that_is_none_is_told(address: Any) -> None:
    before = descriptors()
    with pytest.raises(EnvServerError, match="cannot connect to"):
        async with EnvClient(address) as client:
            await client.run({})
    assert descriptors() == before


async def test_a_client_that_belongs_to_another_loop_says_so_and_does_not_wait(client: EnvClient) -> None:
    await client.run({})
    with pytest.raises(EnvServerError, match="another event loop"):
        await asyncio.to_thread(asyncio.run, client.run({}))
    assert (await client.run({"value": 1}))["echo"] == 1


async def test_a_coroutine_function_is_no_on_delta(client: EnvClient) -> None:
    async def never_awaited(_: dict[str, Any]) -> None: ...

    with pytest.raises(TypeError, match="plain function"):
        await client.run({"deltas": 1}, on_delta=never_awaited)  # type: ignore[arg-type]
    assert client.in_flight == 0


async def test_a_request_that_cannot_be_sent_is_told(client: EnvClient) -> None:
    with pytest.raises(EnvServerError, match="not serialisable"):
        await client.run({"it": object()})
    assert client.in_flight == 0


async def test_odd_answers_fail_their_request_or_are_dropped() -> None:
    async with Scripted() as scripted, EnvClient(scripted.address) as client:
        run = asyncio.create_task(client.run({}))
        peer, request_id, _, _ = await scripted.router.recv_multipart()
        for odd in ([b"x"], [request_id, b"reply"], [request_id, b"other", b"x"], [b"strange", b"reply", failure("x")]):
            await scripted.router.send_multipart([peer, *odd])
        await scripted.router.send_multipart([peer, request_id, b"reply", b"\xc1"])
        with pytest.raises(EnvServerError, match="answered what is not msgpack"):
            await run
        assert client.dropped == 3
        run = asyncio.create_task(client.run({}))
        peer, request_id, _, _ = await scripted.router.recv_multipart()
        await scripted.router.send_multipart([peer, request_id, b"reply", encode({"success": False})])
        with pytest.raises(EnvRequestError, match="without a reason"):
            await run


async def test_a_run_that_is_given_up_names_itself_as_text_in_its_cancel() -> None:
    """The peers' servers look the id up as text."""
    async with Scripted() as scripted, EnvClient(scripted.address) as client:
        run = asyncio.create_task(client.run({}))
        _, run_id, _, _ = await scripted.router.recv_multipart()
        run.cancel()
        _, cancel_id, method, payload = await scripted.router.recv_multipart()
        assert method == b"cancel"
        assert cancel_id != run_id
        assert decode(payload) == {"request_id": run_id.decode()}
        with pytest.raises(asyncio.CancelledError):
            await run


@pytest.mark.parametrize("cancels", [1, 2])
async def test_a_cancelled_close_still_closes(server: EnvServer, cancels: int) -> None:
    before = descriptors()
    client = EnvClient(server.address)
    await client.run({})
    closing = asyncio.create_task(client.close())
    for _ in range(cancels):
        await asyncio.sleep(0)
        closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await until(lambda: descriptors() <= before)
