"""The demo: the main job with real parts; on its own SSH relay one tunnel is cut and one revoked on the way."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from interception.config import ElasticInterceptionPoolConfig, InterceptionServerConfig
from interception.demo.agents import AgentProcess, Play
from interception.demo.relay_process import RelayProcess
from interception.echo import EchoModel
from interception.elastic import ElasticInterceptionPool
from interception.server import InterceptionServer
from interception.session import RolloutSession, Upstream
from tunnel import Gone, KeepAlivePolicy, PrimeTunnelConfig, Restarted, SshTunnelConfig, StateChanged, TunnelError
from tunnel import TunnelEvent as Event

AT_ONCE = 12
MULTIPLEX = 6
TURNS = 6
PAUSE = 0.8  # seconds between the turns of a rollout
ACCOUNTS = 6  # one for each server that could be needed
CUT_AFTER = 3.0  # seconds after the first rollout
REVOKE_AFTER = 8.0
SETTLE_TIMEOUT = 30.0  # seconds for a fault to be noticed after the last rollout
DIALECTS = ("chat", "responses", "messages")


@dataclass(frozen=True)
class Plan:
    """What to run. Tunnels are cut and revoked on the demo's own relay alone (`ssh`)."""

    rollouts: int = 30
    tunnel: Literal["ssh", "prime", "none"] = "ssh"
    upstream: Upstream | None = None
    """None: an echo model, in three dialects. A real one is asked for chat completions, as all of them know these."""
    model: str = "echo"


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
    cut_url: str | None  # None: none was
    revoked_url: str | None
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
        if self.retired != (self.revoked_url is not None):
            found.append(f"{self.retired} servers were retired, not {int(self.revoked_url is not None)}")
        if self.cut_url is not None and not self.restarts:
            found.append("the cut tunnel was not restarted")
        return found


@dataclass
class Progress:
    """How far it is, for whoever shows it."""

    playing: int = 0
    finished: int = 0
    failed: int = 0
    plays: list[Play] = field(default_factory=list)

    @property
    def answered(self) -> int:
        return sum(len(play.answered) for play in self.plays)


