"""The client of the env server benchmark: a plain zmq DEALER, the same for all subjects, and what it measures.

A `run` request is `{"deltas": n, "text": str, "hold": bool, "task": n}`: answered by n deltas `{"pid": of the worker,
"text": …}` and then, unless it is held, by a reply with the worker's `pid`. Each is a task of its own: the death of so
many workers must not be laid at the door of one.
"""

import itertools
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import zmq

PATIENCE = 60.0
"""Seconds without any frame after which a subject is taken to be broken."""

TEXT = "x" * 64
"""What a delta carries."""

WINDOW = 32
"""Requests in flight while their rate is measured."""

STREAMS, DELTAS = 8, 256
"""Runs in flight while the rate of deltas is measured, and deltas in each."""


class Client:
    """One connection to a server."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        self._socket.connect(address)
        self._ids = itertools.count()
        self._tasks = itertools.count()

    def send(self, method: bytes, **fields: Any) -> bytes:
        """The id of the request."""
        request_id = b"%032x" % next(self._ids)
        self._socket.send_multipart([request_id, method, msgpack.packb(fields)])
        return request_id

    def run(self, *, deltas: int = 0, hold: bool = False) -> bytes:
        return self.send(b"run", deltas=deltas, text=TEXT, hold=hold, task=next(self._tasks))

    def receive(self, timeout: float = PATIENCE) -> tuple[bytes, bytes, bytes] | None:
        """The next `(request id, kind, data)`; None if there is none in `timeout` seconds."""
        if not self._socket.poll(max(0, math.ceil(timeout * 1000))):
            return None
        request_id, kind, data = self._socket.recv_multipart()
        return request_id, kind, data

    def next(self, timeout: float = PATIENCE) -> tuple[bytes, bytes, bytes]:
        """The next frame, which must come in `timeout` seconds."""
        frame = self.receive(timeout)
        if frame is None:
            raise TimeoutError(f"no answer in {timeout:g} s")
        return frame

    def ask(self, method: bytes, **fields: Any) -> dict[str, Any]:
        """The reply to a request; frames of others are dropped."""
        request_id = self.send(method, **fields)
        while True:
            answered, kind, data = self.next()
            if answered == request_id and kind == b"reply":
                reply: dict[str, Any] = msgpack.unpackb(data)
                return reply

    def close(self) -> None:
        self._socket.close()
        self._context.term()


@contextmanager
def connected(address: str) -> Iterator[Client]:
    client = Client(address)
    try:
        yield client
    finally:
        client.close()


def workers(client: Client, number: int, timeout: float = PATIENCE) -> set[int]:
    """The pids of the workers, once so many of them answer."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for _ in range(number):
            client.run()
        pids = {msgpack.unpackb(client.next(timeout)[2])["pid"] for _ in range(number)}
        if len(pids) == number:
            return pids
    raise TimeoutError(f"not all of {number} workers answer in {timeout:g} s")


def requests_per_s(client: Client, seconds: float) -> float:
    """Tiny requests answered a second."""
    for _ in range(WINDOW):
        client.run()
    answered = 0
    began = time.perf_counter()
    while (lasted := time.perf_counter() - began) < seconds:
        client.next()
        client.run()
        answered += 1
    for _ in range(WINDOW):
        client.next()
    return answered / lasted


def delta_frames_per_s(client: Client, seconds: float) -> float:
    """Deltas received a second."""
    for _ in range(STREAMS):
        client.run(deltas=DELTAS)
    deltas = 0
    began = time.perf_counter()
    while (lasted := time.perf_counter() - began) < seconds:
        _, kind, _ = client.next()
        if kind == b"delta":
            deltas += 1
        else:
            client.run(deltas=DELTAS)
    closed = 0
    while closed < STREAMS:
        closed += client.next()[1] == b"reply"
    return deltas / lasted


def latencies(client: Client, seconds: float) -> list[float]:
    """Seconds from request to reply, one request at a time."""
    times = []
    began = time.perf_counter()
    while (sent := time.perf_counter()) - began < seconds:
        client.run()
        client.next()
        times.append(time.perf_counter() - sent)
    return times
