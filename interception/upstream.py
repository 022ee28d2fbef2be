"""Speaking to the upstreams: one shared client for each distinct one."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from interception.answer import UpstreamAnswer
from interception.session import Upstream
from interception.turn import Failure

if TYPE_CHECKING:
    from interception.wire import Wire

logger = logging.getLogger("interception")

PIECE = 256 * 1024
"""Bytes of a body that are handed to the connection at once."""

ClientKey = tuple[str, float, float | None]


class UpstreamClients:
    """The HTTP clients of a server. They are made on first use and closed together."""

    def __init__(self) -> None:
        self._clients: dict[ClientKey, tuple[aiohttp.ClientSession, Wire | None]] = {}
        self._fell_back = False

    def _client(self, upstream: Upstream) -> "tuple[aiohttp.ClientSession, Wire | None]":
        """The client, and its short way for turns, which knows of no proxies."""
        key = (upstream.base_url, upstream.connect_timeout, upstream.idle_timeout)
        known = self._clients.get(key)
        if known is not None:
            return known
        proxy = proxy_for(upstream.base_url)
        client = aiohttp.ClientSession(
            # Without a limit: aiohttp's own of 100 connections would make rollouts wait for one another.
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=upstream.connect_timeout, sock_read=upstream.idle_timeout
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            proxy=proxy,
            auto_decompress=True,
        )
        self._clients[key] = client, None if proxy is not None else self._wire(client, upstream)
        return self._clients[key]

    def _wire(self, client: aiohttp.ClientSession, upstream: Upstream) -> "Wire | None":
        try:
            from interception.wire import Wire

            return Wire(client, URL(upstream.base_url, encoded=True))
        except aiohttp.InvalidURL:
            return None  # each call is told so
        except Exception:  # whatever comes of parts that are others in a new aiohttp
            if not self._fell_back:
                self._fell_back = True
                logger.warning(
                    "aiohttp %s has not the parts that this version knows: turns take the slower way, by its client",
                    aiohttp.__version__,
                    exc_info=True,
                )
            return None

    def post(
        self, upstream: Upstream, url: str, *, headers: CIMultiDict[str], body: bytes
    ) -> AbstractAsyncContextManager[UpstreamAnswer]:
        """The request of a turn."""
        _, wire = self._client(upstream)
        if wire is None or len(body) > PIECE:
            return self.request(upstream, "POST", url, headers=headers, body=body)
        return wire.post(url, headers, body)

    def request(
        self, upstream: Upstream, method: str, url: str, *, headers: Mapping[str, str], body: bytes | None = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """A request that is not redirected: an upstream that moved must be configured, not followed with its key."""
        data: bytes | AsyncIterator[memoryview] | None = body
        if body is not None and len(body) > PIECE:
            data, headers = _pieces(body), {**headers, "Content-Length": str(len(body))}
        client, _ = self._client(upstream)
        return client.request(method, URL(url, encoded=True), headers=headers, data=data, allow_redirects=False)

    async def close(self) -> None:
        clients, self._clients = list(self._clients.values()), {}
        await asyncio.gather(*(client.close() for client, _ in clients))


async def _pieces(body: bytes) -> AsyncIterator[memoryview]:
    # Whole, the connection would hold a second copy of what a slow upstream has not read yet.
    view = memoryview(body)
    for start in range(0, len(view), PIECE):
        yield view[start : start + PIECE]


def proxy_for(url: str) -> str | None:
    """The proxy that the environment names. Not by aiohttp's `trust_env`: that reads `~/.netrc`, too, and refuses every
    request whose key is ours then."""
    parts = urlsplit(url)
    # A proxy for the world must not be asked for a model on this host.
    if on_this_host(url) or proxy_bypass(parts.hostname or ""):
        return None
    return getproxies().get(parts.scheme)


def on_this_host(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _reason(error: OSError) -> str:
    # asyncio puts its own sentence, with the address, where the system's reason would be.
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)


def failure(error: Exception, upstream: Upstream) -> Failure:
    """What a client is told of a call that did not come through. The upstream's URL may be named, never its key."""
    where = upstream.base_url
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return Failure(504, f"the upstream {where} could not be connected within {upstream.connect_timeout:g} s")
    if isinstance(error, TimeoutError):
        return Failure(504, f"the upstream {where} sent nothing for {upstream.idle_timeout or 0:g} s")
    if isinstance(error, aiohttp.InvalidURL):
        return Failure(502, f"the upstream {where} has no valid URL")
    if isinstance(error, aiohttp.ClientConnectorError):
        return Failure(503, f"the upstream {where} cannot be reached: {_reason(error.os_error)}")
    if isinstance(error, aiohttp.ClientPayloadError):
        return Failure(502, f"the upstream {where} broke off in the middle of its answer")
    if isinstance(error, aiohttp.ClientResponseError):  # it would quote what came
        return Failure(502, f"the upstream {where} sent no valid HTTP answer")
    if isinstance(error, aiohttp.ServerDisconnectedError):  # its own text may be all of a head that came by halves
        return Failure(503, f"the upstream {where} closed the connection before it had answered")
    reason = upstream.redacted(str(error)) or type(error).__name__
    return Failure(503, f"the upstream {where} closed the connection: {reason}")
