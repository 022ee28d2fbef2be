"""`keep_serving` against real servers: `gateway` stands for the public URL, `local` for the service behind it."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.helpers import Switch, until
from tunnel import (
    HEALTH_PATH,
    Gone,
    KeepAlivePolicy,
    Restarted,
    RestartFailed,
    StateChanged,
    TunnelError,
    TunnelEvent,
    TunnelGoneError,
    keep_serving,
)
from tunnel.keepalive import KeepAlive

# Not simply scaled down: a probe of a server that is well must not time out on a busy machine.
POLICY = KeepAlivePolicy(
    rule="plain",
    period=0.05,
    confirm_after=0.05,
    probe_timeout=20,
    report_gap=0,
    exit_poll=0.01,
    restart_timeout=20,
    restart_backoff=0.01,
    restart_backoff_max=0.05,
    give_up_after=None,
)
NEVER = 3600.0
SEVERAL = 6  # probes, enough for a restart that should not happen to have happened
TIMEOUT = 60.0


class FakeClient:
    """A tunnel client whose restarts go as scripted (an error to raise, or something to await), then succeed."""

    def __init__(self, url: str, *script: Exception | Callable[[], Awaitable[object]]) -> None:
        self.url: str | None = url
        self.is_running = True
        self.calls = 0
        self.on_success: Callable[[], None] = lambda: None
        self._script = list(script)

    async def restart(self) -> str:
        self.calls += 1
        if self._script:
            match self._script.pop(0):
                case Exception() as error:
                    raise error
                case other:
                    await other()
        self.is_running = True
        self.on_success()
        assert self.url is not None
        return self.url


@dataclass
class Bench:
    """A client with its gateway and local service, and what was told of them."""

    gateway: Switch
    local: Switch
    client: FakeClient
    events: list[TunnelEvent] = field(default_factory=list)

    def keep(self, *, on_event: Callable[[TunnelEvent], None] | None = None, **policy: Any) -> asyncio.Task[None]:
        return asyncio.create_task(
            keep_serving(
                self.client,
                local_url=self.local.url,
                policy=POLICY.model_copy(update=policy),
                on_event=on_event or self.events.append,
            )
        )

    @property
    def states(self) -> list[str]:
        """The names of the states gone through."""
        names = [event.after.name for event in self.events if isinstance(event, StateChanged)]
        return [name for at, name in enumerate(names) if at == 0 or names[at - 1] != name]

    async def several_probes(self) -> None:
        seen = self.gateway.hits
        await until(lambda: self.gateway.hits >= seen + SEVERAL)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with Switch() as gateway, Switch() as local:
        yield Bench(gateway, local, FakeClient(gateway.url))


@contextlib.asynccontextmanager
async def running(task: asyncio.Task[None]) -> AsyncIterator[asyncio.Task[None]]:
    """Ends the task with the block; that it ran until then is part of every test."""
    try:
        yield task
        assert not task.done(), "keep_serving ended"
    finally:
        while not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=1)


class TestNothingToDo:
    async def test_a_url_that_serves_is_left_alone(self, bench: Bench) -> None:
        async with running(bench.keep()):
            await bench.several_probes()
            assert bench.client.calls == 0
            assert bench.events == []
            assert set(bench.gateway.paths) == set(bench.local.paths) == {HEALTH_PATH}

    async def test_one_failure_is_suspected_and_no_more(self, bench: Bench) -> None:
        bench.gateway.behaviour = 404
        async with running(bench.keep(confirm_after=NEVER)) as task:
            await until(lambda: bench.states == ["suspect"])
            assert bench.client.calls == 0
            assert not task.done()

    async def test_a_url_that_recovers_before_it_is_confirmed_is_left_alone(self, bench: Bench) -> None:
        def recover(event: TunnelEvent) -> None:
            bench.events.append(event)
            bench.gateway.behaviour = 200

        bench.gateway.behaviour = 404
        async with running(bench.keep(on_event=recover)):
            await until(lambda: bench.states == ["suspect", "serving"])
            await bench.several_probes()
            assert bench.client.calls == 0

    @pytest.mark.parametrize("behaviour", [503, 404, "garbage"])
    async def test_nothing_is_restarted_while_the_local_service_is_down(
        self, bench: Bench, behaviour: int | str
    ) -> None:
        bench.gateway.behaviour, bench.local.behaviour = 502, behaviour
        async with running(bench.keep()):
            await bench.several_probes()
            assert bench.client.calls == 0
            assert bench.states == ["local_down"]
            bench.gateway.behaviour = bench.local.behaviour = 200
            await until(lambda: bench.states == ["local_down", "serving"])

    async def test_a_local_service_whose_port_is_closed_is_down(self, bench: Bench) -> None:
        async with Switch() as closed:
            pass
        bench.gateway.behaviour = 502
        bench.local = closed
        async with running(bench.keep()):
            await bench.several_probes()
            assert bench.client.calls == 0
            assert bench.states == ["local_down"]

    async def test_a_local_service_that_is_silent_is_down(self, bench: Bench) -> None:
        bench.gateway.behaviour, bench.local.behaviour = 502, "silent"
        async with running(bench.keep(probe_timeout=0.1)):
            await bench.several_probes()
            assert bench.client.calls == 0
            assert bench.states == ["local_down"]


class TestRestart:
    @pytest.mark.parametrize("behaviour", [404, 500, 502, 204, "redirect to {local}", "garbage"])
    async def test_a_url_that_fails_twice_is_restarted_once(self, bench: Bench, behaviour: int | str) -> None:
        if isinstance(behaviour, str):
            behaviour = behaviour.format(local=bench.local.url + HEALTH_PATH)
        bench.gateway.behaviour = behaviour
        probes_before = []

        def mended() -> None:
            probes_before.append(bench.gateway.hits)
            bench.gateway.behaviour = 200

        bench.client.on_success = mended
        async with running(bench.keep()):
            await until(lambda: bench.states == ["suspect", "restarting", "serving"])
            await bench.several_probes()
            assert bench.client.calls == 1
            assert probes_before[0] >= 2

    async def test_a_url_that_accepts_and_stays_silent_fails(self, bench: Bench) -> None:
        bench.gateway.behaviour = "silent"
        async with running(bench.keep(probe_timeout=0.3)):
            await until(lambda: any(isinstance(event, Restarted) for event in bench.events), TIMEOUT)
            [reason] = {event.reason for event in bench.events if isinstance(event, Restarted)}
            assert "no answer within 0.3 s" in reason

    async def test_a_url_that_refuses_connections_fails(self, bench: Bench) -> None:
        async with Switch() as closed:
            pass
        bench.client.url = closed.url
        async with running(bench.keep()):
            await until(lambda: bench.client.calls)

    async def test_the_url_is_probed_without_following_where_it_points(self, bench: Bench) -> None:
        async with Switch() as elsewhere:
            bench.gateway.behaviour = f"redirect to {elsewhere.url}"
            async with running(bench.keep()):
                await until(lambda: bench.client.calls)
            assert elsewhere.hits == 0

    async def test_a_client_that_exited_is_restarted_without_a_probe(self, bench: Bench) -> None:
        bench.client.is_running = False
        async with running(bench.keep(period=NEVER)):
            await until(lambda: bench.states == ["restarting", "serving"])
            assert bench.client.calls == 1
            restarted = next(event for event in bench.events if isinstance(event, Restarted))
            assert restarted.reason == "its client exited"
            assert bench.gateway.hits == 1, "the one that verifies it"

    async def test_a_client_that_exits_while_a_probe_hangs_is_restarted_at_once(self, bench: Bench) -> None:
        bench.gateway.behaviour = "silent"
        async with running(bench.keep(probe_timeout=NEVER)):
            await until(lambda: bench.gateway.hits)
            bench.client.is_running = False
            await until(lambda: bench.client.calls == 1)

    async def test_a_restart_that_fails_is_tried_again(self, bench: Bench) -> None:
        bench.client = FakeClient(bench.gateway.url, *[TunnelError("proxy already exists")] * 4)
        bench.client.is_running = False
        async with running(bench.keep()):
            await until(lambda: "serving" in bench.states)
            assert bench.client.calls == 5
            failed = [event for event in bench.events if isinstance(event, RestartFailed)]
            assert [(event.reason, event.error) for event in failed] == [
                ("its client exited", "proxy already exists")
            ] * 4

    async def test_a_restart_that_never_returns_is_ended_and_tried_again(self, bench: Bench) -> None:
        ended = []

        async def for_ever() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        bench.client = FakeClient(bench.gateway.url, for_ever)
        bench.client.is_running = False
        async with running(bench.keep(restart_timeout=0.1)):
            await until(lambda: "serving" in bench.states)
            assert bench.client.calls == 2
            assert ended == [True]
            failed = next(event for event in bench.events if isinstance(event, RestartFailed))
            assert failed.error == "no end within 0.1 s"

    async def test_a_restart_that_fails_in_an_unforeseen_way_is_logged_and_tried_again(
        self, bench: Bench, caplog: pytest.LogCaptureFixture
    ) -> None:
        bench.client = FakeClient(bench.gateway.url, KeyError("tunnel_id"))
        bench.client.is_running = False
        async with running(bench.keep()):
            await until(lambda: "serving" in bench.states)
            assert bench.client.calls == 2
        [record] = [record for record in caplog.records if record.exc_info]
        assert (record.name, record.levelno) == ("tunnel", logging.ERROR)
        assert "unforeseen" in record.getMessage()
        assert bench.gateway.url in record.getMessage()

    async def test_a_foreseen_failure_is_no_traceback(self, bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
        bench.client = FakeClient(bench.gateway.url, TunnelError("proxy already exists"))
        bench.client.is_running = False
        async with running(bench.keep()):
            await until(lambda: "serving" in bench.states)
        assert not [record for record in caplog.records if record.exc_info]
        assert any("proxy already exists" in record.getMessage() for record in caplog.records)

    async def test_a_trailing_slash_is_no_other_url(self, bench: Bench) -> None:
        bench.client = FakeClient(bench.gateway.url + "/")
        bench.client.is_running = False
        async with running(bench.keep()):
            await until(lambda: bench.states == ["restarting", "serving"])
            assert set(bench.gateway.paths) == {HEALTH_PATH}


class TestGone:
    async def test_refused_as_gone_and_exited_ends_keep_serving(self, bench: Bench) -> None:
        bench.client = FakeClient(bench.gateway.url, TunnelGoneError("no such tunnel"))
        bench.client.is_running = False
        async with asyncio.timeout(TIMEOUT):
            with pytest.raises(TunnelGoneError, match=f"{bench.gateway.url} is gone: no such tunnel"):
                await bench.keep()
        assert bench.client.calls == 1

    async def test_refused_as_gone_while_the_url_is_dead_ends_keep_serving(self, bench: Bench) -> None:
        bench.gateway.behaviour = 404
        bench.client = FakeClient(bench.gateway.url, TunnelGoneError("no such tunnel"))
        async with asyncio.timeout(TIMEOUT):
            with pytest.raises(TunnelGoneError, match="no such tunnel"):
                await bench.keep()
        assert bench.client.calls == 1
        assert bench.gateway.hits >= 3, "asked once more after the refusal"

    @pytest.mark.parametrize("slash", ["", "/"])
    async def test_refused_as_gone_but_the_url_recovers_is_not_gone(self, bench: Bench, slash: str) -> None:
        async def refused_and_back() -> None:
            bench.gateway.behaviour = 200
            raise TunnelGoneError("no such tunnel")

        bench.gateway.behaviour = 404
        bench.client = FakeClient(bench.gateway.url + slash, refused_and_back)
        async with running(bench.keep()):
            await until(lambda: bench.states[-1:] in (["serving"], ["gone"]))
            assert bench.states == ["suspect", "restarting", "serving"]
            await bench.several_probes()
            assert bench.client.calls == 1
            assert bench.states[-1] == "serving"

    async def test_another_url_is_gone_and_the_error_names_both(self, bench: Bench) -> None:
        async def moved() -> None:
            bench.client.url = "http://other.example"

        bench.client = FakeClient(bench.gateway.url, moved)
        bench.client.is_running = False
        async with asyncio.timeout(TIMEOUT):
            with pytest.raises(TunnelGoneError) as caught:
                await bench.keep()
        assert "http://other.example" in str(caught.value)
        assert bench.gateway.url in str(caught.value)

    async def test_a_url_that_answered_and_then_serves_nobody_is_given_up(self, bench: Bench) -> None:
        task = bench.keep(give_up_after=0.5)
        await until(lambda: bench.gateway.hits)
        bench.gateway.behaviour = 404
        async with asyncio.timeout(TIMEOUT):
            with pytest.raises(TunnelGoneError, match=r"not serving for 0\.5 s, \d+ restarts?$"):
                await task

    async def test_a_client_that_was_not_started_is_an_error(self, bench: Bench) -> None:
        bench.client.url = None
        with pytest.raises(TunnelError, match="start it before"):
            await bench.keep()


class TestEvents:
    async def test_they_come_in_order(self, bench: Bench) -> None:
        bench.gateway.behaviour = 404
        bench.client = FakeClient(bench.gateway.url, TunnelError("busy"), TunnelError("busy"))

        def mended() -> None:
            bench.gateway.behaviour = 200

        bench.client.on_success = mended
        async with running(bench.keep()):
            await until(lambda: bench.states[-1:] == ["serving"])
        kinds = [type(event) for event in bench.events if not isinstance(event, StateChanged)]
        assert kinds == [RestartFailed, RestartFailed, Restarted]
        assert bench.states == ["suspect", "restarting", "serving"]
        order = [event.after.name if isinstance(event, StateChanged) else type(event) for event in bench.events]
        assert order[:3] == ["suspect", "restarting", RestartFailed]
        assert order[-3:] == [Restarted, "restarting", "serving"]
        assert {event.url for event in bench.events} == {bench.gateway.url}
        times = [event.at for event in bench.events]
        assert times == sorted(times)

    async def test_each_change_starts_where_the_last_one_ended(self, bench: Bench) -> None:
        bench.client = FakeClient(bench.gateway.url, TunnelError("busy"))
        bench.client.is_running = False
        async with running(bench.keep()):
            await until(lambda: bench.states[-1:] == ["serving"])
        changes = [event for event in bench.events if isinstance(event, StateChanged)]
        assert changes[0].before.name == "serving"
        assert [change.before for change in changes[1:]] == [change.after for change in changes[:-1]]

    async def test_gone_is_said_once_and_last(self, bench: Bench) -> None:
        bench.client = FakeClient(bench.gateway.url, TunnelGoneError("no such tunnel"))
        bench.client.is_running = False
        task = bench.keep()
        await until(task.done)
        error = task.exception()
        assert isinstance(error, TunnelGoneError)
        assert [type(event) for event in bench.events[-2:]] == [StateChanged, Gone]
        assert bench.states[-1] == "gone"
        [gone] = [event for event in bench.events if isinstance(event, Gone)]
        assert gone.error is error

    async def test_a_callback_that_raises_is_logged_and_survived(
        self, bench: Bench, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(event: TunnelEvent) -> None:
            bench.events.append(event)
            raise RuntimeError("a defect in the callback")

        bench.client.is_running = False
        async with running(bench.keep(on_event=broken)):
            await until(lambda: bench.states == ["restarting", "serving"])
            assert bench.client.calls == 1
        logged = [record for record in caplog.records if "on_event failed" in record.getMessage()]
        assert len(logged) == len(bench.events)
        assert all(record.name == "tunnel" and record.exc_info for record in logged)


def ours(before: set[asyncio.Task[Any]]) -> set[asyncio.Task[Any]]:
    """Tasks that are left, but for those of the test's own servers."""
    return {task for task in asyncio.all_tasks() - before if "RequestHandler" not in repr(task.get_coro())}


