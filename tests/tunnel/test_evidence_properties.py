"""Whatever is seen, in whatever order: what the rules by evidence never do."""

import random
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from hypothesis import event, given, settings
from hypothesis import strategies as st

from tunnel import KeepAlivePolicy
from tunnel.detector import EvidenceRule
from tunnel.evidence import GOOD, NEED_REFERENCE, NOT_SERVING, Action, GiveUp, Outcome, Probe, Restart, Seen, Wait
from tunnel.siblings import Siblings
from tunnel.state import StateName

Fate = Literal["done", "refused", "refused but runs", "gone", "gone but runs"]

ROUNDING = 1e-6

EVENTS = [
    "",
    "",
    "",
    "request",
    "nonce",
    "exit",
    "report",
    "login",
    "reconnecting",
    "connect error",
    "said gone",
    "expired",
    "no record",
    "clock",
    "another suspect",
    "another well",
]


@dataclass(frozen=True)
class Step:
    """Time passes (None: as long as the rule asks for), something happens; and should the rule probe or restart now,
    this is what comes of it."""

    passes: float | None
    event: str
    seen: Seen
    takes: float
    fate: Fate
    in_use: bool


SEEN = st.builds(
    Seen,
    outcome=st.sampled_from(list(Outcome)),
    local_ok=st.sampled_from([True, True, True, False]),
    detail=st.just("as seen"),
    reference=st.sampled_from([True, True, False, None]),
)


def steps(max_size: int = 60) -> st.SearchStrategy[list[Step]]:
    """Runs of one failure, for mixed ones alone would restart nothing."""
    step = st.builds(
        Step,
        passes=st.none() | st.sampled_from([0.0, 0.5, 1.0, 10.0, 30.0, 45.0, 600.0]) | st.floats(0, 100),
        event=st.sampled_from(EVENTS),
        seen=SEEN,
        takes=st.sampled_from([0.0, 0.1, 12.0]),
        fate=st.sampled_from(get_args(Fate)),
        in_use=st.booleans(),
    )
    run = st.builds(
        lambda step, times, quiet: [step, *[replace(step, passes=None, event="" if quiet else step.event)] * times],
        step,
        st.integers(0, 12),
        st.booleans(),
    )
    return st.lists(run, max_size=8).map(lambda runs: [step for run in runs for step in run][:max_size])


POLICIES = st.builds(
    KeepAlivePolicy,
    jitter=st.sampled_from([0.0, 0.2]),
    give_up_after=st.sampled_from([None, 100.0, 600.0]),
    restarts_max=st.sampled_from([1, 6]),
)


