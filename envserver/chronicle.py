"""What the log is told of workers that fail: each thing once, and what all of it began with."""

import logging

from envserver.slot import Slot, State

logger = logging.getLogger("envserver")


class Chronicle:
    """Of one pool."""

    def __init__(self) -> None:
        self.last = ""
        """The last failure, in a line."""
        self._causes: dict[int, str] = {}
        """Of each slot, its first failed start since a worker was ready there: what follows is often only its echo."""

    def failed(self, slot: Slot, what: str, tail: str = "") -> None:
        """A worker has ended, or could not be started; `tail`: the end of what it printed."""
        self.last = what
        in_full = f"{what}\n{tail}" if tail else what
        if slot.ready_at is not None:
            logger.warning("%s", in_full)
        elif slot.number in self._causes:
            logger.warning("%s", what)
        else:
            self._causes[slot.number] = in_full
            logger.warning("%s", in_full)

    def ready(self, slot: Slot) -> None:
        self._causes.pop(slot.number, None)

    def goes_on(self, slot: Slot, now: float) -> None:
        """What becomes of a slot whose worker has ended."""
        if slot.state is State.BACKOFF:
            logger.info("worker %d is started again in %.1f s", slot.number, slot.due - now)
        elif slot.state is State.RETIRED:
            cause = self._causes.pop(slot.number, "unknown")
            logger.error("worker %d is given up, to be tried again later; it began with: %s", slot.number, cause)
