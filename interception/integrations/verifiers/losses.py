"""Which rollouts have lost a tunnel they need: known to servers, tool tunnels and harness sessions alike."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from verifiers.v1.errors import TunnelError as TheirTunnelError
from verifiers.v1.session import RolloutSession

from tunnel import Tunnel, TunnelError


class Watch:
    """One rollout's, from `register` to `unregister`."""

    def __init__(
        self, session: RolloutSession, tunnel: Tunnel | None, identity: str, troubled_at: Callable[[], float]
    ) -> None:
        self.session = session
        self.tunnel = tunnel
        """Of its server; None: it has none."""
        self.identity = identity
        """Of its server, on the answer of the health route."""
        self.troubled_at = troubled_at
        """When the tunnel was last seen not to serve, on the monotonic clock."""
        self.error: TheirTunnelError | None = None
        """Why it is lost. Kept here, for verifiers clears `session.error` on the way."""
        self.lost = asyncio.Event()
        """Set with `error`."""
        self.shared_tools: set[str] = set()
        """URLs of the shared tool servers it uses."""

    def lose(self, reason: str, cause: BaseException | None = None) -> None:
        """The rollout has lost a tunnel: its calls end, nothing is recorded any more. The first loss stays."""
        if self.error is not None:
            return
        # A fresh one for each: verifiers hangs causes and tracebacks on it.
        self.error = TheirTunnelError(reason)
        self.error.__cause__ = cause
        self.session.error = self.error
        self.session.release()
        self.lost.set()

    def raise_if_unrecorded(self) -> None:
        """The end of `acquire` without an exception: a rollout on a dead URL is no success, whatever it exited with.

        Nothing happens if the rollout's record has the loss already.
        """
        error = self.error
        if error is None:
            return
        said = type(error).__name__, str(error)
        if not any((recorded.type, recorded.message) == said for recorded in self.session.trace.errors):
            raise error


_watches: dict[str, Watch] = {}  # by the id of the rollout's trace


def watch(watched: Watch) -> None:
    """Begin to watch over a rollout."""
    _watches[watched.session.trace.id] = watched


def watch_of(trace_id: str | None) -> Watch | None:
    """That of a rollout which is registered on one of our servers just now."""
    return None if trace_id is None else _watches.get(trace_id)


def watches() -> list[Watch]:
    return list(_watches.values())


def forget(session: RolloutSession) -> None:
    """The rollout has left; whoever holds its `Watch` may still ask it."""
    if (watched := _watches.get(session.trace.id)) is not None and watched.session is session:
        del _watches[session.trace.id]


@contextlib.contextmanager
def as_theirs() -> Iterator[None]:
    """Our `TunnelError`s as verifiers' own, which its records and retry rules go by."""
    try:
        yield
    except TunnelError as error:
        raise TheirTunnelError(str(error)) from error
