"""One log line, again and again, with the numbers of a server."""

import asyncio
import logging
from collections.abc import Callable

from envserver.checks import check_number
from envserver.errors import EnvServerError
from envserver.metrics import Sample, in_a_line

logger = logging.getLogger("envserver")

PERIOD = 30.0
"""Seconds between two lines."""


class NumbersLine:
    """Of what `samples` tells, every `period` seconds (None: never) from `start` until `stop`."""

    def __init__(self, samples: Callable[[], list[Sample]], period: float | None) -> None:
        check_number("numbers_period", period, none="None: never")
        if period is not None and period <= 0:
            raise EnvServerError(f"numbers_period is more than 0, or None: never; not {period}")
        self._samples = samples
        self._period = period
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._period is not None:
            self._timer = asyncio.get_running_loop().call_later(self._period, self._tell)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tell(self) -> None:
        logger.info("numbers: %s", in_a_line(self._samples()))
        self.start()
