"""A real frpc, driven by the real SDK, over a relay that speaks its protocol. `python -m tests.live.install` first."""

import asyncio
import os
import platform
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.helpers import Switch, until
from tests.live.install import FRPC
from tests.prime.wire import WirePrime
from tunnel import (
    Gone,
    KeepAlivePolicy,
    PrimeTunnel,
    PrimeTunnelConfig,
    Restarted,
    RestartFailed,
    StateChanged,
    TunnelEvent,
)

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(
        sys.platform != "linux" or platform.machine() != "x86_64", reason="the frpc of the npm package is for linux-x64"
    ),
    pytest.mark.skipif(not FRPC.exists(), reason="no real frpc here: python -m tests.live.install"),
]

# frpc's own times are what they are, and so is the policy; only the looks at a healthy URL come more often.
POLICY = KeepAlivePolicy(idle_spacing=3.0, exit_poll=0.2)
LONG = 120.0


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WirePrime]:
    with WirePrime(tmp_path, FRPC) as service:
        for name, value in service.env().items():
            monkeypatch.setenv(name, value)
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.upper(), raising=False)
        yield service


@pytest.fixture
async def local() -> AsyncIterator[Switch]:
    async with Switch() as local:
        yield local


class Watched(PrimeTunnel):
    def __init__(self, **policy: Any) -> None:
        super().__init__(PrimeTunnelConfig(policy=POLICY.model_copy(update=policy)))
        self.events: list[TunnelEvent] = []
        self.on_event = self.events.append

    def of(self, kind: type[TunnelEvent]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def settled(self, condition: Callable[[], object]) -> None:
        await until(condition, LONG)


async def get(url: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(url + "/some/path") as response:
        return response.status


def uids_of(pid: int) -> list[str]:
    status = Path(f"/proc/{pid}/status").read_text()
    (uids,) = [line.split()[1:] for line in status.splitlines() if line.startswith("Uid:")]
    return uids


async def test_requests_go_through_it_and_it_runs_without_rights(service: WirePrime, local: Switch) -> None:
    tunnel = Watched()
    async with tunnel.expose(local.port) as url:
        assert await asyncio.gather(*(get(url) for _ in range(30))) == [200] * 30
        assert local.paths.count("/some/path") == 30
        (pid,) = service.frpc_pids()
        assert "0" not in uids_of(pid)
    assert service.frpc_pids() == []
    assert service.live() == []


async def test_route_lost(service: WirePrime, local: Switch) -> None:
    tunnel = Watched()
    async with tunnel.expose(local.port) as url:
        began = time.time()
        service.lose_route(service.created[0])
        await tunnel.settled(lambda: tunnel.restarts and tunnel.state.name == "serving")
        [restarted] = tunnel.of(Restarted)
        assert restarted.at - began < 30.0
        assert "gateway 404" in restarted.reason
        assert await get(url) == 200
        assert service.logins(service.created[0]) == 2


async def test_process_killed(service: WirePrime, local: Switch) -> None:
    tunnel = Watched(idle_spacing=3600.0)
    async with tunnel.expose(local.port) as url:
        began = time.time()
        os.kill(service.frpc_pids()[0], signal.SIGKILL)
        await tunnel.settled(lambda: tunnel.restarts and tunnel.state.name == "serving")
        [restarted] = tunnel.of(Restarted)
        assert restarted.at - began < 10.0
        assert await get(url) == 200


async def test_half_open_mends_itself_and_is_left_to(service: WirePrime, local: Switch) -> None:
    tunnel = Watched()
    async with tunnel.expose(local.port) as url:
        service.half_open(service.created[0])
        began = time.monotonic()
        tunnel.report("a rollout's call hangs")
        await tunnel.settled(lambda: tunnel.state.name == "suspect")
        assert time.monotonic() - began >= 8.0
        assert "slow gateway 404" in tunnel.state.reason
        await tunnel.settled(lambda: tunnel.state.name == "serving")
        assert (tunnel.restarts, tunnel.of(RestartFailed)) == (0, [])
        assert service.logins(service.created[0]) == 2
        assert await get(url) == 200


async def test_refused_restart(service: WirePrime, local: Switch) -> None:
    tunnel = Watched()
    async with tunnel.expose(local.port) as url:
        service.hold_old_session(service.created[0], 6.0)
        os.kill(service.frpc_pids()[0], signal.SIGKILL)
        await tunnel.settled(lambda: tunnel.restarts and tunnel.state.name == "serving")
        assert tunnel.of(RestartFailed)
        assert all("already exists" in event.error for event in tunnel.of(RestartFailed))
        assert {event.after.name for event in tunnel.of(StateChanged)} == {"restarting", "serving"}
        assert tunnel.gone is None
        assert await get(url) == 200


async def test_expired(service: WirePrime, local: Switch) -> None:
    tunnel = Watched()
    async with tunnel.expose(local.port):
        service.expire(service.created[0])
        began = time.monotonic()
        await tunnel.settled(lambda: tunnel.gone)
        assert time.monotonic() - began < 45.0
        assert "inactive" in str(tunnel.gone)
        assert (len(tunnel.of(Gone)), len(tunnel.of(RestartFailed))) == (1, 1)
