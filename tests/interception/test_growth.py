"""The elastic pool under load and loss: starts that fail, hang or wait, bounds, idle servers, and what it says."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from interception import (
    AcquireTimeoutError,
    ElasticInterceptionPool,
    ElasticInterceptionPoolConfig,
    InterceptionServer,
    RolloutSession,
    StaticInterceptionPool,
    StaticInterceptionPoolConfig,
)
from tests.helpers import until
from tests.interception.fakes import (
    FakeMember,
    FakeMembers,
    FakeTunnel,
    FakeTunnels,
    Rollout,
    hangs_are_failures,
    new_session,
    other_tasks,
    seated,
    settle,
)
from tunnel import TunnelError, TunnelLimitError

__all__ = ["hangs_are_failures"]
pytestmark = pytest.mark.usefixtures("hangs_are_failures")

QUOTA = "maximum number of tunnels (5) reached: delete one, or upgrade"
FOREVER = 3600.0


def elastic(members: FakeMembers, multiplex: int = 2, **options: Any) -> ElasticInterceptionPool:
    options = {"start_backoff": 0.001, "start_patience": FOREVER, **options}
    config = ElasticInterceptionPoolConfig(multiplex=multiplex, **options)
    return ElasticInterceptionPool(config, server_factory=members)


def blip(text: str = "a blip") -> FakeMember:
    return FakeMember(error=TunnelError(text))


async def left(*rollouts: Rollout) -> None:
    for rollout in rollouts:
        await rollout.leave()


class TestStartsThatFail:
    async def test_the_warm_up_is_tried_again(self) -> None:
        members = FakeMembers(blip(), blip())
        async with elastic(members) as pool:
            assert [member.stops for member in members] == [1, 1, 0]
            assert len(pool.servers) == 1
            rollout = Rollout(pool)
            await seated(rollout)
            await rollout.leave()

    async def test_a_growth_is_tried_again_and_its_waiters_never_know(self, caplog: pytest.LogCaptureFixture) -> None:
        members = FakeMembers(FakeMember(), blip(), blip("another one"))
        async with elastic(members, multiplex=1) as pool:
            rollouts = [Rollout(pool), Rollout(pool)]
            await seated(*rollouts)
            assert len(members.made) == 4
            assert [member.stops for member in members] == [0, 1, 1, 0]
            stats = pool.stats()
            assert (stats.failed_starts, stats.last_error) == (2, "another one")
            await left(*rollouts)
        assert "trying again: a blip" in caplog.text

    async def test_the_last_cause_is_told_to_those_it_would_have_served(self) -> None:
        members = FakeMembers(FakeMember(), blip("one"), blip("two"), blip("three"))
        async with elastic(members, multiplex=2) as pool:
            holders = [Rollout(pool), Rollout(pool)]
            await seated(*holders)
            waiters = [Rollout(pool), Rollout(pool)]
            for waiter in waiters:
                with pytest.raises(TunnelError, match="three"):
                    await waiter.task
            assert len(members.made) == 4
            await left(*holders)

    async def test_tries_that_its_tunnel_has_made_by_itself_count(self) -> None:
        error = TunnelError("no upstream")
        error.tries = 3
        members = FakeMembers(FakeMember(), FakeMember(error=error))
        async with elastic(members, multiplex=1, start_tries=3) as pool:
            holder = Rollout(pool)
            await seated(holder)
            with pytest.raises(TunnelError, match="no upstream"):
                await Rollout(pool).task
            assert len(members.made) == 2
            await holder.leave()

    async def test_what_is_no_tunnel_error_is_not_tried_again(self) -> None:
        members = FakeMembers(FakeMember(), FakeMember(error=LookupError("a defect")))
        async with elastic(members, multiplex=1) as pool:
            holder = Rollout(pool)
            await seated(holder)
            with pytest.raises(TunnelError, match="a defect") as raised:
                await Rollout(pool).task
            assert isinstance(raised.value.__cause__, LookupError)
            assert len(members.made) == 2
            await holder.leave()

    async def test_a_server_that_cannot_even_be_made_holds_up_nobody(self) -> None:
        class Broken(FakeMembers):
            def __call__(self, config: Any) -> FakeMember:
                if self.made:
                    raise TypeError("the factory is broken")
                return super().__call__(config)

        async with elastic(Broken(), multiplex=1) as pool:
            holder = Rollout(pool)
            await seated(holder)
            with pytest.raises(TunnelError, match="the factory is broken"):
                await Rollout(pool).task
            await holder.leave()

    async def test_nobody_waits_any_more_so_it_is_not_tried_again(self) -> None:
        failing = FakeMember(error=TunnelError("a blip"), held=True)
        members = FakeMembers(FakeMember(), failing)
        async with elastic(members, multiplex=1) as pool:
            holder = Rollout(pool)
            await seated(holder)
            waiter = Rollout(pool)
            await until(lambda: failing.starts)
            await holder.leave()
            await seated(waiter)
            failing.may_start.set()
            await until(lambda: failing.stops == 1)
            await until(lambda: not pool.stats().starting)
            assert len(members.made) == 2
            await waiter.leave()

    async def test_a_freed_slot_takes_its_waiter_between_two_tries(self) -> None:
        members = FakeMembers(FakeMember(), blip())
        async with elastic(members, multiplex=1, start_backoff=FOREVER) as pool:
            holder = Rollout(pool)
            await seated(holder)
            waiter = Rollout(pool)
            await until(lambda: pool.stats().failed_starts)
            assert not waiter.seated
            await holder.leave()
            await seated(waiter)
            await waiter.leave()
        await until(lambda: not other_tasks())

    async def test_a_quota_fails_those_it_would_have_served_with_its_own_text_and_the_others_go_on(self) -> None:
        members = FakeMembers(FakeMember(), FakeMember(error=TunnelLimitError(QUOTA)))
        async with elastic(members, multiplex=2) as pool:
            holders = [Rollout(pool), Rollout(pool)]
            await seated(*holders)
            with pytest.raises(TunnelLimitError) as raised:
                await Rollout(pool).task
            assert str(raised.value) == QUOTA
            assert len(members.made) == 2  # it was not tried again
            await left(*holders)
            late = [Rollout(pool), Rollout(pool)]
            await seated(*late)
            assert members.loads == [2, 0]
            await left(*late)

    async def test_of_many_starts_at_a_quota_only_the_refused_ones_fail_their_share(self) -> None:
        members = FakeMembers(
            FakeMember(), FakeMember(), *(FakeMember(error=TunnelLimitError(QUOTA)) for _ in range(2))
        )
        async with elastic(members, multiplex=2) as pool:
            rollouts = [Rollout(pool) for _ in range(8)]
            await until(lambda: sum(rollout.task.done() for rollout in rollouts) == 4)
            await settle()
            assert [rollout.seated for rollout in rollouts] == [True] * 4 + [False] * 4
            assert members.loads == [2, 2, 0, 0]
            for rollout in rollouts[4:]:
                with pytest.raises(TunnelLimitError, match="maximum number of tunnels"):
                    await rollout.task
            await left(*rollouts[:4])

    async def test_a_spent_quota_is_not_asked_again_for_each_of_those_who_can_be_served_in_turn(self) -> None:
        refused = [FakeMember(error=TunnelLimitError(QUOTA)) for _ in range(50)]
        members = FakeMembers(FakeMember(), *refused)
        async with elastic(members, multiplex=1, max_servers=2) as pool:
            rollouts = [Rollout(pool) for _ in range(20)]
            await until(lambda: rollouts[-1].task.done())
            await settle()
            assert len(members.made) == 2
            for rollout in rollouts[:-1]:
                await seated(rollout)
                await rollout.leave()
            with pytest.raises(TunnelLimitError, match="maximum number of tunnels"):
                await rollouts[-1].task

    async def test_a_quota_without_a_server_fails_all_at_once(self) -> None:
        members = FakeMembers(*(FakeMember(error=TunnelLimitError(QUOTA)) for _ in range(50)))
        async with elastic(members, multiplex=1, max_servers=1, min_servers=0) as pool:
            rollouts = [Rollout(pool) for _ in range(20)]
            for rollout in rollouts:
                with pytest.raises(TunnelLimitError, match="maximum number of tunnels"):
                    await rollout.task
            assert len(members.made) == 1

    async def test_a_start_that_is_cancelled_from_within_is_a_failed_start(self) -> None:
        class Cancelled(FakeMember):
            async def start(self) -> None:
                raise asyncio.CancelledError

        members = FakeMembers(Cancelled(), FakeMember(), Cancelled())
        async with elastic(members, multiplex=1) as pool:
            assert pool.servers == []
            first = Rollout(pool)
            await seated(first)
            with pytest.raises(TunnelError, match="cancelled from within"):
                await Rollout(pool).task
            await first.leave()

    async def test_a_server_that_does_not_serve_takes_those_for_whom_none_can_be_started(self) -> None:
        silent = FakeMember()
        async with elastic(FakeMembers(silent, *(blip() for _ in range(3)))) as pool:
            silent.set_serving(False)
            rollout = Rollout(pool)
            await seated(rollout)
            assert silent.load == 1
            await rollout.leave()

    async def test_a_start_that_fails_while_others_can_serve_fails_nobody(self) -> None:
        failing = FakeMember(error=TunnelLimitError(QUOTA), held=True)
        good = FakeMember(held=True)
        members = FakeMembers(FakeMember(), failing, good)
        async with elastic(members, multiplex=2) as pool:
            rollouts = [Rollout(pool) for _ in range(5)]
            await until(lambda: good.starts and failing.starts)
            rollouts[0].tell()
            await until(lambda: sum(rollout.seated for rollout in rollouts) == 3)
            failing.may_start.set()
            await until(lambda: failing.stops)
            await settle()
            good.may_start.set()
            await seated(*rollouts)
            await left(*rollouts[1:])

    async def test_one_that_is_lost_while_it_starts_is_a_failed_start(self) -> None:
        class Doomed(FakeMember):
            async def start(self) -> None:
                await super().start()
                self.set_gone("deleted at once")

        members = FakeMembers(FakeMember(), Doomed(), Doomed(), Doomed())
        async with elastic(members, multiplex=1) as pool:
            holder = Rollout(pool)
            await seated(holder)
            with pytest.raises(TunnelError, match="lost while it started"):
                await Rollout(pool).task
            assert [member.stops for member in members] == [0, 1, 1, 1]
            await holder.leave()


class TestStartsThatHang:
    @pytest.fixture
    def forward(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
        """Puts the pool's clock, which stands still otherwise, forward by seconds."""
        monkeypatch.setattr("interception.placement.LEAST_PATIENCE", 1.0)
        now = [100.0]
        monkeypatch.setattr("interception.elastic.monotonic", lambda: now[0])

        def forward(seconds: float) -> None:
            now[0] += seconds

        return forward

    async def test_another_is_begun_in_its_stead(self) -> None:
        hung = FakeMember(held=True)
        members = FakeMembers(FakeMember(), hung)
        async with elastic(members, multiplex=1, start_patience=0.01) as pool:
            pool._starts._typically = None  # as if nothing were known of how long a start takes
            rollouts = [Rollout(pool), Rollout(pool)]
            await seated(*rollouts)
            assert [member.load for member in members] == [1, 0, 1]
            hung.may_start.set()
            await until(lambda: len(pool.servers) == 3)
            late = Rollout(pool)
            await seated(late)  # what it yields in the end is used, too
            assert members.loads == [1, 1, 1]
            await left(late, *rollouts)

    async def test_of_a_burst_those_that_hang_are_replaced_with_one_to_spare_and_never_beyond_the_bound(
        self, forward: Callable[[float], None]
    ) -> None:
        for bound, replaced in ((None, 4), (34, 3)):
            burst = [FakeMember(held=number % 10 == 2) for number in range(1, 32)]
            members = FakeMembers(FakeMember(), *burst, *(FakeMember(held=True) for _ in range(9)))
            async with elastic(members, multiplex=1, max_servers=bound) as pool:
                forward(1.0)
                rollouts = [Rollout(pool) for _ in range(32)]
                await seated(*(rollouts[index] for index in range(29)))
                assert len(members.made) == 32
                forward(1.1)
                pool._tick()
                await settle()
                assert len(members.made) == min(32 + replaced, bound or 99)
                for member in members:
                    member.may_start.set()
                await seated(*rollouts)
                await left(*rollouts)

    async def test_where_no_other_may_be_begun_beside_it_its_try_is_given_up(
        self, forward: Callable[[float], None]
    ) -> None:
        hung = FakeMember(held=True)
        members = FakeMembers(FakeMember(), hung, FakeMember())
        # The next try follows at once: nothing was refused.
        async with elastic(members, multiplex=1, max_servers=2, start_backoff=FOREVER) as pool:
            rollouts = [Rollout(pool), Rollout(pool)]
            await until(lambda: hung.starts)
            for seconds, said in ((1.5, ", takes longer than usual"), (0.6, "waits for its next try")):
                assert said not in str(pool.stats())
                forward(seconds)
                pool._balance()
                assert said in str(pool.stats())
                assert "max_servers is 2" in repr(pool)
            await seated(*rollouts)
            assert (hung.stops, members.loads) == (1, [1, 0, 1])
            assert "it took too long" in repr(pool)
            await left(*rollouts)

    async def test_its_last_try_is_left_to_its_end_and_so_is_one_that_nobody_waits_for(
        self, forward: Callable[[float], None]
    ) -> None:
        slow = [FakeMember(held=True) for _ in range(2)]
        members = FakeMembers(FakeMember(), *slow)
        async with elastic(members, multiplex=1, max_servers=2, start_tries=2) as pool:
            rollouts = [Rollout(pool), Rollout(pool)]
            for number, member in enumerate(slow):
                await until(lambda member=member: member.starts)  # type: ignore[misc]
                forward(99.0)
                pool._balance()
                await settle()
                assert member.stops == (number == 0)
            slow[1].may_start.set()
            await seated(*rollouts)
            assert len(members.made) == 3
            await left(*rollouts)
        members = FakeMembers(FakeMember(), FakeMember(held=True))
        async with elastic(members, multiplex=1, max_servers=2) as pool:
            holder, waiter = Rollout(pool), Rollout(pool)
            await until(lambda: members.made[-1].starts)
            await holder.leave()
            await seated(waiter)
            forward(99.0)
            pool._balance()
            await settle()
            assert members.made[-1].stops == 0
            await waiter.leave()

    async def test_one_that_failed_and_whose_end_takes_long_is_not_given_up_besides(
        self, forward: Callable[[float], None]
    ) -> None:
        failed = FakeMember(error=TunnelError("a blip"), stop_held=True)
        members = FakeMembers(FakeMember(), failed, FakeMember())
        async with elastic(members, multiplex=1, max_servers=2) as pool:
            rollouts = [Rollout(pool), Rollout(pool)]
            await until(lambda: failed.stops)
            forward(99.0)
            pool._balance()
            await settle()
            failed.may_stop.set()
            await seated(*rollouts)
            assert pool.stats().last_error == "a blip"
            await left(*rollouts)

    @pytest.mark.parametrize("rounds", range(6))
    async def test_a_stop_while_one_is_given_up_leaves_nothing(
        self, forward: Callable[[float], None], rounds: int
    ) -> None:
        hung = FakeMember(held=True, stop_held=True)
        members = FakeMembers(FakeMember(), hung)
        pool = elastic(members, multiplex=1, max_servers=2)
        await pool.start()
        rollouts = [Rollout(pool), Rollout(pool)]
        await until(lambda: hung.starts)
        forward(99.0)
        pool._balance()
        for _ in range(rounds):
            await asyncio.sleep(0)
        stopping = asyncio.create_task(pool.stop())
        await settle()
        assert not stopping.done()
        hung.may_stop.set()
        await stopping
        rollouts[0].tell()
        await asyncio.wait([rollout.task for rollout in rollouts])
        assert [isinstance(rollout.task.exception(), TunnelError) for rollout in rollouts[1:]] == [True]
        assert (len(members.made), members.running, len(pool._starts)) == (2, 0, 0)
        await until(lambda: not other_tasks())

    async def test_the_warm_up_hangs_and_the_pool_starts_all_the_same(self) -> None:
        hung = FakeMember(held=True)
        members = FakeMembers(hung)
        async with elastic(members, start_patience=0.01) as pool:
            assert [server is members.made[1] for server in pool.servers] == [True]
            assert not hung.running
        assert (hung.stops, members.running) == (1, 0)
        await until(lambda: not other_tasks())

    async def test_a_limit_beside_a_warm_up_that_hangs_is_raised_from_start(self) -> None:
        hung, refused = FakeMember(held=True), FakeMember(error=TunnelLimitError(QUOTA))
        members = FakeMembers(hung, refused)
        pool = elastic(members, start_patience=0.01)
        with pytest.raises(TunnelLimitError, match="maximum number of tunnels"):
            await pool.start()
        assert len(members.made) == 2
        assert (hung.stops, members.running) == (1, 0)
        await until(lambda: not other_tasks())

    async def test_one_that_waits_its_turn_within_the_creation_limit_does_not_hang(self) -> None:
        queued = FakeMember(held=True)
        queued.queued = True  # type: ignore[attr-defined]
        members = FakeMembers(FakeMember(), queued)
        async with elastic(members, multiplex=1, start_patience=0.01) as pool:
            pool._starts._typically = None
            rollouts = [Rollout(pool), Rollout(pool)]
            await until(lambda: queued.starts)
            # The pool looks again and again whether it is overdue; one of those looks is waited for.
            looks = len(ticks := [])
            tick = pool._tick
            pool._tick = lambda: (ticks.append(0), tick())  # type: ignore[assignment]
            pool._balance()
            await until(lambda: len(ticks) > looks + 2)
            assert len(members.made) == 2
            assert "waits for its turn" in str(pool.stats())
            queued.may_start.set()
            await seated(*rollouts)
            await left(*rollouts)


