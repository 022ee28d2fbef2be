"""verifiers' env servers with our installation in each process they spawn, or behind our broker."""

from collections.abc import Callable
from typing import Any

import envserver
from interception.integrations.verifiers import installation
from interception.integrations.verifiers.options import Options, options_as_json

ADDRESS = "tcp://127.0.0.1:5000"
"""Where verifiers' own listens if it is not told."""


def serve_env(*, options: Options, **kwargs: Any) -> None:
    """verifiers' `serve_env` with `install(options)` done in its process, and by it in those of its workers.

    With `options.broker` it is ours that serves. A function of a module, for it is what a spawned process begins with.
    """
    if options.broker:
        _serve_behind_our_broker(options, **kwargs)
    else:
        installation.install(options)
        installation.original("serve_env")(**kwargs)


def _serve_behind_our_broker(
    options: Options,
    *,
    max_workers: int | None,
    address: str | None = None,
    address_queue: Any = None,
    death_pipe: Any = None,
    log_setup: Callable[[], None] | None = None,
    multiplex: int = 128,
    elastic: bool = True,
    config: Any = None,
    config_data: dict[str, Any] | None = None,
    max_concurrent: int | None = None,
) -> None:
    from interception.integrations.verifiers.worker import FACTORY

    envserver.serve_env(
        FACTORY,
        {
            "config": config_data if config is None else config.model_dump(mode="json"),
            "max_concurrent": max_concurrent,
            "options": options_as_json(options),
        },
        max_workers=max_workers,
        elastic=elastic,
        multiplex=multiplex,
        address=address or ADDRESS,
        address_queue=address_queue,
        death_pipe=death_pipe,
        log_setup=log_setup,
        log_path=options.broker_log,
        # As verifiers' own: who ends a server does not wait, and kills it before long.
        drain_timeout=0.0,
    )
