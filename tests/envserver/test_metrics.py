"""The numbers of an env server: what the slots do is counted once and under the right name, and never falls."""

import asyncio
import itertools
import logging
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from envserver import EnvServer, EnvServerError, env_server
from envserver.metrics import FAMILIES, IN_FLIGHT, Metrics, cause_of, in_a_line, samples_of
from envserver.prometheus import register, serving_metrics
from envserver.serve import serve_until_told
from envserver.slot import Slot, State
from tests.envserver.caller import Caller
from tests.envserver.scripted import MAKE, ScriptedEnv
from tests.envserver.test_pool import QUICK, pool_of, ready
from tests.envserver.test_slots import EVENTS, Driver
from tests.helpers import until
from tests.scrapes import Scrape
from tests.sshd import free_port

OURS = ("envserver_",)


def counted(driver: Driver) -> Metrics:
    metrics = Metrics()
    driver.slots.on_move = metrics.moved
    return metrics


def read(registry: CollectorRegistry) -> Scrape:
    return Scrape.of(registry, OURS)


# What the slots do


def overdue(driver: Driver, slot: Slot) -> None:
    driver.run_until(driver.now + 600)
    driver.die(slot)


def lost(driver: Driver, slot: Slot) -> None:
    driver.do(driver.slots.lost(slot, driver.now))
    driver.die(slot, -15)


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        (lambda driver, slot: driver.die(slot, -9), "SIGKILL"),
        (lambda driver, slot: driver.die(slot, -11), "SIGSEGV"),
        (lambda driver, slot: driver.die(slot, 0), "exit 0"),
        (lambda driver, slot: driver.die(slot, 77), "exit"),
        (lambda driver, slot: driver.die(slot, -99), "signal"),
        (lost, "lost"),
    ],
)
def test_a_death_is_counted_by_its_cause_and_its_replacement_is_a_restart(
    what: Callable[[Driver, Slot], None], cause: str
) -> None:
    driver = Driver(max_workers=2).up()
    metrics = counted(driver)
    _, slot = driver.in_state(State.READY)
    what(driver, slot)
    driver.run_until(driver.now + 5)
    assert metrics.deaths == {(1, cause): 1}
    assert (metrics.starts, metrics.restarts) == ({1: 1}, {1: 1})
    assert not metrics.failed_starts


@pytest.mark.parametrize(
    ("what", "cause"), [(lambda driver, slot: driver.die(slot, 1), "exit"), (overdue, "overdue"), (lost, "lost")]
)
def test_a_worker_that_was_never_ready_is_a_failed_start_and_no_death(
    what: Callable[[Driver, Slot], None], cause: str
) -> None:
    driver = Driver(max_workers=2).start()
    metrics = counted(driver)
    first, second = driver.in_state(State.STARTING)
    driver.answer(first)
    what(driver, second)
    assert metrics.failed_starts == {(1, cause): 1}
    assert not metrics.deaths


def test_a_process_that_cannot_be_made_is_a_failed_start_until_its_slot_is_given_up() -> None:
    driver = Driver(max_workers=2).up()
    metrics = counted(driver)
    driver.boots = lambda slot: False
    driver.die(driver.in_state(State.READY)[0])
    driver.run_until(driver.now + 60)
    assert metrics.failed_starts[0, "spawn"] >= driver.slots.policy.start_tries
    assert metrics.given_up >= 1
    assert not metrics.starts


def test_a_planned_end_is_no_death_but_a_crash_on_the_way_there_is() -> None:
    driver = Driver(max_workers=2).up()
    metrics = counted(driver)
    ends, crashes = driver.in_state(State.READY)
    driver.do(driver.slots.shut_down(driver.now, 30))
    driver.do(driver.slots.empty(ends, driver.now))
    driver.die(ends, -15)
    driver.die(crashes, -11)
    assert metrics.deaths == {(1, "SIGSEGV"): 1}


def test_a_cause_is_one_of_few_words() -> None:
    words = {cause_of(code) for code in range(-200, 256)}
    assert words <= {*signal.Signals.__members__, "signal", "exit", "exit 0"}


@given(events=EVENTS, max_workers=st.one_of(st.none(), st.integers(1, 5)), broken=st.sets(st.integers(1, 60)))
def test_every_start_has_one_end_and_nothing_falls(
    events: list[tuple[str, int, int]], max_workers: int | None, broken: set[int]
) -> None:
    driver = Driver(max_workers, elastic=True)
    metrics = counted(driver)
    driver.up()
    driver.boots = lambda slot: slot.generation not in broken
    slots = driver.slots
    before: dict[tuple[str, tuple[str, ...]], float] = {}
    dying: list[Slot] = []
    for what, which, returncode in events:
        living = driver.in_state(State.STARTING, State.READY, State.KILLING)
        slot = living[which % len(living)] if living else None
        match what:
            case "wait":
                driver.run_until(driver.now + which**3 / 5)
            case "load":
                driver.in_flight = which * 7
                driver.tick()
            case "answer" if slot:
                driver.answer(slot)
            case "lose" if slot:
                driver.do(slots.lost(slot, driver.now))
            case "die" if slot:
                driver.do(slots.exited(slot, driver.now, returncode))
                dying.append(slot)
            case "bury" if dying:
                driver.do(slots.closed(dying.pop(), driver.now))
        living = driver.in_state(State.STARTING, State.READY, State.KILLING)
        processes = sum(metrics.starts.values())
        unmade = sum(count for (_, cause), count in metrics.failed_starts.items() if cause == "spawn")
        ends = sum(metrics.deaths.values()) + sum(metrics.failed_starts.values()) - unmade
        assert processes == ends + len(living)
        assert processes + unmade == len(driver.starts)
        samples = samples_of(metrics, slots, {}, 0)
        now = {(s.family.name, s.labels): s.value for s in samples if s.family.name.endswith("_total")}
        assert all(now.get(key, -1) >= value for key, value in before.items())
        before = now
        assert sum(s.value for s in samples if s.family.name == "envserver_worker_slots") == len(slots.map)


