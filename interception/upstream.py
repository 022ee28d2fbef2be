"""Speaking to the upstreams: one shared client for each distinct one."""

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

import aiohttp
from yarl import URL

from interception.session import Upstream
from interception.turn import Exchange, Failure

ClientKey = tuple[str, float, float | None]


class UpstreamClients:
    """The HTTP clients of a server. They are made on first use and closed together."""

    def __init__(self) -> None:
        self._clients: dict[ClientKey, aiohttp.ClientSession] = {}

    def _client(self, upstream: Upstream) -> aiohttp.ClientSession:
        key = (upstream.base_url, upstream.connect_timeout, upstream.idle_timeout)
        client = self._clients.get(key)
        if client is None:
            client = self._clients[key] = aiohttp.ClientSession(
                # Without a limit: aiohttp's own of 100 connections would make rollouts wait for one another.
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=upstream.connect_timeout, sock_read=upstream.idle_timeout
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=True,
                auto_decompress=True,
            )
        return client

    def request(
        self, upstream: Upstream, method: str, url: str, *, headers: Mapping[str, str], body: bytes | None = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """A request that is not redirected: an upstream that moved must be configured, not followed with its key."""
        return self._client(upstream).request(
            method, URL(url, encoded=True), headers=headers, data=body, allow_redirects=False
        )

    async def forward(
        self, exchange: Exchange, upstream: Upstream, url: str, headers: Mapping[str, str], body: bytes
    ) -> None:
        """Make the call and fill `exchange` with its answer; raises `Failure` if there is none, or not all of it."""
        try:
            async with self.request(upstream, "POST", url, headers=headers, body=body) as response:
                exchange.began(response.status, response.headers)
                async for chunk in response.content.iter_any():
                    exchange.received(chunk)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise failure(error, upstream) from error

    async def close(self) -> None:
        clients, self._clients = list(self._clients.values()), {}
        await asyncio.gather(*(client.close() for client in clients))


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
        return Failure(503, f"the upstream {where} cannot be reached: {error.os_error.strerror or error.os_error}")
    if isinstance(error, aiohttp.ClientPayloadError):
        return Failure(502, f"the upstream {where} broke off in the middle of its answer")
    return Failure(503, f"the upstream {where} closed the connection: {error or type(error).__name__}")