class TestBounds:
    async def test_beyond_max_servers_rollouts_wait_their_turn(self) -> None:
        members = FakeMembers()
        async with elastic(members, multiplex=2, max_servers=2) as pool:
            rollouts = [Rollout(pool) for _ in range(6)]
            await seated(*rollouts[:4])
            await settle()
            assert members.loads == [2, 2]
            assert not any(rollout.seated for rollout in rollouts[4:])
            await rollouts[0].leave()
            await seated(rollouts[4])
            assert not rollouts[5].seated
            await rollouts[1].leave()
            await seated(rollouts[5])
            await left(*rollouts[2:])
            assert len(members.made) == 2

    async def test_a_lost_server_makes_room_for_another(self) -> None:
        members = FakeMembers()
        async with elastic(members, multiplex=1, max_servers=1) as pool:
            holder = Rollout(pool)
            await seated(holder)
            waiter = Rollout(pool)
            await settle()
            members.made[0].set_gone()
            await seated(waiter)
            assert members.loads == [1, 1]
            with pytest.raises(TunnelError):
                await holder.leave()
            await waiter.leave()

    async def test_a_failed_start_at_the_bound_is_replaced_for_those_who_still_wait(self) -> None:
        members = FakeMembers(FakeMember(error=TunnelError("a blip"), held=True))
        pool = elastic(members, multiplex=1, max_servers=1, min_servers=0, start_tries=1)
        async with pool:
            rollouts = [Rollout(pool), Rollout(pool)]
            await until(lambda: members.made and members.made[0].starts)
            members.made[0].may_start.set()
            with pytest.raises(TunnelError, match="a blip"):
                await rollouts[1].task
            await seated(rollouts[0])
            await rollouts[0].leave()

    async def test_a_timeout_says_what_was_waited_for(self) -> None:
        async with elastic(FakeMembers(), multiplex=1, max_servers=1) as pool:
            holder = Rollout(pool)
            await seated(holder)
            with pytest.raises(AcquireTimeoutError) as raised:
                async with pool.acquire(new_session(), timeout=0.01):
                    pass
            text = str(raised.value)
            assert "no slot within 0.01 s" in text
            assert "1 server (1 serving), 1 of 1 slots in use, 1 waiting" in text
            assert "max_servers is 1" in text
            assert isinstance(raised.value, TunnelError)
            assert isinstance(raised.value, TimeoutError)
            assert pool.stats().waiting == 0
            await holder.leave()
            async with pool.acquire(new_session(), timeout=0):  # there is room: nothing to wait for
                assert pool.stats().in_use == 1

    async def test_a_timeout_while_a_server_starts_leaves_the_slot_to_others(self) -> None:
        hung = FakeMember(held=True)
        members = FakeMembers(FakeMember(), hung)
        async with elastic(members, multiplex=1) as pool:
            holder = Rollout(pool)
            await seated(holder)
            with pytest.raises(AcquireTimeoutError, match="1 starting"):
                async with pool.acquire(new_session(), timeout=0.01):
                    pass
            hung.may_start.set()
            await until(lambda: hung.running)
            late = Rollout(pool)
            await seated(late)
            assert members.loads == [1, 1]
            await left(holder, late)

    @pytest.mark.parametrize("timeout", ["5", -1, float("nan")])
    async def test_a_timeout_that_is_none_is_refused_and_takes_no_slot(self, timeout: Any) -> None:
        async with elastic(FakeMembers(), multiplex=1, max_servers=1) as pool:
            with pytest.raises((TypeError, ValueError)):
                async with pool.acquire(new_session(), timeout=timeout):
                    pass
            assert (pool.stats().waiting, pool.stats().in_use) == (0, 0)

    async def test_one_seated_in_time_is_left_alone_when_its_time_is_up(self) -> None:
        async with elastic(FakeMembers()) as pool, pool.acquire(new_session(), timeout=0.001):
            await asyncio.sleep(0.01)
            assert pool.stats().in_use == 1

    async def test_servers_and_static_pools_take_a_timeout_too(self) -> None:
        config = StaticInterceptionPoolConfig(servers=[{"type": "server"}])  # type: ignore[list-item]
        for interception in (InterceptionServer(), StaticInterceptionPool(config)):
            async with interception, interception.acquire(new_session(), timeout=1):
                pass

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"min_servers": 3, "max_servers": 2}, "min_servers"),
            ({"max_servers": 0}, "max_servers"),
            ({"min_servers": -1}, "min_servers"),
            ({"idle_timeout": -1}, "idle_timeout"),
            ({"start_tries": 0}, "start_tries"),
        ],
    )
    def test_a_config_that_cannot_be_is_refused(self, options: dict[str, Any], said: str) -> None:
        with pytest.raises(ValidationError, match=said):
            ElasticInterceptionPoolConfig(**options)


