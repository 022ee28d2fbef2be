"""The rule of evidence in life: the real SDK over a stand-in for the service, each time a tenth of what it is."""

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from interception import InterceptionServer, InterceptionServerConfig, RolloutSession, Upstream
from interception.echo import EchoModel
from tests.helpers import until
from tests.prime import FakePrime
from tunnel import (
    HEALTH_PATH,
    IDENTITY_HEADER,
    PROBE_HEADER,
    Gone,
    KeepAlivePolicy,
    PrimeTunnel,
    PrimeTunnelConfig,
    Restarted,
    RestartFailed,
    StateChanged,
    Tunnel,
    TunnelEvent,
)
from tunnel.keepalive import KeepAlive
from tunnel.policy import Repeats

SCALE = 0.1
# What a loaded machine needs is left as it is.
POLICY = (
    KeepAlivePolicy()
    .scaled(SCALE)
    .model_copy(
        update={
            "probe_timeout": 5.0,
            "restart_timeout": 20.0,
            "clock_jump": 2.0,
            "exit_poll": 0.05,
            "idle_spacing": 1.0,
        }
    )
)
LONG = 30.0


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def service(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePrime]:
    domain = getattr(request, "param", None)
    real = socket.getaddrinfo

    def resolve(host: Any, *args: Any, **kwargs: Any) -> Any:
        """A wildcard record, as the service's gateway has one."""
        named = domain and str(host).endswith(f".{domain}")
        return real("127.0.0.1" if named else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with FakePrime(tmp_path, scale=SCALE, domain=domain) as service:
        for name, value in service.env().items():
            monkeypatch.setenv(name, value)
        yield service


NAMED = pytest.mark.parametrize("service", ["tunnels.test"], indirect=True)


@pytest.fixture(autouse=True)
async def _nothing_is_left(service: FakePrime) -> AsyncIterator[None]:
    mine = asyncio.all_tasks()
    yield
    assert service.live() == []
    assert service.frpc_pids() == []
    assert service.config_files() == []
    await until(lambda: asyncio.all_tasks() - mine <= {asyncio.current_task()})


class Bench:
    """A tunnel with the service behind it, which has an identity and hands over its arrivals, and what was told."""

    def __init__(self, service: FakePrime, **policy: Any) -> None:
        self.service = service
        self.tunnel = PrimeTunnel(PrimeTunnelConfig(policy=POLICY.model_copy(update=policy)))
        self.tunnel.on_event = self._note
        self.events: list[TunnelEvent] = []
        self.times: dict[type[TunnelEvent], float] = {}
        self.said_gone = 0
        self.hold = asyncio.Event()
        self.in_flight = 0
        self.rollouts = 0
        self.tunnel.in_flight = lambda: self.in_flight

    def _note(self, event: TunnelEvent) -> None:
        self.events.append(event)
        self.times.setdefault(type(event), time.monotonic())

    def count(self, kind: type[TunnelEvent]) -> int:
        return sum(isinstance(event, kind) for event in self.events)

    @property
    def states(self) -> list[str]:
        """The names of the states gone through."""
        names = [event.after.name for event in self.events if isinstance(event, StateChanged)]
        return [name for at, name in enumerate(names) if at == 0 or names[at - 1] != name]

    def first(self, state: str) -> float:
        """When it came into that state, which it must have."""
        return next(event.at for event in self.events if isinstance(event, StateChanged) and event.after.name == state)

    @property
    def id(self) -> str:
        """Of its registration."""
        return next(tunnel_id for tunnel_id, url in self.service.urls.items() if url == self.url)

    @property
    def probes(self) -> int:
        return self.tunnel.counters.probes

    @contextlib.asynccontextmanager
    async def exposed(self) -> AsyncIterator[str]:
        self._runner = web.ServerRunner(web.Server(self._answer), shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        try:
            async with self.tunnel.expose(self.port) as self.url:
                await asyncio.sleep(0)  # its keepalive begins
                yield self.url
        finally:
            await self._runner.cleanup()

    async def down(self) -> None:
        await self._runner.cleanup()

    async def up(self) -> None:
        self._runner = web.ServerRunner(web.Server(self._answer), shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        self.tunnel.note_arrival(request.headers, request.path)
        self.rollouts += PROBE_HEADER not in request.headers
        self.in_flight += 1
        try:
            if request.path == "/slow":
                await self.hold.wait()
        finally:
            self.in_flight -= 1
        return web.Response(text="ok", headers={IDENTITY_HEADER: "this one"} if request.path == HEALTH_PATH else {})

    async def get(self, path: str = "/v1/models") -> int | None:
        """A rollout's request through the URL."""
        with contextlib.suppress(aiohttp.ClientError):
            async with aiohttp.ClientSession() as session, session.get(self.url + path) as response:
                await response.read()
                return response.status
        return None

    @contextlib.asynccontextmanager
    async def traffic(self, gap: float = 0.05) -> AsyncIterator[None]:
        """Rollouts that call, whatever becomes of it; there is traffic when this is entered."""

        async def call() -> None:
            while True:
                await self.get()
                await asyncio.sleep(gap)

        seen = self.rollouts
        task = asyncio.create_task(call())
        try:
            await until(lambda: self.rollouts >= seen + 15)
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def probed(self, times: int) -> None:
        seen = self.probes
        await until(lambda: self.probes >= seen + times, LONG)

    async def mended(self, restarts: int = 1) -> None:
        """Wait until so many restarts have been made and the URL serves."""
        await until(lambda: self.tunnel.restarts == restarts and self.tunnel.state.name == "serving", LONG)
        assert await self.get() == 200


class TestRestarted:
    async def test_a_lost_route_once_under_the_same_url_and_much_sooner_than_by_the_plain_rule(
        self, service: FakePrime, caplog: pytest.LogCaptureFixture
    ) -> None:
        bench = Bench(service, busy_spacing=0.5)
        async with bench.exposed() as url, bench.traffic():
            lost = time.monotonic()
            service.lose_route(bench.id)
            await bench.mended()
            took = bench.times[Restarted] - lost
            assert took < POLICY.confirm_after / 2, "the plain rule needs that alone to confirm what it saw"
            await bench.probed(2)
            assert (bench.tunnel.restarts, bench.tunnel.url) == (1, url)
            assert bench.states == ["suspect", "restarting", "serving"]
            counters = bench.tunnel.counters
            assert (counters.restarts, counters.refused_restarts) == (1, 0)
            assert counters.failed_probes >= POLICY.no_route.times
            assert counters.probes > counters.failed_probes
            assert counters.arrivals == bench.rollouts
        assert service.api_calls("POST") == 1
        [line] = [record.getMessage() for record in caplog.records if "; restarting" in record.getMessage()]
        assert "gateway 404" in line
        assert "local service fine" in line
        assert line.endswith(f"; restarting frpc under {url}")

    async def test_a_lost_route_without_traffic(self, service: FakePrime) -> None:
        bench = Bench(service)
        async with bench.exposed():
            service.lose_route(bench.id)
            await bench.mended()

    async def test_a_killed_process_at_once(self, service: FakePrime) -> None:
        bench = Bench(service, idle_spacing=3600.0, drain=3600.0)
        bench.tunnel.in_flight = lambda: 1
        async with bench.exposed():
            (pid,) = service.frpc_pids()
            killed = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            await bench.mended()
            assert bench.times[Restarted] - killed < 5.0
            [restarted] = [event for event in bench.events if isinstance(event, Restarted)]
            assert restarted.reason == "its client exited"

    async def test_a_refused_one_is_tried_again_and_is_the_same_one(self, service: FakePrime) -> None:
        bench = Bench(service)
        async with bench.exposed():
            service.hold_old_session(bench.id, 1.5)
            os.kill(service.frpc_pids()[0], signal.SIGKILL)
            await bench.mended()
            refusals = [event.error for event in bench.events if isinstance(event, RestartFailed)]
            assert refusals
            assert all("already exists" in error for error in refusals)
            assert bench.tunnel.counters.refused_restarts == len(refusals)
            assert (bench.count(Gone), bench.tunnel.gone) == (0, None)
            assert bench.states == ["restarting", "serving"]

    async def test_a_half_open_session_is_waited_for_and_mends_itself(self, service: FakePrime) -> None:
        bench = Bench(service)
        async with bench.exposed():
            service.half_open(bench.id)
            bench.tunnel.report("a rollout's call hangs")
            await until(lambda: "suspect" in bench.states)
            assert "slow gateway 404" in bench.tunnel.state.reason
            await until(lambda: bench.tunnel.state.name == "serving", LONG)
            assert (bench.tunnel.restarts, bench.count(RestartFailed)) == (0, 0)
            assert service.logins(bench.id) == 2
            assert await bench.get() == 200

    async def test_a_half_open_session_that_does_not_mend_itself(
        self, service: FakePrime, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The relay has the session and frpc says no word in it: each request waits for its 404."""
        monkeypatch.setenv("FRPC_FAKE", service.env(mute_after_connect=True)["FRPC_FAKE"])
        bench = Bench(service, half_open=POLICY.half_open._replace(span=2.0))
        async with bench.exposed():
            monkeypatch.setenv("FRPC_FAKE", service.env()["FRPC_FAKE"])
            bench.tunnel.report("a rollout's call hangs")
            await bench.mended()
            assert bench.tunnel.counters.failed_probes >= 3

    async def test_drained_first_of_what_is_in_flight(self, service: FakePrime) -> None:
        bench = Bench(service, drain=10.0, no_reference=Repeats(2, 0.1))
        async with bench.exposed():
            slow = asyncio.create_task(bench.get("/slow"))
            await until(lambda: bench.in_flight)
            # New requests get a 502 that is nobody else's, and the one in flight is on its way still.
            service.gateway[bench.id] = 502
            bench.tunnel.report("502")
            await until(lambda: bench.tunnel.state.name == "restarting", LONG * 2)
            await asyncio.sleep(0.3)
            assert bench.count(Restarted) == 0
            service.gateway.clear()
            bench.hold.set()
            assert await slow == 200
            await until(lambda: bench.count(Restarted) == 1)

    async def test_but_not_for_ever(self, service: FakePrime) -> None:
        bench = Bench(service, drain=0.3, no_reference=Repeats(2, 0.1))
        async with bench.exposed():
            slow = asyncio.create_task(bench.get("/slow"))
            await until(lambda: bench.in_flight)
            service.gateway[bench.id] = 502
            bench.tunnel.report("502")
            await until(lambda: bench.count(Restarted) == 1, LONG * 2)
            service.gateway.clear()
            bench.hold.set()
            await slow


class TestGone:
    async def test_expired_and_thrown_out_the_log_brings_the_restart_forward(self, service: FakePrime) -> None:
        bench = Bench(service, no_route=POLICY.no_route._replace(times=1000))
        async with bench.exposed():
            bench.tunnel.on_gone = lambda: setattr(bench, "said_gone", bench.said_gone + 1)
            service.expire(bench.id)
            await until(lambda: bench.tunnel.gone, LONG)
            assert (bench.said_gone, bench.count(Gone)) == (1, 1)
            assert "inactive" in str(bench.tunnel.gone)
            assert bench.count(RestartFailed) == 1
            assert bench.tunnel.state.name == "gone"
            asked = bench.probes
            await asyncio.sleep(0.3)
            assert bench.probes == asked

    async def test_expired_with_its_client_connected_the_api_brings_the_restart_forward(
        self, service: FakePrime
    ) -> None:
        bench = Bench(service, no_route=POLICY.no_route._replace(times=1000))
        async with bench.exposed():
            service.expire_softly(bench.id)
            service.lose_route(bench.id)
            await until(lambda: bench.tunnel.gone, LONG)
            assert (bench.count(Gone), bench.count(RestartFailed)) == (1, 1)

    async def test_deleted_but_serving_it_is_left_alone(self, service: FakePrime) -> None:
        bench = Bench(service, idle_spacing=0.1)
        async with bench.exposed():
            service.terminate_softly(bench.id)
            await bench.probed(6)
            assert (bench.events, bench.tunnel.state.name) == ([], "serving")
            assert service.logins(bench.id) == 1
            # Nobody asked the API: nothing was suspicious.
            assert service.api_calls("GET") == 0


class TestLeftAlone:
    @pytest.mark.parametrize("fault", ["hang", "reset", 502, 404])
    async def test_this_hosts_own_way_is_broken_while_requests_arrive(self, service: FakePrime, fault: Any) -> None:
        bench = Bench(
            service,
            failure_spacing=(0.1,),
            # Only what hangs is waited for; a busy machine must not seem to.
            probe_timeout=0.5 if fault == "hang" else 5.0,
            no_reference=Repeats(2, 0.1),
            no_route=Repeats(2, 0.1),
            idle_spacing=0.1,
            busy_spacing=0.1,
        )
        async with bench.exposed(), bench.traffic():
            service.host_path[bench.id] = fault
            bench.tunnel.report("a rollout's call failed")
            failed = bench.tunnel.counters.failed_probes
            await until(lambda: bench.tunnel.counters.failed_probes >= failed + 8, LONG)
            assert (bench.tunnel.restarts, service.logins(bench.id)) == (0, 1)
            service.host_path.clear()
            await until(lambda: bench.tunnel.state.name == "serving")
            assert set(bench.states) <= {"suspect", "serving"}

    @NAMED
    async def test_the_gateway_says_502_to_everybody(self, service: FakePrime) -> None:
        bench = Bench(service, bad_gateway=Repeats(2, 0.1), no_reference=Repeats(2, 0.1))
        async with bench.exposed():
            service.gateway["*"] = 502
            bench.tunnel.report("502")
            await bench.probed(6)
            assert bench.tunnel.state.name == "path_fault"
            service.gateway.clear()
            await until(lambda: bench.tunnel.state.name == "serving", LONG)
            assert service.logins(bench.id) == 1

    @NAMED
    async def test_but_to_this_one_alone_it_is_restarted_sooner_than_where_nothing_tells(
        self, service: FakePrime
    ) -> None:
        bench = Bench(service, bad_gateway=Repeats(2, 0.1), no_reference=Repeats(1000, 3600.0))
        async with bench.exposed():
            service.gateway[bench.id] = 502
            bench.tunnel.report("502")
            await until(lambda: bench.count(Restarted) == 1, LONG)
            service.gateway.clear()
            await bench.mended()

    @pytest.mark.parametrize("status", [401, 403, 429])
    async def test_the_gateway_asks_who_we_are_or_has_enough(self, service: FakePrime, status: int) -> None:
        bench = Bench(service, failure_spacing=(0.05,))
        async with bench.exposed():
            service.gateway[bench.id] = status
            bench.tunnel.report(str(status))
            await bench.probed(8)
            assert bench.tunnel.state.name == "path_fault"
            assert f"gateway {status}" in bench.tunnel.state.reason
            service.gateway.clear()
            await until(lambda: bench.tunnel.state.name == "serving", LONG)
            assert service.logins(bench.id) == 1

    async def test_the_local_service_is_down(self, service: FakePrime) -> None:
        bench = Bench(service, failure_spacing=(0.05,), no_route=Repeats(2, 0.1))
        async with bench.exposed():
            await bench.down()
            bench.tunnel.report("404")
            await bench.probed(8)
            assert bench.states == ["local_down"]
            assert "connection refused" in bench.tunnel.state.reason
            await bench.up()
            await until(lambda: bench.tunnel.state.name == "serving", LONG)
            assert service.logins(bench.id) == 1

    async def test_a_request_that_arrives_clears_the_suspicion(self, service: FakePrime) -> None:
        bench = Bench(service, failure_spacing=(0.2,), no_route=Repeats(1000, 3600.0))
        async with bench.exposed():
            service.host_path[bench.id] = 404
            bench.tunnel.report("404")
            await until(lambda: bench.tunnel.state.name == "suspect")
            assert await bench.get() == 200
            assert bench.tunnel.state.name == "serving"
            assert bench.states[:2] == ["suspect", "serving"]

    async def test_this_host_was_suspended(
        self, service: FakePrime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        slept = 0.0
        monkeypatch.setattr(
            "tunnel.base.KeepAlive", functools.partial(KeepAlive, wall_clock=lambda: time.time() + slept)
        )
        bench = Bench(service, idle_spacing=3600.0, clock_hold=1.5, no_route=Repeats(1, 0.0))
        async with bench.exposed():
            await asyncio.sleep(0.2)
            assert bench.probes == 0
            slept = 3600.0
            woke = time.monotonic()
            service.lose_route(bench.id)
            await until(lambda: bench.probes >= 1)
            assert time.monotonic() - woke < POLICY.idle_spacing + 5
            await bench.mended()
            assert bench.times[Restarted] - woke >= 1.4
        assert "was this host suspended?" in caplog.text


class TestTogether:
    async def test_all_routes_are_lost_at_once_one_is_tried_first_and_then_all_serve_again(
        self, service: FakePrime
    ) -> None:
        # What a busy machine must not outlast is left as it is: the span in which all turn suspect, the canary's time.
        slow = {"siblings_window": 30.0, "canary_waits": (60.0,), "no_route": Repeats(3, 1.0), "restart_timeout": 60.0}
        benches = [Bench(service, idle_spacing=3600.0, follow_gap=0.2, **slow) for _ in range(5)]
        async with contextlib.AsyncExitStack() as stack:
            for bench in benches:
                await stack.enter_async_context(bench.exposed())
            service.lose_route_everywhere()
            for bench in benches:
                bench.tunnel.report("404")
            for bench in benches:
                await bench.mended()
            assert [service.logins(bench.id) for bench in benches] == [2] * 5
            tried = sorted(benches, key=lambda bench: bench.first("restarting"))
            # The others' time comes only once the canary serves again.
            assert tried[0].first("serving") <= tried[1].first("restarting")


class TestTheServer:
    """The interception server as what is behind the tunnel."""

    def server(self, **config: Any) -> tuple[InterceptionServer, Tunnel]:
        server = InterceptionServer(
            InterceptionServerConfig(tunnel=PrimeTunnelConfig(policy=POLICY, **config)), requires_tunnel=True
        )
        assert server.tunnel is not None
        return server, server.tunnel

    async def test_it_says_how_many_requests_are_being_answered(self, service: FakePrime) -> None:
        asked, go_on = asyncio.Event(), asyncio.Event()

        async def upstream(request: web.BaseRequest) -> web.Response:
            asked.set()
            await go_on.wait()
            return web.json_response({"choices": []})

        runner = web.ServerRunner(web.Server(upstream), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server, tunnel = self.server()
        session = RolloutSession(Upstream(base_url=f"http://127.0.0.1:{runner.addresses[0][1]}/v1"))
        async with server, server.acquire(session) as slot, aiohttp.ClientSession() as http:
            assert tunnel.in_flight() == 0
            call = asyncio.create_task(
                http.post(
                    f"{slot.base_url}/v1/chat/completions",
                    json={"model": "m", "messages": []},
                    headers={"Authorization": f"Bearer {slot.model_secret}"},
                )
            )
            await asked.wait()
            assert tunnel.in_flight() == 1
            go_on.set()
            async with await call as response:
                assert response.status == 200
            await until(lambda: tunnel.in_flight() == 0)
            assert tunnel.counters.arrivals == 1
        await runner.cleanup()

    async def test_behind_a_proxy_that_rewrites_host_arrivals_are_known_by_their_path(
        self, service: FakePrime, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The gateway hides its own name, as a proxy may that knows nothing of ours.
        monkeypatch.setattr("tests.prime.relay.rewrite", functools.partial(rewritten, "inner.example"))
        server, tunnel = self.server(mark="path")
        async with (
            EchoModel() as echo,
            server,
            server.acquire(RolloutSession(Upstream(base_url=echo.base_url))) as slot,
        ):
            (plain,) = service.urls.values()
            assert slot.base_url == tunnel.url == plain + tunnel.path_prefix
            assert tunnel.path_prefix.startswith("/vf/t/")
            headers = {"Authorization": f"Bearer {slot.model_secret}"}
            body = {"model": "echo", "messages": [{"role": "user", "content": "hello"}]}
            async with aiohttp.ClientSession(headers=headers) as http:
                async with http.post(f"{slot.base_url}/v1/chat/completions", json=body) as response:
                    assert (await response.json())["choices"][0]["message"]["content"] == "hello"
                assert tunnel.counters.arrivals == 1
                async with http.get(plain + HEALTH_PATH) as response:
                    assert response.status == 200
                assert tunnel.counters.arrivals == 1
                async with http.get(slot.base_url + HEALTH_PATH) as response:
                    assert response.headers[IDENTITY_HEADER] == server.identity
                assert tunnel.counters.arrivals == 2
            tunnel.report("so that there is a probe")
            await until(lambda: tunnel.counters.probes >= 1)
            assert tunnel.counters.failed_probes == 0
            assert service.requests(service.created[0], HEALTH_PATH) >= 2

    async def test_by_their_host_where_none_rewrites_it(self, service: FakePrime) -> None:
        server, tunnel = self.server()
        async with server, aiohttp.ClientSession() as http:
            assert server.base_url == service.urls[service.created[0]]
            async with http.get(f"{server.base_url}/v1/models") as response:
                assert response.status == 401
            assert tunnel.counters.arrivals == 1


def rewritten(name: str, request_line: str, headers: list[tuple[str, str]], host: str, peer: str) -> bytes:
    kept = [(key, value) for key, value in headers if key.lower() not in ("host", "connection")]
    lines = [f"{key}: {value}" for key, value in [("Host", name), ("Connection", "close"), *kept]]
    return "\r\n".join([request_line, *lines, "", ""]).encode("latin-1")


class TestEnds:
    async def test_torn_down_in_the_middle_of_a_restart_it_leaves_nothing(
        self, service: FakePrime, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG, "asyncio")
        bench = Bench(service)
        async with bench.exposed():
            (service.home / ".prime" / "bin" / "frpc").write_text("#!/bin/sh\nexec sleep 600\n")
            os.kill(service.frpc_pids()[0], signal.SIGKILL)
            await until(lambda: bench.tunnel.state.name == "restarting")
            await asyncio.sleep(0.2)
            began = time.monotonic()
        assert time.monotonic() - began < POLICY.restart_timeout / 2
        assert bench.count(Restarted) == 0
