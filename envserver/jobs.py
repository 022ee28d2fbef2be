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
    from envserver.plan import Plan
    from envserver.serve import serve_until_told
    from envserver.server import EnvServer

    role = job["role"]
    if role == "worker":
        if (log_setup := unpack_callable(job["log_setup"])) is not None:
            log_setup()
        # Its one client is the broker, which keeps budgets for its own, and tells the numbers of all.
        server = EnvServer(
            job["env"],
            job["env_kwargs"],
            address=job["address"],
            multiplex=job["multiplex"],
            budget=None,
            numbers_period=None,
        )
        stacks = job["stacks_path"], job["stacks_after"]
        serve_until_told(server, drain_timeout=job["drain_timeout"], stacks_path=stacks[0], stacks_after=stacks[1])
    elif role == "server":
        plan = Plan.unpacked(job["plan"])
        if plan.log_setup is not None:
            plan.log_setup()

        def ready(address: str) -> None:
            assert report_fd is not None
            os.write(report_fd, address.encode() + b"\n")

        # Half of the time until this process is killed is the runs', half of the rest the workers': a broker that is
        # killed leaves its folder behind.
        stop_timeout = job["stop_timeout"]
        serve_until_told(
            plan.make(kill_grace=stop_timeout / 4),
            ready=ready,
            drain_timeout=stop_timeout / 2,
            metrics_port=job["metrics_port"],
        )
    else:
        raise EnvServerError(f"no job has the role {role!r}")
