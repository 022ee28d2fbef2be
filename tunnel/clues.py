"""Parts of the evidence, each with what it says by itself: traffic, the client's log, the control API, restarts made.

Plain like the detector that weighs them: no I/O, no clock.
"""

from collections import deque

from tunnel.evidence import Outcome
from tunnel.policy import KeepAlivePolicy, Repeats

NEVER = float("inf")

WORDS = {
    Outcome.NO_ROUTE: "route lost: {} gateway 404s",
    Outcome.HALF_OPEN: "half open: {} slow gateway 404s",
    Outcome.REFUSED: "refused: {} refused connections",
    Outcome.BAD_GATEWAY: "no way through the gateway: {} of its errors",
    Outcome.NO_ANSWER: "silent: {} probes without an answer",
    Outcome.NO_NAME: "name lost: {} look-ups that found none",
}
"""What repeated, in plain words."""


class Repetition:
    """The class of failure that repeats, the local service being fine. Another class starts a new count."""

    def __init__(self, policy: KeepAlivePolicy) -> None:
        self._policy = policy
        self._count = 0
        self._first = self._last = 0.0
        self.kind: Outcome | None = None
        self.reference: bool | None = None
        """What the last look found of the gateway."""

    def count(self, now: float, kind: Outcome, reference: bool | None) -> None:
        if kind is not self.kind:
            self.kind, self._count, self._first = kind, 0, now
        self._count += 1
        self._last = now
        self.reference = reference

    def forget(self) -> None:
        self.kind, self._count, self.reference = None, 0, None

    def enough(self) -> str | None:
        """That it repeats often enough, over long enough, in plain words."""
        needed = self._needed()
        lasted = self._last - self._first
        if self.kind is None or needed is None or self._count < needed.times or lasted < needed.span:
            return None
        fine = "local service and gateway" if self.reference else "local service"
        return f"{WORDS[self.kind].format(self._count)} in {lasted:.0f} s, {fine} fine"

    def _needed(self) -> Repeats | None:
        policy = self._policy
        match self.kind:
            case Outcome.NO_ROUTE:
                return policy.no_route
            case Outcome.HALF_OPEN:
                return policy.half_open
            case Outcome.REFUSED:
                return policy.refused
            case Outcome.BAD_GATEWAY:
                return policy.bad_gateway if self.reference else policy.no_reference
            case Outcome.NO_ANSWER:
                return policy.no_answer if self.reference else policy.no_reference
            case Outcome.NO_NAME:
                return policy.no_name
        return None


class Traffic:
    """When requests came in, and when their silence becomes odd."""

    def __init__(self, policy: KeepAlivePolicy) -> None:
        self._policy = policy
        self._times: deque[float] = deque(maxlen=policy.traffic_window + 1)
        self._quiet = 0
        self.last: float | None = None

    def came(self, now: float) -> None:
        self._times.append(now)
        self.last = now
        self._quiet = 0

    def looked_well(self) -> None:
        """A good probe, with no request since the one before."""
        self._quiet = min(self._quiet + 1, 30)  # bounded, for a power of two would overflow a float

    def forget(self) -> None:
        self._times.clear()
        self.last = None
        self._quiet = 0

    def fresh(self, now: float) -> bool:
        return self.last is not None and now - self.last < self._policy.fresh

    def silence(self) -> float:
        """So many seconds without a request are odd; `NEVER` where there is too little traffic to tell."""
        policy, gaps = self._policy, len(self._times) - 1
        if gaps < policy.traffic_min:
            return NEVER
        mean = (self._times[-1] - self._times[0]) / gaps
        # Doubled by each good probe that found nothing wrong, for traffic does end.
        return max(policy.odd_silence_min, policy.odd_silence * mean) * 2.0**self._quiet


