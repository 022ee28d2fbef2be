"""The README's lines for verifiers do what they say."""

import json
import re
import shlex
import textwrap
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import verifiers.v1.interception as their_interception
from verifiers.v1.configs.retries import RetryConfig
from verifiers.v1.errors import TunnelError
from verifiers.v1.trace import Error
from verifiers.v1.utils.retries import RetryState

from interception.integrations.verifiers import uninstall
from interception.integrations.verifiers.options import options_from_json
from interception.integrations.verifiers.worker import FACTORY
from tunnel import SshTunnelConfig

pytestmark = pytest.mark.gate

README = (Path(__file__).parents[2] / "README.md").read_text()
[CHANGE] = re.findall(r"^```python verifiers\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
[CONFIG] = re.findall(r"^```toml\n(\[\[env\.agent.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_change_is_three_lines_and_installs() -> None:
    lines = [line for line in CHANGE.splitlines() if line.strip()]
    assert len(lines) == 3
    stock, seen = their_interception.make_interception, []
    exec(textwrap.dedent(CHANGE), {"run_my_eval": lambda: seen.append(their_interception.make_interception)})
    assert seen != [stock]
    assert their_interception.make_interception is stock


def test_the_command_is_vf_eval_with_ours_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    [line] = re.findall(r'^python -c "(.*?)" my-taskset', README, re.MULTILINE | re.DOTALL)
    [command] = entry_points(group="console_scripts", name="vf-eval")
    stock, seen = their_interception.make_interception, []
    command.load()
    monkeypatch.setattr(f"{command.module}.{command.attr}", lambda: seen.append(their_interception.make_interception))
    try:
        exec(line, {})
    finally:
        uninstall()
    assert len(seen) == 1
    assert seen != [stock]


def test_three_lines_of_config_are_verifiers_own_and_match_the_error() -> None:
    assert len(CONFIG.splitlines()) == 3
    rules = tomllib.loads(CONFIG)["env"]["agent"]["retries"]
    state = RetryState(RetryConfig.model_validate(rules))
    lost = Error(type=TunnelError.__name__, message="the tunnel was lost")
    assert state.next_error([lost]) is lost
    assert state.next_error([Error(type="HarnessError", message="")]) is None


def test_the_command_serves_by_our_factory_and_its_options_are_options() -> None:
    [line] = re.findall(r"^python -m envserver serve interception.*\\\n.*$", README, re.MULTILINE)
    *_, name, workers, count, kwargs, given = shlex.split(line.replace("\\\n", ""))
    assert (name, workers, count, kwargs) == (FACTORY, "--workers", "4", "--kwargs")
    arguments = json.loads(given)
    assert options_from_json(arguments["options"]).tunnel == SshTunnelConfig(host="relay")
    assert arguments["config"] == {"taskset": {"id": "my-taskset"}}
