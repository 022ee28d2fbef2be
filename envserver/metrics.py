"""The numbers to watch of an env server: what its slots did and what became of its requests.

`Metrics` is told by the state machine and the dispatcher as things happen and has no I/O; `samples_of` reads it beside
what the pool counts from its states anyway. Who shows them (Prometheus, the log) reads samples and nothing else. A
label is a slot's number, a state, a cause or a reason: never a pid, an id or anything of a client's.
"""

import signal
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from envserver.slot import Event, Slot, State
from envserver.slots import Slots


class Family(NamedTuple):
    """One number, for each combination of its labels. By its name it is a counter (`_total`) or a gauge."""

    name: str
    help: str
    labels: tuple[str, ...] = ()


class Sample(NamedTuple):
    """A value of `family`, with the values of its labels in their order."""

    family: Family
    labels: tuple[str, ...]
    value: float


SLOTS = Family("envserver_worker_slots", "Worker slots by state; those for one run alone are lone.", ("state",))
WORKER_LOAD = Family("envserver_worker_requests_in_flight", "Requests that the slot's worker has.", ("slot",))
STARTS = Family("envserver_worker_starts_total", "Worker processes started.", ("slot",))
RESTARTS = Family("envserver_worker_restarts_total", "Starts in a slot that has had a worker before.", ("slot",))
FAILED_STARTS = Family(
    "envserver_worker_failed_starts_total", "Starts whose worker was never ready.", ("slot", "cause")
)
DEATHS = Family(
    "envserver_worker_deaths_total", "Ends, by themselves, of workers that had been ready.", ("slot", "cause")
)
GIVEN_UP = Family("envserver_worker_slots_given_up_total", "Slots that spent all their tries to start.")
REQUESTS = Family("envserver_requests_total", "Runs that clients asked for.")
FAILED = Family("envserver_requests_failed_total", "Runs that were answered by a failure.", ("reason",))
CANCELLED = Family("envserver_requests_cancelled_total", "Runs that ended by a cancel of their client's.")
IN_FLIGHT = Family("envserver_requests_in_flight", "Requests that have not been answered.")
WAITING = Family("envserver_requests_waiting", "Runs that wait until they can run alone.")
CAPACITY = Family("envserver_requests_capacity", "Requests that the ready workers are meant for.")
DROPPED = Family("envserver_frames_dropped_total", "Messages that were none, or nobody's.")

FAMILIES = (
    SLOTS, WORKER_LOAD, CAPACITY, IN_FLIGHT, WAITING, REQUESTS, FAILED, CANCELLED, DROPPED,
    STARTS, RESTARTS, FAILED_STARTS, DEATHS, GIVEN_UP,
)  # fmt: skip

# Why a run failed.
SHUTTING_DOWN = "shutting down"
NO_WORKER = "no worker"
WORKER_DIED = "worker died"
REFUSED = "refused"  # its task kills workers
CLIENT_GONE = "client gone"  # or it does not read
ENV = "env"  # the env's own run said so

LONE = "lone"  # in the place of a state, whichever it is in

NOT_STARTED = "spawn"  # the cause of a start that did not even make a process


class Metrics:
    """Counts that only grow."""

    def __init__(self) -> None:
        self.starts: Counter[int] = Counter()
        """By slot, as all that have a slot in their key."""
        self.restarts: Counter[int] = Counter()
        self.failed_starts: Counter[tuple[int, str]] = Counter()
        self.deaths: Counter[tuple[int, str]] = Counter()
        self.given_up = 0
        self.requests = 0
        self.failed: Counter[str] = Counter()
        """By reason."""
        self.cancelled = 0
        self._killed_for: dict[int, str] = {}

    def moved(self, slot: Slot, was: State, event: Event) -> None:
        """`slot` has gone from the state `was` to its present one, because of `event`."""
        number = slot.number
        if event is Event.DUE and slot.generation:  # of its last worker: it has no new one yet
            self.restarts[number] += 1
        elif event is Event.SPAWNED:
            self.starts[number] += 1
            self._killed_for.pop(number, None)
        elif was is State.SPAWNING and event is not Event.DUE:
            self.failed_starts[number, NOT_STARTED] += 1
        elif slot.state is State.KILLING and was is not State.KILLING:
            self._killed_for[number] = event.value
        elif event is Event.EXITED and not (was is State.KILLING and slot.planned):
            count = self.failed_starts if slot.ready_at is None else self.deaths
            count[number, self._killed_for.get(number) or cause_of(slot.returncode)] += 1
        if slot.state is State.RETIRED:
            self.given_up += 1


def cause_of(returncode: int) -> str:
    """How a process ended, in one of few words: the signal's name, `exit 0`, or `exit` for all other statuses."""
    if returncode >= 0:
        return "exit" if returncode else "exit 0"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return "signal"  # a real-time one


def samples_of(
    metrics: Metrics, slots: Slots, loads: Mapping[int, int], dropped: int, waiting: int = 0
) -> list[Sample]:
    """A pool's. `loads`: requests in flight of each slot that has a worker. `waiting`: runs that none has yet."""
    samples = [Sample(SLOTS, (state.value,), slots.count(state)) for state in State]
    samples.append(Sample(SLOTS, (LONE,), slots.lone))
    samples += [Sample(WORKER_LOAD, (str(number),), load) for number, load in loads.items()]
    samples += [Sample(CAPACITY, (), slots.capacity), Sample(WAITING, (), waiting)]
    samples += samples_of_requests(metrics, sum(loads.values()), dropped)
    for by_slot, count in ((STARTS, metrics.starts), (RESTARTS, metrics.restarts)):
        samples += [Sample(by_slot, (str(number),), value) for number, value in [*count.items()]]
    for family, causes in ((FAILED_STARTS, metrics.failed_starts), (DEATHS, metrics.deaths)):
        samples += [Sample(family, (str(number), cause), value) for (number, cause), value in [*causes.items()]]
    samples.append(Sample(GIVEN_UP, (), metrics.given_up))
    return samples


def health_of(slots: Slots, error: str | None) -> dict[str, object]:
    """What a pool answers to a health request. `error`: why it takes no runs; None: it does."""
    return {
        "success": error is None,
        "error": error,
        "ready": slots.ready,
        "suspect": slots.count(State.SUSPECT),
        "starting": slots.starting,
        "capacity": slots.capacity,
    }


def samples_of_requests(metrics: Metrics, in_flight: int, dropped: int) -> list[Sample]:
    """What pools and single servers have in common."""
    return [
        Sample(IN_FLIGHT, (), in_flight),
        Sample(REQUESTS, (), metrics.requests),
        *[Sample(FAILED, (reason,), value) for reason, value in [*metrics.failed.items()]],
        Sample(CANCELLED, (), metrics.cancelled),
        Sample(DROPPED, (), dropped),
    ]


def in_a_line(samples: Iterable[Sample]) -> str:
    """The same numbers for a log: what is not 0, over all slots."""
    sums: dict[Family, Counter[str]] = {}
    for family, labels, value in samples:
        if value:
            named = zip(family.labels, labels, strict=True)
            key = " ".join(label for name, label in named if name != "slot")
            sums.setdefault(family, Counter())[key] += int(value)
    sums.pop(WORKER_LOAD, None)  # in flight, once more
    parts = []
    for family, values in sums.items():
        name = family.name.removeprefix("envserver_").removesuffix("_total").replace("_", " ")
        parts.append(f"{name} {', '.join(f'{key} {value}'.strip() for key, value in values.items())}")
    return "; ".join(parts) or "nothing yet"
