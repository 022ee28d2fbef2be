"""What `import tunnel, interception` costs and offers, in an interpreter of its own."""

import json
import subprocess
import sys
from types import ModuleType

import pytest

import envserver
import interception
import interception.tools
import tunnel

ON_DEMAND = {"CommandTunnel": "tunnel.command", "PrimeTunnel": "tunnel.prime", "SshTunnel": "tunnel.ssh"}


def run(code: str) -> object:
    """What `code` leaves in `result`, in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport json; print(json.dumps(result))"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_both_packages_loads_no_library_that_only_some_need() -> None:
    loaded = run("import sys, tunnel, interception; result = sorted({name.partition('.')[0] for name in sys.modules})")
    assert isinstance(loaded, list)
    assert {"tunnel", "interception"} <= set(loaded)
    assert not {"asyncssh", "typer", "rich", "stamina", "mcp", "uvicorn"} & set(loaded)
    assert not {"zmq", "pyrate_limiter", "filelock", "psutil", "prometheus_client"} & set(loaded)


def test_importing_the_env_server_loads_neither_the_others_nor_what_the_command_line_needs() -> None:
    loaded = run("import sys, envserver; result = sorted({name.partition('.')[0] for name in sys.modules})")
    assert isinstance(loaded, list)
    assert not {"tunnel", "interception", "aiohttp", "typer", "rich", "psutil", "prometheus_client"} & set(loaded)


def test_tools_are_loaded_without_the_mcp_sdk_until_a_server_is_made() -> None:
    loaded = run("import sys, interception.tools; result = sorted({name.partition('.')[0] for name in sys.modules})")
    assert isinstance(loaded, list)
    assert not {"mcp", "uvicorn", "starlette", "httpx2"} & set(loaded)


PACKAGES = [tunnel, interception, interception.tools, envserver]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_is_there(package: ModuleType) -> None:
    missing = run(
        f"import {package.__name__} as package\n"
        "result = [name for name in package.__all__ if not hasattr(package, name)]"
    )
    assert missing == []
    assert len(set(package.__all__)) == len(package.__all__)


@pytest.mark.parametrize(("name", "module"), ON_DEMAND.items())
def test_a_tunnel_is_loaded_when_it_is_asked_for(name: str, module: str) -> None:
    loaded = run(
        f"import sys, tunnel\nbefore = '{module}' in sys.modules\ntunnel.{name}\n"
        f"result = [before, '{module}' in sys.modules]"
    )
    assert loaded == [False, True]


@pytest.mark.parametrize("package", [tunnel, interception, envserver], ids=lambda package: package.__name__)
def test_a_name_that_is_not_there_is_an_attribute_error(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match="Tunel"):
        _ = package.Tunel
