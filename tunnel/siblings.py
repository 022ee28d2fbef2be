"""What the tunnels of one process tell together: when most of them fail at once, one is restarted and the rest wait.

A plain module like the detector: events and the time go in, permissions come out.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from tunnel.policy import KeepAlivePolicy


@dataclass(slots=True)
class _Member:
    suspect_since: float | None = None
    restarted_at: float | None = None  # since it turned suspect
    canaries: int = 0  # how often it was the canary of this storm


class Siblings:
    """The tunnels of one process. In a storm (most of them suspect within a short time) restarts go one by one.

    A storm holds every restart but the canary's. It turns into a procession, one restart a second, when the canary
    serves again or most tunnels came back by themselves; and that is over when none is suspect.
    """

    def __init__(self) -> None:
        self._members: dict[Hashable, _Member] = {}
        self._phase: Literal["calm", "storm", "following"] = "calm"
        self._canary: Hashable | None = None
        self._canaries = 0
        self._policy = KeepAlivePolicy()  # of the storm there is
        self._next_restart = 0.0
        self._following_since = 0.0

    def join(self, name: Hashable) -> None:
        """Count this tunnel in (said as often as the caller likes)."""
        self._members.setdefault(name, _Member())

    def leave(self, name: Hashable) -> None:
        """Count it out. What a canary that leaves would have shown is never known: the next one need not wait."""
        self._members.pop(name, None)
        if self._phase == "storm" and self._canary == name:
            self._canary, self._next_restart = None, float("-inf")
        if self._phase == "storm" and not self._widespread(self._suspects(), self._policy):
            self._phase, self._canary = "following", None  # those that are left are no storm
            self._next_restart = self._following_since = float("-inf")
        self._calm_down()

    def suspect(self, name: Hashable, now: float, policy: KeepAlivePolicy) -> None:
        """This tunnel's URL failed (said as often as the caller likes)."""
        member = self._members.get(name)
        if member is None:
            return
        if member.suspect_since is None:
            member.suspect_since = now
        if self._phase != "storm" and self._widespread(self._turned_suspect(now, policy), policy):
            self._begin_storm(now, policy)

    def well(self, name: Hashable, now: float, policy: KeepAlivePolicy) -> None:
        """This tunnel serves."""
        member = self._members.get(name)
        if member is None:
            return
        if self._phase == "calm" and member.suspect_since is None:
            return  # said with every request
        member.suspect_since = member.restarted_at = None
        if self._phase == "storm" and (name == self._canary or not self._widespread(self._suspects(), policy)):
            self._phase, self._canary = "following", None
            self._next_restart = self._following_since = now
        self._calm_down()

    def may_restart(self, name: Hashable, now: float, policy: KeepAlivePolicy) -> float:
        """Now, or the time at which to ask again. Asking at a time that is granted takes the place: restart then."""
        member = self._members.get(name)
        if member is None:
            return now
        if self._phase == "calm":
            if member.suspect_since is not None:
                member.restarted_at = now
            return now
        at = self._next_restart
        if self._phase == "storm" and member.canaries > min(other.canaries for other in self._suspects() or [member]):
            # It was tried already: the others come first, also one that is in the middle of a probe.
            at += policy.probe_timeout
        if at > now:
            return at
        if self._phase == "following":
            self._next_restart = now + policy.follow_gap
        else:
            self._take_canary(name, now, policy)
        return now

    # -- parts ---------------------------------------------------------------------------------

    def _begin_storm(self, now: float, policy: KeepAlivePolicy) -> None:
        self._policy = policy
        self._phase, self._canary, self._canaries, self._next_restart = "storm", None, 0, now
        early: tuple[float, Hashable] | None = None
        for name, member in self._members.items():
            member.canaries = 0
            at = member.restarted_at
            if at is not None and at >= now - policy.siblings_window and (early is None or at > early[0]):
                early = at, name
        if early is not None:  # it was restarted before this was seen to be a storm: what becomes of it?
            self._take_canary(early[1], early[0], policy)

    def _take_canary(self, name: Hashable, now: float, policy: KeepAlivePolicy) -> None:
        self._canary = name
        self._members[name].canaries += 1
        self._next_restart = now + policy.canary_waits[min(self._canaries, len(policy.canary_waits) - 1)]
        self._canaries += 1

    def _suspects(self) -> list[_Member]:
        return [member for member in self._members.values() if member.suspect_since is not None]

    def _turned_suspect(self, now: float, policy: KeepAlivePolicy) -> list[_Member]:
        """Those that turned suspect lately, and not in a storm that a canary has ended."""
        since = now - policy.siblings_window
        lately = []
        for member in self._suspects():
            at = member.suspect_since
            if at is not None and at >= since and (self._phase == "calm" or at > self._following_since):
                lately.append(member)
        return lately

    def _widespread(self, members: list[_Member], policy: KeepAlivePolicy) -> bool:
        return len(members) >= policy.siblings_min and 2 * len(members) > len(self._members)

    def _calm_down(self) -> None:
        if not self._suspects():
            self._phase, self._canary = "calm", None
