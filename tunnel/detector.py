"""When to probe, when to restart, when a tunnel is gone: the decision by evidence, without I/O and without a clock.

Its rules and their numbers are those of the design's tunnels sheet. `keep_serving` feeds it and carries out.
"""

import random
from collections.abc import Hashable
from dataclasses import dataclass

from tunnel.clues import NEVER, Budget, ClientNews, GoneHint, Repetition, Traffic
from tunnel.evidence import (
    GOOD,
    NEED_REFERENCE,
    NOT_SERVING,
    NOTHING_IN_FLIGHT,
    Action,
    GiveUp,
    Outcome,
    Probe,
    Restart,
    Rule,
    Seen,
    Wait,
    give_up_text,
)
from tunnel.plain import PlainRule
from tunnel.policy import KeepAlivePolicy
from tunnel.siblings import Siblings
from tunnel.state import StateName, TunnelState


def make_rule(
    policy: KeepAlivePolicy,
    now: float,
    *,
    can_restart: bool = True,
    siblings: Siblings | None = None,
    name: Hashable = None,
) -> Rule:
    """The rule a policy names, for one tunnel."""
    if policy.rule == "plain":
        return PlainRule(policy, now, can_restart=can_restart)
    return EvidenceRule(policy, now, can_restart=can_restart, siblings=siblings, name=name)


@dataclass(frozen=True, slots=True)
class _Cause:
    """Why a restart would help."""

    reason: str
    drain: bool
    dead: bool = False  # the client is: nothing to hold for
    single: bool = False  # one look is all there is: not while requests were coming in a moment ago


@dataclass(slots=True)
class _Attempt:
    """A restart under way: being carried out, or refused and tried again."""

    reason: str
    drain: bool
    begun: float
    next_try: float
    dead: bool = False  # the client is why
    refusals: int = 0


