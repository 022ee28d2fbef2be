"""One look at a health route: a GET on a connection of its own."""

import asyncio
import secrets
from dataclasses import dataclass

import aiohttp

from tunnel.health import PROBE_HEADER


@dataclass(frozen=True, slots=True)
class Answer:
    """What a probe saw: `ok` only for a 200; `detail` in plain words for the log."""

    ok: bool
    detail: str


async def probe(url: str, *, timeout: float, through_proxy: bool) -> Answer:
    """GET `url` on a fresh connection; never raises but for cancellation.

    `through_proxy`: honour the proxy variables of the environment, as a host behind a proxy needs for a public URL
    and as nobody wants for a local service.
    """
    nonce = secrets.token_hex(8)
    try:
        async with (
            asyncio.timeout(timeout),
            aiohttp.ClientSession(trust_env=through_proxy, cookie_jar=aiohttp.DummyCookieJar()) as session,
            session.get(url, headers={PROBE_HEADER: nonce, "Connection": "close"}, allow_redirects=False) as response,
        ):
            return Answer(response.status == 200, f"answered {response.status}")
    except TimeoutError:
        return Answer(False, f"no answer within {timeout:g} s")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return Answer(False, f"{type(error).__name__}: {error}")
