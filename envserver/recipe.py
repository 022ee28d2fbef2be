"""What every worker of a pool is made from."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from envserver.errors import EnvServerError, EnvServerStartupError
from envserver.folder import ShortFolder
from envserver.jobs import pack_callable
from envserver.limits import PoolPolicy
from envserver.slot import Slot
from envserver.startup import startup_error
from envserver.wire import Part
from envserver.worker import Worker


class Recipe:
    """Of the arguments of a pool. Raises `EnvServerError` where no process could be told them."""

    def __init__(
        self,
        env: str,
        env_kwargs: dict[str, Any] | None,
        multiplex: int,
        log_setup: Callable[[], None] | None,
        log_path: str | os.PathLike[str] | None,
        policy: PoolPolicy,
    ) -> None:
        if not isinstance(env, str) or ":" not in env:
            raise EnvServerError(f"workers load their env themselves: name it as package.module:factory, not {env!r}")
        self._env = env
        self._job = {
            "env": env,
            "env_kwargs": env_kwargs,
            "multiplex": multiplex,
            "log_setup": pack_callable(log_setup),
            "drain_timeout": 0.0,  # the pool has waited for its runs before it ends a worker
        }
        self._log_path = None if log_path is None else Path(log_path)
        self._policy = policy

    def make(
        self,
        slot: Slot,
        context: "zmq.Context[zmq.Socket[bytes]]",
        folder: ShortFolder,
        *,
        on_message: Callable[[Worker, list[Part]], None],
        on_lost: Callable[[Worker], None],
        on_exit: Callable[[Worker], None],
    ) -> Worker:
        """The worker of `slot`'s generation, with its socket, and its log where none is wanted elsewhere, in `folder`.

        Raises `EnvServerError` or `ZMQError`, leaving nothing behind, where it cannot be had: no processes,
        descriptors or sockets are left.
        """
        if self._log_path is None:
            log_path = folder.path / f"worker-{slot.number}.log"
        else:
            log_path = self._log_path.with_name(f"{self._log_path.stem}-worker-{slot.number}{self._log_path.suffix}")
        return Worker(
            slot,
            context,
            job=self._job,
            path=f"{folder.path}/{slot.generation}",
            log_path=log_path,
            policy=self._policy,
            on_message=on_message,
            on_lost=on_lost,
            on_exit=on_exit,
        )

    def failure(self, worker: Worker) -> EnvServerStartupError:
        """Of a worker that ended before it was ready: how, and what it had printed."""
        reason = worker.child.exit_reason
        if worker.slot.overdue:
            reason = f"was not ready after {self._policy.start_timeout:g} s"
        return startup_error(
            reason,
            what=f"worker {worker.number} of {self._env}",
            pid=worker.pid,
            seconds=worker.child.seconds,
            tail=worker.child.tail(),
            log_path=None if self._log_path is None else worker.child.log_path,
            returncode=worker.child.returncode,
        )
