"""Real evals of verifiers in this process, over a mock of the endpoint that can hold its answers."""

import asyncio
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp import web
from verifiers.v1 import AgentInfo, State
from verifiers.v1.cli.eval.runner import run_eval
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.cli.eval import EvalConfig
from verifiers.v1.runtimes import SubprocessConfig, SubprocessRuntime
from verifiers.v1.session import RolloutSession
from verifiers.v1.trace import Trace, TraceTask
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_taskset

from interception.echo import EchoModel


class RemoteSubprocess(SubprocessRuntime):
    """A runtime on this host that pretends to be remote: whoever runs in it must come through a tunnel."""

    is_local = False

    def __init__(self, config: Any, name: str | None = None) -> None:
        super().__init__(SubprocessConfig(), name)


class Endpoint:
    """An OpenAI-compatible endpoint: the echo model, with a gate in front that a test may close."""

    async def __aenter__(self) -> Self:
        self.open = asyncio.Event()
        self.open.set()
        self.held = 0
        """Calls that wait at the gate."""
        self.calls = 0
        self._model = EchoModel()
        await self._model.start()
        self._client = aiohttp.ClientSession()
        app = web.Application(client_max_size=1024**3)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()
        await self._client.close()
        await self._model.stop()

    async def _pass(self, request: web.Request) -> web.Response:
        body = await request.read()
        if request.method == "POST":
            self.calls += 1
            self.held += 1
            try:
                await self.open.wait()
            finally:
                self.held -= 1
        url = self._model.base_url.removesuffix("/v1") + request.path
        headers = {"Content-Type": request.headers.get("Content-Type", "application/json")}
        async with self._client.request(request.method, url, data=body, headers=headers) as answer:
            return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)


def config(endpoint: Endpoint, folder: Path, taskset: dict[str, Any] | str, **changes: Any) -> EvalConfig:
    """The smallest eval; `harness`, `runtime`, `timeout` (seconds for the harness), `interception` and `retries` go
    where verifiers wants them, the rest is the eval's own."""
    harness = changes.pop("harness", "null")
    agent: dict[str, Any] = {
        "harness": {"id": harness} if isinstance(harness, str) else harness,
        "runtime": {"type": changes.pop("runtime", "subprocess")},
        "timeout": {"rollout": changes.pop("timeout", 120)},
        "retries": changes.pop("retries", {}),
    }
    env = {"taskset": {"id": taskset} if isinstance(taskset, str) else taskset, "agent": agent}
    if "interception" in changes:
        env["interception"] = changes.pop("interception")
    return EvalConfig(
        env=env,
        model="echo",
        client={"base_url": endpoint.base_url, "api_key_var": "MOCK_KEY"},
        rich=None,
        push=False,
        output_dir=folder,
        **changes,
    )


def session_of(config: EvalConfig) -> RolloutSession:
    """What a rollout of the config's first task registers."""
    task = next(iter(load_taskset(config.env.taskset)))
    return RolloutSession(
        ctx=ModelContext(model="echo", client=config.client, sampling=SamplingConfig()),
        trace=Trace(
            task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            state=State(),
            agent=AgentInfo(config=AgentConfig()),
        ),
    )


async def traces(config: EvalConfig) -> list[Trace]:
    """Run the eval; its traces, by task."""
    episodes = await run_eval(config)
    found = [trace for episode in episodes for trace in episode.traces]
    return sorted(found, key=lambda trace: str(trace.task.data.name))


def outcome(trace: Trace) -> dict[str, Any]:
    """What of a trace must be the same in another run of the same task."""
    return {
        "task": trace.task.data.name,
        "ok": trace.ok,
        "reward": trace.reward,
        "turns": trace.num_turns,
        "stop": trace.stop_condition,
        "errors": [(error.type, error.message) for error in trace.errors],
        "messages": [(node.message.role, str(node.message.content)) for node in trace.nodes],
        "calls": [(call.model, call.endpoint, call.finish_reason, call.error) for call in trace.calls],
        "metrics": trace.metrics,
    }
