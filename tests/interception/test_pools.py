"""Pools: rollouts spread over servers that serve, servers started when needed, and the lost ones retired."""

import asyncio
import logging
import random
import socket
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from pydantic import ValidationError

from interception import (
    ElasticInterceptionPool,
    ElasticInterceptionPoolConfig,
    InterceptionServer,
    InterceptionServerConfig,
    PoolMember,
    StaticInterceptionPool,
    StaticInterceptionPoolConfig,
    make_interception,
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
from tunnel import (
    HEALTH_PATH,
    CommandTunnelConfig,
    CustomTunnelConfig,
    TunnelError,
    TunnelEvent,
    TunnelGoneError,
    TunnelLimitError,
)

__all__ = ["hangs_are_failures"]
pytestmark = pytest.mark.usefixtures("hangs_are_failures")


@pytest.fixture
def tunnels(monkeypatch: pytest.MonkeyPatch) -> FakeTunnels:
    """Every server of the test gets its tunnel from these."""
    tunnels = FakeTunnels()
    monkeypatch.setattr("interception.server.make_tunnel", tunnels)
    return tunnels


def elastic(members: FakeMembers, multiplex: int = 2, start_tries: int = 1) -> ElasticInterceptionPool:
    """A start that fails is not tried again here; how it is, is in `test_growth`."""
    config = ElasticInterceptionPoolConfig(multiplex=multiplex, start_tries=start_tries, start_backoff=0.001)
    return ElasticInterceptionPool(config, server_factory=members)


def tunnelled(multiplex: int = 2) -> ElasticInterceptionPool:
    return ElasticInterceptionPool(ElasticInterceptionPoolConfig(multiplex=multiplex), requires_tunnel=True)


def static(members: FakeMembers, count: int = 3) -> StaticInterceptionPool:
    config = StaticInterceptionPoolConfig(servers=[InterceptionServerConfig()] * count)
    return StaticInterceptionPool(config, server_factory=members)


async def answers(base_url: str) -> bool:
    async with aiohttp.ClientSession() as http:
        try:
            async with http.get(base_url + HEALTH_PATH) as response:
                return response.status == 200
        except aiohttp.ClientConnectorError:
            return False


class TestGrowth:
    async def test_start_warms_one_server_up(self) -> None:
        members = FakeMembers()
        async with elastic(members) as pool:
            assert (len(members.made), members.running, len(pool.servers)) == (1, 1, 1)
            await pool.start()
            assert len(members.made) == 1
        assert members.running == 0

    async def test_five_rollouts_at_multiplex_two_take_three_servers(self) -> None:
        members = FakeMembers()
        async with elastic(members) as pool:
            rollouts = [Rollout(pool) for _ in range(5)]
            await seated(*rollouts)
            assert sorted(members.loads) == [1, 2, 2]
            for rollout in rollouts:
                await rollout.leave()
            assert members.loads == [0, 0, 0]

    async def test_sixty_four_rollouts_at_multiplex_thirty_two_take_exactly_two(self, tunnels: FakeTunnels) -> None:
        async with tunnelled(multiplex=32) as pool:
            rollouts = [Rollout(pool) for _ in range(64)]
            await seated(*rollouts)
            await settle()
            assert len(tunnels.made) == 2
            assert [server.load for server in pool.servers] == [32, 32]
            secrets = {secret for rollout in rollouts if rollout.slot for secret in rollout.slot[1:]}
            assert len(secrets) == 128
            for rollout in rollouts:
                await rollout.leave()
        assert tunnels.connected == 0

    async def test_a_rollout_goes_to_the_least_loaded_server(self) -> None:
        members = FakeMembers()
        async with elastic(members, multiplex=3) as pool:
            rollouts = [Rollout(pool) for _ in range(6)]
            await seated(*rollouts)
            first = [rollout for rollout in rollouts if rollout.slot and rollout.slot.base_url == "http://server-0"]
            await first[0].leave()
            await first[1].leave()
            assert members.loads == [1, 3]
            late = Rollout(pool)
            await seated(late)
            assert members.loads == [2, 3]
            for rollout in {late, *rollouts} - set(first[:2]):
                await rollout.leave()

    async def test_a_freed_slot_goes_to_a_waiter_while_another_server_is_still_starting(self) -> None:
        hung = FakeMember(held=True)
        members = FakeMembers(FakeMember(), hung)
        async with elastic(members, multiplex=1) as pool:
            holder = Rollout(pool)
            await seated(holder)
            waiter = Rollout(pool)
            await until(lambda: hung.starts == 1)
            assert not waiter.seated
            await holder.leave()
            await settle()
            assert waiter.seated  # at once, not when another server comes
            assert len(members.made) == 2
            await waiter.leave()

    async def test_waiters_are_seated_in_the_order_they_came(self) -> None:
        members = FakeMembers(FakeMember(), FakeMember(held=True), FakeMember(held=True))
        async with elastic(members, multiplex=1) as pool:
            holder = Rollout(pool)
            await seated(holder)
            first, second = Rollout(pool), Rollout(pool)
            await until(lambda: len(members.made) == 3)
            await holder.leave()
            await seated(first)
            assert not second.seated
            await first.leave()
            await seated(second)
            await second.leave()

    async def test_a_burst_starts_all_the_servers_it_needs_side_by_side(self) -> None:
        members = FakeMembers(FakeMember(), *(FakeMember(held=True) for _ in range(4)))
        async with elastic(members, multiplex=2) as pool:
            rollouts = [Rollout(pool) for _ in range(10)]
            await until(lambda: [member.starts for member in members] == [1] * 5)
            for member in reversed(members.made):
                member.may_start.set()
            await seated(*rollouts)
            assert members.loads == [2] * 5
            for rollout in rollouts:
                await rollout.leave()
            assert len(members.made) == 5

    async def test_a_server_that_is_starting_is_not_started_again_for_the_next_waiter(self) -> None:
        hung = FakeMember(held=True)
        members = FakeMembers(FakeMember(), hung)
        async with elastic(members, multiplex=2) as pool:
            rollouts = [Rollout(pool) for _ in range(3)]
            await until(lambda: hung.starts == 1)
            rollouts.append(Rollout(pool))
            await settle()
            assert len(members.made) == 2
            hung.may_start.set()
            await seated(*rollouts)
            for rollout in rollouts:
                await rollout.leave()

    async def test_acquire_before_start_says_what_to_do(self) -> None:
        with pytest.raises(RuntimeError, match="start"):
            async with elastic(FakeMembers()).acquire(new_session()):
                pass

    async def test_a_session_that_was_used_is_refused_to_its_own_rollout_only(self, tunnels: FakeTunnels) -> None:
        async with tunnelled() as pool:
            rollout = Rollout(pool)
            await seated(rollout)
            with pytest.raises(ValueError, match="used already"):
                async with pool.acquire(rollout.session):
                    pass
            assert pool.servers[0].load == 1
            await rollout.leave()


class TestFailedGrowth:
    async def test_after_a_failed_warm_up_the_first_acquire_succeeds(self) -> None:
        failing = FakeMember(error=TunnelError("a blip"))
        members = FakeMembers(failing)
        async with elastic(members) as pool:
            assert pool.servers == []
            assert failing.stops == 1
            rollout = Rollout(pool)
            await seated(rollout)
            await rollout.leave()

    async def test_who_waits_while_the_warm_up_fails_is_told_why(self) -> None:
        failing = FakeMember(error=TunnelError("a blip"), held=True)
        pool = elastic(FakeMembers(failing))
        starting = asyncio.create_task(pool.start())
        await until(lambda: failing.starts)
        rollout = Rollout(pool)
        failing.may_start.set()
        await starting
        with pytest.raises(TunnelError, match="a blip"):
            await rollout.task
        await pool.stop()

    async def test_a_limit_at_the_warm_up_is_raised_from_start(self) -> None:
        failing = FakeMember(error=TunnelLimitError("maximum number of tunnels"))
        pool = elastic(FakeMembers(failing))
        with pytest.raises(TunnelLimitError, match="maximum number of tunnels"):
            await pool.start()
        assert failing.stops >= 1
        await until(lambda: not other_tasks())
        await pool.start()  # somebody freed a tunnel
        async with pool.acquire(new_session()):
            pass
        await pool.stop()

    async def test_an_error_nobody_foresaw_at_the_warm_up_is_raised_from_start(self) -> None:
        pool = elastic(FakeMembers(FakeMember(error=LookupError("a defect"))))
        with pytest.raises(LookupError, match="a defect"):
            await pool.start()
        await until(lambda: not other_tasks())

    async def test_a_failed_growth_fails_only_the_waiters_it_would_have_served_and_tells_them_why(self) -> None:
        why = TunnelError("the edge said no")
        failing, good = FakeMember(error=why, held=True), FakeMember(held=True)
        members = FakeMembers(FakeMember(), failing, good)
        async with elastic(members, multiplex=2) as pool:
            holders = [Rollout(pool), Rollout(pool)]
            await seated(*holders)
            waiters = [Rollout(pool) for _ in range(4)]
            await until(lambda: len(members.made) == 3)
            failing.may_start.set()
            await until(lambda: sum(waiter.task.done() for waiter in waiters) == 2)
            await settle()
            failed = [waiter for waiter in waiters if waiter.task.done()]
            assert len(failed) == 2
            for waiter in failed:
                with pytest.raises(TunnelError, match="the edge said no"):
                    await waiter.task
            good.may_start.set()
            left = [waiter for waiter in waiters if waiter not in failed]
            await seated(*left)
            assert all(not holder.task.done() for holder in holders)
            for rollout in holders + left:
                await rollout.leave()
            assert failing.stops == 1
            late = Rollout(pool)  # a later one is not told of the old failure
            await seated(late)
            await late.leave()

    async def test_a_failed_growth_fails_nobody_once_freed_slots_served_its_waiters(self) -> None:
        failing = FakeMember(error=TunnelError("too late to matter"), held=True)
        async with elastic(FakeMembers(FakeMember(), failing), multiplex=1) as pool:
            holder = Rollout(pool)
            await seated(holder)
            waiter = Rollout(pool)
            await until(lambda: failing.starts == 1)
            await holder.leave()
            await seated(waiter)
            failing.may_start.set()
            await until(lambda: failing.stops == 1)
            await waiter.leave()


class TestNotServing:
    async def test_a_server_that_does_not_serve_is_passed_over_while_another_serves(self, tunnels: FakeTunnels) -> None:
        async with tunnelled(multiplex=2) as pool:
            rollouts = [Rollout(pool) for _ in range(4)]
            await seated(*rollouts)
            for rollout in rollouts[1:]:
                await rollout.leave()
            # One server is empty, the other holds a rollout.
            empty, busy = sorted(pool.servers, key=lambda server: server.load)
            assert isinstance(empty, InterceptionServer)
            assert isinstance(empty.tunnel, FakeTunnel)
            empty.tunnel.set_state("suspect")
            assert not empty.serving
            assert empty.healthy
            late = Rollout(pool)
            await seated(late)
            assert (empty.load, busy.load) == (0, 2)
            await rollouts[0].leave()
            await late.leave()

    async def test_one_that_does_not_serve_is_used_when_none_can_be_started(self) -> None:
        members = FakeMembers(FakeMember(), FakeMember(error=TunnelError("no more tunnels")))
        async with elastic(members, multiplex=2) as pool:
            members.made[0].set_serving(False)
            rollout = Rollout(pool)
            await seated(rollout)
            assert rollout.slot is not None
            assert rollout.slot.base_url == "http://server-0"
            assert members.made[1].starts == 1
            await rollout.leave()

    async def test_rather_than_use_one_that_does_not_serve_another_is_started(self) -> None:
        members = FakeMembers()
        async with elastic(members, multiplex=2) as pool:
            members.made[0].set_serving(False)
            rollout = Rollout(pool)
            await seated(rollout)
            assert members.loads == [0, 1]
            await rollout.leave()

    async def test_a_server_that_serves_again_takes_the_waiters(self) -> None:
        members = FakeMembers(FakeMember(), FakeMember(held=True))
        async with elastic(members, multiplex=2) as pool:
            members.made[0].set_serving(False)
            rollout = Rollout(pool)
            await until(lambda: len(members.made) == 2)
            assert not rollout.seated
            members.made[0].set_serving(True)
            await seated(rollout)
            assert members.loads == [1, 0]
            await rollout.leave()


class TestLostServer:
    async def test_each_of_its_rollouts_gets_an_error_of_its_own_with_the_cause(self, tunnels: FakeTunnels) -> None:
        async with tunnelled(multiplex=2) as pool:
            lost, other = [Rollout(pool), Rollout(pool)], Rollout(pool)
            await seated(*lost, other)
            server = pool.servers[0]
            gone = await tunnels.made[0].set_gone("refused as gone")
            errors = [rollout.session.error for rollout in lost]
            assert all(type(error) is TunnelError and error.__cause__ is gone for error in errors)
            assert errors[0] is not errors[1]
            assert all("refused as gone" in str(error) for error in errors)
            assert all(rollout.session.failed.is_set() and rollout.session.released for rollout in lost)
            assert other.session.error is None
            assert not server.healthy
            assert not server.serving
            with pytest.raises(TunnelError, match="refused as gone"):
                server.register(new_session())
            for rollout in lost:
                with pytest.raises(TunnelError) as raised:
                    await rollout.leave()
                assert raised.value is rollout.session.error
            await other.leave()

    async def test_gone_does_not_replace_an_error_the_rollout_has_already(self, tunnels: FakeTunnels) -> None:
        async with tunnelled() as pool:
            rollout = Rollout(pool)
            await seated(rollout)
            mine = LookupError("of a hook")
            rollout.session.fail(mine)
            await tunnels.made[0].set_gone()
            assert rollout.session.error is mine
            await rollout.leave(None)

    async def test_leaving_with_an_exception_passes_that(self, tunnels: FakeTunnels) -> None:
        async with tunnelled() as pool:
            rollout = Rollout(pool)
            await seated(rollout)
            await tunnels.made[0].set_gone()
            with pytest.raises(LookupError, match="the harness crashed"):
                await rollout.leave(LookupError("the harness crashed"))

    async def test_its_load_counts_until_the_rollouts_have_left(self, tunnels: FakeTunnels) -> None:
        async with tunnelled() as pool:
            rollouts = [Rollout(pool), Rollout(pool)]
            await seated(*rollouts)
            server = pool.servers[0]
            await tunnels.made[0].set_gone()
            assert server.load == 2
            for left, rollout in ((1, rollouts[0]), (0, rollouts[1])):
                with pytest.raises(TunnelError):
                    await rollout.leave()
                assert server.load == left

    async def test_it_is_replaced_by_the_next_acquire(self, tunnels: FakeTunnels) -> None:
        async with tunnelled() as pool:
            old = Rollout(pool)
            await seated(old)
            await tunnels.made[0].set_gone()
            await settle()
            assert pool.servers == []
            assert pool.retired == 1
            assert len(tunnels.made) == 1  # nobody needs another yet
            new = Rollout(pool)
            await seated(new)
            assert old.slot is not None
            assert new.slot is not None
            assert new.slot.base_url != old.slot.base_url
            assert len(tunnels.made) == 2
            await new.leave()
            with pytest.raises(TunnelError):
                await old.leave()

    async def test_one_that_is_lost_while_it_starts_is_replaced_for_those_who_wait(self) -> None:
        stillborn = FakeMember(held=True)
        members = FakeMembers(FakeMember(), stillborn)
        async with elastic(members, multiplex=1, start_tries=2) as pool:
            holder = Rollout(pool)
            await seated(holder)
            waiter = Rollout(pool)
            await until(lambda: stillborn.starts == 1)
            stillborn.set_gone()
            stillborn.may_start.set()
            await seated(waiter)
            assert members.loads == [1, 0, 1]
            await until(lambda: not stillborn.running)
            await holder.leave()
            await waiter.leave()
        assert [member.stops for member in members] == [1, 1, 1]

    async def test_it_keeps_its_local_service_until_the_last_rollout_has_left(self, tunnels: FakeTunnels) -> None:
        async with tunnelled() as pool:
            rollouts = [Rollout(pool), Rollout(pool)]
            await seated(*rollouts)
            assert rollouts[0].slot is not None
            url = rollouts[0].slot.base_url
            await tunnels.made[0].set_gone()
            with pytest.raises(TunnelError):
                await rollouts[0].leave()
            await settle()
            assert await answers(url)
            assert tunnels.made[0].disconnects == 0
            with pytest.raises(TunnelError):
                await rollouts[1].leave()
            await until(lambda: tunnels.made[0].disconnects == 1)
            await until(lambda: len(other_tasks()) == 0)
            assert not await answers(url)
        assert tunnels.made[0].disconnects == 1

    async def test_an_empty_one_is_stopped_at_once(self) -> None:
        members = FakeMembers()
        async with elastic(members):
            members.made[0].set_gone()
            await until(lambda: members.made[0].stops == 1)
            await until(lambda: not members.made[0].running)
        assert members.made[0].stops == 1

    async def test_it_is_stopped_once_by_the_pool_and_its_last_rollout_does_not_wait_for_that(self) -> None:
        old = FakeMember(stop_held=True)
        members = FakeMembers(old)
        async with elastic(members) as pool:
            rollouts = [Rollout(pool), Rollout(pool)]
            await seated(*rollouts)
            old.set_gone()
            for rollout in rollouts:
                with pytest.raises(TunnelError):
                    await rollout.leave()
            await until(lambda: old.stops == 1)
            assert old.running  # still stopping, though both rollouts have left
            assert old.stopped_by not in {rollout.task for rollout in rollouts}
            old.may_stop.set()
            await until(lambda: not old.running)
        assert old.stops == 1

    async def test_it_is_stopped_though_its_last_rollout_is_cancelled_twice(self) -> None:
        old = FakeMember(stop_held=True)
        async with elastic(FakeMembers(old)) as pool:
            rollout = Rollout(pool)
            await seated(rollout)
            old.set_gone()
            rollout.task.cancel()
            await asyncio.sleep(0)
            rollout.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await rollout.task
            await until(lambda: old.stops == 1)
            old.may_stop.set()
            await until(lambda: not old.running)
        assert old.stops == 1
        assert old.load == 0

    async def test_stopping_the_pool_waits_until_it_is_stopped(self) -> None:
        old = FakeMember(stop_held=True)
        pool = elastic(FakeMembers(old))
        await pool.start()
        old.set_gone()
        await until(lambda: old.stops == 1)
        stopping = asyncio.create_task(pool.stop())
        await settle()
        assert not stopping.done()
        old.may_stop.set()
        await stopping
        assert (old.running, old.stops) == (False, 1)
        await until(lambda: not other_tasks())

    async def test_stopping_the_pool_twice_cancelled_still_stops_every_server(self) -> None:
        held = FakeMember(stop_held=True)
        pool = elastic(FakeMembers(held))
        await pool.start()
        stopping = asyncio.create_task(pool.stop())
        await until(lambda: held.stops == 1)
        for _ in range(2):
            stopping.cancel()
            await settle()
        assert not stopping.done()
        held.may_stop.set()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert not held.running
        await until(lambda: not other_tasks())

    async def test_a_server_that_cannot_be_stopped_harms_nobody(self, caplog: pytest.LogCaptureFixture) -> None:
        class Stubborn(FakeMember):
            async def stop(self) -> None:
                await super().stop()
                raise OSError("no")

        async with elastic(FakeMembers(Stubborn()), multiplex=1) as pool:
            rollouts = [Rollout(pool), Rollout(pool)]
            await seated(*rollouts)
            for rollout in rollouts:
                await rollout.leave()
        assert "could not be stopped" in caplog.text

    async def test_the_pool_hands_on_what_happens_to_its_tunnels(self, tunnels: FakeTunnels) -> None:
        events: list[TunnelEvent] = []
        pool = tunnelled()
        pool.on_event = events.append
        async with pool:
            tunnels.made[0].set_state("suspect")
            await tunnels.made[0].set_gone()
        assert [type(event).__name__ for event in events] == ["StateChanged", "StateChanged", "Gone"]


class TestStop:
    async def test_while_a_server_is_starting_it_leaves_nothing(self, tunnels: FakeTunnels) -> None:
        tunnels.script = [FakeTunnel(), FakeTunnel(held=True)]
        pool = tunnelled(multiplex=1)
        await pool.start()
        holder, waiter = Rollout(pool), Rollout(pool)
        await seated(holder)
        await until(lambda: len(tunnels.made) == 2 and tunnels.made[1].connecting)
        await pool.stop()
        with pytest.raises(TunnelError, match="stopped"):
            await waiter.task
        with pytest.raises(TunnelError, match="stopped"):
            await holder.leave()
        assert tunnels.connected == 0
        assert not tunnels.made[1].connecting
        await until(lambda: not other_tasks())

    async def test_while_the_first_server_is_warming_up_it_leaves_nothing(self) -> None:
        hung = FakeMember(held=True)
        pool = elastic(FakeMembers(hung))
        starting = asyncio.create_task(pool.start())
        await until(lambda: hung.starts == 1)
        stopping = asyncio.create_task(pool.stop())
        await settle()
        hung.may_start.set()
        await asyncio.wait([starting, stopping])
        assert not starting.exception() or isinstance(starting.exception(), TunnelError)
        assert stopping.exception() is None
        assert not hung.running
        assert pool.servers == []

    async def test_start_cancelled_twice_leaves_nothing(self, tunnels: FakeTunnels) -> None:
        tunnels.script = [FakeTunnel(held=True)]
        pool = tunnelled()
        starting = asyncio.create_task(pool.start())
        await until(lambda: len(tunnels.made) == 1 and tunnels.made[0].connecting)
        starting.cancel()
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert tunnels.connected == 0
        await until(lambda: not other_tasks())

    async def test_acquires_that_wait_get_a_tunnel_error(self) -> None:
        members = FakeMembers(FakeMember(), *(FakeMember(held=True) for _ in range(3)))
        pool = elastic(members, multiplex=1)
        await pool.start()
        holder = Rollout(pool)
        await seated(holder)
        waiters = [Rollout(pool) for _ in range(3)]
        await until(lambda: [member.starts for member in members] == [1] * 4)
        await pool.stop()
        assert members.running == 0
        for waiter in waiters:
            with pytest.raises(TunnelError, match="stopped"):
                await waiter.task
        await holder.leave()

    @pytest.mark.parametrize("rounds", range(6))
    async def test_a_waiter_cancelled_at_that_moment_does_not_keep_it_from_stopping(self, rounds: int) -> None:
        members = FakeMembers(FakeMember(), FakeMember(held=True), FakeMember(held=True))
        pool = elastic(members, multiplex=1)
        await pool.start()
        holder = Rollout(pool)
        await seated(holder)
        cancelled, waiter = Rollout(pool), Rollout(pool)
        await until(lambda: [member.starts for member in members] == [1, 1, 1])
        stopping = asyncio.create_task(pool.stop())
        for _ in range(rounds):
            await asyncio.sleep(0)
        cancelled.task.cancel()
        await stopping
        with pytest.raises((asyncio.CancelledError, TunnelError)):
            await cancelled.task
        with pytest.raises(TunnelError, match="stopped"):
            await waiter.task
        await holder.leave()
        assert members.running == 0
        await until(lambda: not other_tasks())

    async def test_a_pool_can_be_started_again(self) -> None:
        members = FakeMembers()
        pool = elastic(members)
        for _ in range(2):
            await pool.start()
            async with pool.acquire(new_session()):
                assert members.running == 1
            await pool.stop()
            await pool.stop()
            assert members.running == 0

    async def test_a_server_that_was_starting_is_not_counted_after_the_next_start(self) -> None:
        pool = elastic(FakeMembers(), multiplex=1)
        await pool.start()
        holder = Rollout(pool)
        await seated(holder)
        # In one round of the event loop: stop is asked for, the waiter asks for a server, stop goes about its work.
        stopping = asyncio.create_task(pool.stop())
        waiter = Rollout(pool)
        with pytest.raises(TunnelError, match="stopped"):
            await waiter.task
        await stopping
        await holder.leave()
        await pool.start()
        rollouts = [Rollout(pool), Rollout(pool)]
        await seated(*rollouts)
        for rollout in rollouts:
            await rollout.leave()
        await pool.stop()


class TestCancelledAcquire:
    async def test_while_it_waits_it_leaves_no_load(self) -> None:
        hung = FakeMember(held=True)
        members = FakeMembers(FakeMember(), hung)
        async with elastic(members, multiplex=1) as pool:
            holder = Rollout(pool)
            await seated(holder)
            waiter = Rollout(pool)
            await until(lambda: hung.starts == 1)
            waiter.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiter.task
            hung.may_start.set()
            await holder.leave()
            await until(lambda: hung.running)
            assert members.loads == [0, 0]

    @pytest.mark.parametrize("rounds", range(6))
    async def test_at_the_moment_of_being_seated_it_leaves_no_load_and_the_slot_goes_on(self, rounds: int) -> None:
        members = FakeMembers(FakeMember(), FakeMember(held=True), FakeMember(held=True))
        async with elastic(members, multiplex=1) as pool:
            holder = Rollout(pool)
            await seated(holder)
            cancelled, waiter = Rollout(pool), Rollout(pool)
            await until(lambda: [member.starts for member in members] == [1, 1, 1])
            # Before, in and after the round of the event loop in which the freed slot is given to the first waiter.
            holder.tell()
            for _ in range(rounds):
                await asyncio.sleep(0)
            cancelled.task.cancel()
            await holder.task
            with pytest.raises(asyncio.CancelledError):
                await cancelled.task
            await seated(waiter)
            assert members.loads == [1, 0, 0]
            await waiter.leave()
            assert members.loads == [0, 0, 0]
        await until(lambda: not other_tasks())

    @pytest.mark.parametrize("rounds", range(12))
    async def test_at_the_moment_its_growth_fails_the_other_waiters_still_hear_why(self, rounds: int) -> None:
        failing = FakeMember(error=TunnelError("the edge said no"), held=True)
        members = FakeMembers(FakeMember(), failing)
        async with elastic(members, multiplex=2) as pool:
            holders = [Rollout(pool), Rollout(pool)]
            await seated(*holders)
            waiter, cancelled = Rollout(pool), Rollout(pool)
            await until(lambda: failing.starts == 1)
            failing.may_start.set()
            for _ in range(rounds):
                await asyncio.sleep(0)
            cancelled.task.cancel()
            with pytest.raises(TunnelError, match="the edge said no"):
                await asyncio.wait_for(waiter.task, 10)
            with pytest.raises((asyncio.CancelledError, TunnelError)):
                await cancelled.task
            for holder in holders:
                await holder.leave()
            assert members.loads == [0, 0]

    @pytest.mark.parametrize("seed", range(4))
    async def test_five_hundred_at_random_never_exceed_multiplex_and_leave_nothing(self, seed: int) -> None:
        chance = random.Random(seed)
        members = FakeMembers()
        pool = elastic(members, multiplex=3)
        await pool.start()

        async def rollout() -> None:
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            async with pool.acquire(new_session()):
                for _ in range(chance.randrange(6)):
                    await asyncio.sleep(0)

        running: set[asyncio.Task[None]] = set()
        ended: list[asyncio.Task[None]] = []
        for _ in range(500):
            task = asyncio.create_task(rollout())
            running.add(task)
            if chance.random() < 0.4:
                chance.choice(sorted(running, key=asyncio.Task.get_name)).cancel()
            for _ in range(chance.randrange(3)):
                await asyncio.sleep(0)
            ended += [task for task in running if task.done()]
            running -= set(ended)
        async with asyncio.timeout(20):
            if running:
                await asyncio.wait(running)
        ended += running
        failures = [task.exception() for task in ended if not task.cancelled() and task.exception()]
        assert failures == []
        assert len(ended) == 500
        assert members.loads == [0] * len(members.made)
        assert max(member.peak for member in members) <= 3
        async with asyncio.timeout(20):
            async with pool.acquire(new_session()):
                pass
            await pool.stop()
        assert members.running == 0
        assert other_tasks() == set()


class TestStaticPool:
    async def test_one_lost_while_others_start_is_the_reason_told(self) -> None:
        lost, slow = FakeMember(), FakeMember(held=True)
        members = FakeMembers(lost, slow)
        pool = static(members, 2)
        starting = asyncio.create_task(pool.start())
        await until(lambda: lost.running and slow.starts)
        lost.set_gone()
        slow.may_start.set()
        with pytest.raises(TunnelError, match="lost while the pool started"):
            await starting
        assert members.running == 0
        await until(lambda: not other_tasks())

    async def test_stop_does_not_wait_for_a_start_that_hangs(self) -> None:
        members = FakeMembers(FakeMember(), FakeMember(held=True))
        pool = static(members, 2)
        starting = asyncio.create_task(pool.start())
        await until(lambda: members.made and members.made[1].starts)
        await pool.stop()
        with pytest.raises(TunnelError, match="stopped while it started"):
            await starting
        assert members.running == 0
        await until(lambda: not other_tasks())

    async def test_all_servers_are_started_side_by_side(self) -> None:
        members = FakeMembers(*(FakeMember(held=True) for _ in range(3)))
        pool = static(members)
        starting = asyncio.create_task(pool.start())
        await until(lambda: [member.starts for member in members] == [1, 1, 1])
        for member in members:
            member.may_start.set()
        await starting
        assert len(pool.servers) == 3
        await pool.start()
        assert [member.starts for member in members] == [1, 1, 1]
        await pool.stop()
        assert members.running == 0

    async def test_rollouts_are_spread_evenly_and_without_a_cap(self) -> None:
        members = FakeMembers()
        async with static(members) as pool:
            rollouts = [Rollout(pool) for _ in range(99)]
            await seated(*rollouts)
            assert members.loads == [33, 33, 33]
            for rollout in rollouts:
                await rollout.leave()
            assert members.loads == [0, 0, 0]

    async def test_one_gone_its_rollouts_are_told_and_new_ones_go_to_the_others(self) -> None:
        members = FakeMembers()
        async with static(members) as pool:
            rollouts = [Rollout(pool) for _ in range(3)]
            await seated(*rollouts)
            members.made[0].set_gone()
            with pytest.raises(TunnelError, match="lost"):
                await rollouts[0].leave()
            await until(lambda: not members.made[0].running)
            late = [Rollout(pool) for _ in range(4)]
            await seated(*late)
            assert members.loads == [0, 3, 3]
            for rollout in rollouts[1:] + late:
                await rollout.leave()
        assert [member.stops for member in members] == [1, 1, 1]
        assert len(members.made) == 3

    async def test_all_gone_the_error_says_why(self, tunnels: FakeTunnels) -> None:
        config = StaticInterceptionPoolConfig(servers=[InterceptionServerConfig()] * 2)
        async with StaticInterceptionPool(config, requires_tunnel=True) as pool:
            await tunnels.made[0].set_gone("deleted by the service")
            await tunnels.made[1].set_gone("not serving for 600 s, 3 restarts")
            with pytest.raises(TunnelError, match="deleted by the service") as raised:
                async with pool.acquire(new_session()):
                    pass
            assert "not serving for 600 s, 3 restarts" in str(raised.value)

    async def test_one_that_does_not_serve_is_passed_over_and_used_when_no_other_is_left(self) -> None:
        members = FakeMembers()
        async with static(members, 2) as pool:
            members.made[0].set_serving(False)
            first, second = Rollout(pool), Rollout(pool)
            await seated(first, second)
            assert members.loads == [0, 2]
            members.made[1].set_gone()
            third = Rollout(pool)
            await seated(third)
            assert members.loads == [1, 2]
            await third.leave()
            for rollout in (first, second):
                with pytest.raises(TunnelError):
                    await rollout.leave()

    async def test_one_that_cannot_start_start_raises_and_all_are_stopped(self) -> None:
        members = FakeMembers(
            FakeMember(), FakeMember(error=TunnelLimitError("maximum number of tunnels")), FakeMember(held=True)
        )
        pool = static(members)
        with pytest.raises(TunnelLimitError, match="maximum number of tunnels"):
            await pool.start()
        assert members.running == 0
        assert all(member.stops >= 1 for member in members)
        assert pool.servers == []
        await until(lambda: not other_tasks())

    async def test_one_that_cannot_start_leaves_no_tunnel_and_no_port(self, tunnels: FakeTunnels) -> None:
        tunnels.script = [FakeTunnel(), FakeTunnel(held=True), FakeTunnel(error=TunnelError("no"))]
        config = StaticInterceptionPoolConfig(servers=[InterceptionServerConfig()] * 3)
        with pytest.raises(TunnelError, match="no"):
            await StaticInterceptionPool(config, requires_tunnel=True).start()
        assert tunnels.connected == 0
        assert not any(tunnel.connecting for tunnel in tunnels.made)
        await until(lambda: not other_tasks())

    async def test_start_cancelled_twice_leaves_nothing(self, tunnels: FakeTunnels) -> None:
        tunnels.script = [FakeTunnel(), FakeTunnel(held=True)]
        config = StaticInterceptionPoolConfig(servers=[InterceptionServerConfig()] * 2)
        starting = asyncio.create_task(StaticInterceptionPool(config, requires_tunnel=True).start())
        await until(lambda: [tunnel.connected or tunnel.connecting for tunnel in tunnels.made] == [True, True])
        starting.cancel()
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert tunnels.connected == 0
        assert not tunnels.made[1].connecting
        await until(lambda: not other_tasks())

    async def test_acquire_before_start_says_what_to_do(self) -> None:
        with pytest.raises(RuntimeError, match="start"):
            async with static(FakeMembers()).acquire(new_session()):
                pass

    async def test_a_custom_tunnel_gives_its_own_url_and_port(self) -> None:
        port = free_port()
        custom = CustomTunnelConfig(url=f"http://127.0.0.1:{port}/", port=port, bind_host="127.0.0.1")
        config = StaticInterceptionPoolConfig(servers=[InterceptionServerConfig(tunnel=custom)])
        async with (
            StaticInterceptionPool(config, requires_tunnel=True) as pool,
            pool.acquire(new_session()) as slot,
        ):
            assert slot.base_url == f"http://127.0.0.1:{port}"
            assert await answers(slot.base_url)
        assert not await answers(f"http://127.0.0.1:{port}")


class TestSeam:
    @pytest.mark.parametrize("make", [elastic, static])
    async def test_servers_of_another_framework_sit_in_our_pools(
        self, make: Callable[[FakeMembers], ElasticInterceptionPool | StaticInterceptionPool]
    ) -> None:
        factory: Callable[[InterceptionServerConfig], PoolMember] = (members := FakeMembers())
        assert factory is members  # it keeps to the protocol, as mypy sees
        async with make(members) as pool, pool.acquire(session := new_session()) as slot:
            assert slot == ("http://server-0", f"model of {session.id}", f"state of {session.id}")
            assert members.running == len(members.made) > 0
        assert all(isinstance(config, InterceptionServerConfig) for config in members.configs)
        assert members.running == 0

    async def test_the_default_factory_binds_what_the_pool_was_given(self, tunnels: FakeTunnels) -> None:
        async with ElasticInterceptionPool(requires_tunnel=True) as pool:
            [server] = pool.servers
            assert isinstance(server, InterceptionServer)
            assert server.tunnel is tunnels.made[0]
        async with ElasticInterceptionPool() as pool:
            [server] = pool.servers
            assert isinstance(server, InterceptionServer)
            assert server.tunnel is None

    async def test_a_member_that_refuses_a_session_is_heard_by_that_rollout_only(self) -> None:
        class Choosy(FakeMember):
            def register(self, session: Any) -> tuple[str, str]:
                if session.id == "refused":
                    raise ValueError("not this one")
                return super().register(session)

        async with elastic(FakeMembers(Choosy(), Choosy())) as pool:
            refused, taken = Rollout(pool, new_session(id="refused")), Rollout(pool)
            with pytest.raises(ValueError, match="not this one"):
                await refused.task
            await seated(taken)
            await taken.leave()


class TestConfig:
    def test_an_elastic_pool_of_custom_tunnels_is_refused_and_says_what_to_do(self) -> None:
        custom = CustomTunnelConfig(url="http://here.example", port=8000)
        with pytest.raises(ValueError, match="static pool"):
            ElasticInterceptionPoolConfig(tunnel=custom)

    def test_the_defaults_are_those_of_the_contract(self) -> None:
        config = ElasticInterceptionPoolConfig()
        assert (config.type, config.multiplex, config.tunnel.type) == ("elastic", 32, "prime")
        server = InterceptionServerConfig()
        assert (server.type, server.tunnel.type, server.bind_host) == ("server", "prime", None)

    @pytest.mark.parametrize(
        ("kind", "fields"), [("elastic", {"multiplex": 0}), ("static", {"servers": []}), ("elastic", {"multi": 3})]
    )
    def test_a_pool_nobody_could_use_is_refused(self, kind: str, fields: dict[str, object]) -> None:
        model = ElasticInterceptionPoolConfig if kind == "elastic" else StaticInterceptionPoolConfig
        with pytest.raises(ValidationError):
            model.model_validate(fields)

    async def test_make_interception_makes_what_the_config_names(self, tunnels: FakeTunnels) -> None:
        server = InterceptionServerConfig()
        made = [
            make_interception(server, requires_tunnel=False),
            make_interception(StaticInterceptionPoolConfig(servers=[server]), requires_tunnel=False),
            make_interception(ElasticInterceptionPoolConfig(), requires_tunnel=False),
        ]
        assert [type(each) for each in made] == [InterceptionServer, StaticInterceptionPool, ElasticInterceptionPool]
        for interception in made:
            async with interception, interception.acquire(new_session()) as slot:
                assert slot.base_url.startswith("http://127.0.0.1:")
        assert tunnels.made == []

    async def test_make_interception_hands_on_that_a_tunnel_is_required(self, tunnels: FakeTunnels) -> None:
        server = InterceptionServerConfig()
        for config in (server, StaticInterceptionPoolConfig(servers=[server]), ElasticInterceptionPoolConfig()):
            tunnels.made.clear()
            async with make_interception(config, requires_tunnel=True):
                assert tunnels.connected == 1
            assert tunnels.connected == 0


class TestLogs:
    async def test_a_retired_server_is_named_with_the_reason(
        self, tunnels: FakeTunnels, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING, "interception")
        async with tunnelled() as pool:
            url = pool.servers[0].base_url
            await tunnels.made[0].set_gone("refused as gone")
        assert [record for record in caplog.records if url in record.message and "refused as gone" in record.message]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def test_a_gone_tunnel_is_a_tunnel_error() -> None:
    assert issubclass(TunnelGoneError, TunnelError)


class TestTheDefaultFactory:
    async def test_given_by_name_it_is_the_default_and_binds_the_other_arguments(self) -> None:
        tunnel = CommandTunnelConfig(command=("no-such-program",), url_pattern="x")
        config = ElasticInterceptionPoolConfig(tunnel=tunnel)
        pool = ElasticInterceptionPool(config, requires_tunnel=True, server_factory=InterceptionServer)
        await pool.start()  # the failure is told, and tried again by the first rollout
        with pytest.raises(TunnelError, match="no-such-program"):
            async with pool.acquire(new_session()):
                pass
        await pool.stop()
