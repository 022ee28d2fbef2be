"""Making connections to one origin: its addresses, which are asked for again from time to time, and TLS."""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import cache
from typing import Final, TypeVar

import aiohappyeyeballs
import aiohttp
from yarl import URL

P = TypeVar("P", bound=asyncio.BaseProtocol)

ADDRESSES_KEPT: Final = 10.0
"""Seconds for which a name's addresses are not asked for again."""

HAPPY_EYEBALLS_DELAY: Final = 0.25
"""Seconds after which the next address is tried beside one that does not answer (RFC 8305)."""

Address = aiohappyeyeballs.AddrInfoType


class Unreachable(aiohttp.ClientConnectionError):
    """No connection to the upstream, for the reason that the system (or TLS) gives."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(str(reason))
        self.os_error = reason


class Origin:
    """Where connections go."""

    def __init__(self, url: URL, timeout: float) -> None:
        """`timeout`: seconds until a connection must be there."""
        self.host = url.raw_host or ""
        self.port = url.port or 0
        self.timeout = timeout
        self._tls = url.scheme == "https"
        self._lookup: asyncio.Task[Sequence[Address]] | None = None
        self._asked = 0.0
        self._made = 0
        """Connections begun, by which they are spread over the addresses."""

    async def connect(self, protocol: Callable[[], P]) -> P:
        """A new connection. `Unreachable`, `aiohttp.ConnectionTimeoutError`, or `aiohttp.InvalidURL` where no host is
        named; then it is the caller who aborts what `protocol` has been connected to all the same."""
        if not self.host or not self.port:
            raise aiohttp.InvalidURL(f"{self.host}:{self.port}")
        loop = asyncio.get_running_loop()
        connected: socket.socket | None = None

        def handed_over() -> P:
            nonlocal connected
            # The transport's from now on. Closed by us, its number would be another's while the loop still knows it.
            connected = None
            return protocol()

        try:
            async with asyncio.timeout(self.timeout):
                found = await self._addresses(loop)
                addresses = _from(self._made, found)
                self._made += 1
                connected = await aiohappyeyeballs.start_connection(
                    addresses, happy_eyeballs_delay=HAPPY_EYEBALLS_DELAY, loop=loop
                )
                name = self.host.rstrip(".") if self._tls else None  # no certificate has the dot of a full name
                tls = await asyncio.to_thread(_tls) if self._tls else None  # the first one takes 40 ms
                _, made = await loop.create_connection(handed_over, sock=connected, ssl=tls, server_hostname=name)
                return made
        except BaseException as error:
            if connected is not None:
                connected.close()
            if isinstance(error, TimeoutError):
                raise aiohttp.ConnectionTimeoutError(f"no connection within {self.timeout:g} s") from None
            if isinstance(error, OSError):
                raise Unreachable(error) from None
            raise

    def close(self) -> None:
        if self._lookup is not None:
            self._lookup.cancel()

    async def _addresses(self, loop: asyncio.AbstractEventLoop) -> Sequence[Address]:
        if self._lookup is None or (self._lookup.done() and self._stale(self._lookup, loop.time())):
            self._lookup = loop.create_task(self._look_up(loop))
            self._asked = loop.time()
        # Of all that wait for it one may be cancelled.
        return await asyncio.shield(self._lookup)

    def _stale(self, lookup: "asyncio.Task[Sequence[Address]]", now: float) -> bool:
        return lookup.cancelled() or lookup.exception() is not None or now - self._asked > ADDRESSES_KEPT

    async def _look_up(self, loop: asyncio.AbstractEventLoop) -> Sequence[Address]:
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        return socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)


def _from(number: int, addresses: Sequence[Address]) -> list[Address]:
    """`addresses`, those of each family from another one on: a name may be that of several engines, and the resolver's
    order is the same each time. The family that it puts first stays first."""
    families: dict[int, list[Address]] = {}
    for address in addresses:
        families.setdefault(address[0], []).append(address)
    turned = []
    for those in families.values():
        at = number % len(those)
        turned += those[at:] + those[:at]
    return turned


@cache
def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
