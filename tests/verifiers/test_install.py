"""`install()`, `make_interception` and the errors of both."""

import importlib
import pickle
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
from interception.integrations.verifiers.installation import current
from tests.verifiers.evals import Endpoint, config
from tunnel import CustomTunnelConfig, SshTunnelConfig

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
    found = {
        f"{module}.{name}": getattr(importlib.import_module(module), name)
        for module, each in names.items()
        for name in each
    }
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
    with pytest.raises(RuntimeError, match=r"with another grace: uninstall\(\) first"):
        install(Options(grace=9))
    uninstall()
    uninstall()
    assert looked_up() == before


def test_blocks_that_overlap_in_threads_are_one_installation_until_the_last_is_left() -> None:
    before, seen = looked_up(), []
    all_in, one_is_out = threading.Barrier(8, timeout=60), threading.Event()

    def block(number: int) -> None:
        all_in.wait()
        with installed() as installation:
            seen.append(installation)
            all_in.wait()
            if number:
                one_is_out.wait(60)
        if not number:
            seen.append(looked_up() != before)
            one_is_out.set()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(block, range(8)))
    assert seen.pop(8) is True, "the first to leave leaves it to the others"
    assert len(set(map(id, seen))) == 1
    assert looked_up() == before


def test_a_block_undoes_neither_what_was_installed_to_stay_nor_what_came_after_it() -> None:
    before = looked_up()
    with installed():
        install()
    assert looked_up() != before
    uninstall()
    with installed():
        uninstall()
        assert looked_up() == before
        later = install(Options(grace=9))
    assert current() is later


def test_another_shape_of_verifiers_is_a_clear_error_and_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def turn(self: object, prompt: str) -> None: ...

    monkeypatch.setattr(vf.HarnessSession, "turn", turn)
    monkeypatch.delattr(sys.modules["verifiers.v1.rollout"], "serve_tools")
    monkeypatch.setitem(sys.modules, "verifiers.v1.serve.pool", None)
    before = their_interception.make_interception
    with pytest.raises(ImportError, match=r"verifiers 0\.4\.\d.*turn takes no messages") as error:
        install()
    assert "verifiers.v1.rollout has no serve_tools" in str(error.value)
    assert "verifiers.v1.serve.pool cannot be imported" in str(error.value)
    assert "there is no verifiers.v1.serve.pool:serve_env" in str(error.value)
    assert their_interception.make_interception is before


def test_options_travel_and_say_what_cannot_be() -> None:
    options = Options(tunnel=SshTunnelConfig(host="relay"), grace=1)
    assert pickle.loads(pickle.dumps(options)) == options
    with pytest.raises(ValueError, match="static pool"):
        Options(tunnel=CustomTunnelConfig(url="http://host", port=1))
    with pytest.raises(ValueError, match="grace"):
        Options(grace=-1)
    with pytest.raises(TypeError, match="grace"):
        Options(grace="2")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"tunnel must be .* not builtins\.dict"):
        Options(tunnel={"type": "ssh", "host": "relay"})  # type: ignore[arg-type]
    theirs: Any = their_interception.ElasticInterceptionPoolConfig()
    with pytest.raises(TypeError, match=r"interception must be .* not verifiers\.v1"):
        Options(interception=theirs)


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


async def test_a_pool_that_cannot_start_says_so_in_verifiers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setattr(Path, "home", lambda: Path("/nonexistent"))
    config = their_interception.StaticInterceptionPoolConfig.model_validate({"servers": [{}]})
    with pytest.raises(vf.TunnelError):
        async with make_interception(config, requires_tunnel=True):
            pass
