"""What befalls tunnels at random: for each kind of tunnel one that breaks them, one fault after another."""

import asyncio
import contextlib
import os
import random
import signal
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

from interception import ElasticInterceptionPool, InterceptionServer, InterceptionServerConfig, RolloutSession
from tests.chaos.relay import Relay
from tests.prime import FakePrime

LONGEST = 4.0
"""Seconds that a fault lasts which heals by itself."""


class WatchedServer(InterceptionServer):
    """A server that tells who was on it and what was done to it."""

    def __init__(self, config: InterceptionServerConfig, relay: Relay | None = None, account: str = "") -> None:
        super().__init__(config, requires_tunnel=True)
        self.relay = relay
        self.account = account
        self.url = ""
        self.stops = 0
        self.seated: set[str] = set()
        """The ids of the sessions that ever were on it."""
        self.revoked = False
        """Its tunnel was ended for good, by order."""
        self.faults: list[str] = []

    async def start(self) -> None:
        await super().start()
        self.url = self.base_url

    def register(self, session: RolloutSession) -> tuple[str, str]:
        pair = super().register(session)
        self.seated.add(session.id)
        return pair

    async def stop(self) -> None:
        self.stops += 1
        await super().stop()


class Breaker(ABC):
    """Breaks the tunnels of one pool. A tunnel has one fault at a time, a service any number."""

    weights: ClassVar[dict[str, int]]
    """How often each fault is chosen among the others; they are methods, `_` for a space."""

    def __init__(self, pool: ElasticInterceptionPool, rng: random.Random) -> None:
        self.pool = pool
        self.counts: Counter[str] = Counter()
        """Faults by kind."""
        self._rng = rng
        self._busy: set[WatchedServer | str] = set()

    async def run(self, seconds: float, every: float) -> None:
        """A fault every so many seconds on average, each kind once at least. What can be healed is healed after it."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        first = self._rng.sample(list(self.weights), len(self.weights))  # each kind once, and then by weight
        async with asyncio.TaskGroup() as faults:
            while first or loop.time() < end:
                await asyncio.sleep(self._rng.expovariate(1 / every))
                [name] = [first.pop()] if first else self._rng.choices(list(self.weights), list(self.weights.values()))
                faults.create_task(self._befall(name))

    async def _befall(self, name: str) -> None:
        fault: Callable[..., Awaitable[None]] = getattr(self, name.replace(" ", "_"))
        befallen: list[Any] = [name] if fault in self.on_services else self._servers()
        free = [one for one in befallen if one not in self._busy]
        if not free:
            return
        one = self._rng.choice(free)
        self._busy.add(one)
        try:
            self.counts[name] += 1
            if isinstance(one, WatchedServer):
                one.faults.append(name)
                await fault(one)
            else:
                await fault()
        finally:
            self._busy.discard(one)

    def _servers(self) -> list[WatchedServer]:
        return [
            server
            for server in self.pool.servers
            if isinstance(server, WatchedServer) and server.healthy and self._can_be_broken(server)
        ]

    async def _a_while(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.3, LONGEST))

    @property
    @abstractmethod
    def on_services(self) -> list[Any]:
        """The faults that befall no single tunnel."""

    @abstractmethod
    def _can_be_broken(self, server: WatchedServer) -> bool: ...


class SshBreaker(Breaker):
    weights: ClassVar = {
        "cut": 6,
        "port held": 3,
        "restart refused": 3,
        "relay stopped": 2,
        "creation refused": 1,
        "revoked": 1,
    }

    def __init__(
        self,
        pool: ElasticInterceptionPool,
        rng: random.Random,
        relays: list[Relay],
        unused: Callable[[Relay], list[str]],
    ) -> None:
        super().__init__(pool, rng)
        self._relays = relays
        self._unused = unused

    @property
    def on_services(self) -> list[Any]:
        return [self.relay_stopped, self.creation_refused]

    def _can_be_broken(self, server: WatchedServer) -> bool:
        return server.relay is not None and not server.relay.stopped

    async def cut(self, server: WatchedServer) -> None:
        await _relay(server).do("cut", server.account)

    async def port_held(self, server: WatchedServer) -> None:
        """As by a half-open session: requests hang, and the same port is refused."""
        relay = _relay(server)
        await relay.do("hold", server.account)
        await relay.do("cut", server.account)
        try:
            await self._a_while()
        finally:
            await relay.do("let_go", server.account)

    async def restart_refused(self, server: WatchedServer) -> None:
        relay = _relay(server)
        await relay.do("refuse_forwards", server.account, True)
        await relay.do("cut", server.account)
        try:
            await self._a_while()
        finally:
            await relay.do("refuse_forwards", server.account, False)

    async def revoked(self, server: WatchedServer) -> None:
        server.revoked = True
        await _relay(server).do("revoke", server.account)

    async def relay_stopped(self) -> None:
        """All its tunnels hang."""
        moving = [relay for relay in self._relays if not relay.stopped]
        if moving:
            relay = self._rng.choice(moving)
            relay.stop()
            try:
                await self._a_while()
            finally:
                relay.go_on()

    async def creation_refused(self) -> None:
        """Accounts that no server has yet get no forward."""
        relay = self._rng.choice(self._relays)
        refused = self._unused(relay)[:4]
        for account in refused:
            await relay.do("refuse_forwards", account, True)
        try:
            await self._a_while()
        finally:
            for account in refused:
                await relay.do("refuse_forwards", account, False)


def _relay(server: WatchedServer) -> Relay:
    assert server.relay is not None
    return server.relay


class PrimeBreaker(Breaker):
    weights: ClassVar = {
        "client killed": 5,
        "client stopped": 3,
        "route lost": 3,
        "half open": 3,
        "restart refused": 3,
        "gateway broken": 3,
        "probes fail": 2,
        "creation refused": 1,
        "creations lost": 1,
        "deletes refused": 1,
        "API down": 1,
        "revoked": 2,
    }

    def __init__(self, pool: ElasticInterceptionPool, rng: random.Random, service: FakePrime) -> None:
        super().__init__(pool, rng)
        self._service = service

    @property
    def on_services(self) -> list[Any]:
        return [self.creation_refused, self.creations_lost, self.deletes_refused, self.API_down]

    def _can_be_broken(self, server: WatchedServer) -> bool:
        return server.url in self._service.urls.values()

    def _id(self, server: WatchedServer) -> str:
        return next(tunnel_id for tunnel_id, url in self._service.urls.items() if url == server.url)

    async def client_killed(self, server: WatchedServer) -> None:
        await self._signal(server, signal.SIGKILL)

    async def client_stopped(self, server: WatchedServer) -> None:
        await self._signal(server, signal.SIGSTOP)
        try:
            await self._a_while()
        finally:
            await self._signal(server, signal.SIGCONT)

    async def route_lost(self, server: WatchedServer) -> None:
        self._service.lose_route(self._id(server))

    async def half_open(self, server: WatchedServer) -> None:
        self._service.half_open(self._id(server))

    async def restart_refused(self, server: WatchedServer) -> None:
        self._service.hold_old_session(self._id(server), self._rng.uniform(0.3, LONGEST))
        await self._signal(server, signal.SIGKILL)

    async def gateway_broken(self, server: WatchedServer) -> None:
        tunnel_id = self._id(server)
        faults: list[Any] = ["hang", "reset", 502, 404]
        self._service.gateway[tunnel_id] = self._rng.choice(faults)
        try:
            await self._a_while()
        finally:
            del self._service.gateway[tunnel_id]

    async def probes_fail(self, server: WatchedServer) -> None:
        """This host's own way to the URL alone; requests arrive."""
        tunnel_id = self._id(server)
        faults: list[Any] = ["hang", "reset", 502, 404]
        self._service.host_path[tunnel_id] = self._rng.choice(faults)
        try:
            await self._a_while()
        finally:
            del self._service.host_path[tunnel_id]

    async def revoked(self, server: WatchedServer) -> None:
        server.revoked = True
        tunnel_id = self._id(server)
        match self._rng.randrange(3):
            case 0:
                self._service.expire(tunnel_id)
            case 1:
                self._service.expire_softly(tunnel_id)
                self._service.lose_route(tunnel_id)
            case 2:
                self._service.terminate_softly(tunnel_id)
                await self._signal(server, signal.SIGKILL)

    async def creation_refused(self) -> None:
        status, text = self._rng.choice([(503, "try later"), (429, "too many requests")])
        await self._answers("POST", status, text)

    async def deletes_refused(self) -> None:
        await self._answers("DELETE", 429, "too many requests")

    async def creations_lost(self) -> None:
        """They are carried out, and their answers are not seen."""
        self._service.api_drop.add("POST")
        try:
            await self._a_while()
        finally:
            self._service.api_drop.discard("POST")

    async def API_down(self) -> None:
        await asyncio.to_thread(self._service.api_down)
        try:
            await self._a_while()
        finally:
            await asyncio.to_thread(self._service.api_up)

    async def _answers(self, method: str, status: int, text: str) -> None:
        self._service.api_status[method] = (status, {"detail": text}, {})
        try:
            await self._a_while()
        finally:
            self._service.api_status.pop(method, None)

    async def _signal(self, server: WatchedServer, number: int) -> None:
        await asyncio.to_thread(self._signal_now, self._id(server), number)

    def _signal_now(self, tunnel_id: str, number: int) -> None:
        for pid in self._service.frpc_pids():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if f"{tunnel_id}.toml".encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, number)
