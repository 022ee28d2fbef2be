"""A rollout's state and task as parameters of its tools: fetched before the call, the changes written back after it."""

import asyncio
import functools
import inspect
import logging
import typing
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, TypeVar

import pydantic_core
from pydantic import TypeAdapter, ValidationError

from interception.state import as_json, broken_off, reasons
from interception.state_client import StateClient, StateConflictError, StateError

logger = logging.getLogger("interception")

T = TypeVar("T")


@dataclass(frozen=True)
class _Injected:
    what: Literal["state", "task"]

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
        # Asked for by an MCPServer, which would have the model that calls the tool fill the parameter in.
        raise TypeError(f"a tool asks for the rollout's {self.what}: put @with_state right below @server.tool()")


State = Annotated[T, _Injected("state")]
"""`state: State[Board]` in a tool's signature: the rollout's state, as a `Board`. What the tool changes in it (in
place) is written back after the call. The model that calls the tool does not see the parameter.

Any type that pydantic knows will do. It need not have all fields of the state: those it does not have stay as they are.
A state that is null still is read as `{}` by a type that does not take null."""

Task = Annotated[T, _Injected("task")]
"""`task: Task[dict]`: the rollout's task, to be read."""

MISSING: Final = object()


@dataclass(eq=False)
class Rollout:
    """One rollout, as the tools it calls reach it."""

    channel: StateClient
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by a tool that has the state: an agent's parallel calls come one after the other then."""


current_rollout: ContextVar[Rollout | None] = ContextVar("current_rollout", default=None)
"""The one whose call is being served."""


def with_state(tool: Callable[..., Any]) -> Callable[..., Any]:
    """A tool without those of its parameters that are `State` or `Task`: they are filled in at each call.

    `ToolServer` does this to the functions it is given. Tools of an `MCPServer` of your own need it said, below
    `@server.tool()`. A tool that raises has changed nothing. TypeError if it asks for the state twice.
    """
    signature = inspect.signature(tool)
    hints = typing.get_type_hints(tool, include_extras=True)
    wanted: dict[str, tuple[str, TypeAdapter[Any]]] = {}
    for name, hint in hints.items():
        if any(_is_marked(inner) for inner in typing.get_args(hint)):
            raise TypeError(f"{name} of the tool {tool.__name__}: State and Task go outside: State[Board | None]")
        for mark in getattr(hint, "__metadata__", ()):
            if isinstance(mark, _Injected):
                wanted[name] = mark.what, TypeAdapter(hint)  # with what else it is annotated with
    if not wanted:
        return tool
    states = [name for name, (what, _) in wanted.items() if what == "state"]
    if len(states) > 1:
        raise TypeError(f"the tool {tool.__name__} asks for the state twice: {', '.join(states)}")

    @functools.wraps(tool)
    async def call(**arguments: Any) -> Any:
        rollout = current_rollout.get()
        if rollout is None:
            raise _told(f"the tool {tool.__name__} needs a rollout: it works behind a ToolServer only")
        for name, (what, adapter) in wanted.items():
            if what == "task":
                arguments[name] = await _task(rollout, adapter)
        if not states:
            return await _run(tool, arguments)
        async with rollout.turn:
            held = await _Held.fetched(rollout.channel, wanted[states[0]][1])
            result = await _run(tool, {**arguments, states[0]: held.value})
            await held.write_back()
            return result

    del call.__wrapped__  # whoever looks for the signature would go by that
    hints.setdefault("return", signature.return_annotation)
    call.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[
            parameter.replace(annotation=hints.get(name, parameter.annotation))
            for name, parameter in signature.parameters.items()
            if name not in wanted
        ],
        return_annotation=hints["return"],
    )
    call.__annotations__ = {
        name: hint for name, hint in hints.items() if name not in wanted and hint is not inspect.Signature.empty
    }
    return call


def _is_marked(hint: Any) -> bool:
    marks = getattr(hint, "__metadata__", ())
    return any(isinstance(mark, _Injected) for mark in marks) or any(map(_is_marked, typing.get_args(hint)))


