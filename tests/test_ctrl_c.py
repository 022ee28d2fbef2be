"""Ctrl-C is pressed twice by everybody. Under `asyncio.run` the second one cancels every task there is."""

import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.prime import FakePrime

PROGRAM = """
import asyncio
from interception import ElasticInterceptionPool, ElasticInterceptionPoolConfig
from tunnel import PrimeTunnelConfig

async def main():
    print("starting", flush=True)
    async with ElasticInterceptionPool(ElasticInterceptionPoolConfig(tunnel=PrimeTunnelConfig()), True):
        print("started", flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""


def wait_for(condition: Callable[[], object], deadline: float = 30.0) -> None:
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, "did not become true"
        time.sleep(0.005)


@pytest.mark.parametrize("while_creating", [True, False], ids=["while the tunnel is created", "while it serves"])
def test_twice_leaves_no_registration_no_frpc_and_no_token(tmp_path: Path, while_creating: bool) -> None:
    with FakePrime(tmp_path, scale=0.1) as service:
        if while_creating:
            service.after_delay["POST"] = 1.0
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, **service.env()},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert program.stdout is not None
        for line in program.stdout:
            if line.strip() == ("starting" if while_creating else "started"):
                break
        wait_for(lambda: service.created)
        program.send_signal(signal.SIGINT)
        program.send_signal(signal.SIGINT)
        program.wait(timeout=60)
        assert service.live() == []
        assert service.frpc_pids() == []
        assert service.config_files() == []


def test_a_program_that_just_ends_leaves_neither_frpc_nor_token(tmp_path: Path) -> None:
    code = PROGRAM.replace("async with ElasticInterceptionPool(", "await ElasticInterceptionPool(").replace(
        "), True):", "), True).start()"
    )
    code = code.replace("        print(", "    print(").replace("        await asyncio.sleep(3600)", "    return")
    with FakePrime(tmp_path, scale=0.1) as service:
        program = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **service.env()},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "started" in program.stdout, program.stderr
        assert service.created
        assert service.live() == []
        assert service.frpc_pids() == []
        assert service.config_files() == []


@pytest.mark.parametrize("handler", ["default_int_handler", "SIG_IGN"])
def test_while_the_command_line_is_imported_it_ends_the_program_without_a_word(tmp_path: Path, handler: str) -> None:
    # The first thing that the package imports of others presses Ctrl-C, and ends the program if that does not.
    (tmp_path / "aiohttp.py").write_text("import os, signal, sys\nos.kill(os.getpid(), signal.SIGINT)\nsys.exit(7)")
    code = f"import signal; signal.signal(signal.SIGINT, signal.{handler})\nimport interception_cli as cli; cli.main()"
    program = subprocess.run(
        [sys.executable, "-c", code, "demo"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])},
        capture_output=True,
        timeout=60,
    )
    assert (program.stdout, program.stderr) == (b"", b"")
    assert program.returncode == (-signal.SIGINT if handler == "default_int_handler" else 7)


def test_the_installed_program_begins_there() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert project["project"]["scripts"]["interception"] == "interception_cli:main"
    assert "interception_cli.py" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
