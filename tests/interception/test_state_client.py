"""The client of the state channel: what it does again, what it does not, and that no update is lost or made twice."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import stamina
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interception import InterceptionServer, RolloutSession, Slot, StateClient, StateConflictError, StateError
from tests.clients.proxy import CuttingProxy
from tests.helpers import Switch, until
from tests.interception.edge import Fault, Pass, Unreliable, cut_after, cut_before, status
from tests.interception.fakes import new_session

SERVICE = "the-secret-of-a-shared-tool-server"


@asynccontextmanager
async def shared(session: RolloutSession | None = None) -> AsyncIterator[tuple[RolloutSession, Slot, Unreliable]]:
    """A rollout whose state is reached through an edge."""
    session = session or new_session(state={"n": 0}, task="count")
    async with InterceptionServer(state_service_secrets=(SERVICE,)) as server, server.acquire(session) as slot:
        edge = Unreliable(slot.base_url)
        async with edge.serving() as url:
            yield session, slot._replace(base_url=url), edge


def client(slot: Slot, patience: float = 45.0) -> StateClient:
    return StateClient(slot.base_url, slot.state_secret, patience=patience)


class TestCalls:
    async def test_reading_writing_and_the_task(self) -> None:
        async with shared() as (session, slot, _), client(slot) as state:
            value, tag = await state.get()
            assert value == {"n": 0}
            after = await state.put({"n": 1}, if_match=tag)
            assert await state.get() == ({"n": 1}, after)
            assert session.state == {"n": 1}
            assert await state.task() == "count"

    async def test_a_shared_tool_server_names_the_session(self) -> None:
        async with (
            shared() as (session, slot, _),
            StateClient(slot.base_url + "/", SERVICE, session_id=session.id) as state,
        ):
            await state.put(5)
            assert session.state == 5

    async def test_a_conflict_is_an_error_of_its_own(self) -> None:
        async with shared() as (session, slot, _), client(slot) as state:
            _, tag = await state.get()
            session.state = {"n": 7}
            with pytest.raises(StateConflictError, match="read it again"):
                await state.put({"n": 1}, if_match=tag)
            assert session.state == {"n": 7}

    async def test_what_is_no_json_is_not_sent(self) -> None:
        async with shared() as (_, slot, edge), client(slot) as state:
            for value in (float("nan"), {"a": float("inf")}):
                with pytest.raises(ValueError, match="JSON"):
                    await state.put(value)
            assert edge.requests == 0

    async def test_its_repr_and_its_errors_have_no_secret(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG)
        async with shared() as (_, slot, edge), client(slot, patience=0.2) as state:
            edge.faults = [status(503)] * 20
            with pytest.raises(StateError) as failed:
                await state.get()
            for text in (repr(state), str(failed.value), caplog.text):
                assert slot.state_secret not in text


class TestAgainOrNot:
    @pytest.mark.parametrize("fault", [status(500), status(502), status(503), cut_before, cut_after])
    async def test_a_fault_or_a_5xx_is_asked_again(self, fault: Fault) -> None:
        async with shared() as (session, slot, edge), client(slot) as state:
            edge.faults = [fault, fault]
            assert (await state.get())[0] == {"n": 0}
            assert edge.requests == 3
            edge.faults = [fault, fault]
            await state.put({"n": 1})
            assert (session.state, edge.requests) == ({"n": 1}, 6)

    async def test_a_server_that_comes_a_little_later_is_waited_for(self) -> None:
        async with Switch(503) as switch, StateClient(switch.url, "secret") as state:
            reading = asyncio.create_task(state.task())
            await until(lambda: switch.hits)
            switch.behaviour = 200  # its answer, "ok", is no state
            with pytest.raises(StateError, match="no interception server"):
                await reading

    async def test_a_refused_connection_is_tried_again_until_patience_ends(self) -> None:
        state = StateClient("http://127.0.0.1:9", "secret", patience=0.3)
        with pytest.raises(StateError) as failed:
            await state.get()
        await state.close()
        assert (failed.value.status, failed.value.may_pass) == (None, True)

    @pytest.mark.parametrize("code", [400, 401, 403, 404, 409, 413, 429])
    async def test_a_4xx_is_final(self, code: int) -> None:
        async with shared() as (_, slot, edge), client(slot) as state:
            for ask in (state.get(), state.put({}), state.task()):
                edge.requests = 0
                edge.faults = [status(code)]
                with pytest.raises(StateError) as refused:
                    await ask
                assert (refused.value.status, refused.value.may_pass, edge.requests) == (code, False, 1)

    @pytest.mark.parametrize("code", [301, 307, 200])
    async def test_an_answer_of_somebody_elses_is_an_error(self, code: int) -> None:
        async with shared() as (_, slot, edge), client(slot, patience=0.2) as state:
            edge.faults = [status(code)]
            with pytest.raises(StateError):
                await state.get()
            assert edge.requests == 1
            edge.faults = [status(code)]
            with pytest.raises(StateError):
                await state.put({"n": 1})
            assert edge.requests == 2

    async def test_the_reason_of_a_refusal_is_told(self) -> None:
        async with shared(new_session(state=[1], state_type=list[int])) as (_, slot, _), client(slot) as state:
            with pytest.raises(StateError, match="400, the state is not of its type: 0: Input"):
                await state.put(["x"])

    async def test_a_write_whose_answer_was_lost_is_not_made_over_a_later_one(self) -> None:
        async with shared() as (session, slot, edge), client(slot) as state:

            async def overtaken(request: web.Request, pass_on: Pass) -> web.StreamResponse:
                await pass_on()
                session.state = {"n": "of another"}
                return await cut_before(request, pass_on)

            edge.faults = [overtaken]
            await state.put({"n": 1})
            assert session.state == {"n": "of another"}


class TestConcurrentWriters:
    """Writers that read, add to what they read, and write on the condition that it has not changed."""

    FAULTS = (None, None, None, status(500), status(502), cut_before, cut_after)

    @pytest.fixture(autouse=True)
    def at_once(self) -> Iterator[None]:
        """What is tried again is tried at once."""
        stamina.set_testing(True, attempts=100)
        yield
        stamina.set_testing(False)

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        writers=st.integers(2, 5),
        additions=st.integers(1, 4),
        faults=st.lists(st.sampled_from(range(len(FAULTS))), max_size=12),
    )
    def test_no_update_is_lost_and_none_is_made_twice(self, writers: int, additions: int, faults: list[int]) -> None:
        async def run() -> list[str]:
            async def pass_through(request: web.Request, pass_on: Pass) -> web.StreamResponse:
                return await pass_on()

            async with shared(new_session(state={"made": []})) as (session, slot, edge):
                edge.faults = [self.FAULTS[number] or pass_through for number in faults]

                async def writer(name: str) -> None:
                    async with client(slot) as state:
                        for number in range(additions):

                            def add(value: dict[str, list[str]], what: str = f"{name}.{number}") -> None:
                                value["made"].append(what)

                            await state.update(add)

                await asyncio.gather(*(writer(str(number)) for number in range(writers)))
                return list(session.state["made"])

        made = asyncio.run(run())
        assert sorted(made) == sorted(f"{name}.{number}" for name in range(writers) for number in range(additions))
        for name in range(writers):
            assert [one for one in made if one.startswith(f"{name}.")] == [f"{name}.{n}" for n in range(additions)]

    async def test_without_the_condition_updates_are_lost(self) -> None:
        """What the property would find if conditions were not honoured: that it can fail at all."""
        async with shared(new_session(state=0)) as (session, slot, _), client(slot) as one, client(slot) as two:
            (first, _), (second, _) = await one.get(), await two.get()
            await one.put(first + 1)
            await two.put(second + 1)
            assert session.state == 1


async def test_a_connection_cut_in_the_answer_is_asked_again() -> None:
    session = new_session(state={"n": 0})
    async with InterceptionServer() as server, server.acquire(session) as slot, CuttingProxy(slot.base_url) as proxy:
        proxy.cut_at(b'{"n"')
        async with StateClient(proxy.url, slot.state_secret) as state:
            assert (await state.get())[0] == {"n": 0}
        assert proxy.cuts == 1
