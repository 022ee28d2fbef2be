"""The side of a pool that its clients see: the address, and what waits to be sent."""

import asyncio
from collections.abc import Callable

import zmq

from envserver.outbox import Outbox
from envserver.wire import Part
from envserver.zsocket import ZSocket, listen, unlink_address

MAX_SOCKETS = 65_536
"""zmq's own limit is for 340 workers."""


class Frontend:
    """Listens from `open` on, and hears from `serve` on: who connects before waits for the first answer."""

    def __init__(self) -> None:
        self.outbox: Outbox | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._listener: zmq.Socket[bytes] | None = None
        self._zsocket: ZSocket | None = None
        self._address = ""

    @property
    def context(self) -> "zmq.Context[zmq.Socket[bytes]]":
        """For the workers' sockets, which must be closed before it is."""
        assert self._context is not None
        return self._context

    def open(self, address: str) -> str:
        """The address it listens on. Raises `EnvServerError` if it cannot."""
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._listener, self._address = listen(self._context, address)
        return self._address

    def serve(
        self, on_request: Callable[[list[Part]], None], cut_off: Callable[[bytes], None], budget: int | None
    ) -> Outbox:
        assert self._listener is not None
        self._zsocket = ZSocket(self._listener, on_request, self._flush)
        self.outbox = Outbox(self._zsocket, cut_off, budget)
        return self.outbox

    async def close(self, flush_timeout: float) -> None:
        """Send what is left for so many seconds, and give all back. Two may be closing it."""
        listener, self._listener = self._listener, None
        if listener is not None:
            unlink_address(self._address)
        if self._zsocket is not None and self.outbox is not None:
            loop = asyncio.get_running_loop()
            deadline = loop.time() + flush_timeout
            while not self.outbox.empty and loop.time() < deadline:  # noqa: ASYNC110 - it sends by itself
                await asyncio.sleep(0.01)
            self.outbox.close()
            self._zsocket.close(linger=int(flush_timeout * 1000))
        elif listener is not None:
            listener.close(0)
        context, self._context = self._context, None
        if context is not None:
            await asyncio.to_thread(context.term)

    def _flush(self) -> None:
        if self.outbox is not None and not self.outbox.empty:
            self.outbox.flush()