@dataclass
class Witness:
    """Drives a rule as `keep_serving` does, and keeps its own record of what would justify each decision."""

    rule: EvidenceRule
    policy: KeepAlivePolicy
    siblings: Siblings
    can_restart: bool = True
    now: float = 0.0
    running: bool = True
    last: Seen | None = None  # of the last probe that ran
    failures: list[float] = field(default_factory=list)  # since the URL was seen serving, local service fine
    hinted: bool = False
    errors: list[float] = field(default_factory=list)  # connect errors of the client in a row
    answered: bool = False
    last_good: float = 0.0
    refused: bool = False
    given_up: bool = False
    unrun: bool = False
    retrying: float | None = None  # since when one restart has been tried
    dead: bool = False  # for its client had exited
    ended: list[float] = field(default_factory=list)
    made: list[float] = field(default_factory=list)  # restarts that succeeded
    no_restart_before: float = 0.0
    nonce: bool = False
    looked_at: float = -1.0
    asked: bool = False  # something calls for a probe at once
    restarts: int = 0

    def run(self, steps: list[Step]) -> None:
        for step in steps:
            if self.given_up:
                return
            self.live(step)
            self.check_state()

    def live(self, step: Step) -> None:
        if step.passes is not None:
            self.now += step.passes
        self.happen(step.event)
        if not self.running:
            self.rule.exited(self.now)
        match self.rule.decide(self.now, in_use=step.in_use) if step.passes is not None else self.jump(step.in_use):
            case Wait(until):
                assert until > self.now, "a wait that is over already"
                self.check_progress(until)
            case Probe():
                assert self.asked or self.now > self.looked_at, "two probes without a pause between them"
                self.nonce = False
                self.now += step.takes
                self.look(step.seen)
            case Restart(_, drain):
                self.justify_restart(drain)
                self.now += step.takes
                self.restart(step.fate)
            case GiveUp(reason):
                self.justify_give_up(reason, step.in_use)
                self.given_up = True

    def jump(self, in_use: bool) -> Action:
        """Waiting as told, with nothing coming in, leads to something to do."""
        for _ in range(8):
            action = self.rule.decide(self.now, in_use=in_use)
            if not isinstance(action, Wait):
                return action
            assert action.until > self.now
            self.now = action.until
        raise AssertionError("it only ever waits")

    def happen(self, what: str) -> None:
        rule, now = self.rule, self.now
        self.asked = self.asked or what in ("report", "clock")
        match what:
            case "request" | "nonce":
                if what == "request":
                    rule.arrived(now)
                else:
                    rule.probe_arrived(now)
                    self.nonce = True
                self.serves()
            case "exit":
                self.running = False
            case "report":
                rule.reported(now)
            case "login":
                rule.logged_in(now)
                self.errors = []
            case "reconnecting":
                rule.reconnecting(now)
            case "connect error":
                rule.connect_failed(now, "i/o timeout")
                self.errors.append(now)
            case "said gone":
                rule.said_gone(now, "told")
                self.hinted = True
            case "expired":
                rule.record(now, "expired")
                self.hinted = True
            case "no record":
                rule.record(now, None)
                self.hinted = True
            case "clock":
                rule.clock_jumped(now)
                self.no_restart_before = now + self.policy.clock_hold
                self.failures, self.errors, self.hinted, self.last_good = [], [], False, now
                self.refused = self.refused and not self.running
                if self.running:
                    self.retrying = None
            case "another suspect":
                for name in range(3):
                    self.siblings.suspect(name, now, self.policy)
            case "another well":
                for name in range(3):
                    self.siblings.well(name, now, self.policy)

    def serves(self) -> None:
        self.answered, self.last_good = True, self.now
        self.failures, self.errors, self.hinted, self.unrun = [], [], False, False
        if self.running:
            self.refused, self.retrying = False, None

    def look(self, seen: Seen) -> None:
        self.rule.looked(self.now, seen)
        if seen.outcome in GOOD or self.nonce:
            self.last = seen
            self.serves()
        elif seen.outcome is Outcome.UNRUN:
            self.unrun = True
        else:
            self.unrun = False
            self.last = seen
            if not seen.local_ok:
                self.last_good = self.now
            if self.nobodys_fault(seen):
                self.failures = []
                if self.running:
                    self.retrying = None
            else:
                self.failures.append(self.now)
        self.nonce, self.asked, self.looked_at = False, False, self.now

    def nobodys_fault(self, seen: Seen) -> bool:
        if not seen.local_ok or seen.outcome in (Outcome.PATH, Outcome.AUTH, Outcome.BUSY):
            return True
        if seen.outcome is Outcome.NO_NAME:
            return seen.reference is not True
        return seen.outcome in NEED_REFERENCE and seen.reference is False

    def justify_restart(self, drain: bool) -> None:
        assert self.can_restart, "not ours to restart"
        assert self.now >= self.no_restart_before, "just after the clock jumped"
        under_way = self.retrying is not None
        if not under_way:
            self.check_budget()
            self.retrying, self.dead = self.now, not self.running
        if not self.running:
            assert not drain
            return
        assert not self.unrun
        assert self.last is not None
        assert self.last.local_ok
        assert not self.nobodys_fault(self.last), "no restart mends that"
        assert self.failures or under_way, "a request or a good probe since"
        once = self.hinted or self.last.outcome is Outcome.WRONG
        enough = len(self.failures) >= 2 and self.failures[-1] - self.failures[0] >= 5
        stuck = self.last.reference and len(self.errors) >= 3 and self.errors[-1] - self.errors[0] >= 45
        assert once or enough or stuck or under_way

    def check_budget(self) -> None:
        policy = self.policy
        hour = [at for at in self.made if at > self.now - policy.restarts_window + ROUNDING]
        assert len(hour) < policy.restarts_max
        recent = [at for at in self.ended if at > self.now - policy.cooldown_window + ROUNDING]
        if recent:
            assert self.now + ROUNDING >= recent[-1] + policy.cooldowns[min(len(recent), len(policy.cooldowns) - 1)]

    def restart(self, fate: Fate) -> None:
        self.running = fate in ("done", "refused but runs", "gone but runs")
        event(f"a restart is {fate}")
        self.asked = True
        match fate:
            case "done":
                self.rule.restarted(self.now)
                self.restarts += 1
                self.made.append(self.now)
                self.end_restart()
                self.failures, self.errors, self.hinted, self.refused = [], [], False, False
            case "gone" | "gone but runs":
                self.rule.restart_failed(self.now, "refused for good", gone=True, running=self.running)
                self.end_restart()
                self.failures, self.hinted, self.refused = [], False, True
            case _:
                self.rule.restart_failed(self.now, "try later", gone=False, running=self.running)
                assert self.retrying is not None
                mended = self.running and (self.dead or not self.failures)
                if mended or self.now - self.retrying >= self.policy.refused_retry_for:
                    self.end_restart()

    def end_restart(self) -> None:
        self.retrying = None
        self.ended.append(self.now)

    def justify_give_up(self, reason: str, in_use: bool) -> None:
        event("given up")
        if reason == "refused for good":
            assert self.refused
            if self.running:
                assert self.last is not None
                assert self.last.outcome in NOT_SERVING
                assert self.last.local_ok
                assert self.failures, "seen not serving since it was refused"
        else:
            assert self.can_restart
            assert self.policy.give_up_after is not None
            assert self.answered
            assert in_use
            assert self.now >= self.last_good + self.policy.give_up_after

    def check_progress(self, until: float) -> None:
        longest = self.policy.busy_spacing * (1 + self.policy.jitter)
        assert until <= self.now + longest, "nobody looks any more"

    def check_state(self) -> None:
        state = self.rule.state
        assert state.name in get_args(StateName)
        assert state.name != "idle"
        assert (state.name == "gone") == self.given_up
        assert state.reason or state.name == "serving", "everything but serving has a reason"
        assert self.rule.restarts == self.restarts
        if state.name == "serving" and self.can_restart:
            assert self.running
        if state.name == "local_down":
            assert self.last is not None
            assert not self.last.local_ok
        if state.name == "restarting":
            assert self.can_restart


