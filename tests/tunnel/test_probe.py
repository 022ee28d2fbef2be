"""Every outcome class of a URL probe, produced by real servers: a rule is worth no more than what it is fed."""

import asyncio
import contextlib
import json
import logging
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from tests.helpers import Switch, until
from tunnel import HEALTH_PATH, IDENTITY_HEADER, PROBE_HEADER
from tunnel.evidence import Outcome
from tunnel.keepalive import KeepAlive
from tunnel.policy import KeepAlivePolicy, Repeats
from tunnel.probe import Answer, accepts_tcp, answers_http, classify, describe, is_address, new_nonce, probe

SLOW_404 = 0.3
PATIENT = 20.0
IDENTITY = "0123456789abcdef"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@contextlib.asynccontextmanager
async def serve(answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    runner = web.ServerRunner(web.Server(answer), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def server(status: int = 200, identity: str | None = None, delay: float = 0.0) -> AsyncIterator[str]:
    """The URL of a server that answers everything alike."""

    async def answer(request: web.BaseRequest) -> web.Response:
        await asyncio.sleep(delay)
        return web.Response(status=status, headers={IDENTITY_HEADER: identity} if identity else {})

    async with serve(answer) as url:
        yield url


@contextlib.asynccontextmanager
async def tcp(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[int]:
    """The port of a server that speaks no HTTP."""

    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await serve(reader, writer)
        writer.close()

    listening = await asyncio.start_server(guarded, "127.0.0.1", 0)
    async with listening:
        yield int(listening.sockets[0].getsockname()[1])


def closed_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


async def look(url: str, local: str, *, timeout: float = PATIENT) -> tuple[Outcome, str]:
    """The outcome of probing both, and its description."""
    outside, inside = await asyncio.gather(
        probe(url + HEALTH_PATH, timeout=timeout, through_proxy=True),
        probe(local + HEALTH_PATH, timeout=timeout, through_proxy=False),
    )
    outcome = classify(outside, inside, SLOW_404)
    return outcome, describe(outcome, outside)


class TestOfAServiceWithAnIdentity:
    @pytest.fixture
    async def local(self) -> AsyncIterator[str]:
        async with server(identity=IDENTITY) as url:
            yield url

    async def test_its_own_answer_is_ok(self, local: str) -> None:
        async with server(identity=IDENTITY) as url:
            assert await look(url, local) == (Outcome.OK, "answered 200")

    @pytest.mark.parametrize("status", [404, 429, 500, 503])
    async def test_its_own_answer_with_another_status_is_alive(self, local: str, status: int) -> None:
        async with server(status, IDENTITY) as url:
            assert await look(url, local) == (Outcome.ORIGIN, f"answered {status}")

    async def test_a_404_at_once_that_is_not_its_own_is_no_route(self, local: str) -> None:
        async with server(404) as url:
            assert await look(url, local) == (Outcome.NO_ROUTE, "gateway 404")

    async def test_a_404_that_took_its_time_is_half_open(self, local: str) -> None:
        async with server(404, delay=SLOW_404) as url:
            assert await look(url, local) == (Outcome.HALF_OPEN, "slow gateway 404")

    # The last two have no class of their own; this one needs the most proof of those that can end in a restart.
    @pytest.mark.parametrize("status", [502, 503, 504, 520, 530, 500, 302, 410])
    async def test_bad_gateway(self, local: str, status: int) -> None:
        async with server(status) as url:
            assert await look(url, local) == (Outcome.BAD_GATEWAY, f"gateway {status}")

    @pytest.mark.parametrize("status", [401, 403, 407])
    async def test_auth(self, local: str, status: int) -> None:
        async with server(status) as url:
            assert await look(url, local) == (Outcome.AUTH, f"gateway {status}")

    async def test_busy(self, local: str) -> None:
        async with server(429) as url:
            assert await look(url, local) == (Outcome.BUSY, "gateway 429")

    @pytest.mark.parametrize("status", [200, 404, 502])
    async def test_the_identity_of_another_server_is_a_stranger(self, local: str, status: int) -> None:
        async with server(status, "fedcba9876543210") as url:
            assert await look(url, local) == (Outcome.WRONG, f"{status} from somebody else")

    @pytest.mark.parametrize("status", [200, 204])
    async def test_success_without_an_identity_is_a_stranger(self, local: str, status: int) -> None:
        async with server(status) as url:
            assert await look(url, local) == (Outcome.WRONG, f"{status} from somebody else")

    async def test_connected_and_then_silence_is_no_answer(self, local: str) -> None:
        async with Switch("silent") as silent:
            assert await look(silent.url, local, timeout=0.5) == (Outcome.NO_ANSWER, "no answer within 0.5 s")

    async def test_reset_after_the_connection_stood_is_no_answer(self, local: str) -> None:
        async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

        async with tcp(reset) as port:
            outcome, _ = await look(f"http://127.0.0.1:{port}", local)
        assert outcome is Outcome.NO_ANSWER

    async def test_closed_without_a_byte_is_no_answer(self, local: str) -> None:
        async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")

        async with tcp(close) as port:
            outcome, _ = await look(f"http://127.0.0.1:{port}", local)
        assert outcome is Outcome.NO_ANSWER

    async def test_what_is_no_http_is_no_answer(self, local: str) -> None:
        async with Switch("garbage") as garbage:
            outcome, _ = await look(garbage.url, local)
        assert outcome is Outcome.NO_ANSWER

    async def test_a_closed_port_is_refused(self, local: str) -> None:
        url = f"http://127.0.0.1:{closed_port()}"
        assert await look(url, local) == (Outcome.REFUSED, "connection refused")

    async def test_a_name_that_does_not_exist(self, local: str, monkeypatch: pytest.MonkeyPatch) -> None:
        real = socket.getaddrinfo

        def answer(host: str, *args: object, **kwargs: object) -> object:
            # RFC 6761: no resolver may know such a name. One that cannot be asked, as on a machine without DNS, says
            # something else, which is no less a part of what is tested, but another class.
            if host.endswith(".invalid"):
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return real(host, *args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(socket, "getaddrinfo", answer)
        assert await look("http://t-1.tunnels.invalid", local) == (Outcome.NO_NAME, "no such name")

    async def test_a_name_under_invalid_as_this_machine_resolves_it(self, local: str) -> None:
        outcome, _ = await look("http://t-1.tunnels.invalid", local)
        assert outcome in (Outcome.NO_NAME, Outcome.PATH)  # PATH: there is no DNS to ask

    async def test_a_dns_that_does_not_answer_is_the_path(self, local: str, monkeypatch: pytest.MonkeyPatch) -> None:
        real = socket.getaddrinfo

        def fail(host: str, *args: object, **kwargs: object) -> object:
            if host == "t-1.tunnels.test":
                raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
            return real(host, *args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(socket, "getaddrinfo", fail)
        outcome, _ = await look("http://t-1.tunnels.test", local)
        assert outcome is Outcome.PATH

    async def test_a_failed_tls_handshake_is_the_path(self, local: str) -> None:
        async with Switch() as plain:
            outcome, _ = await look(plain.url.replace("http:", "https:"), local)
        assert outcome is Outcome.PATH

    async def test_a_connection_that_does_not_come_about_is_the_path(self, local: str) -> None:
        # A listener whose queue is full: Linux drops what more wants to connect.
        with socket.socket() as listener, contextlib.ExitStack() as stack:
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            address = listener.getsockname()
            for _ in range(3):
                filler = stack.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(address)
            outcome, detail = await look(f"http://127.0.0.1:{address[1]}", local, timeout=0.5)
        assert (outcome, detail) == (Outcome.PATH, "no connection within 0.5 s")

    async def test_a_proxy_of_this_host_that_refuses_is_the_path(
        self, local: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{closed_port()}")
        outcome, _ = await look("http://t-1.tunnels.test", local)
        assert outcome is Outcome.PATH

    @pytest.mark.parametrize(("status", "expected"), [(407, Outcome.AUTH), (503, Outcome.PATH)])
    async def test_a_proxy_of_this_host_that_does_not_connect(
        self, local: str, monkeypatch: pytest.MonkeyPatch, status: int, expected: Outcome
    ) -> None:
        async with Switch(status) as proxy:
            monkeypatch.setenv("https_proxy", proxy.url)
            outcome, _ = await look("https://t-1.tunnels.test", local)
        assert outcome is expected

    @pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://[::1", "ftp://127.0.0.1"])
    async def test_a_url_that_cannot_be_asked_is_not_run(self, local: str, url: str) -> None:
        outcome, _ = await look(url, local)
        assert outcome is Outcome.UNRUN

    async def test_without_room_for_a_thread_it_is_not_run(self, local: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*args: object, **kwargs: object) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(asyncio.get_running_loop(), "run_in_executor", fail)
        outcome, detail = await look("http://t-1.tunnels.test", local)
        assert (outcome, detail) == (Outcome.UNRUN, "RuntimeError: can't start new thread")

    def test_without_descriptors_it_is_not_run(self) -> None:
        program = """
import asyncio, json, resource, socket
from tunnel.probe import probe

async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    held = []
    try:
        while True:
            held.append(socket.socket())
    except OSError:
        pass
    answer = await probe("http://127.0.0.1:9/", timeout=5, through_proxy=True)
    for one in held:
        one.close()
    print(json.dumps([answer.status, answer.fault, answer.detail]))

asyncio.run(main())
"""
        run = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            cwd=Path(__file__).parents[2],
        )
        status, fault, detail = json.loads(run.stdout)
        assert (status, fault) == (None, Outcome.UNRUN)
        assert "Too many open files" in detail


class TestOfAServiceWithoutAnIdentity:
    @pytest.mark.parametrize("status", [200, 204, 302, 401, 404, 429, 503])
    async def test_the_same_status_through_both_is_ok(self, status: int) -> None:
        async with server(status) as local, server(status) as url:
            assert (await look(url, local))[0] is Outcome.OK

    async def test_a_stranger_cannot_be_told(self) -> None:
        async with server() as local, server(identity="fedcba9876543210") as url:
            assert (await look(url, local))[0] is Outcome.OK

    @pytest.mark.parametrize(
        ("status", "expected"),
        [
            (404, Outcome.NO_ROUTE),
            (401, Outcome.AUTH),
            (429, Outcome.BUSY),
            (502, Outcome.BAD_GATEWAY),
            (204, Outcome.BAD_GATEWAY),
        ],
    )
    async def test_another_status_through_the_url_is_the_gateways(self, status: int, expected: Outcome) -> None:
        async with server() as local, server(status) as url:
            assert (await look(url, local))[0] is expected

    async def test_a_local_service_that_is_down_while_the_url_answers_says_nothing_of_the_url(self) -> None:
        async with server(identity=IDENTITY) as url:
            assert (await look(url, f"http://127.0.0.1:{closed_port()}"))[0] is Outcome.OK

    async def test_a_local_service_that_is_down_makes_nobody_a_stranger(self) -> None:
        async with server(502) as url:
            assert (await look(url, f"http://127.0.0.1:{closed_port()}"))[0] is Outcome.BAD_GATEWAY


class TestTheRequest:
    async def test_each_is_a_connection_of_its_own_with_its_nonce(self) -> None:
        seen: list[tuple[str | None, object]] = []

        async def answer(request: web.BaseRequest) -> web.Response:
            seen.append((request.headers.get(PROBE_HEADER), request.transport))
            return web.Response()

        async with serve(answer) as url:
            for nonce in ("one", "two"):
                await probe(url, timeout=PATIENT, through_proxy=True, nonce=nonce)
        assert [nonce for nonce, _ in seen] == ["one", "two"]
        assert seen[0][1] is not seen[1][1]

    async def test_the_local_one_goes_through_no_proxy_and_the_other_does(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with Switch(204) as proxy, Switch() as local:
            monkeypatch.setenv("http_proxy", proxy.url)
            inside = await probe(local.url, timeout=PATIENT, through_proxy=False)
            outside = await probe(local.url, timeout=PATIENT, through_proxy=True)
        assert (inside.status, outside.status) == (200, 204)

    async def test_redirects_are_not_followed(self) -> None:
        async with Switch() as elsewhere, Switch(f"redirect to {elsewhere.url}") as redirecting:
            answer = await probe(redirecting.url, timeout=PATIENT, through_proxy=True)
            assert (answer.status, elsewhere.hits) == (302, 0)

    async def test_cancelled_it_leaves_nothing(self) -> None:
        async with Switch("silent") as silent:
            before = asyncio.all_tasks()
            asking = asyncio.create_task(probe(silent.url, timeout=PATIENT, through_proxy=True))
            await until(lambda: silent.hits)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await until(lambda: silent.connections == 0 and asyncio.all_tasks() <= before)

    def test_nonces_differ(self) -> None:
        assert len({new_nonce() for _ in range(100)}) == 100


class TestReferences:
    @pytest.mark.parametrize(("status", "well"), [(200, True), (404, True), (500, True), (502, False), (530, False)])
    async def test_a_gateway_that_answers_is_well_unless_it_says_that_it_is_not(self, status: int, well: bool) -> None:
        async with server(status) as url:
            assert await answers_http(url, timeout=PATIENT) is well

    async def test_a_gateway_that_is_silent_or_not_there_is_not_well(self) -> None:
        async with Switch("silent") as silent:
            assert not await answers_http(silent.url, timeout=0.2)
        assert not await answers_http(f"http://127.0.0.1:{closed_port()}", timeout=PATIENT)

    async def test_a_port_that_takes_a_connection_is_well(self) -> None:
        async with Switch() as there:
            assert await accepts_tcp("127.0.0.1", there.port, timeout=PATIENT)
        assert not await accepts_tcp("127.0.0.1", closed_port(), timeout=PATIENT)
        assert not await accepts_tcp("no such\nname", 22, timeout=PATIENT)

    def test_addresses_are_told_from_names(self) -> None:
        assert [is_address(host) for host in ("127.0.0.1", "::1", "t-1.example", "1.2.3")] == [True, True, False, False]


class Client:
    """A client that always runs, with as much evidence as a test gives it."""

    is_running = True

    def __init__(self, url: str) -> None:
        self.url: str | None = url

    async def restart(self) -> str:
        self.restarted = True
        raise AssertionError("nothing is to be restarted here")


class TestInTheKeepalive:
    """What of it reaches the rule."""

    async def test_the_probes_arrival_counts_though_its_answer_was_lost(self) -> None:
        """The way in works, and the way out does not."""
        arrived: list[str] = []

        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            arrived.append(request.headers[PROBE_HEADER])
            keepalive.arrived(arrived[-1])
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

        policy = KeepAlivePolicy(
            probe_timeout=0.1,
            idle_spacing=0.01,
            failure_spacing=(0.01,),
            exit_poll=0.01,
            no_reference=Repeats(2, 0.0),
        )
        async with serve(answer) as url, server() as local:
            keepalive = KeepAlive(Client(url), local_url=local, policy=policy)
            task = asyncio.create_task(keepalive.run())
            await until(lambda: len(arrived) >= 6)
            assert not task.done(), "a restart would have ended it"
            task.cancel()
            await asyncio.wait([task])

    async def test_what_hangs_beside_the_probes_is_ended_with_the_keepalive(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Hanging(Client):
            ended = 0

            async def log_lines(self) -> list[str]:
                try:
                    return await asyncio.Event().wait()  # type: ignore[return-value]
                finally:
                    Hanging.ended += 1

        caplog.set_level(logging.DEBUG)
        async with server() as url:
            before = asyncio.all_tasks()
            task = asyncio.create_task(
                KeepAlive(Hanging(url), local_url=url, policy=KeepAlivePolicy(exit_poll=0.01)).run()
            )
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.wait([task])
            assert Hanging.ended == 1
            assert asyncio.all_tasks() <= before

    async def test_evidence_that_cannot_be_had_is_none(self) -> None:
        class Broken(Client):
            async def log_lines(self) -> list[str]:
                raise OSError("no pipe")

            async def record_status(self) -> str | None:
                raise RuntimeError("the API is down")

            async def reference_ok(self, timeout: float) -> bool | None:
                raise KeyError("a defect")

        policy = KeepAlivePolicy(idle_spacing=0.01, failure_spacing=(0.01,), exit_poll=0.01)
        async with server() as local, Switch(502) as gateway:
            keepalive = KeepAlive(Broken(gateway.url), local_url=local, policy=policy)
            task = asyncio.create_task(keepalive.run())
            await until(lambda: gateway.hits >= 5)
            assert not task.done()
            assert keepalive.state.name == "suspect"
            task.cancel()
            await asyncio.wait([task])


def test_an_answer_is_ok_with_200_alone() -> None:
    assert [Answer(status, None, None, "").ok for status in (200, 204, 404, None)] == [True, False, False, False]
