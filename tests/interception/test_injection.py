"""State and task as parameters of tools: what a tool sees, and what becomes of what it changes."""

import asyncio
import inspect
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import date
from typing import Annotated, Any

import pytest
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, BeforeValidator, SecretStr

from interception import InterceptionServer, RolloutSession, Slot, StateClient
from interception.tools import State, Task, with_state
from interception.tools.injection import Rollout, current_rollout
from tests.interception.fakes import new_session


class Board(BaseModel):
    notes: list[str] = []
    due: date | None = None


class Score(BaseModel):
    x: float


@asynccontextmanager
async def rollout(session: RolloutSession) -> AsyncIterator[Slot]:
    """Tools that are called inside are called by this rollout."""
    async with InterceptionServer() as server, server.acquire(session) as slot, called_by(slot):
        yield slot


@asynccontextmanager
async def called_by(slot: Slot) -> AsyncIterator[None]:
    async with StateClient(slot.base_url, slot.state_secret, patience=1.0) as channel:
        token = current_rollout.set(Rollout(channel))
        try:
            yield
        finally:
            current_rollout.reset(token)


async def note(text: str, state: State[Board]) -> int:
    """Write a note down."""
    state.notes.append(text)
    return len(state.notes)


class TestTheSignature:
    def test_the_model_does_not_see_what_is_injected(self) -> None:
        async def tool(a: int, state: State[Board], task: Task[dict[str, Any]], *, b: str = "x") -> list[str]:
            """Its own words."""
            return []

        wrapped = with_state(tool)
        assert str(inspect.signature(wrapped)) == "(a: int, *, b: str = 'x') -> list[str]"
        assert (wrapped.__name__, wrapped.__doc__) == ("tool", "Its own words.")

    def test_a_tool_that_wants_nothing_is_left_as_it_is(self) -> None:
        def tool(a: int) -> int:
            return a

        assert with_state(tool) is tool

    def test_the_state_twice_is_refused(self) -> None:
        def tool(one: State[Board], two: State[Board]) -> None: ...

        with pytest.raises(TypeError, match="asks for the state twice: one, two"):
            with_state(tool)

    def test_one_that_may_be_none_is_refused_and_not_left_to_the_model(self) -> None:
        def tool(state: State[Board] | None = None) -> None: ...

        with pytest.raises(TypeError, match=r"state of the tool tool: .*State\[Board \| None\]"):
            with_state(tool)

    def test_a_tool_of_an_mcp_server_without_it_is_refused(self) -> None:
        server: MCPServer = MCPServer("test")
        with pytest.raises(TypeError, match="put @with_state right below"):
            server.add_tool(note)
        server.add_tool(with_state(note))


