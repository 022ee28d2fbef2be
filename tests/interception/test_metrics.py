"""The numbers of servers and pools: calls by outcome, servers by state, over lost servers too, and nothing secret."""

import asyncio
import itertools
import logging

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from interception import (
    AcquireTimeoutError,
    ElasticInterceptionPool,
    ElasticInterceptionPoolConfig,
    InterceptionServer,
    InterceptionServerConfig,
    StaticInterceptionPool,
    StaticInterceptionPoolConfig,
    Turn,
    Upstream,
)
from interception.interning import Bodies
from interception.metrics import FAMILIES, OTHER, outcome_of
from interception.prometheus import register
from interception.trace import Attempt
from interception.turn import Failure, refused_for_good
from tests.helpers import until
from tests.interception.fakes import (
    FakeMember,
    FakeMembers,
    FakeTunnels,
    Rollout,
    ScriptedModel,
    hangs_are_failures,
    new_session,
    seated,
    settle,
)
from tests.scrapes import Scrape
from tunnel import TunnelError, TunnelLimitError
from tunnel.metrics import STATES

__all__ = ["hangs_are_failures"]
pytestmark = pytest.mark.usefixtures("hangs_are_failures")

OURS = ("interception_", "tunnel_")
KEY = "sk-of-the-upstream-7f3a"
CHAT = "chat completions"


@pytest.fixture
def tunnels(monkeypatch: pytest.MonkeyPatch) -> FakeTunnels:
    tunnels = FakeTunnels()
    monkeypatch.setattr("interception.server.make_tunnel", tunnels)
    return tunnels


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def read(registry: CollectorRegistry) -> Scrape:
    return Scrape.of(registry, OURS)


async def told(request: web.Request) -> web.StreamResponse:
    """Answers with the status that the model's name is; `hang` never."""
    model = (await request.json())["model"]
    if model == "hang":
        await asyncio.Event().wait()
    body = {"id": "a", "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant"}}]}
    return web.json_response(body if model == "200" else {"error": {"message": "no"}}, status=int(model))


async def call(rollout: Rollout, model: str) -> int:
    assert rollout.slot is not None
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
    headers = {"Authorization": f"Bearer {rollout.slot.model_secret}"}
    async with (
        aiohttp.ClientSession() as agent,
        agent.post(rollout.slot.base_url + "/v1/chat/completions", json=body, headers=headers) as answer,
    ):
        await answer.read()
        return answer.status


