"""Answers to many clients over one ROUTER, of whom some do not read."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import zmq

from envserver.wire import REPLY, Part, failure
from envserver.zsocket import LARGE

logger = logging.getLogger("envserver")

BUDGET = 128 << 20
"""Bytes that wait here for one client. With what zmq holds for it (1,000 messages under 64 KiB, and `IN_ZMQ`) a client
that never reads costs less than 256 MiB."""

IN_ZMQ = 32 << 20
"""Bytes of large frames that zmq may hold for one client. Its own limit counts messages, whatever their size."""

OVERHEAD = 256
"""Bytes that a message costs beside what is in it."""

RETRY = 0.02
"""Seconds between two tries. zmq does not always tell that there is room again."""


class Sender(Protocol):
    """What a message is sent with: a `ZSocket`, or something like it."""

    @property
    def closed(self) -> bool: ...

    def send(self, parts: Sequence[Part]) -> bool: ...


class Outbox:
    """Sends `[client, request_id, kind, data]` over `zsocket`, a mandatory ROUTER; never waits and never raises.

    What has no room waits here, in order, at most `budget` bytes a client. A client that leaves more unread is cut
    off: the deltas that wait for it are dropped, each reply that waits becomes a failure that says so, and `on_cut_off`
    is called, to end what it still has running. After that it is a client like any. Without a budget nobody is.
    """

    def __init__(self, zsocket: Sender, on_cut_off: Callable[[bytes], None], budget: int | None = BUDGET) -> None:
        self._zsocket = zsocket
        self._on_cut_off = on_cut_off
        self.budget = budget
        self._waiting: dict[bytes, _Backlog] = {}
        self._large: dict[bytes, deque[tuple[zmq.MessageTracker, int]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def send(self, parts: Sequence[Part]) -> bool:
        """Send a message, or keep it until there is room. False: its client has left."""
        client = parts[0]
        assert isinstance(client, bytes)
        backlog = self._waiting.get(client)
        if backlog is None:
            sent = self._try(client, parts)
            if sent is not None:
                return sent
            backlog = self._waiting[client] = _Backlog()
            self._retry_later()
        backlog.append(parts)
        if self.budget is not None and backlog.size > self.budget:
            self._cut_off(client, backlog, self.budget)
        return True

    def waits(self, client: bytes) -> bool:
        """Whether something is waiting for `client` to read."""
        return client in self._waiting

    def waiting(self, client: bytes) -> int:
        """Bytes that wait for `client` to read."""
        backlog = self._waiting.get(client)
        return 0 if backlog is None else backlog.size

    def forget(self, client: bytes) -> None:
        """Drop what waits for `client`."""
        self._waiting.pop(client, None)
        self._large.pop(client, None)

    @property
    def empty(self) -> bool:
        return not self._waiting

    def flush(self) -> None:
        """Send what there is room for now."""
        for client in [*self._waiting]:
            backlog = self._waiting.get(client, _Backlog())
            while backlog.messages:
                sent = self._try(client, backlog.messages[0])
                if sent is None:
                    break
                if not sent:
                    backlog.messages.clear()
                    break
                backlog.popleft()
            if not backlog.messages:
                self._waiting.pop(client, None)

    def close(self) -> None:
        """Forget what waits."""
        if self._timer is not None:
            self._timer.cancel()
        self._waiting.clear()
        self._large.clear()

    def _try(self, client: bytes, parts: Sequence[Part]) -> bool | None:
        """True: sent. False: the client has left. None: no room."""
        data = parts[-1]
        large = len(data) >= LARGE
        if large:
            if not self._has_room(client):
                return None
            data = zmq.Frame(data if isinstance(data, bytes) else data.buffer, track=True, copy=False)
            parts = [*parts[:-1], data]
        try:
            if not self._zsocket.send(parts):
                return None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                logger.warning("an answer could not be sent: %s", error)
            self._large.pop(client, None)
            return False
        if large and isinstance(data, zmq.Frame) and isinstance(data.tracker, zmq.MessageTracker):
            if client not in self._large:
                self._forget_done()
            self._large.setdefault(client, deque()).append((data.tracker, len(data)))
        return True

    def _has_room(self, client: bytes) -> bool:
        sent = self._large.get(client)
        if sent is None:
            return True
        while sent and sent[0][0].done:
            sent.popleft()
        if not sent:
            del self._large[client]
        return sum(size for _, size in sent) < IN_ZMQ

    def _forget_done(self) -> None:
        """Of clients that may have left meanwhile."""
        self._large = {client: sent for client, sent in self._large.items() if not sent[-1][0].done}

    def _retry_later(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(RETRY, self._retry)

    def _retry(self) -> None:
        self._timer = None
        if not self._zsocket.closed:
            self.flush()
            if self._waiting:
                self._retry_later()

    def _cut_off(self, client: bytes, backlog: "_Backlog", budget: int) -> None:
        size = backlog.size
        unread = [message for message in backlog.messages if message[2] == REPLY]
        backlog.clear()
        text = failure(f"cut off: this client left {size >> 20} MiB of answers unread")
        for message in unread[: budget // (len(text) + 2 * OVERHEAD) // 2]:
            backlog.append([*message[:3], text])
        logger.warning("a client does not read: %d MiB of answers to it are dropped", size >> 20)
        self._on_cut_off(client)


class _Backlog:
    """Messages that wait for one client, and how many bytes they are."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.messages: deque[Sequence[Part]] = deque()
        self.size = 0

    def append(self, parts: Sequence[Part]) -> None:
        self.messages.append(parts)
        self.size += _size(parts)

    def popleft(self) -> None:
        self.size -= _size(self.messages.popleft())


def _size(parts: Sequence[Part]) -> int:
    return sum(map(len, parts)) + OVERHEAD
