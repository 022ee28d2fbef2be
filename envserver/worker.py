"""The broker's end of one worker process: its connection, what is on it, and the process."""

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from envserver.child import Child
from envserver.limits import PoolPolicy
from envserver.outbox import Outbox, Sender
from envserver.slots import Slot
from envserver.wire import HEALTH, Part, encode
from envserver.zsocket import CONNECTED, DISCONNECTED, LARGE, ConnectionWatch, ZSocket

PROBE_ID = b"probe"
"""The id of the broker's own health requests; those of all others are hexadecimal numbers."""

LANE = b""
"""A worker's outbox has one client: the worker."""

RECONNECT = 10, 250
"""Milliseconds between two tries to connect to a worker that has not bound its path yet: at first, at most."""


class Request:
    """A run, or the cancel of one, that a worker has and has not answered."""

    __slots__ = ("cancelled", "client", "id", "target", "wire_id", "worker")

    def __init__(
        self, client: bytes | None, request_id: bytes, worker: "Worker", wire_id: bytes, target: "Request | None" = None
    ) -> None:
        self.client = client
        """Who asked. None: nobody waits for the answer any more."""
        self.id = request_id
        self.worker = worker
        self.wire_id = wire_id
        """What the worker knows it by: the broker's own, for the ids of two clients may be equal."""
        self.target = target
        """Of a cancel: the run."""
        self.cancelled = False
        """Of a run: its client has cancelled it."""


class Worker:
    """One generation of a slot: a process on an ipc path of its own, which no other worker ever has.

    `on_message` gets what it sends, `on_lost` tells that the connection has ended, `on_exit` that the process has.
    Raises `EnvServerError`, leaving nothing behind, if the process cannot be started. A health request is on its way
    before the worker listens: its answer is the first thing it does.
    """

    def __init__(
        self,
        slot: Slot,
        context: "zmq.Context[zmq.Socket[bytes]]",
        *,
        job: dict[str, Any],
        path: str,
        log_path: Path,
        policy: PoolPolicy,
        on_message: Callable[["Worker", list[Part]], None],
        on_lost: Callable[["Worker"], None],
        on_exit: Callable[["Worker"], None],
    ) -> None:
        self.slot = slot
        self.number = slot.number
        self.requests: dict[bytes, Request] = {}
        """By wire id: what has not been answered."""
        self.dispatchable = False
        """It may get runs: set when it is ready, taken away at the first sign that it is going."""
        self.connected = False
        self.closed = False
        self._path = path
        self._budget = policy.worker_budget
        self._on_lost = on_lost
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT[0])
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT[1])
        with contextlib.ExitStack() as undo:
            undo.callback(socket.close, 0)
            self.zsocket = ZSocket(socket, lambda parts: on_message(self, parts), self._flush)
            undo.callback(self.zsocket.close)
            self._watch = ConnectionWatch(socket, self._connection)
            undo.callback(self._watch.close)
            socket.connect(f"ipc://{path}")
            self._lane = Outbox(_Lane(self.zsocket), lambda _: None, budget=None)
            undo.callback(self._lane.close)
            self.probe()
            self.child = Child.spawn(
                {**job, "role": "worker", "address": f"ipc://{path}"},
                log_path=log_path,
                on_exit=lambda _: on_exit(self),
            )
            undo.pop_all()
        self.pid = self.child.pid

    def __str__(self) -> str:
        return f"worker {self.number} (pid {self.pid})"

    @property
    def end(self) -> str:
        """How the process ended, as it follows its name."""
        reason = self.child.exit_reason
        return f"was {reason}" if reason.startswith("killed") else reason

    @property
    def in_arrears(self) -> bool:
        """It has left so much unread that it is offered no more."""
        return not self._lane.empty and self._lane.waiting(LANE) > self._budget

    @property
    def reachable(self) -> bool:
        """What is sent to it may still be answered."""
        return self.connected and self.child.returncode is None

    def send(self, parts: list[Part]) -> None:
        """In the order of the calls; never waits."""
        # The lane is for what cannot go now, and for what zmq must not hold without limit.
        if not self._lane.empty or len(parts[-1]) >= LARGE or not self.zsocket.send(parts):
            self._lane.send([LANE, *parts])

    def probe(self) -> None:
        self.send([PROBE_ID, HEALTH, encode({})])

    def read_rest(self) -> None:
        """Handle all that has arrived from a worker that has ended."""
        while self.zsocket.receive_now():
            pass

    def look_at_connection(self) -> None:
        """Learn what the loop has not told yet."""
        while self._watch.receive_now():
            pass

    def close(self) -> None:
        """Give back all that was held for it. Idempotent; kills the process if it still runs."""
        if self.closed:
            return
        self.closed = True
        self._lane.close()
        self._watch.close()
        self.zsocket.close()
        self.child.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _flush(self) -> None:
        if not self._lane.empty:
            self._lane.flush()

    def _connection(self, event: int) -> None:
        if event == CONNECTED:
            self.connected = True
        elif event == DISCONNECTED:
            self.connected = self.dispatchable = False
            self._on_lost(self)


class _Lane(Sender):
    """For an outbox, whose messages have a client in front: a DEALER's have none."""

    def __init__(self, zsocket: ZSocket) -> None:
        self._zsocket = zsocket

    @property
    def closed(self) -> bool:
        return self._zsocket.closed

    def send(self, parts: Sequence[Part]) -> bool:
        return self._zsocket.send(parts[1:])
