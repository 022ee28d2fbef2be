"""Stand-ins whose behaviour a test decides: a model endpoint, a tunnel, a pool's server, and a rollout."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import pytest
from aiohttp import web
from multidict import CIMultiDict

from interception import Interception, InterceptionServerConfig, RolloutSession, Slot, Upstream
from tests.helpers import until
from tunnel import KeepAlivePolicy, StateChanged, Tunnel, TunnelError, TunnelGoneError, TunnelState
from tunnel.state import StateName

NOWHERE = Upstream(base_url="http://127.0.0.1:9/v1")  # the discard port: nothing in these tests calls it


async def settle() -> None:
    """Let everything run that can run without I/O: what has not happened after this is waiting for something."""
    for _ in range(20):
        await asyncio.sleep(0)


def other_tasks() -> set["asyncio.Task[Any]"]:
    return asyncio.all_tasks() - {asyncio.current_task()}


@pytest.fixture
async def hangs_are_failures(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """A test that hangs is cancelled, and so fails by name instead of holding up the run. But a start that a test holds
    up is not taken for one that hangs."""
    monkeypatch.setattr("interception.placement.LEAST_PATIENCE", 3600.0)
    loop = asyncio.get_running_loop()
    watchdog = loop.call_later(60, lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
    yield
    watchdog.cancel()


def new_session(upstream: Upstream = NOWHERE, **options: Any) -> RolloutSession:
    return RolloutSession(upstream, **options)


# -- a model endpoint ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """A request as it reached the endpoint."""

    method: str
    path: str
    headers: CIMultiDict[str]
    body: bytes


class ScriptedModel:
    """A model endpoint that answers with `answer`; `open` counts the requests whose connection is still there."""

    def __init__(self, answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> None:
        self._answer = answer
        self.seen: list[Seen] = []
        self.open = 0

    @property
    def upstream(self) -> Upstream:
        return Upstream(base_url=self.base_url)

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        # Cancelled with its connection, so that a hung answer shows that the caller went away.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024).start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.open += 1
        try:
            body = await request.read()
            self.seen.append(Seen(request.method, request.raw_path, CIMultiDict(request.headers), body))
            return await self._answer(request)
        finally:
            self.open -= 1


async def hang(request: web.Request) -> web.StreamResponse:
    """Never answers."""
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def answering(
    status: int = 200, body: bytes = b'{"id": "a"}', headers: dict[str, str] | None = None
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=body, headers={"Content-Type": "application/json", **(headers or {})})

    return answer


# -- a tunnel --------------------------------------------------------------------------------------


class _Client:
    is_running = True

    def __init__(self, url: str) -> None:
        self.url: str | None = url

    async def restart(self) -> str:
        raise TunnelError("this stand-in is never restarted")


class FakeTunnel(Tunnel):
    """A tunnel whose public URL is the local server itself, and whose fate a test decides."""

    def __init__(self, *, error: Exception | None = None, held: bool = False) -> None:
        super().__init__(KeepAlivePolicy())
        self.may_connect = asyncio.Event()
        if not held:
            self.may_connect.set()
        self.error = error
        self.connecting = False
        self.connected = False
        self.disconnects = 0
        self._fate: asyncio.Future[TunnelGoneError] | None = None

    def set_state(self, name: StateName, reason: str = "because the test says so") -> None:
        after = TunnelState(name, reason)
        self._noted(StateChanged(url=self.url or "", at=0.0, before=self.state, after=after))

    async def set_gone(self, reason: str = "the registration was refused as gone") -> TunnelGoneError:
        """Returns once everybody has been told."""
        error = TunnelGoneError(reason)
        assert self._fate is not None
        self._fate.set_result(error)
        await until(lambda: self.gone is error)
        return error

    async def _connect(self, port: int) -> _Client:
        self.connecting = True
        try:
            await self.may_connect.wait()
        finally:
            self.connecting = False
        if self.error is not None:
            raise self.error
        self.connected = True
        self._fate = asyncio.get_running_loop().create_future()
        return _Client(f"http://127.0.0.1:{port}")

    async def _disconnect(self) -> None:
        self.connected = False
        self.disconnects += 1

    async def _keep(self, client: Any, local_url: str) -> None:
        assert self._fate is not None
        raise await self._fate


class FakeTunnels:
    """Takes the place of `make_tunnel`. `script` holds the next tunnels; after those come tunnels without a fault."""

    def __init__(self) -> None:
        self.script: list[FakeTunnel] = []
        self.made: list[FakeTunnel] = []

    def __call__(self, config: object) -> FakeTunnel:
        tunnel = self.script.pop(0) if self.script else FakeTunnel()
        self.made.append(tunnel)
        return tunnel

    @property
    def connected(self) -> int:
        return sum(tunnel.connected for tunnel in self.made)


# -- a pool's server -------------------------------------------------------------------------------


class FakeMember:
    """A server of another framework: it keeps to `PoolMember` and to nothing else."""

    def __init__(
        self, name: str = "fake", *, error: Exception | None = None, held: bool = False, stop_held: bool = False
    ) -> None:
        self.on_change: Callable[[], None] | None = None
        self.base_url = f"http://{name}"
        self.healthy = True
        self.serving = True
        self.error = error
        self.may_start, self.may_stop = asyncio.Event(), asyncio.Event()
        if not held:
            self.may_start.set()
        if not stop_held:
            self.may_stop.set()
        self.starts = 0
        self.stops = 0
        self.running = False
        self.stopped_by: asyncio.Task[Any] | None = None
        self.peak = 0
        self.sessions: dict[tuple[str, str], RolloutSession] = {}

    @property
    def load(self) -> int:
        return len(self.sessions)

    async def start(self) -> None:
        self.starts += 1
        await self.may_start.wait()
        if self.error is not None:
            raise self.error
        self.running = True

    async def stop(self) -> None:
        self.stops += 1
        self.stopped_by = asyncio.current_task()
        await self.may_stop.wait()
        self.running = False

    def register(self, session: RolloutSession) -> tuple[str, str]:
        if not self.healthy:
            raise TunnelError("lost")
        pair = f"model of {session.id}", f"state of {session.id}"
        assert pair not in self.sessions
        self.sessions[pair] = session
        self.peak = max(self.peak, self.load)
        return pair

    def unregister(self, model_secret: str, state_secret: str) -> None:
        self.sessions.pop((model_secret, state_secret), None)

    def set_serving(self, serving: bool) -> None:
        self.serving = serving
        self._changed()

    def set_gone(self, reason: str = "refused as gone") -> None:
        self.healthy = self.serving = False
        gone = TunnelGoneError(reason)
        for session in self.sessions.values():
            error = TunnelError(f"the tunnel was lost: {reason}")
            error.__cause__ = gone
            session.fail(error)
            session.release("the tunnel was lost")
        self._changed()

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()


class FakeMembers:
    """A `server_factory`. `script` holds the next servers; after those come servers without a fault."""

    def __init__(self, *script: FakeMember) -> None:
        self.script = list(script)
        self.made: list[FakeMember] = []
        self.configs: list[InterceptionServerConfig] = []

    def __call__(self, config: InterceptionServerConfig) -> FakeMember:
        member = self.script.pop(0) if self.script else FakeMember()
        member.base_url = f"http://server-{len(self.made)}"
        self.made.append(member)
        self.configs.append(config)
        return member

    def __iter__(self) -> Iterator[FakeMember]:
        return iter(self.made)

    @property
    def loads(self) -> list[int]:
        return [member.load for member in self.made]

    @property
    def running(self) -> int:
        return sum(member.running for member in self.made)


# -- a rollout -------------------------------------------------------------------------------------


class Rollout:
    """Acquires a slot in a task of its own and holds it until told to leave, or to fail."""

    def __init__(self, interception: Interception, session: RolloutSession | None = None) -> None:
        self.session = session or new_session()
        self.slot: Slot | None = None
        self._told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._run(interception), name=f"rollout {self.session.id}")

    async def _run(self, interception: Interception) -> None:
        async with interception.acquire(self.session) as slot:
            self.slot = slot
            await self._told

    @property
    def seated(self) -> bool:
        return self.slot is not None

    def tell(self, error: Exception | None = None) -> None:
        if error is None:
            self._told.set_result(None)
        else:
            self._told.set_exception(error)

    async def leave(self, error: Exception | None = None) -> None:
        """Returns, or raises, as the rollout's `async with` does."""
        self.tell(error)
        await self.task


async def seated(*rollouts: Rollout) -> None:
    await until(lambda: all(rollout.seated for rollout in rollouts))
