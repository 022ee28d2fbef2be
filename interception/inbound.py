"""Request bodies: read within the cap, decoded, parsed, and written again where something changed them."""

import asyncio
import json
from typing import Any

import msgspec
from aiohttp import StreamReader, web

from interception.coding import UNDECODABLE, decoder_of
from interception.sse import dumps, loads
from interception.turn import Failure

SILENCE = 120.0
"""Seconds without a byte of a body that has begun, after which its sender is told 408. (aiohttp does not tell a handler
of a chunk that is malformed: it waits for ever for the next one.)"""

DRAIN_TIMEOUT = 30.0
"""Seconds that a refused sender gets to send the rest, which SDKs do before they look at the answer."""

LARGE = 8 * 1024**2
"""Bytes of a body after whose parsing, some 30 ms, others get their turn."""


# -- reading ---------------------------------------------------------------------------------------


async def read_body(request: web.BaseRequest, cap: int) -> bytes:
    """The body, decoded. The server is run with `auto_decompress` off: aiohttp answers for what it cannot decode
    before any handler is asked, in no dialect's shape, and leaves the connection unusable.

    Raises `Failure` 400, 413 or 415; what is left then is for `drain`.
    """
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    decoder = decoder_of(encoding)
    if decoder is None and encoding not in ("", "identity"):
        raise Failure(415, f"the content-encoding {encoding!r} is not supported: use gzip, deflate, br or zstd")
    content = request.content
    if not content.is_eof() and (request.content_length or 0) > cap:
        raise _too_large(cap)
    parts: list[bytes] = []
    room = cap
    try:
        while not content.at_eof():
            # What has arrived whole is not waited for.
            chunk = content.read_nowait() if content.is_eof() else await _next_chunk(content)
            # In pieces as they come, so that the loop is held up by none, and a bomb is noticed when it is too large.
            part = chunk if decoder is None else decoder.feed(chunk, room)
            room -= len(part)
            if room < 0:
                raise _too_large(cap)
            parts.append(part)
    except UNDECODABLE as error:
        raise Failure(400, f"the request body is no {encoding}: {error}") from None
    except web.RequestPayloadError as error:
        raise Failure(400, f"the request body did not arrive whole: {error}") from None
    if decoder is not None and not decoder.whole:
        raise Failure(400, f"the request body is no {encoding}: it ends too early")
    return b"".join(parts)


def _too_large(cap: int) -> Failure:
    return Failure(413, f"the request body is over {cap / 1024**2:g} MiB")


async def _next_chunk(content: StreamReader) -> bytes:
    try:
        async with asyncio.timeout(SILENCE):
            return await content.readany()
    except TimeoutError:
        raise Failure(408, f"nothing came of the request body for {SILENCE:g} s, or it is malformed") from None


async def drain(request: web.BaseRequest) -> None:
    """Read what is left of a refused body, so that the connection stays usable."""
    try:
        async with asyncio.timeout(DRAIN_TIMEOUT):
            while await request.content.readany():
                pass
    except (TimeoutError, ConnectionError, web.RequestPayloadError):
        pass  # the connection is closed after the answer


# -- as JSON ---------------------------------------------------------------------------------------


async def as_object(body: bytes) -> dict[str, Any]:
    """The JSON object that the body is, with NaN and the like, which engines take; else `Failure` 400."""
    try:
        asked = exactly(body)
    except (ValueError, RecursionError) as error:
        raise Failure(400, f"the request body is not JSON: {error}") from None
    if not isinstance(asked, dict):
        raise Failure(400, "the request body must be a JSON object")
    if len(body) > LARGE:
        await asyncio.sleep(0)  # what is done next with a body of this size holds the loop up, too
    return asked


def written(asked: dict[str, Any]) -> bytes:
    """The body of a request that was changed."""
    try:
        text = dumps(asked)
        # orjson writes NaN and Infinity as null, without a word.
        if b"null" in text and loads(text) != asked:
            text = json.dumps(asked).encode()
    except (ValueError, RecursionError) as error:
        raise Failure(400, f"the request body cannot be written again: {error}") from None
    return text


def exactly(body: bytes) -> Any:
    """The JSON value that `body` is, its integers of any size. ValueError, RecursionError."""
    try:
        # orjson would make a float of an integer over 64 bits.
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return json.loads(body)  # NaN, Infinity, half a surrogate pair
