"""Putting ours in the place of what verifiers looks up, and taking it out again."""

import functools
import importlib
import inspect
import logging
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from types import ModuleType
from typing import Any

from interception.integrations.verifiers.harness import guarded
from interception.integrations.verifiers.options import Options
from interception.integrations.verifiers.pools import make_interception
from interception.integrations.verifiers.server import InterceptionServer
from interception.integrations.verifiers.tools import ToolTunnel, told, with_health_route

logger = logging.getLogger("interception")

SHAPE: Mapping[str, tuple[str, ...]] = {
    "verifiers.v1.interception:make_interception": ("config", "requires_tunnel", "state_service_secrets"),
    "verifiers.v1.interception.server:InterceptionServer": ("config", "requires_tunnel", "state_service_secrets"),
    "verifiers.v1.interception.server:InterceptionServer.register": ("self", "session"),
    "verifiers.v1.interception.server:InterceptionServer.unregister": ("self", "model_secret", "state_secret"),
    "verifiers.v1.mcp.launch:PrimeTunnel.expose": ("self", "port"),
    "verifiers.v1.mcp.launch:serve_tools": ("toolsets", "harness_runtime", "shared", "state_route"),
    "verifiers.v1.harness:HarnessSession.turn": ("self", "messages"),
    "verifiers.v1.runtimes.subprocess:SubprocessRuntime.run_background": ("self", "argv", "env", "log"),
    "verifiers.v1.serve.pool:serve_env": ("max_workers", "address", "address_queue", "death_pipe", "server_kwargs"),
    "verifiers.v1.session:RolloutSession.release": ("self",),
    "verifiers.v1.env:Env.run_slot": ("self", "slot", "ctx", "semaphore", "on_trace"),
    "verifiers.v1.serve.delta:DeltaStreamer": ("traces", "send"),
}
"""What ours stand on, with the parameters they count on."""

IMPORTERS = {
    "make_interception": ("verifiers.v1.interception", "verifiers.v1.env"),
    "InterceptionServer": ("verifiers.v1.interception", "verifiers.v1.agent"),
    "PrimeTunnel": ("verifiers.v1.mcp.launch",),
    "serve_tools": ("verifiers.v1.mcp.launch", "verifiers.v1.mcp", "verifiers.v1.rollout"),
    "serve_env": ("verifiers.v1.serve.pool", "verifiers.v1.serve"),
}
"""Where verifiers itself looks a name up; the first is where it is defined or handed on. Other modules that have
imported one are found by looking at all that are loaded."""

KEPT = {
    "InterceptionServer": ("verifiers.v1.interception.server", "verifiers.v1.interception.pool", "verifiers.v1.agent"),
}
"""Modules that keep verifiers' own: ours is made of it, and whoever asks for verifiers' pools by name gets them. An
agent gets what is said below."""

WHERE_NAMED_ONLY = ("PrimeTunnel",)
"""Replaced in the modules above alone: elsewhere it is not for a tool server."""


@dataclass
class Installation:
    """What was replaced, to be undone by `uninstall()`."""

    options: Options
    patched: list[str] = field(default_factory=list)
    """Dotted names, as they were found at install."""
    _undo: list[tuple[Any, str, Any, Any]] = field(default_factory=list, repr=False)
    _originals: dict[str, Any] = field(default_factory=dict, repr=False)
    _blocks: int = field(default=0, repr=False)
    """`installed()` blocks that are open."""
    _stays: bool = field(default=False, repr=False)
    """By `install()`: until `uninstall()`."""

    def _replace(self, owner: Any, name: str, ours: Any) -> None:
        where = owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
        self.patched.append(f"{where}.{name}")
        self._undo.append((owner, name, getattr(owner, name), ours))
        setattr(owner, name, ours)

    def _replace_everywhere(self, name: str, ours: Any) -> None:
        modules = [sys.modules[importer] for importer in IMPORTERS[name]]
        original = self._originals[name] = getattr(modules[0], name)
        if name not in WHERE_NAMED_ONLY:
            modules += [module for module in list(sys.modules.values()) if _holds(module, name, original)]
        for module in dict.fromkeys(modules):
            if module.__name__ not in KEPT.get(name, ()) and module.__name__.partition(".")[0] != "interception":
                self._replace(module, name, ours)

    def _restore(self) -> None:
        for owner, name, original, ours in reversed(self._undo):
            if vars(owner).get(name) is ours:
                setattr(owner, name, original)
        # Modules that were imported meanwhile have ours from the others.
        replaced = {name: (original, ours) for _, name, original, ours in self._undo if name in self._originals}
        for name, (original, ours) in replaced.items():
            for module in list(sys.modules.values()):
                if _holds(module, name, ours):
                    setattr(module, name, original)