PROPERTY = settings(max_examples=150, deadline=None)


def witness(policy: KeepAlivePolicy, *, seed: int, can_restart: bool = True) -> Witness:
    siblings = Siblings()
    for name in range(3):
        siblings.join(name)
    rule = EvidenceRule(
        policy, 0.0, can_restart=can_restart, rng=random.Random(seed), siblings=siblings, name="this one"
    )
    return Witness(rule, policy, siblings, can_restart)


@PROPERTY
@given(policy=POLICIES, steps=steps(), can_restart=st.sampled_from([True, True, False]), seed=st.integers(0, 1000))
def test_every_decision_is_justified(policy: KeepAlivePolicy, steps: list[Step], can_restart: bool, seed: int) -> None:
    witness(policy, seed=seed, can_restart=can_restart).run(steps)


@PROPERTY
@given(policy=POLICIES, steps=steps(), seed=st.integers(0, 1000))
def test_whatever_happened_a_url_that_serves_again_is_found_serving(
    policy: KeepAlivePolicy, steps: list[Step], seed: int
) -> None:
    life = witness(policy, seed=seed)
    life.run(steps)
    good = Step(None, "", Seen(Outcome.OK, True, "answered 200", is_200=True), 0.0, "done", False)
    for _ in range(300):  # of a dead client an hour's budget may have to pass
        if life.given_up or life.rule.state.name == "serving":
            return
        life.run([good])
    raise AssertionError(life)


@PROPERTY
@given(policy=POLICIES, steps=steps(), seed=st.integers(0, 1000))
def test_whatever_happened_a_lost_route_is_restarted_or_given_up_in_the_end(
    policy: KeepAlivePolicy, steps: list[Step], seed: int
) -> None:
    life = witness(policy, seed=seed)
    life.run(steps)
    before = life.restarts
    lost = Step(None, "", Seen(Outcome.NO_ROUTE, True, "gateway 404"), 0.0, "done", True)
    begin = life.now
    while not life.given_up and life.restarts == before and life.now < begin + 5000:
        life.run([lost])
    assert life.given_up or life.restarts > before


@PROPERTY
@given(
    outcome=st.sampled_from([Outcome.PATH, Outcome.AUTH, Outcome.BUSY, Outcome.UNRUN, *NOT_SERVING, Outcome.NO_ANSWER]),
    local_ok=st.booleans(),
    gap=st.floats(0.1, 14),
    seed=st.integers(0, 1000),
)
def test_while_requests_arrive_nothing_is_restarted(outcome: Outcome, local_ok: bool, gap: float, seed: int) -> None:
    rule = EvidenceRule(KeepAlivePolicy(), 0.0, rng=random.Random(seed))
    now, next_request = 0.0, gap
    seen = Seen(outcome, local_ok, "as seen", reference=True)
    while now < 500:
        match rule.decide(now):
            case Wait(until):
                now = min(until, next_request)
            case Probe():
                rule.looked(now, seen)
            case action:
                # Only what repeats between two requests can be a cause, and it takes 5 s.
                assert isinstance(action, Restart)
                assert gap > 5
                assert outcome in (Outcome.NO_ROUTE, Outcome.NO_NAME)
                assert local_ok
                return
        if now >= next_request:
            rule.arrived(now)
            next_request += gap


@PROPERTY
@given(seconds=st.sampled_from(["idle", "busy"]), seed=st.integers(0, 10_000))
def test_jitter_stays_within_its_bounds(seconds: str, seed: int) -> None:
    policy = KeepAlivePolicy()
    rule = EvidenceRule(policy, 0.0, rng=random.Random(seed))
    if seconds == "busy":
        rule.arrived(99)
    rule.looked(100, Seen(Outcome.OK, True, "answered 200"))
    action = rule.decide(100)
    spacing = policy.busy_spacing if seconds == "busy" else policy.idle_spacing
    assert isinstance(action, Wait)
    assert 0.8 * spacing <= action.until - 100 <= 1.2 * spacing
    now = 100.0
    for pause in (*policy.failure_spacing, 15.0, 15.0):
        rule.looked(now, Seen(Outcome.PATH, True, "as seen"))
        action = rule.decide(now)
        assert isinstance(action, Wait)
        assert 0.8 * pause <= action.until - now + 1e-9 <= 1.2 * pause + 1e-6
        now = action.until
