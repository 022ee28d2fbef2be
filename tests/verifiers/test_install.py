"""`install()`, `make_interception` and the errors of both."""

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import verifiers.v1 as vf
import verifiers.v1.interception as their_interception
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.utils.loaders import load_taskset

import interception
from interception.integrations.verifiers import (
    ElasticInterceptionPool,
    InterceptionServer,
    Options,
    StaticInterceptionPool,
    install,
    installed,
    make_interception,
    uninstall,
)
from tests.verifiers.evals import Endpoint, config, session_of
from tunnel import HEALTH_PATH, IDENTITY_HEADER, CustomTunnelConfig, SshTunnelConfig

pytestmark = pytest.mark.gate


@pytest.fixture(autouse=True)
def _nothing_stays_installed() -> Iterator[None]:
    yield
    uninstall()


def looked_up() -> dict[str, Any]:
    """All that is replaced, as verifiers finds it."""
    names = {
        "verifiers.v1.interception": ("make_interception", "InterceptionServer"),
        "verifiers.v1.env": ("make_interception",),
        "verifiers.v1.agent": ("InterceptionServer",),
        "verifiers.v1.mcp.launch": ("PrimeTunnel", "serve_tools"),
        "verifiers.v1.mcp": ("serve_tools",),
        "verifiers.v1.rollout": ("serve_tools",),
        "verifiers.v1.serve": ("serve_env",),
        "verifiers.v1.serve.pool": ("serve_env",),
    }
    found = {f"{module}.{name}": getattr(sys.modules[module], name) for module, each in names.items() for name in each}
    found["verifiers.v1.harness.HarnessSession.turn"] = vf.HarnessSession.turn
    found["verifiers.v1.runtimes.subprocess.SubprocessRuntime.run_background"] = sys.modules[
        "verifiers.v1.runtimes.subprocess"
    ].SubprocessRuntime.run_background
    return found


def test_each_place_is_replaced_named_and_given_back() -> None:
    before = looked_up()
    with installed() as installation:
        during = looked_up()
        assert set(installation.patched) == set(before)
        assert not [name for name in before if during[name] is before[name]]
    assert looked_up() == before


def test_a_module_that_imported_a_name_before_or_during_the_installation_is_served_too() -> None:
    early, late = ModuleType("early_user"), ModuleType("late_user")
    sys.modules |= {"early_user": early, "late_user": late}
    try:
        stock = their_interception.make_interception
        early.make_interception = stock  # type: ignore[attr-defined]
        install()
        late.make_interception = their_interception.make_interception  # type: ignore[attr-defined]
        assert early.make_interception is late.make_interception is not stock
        uninstall()
        assert early.make_interception is late.make_interception is stock
    finally:
        del sys.modules["early_user"], sys.modules["late_user"]


def test_installing_twice_is_once_and_other_options_are_refused() -> None:
    before = looked_up()
    first = install()
    assert install() is first
    with installed():
        pass
    assert looked_up() != before, "the inner one was no installation of its own"
    with pytest.raises(RuntimeError, match="uninstall"):
        install(Options(grace=9))
    uninstall()
    uninstall()
    assert looked_up() == before


def test_another_shape_of_verifiers_is_a_clear_error_and_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def turn(self: object, prompt: str) -> None: ...

    monkeypatch.setattr(vf.HarnessSession, "turn", turn)
    monkeypatch.delattr(sys.modules["verifiers.v1.rollout"], "serve_tools")
    before = their_interception.make_interception
    with pytest.raises(ImportError, match=r"verifiers 0\.4\.\d.*turn takes no messages.*rollout has no serve_tools"):
        install()
    assert their_interception.make_interception is before


def test_options_travel_and_say_what_cannot_be() -> None:
    options = Options(tunnel=SshTunnelConfig(host="relay"), grace=1)
    assert pickle.loads(pickle.dumps(options)) == options
    with pytest.raises(ValueError, match="static pool"):
        Options(tunnel=CustomTunnelConfig(url="http://host", port=1))
    with pytest.raises(ValueError, match="grace"):
        Options(grace=-1)


