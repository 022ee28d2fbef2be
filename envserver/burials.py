"""When a worker that has ended may be buried: once all that it had sent before has been delivered."""

import asyncio
from collections.abc import Callable

from envserver.worker import Worker


class Burials:
    """Between the end of a worker's process and the end of its connection, of which either may come first.

    All that reached the kernel before the process ended is read until the connection ends, too. What the worker has
    forked may hold its end of that open, so not for longer than `timeout` (seconds): then `on_due` is called with it,
    once. `on_lost` is called with a worker whose connection ended so long ago and that lives still.
    """

    def __init__(self, timeout: float, *, on_due: Callable[[Worker], None], on_lost: Callable[[Worker], None]) -> None:
        self._timeout = timeout
        self._on_due = on_due
        self._on_lost = on_lost
        self._timers: dict[Worker, asyncio.TimerHandle] = {}

    def exited(self, worker: Worker) -> None:
        """Its process has ended."""
        worker.look_at_connection()
        loop = asyncio.get_running_loop()
        if worker.requests and worker.connected:
            self._timers[worker] = loop.call_later(self._timeout, self._due, worker)
        else:
            loop.call_soon(self._due, worker)

    def disconnected(self, worker: Worker) -> None:
        """Its connection has ended."""
        if worker in self._timers:
            self._due(worker)
        elif not worker.closed:
            # As a rule the process has ended as well, and the loop is about to hear of it.
            asyncio.get_running_loop().call_later(self._timeout, self._still_lives, worker)

    def close(self) -> None:
        """Bury nobody any more of those that are waited for."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _due(self, worker: Worker) -> None:
        if (timer := self._timers.pop(worker, None)) is not None:
            timer.cancel()
        if not worker.closed:
            self._on_due(worker)

    def _still_lives(self, worker: Worker) -> None:
        if not worker.closed and worker.child.returncode is None:
            self._on_lost(worker)
