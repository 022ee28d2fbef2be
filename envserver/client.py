"""The client of an env server, or of a pool of them: many requests in flight on one connection."""

import asyncio
import inspect
import itertools
import logging
import os
from collections.abc import Callable
from typing import Any, Self

import zmq

from envserver.errors import EnvRequestError, EnvServerError
from envserver.teardown import run_to_end
from envserver.wire import (
    CANCEL,
    DELTA,
    HEALTH,
    RUN,
    Part,
    cancel_payload,
    decode,
    encode,
    parse_answer,
)
from envserver.zsocket import CONNECTED, DISCONNECTED, ConnectionWatch, ZSocket, check_address

logger = logging.getLogger("envserver")

CONNECT_TIMEOUT = 30.0
"""Seconds that requests wait for a connection, the first one or one after a loss."""

HEALTH_TIMEOUT = 2.0
"""Seconds; the peers' clients wait as long."""

CLOSE_LINGER = 1000
"""Milliseconds that what was sent last gets to leave: the cancellations of runs given up just before `close`."""

OnDelta = Callable[[dict[str, Any]], None]


class EnvClient:
    """Talks to the server at `address`; use it in one event loop, as `async with EnvClient(address) as client`.

    When the connection is lost every request in flight fails at once with `EnvServerError`; the next one is sent over
    a new connection. Nothing is ever sent twice. Requests that find nobody at the address within `connect_timeout`
    seconds fail too. Without a connection timeout of their own, runs wait for as long as they take.
    """

    def __init__(self, address: str, *, connect_timeout: float = CONNECT_TIMEOUT) -> None:
        check_address(address, "cannot connect to")
        self.address = address
        self._connect_timeout = connect_timeout
        self._pending: dict[bytes, _Pending] = {}
        self._ids = itertools.count()
        self._prefix = os.urandom(8).hex()
        self._connection: _Connection | None = None
        self._closed = False
        self.dropped = 0
        """Messages that were no answers."""

    @property
    def in_flight(self) -> int:
        """Requests that have not been answered yet."""
        return len(self._pending)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def health(self, *, timeout: float = HEALTH_TIMEOUT) -> dict[str, Any]:
        """What the server says of itself: `ready`, `starting` and `capacity`, which count workers and the runs that
        fit them. Raises `EnvServerError` if there is no answer within `timeout` seconds."""
        pending = self._send(HEALTH, {})
        try:
            async with asyncio.timeout(timeout):
                return await pending.future
        except TimeoutError:
            raise EnvServerError(f"no answer from {self.address} within {timeout:g} s") from None
        finally:
            self._pending.pop(pending.id, None)

    async def run(self, request: dict[str, Any], on_delta: OnDelta | None = None) -> dict[str, Any]:
        """Have the env run `request`; what it returned. `on_delta` is called with each delta on the way, in order.

        Raises `EnvRequestError` if the server says that it failed, `EnvServerError` if there is no server, or no
        longer. What `on_delta` raises ends the run and is raised here. A run that is cancelled here, for whatever
        reason, is cancelled there.
        """
        if on_delta is not None and (not callable(on_delta) or inspect.iscoroutinefunction(on_delta)):
            raise TypeError("on_delta is a plain function of one delta: nobody would await it")
        pending = self._send(RUN, request, on_delta)
        try:
            return await pending.future
        except BaseException:
            if self._pending.pop(pending.id, None) is not None and self._connection is not None:
                self._connection.send([self._new_id(), CANCEL, cancel_payload(pending.id)])
            raise
        finally:
            self._pending.pop(pending.id, None)

    async def close(self) -> None:
        """Fail what is in flight and disconnect. May be called again."""
        self._closed = True
        connection, self._connection = self._connection, None
        for pending in [*self._pending.values()]:
            if connection is not None and pending.method == RUN:
                connection.send([self._new_id(), CANCEL, cancel_payload(pending.id)])
        self._fail_all("the client was closed")
        if connection is not None:
            await run_to_end(connection.close())

    def _new_id(self) -> bytes:
        return f"{self._prefix}{next(self._ids):x}".encode()

    def _send(self, method: bytes, payload: dict[str, Any], on_delta: OnDelta | None = None) -> "_Pending":
        if self._closed:
            raise EnvServerError("this client is closed")
        try:
            data = encode(payload)
        except ValueError as error:
            raise EnvServerError(f"the request is {error}") from None
        if self._connection is not None and not self._connection.here:
            raise EnvServerError("this client is used in another event loop: make one in each")
        if self._connection is None:
            self._connection = _Connection(self.address, self._answered, self._lost, self._connect_timeout)
        pending = _Pending(self._new_id(), method, asyncio.get_running_loop().create_future(), on_delta)
        self._pending[pending.id] = pending
        self._connection.send([pending.id, method, data])
        return pending

    def _answered(self, parts: list[Part]) -> None:
        answer = parse_answer(parts)
        if answer is None:
            self.dropped += 1
            logger.warning("a message from %s was dropped: it is no answer", self.address)
            return
        pending = self._pending.get(answer.id)
        if pending is None or pending.future.done():
            return  # given up meanwhile
        if answer.kind != DELTA:
            del self._pending[answer.id]
        try:
            content = decode(answer.data)
        except ValueError as error:
            pending.future.set_exception(EnvServerError(f"{self.address} answered what is {error}"))
            return
        if answer.kind == DELTA:
            if pending.on_delta is not None:
                try:
                    pending.on_delta(content)
                except Exception as error:  # noqa: BLE001 - the caller's own, and told to the caller
                    pending.future.set_exception(error)
            return
        succeeded, failure = content.pop("success", None), content.pop("error", None)
        if succeeded is True:
            pending.future.set_result(content)
        else:
            pending.future.set_exception(EnvRequestError(str(failure or "the request failed, without a reason")))

    def _lost(self, connection: "_Connection", reason: str) -> None:
        if connection is self._connection:
            self._connection = None  # the next request must not be sent to whoever comes back there by a stale one
            self._fail_all(reason)

    def _fail_all(self, reason: str) -> None:
        for pending in self._pending.values():
            if not pending.future.done():
                pending.future.set_exception(EnvServerError(reason))
        self._pending.clear()


