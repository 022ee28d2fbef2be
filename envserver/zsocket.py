"""A plain zmq socket in the asyncio loop, on its file descriptor: several times as fast as `zmq.asyncio`.

The descriptor is edge-triggered: it tells that something happened inside zmq, once, and any call on the socket may
consume that. So whoever has called it looks again whether there is something to read: at the end of the turn of the
socket whose message led to the call, for a turn of the loop costs more than all that is done in it.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket as socketlib
import stat
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from envserver.errors import EnvServerError
from envserver.wire import Part

logger = logging.getLogger("envserver")

TURN = 64
"""Messages that one socket may handle before everything else in the loop has its turn."""

BURST = 3
"""Messages in one turn from which on there are probably more."""

LARGE = 65_536
"""Bytes from which on a frame is handed over as zmq's own; also pyzmq's limit for sending without a copy."""

# As plain integers: pyzmq's enums cost as much as the call itself.
NOBLOCK = int(zmq.NOBLOCK)
SNDMORE = int(zmq.SNDMORE)
MORE = NOBLOCK | SNDMORE
EVENTS = int(zmq.EVENTS)
POLLIN = int(zmq.POLLIN)

_send: Callable[..., object] = zmq.backend.Socket.send
_recv: Callable[..., zmq.Frame] = zmq.backend.Socket.recv
_get: Callable[..., Any] = zmq.backend.Socket.get


class ZSocket:
    """Reads `socket` for as long as it is open: `on_message` is called with the frames of each message.

    Frames under 64 KiB are bytes, larger ones `zmq.Frame`. `on_space` is called after each turn, when a message that
    `send` refused may have room. What `on_message` or `on_space` raises goes to `on_error`, or else is logged; the
    reading goes on. Needs a running loop; not to be used from other threads.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        on_message: Callable[[list[Part]], None],
        on_space: Callable[[], None] | None = None,
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        self.socket = socket
        self.closed = False
        self._on_message = on_message
        self._on_space = on_space
        self._on_error = on_error or _log_error
        self._loop = asyncio.get_running_loop()
        self._fd: int = _get(socket, int(zmq.FD))
        self._busy = False
        self._next: asyncio.Handle | None = None
        self._called = _called.setdefault(self._loop, _Called(self._loop))
        self._loop.add_reader(self._fd, self._turn)
        self._look_again()

    def send(self, parts: Sequence[Part]) -> bool:
        """Send one message without waiting. False if there is no room just now: then nothing of it was sent.

        Any other error is raised: on a mandatory ROUTER, EHOSTUNREACH where nobody has that routing id.
        """
        if self.closed:
            return False
        socket = self.socket
        try:
            for part in parts[:-1]:
                # The first frame decides: zmq takes the rest of a message that it has begun to take.
                _send(socket, part, MORE, isinstance(part, bytes) and len(part) < LARGE)
            part = parts[-1]
            _send(socket, part, NOBLOCK, isinstance(part, bytes) and len(part) < LARGE)
        except zmq.Again:
            return False
        finally:
            if not self._busy and self._next is None:
                self._called.add(self)
        return True

    def receive_now(self) -> int:
        """Read what has arrived, at most `TURN` messages, and return how many there were."""
        socket = self.socket
        on_message = self._on_message
        count = 0
        self._busy = True
        try:
            while count < TURN and not self.closed:
                # To ask costs 3.5 us, to be refused 9: so ask, until it looks like a burst.
                if count < BURST and not _get(socket, EVENTS) & POLLIN:
                    break
                frame = _recv(socket, NOBLOCK, False)
                parts: list[Part] = []
                while True:
                    parts.append(frame if len(frame) >= LARGE else frame.bytes)
                    if not frame.more:
                        break
                    frame = _recv(socket, NOBLOCK, False)
                count += 1
                try:
                    on_message(parts)
                except Exception as error:  # noqa: BLE001 - one message must not end the reading for all others
                    self._on_error(error)
        except zmq.Again:
            pass
        finally:
            self._busy = False
        return count

    def close(self, linger: int = 0) -> None:
        """Stop reading and close the socket; what was sent still goes out for `linger` milliseconds."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._fd)
        if self._next is not None:
            self._next.cancel()
        self.socket.close(linger)

    def _turn(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        with self._called:
            more = self.receive_now() == TURN
            if self._on_space is not None and not self.closed:
                try:
                    self._on_space()
                except Exception as error:  # noqa: BLE001
                    self._on_error(error)
            if more and not self.closed:
                self._look_again()

    def look_if_called(self) -> None:
        """If there is something to read, see to it that it is read."""
        try:
            if not self.closed and self._next is None and _get(self.socket, EVENTS) & POLLIN:
                self._look_again()
        except zmq.ZMQError as error:
            self._on_error(error)

    def _look_again(self) -> None:
        self._next = self._loop.call_soon(self._turn)


class _Called:
    """Those sockets of a loop that have been called since they were last looked at. A context: at its end they are
    looked at; where there is none, once the loop is at it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.proxy(loop)
        self._sockets: dict[ZSocket, None] = {}
        self._awaited = False
        """Somebody will look at them."""

    def add(self, socket: ZSocket) -> None:
        self._sockets[socket] = None
        if not self._awaited:
            self._awaited = True
            self._loop.call_soon(self._look)

    def __enter__(self) -> None:
        self._awaited = True

    def __exit__(self, *_: object) -> None:
        self._look()

    def _look(self) -> None:
        self._awaited = False
        if self._sockets:
            sockets, self._sockets = self._sockets, {}
            for socket in sockets:
                socket.look_if_called()