class TestIdleServers:
    async def test_they_are_stopped_down_to_the_floor(self) -> None:
        members = FakeMembers()
        async with elastic(members, multiplex=1, idle_timeout=0.01) as pool:
            rollouts = [Rollout(pool) for _ in range(4)]
            await seated(*rollouts)
            await left(*rollouts)
            await until(lambda: members.running == 1)
            assert len(pool.servers) == 1
            assert pool.stats().idled == 3
            rollouts = [Rollout(pool) for _ in range(2)]
            await seated(*rollouts)
            await left(*rollouts)
        assert [member.stops for member in members] == [1] * len(members.made)

    async def test_with_a_floor_of_none_all_are_stopped_and_the_next_rollout_starts_one(self) -> None:
        members = FakeMembers()
        async with elastic(members, min_servers=0, idle_timeout=0.01) as pool:
            assert members.made == []
            for _ in range(2):
                rollout = Rollout(pool)
                await seated(rollout)
                await rollout.leave()
                await until(lambda: members.running == 0)
                assert pool.servers == []
        assert len(members.made) == 2

    async def test_one_with_a_rollout_is_never_stopped(self) -> None:
        members = FakeMembers()
        async with elastic(members, multiplex=1, min_servers=0, idle_timeout=0.01) as pool:
            keeper, other = Rollout(pool), Rollout(pool)
            await seated(keeper, other)
            await other.leave()
            await until(lambda: members.running == 1)
            assert members.loads == [1, 0]
            assert members.made[0].running
            await keeper.leave()

    async def test_a_rollout_that_comes_while_one_is_being_stopped_gets_another(self) -> None:
        old = FakeMember(stop_held=True)
        members = FakeMembers(old)
        async with elastic(members, min_servers=0, idle_timeout=0.01) as pool:
            rollout = Rollout(pool)
            await seated(rollout)
            await rollout.leave()
            await until(lambda: old.stops)
            late = Rollout(pool)
            await seated(late)
            assert members.loads == [0, 1]
            old.may_stop.set()
            await late.leave()

    async def test_stop_waits_for_one_that_is_being_stopped_and_cancellation_does_not_reach_it(self) -> None:
        old = FakeMember(stop_held=True)
        pool = elastic(FakeMembers(old), min_servers=0, idle_timeout=0.01)
        await pool.start()
        rollout = Rollout(pool)
        await seated(rollout)
        await rollout.leave()
        await until(lambda: old.stops)
        stopping = asyncio.create_task(pool.stop())
        for _ in range(2):
            await settle()
            stopping.cancel()
        await settle()
        assert not stopping.done()
        old.may_stop.set()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert (old.running, old.stops) == (False, 1)
        await until(lambda: not other_tasks())

    async def test_a_rollout_that_leaves_after_the_stop_leaves_no_trace(self) -> None:
        members = FakeMembers()
        pool = elastic(members, idle_timeout=0.01)
        await pool.start()
        rollout = Rollout(pool)
        await seated(rollout)
        await pool.stop()
        await rollout.leave()
        assert pool._idle_since == {}

    async def test_one_that_is_used_past_the_pool_is_neither_stopped_nor_looked_at_without_end(self) -> None:
        members = FakeMembers()
        async with elastic(members, multiplex=1, min_servers=0, idle_timeout=0.01) as pool:
            rollout = Rollout(pool)
            await seated(rollout)
            rollout.tell()
            pair = members.made[0].register(new_session())  # by somebody who holds the server itself
            await rollout.task
            pool._idle_since[id(members.made[0])] = 0.0
            pool._timer = None
            pool._set_timer()
            assert pool._timer is None
            pool._tick()
            assert members.running == 1
            members.made[0].unregister(*pair)

    async def test_a_pool_that_met_a_limit_and_is_started_again_grows_at_once(self) -> None:
        members = FakeMembers(FakeMember(), FakeMember(error=TunnelLimitError(QUOTA)))
        pool = elastic(members, multiplex=1)
        await pool.start()
        holder = Rollout(pool)
        await seated(holder)
        with pytest.raises(TunnelLimitError):
            await Rollout(pool).task
        await holder.leave()
        await pool.stop()
        await pool.start()
        rollouts = [Rollout(pool), Rollout(pool)]
        await seated(*rollouts)
        await left(*rollouts)
        await pool.stop()

    async def test_never_where_it_is_none(self) -> None:
        members = FakeMembers()
        async with elastic(members, multiplex=1, idle_timeout=None) as pool:
            rollouts = [Rollout(pool) for _ in range(3)]
            await seated(*rollouts)
            await left(*rollouts)
            pool._tick()
            await settle()
            assert members.running == 3

    async def test_the_floor_is_warmed_up_side_by_side_and_the_first_one_is_enough(self) -> None:
        slow = FakeMember(held=True)
        members = FakeMembers(slow)
        async with elastic(members, min_servers=3) as pool:
            assert [member.starts for member in members] == [1, 1, 1]
            assert not slow.running
            slow.may_start.set()
            await until(lambda: len(pool.servers) == 3)


