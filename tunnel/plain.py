"""The plain rule: what the SDK documents for its own keepalive, and the baseline that the evidence is measured by."""

import random

from tunnel.evidence import Action, GiveUp, Probe, Restart, Rule, Seen, Wait, give_up_text
from tunnel.policy import KeepAlivePolicy
from tunnel.state import TunnelState


class PlainRule(Rule):
    """Two failed probes, `confirm_after` apart, while the local service answers: restart.

    A probe that finds the local service down clears the count. A client that exited is restarted at once. Gone needs
    both: a restart refused as gone, and a URL that does not serve. All times are those the caller passes in.
    """

    def __init__(
        self, policy: KeepAlivePolicy, now: float, *, can_restart: bool = True, rng: random.Random | None = None
    ) -> None:
        self._policy = policy
        self._can_restart = can_restart
        self._rng = rng or random.Random()
        self.state = TunnelState("serving")
        self.restarts = 0
        self._next_probe = now + self._spacing()
        self._last_probe: float | None = None
        self._first_failure: float | None = None
        self._verifying = 0  # probes made since a restart that has not been verified yet, plus one
        self._local_ok = True
        self._answered = False
        self._last_good = now
        self._exited = False
        self._last_restart: float | None = None
        self._quick_exits = 0
        self._wanted: str | None = None  # why a restart is wanted
        self._restart_at = now
        self._failed_restarts = 0
        self._refused: str | None = None  # a restart was refused as gone, and the URL has yet to fail
        self._gone: str | None = None

    # -- evidence ------------------------------------------------------------------------------

    def looked(self, now: float, seen: Seen) -> None:
        self.probed(now, url_ok=seen.is_200, local_ok=seen.local_ok, detail=seen.detail)

    def probed(self, now: float, *, url_ok: bool, local_ok: bool, detail: str) -> None:
        """A probe ended; `detail` says in plain words what the URL or the local service answered."""
        self._last_probe = now
        self._next_probe = now + self._spacing()
        self._local_ok = local_ok
        if url_ok:
            self._first_failure, self._refused, self._verifying = None, None, 0
            self.arrived(now)
            if not self._exited:
                self._wanted = None
                self._failed_restarts = 0
                self.state = TunnelState("serving")
            return
        if self._refused is not None and local_ok:
            self._gone = self._refused
            self.state = TunnelState("restarting", self._refused)
            return
        if not local_ok:
            self._first_failure = None
            self._last_good = now  # time without a local service is not held against the URL
            if not self._exited:
                self._wanted = None  # a restart that failed mends nothing now
                self.state = TunnelState("local_down", detail)
            return
        if self._wanted is not None:
            return  # its restart is on the way; counting begins anew after that
        first = self._first_failure is None
        if self._first_failure is None:
            self._first_failure = now
        confirm_at = self._first_failure + self._policy.confirm_after
        if now >= confirm_at and self._can_restart and not first:
            self._first_failure = None
            self._want(now, f"two probes {self._policy.confirm_after:g} s apart failed ({detail}), local service fine")
        elif self._verifying:
            # Just restarted: look often, for a slow relay should not keep new rollouts away for a minute.
            self._next_probe = min(confirm_at, now + self._backoff(self._verifying))
            self._verifying += 1
            self.state = TunnelState("restarting", f"restarted, not verified yet ({detail})")
        else:
            if first or now < confirm_at:
                self._next_probe = max(confirm_at, now)
            self.state = TunnelState("suspect", detail)

    def exited(self, now: float) -> None:
        """The client process is not running (said as often as the caller likes)."""
        if self._exited or not self._can_restart:
            return
        self._exited = True
        if self._wanted is not None:
            return
        recent = self._last_restart is not None and now - self._last_restart < self._policy.period
        self._quick_exits = self._quick_exits + 1 if recent else 0
        self._want(now + (self._backoff(self._quick_exits) if self._quick_exits else 0.0), "its client exited")

    def arrived(self, now: float) -> None:
        """A request came in through the URL."""
        self._answered = True
        self._last_good = now

    def reported(self, now: float) -> None:
        """A caller saw the URL fail."""
        earliest = now if self._last_probe is None else max(now, self._last_probe + self._policy.report_gap)
        self._next_probe = min(self._next_probe, earliest)

    def restarted(self, now: float) -> None:
        """The restart that was asked for succeeded; the URL is verified at once."""
        self.restarts += 1
        self._last_restart = now
        self._wanted, self._exited, self._failed_restarts = None, False, 0
        self._first_failure, self._verifying = None, 1
        self._next_probe = now
        self.state = TunnelState("restarting", "restarted, not verified yet")

    def restart_failed(self, now: float, error: str, *, gone: bool, running: bool) -> None:
        """The restart failed. `gone`: it was refused for good; `running`: a client is there all the same."""
        if gone and not running:
            self._gone = error
        elif gone:
            self._refused, self._wanted, self._exited, self._next_probe = error, None, False, now
        else:
            self._failed_restarts += 1
            self._restart_at = now + self._backoff(self._failed_restarts)
            first_line = error.partition("\n")[0]  # a program's output may follow
            self.state = TunnelState("restarting", f"restart failed, trying again: {first_line}")

    # -- decision ------------------------------------------------------------------------------

    def decide(self, now: float, *, in_use: bool = True) -> Action:
        """What to do at `now`. `in_use`: somebody waits behind the URL (a tunnel nobody uses is never given up)."""
        if self._gone is not None:
            return self._give_up(self._gone)
        until = self._next_probe
        if not in_use:
            self._last_good = max(self._last_good, now)  # nobody waits: that time is not held against the URL
        if self._policy.give_up_after is not None and self._answered and self._can_restart:
            deadline = self._last_good + self._policy.give_up_after
            if now >= deadline and in_use and self._local_ok and self.state.name != "serving":
                return self._give_up(give_up_text(self._policy, self.restarts))
            if deadline > now:
                until = min(until, deadline)
        if self._wanted is not None:
            if now >= self._restart_at:
                return Restart(self._wanted)
            until = min(until, self._restart_at)
        if now >= self._next_probe:
            return Probe()
        return Wait(until)

    # -- parts ---------------------------------------------------------------------------------

    def _want(self, at: float, reason: str) -> None:
        self._wanted, self._restart_at = reason, at
        self.state = TunnelState("restarting", reason)

    def _give_up(self, reason: str) -> GiveUp:
        self.state = TunnelState("gone", reason)
        return GiveUp(reason)

    def _spacing(self) -> float:
        return self._policy.period * self._rng.uniform(1 - self._policy.jitter, 1 + self._policy.jitter)

    def _backoff(self, failures: int) -> float:
        # The exponent is bounded, for a relay that is down for days would overflow a float.
        return min(self._policy.restart_backoff_max, self._policy.restart_backoff * 2.0 ** min(failures - 1, 30))
