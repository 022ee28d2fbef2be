"""Tests with verifiers itself: `pytest -m verifiers`, in an environment that has the extra."""

import os
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.prime import FakePrime

if TYPE_CHECKING:
    from tests.verifiers.evals import Endpoint

TASKSETS = Path(__file__).with_name("tasksets")

if find_spec("verifiers") is None:
    collect_ignore_glob = ["test_*.py"]


# Importing verifiers takes ten seconds, which xdist's controller, that runs no test, need not wait for.
@pytest.fixture
async def endpoint() -> "AsyncIterator[Endpoint]":
    from tests.verifiers.evals import Endpoint

    async with Endpoint() as endpoint:
        yield endpoint


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePrime]:
    """A stand-in for Prime's, on which nothing may be left."""
    with FakePrime(tmp_path / "home", scale=0.1) as service:
        for name, value in service.env().items():
            if name != "HOME":  # the caches of harnesses are in the real one
                monkeypatch.setenv(name, value)
        monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
        yield service
        assert service.live() == []
        assert service.frpc_pids() == []


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> None:
    """verifiers' `prime` runtime is a process of this host that cannot reach it but through a tunnel."""
    import verifiers.v1.runtimes as runtimes

    from tests.verifiers.evals import RemoteSubprocess

    runtime_of = runtimes._runtime_cls
    monkeypatch.setattr(
        runtimes,
        "_runtime_cls",
        lambda config: RemoteSubprocess if config.type == "prime" else runtime_of(config),
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.verifiers)
            item.add_marker(pytest.mark.filterwarnings("default"))  # of a hundred packages that are not ours


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Task sets are found by their module's name, here and in the processes of tool servers."""
    monkeypatch.syspath_prepend(str(TASKSETS))
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TASKSETS), root]))
    monkeypatch.setenv("MOCK_KEY", "mock")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