class TestWhatItSays:
    async def test_stats_have_each_server_and_who_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tunnels = FakeTunnels()
        monkeypatch.setattr("interception.server.make_tunnel", tunnels)
        tunnels.script = [FakeTunnel(), FakeTunnel(held=True)]
        config = ElasticInterceptionPoolConfig(multiplex=1, start_patience=FOREVER)
        async with ElasticInterceptionPool(config, requires_tunnel=True) as pool:
            idle = pool.stats()
            assert idle.servers[0].idle_for is not None
            holder, waiter = Rollout(pool), Rollout(pool)
            await seated(holder)
            await until(lambda: len(tunnels.made) == 2)
            tunnels.made[0].set_state("suspect", "2 probes failed")
            stats = pool.stats()
            [server] = stats.servers
            assert (server.load, server.state, server.reason, server.idle_for) == (
                1,
                "suspect",
                "2 probes failed",
                None,
            )
            assert (stats.in_use, stats.capacity, stats.waiting, stats.acquired) == (1, 1, 1, 1)
            assert stats.longest_wait >= 0
            assert len(stats.starting) == 1
            assert "2 probes failed" in str(stats)
            assert "1 waiting" in repr(pool)
            assert "1 starting" in repr(pool)
            await tunnels.made[0].set_gone("deleted by the service")
            stats = pool.stats()
            assert (stats.servers, stats.lost) == ((), 1)
            assert stats.retired[0].state == "gone"
            assert "deleted by the service" in str(stats)
            with pytest.raises(TunnelError):
                await holder.leave()
            tunnels.made[1].may_connect.set()
            await seated(waiter)
            await waiter.leave()

    async def test_no_secret_is_in_them(self) -> None:
        async with elastic(FakeMembers()) as pool:
            rollout = Rollout(pool)
            await seated(rollout)
            assert rollout.slot is not None
            said = f"{pool!r} {pool.stats()} {pool.stats()!r}"
            assert rollout.slot.model_secret not in said
            assert rollout.slot.state_secret not in said
            await rollout.leave()

    async def test_it_is_one_line_whatever_an_error_says(self) -> None:
        members = FakeMembers(FakeMember(), *(blip("line\n" * 1000) for _ in range(3)), *(blip("") for _ in range(3)))
        async with elastic(members, multiplex=1) as pool:
            holder = Rollout(pool)
            await seated(holder)
            with pytest.raises(TunnelError):
                await Rollout(pool).task
            assert len(repr(pool)) < 600
            assert "\n" not in repr(pool)
            with pytest.raises(TunnelError, match="TunnelError"):
                await Rollout(pool).task
            assert "s ago: TunnelError" in repr(pool)
            await holder.leave()

    async def test_what_waits_for_the_creation_limit_is_told_to_whoever_waits_too_long(self) -> None:
        queued = FakeMember(held=True)
        queued.queued = True  # type: ignore[attr-defined]
        async with elastic(FakeMembers(FakeMember(), queued), multiplex=1) as pool:
            holder = Rollout(pool)
            await seated(holder)
            waiter = Rollout(pool)
            await until(lambda: queued.starts)
            with pytest.raises(AcquireTimeoutError, match="1 of them wait for their turn within the creation limit"):
                async with pool.acquire(new_session(), timeout=0.001):
                    pass
            await holder.leave()
            await seated(waiter)
            await waiter.leave()

    def test_a_pool_has_a_repr_outside_of_any_loop(self) -> None:
        assert repr(ElasticInterceptionPool()) == "<ElasticInterceptionPool 0 servers (0 serving), 0 of 0 slots in use>"


