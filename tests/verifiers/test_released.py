"""verifiers' released tests, from its sdist, with and without ours: the same ones pass."""

import asyncio
import json
import os
import re
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.prime import FakePrime
from tests.verifiers.evals import Endpoint
from tunnel import HEALTH_PATH

ROOT = Path(__file__).parents[2]

IGNORED = (
    "test_color_codeword_tasks.py",  # of a package that is not in the sdist, which would end the collection
    "test_tunnel_watchdog.py",  # of verifiers' own watchdog, which ours replaces; by the hundredth of a second
)
ELSEWHERE = "docker podman apptainer modal e2b rlm codex claude_code hermes_agent kimi_code pi openclaw browser_use"
MARKS = " and ".join(f"not {mark}" for mark in ELSEWHERE.split())
"""What runs on this host, `prime` among it, for that is pretended."""
LEFT_OUT = (
    "agent_user",  # wants a box of its own: as root it changes users and files
    "acp_resume",  # installs agents
    # A rollout is some ten seconds of imports; these show no more of ours than others do.
    "test_user[harness-in-subprocess]",
    "test_tool[harness-in-subprocess-with-tool-colocated]",
    "response_image",
    "(user_sim and not tools)",
    "close_drains",
)
NAMES = " and ".join(f"not {name}" for name in LEFT_OUT)

MISSING = {
    "test_shared_tool_isolation[harness-in-subprocess-with-tool-in-subprocess]",  # scratchpad
    "test_kuhn_poker_self_play",
    "test_replay_round_trip",  # reverse-text
    "test_env_id_shared_agentic_judge",  # docker, but without its mark
    "test_env_id_agentic_judge",
}
"""They fail either way: their task sets are not in the sdist, or they need docker."""


class Model(Endpoint):
    """The echo model, told what to say where a released test counts on a model that understands its prompt."""

    CALLS: dict[str, tuple[int, dict[str, str]]] = {  # noqa: RUF012
        "back": (1, {"message": "hello world"}),
        "bump": (3, {}),
        "bash": (1, {"command": "printf 'hello world' > answer.txt"}),
    }

    def heard(self, body: bytes) -> bytes:
        if not body:
            return body
        asked = json.loads(body)
        if (line := self.line(asked)) is not None:
            asked["messages"].append({"role": "user", "content": line})
        return json.dumps(asked).encode()

    def line(self, asked: dict[str, Any]) -> str | None:
        said = {role: [m for m in asked["messages"] if m["role"] == role] for role in ("system", "user", "tool")}
        prompt = "\n".join(str(message["content"]) for message in said["user"])
        for tool in asked.get("tools") or ():
            name = tool["function"]["name"]
            for suffix, (times, arguments) in self.CALLS.items():
                if name.endswith(suffix) and re.search(f"{suffix}`? tool", prompt) and len(said["tool"]) < times:
                    return f"!call {name} {json.dumps(arguments)}"
        if '"verdicts"' in prompt:
            return json.dumps({"verdicts": [{"name": "always_yes", "reason": "asked to", "verdict": "yes"}]})
        system = "\n".join(str(message["content"]) for message in said["system"])
        if scenario := re.search(r"do for you:\s+(.*?)\s+Rules:", system, re.DOTALL):
            return scenario[1] if len(said["user"]) == 1 else "###DONE###"
        return None


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist's folder; fetched now and never committed."""
    folder = tmp_path_factory.mktemp("sdist")
    name = f"verifiers-{version('verifiers')}"
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation", "--no-binary", ":all:",
         "-d", str(folder), name.replace("-", "==", 1)],
        check=True,
        timeout=300,
    )  # fmt: skip
    with tarfile.open(folder / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


async def results(released: Path, folder: Path, *, ours: bool) -> dict[str, str]:
    """The outcome of each test by its name."""
    file = folder / "results"
    async with Model() as model:
        with FakePrime(folder / "home") as service:
            env = {
                **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
                **{name: value for name, value in service.env().items() if name != "HOME"},
                "PRIME_INFERENCE_URL": model.base_url,
                "PYTHONPATH": str(ROOT),
                "PYTEST_ADDOPTS": "",
                "RELEASED_TESTS_HOME": str(service.home),
                "RELEASED_TESTS_INSTALL": "1" if ours else "0",
                "RELEASED_TESTS_RESULTS": str(file),
            }
            run = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "pytest", "tests/v1", "-m", MARKS, "-k", NAMES,
                "-p", "tests.verifiers.released_plugin", "-p", "no:cacheprovider", "-p", "no:xdist",
                f"--basetemp={folder / 'tmp'}", *(f"--ignore=tests/v1/{name}" for name in IGNORED),
                cwd=released,
                env=env,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            try:
                said, _ = await run.communicate()
            finally:
                if run.returncode is None:
                    run.kill()
                    await run.wait()
            assert file.exists(), said.decode()[-3000:]
            print(said.decode())  # of the test that fails
            probed = any(service.requests(tunnel, HEALTH_PATH) for tunnel in service.created)
            assert probed == ours, "tunnels of ours are kept by their health route"
            assert service.live() == []
    lines = file.read_text().splitlines()
    return {nodeid.partition("::")[2]: outcome for outcome, _, nodeid in (line.partition(" ") for line in lines)}


async def test_the_same_released_tests_pass(released: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    stock, ours = await asyncio.gather(
        results(released, tmp_path_factory.mktemp("stock"), ours=False),
        results(released, tmp_path_factory.mktemp("ours"), ours=True),
    )
    assert ours == stock
    assert {name for name, outcome in ours.items() if outcome == "failed"} <= MISSING
    assert sum(outcome == "passed" for outcome in ours.values()) >= 140