class TestCancelled:
    async def test_while_it_waits(self, bench: Bench) -> None:
        before = asyncio.all_tasks()
        task = bench.keep()
        await bench.several_probes()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ours(before) == set()
        await until(lambda: bench.gateway.connections + bench.local.connections == 0)

    async def test_while_a_probe_is_under_way(self, bench: Bench) -> None:
        bench.gateway.behaviour = bench.local.behaviour = "silent"
        before = asyncio.all_tasks()
        task = bench.keep(probe_timeout=NEVER)
        await until(lambda: bench.gateway.hits and bench.local.hits)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ours(before) == set()
        await until(lambda: bench.gateway.connections + bench.local.connections == 0)

    async def test_a_restart_under_way_ends_first_for_a_cancelled_one_leaves_no_client(self, bench: Bench) -> None:
        may_end = asyncio.Event()
        bench.client = FakeClient(bench.gateway.url, may_end.wait)
        bench.client.is_running = False
        before = asyncio.all_tasks()
        task = bench.keep()
        await until(lambda: bench.client.calls)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert bench.client.is_running
        assert bench.client.calls == 1
        assert ours(before) == set()

    async def test_a_restart_that_never_ends_holds_it_up_for_its_timeout_alone(
        self, bench: Bench, caplog: pytest.LogCaptureFixture
    ) -> None:
        bench.client = FakeClient(bench.gateway.url, asyncio.Event().wait)
        bench.client.is_running = False
        before = asyncio.all_tasks()
        task = bench.keep(restart_timeout=0.2)
        await until(lambda: bench.client.calls)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ours(before) == set()
        assert "its last restart failed: TimeoutError" in caplog.text

    async def test_a_restart_is_broken_off_where_the_client_ends_too(self, bench: Bench) -> None:
        ended = []

        async def for_ever() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        bench.client = FakeClient(bench.gateway.url, for_ever)
        bench.client.is_running = False
        before = asyncio.all_tasks()
        task = asyncio.create_task(KeepAlive(bench.client, local_url=bench.local.url, policy=POLICY).run())
        await until(lambda: bench.client.calls)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == [True]
        assert ours(before) == set()

    async def test_in_the_moment_a_restart_ends(self, bench: Bench) -> None:
        bench.client.is_running = False
        task = bench.keep()

        def cancel() -> None:
            task.cancel()

        bench.client.on_success = cancel
        try:
            await until(lambda: bench.client.calls)
            await until(task.done, timeout=5)  # lost, the cancellation would leave it running for ever
        finally:
            task.cancel()
            await asyncio.wait([task])
        assert task.cancelled()
        assert bench.client.calls == 1


