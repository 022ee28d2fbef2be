"""What is kept for long, a session say, keeps nothing of a tunnel that is gone."""

import asyncio
import contextlib
import gc
import weakref

import aiohttp

from interception import InterceptionServer, InterceptionServerConfig, RolloutSession, Upstream
from tests.chaos.leaks import Holdings
from tests.chaos.run import POLICY
from tests.chaos.serve import Serve, first_tunnel
from tests.helpers import until
from tunnel import HEALTH_PATH, PrimeTunnelConfig, TunnelError


async def test_a_session_that_is_kept_does_not_keep_the_pipes_of_its_lost_client_open(serve: Serve) -> None:
    with serve():
        await first_tunnel()
    gc.collect()
    before = Holdings.now()
    session = RolloutSession(Upstream(base_url="http://127.0.0.1:9/v1"))
    with serve() as service:
        config = InterceptionServerConfig(tunnel=PrimeTunnelConfig(policy=POLICY))
        with contextlib.suppress(TunnelError):
            async with InterceptionServer(config, requires_tunnel=True) as server, server.acquire(session):
                service.expire(service.created[-1])
                await session.guard(asyncio.Event().wait())
    del server, config
    assert isinstance(session.error, TunnelError)

    def left() -> list[str]:
        gc.collect()
        return Holdings.now().since(before)

    await until(lambda: not left())


async def test_a_server_that_was_stopped_is_not_kept() -> None:
    server = InterceptionServer()
    async with server, aiohttp.ClientSession() as http, http.get(server.base_url + HEALTH_PATH) as answer:
        assert answer.status == 200
    kept = weakref.ref(server)
    del server
    gc.collect()
    assert kept() is None