class TestOddOnes:
    """Sessions and servers of other frameworks that do not keep to what is asked of them."""

    async def test_a_session_that_cannot_be_registered_takes_nobodys_place(self) -> None:
        class Picky(FakeMember):
            def register(self, session: RolloutSession) -> tuple[str, str]:
                if session.id == "odd":
                    raise LookupError("not this one")
                return super().register(session)

        async with elastic(FakeMembers(Picky()), multiplex=1, max_servers=1) as pool:
            holder = Rollout(pool)
            await seated(holder)
            odd, next_one = Rollout(pool, new_session(id="odd")), Rollout(pool)
            await settle()
            await holder.leave()
            await seated(next_one)
            with pytest.raises(LookupError, match="not this one"):
                await odd.task
            await next_one.leave()

    async def test_a_used_session_is_refused_before_it_waits(self) -> None:
        async with elastic(FakeMembers(), multiplex=1, max_servers=1) as pool:
            holder = Rollout(pool)
            await seated(holder)
            used = new_session()
            used.registered = True
            with pytest.raises(ValueError, match="used already"):
                async with pool.acquire(used):
                    pass
            await holder.leave()

    async def test_a_lost_server_that_has_no_url_any_more_is_retired_all_the_same(self) -> None:
        class Nameless(FakeMember):
            @property
            def base_url(self) -> str:
                if not self.healthy:
                    raise RuntimeError("no URL")
                return "http://nameless"

            @base_url.setter
            def base_url(self, url: str) -> None: ...

        lost = Nameless()
        members = FakeMembers(lost)
        async with elastic(members, multiplex=1, max_servers=1) as pool:
            holder = Rollout(pool)
            await seated(holder)
            waiter = Rollout(pool)
            await settle()
            lost.set_gone()
            await seated(waiter)
            with pytest.raises(TunnelError):
                await holder.leave()
            await until(lambda: lost.stops == 1)
            await waiter.leave()

    async def test_one_that_fails_to_unregister_does_not_keep_the_slot(self) -> None:
        class Failing(FakeMember):
            def unregister(self, model_secret: str, state_secret: str) -> None:
                super().unregister(model_secret, state_secret)
                raise LookupError("a defect")

        async with elastic(FakeMembers(Failing()), multiplex=1, max_servers=1) as pool:
            holder, waiter = Rollout(pool), Rollout(pool)
            await seated(holder)
            with pytest.raises(LookupError):
                await holder.leave()
            await seated(waiter)
            with pytest.raises(LookupError):
                await waiter.leave()

    async def test_one_that_is_lost_and_fails_to_unregister_is_stopped_all_the_same(self) -> None:
        class Failing(FakeMember):
            def unregister(self, model_secret: str, state_secret: str) -> None:
                super().unregister(model_secret, state_secret)
                raise LookupError("a defect")

        lost = Failing()
        async with elastic(FakeMembers(lost)) as pool:
            rollout = Rollout(pool)
            await seated(rollout)
            lost.set_gone()
            with pytest.raises(LookupError):
                await rollout.leave()
            await until(lambda: lost.stops == 1, timeout=10)

    async def test_one_whose_stop_hangs_does_not_hang_the_pool(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("interception.pool.STOP_TIMEOUT", 0.01)
        async with elastic(FakeMembers(FakeMember(stop_held=True))):
            pass
        assert "could not be stopped" in caplog.text

    async def test_one_that_makes_an_error_of_its_cancellation_is_not_tried_again_by_a_stop(self) -> None:
        class Stubborn(FakeMember):
            async def start(self) -> None:
                try:
                    await super().start()
                except asyncio.CancelledError:
                    raise TunnelError("was cancelled") from None

        members = FakeMembers(FakeMember(), Stubborn(held=True))
        pool = elastic(members, multiplex=1, min_servers=2, start_backoff=FOREVER)
        await pool.start()
        await until(lambda: members.made[1].starts)
        await pool.stop()
        assert len(members.made) == 2
        await until(lambda: not other_tasks())

    async def test_a_tunnel_state_that_is_a_word_is_shown(self) -> None:
        member = FakeMember()
        member.tunnel = type("OtherTunnel", (), {"state": "connected"})()  # type: ignore[attr-defined]
        async with elastic(FakeMembers(member)) as pool:
            assert pool.stats().servers[0].state == "connected"


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(lambda pool: None, id="at once"),
        pytest.param(lambda pool: bool(pool.stats().starting), id="while servers start"),
        pytest.param(lambda pool: bool(pool.stats().failed_starts), id="between two tries"),
    ],
)
async def test_stop_during_growth_leaves_nothing(
    moment: Callable[[ElasticInterceptionPool], object], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    members = FakeMembers(FakeMember(), blip(), *(FakeMember(held=True) for _ in range(8)))
    pool = elastic(members, multiplex=1, start_backoff=FOREVER)
    await pool.start()
    rollouts = [Rollout(pool) for _ in range(6)]
    if moment(pool) is not None:
        await until(lambda: moment(pool))
    stopping = asyncio.create_task(pool.stop())
    for _ in range(2):
        await asyncio.sleep(0)
        stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    ended = await asyncio.gather(*(rollout.task for rollout in rollouts[1:]), return_exceptions=True)
    assert all(isinstance(error, TunnelError | RuntimeError) for error in ended)
    if rollouts[0].seated:
        rollouts[0].tell()
    await asyncio.wait([rollouts[0].task])
    rollouts[0].task.exception()
    assert members.running == 0
    assert all(member.stops for member in members)
    await until(lambda: not other_tasks())
    assert pool._timer is None
    assert caplog.text == ""
