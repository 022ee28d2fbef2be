"""Ends what runs that were killed have left behind: clients, config files with tokens, registrations.

Done by the next tunnel of the same user and account that starts, and by the sidecar of a run (`tunnel.sidecar`) as
soon as it dies. Only records of the certainly dead are touched, and each by one reaper at a time.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import prime_tunnel

from tunnel import pace, processes
from tunnel.account import Account
from tunnel.record import Record, read_all
from tunnel.registrations import Deletion, PacedApi

logger = logging.getLogger("tunnel")

SETTLE = 35.0
"""Seconds after which a create has been carried out or never will be: the SDK waits 30 s for its answer."""

LOOK_AGAIN = 2.0
"""Seconds between looks for a registration whose create was under way."""

AT_ONCE = 8
"""Records whose registrations are deleted side by side."""


class Reaper:
    """One round through an account's records. It may be cancelled at any time: what is not done stays on record."""

    def __init__(self, account: Account, directory: Path, deletes_per_minute: int | None) -> None:
        self.found = 0
        """Records of the dead."""
        self.deleted = 0
        """Registrations."""
        self.left = 0
        """Records that another round must see to."""
        self._killed = 0
        self._account = account
        self._directory = directory
        self._deletes = pace.deletes(directory, deletes_per_minute)
        self._permits = asyncio.Semaphore(AT_ONCE)

    async def run(self) -> None:
        """Raises nothing but a cancellation; what fails is said in the log."""
        try:
            dead = await asyncio.to_thread(self._find)
            self.found = len(dead)
            if dead:
                # One for all, for each would set up TLS on the event loop.
                async with PacedApi(self._account, None, self._deletes) as api:
                    await asyncio.gather(*(self._see_to(record, api) for record in dead))
        except Exception as error:  # noqa: BLE001 - a tunnel must start whatever others left behind
            self.left += 1
            logger.warning("what dead runs left behind cannot be ended: %s: %s", type(error).__name__, error)
        if self._killed or self.deleted:
            logger.info("ended what dead runs left behind: %d clients, %d registrations", self._killed, self.deleted)

    def _find(self) -> list[Record]:
        # Those that expose the next comer to a stranger under their URL first, and at once.
        dead = [record for record in read_all(self._directory) if record.is_dead]
        for record in dead:
            with contextlib.suppress(OSError):  # a config file that cannot be removed is tried again, and said then
                self._end_clients(record)
        return dead

    async def _see_to(self, record: Record, api: "prime_tunnel.TunnelClient") -> None:
        try:
            with _only_reaper(record) as alone:
                if alone and record.path.exists() and not await self._reap(record, api):
                    self.left += 1
        except Exception as error:  # noqa: BLE001 - the others are seen to all the same
            self.left += 1
            logger.warning("%s cannot be seen to: %s: %s", record.path, type(error).__name__, error)

    async def _reap(self, record: Record, api: "prime_tunnel.TunnelClient") -> bool:
        entry = record.entry
        while True:
            settled = entry.tunnel_id is not None or time.time() >= entry.asked_at + SETTLE
            deletion = Deletion(api, entry.label, entry.team_id, entry.tunnel_id)
            async with self._permits:
                gone = await deletion.run()
            self.deleted += deletion.deleted
            await asyncio.to_thread(self._end_clients, record, deletion.found)
            if not gone:
                logger.warning(
                    "the registrations labelled %s, which a dead run left behind (%s), cannot be deleted yet: %s",
                    entry.label,
                    ", ".join(deletion.left) or "unknown",
                    deletion.reason,
                )
                return False
            if settled:
                record.remove()
                return True
            await asyncio.sleep(LOOK_AGAIN)

    def _end_clients(self, record: Record, tunnel_ids: Iterable[str] = ()) -> None:
        """Kill the clients on record or of these tunnels, and remove their config files. Blocks."""
        entry = record.entry
        # A client that was started just before its owner died is on no record, but its command line names its tunnel.
        files = {str(Path(entry.config_dir) / f"{name}.toml") for name in tunnel_ids if Path(name).name == name}
        if entry.config_file:
            files.add(entry.config_file)
        if record.is_here:
            if entry.client is not None:
                self._killed += processes.kill(entry.client.pid, entry.client.mark)
            for file in files:
                for pid, mark in processes.with_last_arguments("-c", file):
                    self._killed += processes.kill(pid, mark)
        for file in files:
            Path(file).unlink(missing_ok=True)


@contextlib.contextmanager
def _only_reaper(record: Record) -> Iterator[bool]:
    """Whether this is the only one who sees to that record now."""
    from filelock import FileLock, Timeout

    path = record.path.with_suffix(".lock")
    lock = FileLock(path, timeout=0, mode=0o600)
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)
        lock.release()