def test_verifiers_configs_select_ours() -> None:
    custom = {"type": "custom", "url": "http://host:8000/", "port": 8000}
    ssh = SshTunnelConfig(host="relay")

    server = make_interception(
        their_interception.InterceptionServerConfig.model_validate({"tunnel": custom}), requires_tunnel=True
    )
    assert isinstance(server, InterceptionServer)
    assert server.tunnel is not None
    assert (server.tunnel.bind_port, server.tunnel.bind_host) == (8000, "0.0.0.0")
    assert server.config.tunnel.type == "custom"

    static = make_interception(
        their_interception.StaticInterceptionPoolConfig.model_validate({"servers": [{"tunnel": custom}, {}]}),
        requires_tunnel=True,
        options=Options(tunnel=ssh),
    )
    assert isinstance(static, StaticInterceptionPool)
    assert [server.tunnel.type for server in static.pool.config.servers] == ["custom", "ssh"]  # type: ignore[attr-defined]

    elastic = make_interception(their_interception.ElasticInterceptionPoolConfig(multiplex=3), requires_tunnel=False)
    assert isinstance(elastic, ElasticInterceptionPool)
    assert elastic.pool.config.multiplex == 3  # type: ignore[attr-defined]

    ours = interception.ElasticInterceptionPoolConfig(tunnel=ssh, multiplex=5, max_servers=2)
    for pool in (
        make_interception(ours, requires_tunnel=True),
        make_interception(requires_tunnel=True, options=Options(interception=ours)),
    ):
        assert isinstance(pool, ElasticInterceptionPool)
        assert pool.pool.config == ours  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="neither"):
        make_interception("elastic", requires_tunnel=False)  # type: ignore[arg-type]


async def test_make_agent_runs_on_our_pool_without_any_installation(endpoint: Endpoint, tmp_path: Path) -> None:
    eval_config = config(endpoint, tmp_path, "echo_words")
    agent_config = AgentConfig.model_validate(
        {
            "harness": {"id": "quick_harness"},
            "runtime": {"type": "subprocess"},
            "model": "echo",
            "client": eval_config.client,
        }
    )
    [task, *_] = list(load_taskset(eval_config.env.taskset))
    async with make_interception(requires_tunnel=False) as pool:
        trace = await vf.make_agent(agent_config, interception=pool).run(task)
        assert isinstance(pool, ElasticInterceptionPool)
        assert pool.stats().acquired == 1
        assert pool.stats().in_use == 0
    assert trace.ok
    assert trace.num_turns == 2
    assert trace.reward == 1.0


async def test_a_server_keeps_the_form_that_verifiers_reads(endpoint: Endpoint, tmp_path: Path) -> None:
    import aiohttp

    session = session_of(config(endpoint, tmp_path, "echo_words"))
    server = InterceptionServer(None, False, ("shared",))
    async with server, server.acquire(session) as slot:
        base_url, model_secret, state_secret = slot
        assert type(slot) is tuple
        assert base_url == server.base_url == f"http://127.0.0.1:{server.port}"
        assert server.sessions == {model_secret: session}
        assert server.state_sessions == {state_secret: session}
        assert server.state_routes == {session.trace.id: session}
        assert len(server.clients) == server.load == 1
        assert server.state_service_secrets == frozenset({"shared"})
        assert server.healthy
        assert server.serving
        async with aiohttp.ClientSession() as client, client.get(base_url + HEALTH_PATH) as health:
            assert (health.status, await health.text()) == (200, "ok")
            assert health.headers[IDENTITY_HEADER] == server.identity
        await server.start()  # idempotent
    assert server.load == 0
    assert session.released
    await server.stop()


async def test_a_version_that_moved_the_seam_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from interception.integrations.verifiers.server import Stock

    async def start(self: Any) -> None: ...

    monkeypatch.setattr(Stock, "start", start)
    with pytest.raises(RuntimeError, match="health route"):
        await InterceptionServer().start()


async def test_a_pool_that_cannot_start_says_so_in_verifiers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setattr(Path, "home", lambda: Path("/nonexistent"))
    config = their_interception.StaticInterceptionPoolConfig.model_validate({"servers": [{}]})
    with pytest.raises(vf.TunnelError):
        async with make_interception(config, requires_tunnel=True):
            pass
