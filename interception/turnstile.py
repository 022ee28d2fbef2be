"""A rush of new calls must not hold up the streams that are open."""

import asyncio
from collections import deque
from typing import Final

EACH_TURN: Final = 16
"""Calls that begin in one turn of the event loop, some 10 ms: to read a request, record it and send it on takes ten
times as long as to pass on an event of a stream, of which thousands may be due meanwhile."""


class Turnstile:
    """Lets a few pass in each turn of the event loop, in the order in which they came; most find nobody before them."""

    def __init__(self) -> None:
        self._left = EACH_TURN
        self._counting = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def passed(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._counting:
            self._counting = True
            loop.call_soon(self._turn, loop)
        if self._left and not self._waiting:
            self._left -= 1
            return
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Another turn of the loop has begun."""
        self._left = EACH_TURN
        while self._waiting and self._left:
            waiter = self._waiting.popleft()
            if not waiter.done():  # else it was cancelled
                waiter.set_result(None)
                self._left -= 1
        self._counting = bool(self._waiting)
        if self._counting:
            loop.call_soon(self._turn, loop)