async def _run(tool: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    if inspect.iscoroutinefunction(tool):
        return await tool(**arguments)
    from anyio import to_thread  # the MCP SDK's

    # Not in the event loop's own few threads: slow tools would hold up all that needs those, as each look-up of a host.
    return await to_thread.run_sync(functools.partial(tool, **arguments), abandon_on_cancel=True)


async def _task(rollout: Rollout, adapter: TypeAdapter[Any]) -> Any:
    try:
        return adapter.validate_json(await rollout.channel.read_task())
    except StateError as error:
        raise _failed("the rollout's task could not be read", error) from None
    except ValidationError as error:
        raise _told(f"the rollout's task is not what the tool expects: {reasons(error)}") from None
    except Exception as error:  # noqa: BLE001 - whatever its validator raises
        raise _told(f"the rollout's task is not what the tool expects: {broken_off(error)}") from None


class _Held:
    """The state while a tool has it."""

    def __init__(self, channel: StateClient, adapter: TypeAdapter[Any], body: bytes, tag: str) -> None:
        self._channel, self._adapter, self._tag = channel, adapter, tag
        self._read = pydantic_core.from_json(body)
        try:
            self.value = adapter.validate_json(body)
        except ValidationError as error:
            if self._read is not None:
                raise _told(f"the rollout's state is not what the tool expects: {reasons(error)}") from None
            try:
                self.value = adapter.validate_json(b"{}")
            except ValidationError:
                raise _told(f"the rollout has no state yet: {reasons(error)}") from None
        except Exception as error:  # noqa: BLE001 - whatever its validator raises
            raise _told(f"the rollout's state is not what the tool expects: {broken_off(error)}") from None
        self._before = self._dumped("the tool was not run: the rollout's state, as the tool has it, is no JSON")

    @classmethod
    async def fetched(cls, channel: StateClient, adapter: TypeAdapter[Any]) -> "_Held":
        try:
            return cls(channel, adapter, *await channel.read())
        except StateError as error:
            raise _failed("the tool was not run: the rollout's state could not be read", error) from None

    def _dumped(self, told: str) -> Any:
        try:
            return pydantic_core.from_json(as_json(self._adapter, self.value))
        except Exception as error:  # noqa: BLE001 - whatever its serializers raise
            logger.error("%s: %s", told, error)
            raise _told(told) from None

    async def write_back(self) -> None:
        """Writes what the tool changed, and that alone: what others changed meanwhile stays."""
        after = self._dumped("the tool ran, but its change of the state was not stored: it is no JSON")
        if _same(after, self._before):
            return
        read, tag = self._read, self._tag
        while True:
            try:
                await self._channel.write(pydantic_core.to_json(_changed(read, self._before, after)), if_match=tag)
            except StateConflictError:
                pass
            except (StateError, ValueError) as error:
                if isinstance(error, StateError) and error.may_pass:
                    told = "the tool ran; whether its change of the state was stored is not known"
                else:
                    told = "the tool ran, but its change of the state was refused"
                raise _failed(told, error) from None
            else:
                return
            try:
                body, tag = await self._channel.read()
            except StateError as error:
                raise _failed("the tool ran, but its change of the state was not stored", error) from None
            read = pydantic_core.from_json(body)
            if clash := _clash(self._read, read, self._before, after):
                raise _told(f"the tool ran, but its change of the state was not stored: somebody else changed {clash}")


def _changed(read: Any, before: Any, after: Any) -> Any:
    """`read` with what became of `before`: field by field where they are objects."""
    if not isinstance(after, dict) or not isinstance(before, dict) or not isinstance(read, dict | None):
        return after
    read = read or {}
    kept = {name: value for name, value in read.items() if name in after or name not in before}
    # Fields of fields, too: the tool's type need not have all of those either.
    mine = {name: after[name] for name in _fields(before, after) if name in after}
    both = read.keys() & before.keys() & mine.keys()
    return {**kept, **mine, **{name: _changed(read[name], before[name], mine[name]) for name in both}}


def _clash(read: Any, now: Any, before: Any, after: Any) -> str:
    """Which fields both have changed: the tool, and somebody else since the tool's state was read. Empty if none."""
    if not all(isinstance(value, dict) for value in (read or {}, now, before, after)):
        return "the state"
    mine = _fields(before, after)
    both = [name for name in mine if name in _fields(read or {}, now) and name in _fields(now, after)]
    return ", ".join(both)


def _fields(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Those that differ, removed ones too."""
    return [name for name in {**before, **after} if not _same(before.get(name, MISSING), after.get(name, MISSING))]


def _same(one: Any, other: Any) -> bool:
    # For Python 1, 1.0 and True are equal.
    return one is other or (one == other and pydantic_core.to_json(one) == pydantic_core.to_json(other))


def _failed(what: str, error: Exception) -> Exception:
    """For the agent, which must not learn more of this host than it needs to; the log has the rest."""
    logger.warning("%s: %s", what, error)
    status = getattr(error, "status", None)
    return _told(f"{what} ({f'status {status}' if status else 'no answer'})")


def _told(message: str) -> Exception:
    """An error whose text the SDK passes on."""
    from mcp.server.mcpserver.exceptions import ToolError

    return ToolError(message)