async def test_a_pool_is_read_over_calls_losses_and_replacements(
    tunnels: FakeTunnels, registry: CollectorRegistry
) -> None:
    scrapes: list[Scrape] = []
    text = ""

    def look() -> Scrape:
        nonlocal text
        text += generate_latest(registry).decode()
        scrapes.append(read(registry))
        return scrapes[-1]

    pool = ElasticInterceptionPool(ElasticInterceptionPoolConfig(multiplex=1), requires_tunnel=True)
    register(pool, "train", registry)
    look()
    async with ScriptedModel(told) as model, pool:
        upstream = Upstream(base_url=model.base_url, api_key=KEY)
        lost = Rollout(pool, new_session(upstream, id="rollout-of-a-secret-task"))
        stays = Rollout(pool, new_session(upstream))
        await seated(lost, stays)
        await until(lambda: len(pool.servers) == 2)
        scrape = look()
        assert scrape.get("interception_servers", name="train", state="serving") == 2
        assert scrape.get("interception_slots_in_use") == scrape.get("interception_slots_capacity") == 2
        assert scrape.get("tunnel_tunnels", type="fake", state="serving") == 2
        for status in ("200", "200", "429", "400", "500"):
            await call(lost, status)
        await call(stays, "200")
        look()
        hanging = asyncio.create_task(call(lost, "hang"))
        await until(lambda: model.open == 1)
        assert look().get("interception_requests_in_flight") == 1
        server = next(server for server in pool.servers if server.base_url == lost.slot.base_url)
        tunnel = next(tunnel for tunnel in tunnels.made if tunnel.url == server.base_url)
        tunnel.counters.restarts = 4
        await tunnel.set_gone()
        await hanging
        scrape = look()
        assert scrape.get("interception_servers", state="retired") == 1
        assert scrape.get("interception_servers", state="serving") == 1
        with pytest.raises(TunnelError):
            await lost.leave()
        await until(lambda: tunnel.disconnects)
        await settle()
        look()
        again = Rollout(pool, new_session(upstream))
        await seated(again)
        await call(again, "200")
        look()
        await again.leave()
        await stays.leave()
    last = look()
    for before, after in itertools.pairwise(scrapes):
        assert before.fell(after) == []
    calls = {outcome: last.get("interception_calls_total", outcome=outcome) for outcome in last.labels("outcome")}
    assert calls == {"ok": 4, "rate limited": 1, "client error": 1, "server error": 1, "cancelled": 1}
    assert last.get("interception_turns_total", dialect=CHAT) == 8
    assert last.get("interception_upstream_call_seconds_count", dialect=CHAT) == 4
    assert last.get("interception_upstream_call_seconds_bucket", le="+Inf") == 4
    assert last.get("interception_upstream_first_byte_seconds_count") >= 4
    assert last.get("interception_acquires_total") == 3
    assert last.get("interception_server_starts_total") == 3
    assert last.get("interception_servers_retired_total") == 1
    assert last.get("tunnel_gone_total") == 1
    assert last.get("tunnel_restarts_total") == 4
    assert last.get("interception_slots_in_use") == last.get("interception_requests_in_flight") == 0
    assert last.labels("state") == {*STATES, "not serving", "starting", "retired"}
    assert last.labels("dialect") == {CHAT}
    assert {name for _, labels in last.values for name, _ in labels} == {
        "name", "state", "type", "dialect", "outcome", "le",
    }  # fmt: skip
    for secret in (KEY, "rollout-of-a-secret-task", "127.0.0.1", *(lost.slot or ())[1:]):
        assert secret not in text


async def test_why_rollouts_got_no_slot(registry: CollectorRegistry) -> None:
    quota = FakeMember(error=TunnelLimitError("maximum number of tunnels reached"))
    members = FakeMembers(FakeMember(), quota)
    config = ElasticInterceptionPoolConfig(multiplex=1, max_servers=2)
    async with ElasticInterceptionPool(config, server_factory=members) as pool:
        register(pool, registry=registry)
        first = Rollout(pool)
        await seated(first)
        with pytest.raises(TunnelLimitError):
            await Rollout(pool).task
        with pytest.raises(AcquireTimeoutError):
            async with pool.acquire(new_session(), timeout=0):
                pass
        waits = Rollout(pool)
        await settle()
        scrape = read(registry)
        assert scrape.get("interception_acquires_waiting") == 1
        assert scrape.get("interception_acquires_longest_wait_seconds") > 0
        waits.task.cancel()
        await settle()
        used = new_session()
        used.registered = True
        with pytest.raises(ValueError, match="has been used"):
            async with pool.acquire(used):
                pass
        await first.leave()
    scrape = read(registry)
    reasons = {why: scrape.get("interception_acquire_errors_total", reason=why) for why in scrape.labels("reason")}
    assert reasons == {"limit": 1, "timeout": 1, "cancelled": 1, "unusable": 1}
    assert scrape.get("interception_server_starts_total") == 2
    assert scrape.get("interception_server_failed_starts_total") == 1