_lock = threading.RLock()  # evals run in threads, too
_installed: Installation | None = None


def install(options: Options | None = None) -> Installation:
    """From now on verifiers runs on our pools, servers and tunnels, in this process and in the workers it spawns.

    Raises `ImportError` for a version of verifiers whose shape is another one, `RuntimeError` if it is installed
    already with other options. Call it before the eval, or use `installed()`. Logs (INFO) what was replaced.
    """
    with _lock:
        made = _install(options or Options())
        made._stays = True
        return made


def _install(options: Options) -> Installation:
    global _installed
    if _installed is not None:
        if other := [
            each.name
            for each in fields(options)
            if getattr(options, each.name) != getattr(_installed.options, each.name)
        ]:
            raise RuntimeError(f"installed already, with another {', '.join(other)}: uninstall() first")
        return _installed
    check_shape()
    made = Installation(options)
    server = type("InterceptionServer", (InterceptionServer,), {"options": options, "__module__": __name__})
    tool_tunnel = type("ToolTunnel", (ToolTunnel,), {"options": options, "__module__": __name__})
    from interception.integrations.verifiers.serve import serve_env

    try:
        own = functools.partial(make_interception, options=options)
        # The server that an entered agent keeps for itself: as a pool, for it to have another once that one is lost.
        made._replace(sys.modules["verifiers.v1.agent"], "InterceptionServer", own)
        made._replace_everywhere("make_interception", own)
        made._replace_everywhere("InterceptionServer", server)
        made._replace_everywhere("PrimeTunnel", tool_tunnel)
        made._replace_everywhere("serve_tools", told(_named("verifiers.v1.mcp.launch:serve_tools")))
        made._replace_everywhere("serve_env", functools.partial(serve_env, options=options))
        session = _named("verifiers.v1.harness:HarnessSession")
        made._replace(session, "turn", guarded(session.turn, options.grace))
        runtime = _named("verifiers.v1.runtimes.subprocess:SubprocessRuntime")
        made._replace(runtime, "run_background", with_health_route(runtime.run_background))
    except BaseException:
        made._restore()
        raise
    _installed = made
    logger.info("installed in verifiers %s, in the place of: %s", version("verifiers"), ", ".join(made.patched))
    return made


def uninstall() -> None:
    """Give verifiers its own back; what is running goes on as it was begun. Nothing happens if nothing is installed."""
    global _installed
    with _lock:
        if _installed is not None:
            _installed._restore()
            _installed = None


@contextmanager
def installed(options: Options | None = None) -> Iterator[Installation]:
    """`install` until the context is left, or the last one of several that overlap in threads or tasks; where `install`
    was called, until `uninstall`. Raises as `install` does."""
    with _lock:
        made = _install(options or Options())
        made._blocks += 1
    try:
        yield made
    finally:
        with _lock:
            made._blocks -= 1
            if made is _installed and not made._blocks and not made._stays:
                uninstall()


def current() -> Installation | None:
    """What is installed just now."""
    return _installed


def original(name: str) -> Any:
    """verifiers' own, of what is replaced just now."""
    assert _installed is not None
    return _installed._originals[name]


def check_shape() -> None:
    """`ImportError` if verifiers is not as ours expect it."""
    faults = []
    for module in dict.fromkeys(module for modules in IMPORTERS.values() for module in modules):
        try:
            importlib.import_module(module)
        except ImportError as error:
            faults.append(f"{module} cannot be imported ({error})")
    for path, expected in SHAPE.items():
        try:
            found = list(inspect.signature(_named(path)).parameters)
        except (ImportError, AttributeError):
            faults.append(f"there is no {path}")
            continue
        if missing := [name for name in expected if name not in found]:
            faults.append(f"{path} takes no {', '.join(missing)}")
    for name, modules in IMPORTERS.items():
        loaded = [module for module in modules if module in sys.modules]
        faults += [f"{module} has no {name}" for module in loaded if not hasattr(sys.modules[module], name)]
    if faults:
        raise ImportError(
            f"verifiers {version('verifiers')} is not as this integration knows it (0.4.0): {'; '.join(faults)}. "
            "Install verifiers==0.4.0, or a version of interception-toolkit that knows yours."
        )


def _named(path: str) -> Any:
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _holds(module: ModuleType, name: str, value: Any) -> bool:
    try:
        return vars(module).get(name) is value
    except TypeError:  # something else that somebody put among the modules
        return False
