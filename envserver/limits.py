"""Every figure of the pool, in one place."""

from dataclasses import dataclass

from envserver.checks import check_number
from envserver.errors import EnvServerError

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPolicy:
    """When a pool starts, gives up, waits and cuts off. Times are seconds, sizes bytes.

    The defaults are the design's. A test that kills a thousand workers shortens the ladders; nobody else has to.
    """

    start_timeout: float = 600.0
    """A worker that has not answered its first health request by then is killed: a failed start."""
    start_tries: int = 5
    """Failed starts in a row until a slot is spent. Reset when its worker is ready."""
    start_backoff: float = 0.5
    """Before the second try; doubled for each further one, ± `jitter`."""
    start_backoff_cap: float = 30.0
    jitter: float = 0.2
    first_start_signals: int = 3
    """So many signals in a row that end a first worker end the start of the pool; an exception or exit does at once."""
    steady_after: float = 60.0
    """A worker that was ready for this long did not crash early."""
    free_restarts: int = 2
    """Early crashes in a row whose worker is replaced without a wait; then 1, 2, 4 … seconds."""
    crash_backoff_cap: float = 30.0
    open_backoff: float = 1.0
    """After a scaled-up or re-opened place failed: doubled for each further failure, reset when one is ready."""
    open_backoff_cap: float = 60.0
    reap_interval: float = 1.0
    """A slot starts at most one worker in it."""
    spawn_period: float = 10.0
    """The pool starts at most max(`spawn_floor`, 2 workers a place) in it."""
    spawn_floor: int = 4
    scale_up_share: float = 0.9
    """Another worker is started once so much of the ready workers' capacity is used."""
    scale_down_share: float = 0.5
    """A worker is ended once less than so much of the ready workers' capacity has been used …"""
    scale_down_after: float = 60.0
    """… for this long, with one worker fewer each time, …"""
    scale_down_idle: float = 300.0
    """… and that worker has had nothing to do for this long."""
    load_look: float = 1.0
    """Between two looks at the load of a pool that has a worker to spare, and at the workers' memory."""
    max_worker_rss: int | None = None
    """A worker whose process has more resident memory is replaced, at the earliest when it is steady. None: never."""
    max_worker_age: float | None = None
    """A worker that has been ready for longer is replaced. None: never."""
    suspect_after: int = 2
    """Deaths of workers on which a task was in flight, until it runs alone."""
    refuse_after: int = 2
    """Deaths of workers on which it ran alone, until it is refused."""
    poison_records: int = 1024
    """Tasks whose deaths are remembered."""
    poison_forgotten_after: float = 3600.0
    """Since the last of its deaths."""
    lone_workers: int = 1
    """Workers beside `max_workers` at most, for tasks that run alone."""
    suspects_waiting: int = 1024
    """Runs that wait for a lone worker at most; beyond it they fail."""
    kill_grace: float = 10.0
    """From SIGTERM to SIGKILL."""
    burial_timeout: float = 1.0
    """How long a dead worker's connection is read, when what it forked holds the other end open."""
    probe_interval: float = 5.0
    """Between two health probes of a worker, one outstanding, and two looks at the processes of a silent one."""
    silent_after: float = 10.0
    """A worker silent for this long is told of, with the stacks that it has written down by then."""
    last_choice_after: float = 30.0
    """A worker silent for this long gets a run only if every other is silent, too."""
    kill_stopped_after: float = 30.0
    """A worker that a signal has stopped, for this long, is killed."""
    kill_blocked_after: float | None = None
    """A silent worker is killed once it and all its processes have used nearly no CPU for this long. None: never, for a
    synchronous call to a slow sandbox looks like that."""
    blocked_share: float = 0.01
    """Nearly no CPU: less than this share of one."""
    client_budget: int = 128 * MIB
    """What may wait for a client that does not read; beyond it the client is cut off."""
    worker_budget: int = 512 * MIB
    """What may wait for a worker that does not read; beyond it the worker is offered no more."""
    stop_timeout: float = 5.0
    """How long workers that were sent SIGKILL may take to end until the pool stops without them."""
    flush_timeout: float = 1.0
    """How long the last answers of a pool that stops may take to leave."""
    numbers_period: float | None = 30.0
    """Between two log lines with the pool's numbers (INFO). None: no lines."""

    def __post_init__(self) -> None:
        limit = self.kill_blocked_after
        check_number("kill_blocked_after", limit, none="None: never")
        if limit is not None and not limit >= self.silent_after:
            raise EnvServerError(
                f"kill_blocked_after is at least {self.silent_after:g} s, when a silent worker is reported, or None: "
                f"never; not {limit:g}"
            )

    @property
    def watch_interval(self) -> float:
        """Between two looks at who is silent."""
        return self.probe_interval / 5

    def open_delay(self, failures: int) -> float:
        """Until the next place may be opened, after so many failures in a row (at least one)."""
        return _doubled(self.open_backoff, failures - 1, self.open_backoff_cap)

    def start_delay(self, failures: int, luck: float) -> float:
        """Until the next try after so many failed starts (at least one). `luck`: between 0 and 1."""
        delay = _doubled(self.start_backoff, failures - 1, self.start_backoff_cap)
        return min(self.start_backoff_cap, delay * (1 + self.jitter * (2 * luck - 1)))

    def crash_delay(self, crashes: int) -> float:
        """Until a worker is replaced, the slot having seen so many early crashes in a row."""
        if crashes <= self.free_restarts:
            return 0.0
        return _doubled(1.0, crashes - self.free_restarts - 1, self.crash_backoff_cap)


def _doubled(first: float, times: int, cap: float) -> float:
    return min(cap, first * 2.0 ** min(times, 32))
