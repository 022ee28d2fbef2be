"""What an env is, and how one is found by its name."""

import importlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, runtime_checkable

from envserver.errors import EnvServerError

Emit = Callable[[dict[str, Any]], Awaitable[None]]


@runtime_checkable
class Env(Protocol):
    """Runs rollouts. Any object with these two methods is one."""

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Holds what all runs share, from before the first request until after the last."""
        ...

    async def run(self, request: dict[str, Any], emit: Emit) -> dict[str, Any]:
        """Do what `request` asks for and return the reply, to which the server adds `success` and `error`.

        `await emit(delta)` sends something on the way; it raises once the run has ended. Many runs are under way at
        once, in one event loop; a run that the client gives up is cancelled.
        """
        ...


def load_env(name: str, kwargs: dict[str, Any] | None = None) -> Env:
    """The env that `package.module:factory` makes when called with `kwargs`.

    Raises `EnvServerError` if there is no such thing, what it makes is no env, or it calls `sys.exit` (with status 0,
    say, that would look like a good end). What else the module or the factory raises goes through as it is.
    """
    try:
        return _load_env(name, kwargs)
    except SystemExit as error:
        raise EnvServerError(f"{name} called sys.exit({error.code!r}) instead of making an env") from error


def _load_env(name: str, kwargs: dict[str, Any] | None) -> Env:
    module_name, colon, factory_name = name.partition(":")
    if not (colon and factory_name and all(module_name.split("."))):
        raise EnvServerError(f"an env is named package.module:factory, not {name!r}")
    if module_name in ("__main__", "__mp_main__"):
        raise EnvServerError(f"{name}: workers cannot import the main program; put the factory in a module of its own")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # something that the module itself wanted
        raise EnvServerError(
            f"{name}: there is no module {error.name!r} here; is it installed, and the folder it is in on PYTHONPATH?"
        ) from None
    for part in factory_name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise EnvServerError(f"{name}: {module_name} has no {factory_name!r}") from None
    if not callable(found):
        raise EnvServerError(f"{name} is a {type(found).__name__}, not something to call that makes an env")
    env = found(**(kwargs or {}))
    return check_env(env, name)


def check_env(env: Any, name: str) -> Env:
    """`env`, if it can be used as one; else `EnvServerError`."""
    missing = [method for method in ("serving", "run") if not callable(getattr(env, method, None))]
    if missing:
        raise EnvServerError(f"{name} made a {type(env).__name__}, which has no {' and no '.join(missing)}()")
    return env  # type: ignore[no-any-return]
