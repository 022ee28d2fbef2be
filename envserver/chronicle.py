"""What the log is told of workers that come, go and fail: each thing once, and what all of it began with."""

import logging
from collections.abc import Mapping

from envserver.limits import MIB, PoolPolicy
from envserver.slot import Slot, State
from envserver.worker import Worker

logger = logging.getLogger("envserver")


class Chronicle:
    """Of one pool."""

    def __init__(self) -> None:
        self.last = ""
        """The last failure, in a line."""
        self._causes: dict[int, str] = {}
        """Of each slot, its first failed start since a worker was ready there: what follows is often only its echo."""

    def starting(self, worker: Worker, workers: Mapping[Slot, Worker], now: float) -> None:
        """What it is started for is said where that is not to serve as the others do."""
        purpose = ""
        if worker.slot.lone:
            purpose = ", for one run that is to be alone"
        elif (old := worker.slot.replaces) is not None:
            hours = (now - (old.ready_at or now)) / 3600
            purpose = f", to replace {workers[old]}, ready for {hours:.1f} h, {old.rss / MIB:.0f} MiB"
        logger.info("%s is starting%s", worker, purpose)

    def not_started(self, slot: Slot, error: Exception) -> None:
        """There is not even a process."""
        self._failed(slot, f"worker {slot.number} cannot be started: {error}")

    def ready(self, worker: Worker) -> None:
        self._causes.pop(worker.number, None)
        logger.info("%s is ready after %.1f s", worker, worker.child.seconds)

    def killing(self, worker: Worker, policy: PoolPolicy) -> None:
        """It is told to end, or killed. Nothing is said of what was planned."""
        slot = worker.slot
        if slot.overdue:
            logger.warning("%s is not ready after %g s: it is killed", worker, policy.start_timeout)
        elif slot.hung:
            logger.warning("%s is killed: %s", worker, slot.hung)
        elif not slot.planned:
            logger.warning("%s has lost its connection: it is ended", worker)

    def ended(self, worker: Worker) -> None:
        if worker.slot.planned and worker.slot.put_down:
            logger.info("%s %s", worker, worker.end)
            return
        seconds, requests = worker.child.seconds, len(worker.requests)
        what = f"{worker} {worker.end} after {seconds:.1f} s, with {requests} requests on it"
        self._failed(worker.slot, what, worker.child.tail())

    def goes_on(self, slot: Slot, now: float) -> None:
        """What becomes of a slot whose worker has ended."""
        if slot.state is State.BACKOFF:
            logger.info("worker %d is started again in %.1f s", slot.number, slot.due - now)
        elif slot.state is State.RETIRED:
            cause = self._causes.pop(slot.number, "unknown")
            logger.error("worker %d is given up, to be tried again later; it began with: %s", slot.number, cause)

    def _failed(self, slot: Slot, what: str, tail: str = "") -> None:
        """`tail`: the end of what its worker printed."""
        self.last = what
        in_full = f"{what}\n{tail}" if tail else what
        if slot.ready_at is not None:
            logger.warning("%s", in_full)
        elif slot.number in self._causes:
            logger.warning("%s", what)
        else:
            self._causes[slot.number] = in_full
            logger.warning("%s", in_full)
