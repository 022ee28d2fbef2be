"""verifiers' released tests, from its sdist, with and without ours: the same ones pass."""

import asyncio
import os
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.verifiers.evals import Endpoint

ROOT = Path(__file__).parents[2]

CHOSEN = ("test_e2e.py", "test_tunnel_watchdog.py", "test_serve_delta.py", "test_configs.py")
"""Those that touch what is replaced. The others test no more than verifiers' own records and judges."""

ELSEWHERE = ("docker", "podman", "apptainer", "prime", "modal", "e2b")
CASES = " and ".join(["subprocess", "(null or bash)", *(f"not {runtime}" for runtime in ELSEWHERE)])
"""Of `test_e2e.py`, by its marks: what runs on this host."""


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


async def results(released: Path, endpoint: Endpoint, file: Path, *, ours: bool) -> dict[str, str]:
    env = {
        **os.environ,
        "PRIME_API_KEY": "dummy",
        "PRIME_INFERENCE_URL": endpoint.base_url,
        "PYTHONPATH": str(ROOT),
        "RELEASED_TESTS_INSTALL": "1" if ours else "0",
        "RELEASED_TESTS_RESULTS": str(file),
        "PYTEST_ADDOPTS": "",
    }
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pytest", "-q", "-p", "tests.verifiers.released_plugin",
        "-m", f"not e2e or ({CASES})", *(f"tests/v1/{name}" for name in CHOSEN),
        cwd=released,
        env=env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await run.communicate()
    lines = await asyncio.to_thread(lambda: file.read_text().splitlines() if file.exists() else [])
    assert lines, said.decode()[-3000:]
    return {nodeid: outcome for outcome, _, nodeid in (line.partition(" ") for line in lines)}


async def test_the_same_released_tests_pass(released: Path, endpoint: Endpoint, tmp_path: Path) -> None:
    stock = await results(released, endpoint, tmp_path / "stock", ours=False)
    ours = await results(released, endpoint, tmp_path / "ours", ours=True)
    assert ours == stock
    assert sum(outcome == "passed" for outcome in ours.values()) >= 20, ours