class TestTwoOverOneClient:
    @pytest.mark.parametrize("rule", ["evidence", "plain"])
    async def test_one_that_exited_is_restarted_once(self, bench: Bench, rule: str) -> None:
        may_end = asyncio.Event()
        bench.client = FakeClient(bench.gateway.url, may_end.wait)
        bench.client.is_running = False
        told: list[TunnelEvent] = []
        async with running(bench.keep(rule=rule)), running(bench.keep(rule=rule, on_event=told.append)):
            await until(lambda: bench.states == ["restarting"] and told)
            may_end.set()
            await until(lambda: bench.states[-1] == "serving" and isinstance(told[-1], StateChanged))
            await bench.several_probes() if rule == "plain" else await asyncio.sleep(0.2)
            assert bench.client.calls == 1
        for events in (bench.events, told):
            assert [type(event) for event in events if not isinstance(event, StateChanged)] == [Restarted]

    async def test_what_one_saw_before_the_others_restart_counts_for_nothing(self, bench: Bench) -> None:
        async def mended() -> None:
            await asyncio.sleep(0.2)
            bench.gateway.behaviour = 200

        bench.gateway.behaviour = 404
        bench.client = FakeClient(bench.gateway.url, mended)
        async with running(bench.keep()), running(bench.keep()):
            await until(lambda: bench.states and bench.states[-1] == "serving")
            await bench.several_probes()
            assert bench.client.calls == 1

    async def test_one_that_breaks_off_a_restart_leaves_it_to_the_other_to_try_again(self, bench: Bench) -> None:
        bench.client = FakeClient(bench.gateway.url, asyncio.Event().wait)
        bench.client.is_running = False
        first = asyncio.create_task(KeepAlive(bench.client, local_url=bench.local.url, policy=POLICY).run())
        async with running(bench.keep()):
            await until(lambda: bench.states == ["restarting"])
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            await until(lambda: bench.states[-1] == "serving")
            assert bench.client.calls == 2


