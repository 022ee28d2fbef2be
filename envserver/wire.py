"""The frames between clients, servers and workers: what is in them, and what is refused.

A client's DEALER sends `[request_id, method, payload]`; a ROUTER sees the client's routing id before them. The answer
is `[request_id, kind, data]`: any number of `delta`, then one `reply`. Payloads are msgpack maps, every reply has
`success: bool` and `error: str | None`. Another framework's clients and workers speak it: nothing here may change.
"""

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import msgpack
import msgspec
import zmq

Part = bytes | zmq.Frame
"""One frame of a message: bytes, or zmq's own where it is large and should not be copied."""

HEALTH, RUN, CANCEL = b"health", b"run", b"cancel"
DELTA, REPLY = b"delta", b"reply"

MAX_ID = 128
"""Bytes. Ids are opaque: the peers' are 32 hexadecimal digits, any others are bytes like any."""

MAX_METHOD = 64
"""Bytes. A longer one is no method that anybody misspelt."""


FAILED = b"\xa7success\xc2"
FAILED_WITHIN = 5 + len(FAILED)
"""Bytes: the header of a map takes five at most."""


class Request(NamedTuple):
    client: bytes
    id: bytes
    method: bytes
    payload: Part


class Answer(NamedTuple):
    id: bytes
    kind: bytes
    data: Part


def parse_request(parts: Sequence[Part]) -> Request | None:
    """What a ROUTER received, or None if it cannot be answered: the number of frames is wrong, or the id too long."""
    if len(parts) != 4:
        return None
    client, request_id, method, payload = parts
    if not (isinstance(client, bytes) and isinstance(request_id, bytes) and isinstance(method, bytes)):
        return None
    if len(request_id) > MAX_ID or len(method) > MAX_METHOD:
        return None
    return Request(client, request_id, method, payload)


def parse_answer(parts: Sequence[Part]) -> Answer | None:
    """What a DEALER received, or None if it is neither a delta nor a reply."""
    if len(parts) != 3:
        return None
    request_id, kind, data = parts
    if not isinstance(request_id, bytes) or len(request_id) > MAX_ID or (kind != DELTA and kind != REPLY):
        return None
    return Answer(request_id, kind, data)


def _foreign(value: Any) -> Any:
    """What msgspec has no encoding for: pydantic models, paths, and the arrays and scalars of numpy and torch."""
    if callable(dump := getattr(value, "model_dump", None)):
        return dump()
    if isinstance(value, PurePath):
        return str(value)
    if callable(plain := getattr(value, "tolist", None)):
        return plain()
    raise TypeError(f"{type(value).__name__} has no msgpack encoding")


_encoder = msgspec.msgpack.Encoder(enc_hook=_foreign)


def encode(value: dict[str, Any]) -> bytes:
    """A msgpack map. Raises `ValueError`, whatever it is that cannot be encoded."""
    try:
        return _encoder.encode(value)
    except Exception as error:  # hooks of foreign objects run in there
        raise ValueError(f"not serialisable as msgpack: {error or type(error).__name__}") from error


def decode(data: Part) -> dict[str, Any]:
    """The map in `data`. Raises `ValueError` if there is none. A list that claims to be longer than the data is refused
    before anything is allocated for it."""
    try:
        value = msgpack.unpackb(
            data if isinstance(data, bytes) else data.buffer, raw=False, strict_map_key=False, timestamp=3
        )
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise ValueError(f"not msgpack: {error or type(error).__name__}") from error
    if not isinstance(value, dict):
        raise ValueError(f"not a msgpack map but a {type(value).__name__}")
    return value


def success(fields: dict[str, Any]) -> bytes:
    """The reply to a request that went well. Raises `ValueError` as `encode` does."""
    return encode({"success": True, "error": None, **fields})


def failure(text: str) -> bytes:
    """The reply to a request that did not."""
    # A lone surrogate, as in a path or an argument that is no text, has no UTF-8.
    return encode({"success": False, "error": text.encode("utf-8", "backslashreplace").decode()})


def tells_failure(data: Part) -> bool:
    """Whether a reply is a `failure`. By its first bytes, for nothing is decoded on its way through the broker:
    `success` is the first field of ours and of the peers'."""
    head = data[:FAILED_WITHIN] if isinstance(data, bytes) else bytes(data.buffer[:FAILED_WITHIN])
    return FAILED in head


def cancel_payload(request_id: bytes) -> bytes:
    """Asks to cancel the run `request_id`. As text where it is text, for the peers look for text."""
    try:
        return encode({"request_id": request_id.decode()})
    except UnicodeDecodeError:
        return encode({"request_id": request_id})


def cancel_target(payload: Part) -> bytes:
    """The id of the run that a `cancel` is about. Raises `ValueError` if it names none."""
    target = decode(payload).get("request_id")
    if isinstance(target, str):
        return target.encode("utf-8", "surrogatepass")
    if isinstance(target, bytes):
        return target
    raise ValueError("a cancel names its run: {'request_id': ...}")