class Demo:
    """Runs once; `say` gets a plain line for everything that happens."""

    def __init__(self, say: Callable[[str], None], plan: Plan = Plan()) -> None:
        self.plan = plan
        self.progress = Progress()
        self.pool: ElasticInterceptionPool | None = None
        """Once it is started."""
        self._print = say
        self._began = time.monotonic()
        self._servers: dict[str, InterceptionServer] = {}  # by relay account
        self._restarts = 0
        self._restarted = asyncio.Event()

    def say(self, line: str) -> None:
        self._print(f"{time.monotonic() - self._began:5.1f} s  {line}")

    async def run(self) -> Result:
        with TemporaryDirectory(prefix="interception-demo-") as folder:
            async with self._model() as upstream, AgentProcess() as agents:
                if self.plan.tunnel != "ssh":
                    self.say(f"agents in process {agents.pid}, this is {os.getpid()}")
                    config = ElasticInterceptionPoolConfig(multiplex=MULTIPLEX, tunnel=PrimeTunnelConfig())
                    pool = ElasticInterceptionPool(config, requires_tunnel=self.plan.tunnel == "prime")
                    return await self._play(pool, None, agents, upstream)
                async with RelayProcess(Path(folder)) as relay:
                    self.say(f"SSH relay in process {relay.pid}, agents in process {agents.pid}, this is {os.getpid()}")
                    keys = {f"tunnel-{n}": await relay.account(f"tunnel-{n}") for n in range(1, ACCOUNTS + 1)}
                    pool = ElasticInterceptionPool(
                        ElasticInterceptionPoolConfig(multiplex=MULTIPLEX, tunnel=_tunnel(relay, "tunnel-1", keys)),
                        requires_tunnel=True,
                        server_factory=lambda _: self._server(relay, keys),
                    )
                    return await self._play(pool, relay, agents, upstream)

    # -- the parts -----------------------------------------------------------------------------

    @asynccontextmanager
    async def _model(self) -> AsyncIterator[Upstream]:
        if self.plan.upstream is not None:
            self.say(f"model {self.plan.model} at {self.plan.upstream.base_url}")
            yield self.plan.upstream
            return
        async with EchoModel(chunk_delay=0.02) as echo:
            self.say(f"echo model at {echo.base_url} (it answers with what it was told)")
            yield Upstream(base_url=echo.base_url)

    def _server(self, relay: RelayProcess, keys: dict[str, Path]) -> InterceptionServer:
        """A server with a relay account of its own, so that one can be revoked alone."""
        account = f"tunnel-{len(self._servers) + 1}"
        server = InterceptionServer(
            InterceptionServerConfig(tunnel=_tunnel(relay, account, keys)), requires_tunnel=True
        )
        self._servers[account] = server
        return server

    def _event(self, event: Event) -> None:
        match event:
            case Restarted():
                self._restarts += 1
                self._restarted.set()
                self.say(f"{event.url}: the tunnel client is back under the same URL after {event.took * 1e3:.0f} ms")
            case StateChanged() if event.after.name == "serving":
                self.say(f"{event.url}: serving again")
            case StateChanged() if event.after.name in ("restarting", "suspect", "local_down"):
                self.say(f"{event.url}: {event.after}")
            case Gone():
                self.say(f"{event.url}: gone for good, its server is retired")

    async def _play(
        self, pool: ElasticInterceptionPool, relay: RelayProcess | None, agents: AgentProcess, upstream: Upstream
    ) -> Result:
        plan = self.plan
        real = plan.upstream is not None
        dialects = ("one dialect" if real else "three dialects") + ", streamed and not"
        places = asyncio.Semaphore(AT_ONCE)
        first = asyncio.Event()
        pool.on_event = self._event
        async with pool:
            self.pool = pool
            known = {server.base_url for server in pool.servers}
            for url in known:
                self.say(f"first server under {url}")

            async def rollout(number: int) -> Outcome:
                session = RolloutSession(upstream, id=f"rollout-{number}")
                outcome, play = Outcome(number), Play()
                self.progress.plays.append(play)
                async with places:
                    self.progress.playing += 1
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
                                    dialect="chat" if real else DIALECTS[number % 3],
                                    streamed=number % 2 == 0,
                                    turns=TURNS,
                                    pause=PAUSE,
                                    model=plan.model,
                                    echo=not real,
                                )
                            )
                    except TunnelError as error:
                        outcome.error, outcome.tunnel_lost = f"TunnelError: {error}", True
                        self.say(f"rollout {number} ended: the tunnel was lost")
                    finally:
                        self.progress.playing -= 1
                        first.set()
                self.progress.finished += outcome.error is None
                self.progress.failed += outcome.error is not None
                whole = [turn for turn in session.trace.turns if turn.complete]
                outcome.answered, outcome.recorded, outcome.retries = len(play.answered), len(whole), play.retries
                outcome.lost = len(
                    set(play.answered) - {attempt.call_id for turn in whole for attempt in turn.attempts}
                )
                return outcome

            self.say(
                f"{plan.rollouts} rollout{'s' * (plan.rollouts > 1)} of {TURNS} turns, {min(AT_ONCE, plan.rollouts)} "
                f"at once, {MULTIPLEX} on a server, {dialects}"
            )
            cut = revoked = None
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(rollout(number)) for number in range(1, plan.rollouts + 1)]
                await first.wait()
                if relay is not None:
                    if not await _all_done(tasks, CUT_AFTER):
                        cut = self._servers["tunnel-1"].base_url
                        self.say(f"cutting the connection of {cut}")
                        await relay.cut("tunnel-1")
                    if not await _all_done(tasks, REVOKE_AFTER - CUT_AFTER) and "tunnel-2" in self._servers:
                        revoked = self._servers["tunnel-2"].base_url
                        self.say(f"revoking the account of {revoked}")
                        await relay.revoke("tunnel-2")
            # Few rollouts may be over before a fault is noticed; one that is never noticed is told in the result.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_TIMEOUT):
                    if cut is not None:
                        await self._restarted.wait()
                    while revoked is not None and not pool.retired:  # noqa: ASYNC110 - the tunnel's event comes before
                        await asyncio.sleep(0.02)
            return Result(
                outcomes=[task.result() for task in tasks],
                cut_url=cut,
                revoked_url=revoked,
                restarts=self._restarts,
                retired=pool.retired,
                servers=len(self._servers) or len(known),
            )


def _tunnel(relay: RelayProcess, account: str, keys: dict[str, Path]) -> SshTunnelConfig:
    return SshTunnelConfig(
        host="127.0.0.1",
        port=relay.port,
        username=account,
        client_keys=(keys[account],),
        known_hosts=relay.known_hosts,
        remote_host="127.0.0.1",
        policy=KeepAlivePolicy().scaled(0.05),
    )


async def _all_done(tasks: list[asyncio.Task[Outcome]], within: float) -> bool:
    _, pending = await asyncio.wait(tasks, timeout=within)
    return not pending
