"""With and without `install()`: the same rewards, turns and traces."""

from pathlib import Path
from typing import Any

import pytest

from interception.integrations.verifiers import installed
from tests.verifiers.evals import Endpoint, config, outcome, traces

# An interpreter with the openai and mcp packages costs seconds of CPU for each rollout, so there are few of them.
CASES: dict[str, dict[str, Any]] = {
    "null": {"taskset": {"id": "echo_words", "tasks": 2}, "harness": "null"},
    "bash, with a command": {
        "taskset": {"id": "echo_words", "tasks": 2, "prompt": '!call bash {"command": "echo {word}"}'},
        "harness": "bash",
    },
    "null, with a tool server": {"taskset": {"id": "echo_stamp", "tasks": 1}, "harness": "null"},
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
