"""verifiers' env servers with our installation in each process they spawn."""

from typing import Any

from interception.integrations.verifiers import installation
from interception.integrations.verifiers.options import Options


def serve_env(*, options: Options, **kwargs: Any) -> None:
    """verifiers' `serve_env` with `install(options)` done in its process, and by it in those of its workers.

    A function of a module, for it is what a spawned process begins with.
    """
    installation.install(options)
    installation.original("serve_env")(**kwargs)
