"""The demo's SSH relay as a process of its own, so that it does not share our event loop's fate."""

import asyncio
import contextlib
import itertools
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import asyncssh

from interception.demo.modules import start_module
from tunnel.teardown import run_to_end

START_TIMEOUT = 30.0  # seconds; an interpreter and its imports on a busy machine
ANSWER_TIMEOUT = 10.0
END_TIMEOUT = 5.0


class RelayProcess:
    """Starts `python -m interception.demo.relay`, talks to it, and ends it. It dies with us, however we die.

    :param folder: where the known_hosts file and the accounts' private keys are written; it is the caller's to remove.

    All methods raise `RuntimeError` if the relay does not run, does not answer, or refuses.
    """

    def __init__(self, folder: Path) -> None:
        self.known_hosts = folder / "known_hosts"
        """A known_hosts file that vouches for the relay."""
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None
        self._port = 0
        self._ids = itertools.count(1)
        self._asking = asyncio.Lock()

    @property
    def port(self) -> int:
        """The SSH port on 127.0.0.1, once started."""
        return self._port

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def __aenter__(self) -> Self:
        if self._process is not None:
            raise RuntimeError("the relay has been started already")
        try:
            # Not cancellable half-way: a process whose start is cancelled would be ours without our knowing it.
            await run_to_end(self._start())
        except BaseException:
            await run_to_end(self._end())
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await run_to_end(self._end())

    async def account(self, username: str) -> Path:
        """Let `username` in with a new key; returns the file with the private key, which only we can read."""
        key = asyncssh.generate_private_key("ssh-ed25519")
        path = self._folder / f"{username}.key"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(key.export_private_key())
        await self._ask(do="account", username=username, public_key=key.export_public_key().decode())
        return path

    async def cut(self, username: str) -> None:
        """Drop the account's connections without a word."""
        await self._ask(do="cut", username=username)

    async def revoke(self, username: str) -> None:
        """Refuse the account's key from now on, and cut it."""
        await self._ask(do="revoke", username=username)

    # -- parts ---------------------------------------------------------------------------------

    async def _start(self) -> None:
        self._process = await start_module("interception.demo.relay")
        ready = await self._read(START_TIMEOUT)
        self._port = ready["port"]
        self.known_hosts.write_text(ready["known_hosts"] + "\n")

    async def _ask(self, **command: str) -> None:
        async with self._asking:
            process = self._running()
            assert process.stdin is not None
            ident = next(self._ids)
            process.stdin.write(json.dumps({"id": ident, **command}).encode() + b"\n")
            with contextlib.suppress(ConnectionError):  # it has ended, which the answer will show
                await process.stdin.drain()
            # An answer to a command whose caller was cancelled may be there first.
            while (answer := await self._read(ANSWER_TIMEOUT))["id"] != ident:
                pass
        if not answer["ok"]:
            raise RuntimeError(f"the relay refused {command['do']}: {answer['error']}")

    async def _read(self, timeout: float) -> dict[str, Any]:
        process = self._running()
        assert process.stdout is not None
        try:
            async with asyncio.timeout(timeout):
                line = await process.stdout.readline()
        except TimeoutError:
            raise RuntimeError(f"the relay did not answer within {timeout:g} s") from None
        if not line:
            raise RuntimeError("the relay has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError("the relay is not started")
        return self._process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(END_TIMEOUT):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        await process.stdout.read()  # to its end, for only then does asyncio close the pipe
