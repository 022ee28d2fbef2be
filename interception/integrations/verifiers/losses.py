"""Which rollouts have lost a tunnel they need: known to servers, tool tunnels and harness sessions alike."""

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator

from verifiers.v1.errors import TunnelError as TheirTunnelError
from verifiers.v1.session import RolloutSession

from tunnel import StateChanged, Tunnel, TunnelError, TunnelEvent


class Way:
    """A tunnel that rollouts need, and how they know what is behind it."""

    def __init__(self, tunnel: Tunnel, identity: str | None) -> None:
        self.tunnel = tunnel
        self.identity = identity
        """On the answer of the health route; None: it has no such route."""
        self.troubled_at = -math.inf
        """When it was last seen not to serve, on the monotonic clock."""

    def note(self, event: TunnelEvent) -> None:
        if isinstance(event, StateChanged):
            self.troubled_at = time.monotonic()  # it does not serve, or did not until now


class Watch:
    """One rollout's, from `register` to `unregister`."""

    def __init__(self, session: RolloutSession, way: Way | None) -> None:
        self.session = session
        self.way = way
        """To its server; None: without a tunnel."""
        self.tools: dict[str, Way] = {}
        """To the tool servers it uses, by their public URLs."""
        self._task: asyncio.Task[object] | None = None
        self._cancellations = 0
        self.error: TheirTunnelError | None = None
        """Why it is lost. Kept here, for verifiers clears `session.error` on the way."""
        self.lost = asyncio.Event()
        """Set with `error`."""

    def entered(self) -> None:
        """Told by the task that runs the rollout."""
        self._task = asyncio.current_task()
        self._cancellations = 0 if self._task is None else self._task.cancelling()

    @property
    def ways(self) -> list[Way]:
        return [*([] if self.way is None else [self.way]), *self.tools.values()]

    @property
    def abandoned(self) -> bool:
        """Its task is cancelled: what becomes of it, nobody asks any more."""
        return self._task is not None and self._task.cancelling() > self._cancellations

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
