"""The demo: the main job on loopback, with real parts, one tunnel cut and one revoked on the way."""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from interception.config import ElasticInterceptionPoolConfig, InterceptionServerConfig
from interception.demo.agents import AgentProcess, Play
from interception.demo.relay_process import RelayProcess
from interception.echo import EchoModel
from interception.elastic import ElasticInterceptionPool
from interception.server import InterceptionServer
from interception.session import RolloutSession, Upstream
from tunnel import Gone, KeepAlivePolicy, Restarted, SshTunnelConfig, StateChanged, TunnelError, TunnelEvent

ROLLOUTS = 30
AT_ONCE = 12
MULTIPLEX = 6
TURNS = 6
PAUSE = 0.8  # seconds between the turns of a rollout
ACCOUNTS = 6  # one for each server that could be needed
CUT_AFTER = 3.0  # seconds after the first rollout
REVOKE_AFTER = 8.0
DIALECTS = ("chat", "responses", "messages")


@dataclass
class Outcome:
    """How a rollout ended. `error` None: finished, all turns answered."""

    rollout: int
    url: str = ""
    answered: int = 0
    recorded: int = 0
    lost: int = 0  # answered, but not recorded
    retries: int = 0
    error: str | None = None
    tunnel_lost: bool = False


@dataclass
class Result:
    outcomes: list[Outcome]
    revoked_url: str
    restarts: int
    retired: int
    servers: int

    @property
    def failures(self) -> list[str]:
        """Why the demo failed; empty if all is as it should be."""
        found = []
        for outcome in self.outcomes:
            if outcome.lost:
                found.append(f"{outcome.lost} answered turns of rollout {outcome.rollout} were not recorded")
            if outcome.error is not None and not (outcome.url == self.revoked_url and outcome.tunnel_lost):
                found.append(f"rollout {outcome.rollout} failed on a tunnel that was not revoked: {outcome.error}")
            elif outcome.error is None and outcome.answered != TURNS:
                found.append(f"rollout {outcome.rollout} got {outcome.answered} of {TURNS} answers")
        if self.retired != 1:
            found.append(f"{self.retired} servers were retired, not 1")
        if not self.restarts:
            found.append("the cut tunnel was not restarted")
        return found


class Demo:
    """Runs once; `say` gets a plain line for everything that happens."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._print = say
        self._began = time.monotonic()
        self._servers: dict[str, InterceptionServer] = {}  # by relay account
        self._restarts = 0

    def say(self, line: str) -> None:
        self._print(f"{time.monotonic() - self._began:5.1f} s  {line}")

    async def run(self) -> Result:
        with TemporaryDirectory(prefix="interception-demo-") as folder:
            async with (
                EchoModel(chunk_delay=0.02) as echo,
                RelayProcess(Path(folder)) as relay,
                AgentProcess() as agents,
            ):
                self.say(f"echo model at {echo.base_url} (it answers with what it was told)")
                self.say(f"SSH relay in process {relay.pid}, agents in process {agents.pid}, this is {os.getpid()}")
                keys = {f"tunnel-{n}": await relay.account(f"tunnel-{n}") for n in range(1, ACCOUNTS + 1)}
                async with ElasticInterceptionPool(
                    ElasticInterceptionPoolConfig(multiplex=MULTIPLEX, tunnel=self._tunnel(relay, "tunnel-1", keys)),
                    requires_tunnel=True,
                    server_factory=lambda _: self._server(relay, keys),
                ) as pool:
                    pool.on_event = self._event
                    self.say(f"first server under {self._servers['tunnel-1'].base_url}")
                    return await self._play(pool, relay, agents, echo)

    # -- the parts -----------------------------------------------------------------------------

    def _tunnel(self, relay: RelayProcess, account: str, keys: dict[str, Path]) -> SshTunnelConfig:
        return SshTunnelConfig(
            host="127.0.0.1",
            port=relay.port,
            username=account,
            client_keys=(keys[account],),
            known_hosts=relay.known_hosts,
            remote_host="127.0.0.1",
            policy=KeepAlivePolicy().scaled(0.05),
        )

    def _server(self, relay: RelayProcess, keys: dict[str, Path]) -> InterceptionServer:
        """A server with a relay account of its own, so that one can be revoked alone."""
        account = f"tunnel-{len(self._servers) + 1}"
        server = InterceptionServer(
            InterceptionServerConfig(tunnel=self._tunnel(relay, account, keys)), requires_tunnel=True
        )
        self._servers[account] = server
        return server

    def _event(self, event: TunnelEvent) -> None:
        match event:
            case Restarted():
                self._restarts += 1
                self.say(f"{event.url}: the tunnel client is back under the same URL after {event.took * 1e3:.0f} ms")
            case StateChanged() if event.after.name == "serving":
                self.say(f"{event.url}: serving again")
            case StateChanged() if event.after.name in ("restarting", "suspect", "local_down"):
                self.say(f"{event.url}: {event.after}")
            case Gone():
                self.say(f"{event.url}: gone for good, its server is retired")

    async def _play(
        self, pool: ElasticInterceptionPool, relay: RelayProcess, agents: AgentProcess, echo: EchoModel
    ) -> Result:
        places = asyncio.Semaphore(AT_ONCE)
        first = asyncio.Event()
        known = {server.base_url for server in pool.servers}

        async def rollout(number: int) -> Outcome:
            session = RolloutSession(Upstream(base_url=echo.base_url), id=f"rollout-{number}")
            outcome, play = Outcome(number), Play()
            async with places:
                try:
                    async with pool.acquire(session) as slot:
                        outcome.url = slot.base_url
                        if slot.base_url not in known:
                            known.add(slot.base_url)
                            self.say(f"another server was started, under {slot.base_url}")
                        first.set()
                        outcome.error = await session.guard(
                            agents.play(
                                play,
                                number,
                                slot,
                                dialect=DIALECTS[number % 3],
                                streamed=number % 2 == 0,
                                turns=TURNS,
                                pause=PAUSE,
                            )
                        )
                except TunnelError as error:
                    outcome.error, outcome.tunnel_lost = f"TunnelError: {error}", True
                    self.say(f"rollout {number} ended: the tunnel was lost")
            whole = [turn for turn in session.trace.turns if turn.complete]
            outcome.answered, outcome.recorded, outcome.retries = len(play.answered), len(whole), play.retries
            outcome.lost = len(set(play.answered) - {attempt.call_id for turn in whole for attempt in turn.attempts})
            return outcome

        self.say(f"{ROLLOUTS} rollouts of {TURNS} turns, {AT_ONCE} at once, {MULTIPLEX} on a server, three dialects")
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(rollout(number)) for number in range(1, ROLLOUTS + 1)]
            await first.wait()
            await asyncio.sleep(CUT_AFTER)
            self.say(f"cutting the connection of {self._servers['tunnel-1'].base_url}")
            await relay.cut("tunnel-1")
            await asyncio.sleep(REVOKE_AFTER - CUT_AFTER)
            revoked = self._servers["tunnel-2"].base_url
            self.say(f"revoking the account of {revoked}")
            await relay.revoke("tunnel-2")
        return Result(
            outcomes=[task.result() for task in tasks],
            revoked_url=revoked,
            restarts=self._restarts,
            retired=pool.retired,
            servers=len(self._servers),
        )