class TestACall:
    async def test_what_a_tool_changes_is_written_back(self) -> None:
        async with rollout(session := new_session(state=Board())):
            assert await with_state(note)(text="a") == 1
            assert await with_state(note)(text="b") == 2
            assert session.state == Board(notes=["a", "b"])

    async def test_a_tool_that_is_not_async_runs_in_a_thread(self) -> None:
        def tool(state: State[dict[str, Any]]) -> bool:
            state["seen"] = True
            return threading.current_thread() is threading.main_thread()

        async with rollout(session := new_session()):
            assert await with_state(tool)() is False
            assert session.state == {"seen": True}

    async def test_slow_ones_leave_the_event_loop_its_own_threads(self) -> None:
        go = threading.Event()

        def tool(task: Task[Any]) -> None:
            go.wait(10.0)

        async with rollout(new_session()):
            threads = min(32, (os.cpu_count() or 1) + 4)  # as many as the loop has
            calls = [asyncio.create_task(with_state(tool)()) for _ in range(threads)]
            try:
                await asyncio.sleep(0.5)
                await asyncio.wait_for(asyncio.to_thread(str), 5.0)
            finally:
                go.set()
                await asyncio.gather(*calls)

    async def test_fields_of_a_field_that_its_type_does_not_have_stay(self) -> None:
        class Player(BaseModel):
            hp: int
            tags: dict[str, int] = {}

        class Game(BaseModel):
            player: Player

        async def tool(state: State[Game]) -> None:
            state.player.hp -= 1
            del state.player.tags["old"]

        async with rollout(session := new_session(state={"player": {"hp": 3, "gold": 5, "tags": {"old": 1, "b": 2}}})):
            await with_state(tool)()
            assert session.state == {"player": {"hp": 2, "gold": 5, "tags": {"b": 2}}}

    @pytest.mark.parametrize("kind", [dict[str, Any], Score])
    async def test_a_number_that_is_none_is_not_stored_as_null(self, kind: Any) -> None:
        async def tool(state: State[kind]) -> None:  # type: ignore[valid-type]
            if isinstance(state, dict):
                state["x"] = float("nan")
            else:
                state.x = float("nan")

        async with rollout(session := new_session(state={"x": 1.0})):
            with pytest.raises(ToolError, match="was not stored: it is no JSON"):
                await with_state(tool)()
            assert session.state == {"x": 1.0}

    async def test_the_task_is_there_to_be_read(self) -> None:
        async def tool(task: Task[Board]) -> str:
            return "; ".join(task.notes)

        async with rollout(new_session(task={"notes": ["one", "two"]})):
            assert await with_state(tool)() == "one; two"

    async def test_types_of_json_are_those_of_the_tool(self) -> None:
        async def tool(state: State[Board]) -> None:
            assert state.due == date(2026, 1, 2)
            state.due = date(2027, 1, 2)

        async with rollout(session := new_session(state={"due": "2026-01-02"})):
            await with_state(tool)()
            assert session.state == {"due": "2027-01-02"}

    async def test_without_a_type_it_is_json(self) -> None:
        async def tool(state: State) -> None:  # type: ignore[type-arg]
            state["a"].append(2)

        async with rollout(session := new_session(state={"a": [1]})):
            await with_state(tool)()
            assert session.state == {"a": [1, 2]}

    async def test_a_tool_that_changes_nothing_writes_nothing(self) -> None:
        async def tool(state: State[Board]) -> None:
            session.state["notes"].append("from the host, meanwhile")

        async with rollout(session := new_session(state={"notes": []})):
            await with_state(tool)()
            assert session.state == {"notes": ["from the host, meanwhile"]}

    async def test_a_tool_that_fails_has_changed_nothing(self) -> None:
        async def tool(state: State[Board]) -> None:
            state.notes.append("half done")
            raise LookupError("of the tool")

        async with rollout(session := new_session(state=Board())):
            with pytest.raises(LookupError):
                await with_state(tool)()
            assert session.state == Board()

    @pytest.mark.parametrize(
        ("before", "after"),
        [(1, True), (True, 1), (1, 1.5), ({"x": 1}, {"x": 1.0}), ([1], []), (None, 0)],
    )
    async def test_what_python_takes_for_equal_is_a_change_too(self, before: Any, after: Any) -> None:
        async def tool(state: State[dict[str, Any]]) -> None:
            state["v"] = after

        async with rollout(session := new_session(state={"v": before})):
            await with_state(tool)()
            assert repr(session.state) == repr({"v": after})

    async def test_an_agents_parallel_calls_come_one_after_the_other(self) -> None:
        async with rollout(session := new_session(state=Board())):
            await asyncio.gather(*(with_state(note)(text=str(number)) for number in range(8)))
            assert sorted(session.state.notes) == [str(number) for number in range(8)]

    async def test_fields_the_tool_does_not_know_stay_and_those_it_removes_go(self) -> None:
        async def tool(state: State[dict[str, Any]]) -> None:
            del state["old"]

        async with rollout(session := new_session(state={"notes": [], "score": 7, "old": 1})):
            await with_state(note)(text="a")
            await with_state(tool)()
            assert session.state == {"notes": ["a"], "score": 7}


class TestSomebodyElseWrites:
    """While the tool runs, the host or another tool server writes."""

    @staticmethod
    def tool_during(meanwhile: Callable[[], None]) -> Callable[..., Awaitable[Any]]:
        async def tool(state: State[dict[str, Any]]) -> str:
            meanwhile()
            state["mine"] = state.get("mine", 0) + 1
            return "done"

        return with_state(tool)

    async def test_other_fields_stay_as_they_left_them(self) -> None:
        async with rollout(session := new_session(state={"mine": 1, "gone": 0})):

            def meanwhile() -> None:
                session.state = {"mine": 1, "theirs": "new"}

            assert await self.tool_during(meanwhile)() == "done"
            assert session.state == {"mine": 2, "theirs": "new"}

    @pytest.mark.parametrize("theirs", [{"mine": 9}, {}, [], "another state"], ids=str)
    async def test_the_same_field_is_not_overwritten_and_the_caller_is_told(self, theirs: Any) -> None:
        async with rollout(session := new_session(state={"mine": 1})):

            def meanwhile() -> None:
                session.state = theirs

            with pytest.raises(ToolError, match="the tool ran, but its change of the state was not stored: somebody"):
                await self.tool_during(meanwhile)()
            assert session.state == theirs

    async def test_the_same_change_is_no_conflict(self) -> None:
        async with rollout(session := new_session(state={"mine": 1})):

            def meanwhile() -> None:
                session.state = {"mine": 2, "theirs": 1}

            await self.tool_during(meanwhile)()
            assert session.state == {"mine": 2, "theirs": 1}


