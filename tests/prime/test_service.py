"""The stand-in behaves towards the real SDK as the service it stands for."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import IO

import aiohttp
import pytest
from aiohttp import web
from prime_tunnel import Tunnel, TunnelConnectionError, TunnelError, TunnelGoneError, TunnelLimitReachedError
from prime_tunnel.core.client import TunnelClient
from prime_tunnel.frpc import FrpcOutput

from tests.prime import FakePrime


@pytest.fixture(autouse=True)
def _pipes_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK leaves frpc's pipes to the garbage collector, whose complaint would fail some later test."""
    read = FrpcOutput._read

    def read_to_the_end(output: FrpcOutput, pipe: IO[str]) -> None:
        with pipe:
            read(output, pipe)

    monkeypatch.setattr(FrpcOutput, "_read", read_to_the_end)


@pytest.fixture
def service(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePrime]:
    with FakePrime(tmp_path, scale=getattr(request, "param", 0.05)) as service:
        for name, value in service.env().items():
            monkeypatch.setenv(name, value)
        yield service


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """A local service that answers with the headers it saw."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(dict(request.headers))

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


@pytest.fixture
async def tunnel(service: FakePrime, port: int) -> AsyncIterator[Tunnel]:
    tunnel = Tunnel(local_port=port, labels=["mine"])
    await tunnel.start()
    yield tunnel
    await tunnel.stop()


async def get(url: str | None) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/path") as response:
        return response.status


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while True:
            met = condition()
            if met if isinstance(met, bool) else await met:
                return
            await asyncio.sleep(0.01)


async def test_a_request_through_the_url_arrives_with_the_marks_of_the_gateway(tunnel: Tunnel) -> None:
    forged = {"X-Forwarded-Host": "forged"}
    async with aiohttp.ClientSession(headers=forged) as session, session.get(f"{tunnel.url}/path") as response:
        seen = await response.json()

    assert tunnel.url == f"http://{seen['X-Forwarded-Host']}"
    assert seen["X-Forwarded-For"] == "127.0.0.1"
    assert seen["X-Forwarded-Proto"] == "http"


async def test_a_tunnel_is_accounted_for_from_its_start_to_its_stop(service: FakePrime, tunnel: Tunnel) -> None:
    tunnel_id, url = tunnel.tunnel_id, tunnel.url
    assert tunnel_id is not None
    await get(url)

    assert service.created == service.live() == [tunnel_id]
    assert service.urls == {tunnel_id: url}
    assert len(service.frpc_pids()) == len(service.config_files()) == service.logins(tunnel_id) == 1
    assert service.requests(tunnel_id) == service.requests(tunnel_id, "/path") == 1

    await tunnel.stop()

    assert service.deletes == [tunnel_id]
    assert service.api_calls("POST") == service.api_calls("DELETE") == 1
    assert not service.live()
    assert not service.frpc_pids()
    assert not service.config_files()
    assert await get(url) == 404


async def test_a_restart_keeps_the_url(service: FakePrime, tunnel: Tunnel) -> None:
    os.kill(service.frpc_pids()[0], signal.SIGKILL)
    await until(lambda: not tunnel.is_running)

    assert await tunnel.restart() == service.urls[service.created[0]]
    assert await get(tunnel.url) == 200
    assert service.logins(service.created[0]) == 2


async def test_a_lost_route_is_a_404_while_all_seems_well_until_a_restart(service: FakePrime, tunnel: Tunnel) -> None:
    service.lose_route(service.created[0])

    assert await get(tunnel.url) == 404
    assert (await tunnel.status()).registration == "connected"

    await tunnel.restart()
    assert await get(tunnel.url) == 200


@pytest.mark.parametrize(("fault", "record"), [("expire_softly", "expired"), ("terminate_softly", "terminated")])
async def test_a_soft_end_keeps_serving_but_no_restart_is_accepted(
    service: FakePrime, tunnel: Tunnel, fault: str, record: str
) -> None:
    getattr(service, fault)(tunnel.tunnel_id)

    assert await get(tunnel.url) == 200
    assert (await tunnel.status()).registration == record
    with pytest.raises(TunnelGoneError):
        await tunnel.restart()
    assert await get(tunnel.url) == 404


async def test_a_client_that_is_thrown_out_learns_that_its_tunnel_is_gone(service: FakePrime, tunnel: Tunnel) -> None:
    service.expire(service.created[0])

    await until(lambda: tunnel.is_gone)
    assert service.live() == []
    assert await get(tunnel.url) == 404


async def test_a_forgotten_record_looks_gone_while_the_url_serves(service: FakePrime, tunnel: Tunnel) -> None:
    service.forget(service.created[0])

    assert (await tunnel.status()).gone
    assert await get(tunnel.url) == 200

    service.remember(service.created[0])
    assert (await tunnel.status()).registration == "connected"


async def test_a_held_session_refuses_a_restart_for_a_while(service: FakePrime, tunnel: Tunnel) -> None:
    service.hold_old_session(service.created[0], 0.5)

    with pytest.raises(TunnelConnectionError, match="already exists"):
        await tunnel.restart()
    assert not tunnel.is_running

    async def restarted() -> bool:
        try:
            await tunnel.restart()
        except TunnelConnectionError:
            return False
        return True

    await until(restarted)
    assert await get(tunnel.url) == 200


@pytest.mark.parametrize("service", [0.02], indirect=True)
async def test_an_untouched_half_open_session_answers_404_late_and_mends_itself(
    service: FakePrime, tunnel: Tunnel
) -> None:
    started = asyncio.get_running_loop().time()
    service.half_open(service.created[0])

    assert await get(tunnel.url) == 404
    assert asyncio.get_running_loop().time() - started >= 10 * service.scale

    await until(lambda: service.logins(service.created[0]) == 2)

    async def serves() -> bool:
        return await get(tunnel.url) == 200

    await until(serves)


@pytest.mark.parametrize(
    ("status", "detail", "error"),
    [
        (400, "maximum number of tunnels reached", TunnelLimitReachedError),
        (401, "who are you", TunnelError),
        (402, "pay", TunnelError),
        (429, "too many requests", TunnelError),
        (503, "upstream", TunnelError),
    ],
)
async def test_a_refused_create_leaves_nothing(
    service: FakePrime, status: int, detail: str, error: type[TunnelError]
) -> None:
    service.refuse_creates(status, detail)

    with pytest.raises(error):
        await Tunnel(local_port=1).start()
    assert not service.created
    assert not service.frpc_pids()
    assert not service.config_files()


async def test_creates_whose_answer_is_lost_can_be_found_and_deleted_by_label(service: FakePrime) -> None:
    service.api_drop.add("POST")
    with pytest.raises(TunnelError):
        await Tunnel(local_port=1, labels=["mine"]).start()
    service.api_drop.clear()

    client = TunnelClient()
    await client.create_tunnel(local_port=1, labels=["other"])
    first = await client.list_tunnels_page(labels=["mine"], status="pending", per_page=2)
    second = await client.list_tunnels_page(labels=["mine"], status="pending", per_page=2, page=2)
    found = [tunnel.tunnel_id for tunnel in first.tunnels + second.tunnels]
    assert (first.total, first.has_next, second.has_next) == (3, True, False)
    assert found == service.created[2::-1]

    await client.bulk_delete_tunnels(labels=["mine"])
    await client.bulk_delete_tunnels(tunnel_ids=[found[0]])
    await client.close()

    assert service.deletes == [*service.created[:3], found[0]]
    assert service.live() == service.created[3:]


async def test_a_start_cancelled_before_the_answer_leaves_its_registration(service: FakePrime) -> None:
    service.after_delay["POST"] = 60
    start = asyncio.create_task(Tunnel(local_port=1).start())
    await until(lambda: len(service.created) == 1)
    start.cancel()

    with pytest.raises(asyncio.CancelledError):
        await start
    assert service.live() == service.created


async def test_the_api_goes_down_and_comes_back_under_the_same_port(service: FakePrime, tunnel: Tunnel) -> None:
    assert (await tunnel.status()).registration == "connected"

    service.api_down()
    with pytest.raises(TunnelError, match="connect"):
        await tunnel.status()
    assert await get(tunnel.url) == 200

    service.api_up()
    assert (await tunnel.status()).registration == "connected"


async def test_the_gateway_fails_for_one_tunnel_or_for_all(service: FakePrime, tunnel: Tunnel) -> None:
    service.gateway["*"] = 502
    assert await get(tunnel.url) == 502

    service.gateway[service.created[0]] = "reset"
    with pytest.raises(aiohttp.ClientOSError):
        await get(tunnel.url)

    service.gateway[service.created[0]] = "hang"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(get(tunnel.url), 0.2)

    service.gateway.clear()
    assert await get(tunnel.url) == 200


async def test_two_services_in_one_process_know_nothing_of_each_other(
    service: FakePrime, tunnel: Tunnel, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakePrime(tmp_path / "other") as other:
        for name, value in other.env().items():
            monkeypatch.setenv(name, value)
        neighbour = Tunnel(local_port=port)
        await neighbour.start()

        assert tunnel.hostname == neighbour.hostname
        assert service.frpc_pids() != other.frpc_pids()
        other.lose_route_everywhere()
        assert (await get(tunnel.url), await get(neighbour.url)) == (200, 404)

        await neighbour.stop()
        assert service.live() == service.created


async def test_a_service_left_in_the_middle_of_everything_ends_quietly(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with FakePrime(tmp_path) as service:
        for name, value in service.env().items():
            monkeypatch.setenv(name, value)
        hung, silent = Tunnel(local_port=port), Tunnel(local_port=port)
        await hung.start()
        await silent.start()
        service.gateway[service.created[0]] = "hang"
        service.half_open(service.created[1])
        service.after_delay["GET"] = 60
        requests = [asyncio.create_task(get(url)) for url in (hung.url, silent.url)]
        status = asyncio.create_task(hung.status())
        await until(lambda: all(map(service.requests, service.created)) and service.api_calls("GET") == 1)

    results = await asyncio.gather(*requests, status, return_exceptions=True)
    assert all(isinstance(result, aiohttp.ClientError | TunnelError) for result in results), results
    assert not [record for record in caplog.records if record.name in ("asyncio", "aiohttp.server")]
    await hung.stop()
    await silent.stop()


async def test_a_client_with_the_worst_manners_still_ends_with_the_service(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakePrime(tmp_path) as service:
        for name, value in service.env(ignore_term=True, child=60, stdout_flood=2000, mute_after_connect=True).items():
            monkeypatch.setenv(name, value)
        tunnel = Tunnel(local_port=port)
        await tunnel.start()
        os.kill(service.frpc_pids()[0], signal.SIGTERM)
        await until(lambda: "line 1999" in tunnel.recent_output[-1])
        assert tunnel.is_running

    await until(lambda: not tunnel.is_running)
    assert service.frpc_pids() == []
    await tunnel.stop()
