"""Prime's tunnels, with the real SDK over a stand-in for the service: they keep serving, and leave nothing behind."""

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import prime_tunnel
import pytest

from tests.helpers import Switch, until
from tests.prime import FakePrime
from tests.prime.owner import records, sidecars
from tunnel import (
    HEALTH_PATH,
    Gone,
    KeepAlivePolicy,
    PrimeTunnel,
    PrimeTunnelConfig,
    RestartFailed,
    TunnelError,
    TunnelEvent,
    TunnelLimitError,
    TunnelLogHandler,
    make_tunnel,
)

POLICY = KeepAlivePolicy(
    rule="plain",
    period=0.1,
    confirm_after=0.1,
    probe_timeout=5.0,
    exit_poll=0.01,
    restart_timeout=20.0,
    restart_backoff=0.01,
    restart_backoff_max=0.1,
    give_up_after=None,
)
QUOTA = "maximum number of tunnels reached"


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePrime]:
    with FakePrime(tmp_path, scale=0.1) as service:
        for name, value in service.env().items():
            monkeypatch.setenv(name, value)
        yield service


@pytest.fixture(autouse=True)
async def _nothing_is_left(service: FakePrime) -> AsyncIterator[None]:
    """Whatever a test does to a tunnel: no registration, process, config file or task of it outlives the test."""
    mine = asyncio.all_tasks()
    yield
    assert service.live() == []
    assert len(service.deletes) == len(set(service.deletes)), "a registration was deleted twice"
    assert service.frpc_pids() == []
    assert service.config_files() == []
    await until(lambda: asyncio.all_tasks() - mine <= {asyncio.current_task()})
    assert sidecars(os.getpid()) == []


@pytest.fixture
async def local() -> AsyncIterator[Switch]:
    """The service behind the tunnel."""
    async with Switch() as local:
        yield local


