"""A pytest plugin for verifiers' released tests: `-p tests.verifiers.released_plugin`.

RELEASED_TESTS_INSTALL=1 runs them on ours. `prime` runtimes are processes of this host that pretend to be remote, and
the tunnel SDK's home is RELEASED_TESTS_HOME (that of a stand-in of its service). Each result goes into the file
RELEASED_TESTS_RESULTS, one `outcome nodeid` a line.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def pretend() -> None:
    import verifiers.v1.runtimes as runtimes

    from tests.verifiers.evals import with_remote

    runtimes._runtime_cls = with_remote(runtimes._runtime_cls)
    home = Path(os.environ["RELEASED_TESTS_HOME"])
    Path.home = lambda: home  # type: ignore[method-assign,assignment] # after verifiers has found its caches in the real one


def serve(then: Callable[..., None], **kwargs: Any) -> None:
    """`then`, verifiers' `serve_env` or ours, in a process that pretends as this one does."""
    pretend()
    then(**kwargs)


def pytest_configure(config: pytest.Config) -> None:
    if os.environ["RELEASED_TESTS_INSTALL"] == "1":
        from interception.integrations.verifiers import install

        install()
    pretend()
    import verifiers.v1.serve

    verifiers.v1.serve.serve_env = functools.partial(serve, verifiers.v1.serve.serve_env)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        with Path(os.environ["RELEASED_TESTS_RESULTS"]).open("a") as results:
            results.write(f"{report.outcome} {report.nodeid}\n")
