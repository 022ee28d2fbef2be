"""The clients that pip does not install with the tests, at the versions they are tested with, in `.clients/`.

    python -m tests.clients.install            the JavaScript SDK (needs npm), for the default suite
    python -m tests.clients.install --agents   the agent programs too (about 1.6 GB), for `pytest -m agents`

What is there already in that version is left as it is.
"""

import argparse
import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2] / ".clients"

JS_SDK = {"openai": "7.59.0"}
NPM_AGENTS = {"@openai/codex": "0.171.0", "@anthropic-ai/claude-code": "2.1.332"}
PYPI_AGENTS = {"mini-swe-agent": "2.4.6", "litellm": "1.110.2"}

COMMAND = "python -m tests.clients.install"

JS = ROOT / "js"
AGENTS = ROOT / "agents"
MINI = ROOT / "mini"

CODEX = AGENTS / "node_modules/.bin/codex"
CLAUDE = AGENTS / "node_modules/.bin/claude"
MINI_PROGRAM = MINI / "bin/mini"
MINI_PYTHON = MINI / "bin/python"


def missing(*, agents: bool) -> list[str]:
    """What `COMMAND` (with `--agents`) would install now."""
    lacking = [] if _npm_installed(JS, JS_SDK) else list(JS_SDK)
    if agents:
        lacking += [] if _npm_installed(AGENTS, NPM_AGENTS) else list(NPM_AGENTS)
        lacking += [] if _pypi_installed() else list(PYPI_AGENTS)
    return lacking


def js_sdk_missing() -> str | None:
    """Why the tests of the JavaScript SDK cannot run here, if they cannot."""
    if shutil.which("node") is None:
        return "there is no node here"
    return None if _npm_installed(JS, JS_SDK) else f"the JavaScript SDK is not installed: {COMMAND}"


def _npm_installed(folder: Path, packages: dict[str, str]) -> bool:
    return all(_npm_version(folder / "node_modules" / name) == version for name, version in packages.items())


def _npm_version(package: Path) -> str | None:
    try:
        return str(json.loads((package / "package.json").read_text())["version"])
    except (OSError, ValueError, KeyError):
        return None


def _pypi_installed() -> bool:
    folders = MINI.glob("lib/python*/site-packages/*.dist-info")
    return {f"{name.replace('-', '_')}-{version}.dist-info" for name, version in PYPI_AGENTS.items()} <= {
        folder.name for folder in folders
    }


def _npm(folder: Path, packages: dict[str, str]) -> None:
    if _npm_installed(folder, packages):
        return
    npm = shutil.which("npm")
    if npm is None:
        sys.exit("npm is needed, and is not here")
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [f"{name}@{version}" for name, version in packages.items()]
    _run(npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--save-exact", *wanted)


def _pypi() -> None:
    if _pypi_installed():
        return
    venv.create(MINI, with_pip=True, clear=True)
    wanted = [f"{name}=={version}" for name, version in PYPI_AGENTS.items()]
    _run(str(MINI_PYTHON), "-m", "pip", "install", "--quiet", *wanted)


def _run(*command: str) -> None:
    print("+", *command, flush=True)
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--agents", action="store_true", help="the agent programs too")
    agents = parser.parse_args().agents
    try:
        _npm(JS, JS_SDK)
        if agents:
            _npm(AGENTS, NPM_AGENTS)
            _pypi()
    except subprocess.CalledProcessError as error:
        sys.exit(f"this failed, with status {error.returncode}: {' '.join(error.cmd)}")
    assert not missing(agents=agents)
    print(f"installed in {ROOT}")


if __name__ == "__main__":
    main()