class Watched(PrimeTunnel):
    """A tunnel whose events are kept."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(PrimeTunnelConfig(**{"policy": POLICY} | settings))
        self.events: list[TunnelEvent] = []
        self.on_event = self.events.append

    def count(self, kind: type[TunnelEvent]) -> int:
        return sum(isinstance(event, kind) for event in self.events)


async def get(url: str, path: str = HEALTH_PATH) -> int:
    async with aiohttp.ClientSession() as session, session.get(url + path) as response:
        return response.status


async def probed(service: FakePrime, times: int = 3) -> None:
    """Wait for so many more probes of the newest tunnel to have ended."""
    tunnel_id = service.created[-1]
    # One may be under way, and it takes the beginning of the next to know that the last has ended.
    wanted = service.requests(tunnel_id, HEALTH_PATH) + times + 2
    await until(lambda: service.requests(tunnel_id, HEALTH_PATH) >= wanted)


async def cancel(task: asyncio.Task[Any], times: int) -> None:
    """Cancel a task so often, with a few turns of the loop in between; the cancellation must come out of it."""
    for _ in range(times):
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task


def replace_frpc(service: FakePrime, program: str = "import time; time.sleep(600)") -> None:
    """From its next start on, frpc is a program that says nothing."""
    (service.home / ".prime" / "bin" / "frpc").write_text(f"#!{sys.executable} -IS\n{program}\n")


def kill_frpc(service: FakePrime) -> int:
    (pid,) = service.frpc_pids()
    os.kill(pid, signal.SIGKILL)
    return pid


class TestServing:
    async def test_the_port_is_reached_through_the_url_while_it_is_exposed(
        self, service: FakePrime, local: Switch
    ) -> None:
        tunnel = Watched(name="mine", labels=("run-7",))

        async with tunnel.expose(local.port) as url:
            assert url == service.urls[service.created[0]] == tunnel.url
            assert await get(url, "/some/path") == 200
            assert tunnel.state.name == "serving"

        assert local.paths[-1] == "/some/path"
        assert service.created == service.deletes
        assert await get(url) == 404

    async def test_one_tunnel_can_be_exposed_again_and_gets_a_new_registration(
        self, service: FakePrime, local: Switch
    ) -> None:
        tunnel = Watched()
        for _ in range(2):
            async with tunnel.expose(local.port) as url:
                assert await get(url) == 200
        assert service.deletes == service.created
        assert len(service.created) == 2

    async def test_a_client_that_died_is_restarted_at_once_under_the_same_url(
        self, service: FakePrime, local: Switch
    ) -> None:
        tunnel = Watched(policy=POLICY.model_copy(update={"period": 3600.0, "confirm_after": 3600.0}))
        async with tunnel.expose(local.port) as url:
            kill_frpc(service)
            await until(lambda: tunnel.restarts == 1 and tunnel.state.name == "serving")
            assert tunnel.url == url
            assert await get(url) == 200
        assert service.api_calls("POST") == 1

    async def test_a_lost_route_is_mended_by_one_restart_under_the_same_url(
        self, service: FakePrime, local: Switch
    ) -> None:
        tunnel = Watched()
        async with tunnel.expose(local.port) as url:
            service.lose_route(service.created[0])
            await until(lambda: tunnel.restarts == 1 and tunnel.state.name == "serving")
            assert await get(url) == 200
            await probed(service)
            assert (tunnel.restarts, tunnel.url) == (1, url)
        assert service.api_calls("POST") == 1

    async def test_nothing_is_restarted_while_the_local_service_is_down(
        self, service: FakePrime, local: Switch
    ) -> None:
        tunnel = Watched()
        async with tunnel.expose(local.port):
            local.behaviour = 503
            await until(lambda: tunnel.state.name == "local_down")
            await probed(service)
            assert (tunnel.state.name, tunnel.restarts) == ("local_down", 0)

            local.behaviour = 200
            await until(lambda: tunnel.state.name == "serving")
        assert service.logins(service.created[0]) == 1

    async def test_an_api_that_is_down_says_nothing_about_a_url_that_serves(
        self, service: FakePrime, local: Switch
    ) -> None:
        tunnel = Watched()
        async with tunnel.expose(local.port) as url:
            service.api_down()
            await probed(service)
            assert await get(url) == 200
            assert (tunnel.state.name, tunnel.restarts, tunnel.gone) == ("serving", 0, None)
            service.api_up()

    async def test_a_lost_route_is_mended_though_the_api_is_down(self, service: FakePrime, local: Switch) -> None:
        tunnel = Watched()
        async with tunnel.expose(local.port) as url:
            service.api_down()
            service.lose_route(service.created[0])
            await until(lambda: tunnel.restarts >= 1 and tunnel.state.name == "serving")
            assert await get(url) == 200
            assert tunnel.gone is None
            service.api_up()

    async def test_an_old_session_that_is_still_held_only_delays_a_restart(
        self, service: FakePrime, local: Switch
    ) -> None:
        tunnel = Watched()
        async with tunnel.expose(local.port) as url:
            service.hold_old_session(service.created[0], 2.0)
            kill_frpc(service)
            await until(lambda: tunnel.restarts == 1 and tunnel.state.name == "serving")
            assert await get(url) == 200
            refusals = [event.error for event in tunnel.events if isinstance(event, RestartFailed)]
            assert refusals
            assert all("already exists" in error for error in refusals)
            assert (tunnel.gone, tunnel.count(Gone)) == (None, 0)

    @pytest.mark.parametrize("end", ["expire_softly", "terminate_softly"])
    async def test_a_registration_that_ended_is_used_as_long_as_it_serves_and_gone_after_that(
        self, service: FakePrime, local: Switch, end: str
    ) -> None:
        tunnel = Watched()
        said: list[str] = []
        tunnel.on_gone = lambda: said.append(str(tunnel.gone))
        async with tunnel.expose(local.port) as url:
            getattr(service, end)(service.created[0])
            await probed(service)
            assert await get(url) == 200
            assert (tunnel.state.name, tunnel.restarts, said) == ("serving", 0, [])

            service.lose_route(service.created[0])
            await until(lambda: tunnel.gone is not None)
            assert tunnel.state.name == "gone"
            assert (len(said), tunnel.count(Gone)) == (1, 1)
            assert "inactive" in said[0] or "not registered" in said[0]

    async def test_a_record_the_api_has_forgotten_is_left_alone_while_the_url_serves(
        self, service: FakePrime, local: Switch
    ) -> None:
        tunnel = Watched()
        async with tunnel.expose(local.port) as url:
            service.forget(service.created[0])
            await probed(service)
            assert await get(url) == 200
            assert (tunnel.state.name, tunnel.restarts, tunnel.gone) == ("serving", 0, None)

    @pytest.mark.parametrize(("health_path", "asked"), [(HEALTH_PATH, HEALTH_PATH), (None, "/mcp")])
    async def test_the_sdks_own_keepalive_is_used_on_demand_and_started_again_should_it_fail(
        self,
        health_path: str | None,
        asked: str,
        service: FakePrime,
        local: Switch,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        calls: list[str] = []

        class NextSdk(prime_tunnel.Tunnel):  # type: ignore[misc] # the SDK has no types
            async def keep_serving(self, path: str) -> None:
                calls.append(path)
                if len(calls) == 1:
                    raise prime_tunnel.TunnelTimeoutError("the API is slow today")
                await asyncio.Event().wait()

        monkeypatch.setattr(prime_tunnel, "Tunnel", NextSdk)
        tunnel = Watched(keepalive="sdk")
        tunnel.health_path, tunnel.any_path = health_path, "/mcp"
        async with tunnel.expose(local.port) as url:
            await until(lambda: len(calls) == 2)
            assert await get(url) == 200
        assert calls == [asked] * 2
        assert "the API is slow today" in caplog.text


class TestEvidence:
    """What its client offers the keepalive beyond the probes."""

    async def test_its_last_lines_are_frpcs_also_when_it_is_dead(self, service: FakePrime, local: Switch) -> None:
        tunnel = Watched(policy=POLICY.model_copy(update={"exit_poll": 3600.0, "period": 3600.0}))
        async with tunnel.expose(local.port):
            client = tunnel._client
            assert client is not None
            assert any("login to server success" in line for line in await client.log_lines())
            kill_frpc(service)
            assert any("login to server success" in line for line in await client.log_lines())

    async def test_the_record_is_the_services_word_or_none(self, service: FakePrime, local: Switch) -> None:
        tunnel = Watched()
        async with tunnel.expose(local.port):
            client, tunnel_id = tunnel._client, service.created[0]
            assert client is not None
            assert await client.record_status() == "connected"
            service.terminate_softly(tunnel_id)
            assert await client.record_status() == "terminated"
            service.forget(tunnel_id)
            assert await client.record_status() is None
            service.remember(tunnel_id)
            record = service.api_status["GET"] = (
                200,
                {"tunnel_id": tunnel_id, "hostname": "h", "url": "http://h", "expires_at": "2030-01-01"},
                {},
            )
            assert "status" not in record[1]
            assert await client.record_status() == ""
            service.api_status["GET"] = (503, {"detail": "no upstream"}, {})
            with pytest.raises(prime_tunnel.TunnelError):
                await client.record_status()
            service.api_status.clear()

    async def test_of_an_address_nothing_tells_whether_the_gateway_is_well(
        self, service: FakePrime, local: Switch
    ) -> None:
        tunnel = Watched()
        async with tunnel.expose(local.port):
            assert tunnel._client is not None
            assert await tunnel._client.reference_ok(5.0) is None

    @pytest.mark.parametrize("url", ["https://t-1.tunnels.example/x", "http://t-1.tunnels.example:8080"])
    async def test_the_reference_is_another_name_beside_ours(
        self, service: FakePrime, local: Switch, monkeypatch: pytest.MonkeyPatch, url: str
    ) -> None:
        asked: list[str] = []

        async def answers(url: str, *, timeout: float) -> bool:
            asked.append(url)
            return True

        monkeypatch.setattr("tunnel.prime.answers_http", answers)
        tunnel = Watched()
        async with tunnel.expose(local.port):
            assert tunnel._client is not None
            monkeypatch.setattr(type(tunnel._client), "url", url)
            assert [await tunnel._client.reference_ok(5.0) for _ in range(2)] == [True, True]
            monkeypatch.undo()
        assert asked[0] != asked[1]
        scheme, port = (url[: url.index(":")], ":8080" if "8080" in url else "")
        for one in asked:
            assert re.fullmatch(rf"{scheme}://[0-9a-f]{{16}}\.tunnels\.example{port}/", one)


class TestRefusals:
    @pytest.mark.parametrize(
        ("status", "detail", "reason"),
        [(400, QUOTA, QUOTA), (401, "", "PRIME_API_KEY"), (402, "", "billing")],
    )
    async def test_a_limit_is_said_at_once_and_never_tried_again(
        self, service: FakePrime, status: int, detail: str, reason: str
    ) -> None:
        service.refuse_creates(status, detail)
        with pytest.raises(TunnelLimitError, match=reason):
            await Watched().expose(1).__aenter__()
        assert service.api_calls("POST") == 1

    @pytest.mark.parametrize(
        ("status", "reason"),
        [(429, "too many requests"), (503, "no upstream"), (422, "bad port"), (404, "empty response")],
    )
    async def test_another_refusal_is_an_error_that_names_the_cause_after_three_tries(
        self, service: FakePrime, status: int, reason: str
    ) -> None:
        service.refuse_creates(status, reason)
        with pytest.raises(TunnelError, match=reason) as caught:
            await Watched().expose(1).__aenter__()
        assert not isinstance(caught.value, TunnelLimitError)
        assert service.api_calls("POST") == caught.value.tries == 3

    @pytest.mark.parametrize("fault", [422, 429, "down"])
    async def test_of_a_create_that_surely_made_nothing_nothing_is_looked_for_or_left_on_record(
        self, service: FakePrime, fault: int | str, caplog: pytest.LogCaptureFixture
    ) -> None:
        if isinstance(fault, int):
            service.refuse_creates(fault, "no")
        else:
            service.api_down()
        with pytest.raises(TunnelError):
            await Watched().expose(1).__aenter__()
        assert (records(service), service.api_calls("GET")) == ([], 0)
        assert "left behind" not in caplog.text

    async def test_while_the_api_is_away_each_try_looks_once_and_one_line_says_that_something_may_be_left(
        self, service: FakePrime, caplog: pytest.LogCaptureFixture
    ) -> None:
        service.refuse_creates(503, "no upstream")
        service.api_status["GET"] = (503, {"detail": "no upstream"}, {})
        for _ in range(2):
            with pytest.raises(TunnelError, match="no upstream"):
                await Watched().expose(1).__aenter__()
        assert (service.api_calls("POST"), len(records(service))) == (6, 2)
        assert service.api_calls("GET") <= 6 + 3, "those of the first, once more"
        assert caplog.text.count("may be left behind") == 1

    @pytest.mark.parametrize("then", [None, (422, "bad port"), (400, QUOTA)])
    async def test_what_a_try_may_have_left_is_on_one_record_and_goes_with_what_the_last_one_leaves(
        self, service: FakePrime, local: Switch, then: tuple[int, str] | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        service.api_drop.add("POST")  # they are made all the same
        service.api_status["GET"] = (503, {"detail": "no upstream"}, {})

        def between_tries(low: float, high: float) -> float:
            assert len(records(service)) == len(service.api_drop)
            service.api_drop.clear()
            service.api_status.pop("GET", None)
            if then is not None:
                service.refuse_creates(*then)
            return 0.0

        monkeypatch.setattr("tunnel.prime.random", SimpleNamespace(uniform=between_tries))
        with contextlib.nullcontext() if then is None else pytest.raises(TunnelError, match=then[1]):
            async with Watched().expose(local.port) as url:
                assert await get(url) == 200
                assert len(records(service)) == 1
        assert len(service.created) >= 3
        assert sorted(service.deletes) == sorted(service.created)
        assert records(service) == []

    @pytest.mark.parametrize("moment", ["as it looks for what it left", "between two tries"])
    async def test_a_start_that_is_cancelled_lets_its_record_go(
        self, service: FakePrime, caplog: pytest.LogCaptureFixture, moment: str
    ) -> None:
        service.refuse_creates(503, "no upstream")
        service.api_status["GET"] = (503, {"detail": "no upstream"}, {})
        if moment != "between two tries":
            service.api_delay["GET"] = 0.3
        policy = POLICY.model_copy(update={"restart_backoff": 600.0})
        starting = asyncio.ensure_future(Watched(policy=policy).expose(1).__aenter__())
        await until(lambda: "trying again" in caplog.text or (service.api_delay and service.api_calls("GET")))
        (path,) = records(service)
        assert json.loads(path.read_text())["owner"]["pid"] == os.getpid()
        await cancel(starting, 2)
        assert json.loads(path.read_text())["owner"] is None

    async def test_a_refusal_that_passes_is_no_error(
        self, service: FakePrime, local: Switch, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        service.refuse_creates(503, "no upstream")

        def between_tries(low: float, high: float) -> float:
            if service.api_calls("POST") == 2:
                del service.api_status["POST"]
            return 0.0

        monkeypatch.setattr("tunnel.prime.random", SimpleNamespace(uniform=between_tries))
        async with Watched().expose(local.port) as url:
            assert await get(url) == 200
        assert service.api_calls("POST") == 3
        assert caplog.text.count("no upstream") == 2

    async def test_missing_credentials_are_said_when_the_tunnel_is_made_and_before_anything_is_asked(
        self, service: FakePrime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("PRIME_API_KEY")
        monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
        with pytest.raises(TunnelError, match=r"PRIME_API_KEY.*`prime login`"):
            make_tunnel(PrimeTunnelConfig())
        assert not any(map(service.api_calls, ("GET", "POST", "DELETE")))
        assert not (tmp_path / "nobody").exists()

    @pytest.mark.parametrize("context", ["nosuch", "../escape"])
    def test_a_profile_that_is_not_there_is_said_when_the_tunnel_is_made(
        self, context: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PRIME_CONTEXT", context)
        with pytest.raises(TunnelError, match=f"profile.*{re.escape(context)}"):
            make_tunnel(PrimeTunnelConfig())

    def test_where_there_is_no_home_that_is_said_when_the_tunnel_is_made(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def nobody(uid: int) -> None:
            raise KeyError(uid)

        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", nobody)
        with pytest.raises(TunnelError, match="profile cannot be read"):
            make_tunnel(PrimeTunnelConfig())

    def test_the_sdks_own_keepalive_is_refused_plainly_where_the_sdk_has_none(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delattr(prime_tunnel.Tunnel, "keep_serving", raising=False)
        with pytest.raises(TunnelError, match=rf"{re.escape(prime_tunnel.__version__)} has no keep_serving"):
            make_tunnel(PrimeTunnelConfig(keepalive="sdk"))

    async def test_a_client_that_cannot_be_installed_is_said(
        self, service: FakePrime, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail() -> Path:
            raise prime_tunnel.BinaryDownloadError("no route to github")

        monkeypatch.setattr("tunnel.prime.get_frpc_path", fail)
        with pytest.raises(TunnelError, match=r"frpc cannot be installed: no route to github"):
            await Watched().expose(1).__aenter__()
        assert service.created == []

    async def test_a_client_that_never_connects_is_an_error_after_three_tries(self, service: FakePrime) -> None:
        replace_frpc(service)
        with pytest.raises(TunnelError, match="timed out"):
            await Watched(connection_timeout=0.1).expose(1).__aenter__()
        assert len(service.created) == 3


class TestLostAnswers:
    async def test_registrations_whose_answers_were_lost_are_deleted(self, service: FakePrime) -> None:
        service.api_drop.add("POST")
        with pytest.raises(TunnelError, match="no Prime tunnel"):
            await Watched().expose(1).__aenter__()
        assert len(service.created) > 3  # the SDK repeats each create
        assert sorted(service.deletes) == sorted(service.created)

    async def test_one_whose_answer_was_lost_is_deleted_with_the_tunnel_that_came_of_the_second_try(
        self, service: FakePrime, local: Switch
    ) -> None:
        service.api_drop.add("POST")
        service.after_delay["POST"] = 0.4

        async def serve() -> None:
            async with Watched().expose(local.port) as url:
                assert await get(url) == 200
                assert len(service.live()) == 2

        serving = asyncio.create_task(serve())
        await until(lambda: len(service.created) >= 2)  # dropped once, and the second is on its way
        service.api_drop.clear()
        await serving
        assert sorted(service.deletes) == sorted(service.created)

    async def test_one_whose_answer_was_lost_is_deleted_though_the_second_try_meets_the_quota(
        self, service: FakePrime
    ) -> None:
        service.api_drop.add("POST")
        service.after_delay["POST"] = 0.2
        starting = asyncio.ensure_future(Watched().expose(1).__aenter__())
        await until(lambda: len(service.created) >= 1)
        service.refuse_creates(400, QUOTA)
        with pytest.raises(TunnelLimitError):
            await starting
        assert service.deletes == service.created


@pytest.mark.parametrize("times", [1, 2])
class TestCancellation:
    async def test_of_a_start_whose_create_is_under_way(self, service: FakePrime, times: int) -> None:
        service.after_delay["POST"] = 0.3
        starting = asyncio.ensure_future(Watched().expose(1).__aenter__())
        await until(lambda: len(service.created) >= 1)
        await cancel(starting, times)
        assert service.deletes == service.created

    async def test_of_a_start_whose_create_has_not_been_processed_yet(self, service: FakePrime, times: int) -> None:
        service.api_delay["POST"] = 0.3
        starting = asyncio.ensure_future(Watched().expose(1).__aenter__())
        await until(lambda: service.api_calls("POST") >= 1)
        await cancel(starting, times)
        assert service.deletes == service.created
        assert len(service.created) == 1

    async def test_of_a_start_whose_create_answers_are_lost(self, service: FakePrime, times: int) -> None:
        service.api_drop.add("POST")
        service.after_delay["POST"] = 0.1
        starting = asyncio.ensure_future(Watched().expose(1).__aenter__())
        await until(lambda: len(service.created) >= 1)
        await cancel(starting, times)
        assert sorted(service.deletes) == sorted(service.created)

    @pytest.mark.parametrize("stubborn", [False, True])
    async def test_of_a_start_whose_client_is_connecting(self, service: FakePrime, times: int, stubborn: bool) -> None:
        ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if stubborn else ""
        replace_frpc(service, ignore + "import time; time.sleep(600)")
        starting = asyncio.ensure_future(Watched().expose(1).__aenter__())
        await until(service.frpc_pids)
        await cancel(starting, times)
        assert service.deletes == service.created

    @pytest.mark.parametrize("steps", range(4))
    async def test_of_a_start_at_its_first_steps(self, service: FakePrime, times: int, steps: int) -> None:
        starting = asyncio.ensure_future(Watched().expose(1).__aenter__())
        for _ in range(steps):
            await asyncio.sleep(0)
        await cancel(starting, times)

    async def test_of_a_start_that_is_cleaning_up_after_a_client_that_did_not_connect(
        self, service: FakePrime, times: int
    ) -> None:
        replace_frpc(service)
        service.api_delay["DELETE"] = 0.3
        starting = asyncio.ensure_future(Watched(connection_timeout=0.1).expose(1).__aenter__())
        await until(lambda: service.api_calls("DELETE") >= 1)
        await cancel(starting, times)
        assert service.deletes == service.created

    async def test_of_a_start_that_is_cleaning_up_with_an_api_that_hangs(
        self, service: FakePrime, times: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        replace_frpc(service)
        service.api_delay["DELETE"] = 600.0
        starting = asyncio.ensure_future(Watched(connection_timeout=0.1, stop_timeout=0.3).expose(1).__aenter__())
        await until(lambda: service.api_calls("DELETE") >= 1)
        await cancel(starting, times)
        (tunnel_id,) = service.created
        assert re.search(rf"labelled interception-\w+ may be left behind \({tunnel_id}\)", caplog.text)
        assert service.config_files() == []
        service.expire(tunnel_id)

    async def test_of_a_start_that_looks_for_registrations_after_a_refused_create(
        self, service: FakePrime, times: int
    ) -> None:
        service.refuse_creates(503, "no upstream")
        service.api_delay["GET"] = 0.4
        starting = asyncio.ensure_future(Watched().expose(1).__aenter__())
        await until(lambda: service.api_calls("GET") >= 1)
        await cancel(starting, times)
        assert service.api_calls("POST") == 1

    async def test_of_a_start_that_waits_for_its_next_try(
        self, service: FakePrime, times: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        service.refuse_creates(503, "no upstream")
        starting = asyncio.ensure_future(
            Watched(policy=POLICY.model_copy(update={"restart_backoff": 600.0})).expose(1).__aenter__()
        )
        await until(lambda: "trying again" in caplog.text)
        await cancel(starting, times)
        assert service.api_calls("POST") == 1

    async def test_of_a_start_whose_client_is_being_installed(
        self, service: FakePrime, times: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun, end = threading.Event(), threading.Event()

        def install() -> Path:
            begun.set()
            end.wait()
            return Path()

        monkeypatch.setattr("tunnel.prime.get_frpc_path", install)
        starting = asyncio.ensure_future(Watched().expose(1).__aenter__())
        await until(begun.is_set)
        await cancel(starting, times)
        end.set()
        assert service.created == []

    async def test_of_a_close(self, service: FakePrime, local: Switch, times: int) -> None:
        service.api_delay["DELETE"] = 0.3
        exposure = Watched().expose(local.port)
        await exposure.__aenter__()
        closing = asyncio.ensure_future(exposure.__aexit__(None, None, None))
        await until(lambda: service.api_calls("DELETE") >= 1)
        await cancel(closing, times)
        assert service.deletes == service.created

    async def test_of_a_close_at_its_first_step(self, service: FakePrime, local: Switch, times: int) -> None:
        exposure = Watched().expose(local.port)
        await exposure.__aenter__()
        closing = asyncio.ensure_future(exposure.__aexit__(None, None, None))
        await asyncio.sleep(0)
        await cancel(closing, times)
        assert service.deletes == service.created

    async def test_of_a_close_while_a_restart_is_under_way(self, service: FakePrime, local: Switch, times: int) -> None:
        tunnel = Watched()
        exposure = tunnel.expose(local.port)
        await exposure.__aenter__()
        replace_frpc(service)
        old = kill_frpc(service)
        await until(lambda: tunnel.state.name == "restarting" and set(service.frpc_pids()) - {old})
        closing = asyncio.ensure_future(exposure.__aexit__(None, None, None))
        await asyncio.sleep(0)
        await cancel(closing, times)
        assert service.deletes == service.created


class TestStopping:
    @pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 13])
    async def test_a_restart_that_has_just_begun_leaves_nothing(
        self, service: FakePrime, local: Switch, steps: int
    ) -> None:
        tunnel = Watched()
        async with tunnel.expose(local.port):
            kill_frpc(service)
            await until(lambda: tunnel.state.name == "restarting")
            for _ in range(steps):
                await asyncio.sleep(0)
        assert service.deletes == service.created

    async def test_a_restart_that_does_not_come_to_its_end_leaves_nothing(
        self, service: FakePrime, local: Switch
    ) -> None:
        tunnel = Watched()
        async with tunnel.expose(local.port):
            replace_frpc(service)
            old = kill_frpc(service)
            await until(lambda: tunnel.state.name == "restarting" and set(service.frpc_pids()) - {old})
        assert service.deletes == service.created

    async def test_the_old_client_ends_though_its_restart_is_cancelled_before_a_thread_is_free_to_end_it(
        self, service: FakePrime, local: Switch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tunnel = Watched()
        async with tunnel.expose(local.port):
            (old,) = service.frpc_pids()
            in_a_thread, busy = asyncio.to_thread, asyncio.Event()

            async def no_thread_is_free(work: Any, *args: Any, **kwargs: Any) -> Any:
                if work is prime_tunnel.Tunnel._end_process and not busy.is_set():
                    busy.set()
                    await asyncio.Event().wait()
                return await in_a_thread(work, *args, **kwargs)

            monkeypatch.setattr(asyncio, "to_thread", no_thread_is_free)
            service.lose_route(service.created[0])
            await until(busy.is_set)
            assert service.frpc_pids() == [old]
        await until(lambda: service.frpc_pids() == [])

    async def test_a_client_that_ignores_sigterm_is_ended_and_the_loop_goes_on_meanwhile(
        self, service: FakePrime, local: Switch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FRPC_FAKE", service.env(ignore_term=True)["FRPC_FAKE"])
        exposure = Watched().expose(local.port)
        await exposure.__aenter__()
        gap = await worst_gap(exposure.__aexit__(None, None, None))
        assert gap < 2  # the SDK itself would wait for 5 s, on the loop
        assert service.deletes == service.created

    async def test_a_delete_that_is_refused_for_a_while_is_repeated(
        self, service: FakePrime, local: Switch, caplog: pytest.LogCaptureFixture
    ) -> None:
        exposure = Watched().expose(local.port)
        await exposure.__aenter__()
        service.api_status["DELETE"] = (429, {"detail": "slow down"}, {})
        closing = asyncio.ensure_future(exposure.__aexit__(None, None, None))
        await until(lambda: service.api_calls("DELETE") >= 1)
        del service.api_status["DELETE"]
        await closing
        assert service.deletes == service.created
        assert "left behind" not in caplog.text

    async def test_an_api_that_is_down_holds_nothing_up_and_what_is_left_is_named(
        self, service: FakePrime, local: Switch, caplog: pytest.LogCaptureFixture
    ) -> None:
        loop = asyncio.get_running_loop()
        async with Watched(stop_timeout=1.0).expose(local.port):
            service.api_down()
            began = loop.time()
        assert loop.time() - began < 5
        (tunnel_id,) = service.created
        (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert re.search(rf"labelled interception-\w+ may be left behind \({tunnel_id}\)", record.getMessage())
        assert service.frpc_pids() == []
        assert service.config_files() == []
        service.expire(tunnel_id)

    async def test_an_api_that_hangs_holds_nothing_up_and_what_is_left_is_named(
        self, service: FakePrime, local: Switch, caplog: pytest.LogCaptureFixture
    ) -> None:
        loop = asyncio.get_running_loop()
        async with Watched(stop_timeout=0.3).expose(local.port):
            service.api_delay.update(DELETE=600.0, GET=600.0)
            began = loop.time()
        assert loop.time() - began < 4  # the SDK itself would wait for 5 s
        (tunnel_id,) = service.created
        assert re.search(rf"labelled interception-\w+ may be left behind \({tunnel_id}\)", caplog.text)
        assert service.frpc_pids() == []
        assert service.config_files() == []
        service.expire(tunnel_id)
        service.api_down()  # for the SDK's thread, which would wait on

    async def test_a_tunnel_that_is_gone_is_deleted_all_the_same(self, service: FakePrime, local: Switch) -> None:
        tunnel = Watched()
        async with tunnel.expose(local.port):
            service.expire(service.created[0])
            kill_frpc(service)
            await until(lambda: tunnel.gone is not None)
        assert service.deletes == service.created


class TestPace:
    async def test_creates_beyond_the_limit_wait_and_take_nothing_along_when_they_are_cancelled(
        self, service: FakePrime, local: Switch, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with Watched(creates_per_minute=2).expose(local.port), Watched(creates_per_minute=2).expose(local.port):
            tunnels = [Watched(creates_per_minute=2) for _ in range(3)]
            waiting = [asyncio.ensure_future(tunnel.expose(local.port).__aenter__()) for tunnel in tunnels]
            await until(lambda: "creates of tunnels wait" in caplog.text)
            await until(lambda: all(tunnel.queued for tunnel in tunnels))
            listed = service.api_calls("GET")
            for times, task in enumerate(waiting, 1):
                await cancel(task, min(times, 2))
            assert not any(tunnel.queued for tunnel in tunnels)
            assert service.api_calls("POST") == 2
            assert service.api_calls("GET") <= listed + 2, "the keepalives' own"
            assert len(records(service)) == 2
        assert caplog.text.count("creates of tunnels wait") == 1

    async def test_creates_that_the_sdk_repeats_count_too(
        self, service: FakePrime, caplog: pytest.LogCaptureFixture
    ) -> None:
        service.api_drop.add("POST")
        starting = asyncio.ensure_future(Watched(creates_per_minute=2).expose(1).__aenter__())
        await until(lambda: "creates of tunnels wait" in caplog.text)
        assert service.api_calls("POST") == 2
        await cancel(starting, 2)
        assert service.api_calls("POST") == 2
        assert sorted(service.deletes) == sorted(service.created)

    async def test_a_delete_whose_turn_does_not_come_in_time_is_named_and_left_to_the_next_start(
        self, service: FakePrime, local: Switch, caplog: pytest.LogCaptureFixture
    ) -> None:
        for _ in range(2):
            async with Watched(deletes_per_minute=1, stop_timeout=2.0).expose(local.port):
                pass
        first, second = service.created
        assert service.deletes == [first]
        assert re.search(rf"may be left behind \({second}\)", caplog.text)
        assert service.config_files() == []
        async with Watched(deletes_per_minute=None).expose(local.port):
            await until(lambda: second in service.deletes and len(records(service)) == 1)
        assert records(service) == []

    async def test_without_limits_of_ours_nothing_is_counted(self, service: FakePrime, local: Switch) -> None:
        async with Watched(creates_per_minute=None, deletes_per_minute=None).expose(local.port):
            pass
        assert list(service.home.glob("state/*/*/*.sqlite")) == []

    @pytest.mark.parametrize("setting", ["creates_per_minute", "deletes_per_minute"])
    def test_a_limit_of_nothing_is_refused(self, setting: str) -> None:
        with pytest.raises(ValueError, match=setting):
            PrimeTunnelConfig.model_validate({setting: 0})


class TestLogs:
    async def test_proxy_variables_which_the_client_inherits_are_warned_of(
        self, service: FakePrime, local: Switch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("https_proxy", "http://user:password@127.0.0.1:1")
        async with Watched().expose(local.port):
            pass
        assert "frpc inherits https_proxy" in caplog.text
        assert "password" not in caplog.text

    def test_the_sdks_messages_reach_our_logger_once_however_many_tunnels_there_are(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        for _ in range(3):
            Watched()
        logging.getLogger("prime_tunnel.frpc").warning("frpc t-1: connect to server error: EOF")
        assert [r.getMessage() for r in caplog.records if r.name == "tunnel"] == ["t-1: connect to server error: EOF"]
        handlers = logging.getLogger("prime_tunnel").handlers
        assert sum(isinstance(handler, TunnelLogHandler) for handler in handlers) == 1

    async def test_no_secret_is_in_a_log_an_error_or_a_repr(
        self, service: FakePrime, local: Switch, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG, "tunnel")
        tunnel = Watched(stop_timeout=0.5)
        async with tunnel.expose(local.port):
            (config,) = service.config_files()
            secrets = re.findall(r'^(?:auth\.token|metadatas\.binding_secret) = "(.+)"$', config.read_text(), re.M)
            service.lose_route(service.created[0])
            await until(lambda: tunnel.restarts == 1 and tunnel.state.name == "serving")
            service.expire(service.created[0])
            kill_frpc(service)
            await until(lambda: tunnel.gone is not None)
            service.api_down()
            said = [repr(tunnel), repr(tunnel.config), repr(tunnel._client), *map(repr, tunnel.events)]
        service.api_up()

        assert len(secrets) == 2
        for secret in (*secrets, os.environ["PRIME_API_KEY"]):
            assert secret not in caplog.text
            assert not [text for text in said if secret in text]

    @pytest.mark.parametrize("missing", ["url", "server_host", "expires_at"])
    async def test_an_answer_that_is_not_understood_is_not_quoted(
        self, service: FakePrime, missing: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG, "tunnel")
        answer = {
            "frp_token": "private-1",
            "tunnel_id": "t-1",
            "hostname": "host",
            "url": "http://host",
            "server_host": "host",
            "expires_at": "2030-01-01T00:00:00Z",
            "binding_secret": "private-2",
        }
        del answer[missing]
        service.api_status["POST"] = (200, answer, {})
        with pytest.raises(TunnelError, match=f"{missing}: Field required") as caught:
            await Watched().expose(1).__aenter__()
        assert "private" not in "".join(traceback.format_exception(caught.value))
        assert "private" not in caplog.text


async def worst_gap(work: Awaitable[object]) -> float:
    """The longest time for which the event loop stood still while `work` was done."""
    loop = asyncio.get_running_loop()
    worst = 0.0
    task = asyncio.ensure_future(work)
    last = loop.time()
    while not task.done():
        await asyncio.wait([task], timeout=0.01)
        now = loop.time()
        last, worst = now, max(worst, now - last)
    await task
    return worst


@pytest.mark.parametrize("key", ["sekrit-0123456789\n", " sekrit-0123456789", "sekrit-0123456789\r\n", "sekrit-é"])
def test_a_key_that_no_request_could_carry_is_refused_without_being_quoted(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("PRIME_API_KEY", key)
    with pytest.raises(TunnelLimitError, match="PRIME_API_KEY") as refusal:
        PrimeTunnel()
    assert "sekrit" not in str(refusal.value)
