"""A rollout's session: how it ends, and what it keeps to itself."""

import asyncio

import pytest
from pydantic import SecretStr, ValidationError

from interception import RolloutSession, Slot, Upstream
from tests.helpers import until
from tests.interception.fakes import new_session, other_tasks, settle

KEY = "sk-upstream-secret"


class Work:
    """A piece of work that runs until told, and takes its time to end when it is cancelled."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.may_end = asyncio.Event()
        self.running = self.cancelled = self.ended = False

    async def run(self) -> str:
        self.running = True
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            await self.may_end.wait()
            raise
        finally:
            self.ended = True
        return "done"


class TestGuard:
    async def test_gives_the_result(self) -> None:
        work = Work()
        work.go.set()
        assert await new_session().guard(work.run()) == "done"
        await until(lambda: not other_tasks())

    async def test_raises_what_the_work_raises(self) -> None:
        async def fails() -> None:
            raise LookupError("of the harness")

        with pytest.raises(LookupError, match="of the harness"):
            await new_session().guard(fails())

    async def test_takes_any_awaitable(self) -> None:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        future.set_result(3)
        assert await new_session().guard(future) == 3

    async def test_raises_the_error_as_soon_as_it_is_set(self) -> None:
        session, work = new_session(), Work()
        work.may_end.set()
        guarded = asyncio.create_task(session.guard(work.run()))
        await until(lambda: work.running)
        error = RuntimeError("the tunnel was lost")
        session.fail(error)
        with pytest.raises(RuntimeError) as raised:
            await guarded
        assert raised.value is error
        assert work.cancelled
        assert work.ended

    async def test_raises_an_error_that_was_set_before(self) -> None:
        session, work = new_session(), Work()
        work.may_end.set()
        session.fail(RuntimeError("already over"))
        with pytest.raises(RuntimeError, match="already over"):
            await session.guard(work.run())
        assert not work.running or work.ended
        await until(lambda: not other_tasks())

    async def test_the_error_goes_before_a_result_that_came_at_the_same_time(self) -> None:
        session, work = new_session(), Work()
        guarded = asyncio.create_task(session.guard(work.run()))
        await until(lambda: work.running)
        work.go.set()
        session.fail(RuntimeError("lost"))
        with pytest.raises(RuntimeError, match="lost"):
            await guarded

    async def test_the_error_goes_before_a_failure_that_came_at_the_same_time(self) -> None:
        session = new_session()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        guarded = asyncio.create_task(session.guard(future))
        await settle()
        future.set_exception(LookupError("the connection was reset"))
        session.fail(RuntimeError("lost"))
        with pytest.raises(RuntimeError, match="lost"):
            await guarded

    async def test_waits_for_the_cancelled_work_to_end(self) -> None:
        session, work = new_session(), Work()
        guarded = asyncio.create_task(session.guard(work.run()))
        await until(lambda: work.running)
        session.fail(RuntimeError("lost"))
        await until(lambda: work.cancelled)
        await settle()
        assert not guarded.done()
        work.may_end.set()
        with pytest.raises(RuntimeError, match="lost"):
            await guarded
        assert work.ended

    async def test_cancelled_twice_it_still_waits_for_the_work_and_is_cancelled(self) -> None:
        session, work = new_session(), Work()
        guarded = asyncio.create_task(session.guard(work.run()))
        await until(lambda: work.running)
        guarded.cancel()
        await until(lambda: work.cancelled)
        guarded.cancel()
        await settle()
        assert not guarded.done()
        work.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await guarded
        assert work.ended
        await until(lambda: not other_tasks())


class TestEnd:
    def test_a_new_session_has_not_ended(self) -> None:
        session = new_session(id="mine")
        assert (session.id, session.error, session.released, session.failed.is_set()) == ("mine", None, False, False)
        assert session.trace.id == "mine"
        assert session.trace.turns == []

    def test_sessions_without_an_id_get_different_ones(self) -> None:
        assert new_session().id != new_session().id

    def test_it_fails_once(self) -> None:
        session, first = new_session(), RuntimeError("first")
        session.fail(first)
        session.fail(RuntimeError("second"))
        assert session.error is first
        assert session.failed.is_set()

    def test_release_seals_the_trace_and_can_be_repeated(self) -> None:
        session = new_session()
        session.release("over")
        session.release("over again")
        assert session.released
        assert session.trace.sealed
        assert session.error is None

    def test_its_settings_are_its_own(self) -> None:
        sampling = {"temperature": 0.5}
        session = new_session(sampling=sampling)
        sampling["temperature"] = 2.0
        assert session.sampling == {"temperature": 0.5}


class TestUpstream:
    @pytest.mark.parametrize(
        "url",
        ["", "api.openai.com/v1", "localhost:8000", "ftp://host/v1", "http://", "https:///v1", "file:///etc/passwd"],
    )
    def test_a_url_that_is_no_endpoint_is_refused_and_the_error_says_what_to_write(self, url: str) -> None:
        with pytest.raises(ValidationError, match=r"write http://HOST"):
            Upstream(base_url=url)

    @pytest.mark.parametrize("field", ["connect_timeout", "idle_timeout"])
    @pytest.mark.parametrize("value", [0, -1])
    def test_timeouts_are_positive(self, field: str, value: float) -> None:
        with pytest.raises(ValidationError, match=field):
            Upstream.model_validate({"base_url": "http://h/v1", field: value})

    def test_a_misspelt_field_is_refused(self) -> None:
        with pytest.raises(ValidationError, match="timeout"):
            Upstream.model_validate({"base_url": "http://h/v1", "timeout": 3})

    def test_the_defaults_are_those_of_the_contract(self) -> None:
        upstream = Upstream(base_url="https://api.openai.com/v1/")
        assert upstream.base_url == "https://api.openai.com/v1"
        assert (upstream.api_key, upstream.headers) == (None, {})
        assert (upstream.connect_timeout, upstream.idle_timeout) == (30.0, 600.0)
        assert Upstream(base_url="http://h", idle_timeout=None).idle_timeout is None

    def test_its_keys_are_in_no_text_made_of_it(self) -> None:
        upstream = Upstream(
            base_url="http://h/v1", api_key=SecretStr(KEY), headers={"X-Api-Token": f"{KEY}-in-a-header"}
        )
        session = RolloutSession(upstream)
        session.fail(RuntimeError("lost"))
        for text in (repr(upstream), str(upstream), repr(session), str(session), repr(session.trace), f"{upstream}"):
            assert KEY not in text

    @pytest.mark.parametrize(
        "fields",
        [
            {"base_url": "http://h/v1", "apikey": KEY},
            {"base_url": "http://h/v1", "api_key": [KEY]},
            {"base_url": "http://h/v1", "headers": {"X-Token": [KEY]}},
        ],
    )
    def test_a_key_in_the_wrong_place_is_not_in_the_error_either(self, fields: dict[str, object]) -> None:
        with pytest.raises(ValidationError) as refused:
            Upstream.model_validate(fields)
        assert KEY not in str(refused.value)

    def test_a_password_in_the_url_is_refused_or_hidden(self) -> None:
        try:
            text = repr(Upstream(base_url=f"http://user:{KEY}@h/v1"))
        except ValidationError as refused:
            text = str(refused)
        assert KEY not in text


class TestSlot:
    def test_it_is_a_triple_still(self) -> None:
        slot = Slot("http://h", "model", "state")
        base_url, model_secret, state_secret = slot
        assert (base_url, model_secret, state_secret) == slot == ("http://h", "model", "state")
        assert isinstance(slot, tuple)
        assert len(slot) == 3

    def test_its_environment_is_what_the_sdks_read(self) -> None:
        assert Slot("http://h", "model", "state").env() == {
            "OPENAI_BASE_URL": "http://h/v1",
            "OPENAI_API_KEY": "model",
            "ANTHROPIC_BASE_URL": "http://h",
            "ANTHROPIC_API_KEY": "model",
        }

    def test_its_secrets_are_in_no_text_made_of_it(self) -> None:
        slot = Slot("http://h", "model-secret", "state-secret")
        for text in (repr(slot), str(slot), f"{slot}", f"{[slot]}"):
            assert "secret'" not in text.replace("model_secret", "").replace("state_secret", "")
            assert "model-secret" not in text
            assert "state-secret" not in text