_called: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Called]" = weakref.WeakKeyDictionary()


def _log_error(error: Exception) -> None:
    logger.error("a message could not be handled: %s", error, exc_info=error)


def check_address(address: str, cannot: str) -> None:
    """Raises `EnvServerError`, whose text begins with `cannot`, for what zmq would not refuse by itself: to it a port
    beyond 65535 is another port, and an `inproc` address is one that nobody outside can reach."""
    usual = "an address is like tcp://127.0.0.1:5000 or ipc:///run/env.sock"
    if not isinstance(address, str) or not address.isprintable():
        raise EnvServerError(f"{cannot} {address!a}: {usual}")
    protocol, _, rest = address.partition("://")
    if protocol not in ("tcp", "ipc") or not rest:
        raise EnvServerError(f"{cannot} {address}: {usual}")
    if protocol == "ipc" and (size := len(os.fsencode(rest))) > MAX_PATH:
        raise EnvServerError(f"{cannot} {address}: a socket's path has at most {MAX_PATH} bytes, and this has {size}")
    port = rest.rpartition(":")[2]
    if protocol == "tcp" and port.isdecimal() and int(port) > MAX_PORT:
        raise EnvServerError(f"{cannot} {address}: ports end at {MAX_PORT}")


MAX_PORT = 65_535

MAX_PATH = 107
"""Bytes of a unix socket's path."""

MAX_MESSAGE = 1 << 30
"""Bytes of one frame. Who sends more is disconnected by zmq."""


def listen(context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> "tuple[zmq.Socket[bytes], str]":
    """A mandatory ROUTER bound to `address`, and the address with its port. Raises `EnvServerError`."""
    socket = context.socket(zmq.ROUTER)
    try:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        _refuse_taken(address)
        socket.bind(address)
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)
    except (zmq.ZMQError, OSError) as error:
        socket.close(0)
        raise EnvServerError(f"cannot listen on {address}: {_plain(error)}") from None
    except BaseException:
        socket.close(0)  # the context would wait for it, for ever
        raise


def _plain(error: OSError | zmq.ZMQError) -> str:
    """What is wrong, without what pyzmq adds to it."""
    if isinstance(error, zmq.ZMQError) and error.errno is not None and error.errno in errno.errorcode:
        return os.strerror(error.errno)
    return error.strerror or str(error)


def unlink_address(address: str) -> None:
    """Remove the path of an ipc address, which zmq leaves behind. Before its socket is closed: while that listens
    nobody else takes the path."""
    if (path := _path_of(address)) is not None:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _path_of(address: str) -> str | None:
    path = address.removeprefix("ipc://")
    return None if path == address or path.startswith("@") else path


def _refuse_taken(address: str) -> None:
    """zmq removes whatever is at the path of an ipc address, also a server that still listens there, or a file."""
    if (path := _path_of(address)) is None:
        return
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "there is a file, which is no socket")
        with socketlib.socket(socketlib.AF_UNIX) as probe:
            probe.setblocking(False)  # a full backlog is somebody, too
            probe.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        return  # nobody, or what a server that was killed has left
    except BlockingIOError:
        pass
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


CONNECTED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
DISCONNECTED = int(zmq.EVENT_DISCONNECTED)


class ConnectionWatch(ZSocket):
    """Calls `on_event` with CONNECTED and DISCONNECTED as the connection of `socket` comes and goes.

    Messages that arrived before a DISCONNECTED can still be read after it: `receive_now` until it returns 0. Make it
    before `socket` connects, close it before `socket` is closed.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", on_event: Callable[[int], None]) -> None:
        def parsed(parts: list[Part]) -> None:
            if isinstance(parts[0], bytes):
                on_event(struct.unpack_from("=H", parts[0])[0])

        self._watched = socket
        super().__init__(socket.get_monitor_socket(CONNECTED | DISCONNECTED), parsed)

    def close(self, linger: int = 0) -> None:
        if not self.closed:
            self._watched.disable_monitor()  # first: zmq's own thread would wait for ever to tell a reader that left
        super().close(linger)
