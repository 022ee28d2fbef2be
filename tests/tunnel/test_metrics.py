"""The numbers of tunnels: by kind, state and outcome, never by URL, also of those that are no more."""

import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry

from tests.helpers import Switch, until
from tests.interception.fakes import FakeTunnel
from tests.scrapes import Scrape
from tunnel import Counters, CustomTunnelConfig, KeepAlivePolicy, make_tunnel
from tunnel.evidence import Outcome
from tunnel.metrics import FAMILIES, STATES, Histogram, samples_of
from tunnel.prometheus import register

OURS = ("tunnel_",)


def read(registry: CollectorRegistry) -> Scrape:
    return Scrape.of(registry, OURS)


async def test_a_tunnel_is_read_by_its_state_and_by_what_its_probes_found() -> None:
    registry = CollectorRegistry()
    async with Switch(404) as gateway, Switch() as local:
        policy = KeepAlivePolicy(rule="plain", period=0.02, confirm_after=0.02, probe_timeout=20, exit_poll=0.01)
        tunnel = make_tunnel(CustomTunnelConfig(url=gateway.url, port=local.port, policy=policy))
        register(tunnel, "relay", registry)
        before = read(registry)
        assert before.get("tunnel_tunnels", name="relay", type="custom", state="idle") == 1
        async with tunnel.expose(local.port):
            await until(lambda: tunnel.state.name == "suspect")
            assert read(registry).get("tunnel_tunnels", state="suspect") == 1
            gateway.behaviour = 200
            await until(lambda: tunnel.counters.outcomes[Outcome.OK] > 2)
            during = read(registry)
    after = read(registry)
    assert before.fell(during) == during.fell(after) == []
    assert after.get("tunnel_probes_total", outcome="no route") >= 1
    assert after.get("tunnel_probes_total") == tunnel.counters.probes
    assert after.get("tunnel_tunnels", state="idle") == after.get("tunnel_tunnels") == 1
    assert after.labels("outcome") <= {*Outcome}
    assert after.labels("state") == {*STATES}
    assert (after.labels("name"), after.labels("type")) == ({"relay"}, {"custom"})


async def test_one_that_is_gone_is_counted_for_good() -> None:
    registry = CollectorRegistry()
    tunnel = FakeTunnel()
    register(tunnel, "it", registry)
    async with tunnel.expose(1):
        await tunnel.set_gone()
        assert read(registry).get("tunnel_tunnels", state="gone") == 1
    assert read(registry).get("tunnel_gone_total", type="fake") == 1


def test_the_counts_of_those_that_are_no_more_are_added() -> None:
    past = Counters(probes=3, restarts=2, refused_restarts=1, arrivals=7, gone=1)
    past.outcomes.update({"ok": 2, "busy": 1})
    tunnel = FakeTunnel()
    tunnel.counters.restarts = 5
    tunnel.counters.outcomes["ok"] = 1
    samples = {(s.family.name, s.labels): s.value for s in samples_of([tunnel], {"fake": past})}
    assert samples["tunnel_restarts_total", ("fake",)] == 7
    assert samples["tunnel_restarts_refused_total", ("fake",)] == 1
    assert samples["tunnel_requests_total", ("fake",)] == 7
    assert samples["tunnel_probes_total", ("fake", "ok")] == 3
    assert samples["tunnel_tunnels", ("fake", "idle")] == 1
    assert (past.restarts, past.outcomes["ok"]) == (2, 2), "they are left as they are"


def test_two_in_one_registry_have_two_names() -> None:
    registry = CollectorRegistry()
    first, second = FakeTunnel(), FakeTunnel()
    hide = register(first, "a", registry)
    register(first, "a", registry)
    with pytest.raises(ValueError, match="'a' is another's"):
        register(second, "a", registry)
    register(second, "b", registry)
    assert read(registry).get("tunnel_tunnels") == 2
    hide()
    assert read(registry).labels("name") == {"b"}


def test_a_histogram_counts_into_the_first_bucket_that_is_large_enough() -> None:
    histogram, other = Histogram((0.1, 1.0)), Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
    other.observe(1.0)
    histogram.add(other)
    assert histogram.counts == [2, 2, 1]
    assert histogram.sum == pytest.approx(8.65)


def test_every_number_is_described_once() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


@pytest.mark.parametrize("package", ["tunnel", "interception"])
def test_without_the_extra_the_error_says_what_to_install(package: str) -> None:
    code = f"import sys; sys.modules['prometheus_client'] = None; import {package}.prometheus"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].endswith("pip install 'interception-toolkit[prometheus]'")
