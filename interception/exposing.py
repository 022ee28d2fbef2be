"""Exposing one local service: what `interception tunnel` does."""

import asyncio
from collections.abc import Callable

from tunnel import HEALTH_PATH, Tunnel, TunnelConfig, make_tunnel
from tunnel.probe import probe

LOCAL_TIMEOUT = 5.0
"""Seconds for the first look at the local service."""


async def expose(
    config: TunnelConfig,
    port: int,
    *,
    health: str | None,
    on_url: Callable[[str], None],
    say: Callable[[str], None],
    on_tunnel: Callable[[Tunnel], object] = lambda tunnel: None,
) -> None:
    """Keep `127.0.0.1:port` public until cancelled; `on_url` gets the URL, `say` what is worth telling of the start,
    `on_tunnel` the tunnel before it is exposed.

    :param health: the path at which the service answers 200. None: it is asked whether it has ours, and if not any
        HTTP answer will do.

    Raises `TunnelError` if it cannot be made, and `TunnelGoneError` when it is gone.
    """
    tunnel = make_tunnel(config)
    on_tunnel(tunnel)
    tunnel.health_path = await _health(port, health, say)
    gone = asyncio.Event()
    tunnel.on_gone = gone.set
    async with tunnel.expose(port) as url:
        on_url(url)
        await gone.wait()
        assert tunnel.gone is not None
        raise tunnel.gone


async def _health(port: int, health: str | None, say: Callable[[str], None]) -> str | None:
    local = f"http://127.0.0.1:{port}"
    seen = await probe(local + (health or HEALTH_PATH), timeout=LOCAL_TIMEOUT, through_proxy=False)
    if seen.status is None:
        say(f"nothing answers at {local} yet ({seen.detail}): the URL will fail until it does")
    if health is not None:
        if seen.status is not None and not seen.ok:
            say(f"{local}{health} answers {seen.status}, not 200: is that where it says that it is well?")
        return health
    return HEALTH_PATH if seen.ok else None