async def test_a_pool_of_foreign_servers_shows_what_they_tell(registry: CollectorRegistry) -> None:
    members = FakeMembers()
    config = StaticInterceptionPoolConfig(servers=[InterceptionServerConfig()] * 3)
    async with StaticInterceptionPool(config, server_factory=members) as pool:
        register(pool, registry=registry)
        members.made[0].set_serving(False)
        members.made[1].tunnel = type("Theirs", (), {"state": "wobbling at https://secret.example"})()
        scrape = read(registry)
        assert scrape.get("interception_servers", state="not serving") == 1
        assert scrape.get("interception_servers", state=OTHER) == 1
        assert scrape.get("interception_servers", state="serving") == 1
        assert ("interception_slots_capacity", (("name", "interception"),)) not in scrape.values
        for member in members:
            member.set_gone()
        with pytest.raises(TunnelError):
            await Rollout(pool).task
        assert read(registry).get("interception_acquire_errors_total", reason="no server") == 1
        assert read(registry).get("interception_servers_retired_total") == 3


async def test_a_server_by_itself_is_shown_and_its_loop(tunnels: FakeTunnels, registry: CollectorRegistry) -> None:
    server = InterceptionServer(requires_tunnel=True)
    hide = register(server, "alone", registry)
    assert read(registry).get("interception_requests_in_flight") == 0
    async with ScriptedModel(told) as model, server:
        rollout = Rollout(server, new_session(model.upstream))
        await seated(rollout)
        await call(rollout, "200")
        scrape = read(registry)
        assert scrape.get("interception_calls_total", outcome="ok", name="alone") == 1
        assert scrape.get("tunnel_tunnels", state="serving", name="alone") == 1
        assert scrape.get("interception_loop_lag_max_seconds") >= scrape.get("interception_loop_lag_seconds")
        assert ("interception_loop_stalls_total", (("name", "alone"),)) in scrape.values
        other = InterceptionServer()
        with pytest.raises(ValueError, match="'alone' is another's"):
            register(other, "alone", registry)
        hide()
        register(other, "alone", registry)
        await rollout.leave()


async def test_a_pool_shows_the_lag_of_its_loop_and_keeps_it() -> None:
    async with ElasticInterceptionPool(server_factory=FakeMembers()) as pool:
        lag = pool.stats().lag
        assert lag is not None
        assert lag.max >= lag.last >= 0
    assert pool.stats().lag is not None
    assert ElasticInterceptionPool().stats().lag is None


async def test_a_pool_tells_its_numbers_where_it_is_asked_to(caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> list[str]:
        return [text for record in caplog.records if (text := record.getMessage()).startswith("numbers: ")]

    caplog.set_level(logging.INFO, "interception")
    async with ScriptedModel(told) as model:
        async with ElasticInterceptionPool(ElasticInterceptionPoolConfig(numbers_period=0.02)) as pool:
            rollout = Rollout(pool, new_session(model.upstream))
            await seated(rollout)
            await call(rollout, "429")
            await until(lambda: any("calls rate limited 1" in line for line in lines()))
            assert "1 server (1 serving), 1 of 32 slots in use" in lines()[-1]
            await rollout.leave()
        seen = len(lines())
        await asyncio.sleep(0.1)
        assert len(lines()) == seen


@pytest.mark.parametrize(
    ("status", "failure", "outcome"),
    [
        (200, None, "ok"),
        (None, refused_for_good("cancelled: the rollout is over"), "cancelled"),
        (200, refused_for_good("cancelled"), "cancelled"),
        (409, Failure(409, "the upstream's"), "client error"),
        (429, Failure(429, "slow down"), "rate limited"),
        (404, Failure(404, "no such model"), "client error"),
        (None, Failure(504, "nothing came"), "timeout"),
        (None, Failure(503, "refused"), "server error"),
        (302, Failure(502, "moved"), "server error"),
    ],
)
def test_an_attempt_has_one_of_few_outcomes(status: int | None, failure: Failure | None, outcome: str) -> None:
    turn = Turn(Bodies(), "t", dialect=CHAT, streamed=False, request=(0, None))
    turn.attempts.append(Attempt("c", status=status))
    assert outcome_of(turn, failure) == outcome


def test_every_number_is_described_once() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
