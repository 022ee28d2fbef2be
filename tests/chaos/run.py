"""A run: rollouts over two pools whose tunnels are broken at random, and what has to be true of it afterwards."""

import asyncio
import random
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import openai

from interception import ElasticInterceptionPool, ElasticInterceptionPoolConfig, RolloutSession, Turn, Upstream
from interception.config import InterceptionServerConfig
from interception.echo import EchoModel
from tests.chaos.agents import Agent, AgentFailedError, OpenAiAgent, PlainAgent
from tests.chaos.faults import Breaker, PrimeBreaker, SshBreaker, WatchedServer
from tests.chaos.relay import Relay
from tests.prime import FakePrime
from tunnel import (
    Gone,
    KeepAlivePolicy,
    PrimeTunnelConfig,
    Restarted,
    RestartFailed,
    SshTunnelConfig,
    StateChanged,
    TunnelError,
    TunnelEvent,
)

FACTOR = 1 / 20
POLICY = (
    KeepAlivePolicy()
    .scaled(FACTOR)
    .model_copy(
        # What a loaded machine needs, and what tells its stalls from a suspended host, is left as it is.
        update={"probe_timeout": 5.0, "restart_timeout": 20.0, "clock_jump": 2.0, "exit_poll": 0.25}
    )
)

RELAYS = 2
ACCOUNTS = 200
"""SSH accounts, one for each server that could be needed."""

OPENAI_SHARE = 0.25
"""Of the rollouts whose agent is the openai SDK."""

HANG = 60.0
"""Seconds without an answer or an end of any rollout after which those that run are said to hang. The longest outage of
a tunnel that is not lost is half of that; how fast all the rest goes is the machine's affair."""


@dataclass(frozen=True)
class Size:
    rollouts: int
    seconds: float
    """How long tunnels are broken; the rollouts arrive over the first four fifths of it."""
    multiplex: int
    pause: float
    """Seconds between the turns of a rollout."""
    every: float
    """Seconds between two faults of a pool."""
    seed: int
    at_once: int
    """Rollouts at a time: a machine that is slow takes longer, and does not choke."""
    turns: tuple[int, int] = (4, 6)
    policy: KeepAlivePolicy = POLICY


@dataclass
class Outcome:
    """How a rollout ended. `error` None: finished."""

    session: RolloutSession
    agent: Agent | None = None
    error: BaseException | None = None
    ended: bool = False

    @property
    def lost(self) -> bool:
        return isinstance(self.error, TunnelError)


@dataclass
class Side:
    """One pool with all that belongs to it."""

    name: str
    pool: ElasticInterceptionPool
    breaker: Breaker
    servers: list[WatchedServer]
    outcomes: list[Outcome] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    history: dict[str, list[str]] = field(default_factory=dict)
    """What each URL's tunnel told, in words."""
    most_servers: int = 0

    def server_of(self, outcome: Outcome) -> WatchedServer | None:
        return next((server for server in self.servers if outcome.session.id in server.seated), None)

    def describe(self, server: WatchedServer) -> str:
        told = "; ".join(self.history.get(server.url, [])[-12:])
        return f"its server {server.url} had the faults {server.faults}, was lost: {server.lost}, and told: {told}"


