"""The service, for all tests here."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.run import FACTOR
from tests.chaos.serve import Serve
from tests.prime import FakePrime


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)

    @contextlib.contextmanager
    def serve() -> Iterator[FakePrime]:
        with FakePrime(tmp_path / "home", scale=2 * FACTOR) as service:
            for name, value in service.env().items():
                monkeypatch.setenv(name, value)
            yield service

    return serve
