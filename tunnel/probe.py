"""Looking at a tunnel from outside and from inside: GETs of the health route, and what their answers mean."""

import asyncio
import errno
import ipaddress
import secrets
import socket
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import aiohttp

from tunnel.evidence import Outcome
from tunnel.health import IDENTITY_HEADER, PROBE_HEADER

UNRUN_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
"""This host has no room for the probe: that says nothing of the tunnel."""

BAD_GATEWAYS = frozenset({502, 503, 504, *range(520, 531)})
"""Of a gateway that is ill, or in front of one that is."""

PLAIN = {Outcome.REFUSED: "connection refused", Outcome.NO_NAME: "no such name"}

NO_NAME_ERRORS = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})
"""An answer of the DNS, not the lack of one."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one GET saw. Without a `status`, `fault` is what went wrong; `took` is in seconds."""

    status: int | None
    identity: str | None
    fault: Outcome | None
    detail: str
    took: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status == 200


def new_nonce() -> str:
    return secrets.token_hex(8)


async def probe(url: str, *, timeout: float, through_proxy: bool, nonce: str | None = None) -> Answer:
    """GET `url` on a fresh connection; never raises but for cancellation.

    `through_proxy`: honour the proxy variables of the environment, as a host behind a proxy needs for a public URL
    and as nobody wants for a local service.
    """
    began = time.monotonic()
    trace = aiohttp.TraceConfig()
    connected = False

    async def note(session: aiohttp.ClientSession, context: SimpleNamespace, params: Any) -> None:
        nonlocal connected
        connected = True

    trace.on_connection_create_end.append(note)
    headers = {PROBE_HEADER: nonce or new_nonce(), "Connection": "close"}
    try:
        async with (
            asyncio.timeout(timeout),
            aiohttp.ClientSession(
                # A resolver that tells "no such name" from "no DNS", as aiodns would not.
                connector=aiohttp.TCPConnector(resolver=aiohttp.ThreadedResolver(), force_close=True),
                trust_env=through_proxy,
                cookie_jar=aiohttp.DummyCookieJar(),
                trace_configs=[trace],
            ) as session,
            session.get(url, headers=headers, allow_redirects=False) as response,
        ):
            took = time.monotonic() - began
            identity = response.headers.get(IDENTITY_HEADER)
            return Answer(response.status, identity, None, f"answered {response.status}", took)
    except TimeoutError:
        if connected:
            return Answer(None, None, Outcome.NO_ANSWER, f"no answer within {timeout:g} s")
        return Answer(None, None, Outcome.PATH, f"no connection within {timeout:g} s")
    except Exception as error:  # noqa: BLE001 - whatever else it is, it is no evidence against the tunnel
        fault = _fault(error, connected)
        return Answer(None, None, fault, PLAIN.get(fault) or f"{type(error).__name__}: {error}")


def _fault(error: Exception, connected: bool) -> Outcome:
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return Outcome.AUTH if error.status == 407 else Outcome.PATH
    if isinstance(error, aiohttp.ClientProxyConnectionError):
        return Outcome.PATH  # this host's own proxy
    if isinstance(error, aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError) or not isinstance(
        error, aiohttp.ClientError | OSError
    ):
        return Outcome.UNRUN  # no threads left for a lookup, a URL that is none
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError) and cause.errno in UNRUN_ERRORS:
        return Outcome.UNRUN
    if connected:
        return Outcome.NO_ANSWER  # closed or garbled: there is somebody, but no answer
    if isinstance(cause, socket.gaierror):
        return Outcome.NO_NAME if cause.errno in NO_NAME_ERRORS else Outcome.PATH
    if isinstance(cause, ConnectionRefusedError):
        return Outcome.REFUSED
    return Outcome.PATH


def classify(url: Answer, local: Answer, slow_404: float) -> Outcome:
    """What the URL's answer means, beside that of the local service at the same time."""
    if url.status is None:
        return url.fault or Outcome.UNRUN
    if local.identity is not None and url.identity is not None:
        if url.identity != local.identity:
            return Outcome.WRONG
        return Outcome.OK if url.status == 200 else Outcome.ORIGIN
    if local.identity is None and url.status in (200, local.status):
        return Outcome.OK  # a service without an identity cannot be told from a stranger
    if url.status == 404:
        return Outcome.HALF_OPEN if url.took >= slow_404 else Outcome.NO_ROUTE
    if url.status in (401, 403, 407):
        return Outcome.AUTH
    if url.status == 429:
        return Outcome.BUSY
    if local.identity is not None and 200 <= url.status < 300:
        return Outcome.WRONG
    return Outcome.BAD_GATEWAY  # also what the sheet has no class for, a redirect say: the one that needs most proof


def describe(outcome: Outcome, url: Answer) -> str:
    """The URL's answer in plain words, for a log line."""
    if url.status is None:
        return url.detail
    match outcome:
        case Outcome.HALF_OPEN:
            return "slow gateway 404"
        case Outcome.WRONG:
            return f"{url.status} from somebody else"
        case Outcome.OK | Outcome.ORIGIN:
            return f"answered {url.status}"
    return f"gateway {url.status}"


async def answers_http(url: str, *, timeout: float) -> bool:
    """The reference: whether a gateway answers for `url`, whatever it says but that it is ill itself."""
    status = (await probe(url, timeout=timeout, through_proxy=True)).status
    return status is not None and status not in BAD_GATEWAYS


async def accepts_tcp(host: str, port: int, *, timeout: float) -> bool:
    """The reference of a relay: whether its port takes a connection."""
    try:
        async with asyncio.timeout(timeout):
            _, writer = await asyncio.open_connection(host, port)
    except (TimeoutError, OSError):
        return False
    writer.transport.abort()
    return True


def is_address(host: str) -> bool:
    """Whether `host` is an address and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
