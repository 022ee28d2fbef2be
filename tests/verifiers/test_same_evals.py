"""With and without `install()`: the same rewards, turns and traces, here and through tunnels."""

from pathlib import Path
from typing import Any

import pytest

from interception.demo.relay_process import RelayProcess
from interception.integrations.verifiers import Options, installed
from tests.prime import FakePrime
from tests.verifiers.evals import Endpoint, config, outcome, traces
from tests.verifiers.test_faults import PRIME, ssh

STAMP = {"id": "echo_stamp", "tasks": 1}

# An interpreter with the openai and mcp packages costs seconds of CPU for each rollout, so there are few of them.
CASES: dict[str, dict[str, Any]] = {
    "null": {"taskset": {"id": "echo_words", "tasks": 2}, "harness": "null"},
    "bash, with a command": {
        "taskset": {"id": "echo_words", "tasks": 2, "prompt": '!call bash {"command": "echo {word}"}'},
        "harness": "bash",
    },
    "null, with a tool server": {"taskset": STAMP, "harness": "null"},
    "in process, static pool": {
        "taskset": "echo_words",
        "harness": "quick_harness",
        "interception": {"type": "static", "servers": [{}, {}]},
    },
    "in process, one server": {"taskset": "echo_words", "harness": "quick_harness", "interception": {"type": "server"}},
}


GATE = ("in process, static pool", "in process, one server")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=[pytest.mark.gate] if name in GATE else []) for name, case in CASES.items()],
)
async def test_the_same_rewards_turns_and_traces(case: dict[str, Any], endpoint: Endpoint, tmp_path: Path) -> None:
    stock = [outcome(trace) for trace in await traces(config(endpoint, tmp_path / "stock", **case))]
    with installed():
        ours = [outcome(trace) for trace in await traces(config(endpoint, tmp_path / "ours", **case))]
    assert ours == stock
    assert all(trace["ok"] and trace["reward"] == 1.0 and trace["turns"] >= 1 for trace in ours)


REMOTE: dict[str, dict[str, Any]] = {
    "in process": {"taskset": "echo_words", "harness": "quick_harness"},
    "bash, with a command": {
        "taskset": {"id": "echo_words", "tasks": 1, "prompt": '!call bash {"command": "echo {word}"}'},
        "harness": "bash",
    },
    "null, with a tool server": {"taskset": STAMP, "harness": "null"},
}


@pytest.mark.usefixtures("remote")
@pytest.mark.parametrize("case", REMOTE.values(), ids=REMOTE)
async def test_the_same_through_tunnels(
    case: dict[str, Any], service: FakePrime, relay: RelayProcess, endpoint: Endpoint, tmp_path: Path
) -> None:
    """verifiers' own through the stand-in of Prime's service, ours through that and over SSH."""

    async def outcomes(folder: str) -> list[dict[str, Any]]:
        eval_config = config(endpoint, tmp_path / folder, runtime="prime", **case)
        return [outcome(trace) for trace in await traces(eval_config)]

    stock = await outcomes("stock")
    tunnels = len(service.created)
    assert tunnels == (2 if case["taskset"] == STAMP else 1)
    with installed(PRIME):
        ours = await outcomes("ours")
    assert len(service.created) == 2 * tunnels
    with installed(Options(tunnel=await ssh(relay, "one"))):
        over_ssh = await outcomes("over ssh")
    assert len(service.created) == 2 * tunnels
    assert ours == over_ssh == stock
    assert all(trace["ok"] and trace["reward"] == 1.0 and trace["turns"] >= 1 for trace in stock)
