"""What a child process of ours does: `role` in its job says which of two."""

import base64
import os
import pickle
from collections.abc import Callable
from typing import Any

from envserver.errors import EnvServerError


def pack_callable(function: Callable[[], None] | None) -> str | None:
    """A function as text that another process can call with `perform`. Raises `EnvServerError` if it cannot be sent."""
    if function is None:
        return None
    try:
        return base64.b64encode(pickle.dumps(function)).decode()
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise EnvServerError(f"log_setup must be a function of a module: {error}") from None


def unpack_callable(text: str | None) -> Callable[[], None] | None:
    if text is None:
        return None
    function: Callable[[], None] = pickle.loads(base64.b64decode(text))
    return function


def perform(job: dict[str, Any], report_fd: int | None) -> None:
    """Do what the job says, until told to end. Whatever prevents it is raised."""
    from envserver.serve import serve_until_told
    from envserver.server import EnvServer
    from envserver.stacks import beat

    role = job.pop("role")
    log_setup = unpack_callable(job.pop("log_setup", None))
    if log_setup is not None:
        log_setup()
    if role == "worker":
        # Its one client is the broker, which keeps budgets for its own.
        server = EnvServer(
            job["env"], job.get("env_kwargs"), address=job["address"], multiplex=job.get("multiplex", 128), budget=None
        )
        path, after = job.get("stacks_path"), job.get("stacks_after", 0.0)
        serve_until_told(
            server,
            drain_timeout=job.get("drain_timeout"),
            alongside=None if path is None else lambda: beat(path, after),
        )
    elif role == "server":
        from envserver.serve import make_server

        def ready(address: str) -> None:
            assert report_fd is not None
            os.write(report_fd, address.encode() + b"\n")

        # Half of the time until this process is killed is the runs', half of the rest the workers': a broker that is
        # killed leaves its folder behind.
        stop_timeout = job.pop("stop_timeout")
        metrics_port = job.pop("metrics_port")
        made = make_server(**job, log_setup=log_setup, kill_grace=stop_timeout / 4)
        serve_until_told(made, ready=ready, drain_timeout=stop_timeout / 2, metrics_port=metrics_port)
    else:
        raise EnvServerError(f"no job has the role {role!r}")
