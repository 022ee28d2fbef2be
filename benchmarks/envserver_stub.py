"""The least a worker can do: answers run requests over zmq, in one loop, with no framework around it.

It is the whole server of the subject `direct`, and the worker under verifiers' broker, which is so measured at its
best. What a request asks for is the same for all subjects, see `benchmarks.envserver_client`.
"""

import os
from collections.abc import Callable
from typing import Any

import msgpack
import zmq


def serve(address: str, told: Callable[[str], Any] | None = None) -> None:
    """Serves at `address` for ever, and says where that is."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(address)
    if told is not None:
        told(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    done = msgpack.packb({"success": True, "error": None, "pid": os.getpid()})
    while True:
        client, request_id, method, payload = socket.recv_multipart()
        request = msgpack.unpackb(payload)
        if method == b"run":
            for _ in range(request.get("deltas", 0)):
                delta = msgpack.packb({"pid": os.getpid(), "text": request["text"]})
                socket.send_multipart([client, request_id, b"delta", delta])
            if request.get("hold"):
                continue
        socket.send_multipart([client, request_id, b"reply", done])


def main() -> None:
    serve("tcp://127.0.0.1:0", lambda address: print(address, flush=True))


if __name__ == "__main__":
    main()
