"""Which task a run is about, told from the bytes of its payload.

Rollouts of one task, and a client that tries it again, differ in request id, client and model, and not in their task:

- of a map with the key `task_data` (verifiers' `RunRequest`: `task_data`, `client`, `model`, `sampling`) that value;
- of any other map, all but `request_id`, `client` and `model` at its top, whatever the order of its keys (of more than
  256 keys, of the first 256);
- of what is no msgpack map, all of it, and so from where a map breaks off or is nested too deep.

Two tasks are equal if they are encoded equally: a client that sends the same value as other bytes (another order of
keys inside the task, other widths of numbers) has another task. So has an env whose payload carries a number of the
try or a time. Of a payload beyond 8 MiB only its first 8 MiB are looked at, so that none holds the broker up.
"""

import hashlib
from collections.abc import Iterator

import msgpack

from envserver.wire import Part

TASK = msgpack.packb("task_data")
ASIDE = frozenset(msgpack.packb(name) for name in ("request_id", "client", "model"))
"""What differs between two tries of one task."""

SUCCESS, TRUE = msgpack.packb("success"), msgpack.packb(True)

EMPTY = msgpack.packb({})

LOOKED_AT = 8 << 20
"""Bytes. 25 ms on a slow core, 100 where they are all tiny values; 100 MB would be twelve times as much."""

KEYS = 256
"""Of a map at most so many keys are looked at. Each costs microseconds, and 8 MiB may be millions of them."""


def fingerprint(payload: Part) -> bytes:
    """16 bytes for the task of a run; never raises, whatever the payload is."""
    view = _view(payload)
    pairs = list(_pairs(view))
    hashed = hashlib.sha256()
    task = [value for key, value, _ in pairs if key == TASK]
    if task:
        hashed.update(b"task")
        for value in task:
            hashed.update(value)
    elif pairs or bytes(view[:2]) == EMPTY:
        hashed.update(b"map")
        # The values may be large: only the keys are sorted.
        for key, value, _ in sorted((pair for pair in pairs if pair[0] not in ASIDE), key=lambda pair: pair[0]):
            hashed.update(b"%d %d " % (len(key), len(value)))
            hashed.update(key)
            hashed.update(value)
        if pairs:
            hashed.update(view[pairs[-1][2] :])
    else:
        hashed.update(view)
    return hashed.digest()[:16]


def succeeded(reply: Part) -> bool:
    """Whether a worker's reply says `success: true`, among its first keys. Never raises."""
    return any(key == SUCCESS and value == TRUE for key, value, _ in _pairs(_view(reply)))


def _view(part: Part) -> memoryview:
    return memoryview(part if isinstance(part, bytes) else part.buffer)[:LOOKED_AT]


def _pairs(data: memoryview) -> Iterator[tuple[bytes, memoryview, int]]:
    """The encoded keys and values of a map, each with where it ends, up to where it breaks off or is none."""
    unpacker = msgpack.Unpacker(max_buffer_size=max(1, len(data)))
    unpacker.feed(data)
    try:
        for _ in range(min(KEYS, unpacker.read_map_header())):
            start = unpacker.tell()
            unpacker.skip()
            middle = unpacker.tell()
            try:
                unpacker.skip()
                end = unpacker.tell()
            except msgpack.OutOfData:
                end = len(data)
            yield bytes(data[start:middle]), data[middle:end], end
            if end == len(data):
                return
    except (ValueError, msgpack.UnpackException, RecursionError):
        return
