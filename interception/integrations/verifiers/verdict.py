"""Whether a rollout's URL still served at its harness's end: a harness sees a dead one before the keepalive does."""

import asyncio
import logging
import time
from contextlib import suppress

from interception.integrations.verifiers.losses import Watch
from tunnel import HEALTH_PATH, Tunnel
from tunnel.probe import probe

logger = logging.getLogger("interception")

VERDICT_TIMEOUT = 90.0
"""Seconds until a tunnel that does not serve must have been mended or be known to be gone; then the rollout is lost.
The keepalive finds a lost route in 11 to 38 s, and a restart may take 60."""

LOOK_EVERY = 1.0
"""Seconds between two looks at a URL that does not serve."""

RECENT = 30.0
"""Seconds for which a fault of the tunnel may be why a harness failed: SDKs and harnesses try for about that long."""

NOT_ITS_OWN = ("path_fault", "local_down")
"""States of a tunnel in which its URL may well serve others."""


async def was_at_fault(watched: Watch) -> bool:
    """A harness has failed: whether its tunnel did not serve. Returns when that is known, and lost or mended."""
    known = watched.session.error is not None  # a model call's own failure, which verifiers will name
    troubled = not known and watched.tunnel is not None and time.monotonic() - watched.troubled_at() < RECENT
    return not await serves(watched) or troubled or watched.error is not None


async def serves(watched: Watch) -> bool:
    """Whether the URL serves just now, by a request through it.

    If it does not, this waits until it is mended (still False) or gone; after `VERDICT_TIMEOUT` the rollout is lost.
    """
    tunnel = watched.tunnel
    if tunnel is None or watched.error is not None:
        return watched.error is None
    if await _answers(tunnel, watched.identity):
        return True
    tunnel.report("a harness has ended, and a request through the URL fails")
    with suppress(TimeoutError):
        async with asyncio.timeout(VERDICT_TIMEOUT):
            while watched.error is None and tunnel.state.name not in NOT_ITS_OWN:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY):
                        await watched.lost.wait()
                if watched.error is None and await _answers(tunnel, watched.identity):
                    return False
            return watched.error is None
    watched.lose(
        f"the tunnel was lost: {tunnel.url} did not serve for {VERDICT_TIMEOUT:.0f} s after the harness had ended"
    )
    return False


async def _answers(tunnel: Tunnel, identity: str) -> bool:
    if tunnel.url is None:
        return False
    answer = await probe(tunnel.url + HEALTH_PATH, timeout=tunnel.policy.probe_timeout, through_proxy=True)
    return answer.status == 200 and answer.identity == identity