# The line


def test_the_line_has_what_is_not_zero_summed_over_slots() -> None:
    driver = Driver(max_workers=2).up()
    metrics = counted(driver)
    for slot in driver.in_state(State.READY):
        driver.die(slot)
    metrics.requests = 12
    metrics.failed.update({"env": 2, "worker died": 3})
    line = in_a_line(samples_of(metrics, driver.slots, {0: 4, 1: 3}, dropped=0))
    assert "worker slots backoff 2" in line
    assert "requests in flight 7" in line
    assert "requests 12" in line
    assert "requests failed env 2, worker died 3" in line
    assert "worker deaths SIGKILL 2" in line
    assert "dropped" not in line
    assert in_a_line([]) == "nothing yet"


@asynccontextmanager
async def telling(kind: str, period: float | None) -> AsyncIterator[Caller]:
    """A server or a pool that tells its numbers so often."""
    if kind == "pool":
        async with pool_of(1, policy=replace(QUICK, numbers_period=period)) as (_, caller):
            yield caller
    else:
        async with EnvServer(ScriptedEnv(), numbers_period=period) as server:
            with Caller(server.address) as caller:
                yield caller


@pytest.mark.parametrize("kind", ["pool", "server"])
async def test_it_tells_its_numbers_again_and_again_until_it_stops(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> list[str]:
        return [text for record in caplog.records if (text := record.getMessage()).startswith("numbers: ")]

    caplog.set_level(logging.INFO, "envserver")
    async with telling(kind, 0.02) as caller:
        await caller.run()
        await until(lambda: any("worker slots ready 1" in line and "requests 1" in line for line in lines()))
        seen = len(lines())
        await until(lambda: len(lines()) > seen + 1)
    seen = len(lines())
    await asyncio.sleep(0.1)
    assert len(lines()) == seen


async def test_no_period_is_no_line_and_one_that_is_none_is_told() -> None:
    assert EnvServer(ScriptedEnv())._numbers._period == 30
    async with telling("server", None):
        assert not any("_tell" in str(handle) for handle in asyncio.get_running_loop()._scheduled)  # type: ignore[attr-defined]
    with pytest.raises(EnvServerError, match="numbers_period is more than 0, or None: never; not 0"):
        EnvServer(ScriptedEnv(), numbers_period=0)


# Prometheus


async def test_a_pool_is_read_over_deaths_failures_cancels_and_replacements() -> None:
    registry = CollectorRegistry()
    pids = set()
    async with pool_of(2) as (pool, caller):
        register(pool, "train", registry)
        first = read(registry)
        assert first.get("envserver_worker_slots", name="train", state="ready") == 2
        assert first.get("envserver_requests_capacity") == 256
        pids.add((await caller.run())["pid"])
        held = await caller.send("run", {"do": "hold"})
        await until(lambda: pool.in_flight == 1)
        assert read(registry).get("envserver_requests_in_flight") == 1
        assert read(registry).get("envserver_worker_requests_in_flight") == 1
        assert (await caller.ask("cancel", {"request_id": held.decode()}))["cancelled"] is True
        await caller.reply(held)
        assert not (await caller.run(deltas="three"))["success"]
        await caller.socket.send_multipart([b"no", b"request"])
        await until(lambda: pool.dropped == 1)
        scrapes = [first, read(registry)]
        for _ in range(3):
            assert not (await caller.run(do="die"))["success"]
            scrapes.append(read(registry))
            await ready(pool, 2)
            scrapes.append(read(registry))
        pids.add((await caller.run())["pid"])
    scrapes.append(read(registry))
    for before, after in itertools.pairwise(scrapes):
        assert before.fell(after) == []
    last = scrapes[-1]
    assert last.get("envserver_requests_total") == 7
    assert last.get("envserver_requests_cancelled_total") == 1
    assert last.get("envserver_requests_failed_total", reason="env") == 1
    assert last.get("envserver_requests_failed_total", reason="worker died") == 3
    assert last.get("envserver_requests_failed_total") == 4
    assert last.get("envserver_worker_deaths_total", cause="SIGKILL") == 3
    assert last.get("envserver_worker_starts_total") == 5
    assert last.get("envserver_worker_restarts_total") == 3
    assert last.get("envserver_worker_failed_starts_total") == 0
    assert last.get("envserver_frames_dropped_total") == 1
    assert last.get("envserver_requests_in_flight") == 0
    labels = {(label, value) for _, pairs in last.values for label, value in pairs}
    assert labels <= {
        ("name", "train"),
        *(("slot", str(number)) for number in range(2)),
        *(("state", state) for state in ("lone", *(state.value for state in State))),
        *(("reason", reason) for reason in ("env", "worker died")),
        ("cause", "SIGKILL"),
    }
    assert not {str(pid) for pid in pids} & {value for _, value in labels}


async def test_a_run_without_a_worker_and_one_that_comes_too_late_are_told_apart() -> None:
    registry = CollectorRegistry()
    async with pool_of(1, policy=replace(QUICK, reap_interval=3600.0)) as (pool, caller):
        register(pool, registry=registry)
        held = await caller.send("run", {"do": "hold"})
        await until(lambda: pool.in_flight == 1)
        assert not (await caller.run(do="die"))["success"]
        await caller.reply(held)
        assert not (await caller.run())["success"]
        assert read(registry).get("envserver_requests_failed_total", reason="worker died") == 2
        assert read(registry).get("envserver_requests_failed_total", reason="no worker") == 1
        await pool.drain(0)
        assert not (await caller.run())["success"]
        assert read(registry).get("envserver_requests_failed_total", reason="shutting down") == 1


async def test_a_single_server_has_the_same_numbers_without_workers() -> None:
    registry = CollectorRegistry()
    async with EnvServer(ScriptedEnv()) as server:
        register(server, registry=registry)
        with Caller(server.address) as caller:
            await caller.run()
            assert not (await caller.run(do="raise", text="no"))["success"]
            held = await caller.send("run", {"do": "wait"})
            await until(lambda: server.in_flight == 1)
            scrape = read(registry)
            assert scrape.get("envserver_requests_in_flight") == 1
            assert scrape.get("envserver_requests_capacity") == 128
            assert scrape.get("envserver_worker_slots", state="ready") == 1
            await caller.ask("cancel", {"request_id": held.decode()})
            await caller.reply(held)
            held = await caller.send("run", {"do": "wait"})
            await until(lambda: server.in_flight == 1)
    later = read(registry)
    assert scrape.fell(later) == []
    assert later.get("envserver_requests_total") == 4
    assert later.get("envserver_requests_cancelled_total") == 1
    assert later.get("envserver_requests_failed_total", reason="env") == 1
    assert later.get("envserver_requests_failed_total", reason="shutting down") == 1


def test_two_servers_share_a_registry_under_two_names() -> None:
    registry = CollectorRegistry()
    servers = [EnvServer(ScriptedEnv()) for _ in range(3)]
    out = register(servers[0], "a", registry)
    register(servers[1], "b", registry)
    register(servers[1], "b", registry)  # once more: it is there already
    with pytest.raises(ValueError, match="'b' already"):
        register(servers[2], "b", registry)
    assert read(registry).labels("name") == {"a", "b"}
    out()
    assert read(registry).labels("name") == {"b"}
    register(servers[2], "a", registry)
    out()  # it is another's name now
    assert read(registry).labels("name") == {"a", "b"}


def test_a_scrape_amid_a_change_of_size_is_tried_again() -> None:
    class Changing(EnvServer):
        tries = 0

        def samples(self):
            self.tries += 1
            if self.tries < 3:
                raise RuntimeError("dictionary changed size during iteration")
            return super().samples()

    registry = CollectorRegistry()
    register(Changing(ScriptedEnv()), registry=registry)
    assert read(registry).get("envserver_requests_capacity") == 0


def test_the_page_is_served_on_loopback_and_its_port_is_free_afterwards() -> None:
    registry = CollectorRegistry()
    register(EnvServer(ScriptedEnv()), registry=registry)
    with serving_metrics(0, registry=registry) as port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
            assert Scrape.read(page.read().decode(), OURS).get(IN_FLIGHT.name) == 0
        with pytest.raises(OSError, match="in use"), serving_metrics(port, registry=registry):
            pass
        with pytest.raises(EnvServerError, match=f"port {port} of 127.0.0.1"):
            serve_until_told(EnvServer(ScriptedEnv()), metrics_port=port)
    with serving_metrics(port, registry=registry):
        pass


async def test_a_server_in_a_process_of_its_own_has_a_page() -> None:
    port = free_port()
    async with env_server(MAKE, metrics_port=port) as address:
        with Caller(address) as caller:
            await caller.run()
        page = await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{port}/metrics", timeout=30)
        assert Scrape.read(page.read().decode(), OURS).get("envserver_requests_total", name="envserver") == 1


def test_without_the_extra_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['prometheus_client'] = None; import envserver.prometheus"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == (
        "ImportError: prometheus-client is not installed: pip install 'interception-toolkit[prometheus]'"
    )


def test_every_number_is_described_once() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    assert Counter(family.name.startswith(OURS) for family in FAMILIES) == {True: len(FAMILIES)}
