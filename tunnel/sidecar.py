"""One process beside ours, while we have Prime tunnels: should we be killed, it ends what they leave behind.

`_sidecar.py` is what runs in it. It learns what there is to end from the records on disk (`tunnel.record`), and the
key by its pipe.
"""

import asyncio
import atexit
import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tunnel.account import Account
from tunnel.reaper import Reaper

logger = logging.getLogger("tunnel")

PROGRAM = Path(__file__).with_name("_sidecar.py")

BUDGET = 120.0
"""Seconds for the API to accept what the sidecar asks of it; what is left then, the next tunnel that starts ends."""

PAUSE = 5.0
"""Seconds between its rounds."""

EXIT_TIMEOUT = 2.0


class Sidecar:
    """This process' own. It starts with the first tunnel and ends with the last one; both count by `hold`."""

    def __init__(self) -> None:
        self._users = 0
        self._messages: dict[str, None] = {}
        self._pipe: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Of the one that runs, if one does."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def hold(self, account: Account, directory: Path, deletes_per_minute: int | None) -> None:
        """Have the sidecar see to that account's records. Never fails: where it cannot be started, that is said."""
        message = json.dumps(
            {
                "base_url": account.base_url,
                "api_key": account.api_key,
                "directory": str(directory),
                "deletes_per_minute": deletes_per_minute,
                "path": [os.path.abspath(part) for part in sys.path],
            }
        )
        with self._lock:
            self._users += 1
            new = message not in self._messages
            self._messages.setdefault(message)
            try:
                if self.pid is None:
                    self._start()
                    self._tell(self._messages)
                elif new:
                    self._tell([message])
            except OSError as error:
                logger.warning(
                    "no sidecar (%s): should this process be killed, only the next one ends what it leaves behind",
                    error,
                )

    async def release(self) -> None:
        """A tunnel that `hold` was called for has ended. Call it inside `run_to_end`."""
        with self._lock:
            self._users -= 1
            if self._users > 0:
                return
            process = self._process
            with contextlib.suppress(OSError):  # it was killed
                self._tell(["bye"])
            self._close()
        if process is None:
            return
        deadline = time.monotonic() + EXIT_TIMEOUT
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
            await asyncio.sleep(0.005)

    def _start(self) -> None:
        self._close()
        theirs, self._pipe = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-IS", str(PROGRAM), str(os.getpid())],
                stdin=theirs,
                stdout=subprocess.DEVNULL,  # else it would hold our caller's pipe open
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        finally:
            os.close(theirs)

    def _tell(self, lines: Iterable[str]) -> None:
        if self._pipe is not None:
            os.write(self._pipe, "".join(f"{line}\n" for line in lines).encode())

    def _close(self) -> None:
        pipe, self._pipe, self._process = self._pipe, None, None
        if pipe is not None:
            os.close(pipe)
        if self._users == 0:
            self._messages = {}

    def disown(self) -> None:
        """At the end of this process it looks after what is left, and nobody waits for it."""
        if self._process is not None:
            self._process.returncode = 0  # else its object would complain

    def after_fork(self) -> None:
        """It is the parent's; a child that kept the pipe would keep it waiting."""
        self.disown()
        if self._pipe is not None:
            os.close(self._pipe)
        self._users, self._messages, self._pipe, self._process = 0, {}, None, None
        self._lock = threading.Lock()


sidecar = Sidecar()
atexit.register(sidecar.disown)
os.register_at_fork(after_in_child=sidecar.after_fork)


def reap(messages: Iterable[Mapping[str, Any]]) -> None:
    """What the sidecar does when its owner has died. `messages`: those of `Sidecar.hold`."""
    os.environ.pop("PRIME_CONTEXT", None)  # the account is told, and the profile may be gone
    asyncio.run(_reap(messages))


async def _reap(messages: Iterable[Mapping[str, Any]]) -> None:
    await asyncio.gather(*(_reap_account(message) for message in messages))


async def _reap_account(message: Mapping[str, Any]) -> None:
    account = Account(message["base_url"], message["api_key"])
    deadline = time.monotonic() + BUDGET
    while True:
        round_ = Reaper(account, Path(message["directory"]), message["deletes_per_minute"])
        await round_.run()
        if round_.left == 0 or time.monotonic() > deadline:
            return
        await asyncio.sleep(PAUSE)