class TestWhatTheCallerIsTold:
    async def test_outside_a_tool_server(self) -> None:
        with pytest.raises(ToolError, match="behind a ToolServer only"):
            await with_state(note)(text="a")

    @pytest.mark.parametrize(
        ("state", "told"),
        [
            ({"notes": 1}, "not what the tool expects: notes: Input should be a valid"),
            ([], "not what the tool expects"),
        ],
    )
    async def test_a_state_of_another_type(self, state: Any, told: str) -> None:
        async with rollout(new_session(state=state)):
            with pytest.raises(ToolError, match=told):
                await with_state(note)(text="a")

    async def test_a_task_of_another_type(self) -> None:
        async def tool(task: Task[int]) -> None: ...

        async with rollout(new_session(task="x")):
            with pytest.raises(ToolError, match="the rollout's task is not what the tool expects"):
                await with_state(tool)()

    async def test_no_state_yet_where_the_type_takes_none(self) -> None:
        async def tool(state: State[list[int]]) -> None: ...

        async with rollout(new_session()):
            with pytest.raises(ToolError, match="no state yet"):
                await with_state(tool)()

    async def test_a_change_the_sessions_type_refuses(self) -> None:
        async def tool(state: State[dict[str, Any]]) -> None:
            state["notes"] = 7

        async with rollout(session := new_session(state=Board())):
            with pytest.raises(ToolError, match=r"ran, but its change of the state was refused \(status 400\)"):
                await with_state(tool)()
            assert session.state == Board()

    async def test_a_change_that_is_no_json(self) -> None:
        async def tool(state: State[dict[str, Any]]) -> None:
            state["x"] = object()

        async with rollout(session := new_session(state={})):
            with pytest.raises(ToolError, match="it is no JSON"):
                await with_state(tool)()
            assert session.state == {}

    async def test_a_type_of_which_something_is_masked(self) -> None:
        ran = []

        async def tool(state: State[dict[str, SecretStr]]) -> None:
            ran.append(True)

        async with rollout(new_session(state={"token": "abc"})):
            with pytest.raises(ToolError, match="the tool was not run: the rollout's state, as the tool has it, is no"):
                await with_state(tool)()
        assert not ran

    async def test_a_validator_of_the_tools_that_breaks_off(self) -> None:
        def first(value: Any) -> Any:
            return value[0]

        Odd = Annotated[dict[str, Any], BeforeValidator(first)]

        async def writer(state: State[Odd]) -> None: ...  # type: ignore[valid-type]

        async def reader(task: Task[Odd]) -> None: ...  # type: ignore[valid-type]

        async with rollout(new_session(state={}, task={})):
            for tool, what in ((writer, "state"), (reader, "task")):
                with pytest.raises(ToolError, match=f"{what} is not what the tool expects: its validator raised KeyE"):
                    await with_state(tool)()

    async def test_the_rollout_is_over_before_and_during_the_call(self) -> None:
        ran = []

        async with InterceptionServer() as server, server.acquire(new_session(state={})) as slot:

            async def tool(state: State[dict[str, Any]]) -> None:
                ran.append(True)
                state["x"] = 1
                server.unregister(slot.model_secret, slot.state_secret)

            async with called_by(slot):
                with pytest.raises(ToolError, match=r"its change of the state was refused \(status 401\)"):
                    await with_state(tool)()
                with pytest.raises(ToolError, match=r"was not run: .* could not be read \(status 401\)"):
                    await with_state(tool)()
        assert ran == [True]

    async def test_nobody_answers_and_no_address_of_this_host_is_told(self) -> None:
        async with called_by(Slot("http://127.0.0.1:9", "m", "s")):
            with pytest.raises(ToolError) as failed:
                await with_state(note)(text="a")
        assert str(failed.value) == "the tool was not run: the rollout's state could not be read (no answer)"
