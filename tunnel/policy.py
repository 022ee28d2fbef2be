"""Every number the keepalive goes by, in one place."""

from typing import Annotated, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator

Seconds = Annotated[float, Field(ge=0)]


class Repeats(NamedTuple):
    """`times` failures of one class in a row, the first and the last at least `span` seconds apart."""

    times: Annotated[int, Field(ge=1)]
    span: Seconds


class KeepAlivePolicy(BaseModel):
    """When to probe, when to restart and when to give up. Times are in seconds.

    Sources: *measured* with prime-tunnel 0.1.15 and frpc 0.71 on loopback; *simulated* with `benchmarks.detector`,
    which weighs the time to a restart against restarts nobody needed; *SDK*: what prime-tunnel documents for its own
    keepalive; *service*: the documented limits of Prime's API.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rule: Literal["evidence", "plain"] = "evidence"
    """`evidence`: weighs all that is seen of the tunnel. `plain`: two failed probes `confirm_after` apart, while the
    local service answers."""

    # -- both rules

    probe_timeout: float = Field(12.0, gt=0)
    """Of one probe. frps answers its 404 page only after 10 s where a work connection is missing (measured)."""

    report_gap: float = Field(1.0, ge=0)
    """Callers' reports bring a probe forward, but no closer than this to the last one."""

    exit_poll: float = Field(1.0, gt=0)
    """How often the client process, its log and the clocks are looked at; one that exited is restarted at once."""

    restart_timeout: float = Field(60.0, gt=0)
    """Deadline of one restart: twice the SDK's own 30 s for a connection, for a call that never returns."""

    restart_backoff: float = Field(1.0, gt=0)
    """Before a failed restart is tried again; doubled with each failure in a row."""

    restart_backoff_max: float = Field(30.0, gt=0)
    """Upper bound of that wait. An old session is held for up to 41 s (measured), so no longer than that."""

    give_up_after: float | None = Field(600.0, gt=0)
    """A URL that answered once and is in use is given up, as if gone, after this long without a good probe or a
    request while the local service answers. None: never."""

    jitter: float = Field(0.2, ge=0, lt=1)
    """Share by which waits vary, so that many tunnels do not probe in step."""

    # -- the plain rule

    period: float = Field(60.0, gt=0)
    """Between two probes of a URL that serves (SDK)."""

    confirm_after: float = Field(60.0, ge=0)
    """From a failed probe to the one that confirms it (SDK)."""

    # -- by evidence: when to look

    idle_spacing: float = Field(30.0, gt=0)
    """Between good probes without traffic (simulated: p95 to a restart 37 s)."""

    busy_spacing: float = Field(120.0, gt=0)
    """Between good probes while requests arrive, which say the same."""

    fresh: float = Field(10.0, gt=0)
    """A request this recent counts as traffic."""

    failure_spacing: tuple[Annotated[float, Field(gt=0)], ...] = Field((1.0, 2.0, 4.0, 8.0, 15.0), min_length=1)
    """From each failed probe in a row to the next; the last one repeats."""

    odd_silence: float = Field(9.0, gt=0)
    """So many mean gaps between requests without one bring a probe forward: for exponential gaps 1 in 8,000."""

    odd_silence_min: float = Field(3.0, gt=0)
    """But no sooner than this after the last request."""

    traffic_min: int = Field(10, ge=1)
    """Gaps between requests from which on their mean says what silence is odd (simulated)."""

    traffic_window: int = Field(50, ge=1)
    """The last so many gaps make the mean, so that it follows the traffic (simulated)."""

    # -- by evidence: what a restart needs

    slow_404: float = Field(8.0, gt=0)
    """A 404 that took longer is no lost route but a missing work connection: frps waits 10 s for one (measured)."""

    no_route: Repeats = Repeats(3, 5.0)
    """404s at once (simulated)."""

    half_open: Repeats = Repeats(3, 45.0)
    """404s after 10 s. frpc mends that by itself in 40.6 s, and a restart before that is refused (measured)."""

    refused: Repeats = Repeats(4, 45.0)
    """Connections refused at the far end."""

    bad_gateway: Repeats = Repeats(4, 45.0)
    """502s and their like, while the reference answers."""

    no_answer: Repeats = Repeats(4, 60.0)
    """Connected, then silence, while the reference answers."""

    no_name: Repeats = Repeats(2, 5.0)
    """The URL's name does not exist, while the reference's domain resolves."""

    no_reference: Repeats = Repeats(6, 120.0)
    """`bad_gateway` and `no_answer` where nothing tells the tunnel's fault from the gateway's."""

    stuck_login: Repeats = Repeats(3, 45.0)
    """One connect error in the client's log, while the reference answers."""

    reconnect_grace: float = Field(45.0, ge=0)
    """For a reconnect that the client's log shows under way: longer than its own 41 s (measured)."""

    record_spacing: float = Field(20.0, gt=0)
    """Between looks at the control API's record, and only when suspicious (service: 300 a minute)."""

    record_missing: float = Field(10.0, ge=0)
    """Between two 404s of the control API that together count as no record."""

    clock_jump: float = Field(2.0, gt=0)
    """The wall clock runs ahead of the monotonic one by this much: the host was suspended."""

    clock_hold: float = Field(10.0, ge=0)
    """No restart for this long after that."""

    # -- by evidence: how often, and how

    drain: float = Field(10.0, ge=0)
    """Requests in flight get this long before a restart, which would fail them all (measured)."""

    cooldowns: tuple[Seconds, ...] = Field((0.0, 15.0, 60.0, 300.0), min_length=1)
    """Before the next restart, by the number of those in the last `cooldown_window`; the last one repeats."""

    cooldown_window: float = Field(600.0, gt=0)
    """How long a restart lengthens the next cool-down."""

    restarts_max: int = Field(6, ge=1)
    """Restarts in `restarts_window`, those of an exited client included; beyond that the state is reported only."""

    restarts_window: float = Field(3600.0, gt=0)
    """See `restarts_max`."""

    alert_after: float = Field(60.0, gt=0)
    """This host's own way to the URL is at fault for so long: it is said once (the sheet's row 12)."""

    refused_retry: tuple[Seconds, Seconds] = (3.0, 5.0)
    """Bounds of the wait from a refused restart to the next try of the same one ("already exists")."""

    refused_retry_for: float = Field(60.0, gt=0)
    """How long that goes on before the next try is a new restart: an old session is held for up to 41 s (measured)."""

    siblings_min: int = Field(3, ge=2)
    """So many tunnels of this process, and more than half of them, must turn suspect together for a common cause."""

    siblings_window: float = Field(30.0, gt=0)
    """Within this they turn suspect: then one is restarted as a canary, the others hold."""

    canary_waits: tuple[Seconds, ...] = Field((60.0, 120.0, 240.0, 300.0), min_length=1)
    """From a canary that did not serve again to the next one; the last one repeats."""

    follow_gap: float = Field(1.0, ge=0)
    """Between the restarts that follow a canary that serves again."""

    flapping_logins: int = Field(4, ge=2)
    """Logins of the client in `flapping_window` from which on we add no restarts of our own (frp issue 4458)."""

    flapping_window: float = Field(300.0, gt=0)
    """See `flapping_logins`."""

    @field_validator("refused_retry")
    @classmethod
    def _in_order(cls, bounds: tuple[float, float]) -> tuple[float, float]:
        if bounds[0] > bounds[1]:
            raise ValueError("the lower bound comes first")
        return bounds

    def scaled(self, factor: float) -> Self:
        """The same policy with every time multiplied by `factor` (0.01 turns minutes into half seconds)."""
        update: dict[str, object] = {}
        for name, value in self:
            if name in ("jitter", "odd_silence"):
                continue
            if isinstance(value, Repeats):
                update[name] = Repeats(value.times, value.span * factor)
            elif isinstance(value, tuple):
                update[name] = tuple(part * factor for part in value)
            elif isinstance(value, float):
                update[name] = value * factor
        return self.model_copy(update=update)
