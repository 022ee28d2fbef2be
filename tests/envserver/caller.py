"""A client that does nothing but the protocol: what is sent and what comes back can be anything."""

import itertools
from types import TracebackType
from typing import Any, Self

import msgpack
import zmq
import zmq.asyncio


class Caller:
    """A DEALER on `address`. Ids are numbers unless given."""

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.connect(address)
        self._ids = itertools.count()
        self._got: dict[bytes, list[tuple[bytes, dict[str, Any]]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()

    async def send(self, method: str, payload: dict[str, Any] | None = None, request_id: bytes | None = None) -> bytes:
        """Send a request and return its id."""
        request_id = b"%d" % next(self._ids) if request_id is None else request_id
        await self.socket.send_multipart([request_id, method.encode(), msgpack.packb(payload or {})])
        return request_id

    async def receive(self) -> tuple[bytes, bytes, dict[str, Any]]:
        request_id, kind, data = await self.socket.recv_multipart()
        return request_id, kind, msgpack.unpackb(data)

    async def answers(self, request_id: bytes) -> list[tuple[bytes, dict[str, Any]]]:
        """All that is sent for this request up to its reply, as kind and data."""
        while not (got := self._got.get(request_id, [])) or got[-1][0] != b"reply":
            one, kind, data = await self.receive()
            self._got.setdefault(one, []).append((kind, data))
        return self._got.pop(request_id)

    async def reply(self, request_id: bytes) -> dict[str, Any]:
        return (await self.answers(request_id))[-1][1]

    async def ask(self, method: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
        return await self.reply(await self.send(method, payload))

    async def run(self, **request: Any) -> dict[str, Any]:
        return await self.ask("run", request)