class EvidenceRule(Rule):
    """Weighs all that is seen of a tunnel; "rule n" in its comments is that of the sheet.

    Why a restart would help is never remembered, but found anew from the evidence at each decision: a restart that is
    held back is dropped by whatever takes its cause away.
    """

    def __init__(
        self,
        policy: KeepAlivePolicy,
        now: float,
        *,
        can_restart: bool = True,
        rng: random.Random | None = None,
        siblings: Siblings | None = None,
        name: Hashable = None,
    ) -> None:
        self._policy = policy
        self._can_restart = can_restart
        self._rng = rng or random.Random()
        self._siblings = siblings or Siblings()
        self._name = name
        self.state, self.restarts = TunnelState("serving"), 0
        self._notes: list[str] = []
        self._said: set[str] = set()  # the notes that are not to be said again

        # Looks: the last one, and what repeats.
        self._next_probe = now + self._jittered(policy.idle_spacing)
        self._last_probe: float | None = None
        self._probe_reached_us = False  # the nonce of the one under way came in
        self._unrun = False  # the last one could not run
        self._trouble: tuple[StateName, str] | None = None  # what the last one found wrong
        self._failing_since: float | None = None  # the first failure since the URL was seen serving
        self._repeated = Repetition(policy)
        self._bad_since: float | None = None  # the first since the last good look, whatever requests came in
        self._tries = 0  # looks since then
        self._wrong_spent = False  # the one restart for a stranger under our URL was made

        self._answered, self._last_good = False, now
        self._gone: str | None = None
        self._refused: str | None = None  # a restart was refused as gone, and the URL has yet to fail

        # Restarts.
        self._exited: str | None = None  # the client is not running, in plain words
        self._attempt: _Attempt | None = None
        self._verifying = False  # restarted, and not seen serving since
        self._held: str | None = None  # a restart would help, and why it is not made yet
        self._hold_until = now  # after a jump of the clock

        self._traffic, self._client = Traffic(policy), ClientNews(policy)
        self._patience = 1.0  # jitter of its odd silence
        self._hint, self._budget = GoneHint(policy), Budget(policy)

    # -- evidence: probes and requests -----------------------------------------------------------

    def looked(self, now: float, seen: Seen) -> None:
        reached_us, self._probe_reached_us = self._probe_reached_us, False
        if seen.outcome in GOOD or reached_us:
            self._well(now)
        elif seen.outcome is Outcome.UNRUN:
            self._could_not_look(now, seen)
        else:
            self._fails(now, seen)
        self._last_probe = now
        self._show(now)

    def probe_arrived(self, now: float) -> None:
        self._probe_reached_us = True  # at worst its answer is lost, on this host's way back
        self._serves(now)
        self._show(now)

    def arrived(self, now: float) -> None:
        self._traffic.came(now)
        self._serves(now)
        self._show(now)

    def reported(self, now: float) -> None:
        earliest = now if self._last_probe is None else max(now, self._last_probe + self._policy.report_gap)
        self._next_probe = min(self._next_probe, earliest)

    # -- evidence: the client ----------------------------------------------------------------------

    def exited(self, now: float) -> None:
        if self._exited is None and self._can_restart:
            self._exited = "its client exited"
            self._show(now)

    def logged_in(self, now: float) -> None:
        self._client.logged_in(now)
        if self._client.flapping_until() > now:
            count, window = self._policy.flapping_logins, self._policy.flapping_window
            self._say("flapping", f"its client logged in {count} times in {window:g} s: no restarts of our own for now")
            self._show(now)
        else:
            self._said.discard("flapping")

    def reconnecting(self, now: float) -> None:
        self._client.tries(now)

    def connect_failed(self, now: float, error: str) -> None:
        self._client.failed(now, error)

    def said_gone(self, now: float, text: str) -> None:
        self._hint.say(text)
        self._client.forget_trouble()  # that was the answer: nothing to wait for

    # -- evidence: the control API -----------------------------------------------------------------

    def wants_record(self, now: float) -> bool:
        """Whether the control API's record should be asked for: only when suspicious, and not often."""
        return self._can_restart and self._suspicious and self._hint.may_ask(now)

    def record(self, now: float, status: str | None) -> None:
        if self._suspicious:  # else the URL has been seen serving since it was asked for
            self._hint.record(now, status)

    # -- evidence: the clocks ----------------------------------------------------------------------

    def clock_jumped(self, now: float) -> None:
        self._forget()
        self._traffic.forget()
        self._hint.refute()
        self._tries, self._bad_since, self._refused = 0, None, None
        if self._trouble is not None:
            self._trouble = "suspect", "this host was suspended, not looked at since"
        if self._exited is None:
            self._drop_attempt(now)
        self._next_probe = now
        self._hold_until = now + self._policy.clock_hold
        self._last_good = now
        self._show(now)

    # -- what came of a restart --------------------------------------------------------------------

    def restarted(self, now: float) -> None:
        """The restart succeeded: all that was seen is forgotten, and the URL is verified."""
        self.restarts += 1
        self._budget.spend(now, made=True)
        self._attempt = self._exited = self._trouble = self._refused = None
        self._forget()
        self._traffic.forget()
        self._client.forget()
        self._tries, self._bad_since = 0, None
        self._verifying, self._next_probe = True, now
        self._show(now)

    def restart_failed(self, now: float, error: str, *, gone: bool, running: bool) -> None:
        first_line = error.partition("\n")[0]  # a program's output may follow
        self._exited = None if running else f"its client is not running, its restart failed: {first_line}"
        if gone:
            self._budget.spend(now)
            self._attempt, self._refused, self._next_probe = None, error, now
            self._forget()
        else:
            self._refuse(now, first_line)
        self._show(now)

    def _refuse(self, now: float, error: str) -> None:
        """The same restart is tried again, but not for ever: the next one after that is another restart."""
        if self._attempt is None:  # dropped meanwhile, for a request came in
            self._attempt = _Attempt("its restart failed", False, now, now)
        attempt = self._attempt
        attempt.refusals += 1
        mended = self._exited is None and (attempt.dead or self._repeated.kind is None)  # nothing calls for it now
        if mended or now - attempt.begun >= self._policy.refused_retry_for:
            self._drop_attempt(now)
        else:
            attempt.next_try = now + self._rng.uniform(*self._policy.refused_retry)
            attempt.reason = f"restart failed, trying again: {error}"

    # -- decision ----------------------------------------------------------------------------------

    def decide(self, now: float, *, in_use: bool = True) -> Action:
        if self._can_restart:
            self._siblings.join(self._name)
        if not in_use:
            self._last_good = max(self._last_good, now)  # nobody waits: that time is not held against the URL
        if self._gone is None:
            self._gone = self._final_word(now, in_use)
        if self._gone is not None:
            self.state = TunnelState("gone", self._gone)
            return GiveUp(self._gone)
        restart_at = self._restart_time(now)
        if restart_at <= now:
            return self._carry_out(now)
        self._show(now)
        look_at = min(self._next_probe, self._odd_silence_at())
        if look_at <= now:
            self._next_probe, self._probe_reached_us = now, False
            return Probe()
        until, deadline = min(look_at, restart_at), self._deadline()
        return Wait(min(until, deadline) if deadline > now else until)

    def left(self) -> None:
        self._siblings.leave(self._name)

    def notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes

    # -- parts: what a look means --------------------------------------------------------------------

    def _well(self, now: float) -> None:
        """The URL leads to us: seen by our own eyes."""
        self._serves(now)
        self._tries, self._bad_since, self._wrong_spent = 0, None, False
        self._said -= {"path", "only here", "budget"}
        self._traffic.looked_well()
        self._patience = self._jittered(1.0)
        spacing = self._policy.busy_spacing if self._traffic.fresh(now) else self._policy.idle_spacing
        self._next_probe = now + self._jittered(spacing)

    def _serves(self, now: float) -> None:
        """A request, ours or another's, came through the URL (rule 3)."""
        self._answered, self._last_good, self._trouble = True, now, None
        self._forget()
        self._hint.refute()
        self._siblings.well(self._name, now, self._policy)
        if self._exited is None:
            self._refused, self._verifying = None, False
            self._drop_attempt(now)

    def _odd_silence_at(self) -> float:
        """When the silence becomes odd for this traffic; it only brings a probe forward (rule 4)."""
        last, wait = self._traffic.last, self._traffic.silence()
        if last is None or wait == NEVER or self._failing_since is not None or self._unrun:
            return NEVER
        return max(last, self._last_probe or last) + self._patience * min(wait, self._policy.idle_spacing)

    def _could_not_look(self, now: float, seen: Seen) -> None:
        """Says nothing: what was counted stays, and the time is not held against the URL."""
        self._last_good = min(now, self._last_good + now - (self._last_probe or now))
        self._back_off(now)
        self._unrun = True
        self._trouble = "path_fault", f"not probed: {seen.detail}"

    def _fails(self, now: float, seen: Seen) -> None:
        self._back_off(now)
        self._unrun = False
        self._failing_since = now if self._failing_since is None else self._failing_since
        if not seen.local_ok:
            self._last_good = now  # time without a local service is not held against the URL
            self._blame_others(now, "local_down", seen.detail)
        elif self._blames_the_path(seen):
            self._blame_others(now, "path_fault", seen.detail)
            self._alert(now, "path", seen.detail)
        else:
            self._trouble = "suspect", seen.detail
            self._count(now, seen)
            if self._arrives(now):
                self._alert(now, "only here", seen.detail)

    def _blames_the_path(self, seen: Seen) -> bool:
        if seen.outcome in (Outcome.PATH, Outcome.AUTH, Outcome.BUSY):
            return True
        if seen.outcome is Outcome.NO_NAME:
            return seen.reference is not True
        return seen.outcome in NEED_REFERENCE and seen.reference is False

    def _blame_others(self, now: float, name: StateName, detail: str) -> None:
        """No restart can mend this (rule 6)."""
        self._trouble = name, detail
        self._repeated.forget()
        if self._exited is None:
            self._drop_attempt(now)

    def _count(self, now: float, seen: Seen) -> None:
        if self._exited is not None:
            return  # its restart comes first, and after that counting begins anew
        self._siblings.suspect(self._name, now, self._policy)
        self._repeated.count(now, seen.outcome, seen.reference)

    def _alert(self, now: float, what: str, detail: str) -> None:
        """This host's own way to the URL has been at fault for long."""
        after = self._policy.alert_after
        if self._bad_since is not None and now - self._bad_since >= after:
            arrives = "requests arrive, but " if self._arrives(now) else ""
            self._say(what, f"{arrives}this host's own probes have failed for {after:g} s: {detail}")

    # -- parts: why a restart would help ---------------------------------------------------------------

    def _cause(self) -> _Cause | None:
        if not self._can_restart:
            return None
        if self._exited is not None:
            return _Cause(self._exited, drain=False, dead=True)  # rule 1
        kind = self._repeated.kind
        if kind is None or self._unrun:
            return None
        drain = kind not in NOTHING_IN_FLIGHT  # rule 9
        if (reason := self._repeated.enough() or self._stuck_login()) is not None:
            return _Cause(reason, drain)  # rule 5
        detail = self._trouble[1] if self._trouble else kind
        if self._hint.text is not None and kind in NOT_SERVING:
            return _Cause(f"{detail}, and {self._hint.text}", drain, single=True)  # rule 2
        if kind is Outcome.WRONG and not self._wrong_spent:
            return _Cause(f"somebody else answers under its URL ({detail})", drain, single=True)  # rule 7
        return None

    def _stuck_login(self) -> str | None:
        """A login stuck behind a silent old session shows in the client's log alone (rule 5)."""
        lasted = self._client.stuck()
        if lasted is None or self._repeated.reference is not True:
            return None
        return f"its client cannot connect for {lasted:.0f} s ({self._client.error}), though the gateway answers"

    # -- parts: when a restart may be made -------------------------------------------------------------

    def _restart_time(self, now: float) -> float:
        """When a restart is due; `now` or earlier: now. Taken, where the siblings take turns."""
        self._held = None
        if self._attempt is not None:
            held = self._unrun and self._exited is None
            return NEVER if held else max(self._attempt.next_try, self._hold_until)
        cause = self._cause()
        if cause is None:
            return NEVER
        at, why = max(self._holds(now, cause))
        if at <= now and not cause.dead:
            at, why = self._siblings.may_restart(self._name, now, self._policy), "one of many that fail is tried first"
        if at > now:
            self._held = f"{cause.reason}; no restart yet: {why}"
            return at
        self._attempt = _Attempt(cause.reason, cause.drain, now, now, cause.dead)
        return now

    def _holds(self, now: float, cause: _Cause) -> list[tuple[float, str]]:
        """What has to be over before a restart, and when it is."""
        policy = self._policy
        holds = [
            (self._hold_until, "the clock has just jumped"),
            (self._budget.cool_at(now), "the last one is not long ago"),
            (self._budget.spent_until(), f"{policy.restarts_max} in {policy.restarts_window:g} s are enough"),
        ]
        if self._budget.spent_until() > now:
            self._say("budget", f"no more restarts for now: {holds[-1][1]}")
        if cause.dead:
            return holds
        if self._client.reconnecting is not None:
            holds.append((self._client.reconnecting + policy.reconnect_grace, "its client is reconnecting by itself"))
        if cause.single and self._traffic.last is not None:
            holds.append((self._traffic.last + policy.fresh, "requests came in a moment ago"))
        holds.append((self._client.flapping_until(), "its client logs in again and again"))
        return holds

    def _carry_out(self, now: float) -> Restart:
        attempt = self._attempt
        assert attempt is not None
        self._hint.spend()
        self._wrong_spent = self._wrong_spent or self._repeated.kind is Outcome.WRONG
        self._show(now)
        return Restart(attempt.reason, drain=attempt.drain and self._exited is None)

    def _drop_attempt(self, now: float) -> None:
        """It is over without success. One that was never made costs nothing."""
        if self._attempt is not None and self._attempt.refusals:
            self._budget.spend(now)
        self._attempt = None

    # -- parts: the end --------------------------------------------------------------------------------

    def _final_word(self, now: float, in_use: bool) -> str | None:
        """Why the tunnel is gone, if it is."""
        if self._refused is not None and (self._exited is not None or self._repeated.kind in NOT_SERVING):
            return self._refused
        failing = self._trouble is not None or self._exited is not None or self._verifying
        local_down = self._trouble is not None and self._trouble[0] == "local_down"
        if now >= self._deadline() and in_use and failing and not local_down:
            return give_up_text(self._policy, self.restarts)
        return None

    def _deadline(self) -> float:
        """When a URL that answered once has not served for too long."""
        after = self._policy.give_up_after
        return NEVER if after is None or not self._answered or not self._can_restart else self._last_good + after

    # -- small parts -----------------------------------------------------------------------------------

    @property
    def _suspicious(self) -> bool:
        return self._failing_since is not None or self._exited is not None

    def _arrives(self, now: float) -> bool:
        """Requests have come in since probes began to fail, the last of them a moment ago."""
        last, bad = self._traffic.last, self._bad_since
        return last is not None and bad is not None and last > bad and self._traffic.fresh(now)

    def _forget(self) -> None:
        """All that counts towards a restart."""
        self._failing_since = None
        self._unrun = False
        self._repeated.forget()
        self._hint.forget()
        self._client.forget_trouble()

    def _say(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._notes.append(text)

    def _show(self, now: float) -> None:
        if self.state.name != "gone":
            self.state = self._present(now)

    def _present(self, now: float) -> TunnelState:
        if self._attempt is not None:
            return TunnelState("restarting", self._attempt.reason)
        if self._exited is not None:
            return TunnelState("suspect", self._held or self._exited)
        if self._trouble is None:
            return TunnelState("restarting", "restarted, not verified yet") if self._verifying else self._serving(now)
        name, detail = self._trouble
        if name != "local_down" and self._arrives(now):
            return self._serving(now)
        if name == "suspect" and self._verifying and self._held is None and self._repeated.kind is not Outcome.WRONG:
            return TunnelState("restarting", f"restarted, not verified yet ({detail})")
        return TunnelState(name, self._held or detail)

    def _serving(self, now: float) -> TunnelState:
        if self._client.flapping_until() > now:
            return TunnelState("serving", "but its client logs in again and again")
        if self._bad_since is not None:
            return TunnelState("serving", "requests arrive, though this host's own probes fail")
        return TunnelState("serving")

    def _back_off(self, now: float) -> None:
        spacing = self._policy.failure_spacing
        self._next_probe = now + self._jittered(spacing[min(self._tries, len(spacing) - 1)])
        self._tries += 1
        self._bad_since = now if self._bad_since is None else self._bad_since

    def _jittered(self, seconds: float) -> float:
        return seconds * self._rng.uniform(1 - self._policy.jitter, 1 + self._policy.jitter)
