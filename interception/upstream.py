"""Speaking to the upstreams: one shared client for each distinct one."""

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Protocol
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from interception.answer import UpstreamAnswer
from interception.connecting import Unreachable
from interception.connection import NoHttp, Undecodable
from interception.headers import Sending
from interception.session import Upstream
from interception.turn import Failure
from interception.wire import Wire

PIECE = 256 * 1024
"""Bytes of a body that are handed to the connection at once."""

ClientKey = tuple[str, float, float | None]


class UpstreamClients:
    """The connections of a server to its upstreams. They are made on first use and closed together."""

    def __init__(self) -> None:
        self._clients: dict[ClientKey, aiohttp.ClientSession] = {}
        self._wires: dict[ClientKey, Wire | None] = {}
        """The short way for turns, which knows of no proxies."""

    def _client(self, upstream: Upstream) -> aiohttp.ClientSession:
        key = _key(upstream)
        if key not in self._clients:
            self._clients[key] = aiohttp.ClientSession(
                # Without a limit: aiohttp's own of 100 connections would make rollouts wait for one another.
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=upstream.connect_timeout, sock_read=upstream.idle_timeout
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                proxy=proxy_for(upstream.base_url),
                auto_decompress=True,
            )
        return self._clients[key]

    def _wire(self, upstream: Upstream) -> Wire | None:
        key = _key(upstream)
        if key not in self._wires:
            wire = None
            if proxy_for(upstream.base_url) is None:
                wire = Wire(
                    URL(upstream.base_url, encoded=True),
                    connect_timeout=upstream.connect_timeout,
                    idle_timeout=upstream.idle_timeout,
                )
            self._wires[key] = wire
        return self._wires[key]

    def post(self, sending: Sending, call_id: str, body: bytes) -> "Posting":
        """The request of a turn."""
        wire = self._wire(sending.upstream) if len(body) <= PIECE else None
        return wire.post(sending, call_id, body) if wire is not None else _ByClient(self, sending, call_id, body)

    def request(
        self, upstream: Upstream, method: str, url: str, *, headers: Mapping[str, str], body: bytes | None = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """A request that is not redirected: an upstream that moved must be configured, not followed with its key."""
        data: bytes | AsyncIterator[memoryview] | None = body
        if body is not None and len(body) > PIECE:
            data, headers = _pieces(body), {**headers, "Content-Length": str(len(body))}
        client = self._client(upstream)
        return client.request(method, URL(url, encoded=True), headers=headers, data=data, allow_redirects=False)

    async def close(self) -> None:
        clients, self._clients = list(self._clients.values()), {}
        wires, self._wires = [wire for wire in self._wires.values() if wire is not None], {}
        await asyncio.gather(*(client.close() for client in clients), *(wire.close() for wire in wires))


class Posting(Protocol):
    """A request that may have been sent; entered once the head of the answer is there, or dropped."""

    async def __aenter__(self) -> UpstreamAnswer: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def drop(self) -> None:
        """It will not be entered, if it has not been."""


class _ByClient:
    """One that is sent by aiohttp's client, as it is entered."""

    def __init__(self, clients: UpstreamClients, sending: Sending, call_id: str, body: bytes) -> None:
        self._clients = clients
        self._request: tuple[Sending, str, bytes] | None = (sending, call_id, body)

    async def __aenter__(self) -> UpstreamAnswer:
        assert self._request is not None
        (sending, call_id, body), self._request = self._request, None
        self._answering = self._clients.request(
            sending.upstream, "POST", sending.url, headers=sending.headers(call_id), body=body
        )
        del body
        return await self._answering.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._answering.__aexit__(kind, error, trace)

    def drop(self) -> None:
        pass


def _key(upstream: Upstream) -> ClientKey:
    return upstream.base_url, upstream.connect_timeout, upstream.idle_timeout


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
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message} (SSL_CERT_FILE names what else is to be)"
    # These have numbers of their own.
    if isinstance(error, ssl.SSLError | socket.gaierror):
        return str(error)
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
    if isinstance(error, aiohttp.ClientConnectorError | Unreachable):
        return Failure(503, f"the upstream {where} cannot be reached: {_reason(error.os_error)}")
    if isinstance(error, Undecodable):
        return Failure(502, f"the upstream {where} sent a body that is not what its content-encoding says")
    if isinstance(error, aiohttp.ClientPayloadError):
        return Failure(502, f"the upstream {where} broke off in the middle of its answer")
    if isinstance(error, aiohttp.ClientResponseError | NoHttp):  # it would quote what came
        return Failure(502, f"the upstream {where} sent no valid HTTP answer")
    if isinstance(error, aiohttp.ServerDisconnectedError):  # its own text may be all of a head that came by halves
        return Failure(503, f"the upstream {where} closed the connection before it had answered")
    reason = upstream.redacted(str(error)) or type(error).__name__
    return Failure(503, f"the upstream {where} closed the connection: {reason}")
