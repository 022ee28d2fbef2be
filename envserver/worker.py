"""The broker's end of one worker process: its connection, what is on it, and the process."""

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from envserver.child import Child
from envserver.fingerprint import fingerprint
from envserver.limits import PoolPolicy
from envserver.outbox import Outbox, Sender
from envserver.slot import Slot
from envserver.stacks import wanted as stacks_wanted
from envserver.wire import HEALTH, Part, encode
from envserver.zsocket import CONNECTED, DISCONNECTED, LARGE, ConnectionWatch, ZSocket

PROBE_ID = b"probe"
"""The id of the broker's own health requests; those of all others are hexadecimal numbers."""

LANE = b""
"""A worker's outbox has one client: the worker."""

KEPT = 16 << 10
"""Bytes of a run's payload that are kept until its end, for its task is asked for only when its worker dies."""

RECONNECT = 10, 250
"""Milliseconds between two tries to connect to a worker that has not bound its path yet: at first, at most."""


class Request:
    """A run, or the cancel of one, that has not been answered."""

    __slots__ = ("_payload", "_task", "cancelled", "client", "id", "target", "wire_id", "worker")

    def __init__(
        self, client: bytes | None, request_id: bytes, payload: Part = b"", target: "Request | None" = None
    ) -> None:
        self.client = client
        """Who asked. None: nobody waits for the answer any more."""
        self.id = request_id
        self.target = target
        """Of a cancel: the run."""
        self.worker: Worker | None = None
        """Who has it. None: it waits for its turn on a lone worker."""
        self.cancelled = False
        """Of a run: its client has cancelled it."""
        self.wire_id = b""
        """What the worker knows it by: the broker's own, for the ids of two clients may be equal."""
        self._payload: Part | None = payload
        self._task: bytes | None = None

    @property
    def payload(self) -> Part:
        """Until it is sent."""
        assert self._payload is not None
        return self._payload

    @property
    def task(self) -> bytes:
        """The fingerprint of what it is about."""
        if self._task is None:
            self._task = fingerprint(self.payload)
        return self._task

    def sent_to(self, worker: "Worker", wire_id: bytes) -> None:
        """The payload is kept for as long as that is cheaper than to look at what may never be asked for."""
        self.worker = worker
        self.wire_id = wire_id
        if self._task is not None or len(self.payload) > KEPT:
            self._task = self.task
            self._payload = None


class Worker:
    """One generation of a slot: a process on an ipc path of its own, which no other worker ever has.

    `on_message` gets what it sends, `on_lost` tells that the connection has ended, `on_exit` that the process has.
    What it had sent when it died is delivered, but for what came after a thousand messages (zmq's own limit) that had
    not been read by then.
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
        self.generation = slot.generation
        self.requests: dict[bytes, Request] = {}
        """By wire id: what has not been answered."""
        self.dispatchable = False
        """It may get runs: set when it is ready, taken away at the first sign that it is going."""
        self.connected = False
        self.closed = False
        self.stacks_path = f"{path}.stacks" if stacks_wanted() else None
        """Where it writes down its stacks, if it does."""
        self._path = path
        self._heard = False
        self._on_message = on_message
        self._budget = policy.worker_budget
        self._on_lost = on_lost
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT[0])
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT[1])
        with contextlib.ExitStack() as undo:
            undo.callback(socket.close, 0)
            self.zsocket = ZSocket(socket, self._received, self._flush)
            undo.callback(self.zsocket.close)
            self._watch = ConnectionWatch(socket, self._connection)
            undo.callback(self._watch.close)
            socket.connect(f"ipc://{path}")
            self._lane = Outbox(_Lane(self.zsocket), lambda _: None, budget=None)
            undo.callback(self._lane.close)
            self.probe()
            stacks = {"stacks_path": self.stacks_path, "stacks_after": policy.silent_after}
            self.child = Child.spawn(
                {**job, **stacks, "role": "worker", "address": f"ipc://{path}"},
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
        if not reason.startswith("killed"):
            return reason
        return f"was {reason} ({self.slot.hung})" if self.slot.hung else f"was {reason}"

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

    def take_heard(self) -> bool:
        """Whether anything has come from it since the last call."""
        heard, self._heard = self._heard, False
        return heard

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
        for path in (self._path, self.stacks_path):
            if path is not None:
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def _received(self, parts: list[Part]) -> None:
        self._heard = True
        self._on_message(self, parts)

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