class TestNoHealthRoute:
    @pytest.mark.parametrize("rule", ["evidence", "plain"])
    async def test_any_answer_of_the_service_will_do(self, bench: Bench, rule: str) -> None:
        bench.gateway.behaviour = bench.local.behaviour = 401
        policy = POLICY.model_copy(update={"rule": rule, "idle_spacing": 0.02})
        async with running(
            asyncio.create_task(
                keep_serving(bench.client, None, local_url=bench.local.url, policy=policy, on_event=bench.events.append)
            )
        ):
            await bench.several_probes()
            assert (bench.events, bench.client.calls) == ([], 0)
            assert set(bench.gateway.paths) == {"/"}


class TestHandles:
    """`KeepAlive`, which `Tunnel` uses."""

    async def test_a_report_brings_a_probe_forward(self, bench: Bench) -> None:
        keepalive = KeepAlive(
            bench.client,
            local_url=bench.local.url,
            policy=POLICY.model_copy(update={"period": NEVER, "exit_poll": NEVER}),
        )
        async with running(asyncio.create_task(keepalive.run())):
            keepalive.report("connection reset")
            await until(lambda: bench.gateway.hits == 1)
            await self.report_until_probed(keepalive, bench, hits=2)
            assert keepalive.state.name == "serving"
            assert bench.client.calls == 0

    async def test_reports_do_not_confirm_a_failure(self, bench: Bench) -> None:
        bench.gateway.behaviour = 404
        policy = POLICY.model_copy(update={"period": NEVER, "confirm_after": NEVER})
        keepalive = KeepAlive(bench.client, local_url=bench.local.url, policy=policy)
        async with running(asyncio.create_task(keepalive.run())):
            await self.report_until_probed(keepalive, bench, hits=SEVERAL)
            await until(lambda: keepalive.state.name == "suspect")
            assert bench.client.calls == 0

    async def report_until_probed(self, keepalive: KeepAlive, bench: Bench, *, hits: int) -> None:
        def reported() -> bool:
            keepalive.report("connection reset")  # again and again: one that comes during a probe asks for no other
            return bench.gateway.hits >= hits

        await until(reported)

    async def test_restarts_are_counted(self, bench: Bench) -> None:
        keepalive = KeepAlive(bench.client, local_url=bench.local.url, policy=POLICY)
        async with running(asyncio.create_task(keepalive.run())):
            for count in (1, 2, 3):
                bench.client.is_running = False
                await until(lambda count=count: keepalive.restarts == count)
        assert bench.client.calls == 3

    async def test_one_that_only_watches_shows_the_state_and_restarts_nothing(self, bench: Bench) -> None:
        keepalive = KeepAlive(
            bench.client,
            local_url=bench.local.url,
            policy=POLICY.model_copy(update={"give_up_after": 0.05}),
            can_restart=False,
        )
        async with running(asyncio.create_task(keepalive.run())):
            await bench.several_probes()
            bench.gateway.behaviour = 404
            bench.client.is_running = False
            await until(lambda: keepalive.state.name == "suspect")
            await bench.several_probes()
            assert keepalive.state.name == "suspect"
            bench.gateway.behaviour = 200
            await until(lambda: keepalive.state.name == "serving")
        assert bench.client.calls == 0

    async def test_a_url_nobody_uses_is_never_given_up(self, bench: Bench) -> None:
        used = False
        keepalive = KeepAlive(
            bench.client,
            local_url=bench.local.url,
            policy=POLICY.model_copy(update={"give_up_after": 0.05}),
            in_use=lambda: used,
        )
        task = asyncio.create_task(keepalive.run())
        async with asyncio.timeout(TIMEOUT):
            await bench.several_probes()
            bench.gateway.behaviour = 404
            await until(lambda: keepalive.restarts >= 3)
            assert not task.done()
            used = True
            with pytest.raises(TunnelGoneError, match="not serving for"):
                await task
