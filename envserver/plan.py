"""What is to be served, and how: the arguments that `serve_env`, `env_server` and the command line have in common."""

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from envserver.checks import check_limits, check_numbers
from envserver.env import Env
from envserver.errors import EnvServerError
from envserver.jobs import pack_callable, unpack_callable
from envserver.limits import PoolPolicy
from envserver.server import EnvServer
from envserver.zsocket import check_address

if TYPE_CHECKING:
    from envserver.pool import EnvServerPool

ADDRESS = "tcp://127.0.0.1:0"

OF_WORKERS = ("kill_blocked_after", "max_worker_rss", "max_worker_age", "min_workers")
"""What a server without worker processes cannot do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The arguments are `serve_env`'s. Raises `EnvServerError` for any that nothing can work with: where they are
    given, not in the process that is made from them."""

    env: Env | str
    env_kwargs: dict[str, Any] | None = field(default=None, repr=False)
    max_workers: int | None = 1
    elastic: bool = True
    multiplex: int = 128
    address: str | None = None
    log_setup: Callable[[], None] | None = None
    log_path: str | os.PathLike[str] | None = None
    kill_blocked_after: float | None = None
    min_workers: int = 1
    max_worker_rss: int | None = None
    max_worker_age: float | None = None

    def __post_init__(self) -> None:
        kwargs, setup, path = self.env_kwargs, self.log_setup, self.log_path
        if kwargs is not None and not (isinstance(kwargs, dict) and all(isinstance(name, str) for name in kwargs)):
            raise EnvServerError("env_kwargs are the factory's arguments, a dict by their names, which are strings")
        if setup is not None and not callable(setup):
            raise EnvServerError(f"log_setup is a function, called without arguments; not {setup!r}")
        if path is not None and not isinstance(path, str | os.PathLike):
            raise EnvServerError(f"log_path is a path, not {path!r}")
        if self.address is not None:
            check_address(self.address, "cannot listen on")
        check_numbers(self.max_workers, self.elastic, 1, self.multiplex)
        if self.max_workers != 1:
            check_numbers(self.max_workers, self.elastic, self.min_workers, self.multiplex)
            check_limits(self._policy)
            if not isinstance(self.env, str):
                raise EnvServerError("workers load their env themselves: name it, as package.module:factory")
            return
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in OF_WORKERS:
            if getattr(self, name) != defaults[name]:
                raise EnvServerError(f"{name} is for worker processes: give max_workers more than 1")

    def make(self, kill_grace: float | None = None) -> "EnvServer | EnvServerPool":
        """What serves it: one worker is this process itself, more are a pool's, which gives them `kill_grace` seconds
        from SIGTERM to SIGKILL (None: the policy's)."""
        address = self.address or ADDRESS
        if self.max_workers == 1:
            return EnvServer(self.env, self.env_kwargs, address=address, multiplex=self.multiplex)
        from envserver.pool import EnvServerPool

        assert isinstance(self.env, str)
        return EnvServerPool(
            self.env,
            self.env_kwargs,
            max_workers=self.max_workers,
            elastic=self.elastic,
            min_workers=self.min_workers,
            multiplex=self.multiplex,
            address=address,
            log_setup=self.log_setup,
            log_path=self.log_path,
            policy=self._policy if kill_grace is None else dataclasses.replace(self._policy, kill_grace=kill_grace),
        )

    @property
    def _policy(self) -> PoolPolicy:
        return PoolPolicy(
            kill_blocked_after=self.kill_blocked_after,
            max_worker_rss=self.max_worker_rss,
            max_worker_age=self.max_worker_age,
        )

    def packed(self) -> dict[str, Any]:
        """As another process can be told it, if its values are JSON. Raises `EnvServerError` if it cannot."""
        if not isinstance(self.env, str):
            raise EnvServerError("another process loads its env itself: name it, as package.module:factory")
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        path = None if self.log_path is None else os.fspath(self.log_path)
        return {**fields, "log_setup": pack_callable(self.log_setup), "log_path": path}

    @classmethod
    def unpacked(cls, fields: dict[str, Any]) -> Self:
        """What `packed` told."""
        return cls(**{**fields, "log_setup": unpack_callable(fields["log_setup"])})