class _Pending:
    """A request without a reply."""

    __slots__ = ("future", "id", "method", "on_delta")

    def __init__(
        self, request_id: bytes, method: bytes, future: "asyncio.Future[dict[str, Any]]", on_delta: OnDelta | None
    ) -> None:
        self.id = request_id
        self.method = method
        self.future = future
        self.on_delta = on_delta


class _Connection:
    """One DEALER, until its first loss: zmq would connect it again and send what the lost server had not got."""

    def __init__(
        self,
        address: str,
        on_message: Callable[[list[Part]], None],
        on_lost: Callable[["_Connection", str], None],
        connect_timeout: float,
    ) -> None:
        self._address = address
        self._on_lost = on_lost
        self._unsent: list[list[bytes]] = []
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        try:
            for option, value in (
                (zmq.LINGER, 0),
                (zmq.RCVHWM, 0),  # a caller that is busy for a while is no client that does not read
                (zmq.TCP_KEEPALIVE, 1),  # a host that has vanished is told in about a minute
                (zmq.TCP_KEEPALIVE_IDLE, 30),
                (zmq.TCP_KEEPALIVE_INTVL, 10),
                (zmq.TCP_KEEPALIVE_CNT, 3),
            ):
                socket.setsockopt(option, value)
            self._watch = ConnectionWatch(socket, self._event)
            self._zsocket = ZSocket(socket, on_message, self._flush)
            socket.connect(address)
        except zmq.ZMQError as error:
            if hasattr(self, "_zsocket"):
                self._watch.close()
                self._zsocket.close()
            socket.close(0)
            self._context.term()
            raise EnvServerError(f"cannot connect to {address}: {error.strerror}") from None
        self._deadline: asyncio.TimerHandle | None = self._loop.call_later(
            connect_timeout, self._end, f"nobody answers at {address}: no connection within {connect_timeout:g} s"
        )

    @property
    def here(self) -> bool:
        """It belongs to the loop that runs; no other would ever hear of an answer."""
        return self._loop is asyncio.get_running_loop()

    def send(self, parts: list[bytes]) -> None:
        if self._unsent or not self._zsocket.send(parts):
            self._unsent.append(parts)

    async def close(self) -> None:
        self._close(CLOSE_LINGER)
        await asyncio.to_thread(self._context.term)

    def _flush(self) -> None:
        sent = 0
        while sent < len(self._unsent) and self._zsocket.send(self._unsent[sent]):
            sent += 1
        del self._unsent[:sent]

    def _event(self, event: int) -> None:
        if event == CONNECTED and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        elif event == DISCONNECTED:
            while self._zsocket.receive_now():
                pass  # what it had answered before counts
            self._end(f"the connection to {self._address} was lost")

    def _end(self, reason: str) -> None:
        if not self._zsocket.closed:
            self._close(0)
            self._loop.run_in_executor(None, self._context.term)
            self._on_lost(self, reason)

    def _close(self, linger: int) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._watch.close()
        self._zsocket.close(linger)
