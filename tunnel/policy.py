"""Every number the keepalive goes by, in one place."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field


class KeepAlivePolicy(BaseModel):
    """When to probe, when to restart and when to give up. Times are in seconds.

    The defaults of the plain rule are what the prime-tunnel SDK documents for its own keepalive; the other figures
    were measured with prime-tunnel 0.1.15 or are named with their reason.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rule: Literal["plain"] = "plain"
    """`plain`: two failed probes `confirm_after` apart, while the local service answers, restart the client."""

    period: float = Field(60.0, gt=0)
    """Between two probes of a URL that serves."""

    jitter: float = Field(0.2, ge=0, lt=1)
    """Share by which `period` varies, so that many tunnels do not probe in step."""

    confirm_after: float = Field(60.0, ge=0)
    """From a failed probe to the one that confirms it."""

    probe_timeout: float = Field(12.0, gt=0)
    """Of one probe. frps answers its 404 page only after 10 s where a work connection is missing, so not 5."""

    report_gap: float = Field(1.0, ge=0)
    """Callers' reports bring a probe forward, but no closer than this to the last one."""

    exit_poll: float = Field(1.0, gt=0)
    """How often the client process is looked at; one that exited is restarted at once."""

    restart_timeout: float = Field(60.0, gt=0)
    """Deadline of one restart: twice the SDK's own 30 s for a connection, for a call that never returns."""

    restart_backoff: float = Field(1.0, gt=0)
    """Before a failed restart is tried again; doubled with each failure in a row."""

    restart_backoff_max: float = Field(30.0, gt=0)
    """Upper bound of that wait. An old session is held for up to 41 s (measured), so no longer than that."""

    give_up_after: float | None = Field(600.0, gt=0)
    """A URL that answered once and is in use is given up, as if gone, after this long without a good probe or a
    request while the local service answers. None: never."""

    def scaled(self, factor: float) -> Self:
        """The same policy with every time multiplied by `factor` (0.01 turns minutes into half seconds)."""
        return self.model_copy(
            update={
                name: value * factor for name, value in self if isinstance(value, float) and name not in ("jitter",)
            }
        )