class ClientNews:
    """What the client's log tells of its connection."""

    def __init__(self, policy: KeepAlivePolicy) -> None:
        self._policy = policy
        self._logins: deque[float] = deque(maxlen=policy.flapping_logins)
        self._error_since = self._error_last = 0.0
        self._errors = 0
        self.error: str | None = None
        """Its last connect error, if it has not logged in since."""
        self.reconnecting: float | None = None
        """Since when it tries to connect again."""

    def logged_in(self, now: float) -> None:
        self._logins.append(now)
        self.forget_trouble()

    def tries(self, now: float) -> None:
        if self.reconnecting is None:
            self.reconnecting = now

    def failed(self, now: float, error: str) -> None:
        if error != self.error:
            self.error, self._errors, self._error_since = error, 0, now
        self._errors += 1
        self._error_last = now

    def forget_trouble(self) -> None:
        self.error, self._errors = None, 0
        self.reconnecting = None

    def forget(self) -> None:
        self.forget_trouble()
        self._logins.clear()

    def stuck(self) -> float | None:
        """For how long one error has repeated, if often and long enough."""
        needed = self._policy.stuck_login
        lasted = self._error_last - self._error_since
        return lasted if self._errors >= needed.times and lasted >= needed.span else None

    def flapping_until(self) -> float:
        """Until when its logins are too many; in the past: they are not."""
        if len(self._logins) < self._policy.flapping_logins:
            return -NEVER
        return self._logins[0] + self._policy.flapping_window


class GoneHint:
    """What the client's log or the control API says of the registration; alone that decides nothing."""

    def __init__(self, policy: KeepAlivePolicy) -> None:
        self._policy = policy
        self._missing_since: float | None = None
        self._asked: float | None = None
        self._spent = False
        self._text: str | None = None
        self._said_by_record = False

    @property
    def text(self) -> str | None:
        """The hint, unless a restart has been made with it in hand."""
        return None if self._spent else self._text

    def say(self, text: str) -> None:
        self._text, self._said_by_record = text, False

    def may_ask(self, now: float) -> bool:
        """Whether the control API may be asked (again); if so, it is taken as asked."""
        if self._asked is not None and now - self._asked < self._policy.record_spacing:
            return False
        self._asked = now
        return True

    def record(self, now: float, status: str | None) -> None:
        if status is not None:
            self._missing_since = None
            if status.lower() in ("expired", "terminated"):
                self._text, self._said_by_record = f"the service says that it is {status.lower()}", True
            elif self._said_by_record:
                self._text, self._said_by_record = None, False  # its last word counts
        elif self._missing_since is None:
            self._missing_since = now
        elif now - self._missing_since >= self._policy.record_missing:
            self._text, self._said_by_record = "the service has no record of it", True

    def spend(self) -> None:
        """It brings one restart forward, not one after the other."""
        self._spent = True

    def forget(self) -> None:
        self._text = self._missing_since = None

    def refute(self) -> None:
        """The URL serves."""
        self.forget()
        self._spent = False


class Budget:
    """How many restarts there were, and so when there may be another one."""

    def __init__(self, policy: KeepAlivePolicy) -> None:
        self._policy = policy
        self._ended: deque[float] = deque(maxlen=len(policy.cooldowns) + 1)
        self._made: deque[float] = deque(maxlen=policy.restarts_max)

    def spend(self, now: float, *, made: bool = False) -> None:
        """A restart ended. Only one that was `made` counts against the hourly cap: without a client there is nothing to
        disturb, and nothing else could mend it."""
        self._ended.append(now)
        if made:
            self._made.append(now)

    def spent_until(self) -> float:
        """Until when the restarts of the last hour are too many; in the past: they are not."""
        if len(self._made) < self._policy.restarts_max:
            return -NEVER
        return self._made[0] + self._policy.restarts_window

    def cool_at(self, now: float) -> float:
        """When the cool-down after the last one is over."""
        recent = sum(at > now - self._policy.cooldown_window for at in self._ended)
        if not recent:
            return -NEVER
        cooldowns = self._policy.cooldowns
        return self._ended[-1] + cooldowns[min(recent, len(cooldowns) - 1)]
