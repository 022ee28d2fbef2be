"""The README's examples run as they stand."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import interception.cli
from interception.settings import Settings
from tests.prime import FakePrime
from tunnel import CommandTunnelConfig, SshTunnelConfig

README = Path(__file__).parents[1] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


EXAMPLES = blocks("python")
COMMANDS = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("interception ")]


def test_the_first_example_is_the_short_one() -> None:
    code = [line for line in EXAMPLES[0].splitlines() if line.strip()]
    assert len(code) <= 14


@pytest.mark.parametrize("code", EXAMPLES, ids=range(1, len(EXAMPLES) + 1))
def test_example_runs(code: str, tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text(code)
    with FakePrime(tmp_path / "home", scale=0.1) as service:
        ran = subprocess.run(
            [sys.executable, "-X", "dev", str(file)],
            env={**os.environ, **service.env()},
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
        )
        left = service.live(), service.frpc_pids(), service.config_files()
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip(), "an example shows something"
    assert "Traceback" not in ran.stderr
    assert left == ([], [], [])


@pytest.mark.parametrize("line", COMMANDS)
def test_command_line_is_one(line: str) -> None:
    """It is parsed, tunnels and all, and not run."""
    name, *arguments = shlex.split(line, comments=True)[1:]
    group: Any = typer.main.get_command(interception.cli.app)
    command = group.commands[name]
    with command.make_context(name, arguments) as context:
        for option in ("tunnel", "kind"):
            value = context.params.get(option)
            if isinstance(value, str) and value != "ssh":
                Settings({}, "", {}).tunnel(value, context.params.get("set_") or ())


def test_the_settings_are_settings(tmp_path: Path) -> None:
    text = blocks("toml")[0]  # the others are of programs that are not ours
    file = tmp_path / "interception.toml"
    file.write_text(text)
    group: Any = typer.main.get_command(interception.cli.app)
    options = {
        name: [option.opts[-1].lstrip("-") for option in command.params] for name, command in group.commands.items()
    }
    settings = Settings.load(file, options, {})
    ssh, command = settings.tunnel("ssh"), settings.tunnel("command")
    assert isinstance(ssh, SshTunnelConfig)
    assert (ssh.remote_port, ssh.policy.give_up_after) == (18080, 300.0)
    assert isinstance(command, CommandTunnelConfig)
    assert settings.options("tunnel") == {"type": "ssh", "health": "/healthz"}