class Chaos:
    """Runs once. `wrong` and `report` are for afterwards."""

    def __init__(self, size: Size, service: FakePrime, folder: Path) -> None:
        self.size = size
        self.sides: list[Side] = []
        self.took = 0.0
        self._service = service
        self._folder = folder
        self._left_on_relays: list[str] = []
        self._places = asyncio.Semaphore(size.at_once)

    def _rng(self, purpose: str) -> random.Random:
        """So that what one part does changes nothing of what another draws."""
        return random.Random(f"{self.size.seed} {purpose}")

    async def run(self) -> None:
        began = time.monotonic()
        self._began = time.time()
        async with AsyncExitStack() as stack:
            self._http = await stack.enter_async_context(
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar())
            )
            # Without certificates, which take long to load.
            self._openai_http = await stack.enter_async_context(openai.DefaultAsyncHttpxClient(verify=False))
            echo = self._echo = await stack.enter_async_context(EchoModel(chunk_delay=0.1))
            self._upstream = Upstream(base_url=echo.base_url)
            relays = [
                await stack.enter_async_context(Relay(f"relay-{number}", self._folder)) for number in range(RELAYS)
            ]
            ssh, prime = await self._ssh(relays), self._prime()
            self.sides = [ssh, prime]
            for side in self.sides:
                await stack.enter_async_context(side.pool)
            await self._play()
            for side in self.sides:
                await side.pool.stop()
            for server in ssh.servers:
                assert server.relay is not None
                if ports := await server.relay.do("forwards", server.account):
                    self._left_on_relays.append(f"{server.account} still forwards {ports}")
        self.took = time.monotonic() - began

    async def _ssh(self, relays: list[Relay]) -> Side:
        accounts = {
            f"account-{number}": relays[number % len(relays)]
            for number in range(min(ACCOUNTS, 12 + self.size.rollouts))
        }
        keys = {account: await relay.account(account) for account, relay in accounts.items()}
        servers: list[WatchedServer] = []

        def tunnel(account: str) -> SshTunnelConfig:
            return SshTunnelConfig(
                host="127.0.0.1",
                port=accounts[account].port,
                username=account,
                client_keys=(keys[account],),
                known_hosts=accounts[account].known_hosts,
                remote_host="127.0.0.1",
                policy=self.size.policy,
                # As the policy: its own times are 2.5, 180 and 30.
                keepalive_interval=0.5,
                forward_retry=180 * FACTOR,
                start_timeout=15.0,
            )

        def server(_: InterceptionServerConfig) -> WatchedServer:
            account = f"account-{len(servers)}"
            config = InterceptionServerConfig(tunnel=tunnel(account))
            servers.append(WatchedServer(config, accounts[account], account))
            return servers[-1]

        def unused(relay: Relay) -> list[str]:
            return [account for account in list(accounts)[len(servers) :] if accounts[account] is relay]

        config = ElasticInterceptionPoolConfig(multiplex=self.size.multiplex, tunnel=tunnel("account-0"))
        pool = ElasticInterceptionPool(config, requires_tunnel=True, server_factory=server)
        return self._side("ssh", pool, SshBreaker(pool, self._rng("ssh faults"), relays, unused), servers)

    def _prime(self) -> Side:
        servers: list[WatchedServer] = []

        def server(config: InterceptionServerConfig) -> WatchedServer:
            servers.append(WatchedServer(config))
            return servers[-1]

        config = ElasticInterceptionPoolConfig(
            multiplex=self.size.multiplex, tunnel=PrimeTunnelConfig(policy=self.size.policy, connection_timeout=10.0)
        )
        pool = ElasticInterceptionPool(config, requires_tunnel=True, server_factory=server)
        return self._side("prime", pool, PrimeBreaker(pool, self._rng("prime faults"), self._service), servers)

    def _side(self, name: str, pool: ElasticInterceptionPool, breaker: Breaker, servers: list[WatchedServer]) -> Side:
        side = Side(name, pool, breaker, servers)

        def note(event: TunnelEvent) -> None:
            side.events[type(event).__name__] += 1
            what = event.after if isinstance(event, StateChanged) else type(event).__name__
            at = event.at - self._began
            side.history.setdefault(event.url, []).append(f"{at:.1f} s: {what}")

        pool.on_event = note
        return side

    # -- the load ------------------------------------------------------------------------------

    async def _play(self) -> None:
        """All rollouts and all faults."""
        size, rng = self.size, self._rng("load")
        # A tenth comes at once, the others as they come.
        arrivals = sorted(max(0.0, rng.uniform(-0.1, 0.9)) / 0.9 * 0.8 * size.seconds for _ in range(size.rollouts))
        rollouts = [
            asyncio.create_task(
                self._rollout(number, self.sides[number % len(self.sides)], at), name=f"rollout {number}"
            )
            for number, at in enumerate(arrivals)
        ]
        try:
            async with asyncio.TaskGroup() as breaking:
                for side in self.sides:
                    breaking.create_task(side.breaker.run(size.seconds, size.every))
            await self._ended(rollouts)
        finally:
            hanging = [task for task in rollouts if not task.done()]
            self.hanging = [task.get_name() for task in hanging]
            for task in hanging:
                task.cancel()
            # An HTTP client may take a cancellation for its own time-out, and its agent go on.
            await asyncio.wait(rollouts, timeout=10)
        for task in rollouts:
            if task.done() and not task.cancelled():
                task.result()  # a defect of this harness

    async def _ended(self, rollouts: list[asyncio.Task[None]]) -> None:
        """All of them, or all that move."""
        before = None
        while before != (progress := self._progress()):
            before = progress
            _, pending = await asyncio.wait(rollouts, timeout=HANG)
            if not pending:
                return

    def _progress(self) -> tuple[int, int]:
        outcomes = [outcome for _, outcome in self.outcomes]
        answered = sum(len(outcome.agent.answered) for outcome in outcomes if outcome.agent is not None)
        return answered, sum(outcome.ended for outcome in outcomes)

    async def _rollout(self, number: int, side: Side, at: float) -> None:
        rng = self._rng(f"rollout {number}")
        await asyncio.sleep(at)
        async with self._places:
            await self._play_one(number, side, rng)

    async def _play_one(self, number: int, side: Side, rng: random.Random) -> None:
        session = RolloutSession(self._upstream, id=f"rollout-{number}")
        outcome = Outcome(session)
        side.outcomes.append(outcome)
        texts = [
            f"rollout {number} turn {turn} says {rng.getrandbits(64):016x}"
            for turn in range(1, rng.randint(*self.size.turns) + 1)
        ]
        sdk = rng.random() < OPENAI_SHARE
        try:
            async with side.pool.acquire(session) as slot:
                side.most_servers = max(side.most_servers, len(side.pool.servers))
                if sdk:
                    outcome.agent = OpenAiAgent(slot, texts, self.size.pause, rng, http=self._openai_http)
                else:
                    outcome.agent = PlainAgent(slot, texts, self.size.pause, rng, http=self._http)
                await session.guard(outcome.agent.play())
        except asyncio.CancelledError:
            raise  # it hung
        except Exception as error:  # noqa: BLE001 - judged afterwards
            outcome.error = error
        outcome.ended = True

    # -- what has to be true -------------------------------------------------------------------

    @property
    def outcomes(self) -> list[tuple[Side, Outcome]]:
        return [(side, outcome) for side in self.sides for outcome in side.outcomes]

    def wrong(self) -> list[str]:
        """Every promise that was broken, in words."""
        found = [f"hangs: {task}" for task in self.hanging]
        if len(self.outcomes) != self.size.rollouts:
            found.append(f"{len(self.outcomes)} of {self.size.rollouts} rollouts began")
        for side, outcome in self.outcomes:
            name = f"{outcome.session.id} ({side.name})"
            found += [f"{name}: {fault}" for fault in self._wrong_end(side, outcome)]
            if outcome.agent is not None:
                found += [f"{name}: {fault}" for fault in _wrong_record(outcome.session, outcome.agent)]
        for side in self.sides:
            for server in side.servers:
                if server.lost is not None and not server.revoked and "not serving for" not in str(server.lost):
                    found.append(f"{side.name}: {server.url} was lost, and nobody had revoked it: {server.lost}")
                if server.sessions:
                    found.append(f"{side.name}: {server.url} still has {server.load} rollouts")
                if not server.stops:
                    found.append(f"{side.name}: {server.url} was never stopped")
        # Nothing of the model's fails here, so that there is nothing to ask it again for.
        turns = sum(len(outcome.session.trace.turns) for _, outcome in self.outcomes)
        if self._echo.calls > turns:
            found.append(f"{turns} turns took {self._echo.calls} calls of the model")
        return found + self._left_on_relays

    def _wrong_end(self, side: Side, outcome: Outcome) -> list[str]:
        server, agent, error = side.server_of(outcome), outcome.agent, outcome.error
        where = "it has no server" if server is None else side.describe(server)
        if not outcome.ended:
            return [f"did not end; {where}"]
        if error is None:
            assert agent is not None
            return [] if list(agent.answered) == agent.texts else ["finished, but not all its turns were answered"]
        if not outcome.lost:
            kind = "its agent gave up" if isinstance(error, AgentFailedError) else "ended in no TunnelError"
            return [f"{kind}: {type(error).__name__}: {error}; {where}"]
        if server is not None and server.lost is None:
            return [f"its server was not lost: {error}; {where}"]
        return []

    def report(self) -> str:
        """The counts, as a table."""
        lines = [f"chaos: seed {self.size.seed}, {self.size.rollouts} rollouts, {self.size.seconds:g} s of faults"]
        lines[0] += f", {self.took:.0f} s in all"
        for side in self.sides:
            agents = [outcome.agent for outcome in side.outcomes if outcome.agent is not None]
            turns = [turn for outcome in side.outcomes for turn in outcome.session.trace.turns]
            never_seated = sum(outcome.lost and side.server_of(outcome) is None for outcome in side.outcomes)
            lost_servers = [server for server in side.servers if server.lost is not None]
            facts = {
                "rollouts finished": sum(outcome.ended and outcome.error is None for outcome in side.outcomes),
                "rollouts lost with their tunnel": sum(outcome.lost for outcome in side.outcomes) - never_seated,
                "rollouts that got no server": never_seated,
                "turns acknowledged": sum(len(agent.answered) for agent in agents),
                "turns recorded": len(turns),
                "of them recorded as cancelled or failed": sum(not turn.complete for turn in turns),
                "retries of agents": sum(agent.retries for agent in agents),
                "servers made": len(side.servers),
                "servers at a time": side.most_servers,
                "tunnels retired": side.pool.retired,
                "of them revoked": sum(server.revoked for server in lost_servers),
                "restarts": side.events[Restarted.__name__],
                "restarts refused": side.events[RestartFailed.__name__],
                "tunnels said to be gone": side.events[Gone.__name__],
                "faults": sum(side.breaker.counts.values()),
            }
            lines.append(f"  {side.name}")
            lines += [f"    {count:6d}  {what}" for what, count in facts.items()]
            lines += [f"    {count:6d}    {what}" for what, count in sorted(side.breaker.counts.items())]
        return "\n".join(lines)


