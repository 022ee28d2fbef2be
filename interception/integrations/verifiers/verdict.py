"""Whether a rollout's URLs still served at its harness's end: a harness sees a dead one before the keepalive does."""

import asyncio
import logging
import time
from contextlib import suppress

from interception.integrations.verifiers.losses import Watch, Way
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
    troubled = not known and any(time.monotonic() - way.troubled_at < RECENT for way in watched.ways)
    return not await serves(watched) or troubled or watched.error is not None


async def serves(watched: Watch) -> bool:
    """Whether each URL that the rollout needs serves just now, by a request through it.

    If one does not, this waits until it is mended (still False) or gone; after `VERDICT_TIMEOUT` the rollout is lost.
    """
    if watched.error is not None:
        return False
    return all(await asyncio.gather(*(_serves(watched, way) for way in watched.ways)))


async def _serves(watched: Watch, way: Way) -> bool:
    tunnel = way.tunnel
    if watched.abandoned or await _answers(way):
        return True
    tunnel.report("a harness has ended, and a request through the URL fails")
    with suppress(TimeoutError):
        async with asyncio.timeout(VERDICT_TIMEOUT):
            while watched.error is None and tunnel.state.name not in NOT_ITS_OWN and not watched.abandoned:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY):
                        await watched.lost.wait()
                if watched.error is None and await _answers(way):
                    return False
            return watched.error is None
    watched.lose(
        f"the tunnel was lost: {tunnel.url} did not serve for {VERDICT_TIMEOUT:.0f} s after the harness had ended"
    )
    return False


async def _answers(way: Way) -> bool:
    tunnel = way.tunnel
    if tunnel.url is None:
        return False
    path = tunnel.health_path or tunnel.any_path
    answer = await probe(tunnel.url + path, timeout=tunnel.policy.probe_timeout, through_proxy=True)
    if tunnel.health_path is None:  # a gateway's own would be 404, or one of its failures
        return answer.status is not None and answer.status != 404 and answer.status < 500
    return answer.status == 200 and answer.identity == way.identity
