"""What every tunnel promises, shown with one that is scripted; the custom tunnel; tunnels made from configs."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from multidict import CIMultiDict
from pydantic import BaseModel, TypeAdapter, ValidationError

from interception import ElasticInterceptionPoolConfig, InterceptionServerConfig, StaticInterceptionPoolConfig
from tests.helpers import Switch, until
from tunnel import (
    CommandTunnelConfig,
    CustomTunnel,
    CustomTunnelConfig,
    Gone,
    KeepAlivePolicy,
    PrimeTunnel,
    PrimeTunnelConfig,
    SshTunnelConfig,
    StateChanged,
    Tunnel,
    TunnelClient,
    TunnelConfig,
    TunnelError,
    TunnelEvent,
    TunnelGoneError,
    TunnelLimitError,
    make_tunnel,
)
from tunnel.keepalive import KeepAlive
from tunnel.policy import Repeats
from tunnel.teardown import run_to_end

URL = "http://agents.example:8080"

# Probes only when asked for; an exit of the client is seen at once.
QUIET = KeepAlivePolicy(
    rule="plain",
    period=3600,
    confirm_after=3600,
    exit_poll=0.005,
    restart_backoff=0.01,
    restart_backoff_max=0.05,
    report_gap=0,
)
LIVELY = QUIET.model_copy(update={"period": 0.05, "confirm_after": 0.05, "probe_timeout": 20.0, "give_up_after": 0.1})


class Client:
    """A tunnel client that runs until told otherwise; its restarts are refused as gone."""

    def __init__(self, url: str | None = URL) -> None:
        self.url = url
        self.running: Callable[[], bool] = lambda: True

    @property
    def is_running(self) -> bool:
        return self.running()

    def die(self) -> None:
        self.running = lambda: False

    async def restart(self) -> str:
        raise TunnelGoneError("no such tunnel")


class Scripted(Tunnel):
    """Counts what is done to it, and stops at the gates the test closes."""

    def __init__(self, policy: KeepAlivePolicy = QUIET, *, url: str | None = URL, mark: Any = "host") -> None:
        super().__init__(policy, mark)
        self.client = Client(url)
        self.connect_gate, self.undo_gate, self.disconnect_gate = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for gate in (self.connect_gate, self.undo_gate, self.disconnect_gate):
            gate.set()
        self.log: list[str] = []
        self.failure: Exception | None = None
        self.api_key = "sk-very-secret"

    async def _connect(self, port: int) -> TunnelClient:
        self.log.append("connecting")
        try:
            await asyncio.sleep(0)
            await self.connect_gate.wait()
        except asyncio.CancelledError:
            await run_to_end(self._undo())
            raise
        if self.failure is not None:
            raise self.failure
        self.log.append("connected")
        return self.client

    async def _undo(self) -> None:
        self.log.append("undoing")
        await self.undo_gate.wait()
        self.log.append("undone")

    async def _disconnect(self) -> None:
        self.log.append("disconnecting")
        await asyncio.sleep(0)
        await self.disconnect_gate.wait()
        self.log.append("disconnected")


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
async def tunnel() -> Scripted:
    return Scripted()


async def lose(tunnel: Scripted) -> None:
    """The client exits, and its restart is refused for good."""
    tunnel.client.die()
    await until(lambda: tunnel.gone)


class TestExposure:
    async def test_it_is_reachable_while_the_context_is_held(self, tunnel: Scripted) -> None:
        assert (tunnel.url, tunnel.state.name) == (None, "idle")
        async with tunnel.expose(8000) as url:
            assert url == tunnel.url == URL
            assert tunnel.state.name == "serving"
            assert tunnel.log == ["connecting", "connected"]
        assert (tunnel.url, tunnel.state.name) == (None, "idle")
        assert tunnel.log == ["connecting", "connected", "disconnecting", "disconnected"]

    async def test_nothing_happens_before_it_is_entered(self, tunnel: Scripted) -> None:
        tunnel.expose(8000)
        assert tunnel.log == []

    async def test_the_url_has_no_trailing_slash(self) -> None:
        async with Scripted(url="http://agents.example/").expose(8000) as url:
            assert url == "http://agents.example"

    async def test_a_second_exposure_is_refused_and_leaves_the_first_alone(self, tunnel: Scripted) -> None:
        async with tunnel.expose(8000):
            with pytest.raises(TunnelError, match="exposed already"):
                await tunnel.expose(8001).__aenter__()
            assert tunnel.state.name == "serving"
            assert tunnel.url == URL
            with pytest.raises(TunnelError, match="exposed already"):
                await tunnel.expose(8001).__aenter__()
        assert tunnel.log.count("disconnected") == 1

    async def test_it_can_be_exposed_again_after_it_was_left(self, tunnel: Scripted) -> None:
        for _ in range(3):
            async with tunnel.expose(8000) as url:
                assert url == URL
        assert tunnel.log == ["connecting", "connected", "disconnecting", "disconnected"] * 3

    async def test_it_may_be_entered_and_left_in_different_tasks(self, tunnel: Scripted) -> None:
        before = asyncio.all_tasks()
        exposure = tunnel.expose(8000)
        assert await asyncio.create_task(exposure.__aenter__()) == URL  # type: ignore[arg-type]
        await asyncio.create_task(exposure.__aexit__(None, None, None))  # type: ignore[arg-type]
        assert tunnel.log[-1] == "disconnected"
        assert asyncio.all_tasks() == before

    async def test_an_error_of_the_body_passes_unchanged(self, tunnel: Scripted) -> None:
        error = KeyError("from the body")
        with pytest.raises(KeyError) as caught:
            async with tunnel.expose(8000):
                raise error
        assert caught.value is error
        assert tunnel.log[-1] == "disconnected"

    async def test_a_connect_that_fails_leaves_it_ready_for_another_try(self, tunnel: Scripted) -> None:
        tunnel.failure = TunnelLimitError("quota")
        with pytest.raises(TunnelLimitError, match="quota"):
            await tunnel.expose(8000).__aenter__()
        assert tunnel.log == ["connecting"]
        assert (tunnel.url, tunnel.state.name) == (None, "idle")
        tunnel.failure = None
        async with tunnel.expose(8000) as url:
            assert url == URL

    async def test_a_client_without_a_url_is_an_error_and_is_released(self) -> None:
        tunnel = Scripted(url=None)
        with pytest.raises(TunnelError, match="without a URL"):
            await tunnel.expose(8000).__aenter__()
        assert tunnel.log == ["connecting", "connected", "disconnecting", "disconnected"]

    async def test_after_it_was_left_nothing_of_its_keepalive_is_shown(self, tunnel: Scripted) -> None:
        class Restartable(Client):
            async def restart(self) -> str:
                self.running = lambda: True
                return URL

        tunnel.client = Restartable()
        async with tunnel.expose(8000):
            tunnel.client.die()
            await until(lambda: tunnel.restarts == 1)
        assert tunnel.restarts == 0

    async def test_the_keepalive_has_ended_before_the_client_is_released(self, tunnel: Scripted) -> None:
        order = tunnel.log

        class Watched(Scripted):
            async def _keep(self, client: TunnelClient, local_url: str) -> None:
                assert local_url == "http://127.0.0.1:8000"
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(0)
                    order.append("keepalive ended")

        tunnel = Watched()
        tunnel.log = order
        async with tunnel.expose(8000):
            await asyncio.sleep(0)
        assert order[-3:] == ["keepalive ended", "disconnecting", "disconnected"]

    async def test_its_repr_says_where_it_stands_and_no_secret(self, tunnel: Scripted) -> None:
        assert repr(tunnel) == "<Scripted not exposed idle>"
        async with tunnel.expose(8000):
            assert repr(tunnel) == f"<Scripted {URL} serving>"
            await lose(tunnel)
            assert repr(tunnel) == f"<Scripted {URL} gone>"


class TestCancelled:
    async def test_twice_while_it_connects(self, tunnel: Scripted) -> None:
        before = asyncio.all_tasks()
        tunnel.connect_gate.clear()
        tunnel.undo_gate.clear()
        entering = asyncio.create_task(tunnel.expose(8000).__aenter__())  # type: ignore[arg-type]
        await until(lambda: tunnel.log == ["connecting"])
        entering.cancel()
        await until(lambda: "undoing" in tunnel.log)
        entering.cancel()
        await asyncio.sleep(0)
        tunnel.undo_gate.set()
        with pytest.raises(asyncio.CancelledError):
            await entering
        assert tunnel.log == ["connecting", "undoing", "undone"], "what never connected is not disconnected"
        assert asyncio.all_tasks() == before
        assert tunnel.state.name == "idle"
        tunnel.connect_gate.set()
        async with tunnel.expose(8000) as url:
            assert url == URL

    async def test_twice_while_a_client_without_a_url_is_released(self) -> None:
        before = asyncio.all_tasks()
        tunnel = Scripted(url=None)
        tunnel.disconnect_gate.clear()
        entering = asyncio.create_task(tunnel.expose(8000).__aenter__())  # type: ignore[arg-type]
        await until(lambda: "disconnecting" in tunnel.log)
        for _ in range(2):
            entering.cancel()
            await asyncio.sleep(0)
        tunnel.disconnect_gate.set()
        with pytest.raises(asyncio.CancelledError):
            await entering
        assert tunnel.log == ["connecting", "connected", "disconnecting", "disconnected"]
        assert asyncio.all_tasks() == before

    @pytest.mark.parametrize("times", [1, 2, 10])
    async def test_while_it_closes(self, tunnel: Scripted, times: int) -> None:
        before = asyncio.all_tasks()
        tunnel.disconnect_gate.clear()

        async def leave_at_once() -> None:
            async with tunnel.expose(8000):
                pass

        holder = asyncio.create_task(leave_at_once())
        await until(lambda: "disconnecting" in tunnel.log)
        for _ in range(times):
            holder.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not holder.done()
        tunnel.disconnect_gate.set()
        with pytest.raises(asyncio.CancelledError):
            await holder
        assert tunnel.log == ["connecting", "connected", "disconnecting", "disconnected"]
        assert asyncio.all_tasks() == before

    async def test_in_the_body_and_again_while_it_closes(self, tunnel: Scripted) -> None:
        before = asyncio.all_tasks()
        tunnel.disconnect_gate.clear()

        async def hold() -> None:
            async with tunnel.expose(8000):
                await asyncio.Event().wait()

        holder = asyncio.create_task(hold())
        await until(lambda: tunnel.state.name == "serving")
        holder.cancel()
        await until(lambda: "disconnecting" in tunnel.log)
        holder.cancel()
        await asyncio.sleep(0)
        tunnel.disconnect_gate.set()
        with pytest.raises(asyncio.CancelledError):
            await holder
        assert tunnel.log == ["connecting", "connected", "disconnecting", "disconnected"]
        assert asyncio.all_tasks() == before

    @pytest.mark.parametrize("steps", range(25))
    async def test_twice_wherever_it_stands_what_was_connected_is_disconnected_once(
        self, tunnel: Scripted, steps: int
    ) -> None:
        before = asyncio.all_tasks()

        async def expose() -> None:
            async with tunnel.expose(8000):
                for _ in range(5):
                    await asyncio.sleep(0)

        holder = asyncio.create_task(expose())
        for _ in range(steps):
            await asyncio.sleep(0)
        holder.cancel()
        await asyncio.sleep(0)
        holder.cancel()
        await asyncio.wait([holder])
        ended = holder.cancelled() or holder.exception() is None
        assert ended
        assert tunnel.log.count("disconnected") == tunnel.log.count("connected")
        assert tunnel.log.count("disconnecting") == tunnel.log.count("connected")
        assert tunnel.log.count("undone") == tunnel.log.count("undoing")
        assert asyncio.all_tasks() == before
        assert (tunnel.url, tunnel.state.name) == (None, "idle")

    async def test_the_sweep_above_reaches_from_the_first_step_to_past_the_last(self, tunnel: Scripted) -> None:
        async def expose() -> None:
            async with tunnel.expose(8000):
                for _ in range(5):
                    await asyncio.sleep(0)

        holder = asyncio.create_task(expose())
        for _ in range(24):
            await asyncio.sleep(0)
        assert holder.done()


class TestGone:
    async def test_it_is_said_once_and_the_state_and_the_reason_stay(self, tunnel: Scripted) -> None:
        told: list[TunnelGoneError | None] = []
        events: list[TunnelEvent] = []
        tunnel.on_event = events.append
        async with tunnel.expose(8000):
            tunnel.on_gone = lambda: told.append(tunnel.gone)
            assert tunnel.gone is None
            assert tunnel.state.name == "serving"
            await lose(tunnel)
            assert len(told) == 1
            assert told[0] is tunnel.gone
            assert isinstance(tunnel.gone, TunnelGoneError)
            assert f"{URL} is gone: no such tunnel" in str(tunnel.gone)
            assert tunnel.state.name == "gone"
            for _ in range(20):
                await asyncio.sleep(0)
        assert len(told) == 1
        assert tunnel.state.name == "gone"
        assert tunnel.gone is not None
        assert [event.after.name for event in events if isinstance(event, StateChanged)][-1] == "gone"
        assert len([event for event in events if isinstance(event, Gone)]) == 1

    async def test_a_callback_set_after_the_fact_is_called_at_once(self, tunnel: Scripted) -> None:
        told = []
        async with tunnel.expose(8000):
            await lose(tunnel)
            tunnel.on_gone = lambda: told.append("gone")
            assert told == ["gone"]
            tunnel.on_gone = None
            assert told == ["gone"]

    async def test_setting_the_same_callback_again_does_not_call_it_again(self, tunnel: Scripted) -> None:
        told = []

        def callback() -> None:
            told.append("gone")

        tunnel.on_gone = callback
        async with tunnel.expose(8000):
            await lose(tunnel)
            tunnel.on_gone = callback
        tunnel.on_gone = callback
        assert told == ["gone"]

    async def test_a_callback_that_raises_is_logged(self, tunnel: Scripted, caplog: pytest.LogCaptureFixture) -> None:
        def broken() -> None:
            raise RuntimeError("a defect in the callback")

        tunnel.on_gone = broken
        async with tunnel.expose(8000):
            await lose(tunnel)
            assert tunnel.state.name == "gone"
        [record] = [record for record in caplog.records if "on_gone" in record.getMessage()]
        assert (record.name, record.levelno) == ("tunnel", logging.ERROR)
        assert record.exc_info is not None
        tunnel.on_gone = lambda: broken()  # neither does it raise in the one who sets it
        assert tunnel.log[-1] == "disconnected"

    async def test_exposed_again_it_starts_anew(self, tunnel: Scripted) -> None:
        told = []
        tunnel.on_gone = lambda: told.append("gone")
        async with tunnel.expose(8000):
            await lose(tunnel)
        tunnel.client = Client()
        async with tunnel.expose(8000):
            assert tunnel.gone is None
            assert tunnel.state.name == "serving"
            assert told == ["gone"]
            await lose(tunnel)
            assert told == ["gone", "gone"]

    async def test_exposed_again_and_left_it_is_idle(self, tunnel: Scripted) -> None:
        async with tunnel.expose(8000):
            await lose(tunnel)
        tunnel.client = Client()
        async with tunnel.expose(8000):
            pass
        assert (tunnel.gone, tunnel.state.name) == (None, "idle")

    async def test_it_stays_exposed_until_it_is_left(self, tunnel: Scripted) -> None:
        async with tunnel.expose(8000):
            await lose(tunnel)
            assert "disconnecting" not in tunnel.log
            with pytest.raises(TunnelError, match="exposed already"):
                await tunnel.expose(8000).__aenter__()
        assert tunnel.log[-1] == "disconnected"

    async def test_an_event_callback_that_raises_does_not_keep_it_from_being_said(
        self, tunnel: Scripted, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(event: TunnelEvent) -> None:
            raise RuntimeError("a defect in the callback")

        told = []
        tunnel.on_event, tunnel.on_gone = broken, lambda: told.append("gone")
        async with tunnel.expose(8000):
            await lose(tunnel)
            assert tunnel.state.name == "gone"
        assert told == ["gone"]
        assert any("on_event failed" in record.getMessage() for record in caplog.records)

    async def test_a_keepalive_that_is_not_ours_says_it_too(self) -> None:
        class Foreign(Scripted):
            async def _keep(self, client: TunnelClient, local_url: str) -> None:
                raise TunnelGoneError("the SDK says so")

        tunnel, events, told = Foreign(), list[TunnelEvent](), []
        tunnel.on_event, tunnel.on_gone = events.append, lambda: told.append("gone")
        async with tunnel.expose(8000):
            await until(lambda: tunnel.gone)
            assert (tunnel.state.name, tunnel.state.reason) == ("gone", "the SDK says so")
        assert [type(event) for event in events] == [StateChanged, Gone]
        assert told == ["gone"]


class TestKeepalive:
    async def test_one_that_fails_in_an_unforeseen_way_is_logged_and_started_again(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Flawed(Scripted):
            kept = 0

            async def _keep(self, client: TunnelClient, local_url: str) -> None:
                self.kept += 1
                if self.kept <= 2:
                    raise ZeroDivisionError("a defect")
                await super()._keep(client, local_url)

        tunnel = Flawed()
        async with tunnel.expose(8000):
            await until(lambda: tunnel.kept == 3)
            assert tunnel.state.name == "serving"
            await lose(tunnel)
        logged = [record for record in caplog.records if "started again" in record.getMessage()]
        assert len(logged) == 2
        assert all(record.name == "tunnel" and record.exc_info for record in logged)

    async def test_started_again_it_shows_the_state_as_it_finds_it(self) -> None:
        async with Switch(404) as gateway, Switch() as local:
            tunnel = Scripted(LIVELY.model_copy(update={"confirm_after": 3600.0}), url=gateway.url)
            async with tunnel.expose(local.port):
                await until(lambda: tunnel.state.name == "suspect")

                def flawed() -> bool:
                    tunnel.client.running = lambda: True
                    raise ZeroDivisionError("a defect")

                tunnel.client.running = flawed
                gateway.behaviour = 200
                seen = gateway.hits
                await until(lambda: gateway.hits >= seen + 4)
                assert tunnel.state.name == "serving"

    async def test_a_report_brings_a_probe_forward(self) -> None:
        async with Switch() as gateway, Switch() as local:
            tunnel = Scripted(url=gateway.url)
            tunnel.report("not exposed: this does nothing")
            async with tunnel.expose(local.port):

                def reported() -> bool:
                    tunnel.report("connection reset")
                    return gateway.hits > 0

                await until(reported)
            tunnel.report("no longer exposed: this does nothing")

    async def test_a_url_nobody_uses_is_never_given_up(self) -> None:
        async with Switch() as gateway, Switch() as local:
            tunnel = Scripted(LIVELY.model_copy(update={"confirm_after": 3600.0, "period": 0.02}), url=gateway.url)
            used = False
            tunnel.in_use = lambda: used
            async with tunnel.expose(local.port):
                await until(lambda: gateway.hits)
                gateway.behaviour = 404
                await until(lambda: tunnel.state.name == "suspect")
                loop = asyncio.get_running_loop()
                overdue = loop.time() + 0.5
                await until(lambda: loop.time() > overdue)
                assert tunnel.gone is None
                used = True
                await until(lambda: tunnel.gone)
                assert "not serving for 0.1 s, 0 restarts" in str(tunnel.gone)


class TestArrivals:
    @pytest.fixture
    def arrivals(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        seen: list[str] = []
        monkeypatch.setattr(KeepAlive, "arrived", lambda keepalive, nonce: seen.append("arrived"))
        return seen

    @pytest.mark.parametrize(
        ("headers", "counts"),
        [
            ({"Host": "agents.example:8080"}, True),
            ({"Host": "AGENTS.example:8080"}, True),
            ({"host": "agents.example:8080"}, True),
            ({"Host": "127.0.0.1:8000", "X-Forwarded-Host": "agents.example:8080"}, True),
            ({"Host": "127.0.0.1:8000"}, False),
            ({"Host": "127.0.0.1:8000", "X-Forwarded-Host": "agents.example:8080, inner.example"}, True),
            ({"Host": "agents.example"}, False),
            ({"Host": "agents.example:8080.evil.example"}, False),
            ({"Host": "127.0.0.1:8000", "X-Forwarded-For": "agents.example:8080"}, False),
            ({"Host": "127.0.0.1:8000", "Origin": URL, "Referer": URL}, False),
            ({"Host": ""}, False),
            ({}, False),
        ],
    )
    async def test_only_a_request_for_the_url_itself_counts(
        self, tunnel: Scripted, arrivals: list[str], headers: dict[str, str], counts: bool
    ) -> None:
        async with tunnel.expose(8000):
            await asyncio.sleep(0)
            tunnel.note_arrival(CIMultiDict(headers))
        assert bool(arrivals) == counts

    @pytest.mark.parametrize(
        ("url", "host", "counts"),
        [
            ("https://t-1.example", "t-1.example", True),
            ("https://t-1.example", "t-1.example:443", True),
            ("https://t-1.example:443", "t-1.example", True),
            ("http://t-1.example", "t-1.example:80", True),
            ("http://t-1.example", "t-1.example:443", False),
            ("http://t-1.example:8080", "t-1.example:80", False),
        ],
    )
    async def test_a_default_port_may_be_said_or_left_out(
        self, arrivals: list[str], url: str, host: str, counts: bool
    ) -> None:
        tunnel = Scripted(url=url)
        async with tunnel.expose(8000):
            await asyncio.sleep(0)
            tunnel.note_arrival({"Host": host})
        assert bool(arrivals) == counts

    async def test_a_marked_path_counts_whatever_the_host(self, arrivals: list[str]) -> None:
        tunnel = Scripted(mark="path")
        assert tunnel.path_prefix.startswith("/vf/t/")
        async with tunnel.expose(8000) as url:
            await asyncio.sleep(0)
            assert url == tunnel.url == URL + tunnel.path_prefix
            for path in (
                "/v1/models",
                tunnel.path_prefix + "0/v1/models",
                tunnel.path_prefix,
                "/vf/t/0123456789abcdef/",
            ):
                tunnel.note_arrival({"Host": "inner.example"}, path)
            assert tunnel.counters.arrivals == 0
            tunnel.note_arrival({"Host": "inner.example"}, tunnel.path_prefix + "/v1/models")
        assert arrivals == ["arrived"]
        assert tunnel.counters.arrivals == 1

    async def test_each_tunnel_has_a_mark_of_its_own(self) -> None:
        assert Scripted(mark="path").path_prefix != Scripted(mark="path").path_prefix
        assert Scripted().path_prefix == ""

    async def test_probes_are_counted_apart(self, tunnel: Scripted, arrivals: list[str]) -> None:
        async with tunnel.expose(8000):
            await asyncio.sleep(0)
            for headers in ({}, {"X-VF-Probe": "a nonce"}, {}):
                tunnel.note_arrival(CIMultiDict({"Host": "agents.example:8080"} | headers))
        assert (tunnel.counters.arrivals, len(arrivals)) == (2, 3)

    async def test_while_not_exposed_nothing_counts(self, tunnel: Scripted, arrivals: list[str]) -> None:
        tunnel.note_arrival({"Host": "agents.example:8080"})
        async with tunnel.expose(8000):
            pass
        tunnel.note_arrival({"Host": "agents.example:8080"})
        assert arrivals == []


class TestCustomTunnel:
    @pytest.fixture
    async def gateway(self) -> AsyncIterator[Switch]:
        async with Switch() as gateway:
            yield gateway

    @pytest.fixture
    async def local(self) -> AsyncIterator[Switch]:
        async with Switch() as local:
            yield local

    def test_it_says_where_to_listen(self) -> None:
        tunnel = CustomTunnel(CustomTunnelConfig(url="https://agents.example/", port=9000))
        assert (tunnel.bind_host, tunnel.bind_port) == ("0.0.0.0", 9000)
        tunnel = CustomTunnel(CustomTunnelConfig(url="https://agents.example", port=9000, bind_host="127.0.0.1"))
        assert tunnel.bind_host == "127.0.0.1"

    async def test_it_hands_out_its_url(self) -> None:
        tunnel = CustomTunnel(CustomTunnelConfig(url="https://agents.example/", port=9000))
        async with tunnel.expose(9000) as url:
            assert url == "https://agents.example"
        assert tunnel.state.name == "idle"

    async def test_another_port_than_its_own_is_an_error_that_names_both(self) -> None:
        tunnel = CustomTunnel(CustomTunnelConfig(url="https://agents.example", port=9000))
        with pytest.raises(TunnelError, match=r"9000.*9001"):
            await tunnel.expose(9001).__aenter__()

    async def test_it_is_watched_but_never_restarted_and_never_gone(self, gateway: Switch, local: Switch) -> None:
        tunnel = CustomTunnel(CustomTunnelConfig(url=gateway.url, port=local.port, policy=LIVELY))
        states: list[str] = []

        def noted(event: TunnelEvent) -> None:
            assert isinstance(event, StateChanged)
            states.append(event.after.name)

        tunnel.on_event = noted
        async with tunnel.expose(local.port):
            await until(lambda: gateway.hits >= 2)
            gateway.behaviour = 404
            await until(lambda: tunnel.state.name == "suspect")
            seen = gateway.hits
            await until(lambda: gateway.hits >= seen + 8)
            assert (tunnel.state.name, tunnel.gone, tunnel.restarts) == ("suspect", None, 0)
            assert "404" in tunnel.state.reason
            gateway.behaviour = 200
            await until(lambda: tunnel.state.name == "serving")
        assert states == ["suspect", "serving"]

    async def test_it_shows_that_the_local_service_is_down(self, gateway: Switch, local: Switch) -> None:
        tunnel = CustomTunnel(CustomTunnelConfig(url=gateway.url, port=local.port, policy=LIVELY))
        gateway.behaviour, local.behaviour = 502, 503
        async with tunnel.expose(local.port):
            await until(lambda: tunnel.state.name == "local_down")


class TestMakeTunnel:
    def test_custom(self) -> None:
        assert isinstance(make_tunnel(CustomTunnelConfig(url="https://agents.example", port=1)), CustomTunnel)

    def test_prime(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("PRIME_API_KEY", "pk-test")
        config = PrimeTunnelConfig(name="mine")
        tunnel = make_tunnel(config)
        assert isinstance(tunnel, PrimeTunnel)
        assert tunnel.config is config
        assert (tunnel.bind_host, tunnel.bind_port, tunnel.state.name) == ("127.0.0.1", 0, "idle")
        assert "pk-test" not in repr(tunnel)

    def test_prime_without_credentials_is_an_error_at_once(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        for name in ("PRIME_API_KEY", "PRIME_CONTEXT"):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(TunnelLimitError, match="PRIME_API_KEY"):
            make_tunnel(PrimeTunnelConfig())


CONFIG: TypeAdapter[Any] = TypeAdapter(TunnelConfig)


class TestConfigs:
    @pytest.mark.parametrize(
        ("data", "kind"),
        [
            ({"type": "prime"}, PrimeTunnelConfig),
            ({"type": "custom", "url": "https://agents.example", "port": 9000}, CustomTunnelConfig),
            ({"type": "ssh", "host": "relay.example"}, SshTunnelConfig),
            ({"type": "command", "command": ["x"], "url": "https://agents.example"}, CommandTunnelConfig),
        ],
    )
    def test_they_are_told_apart_by_their_type_and_survive_json(self, data: dict[str, Any], kind: type) -> None:
        config = CONFIG.validate_python(data)
        assert type(config) is kind
        assert CONFIG.validate_json(config.model_dump_json()) == config

    @pytest.mark.parametrize("data", [{}, {"type": "frp"}, {"type": "prime", "nmae": "typo"}])
    def test_an_unknown_type_or_field_is_an_error(self, data: dict[str, Any]) -> None:
        with pytest.raises(ValidationError):
            CONFIG.validate_python(data)

    def test_they_are_frozen(self) -> None:
        with pytest.raises(ValidationError):
            PrimeTunnelConfig().name = "other"

    @pytest.mark.parametrize("url", ["https://a.example", "http://10.0.0.1:8080", "http://[::1]:80", "https://a.b/c"])
    def test_a_url_that_agents_can_call_is_taken_without_its_slash(self, url: str) -> None:
        assert CustomTunnelConfig(url=url + "/", port=1).url == url

    @pytest.mark.parametrize(
        "url",
        [
            "",
            "agents.example",
            "agents.example:8080",
            "ftp://agents.example",
            "http://",
            "http:///path",
            "http://[::1",
            "http://:8080",
            "http://agents.example:port",
            "http://agents.example:99999",
            "http://agents example",
            "http://agents.example/?key=1",
            "http://agents.example/#top",
        ],
    )
    def test_any_other_url_is_a_clear_error(self, url: str) -> None:
        with pytest.raises(ValidationError, match="url"):
            CustomTunnelConfig(url=url, port=1)

    @pytest.mark.parametrize("port", [0, -1, 65536, "x"])
    def test_a_custom_tunnel_needs_a_port(self, port: Any) -> None:
        with pytest.raises(ValidationError, match="port"):
            CustomTunnelConfig(url="https://agents.example", port=port)

    @pytest.mark.parametrize(
        "url", ["https://{host}", "https://agents.example", "http://{host}:{port}/", "https://p{port}.x"]
    )
    def test_an_ssh_template_may_use_the_host_and_the_port(self, url: str) -> None:
        assert SshTunnelConfig(host="relay.example", url=url).url == url.rstrip("/")

    @pytest.mark.parametrize(
        "url",
        [
            "http://{name}:{port}",
            "http://{}:{port}",
            "http://{0}",
            "{host}:{port}",
            "ftp://{host}",
            "http://{host",
            "http://{host!z}",
            "http://{port.x}",
            "http://{host[a]}",
        ],
    )
    def test_any_other_ssh_template_is_a_clear_error(self, url: str) -> None:
        with pytest.raises(ValidationError, match="template"):
            SshTunnelConfig(host="relay.example", url=url)

    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            ({"command": ()}, "command"),
            ({"command": ("x",)}, "either url"),
            ({"command": ("x",), "url": "https://a.example", "url_pattern": "x"}, "either url"),
            ({"command": ("x",), "url": "a.example"}, "not a URL"),
            ({"command": ("x",), "url_pattern": "("}, "not a regular expression"),
            ({"command": ("x",), "url": "https://a.example", "ready_pattern": "["}, "not a regular expression"),
            ({"command": ("x",), "url": "https://a.example", "gone_pattern": "*"}, "not a regular expression"),
        ],
    )
    def test_a_command_that_cannot_work_is_a_clear_error(self, fields: dict[str, Any], text: str) -> None:
        with pytest.raises(ValidationError, match=text):
            CommandTunnelConfig(**fields)

    def test_the_environment_of_a_command_is_kept_out_of_its_repr(self) -> None:
        config = CommandTunnelConfig(command=("x",), url="https://a.example", env={"NGROK_AUTHTOKEN": "t0ken"})
        assert "t0ken" not in repr(config)
        assert "t0ken" not in str(config)

    def test_an_elastic_pool_cannot_mint_a_custom_tunnel(self) -> None:
        custom = CustomTunnelConfig(url="https://agents.example", port=9000)
        with pytest.raises(ValidationError, match="static pool"):
            ElasticInterceptionPoolConfig(tunnel=custom)
        static = StaticInterceptionPoolConfig(servers=[InterceptionServerConfig(tunnel=custom)])
        assert static.servers[0].tunnel is custom
        with pytest.raises(ValidationError):
            StaticInterceptionPoolConfig(servers=[])


class TestPolicy:
    def test_scaled_multiplies_every_time_and_nothing_else(self) -> None:
        policy = KeepAlivePolicy()
        scaled = policy.scaled(0.01)
        for name, value in policy:
            if name in ("rule", "jitter", "odd_silence") or isinstance(value, int):
                assert getattr(scaled, name) == value
            elif isinstance(value, Repeats):
                assert getattr(scaled, name) == (value.times, pytest.approx(value.span * 0.01)), name
            elif isinstance(value, tuple):
                assert getattr(scaled, name) == pytest.approx([part * 0.01 for part in value]), name
            else:
                assert getattr(scaled, name) == pytest.approx(value * 0.01), name
        assert policy == KeepAlivePolicy()

    def test_scaled_leaves_never_as_it_is(self) -> None:
        assert KeepAlivePolicy(give_up_after=None).scaled(0.01).give_up_after is None

    def test_whole_numbers_are_scaled_too(self) -> None:
        assert KeepAlivePolicy(period=30).scaled(0.1).period == pytest.approx(3)

    @pytest.mark.parametrize(
        "fields",
        [
            {"rule": "other"},
            {"period": 0},
            {"jitter": 1},
            {"jitter": -0.1},
            {"confirm_after": -1},
            {"probe_timeout": 0},
            {"give_up_after": 0},
            {"perid": 1},
        ],
        ids=str,
    )
    def test_a_figure_that_makes_no_sense_is_an_error(self, fields: dict[str, Any]) -> None:
        with pytest.raises(ValidationError):
            KeepAlivePolicy(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "command", "command": ["frpc"], "env": {"TOKEN": "sekrit"}},
        {"type": "command", "command": "frpc --token sekrit", "url_pattern": "x"},
        {"type": "custom", "url": "http://user:sekrit@agents.example", "port": 80},
    ],
    ids=["env", "command", "url"],
)
def test_a_config_that_is_refused_does_not_quote_its_tokens(fields: dict[str, Any]) -> None:
    kinds: dict[str, type[BaseModel]] = {"command": CommandTunnelConfig, "custom": CustomTunnelConfig}
    for model, given in ((kinds[fields["type"]], fields), (InterceptionServerConfig, {"tunnel": fields})):
        with pytest.raises(ValidationError) as refusal:
            model.model_validate(given)
        assert "sekrit" not in str(refusal.value)


def test_what_is_no_config_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="dict"):
        make_tunnel({"type": "prime"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tunnel",
    [
        SshTunnelConfig(host="relay.example", remote_port=8080),
        CommandTunnelConfig(command=("frpc",), url="https://agents.example"),
    ],
    ids=["fixed port", "fixed url"],
)
def test_a_tunnel_that_cannot_be_made_twice_is_nothing_for_an_elastic_pool(tunnel: Any) -> None:
    with pytest.raises(ValidationError, match="cannot be made twice"):
        ElasticInterceptionPoolConfig(tunnel=tunnel)