def _wrong_record(session: RolloutSession, agent: Agent) -> list[str]:
    """What is wrong with the trace of a rollout, its agent having seen what it saw."""
    trace = session.trace
    recorded: dict[str, list[Turn]] = {}
    for turn in trace.turns:
        recorded.setdefault(_said(turn), []).append(turn)
    found = [] if trace.sealed else ["its trace is not sealed"]
    for text, turns in recorded.items():
        if text not in agent.asked:
            found.append(f"its trace has a turn of somebody else's: {text!r}")
        if len(turns) != 1:
            found.append(f"recorded {len(turns)} times: {text!r}")
    for text, call_id in agent.answered.items():
        turns = recorded.get(text, [])
        if not turns:
            found.append(f"acknowledged and not recorded: {text!r}")
        for turn in turns:
            if not turn.complete or not turn.delivered:
                found.append(f"acknowledged, and recorded as {turn!r}, delivered: {turn.delivered}")
            if call_id not in {attempt.call_id for attempt in turn.attempts}:
                found.append(f"acknowledged under a call id that its turn does not have: {text!r}")
            if text not in str(turn.response):
                found.append(f"acknowledged, and recorded with another answer: {turn.response}")
    return found


def _said(turn: Turn) -> str:
    request = turn.request
    messages = request["input"] if turn.dialect == "responses" else request["messages"]
    return str(messages[-1]["content"])
