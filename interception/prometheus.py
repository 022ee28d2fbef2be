"""The numbers of interception servers and pools, and of their tunnels, for Prometheus (extra `prometheus`)."""

from collections.abc import Callable

from interception.metrics import FAMILIES
from interception.pool import Pool
from interception.server import InterceptionServer
from tunnel import metrics as tunnels
from tunnel.prometheus import REGISTRY, CollectorRegistry, show


def register(
    source: Pool | InterceptionServer, name: str = "interception", registry: CollectorRegistry = REGISTRY
) -> Callable[[], None]:
    """Show the numbers of a pool or a server (`interception_…`) and of its tunnels (`tunnel_…`) with the label `name`,
    started or not, until what is returned is called. Raises `ValueError` where another one has that name.

    A server of a pool is shown by its pool.
    """
    hide = show(FAMILIES, name, source.samples, registry)
    try:
        hide_tunnels = show(tunnels.FAMILIES, name, source.tunnel_samples, registry)
    except ValueError:
        hide()
        raise

    def hide_both() -> None:
        hide()
        hide_tunnels()

    return hide_both
