"""A pytest plugin for verifiers' released tests: `-p tests.verifiers.released_plugin` with RELEASED_TESTS_INSTALL=1
runs them on ours; each result goes into the file RELEASED_TESTS_RESULTS, one `outcome nodeid` a line."""

import os
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("RELEASED_TESTS_INSTALL") == "1":
        from interception.integrations.verifiers import install

        install()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        with Path(os.environ["RELEASED_TESTS_RESULTS"]).open("a") as results:
            results.write(f"{report.outcome} {report.nodeid}\n")
