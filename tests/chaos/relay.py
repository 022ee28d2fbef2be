"""The demo's SSH relay as a process of its own, told to fail in ways that the demo has no use for.

As a program it prints `{"port": ..., "known_hosts": ...}`, then carries out each line of stdin, a JSON list of a method
of `SshRelay` and its arguments, and answers each with a line: what the method returned. It ends at the end of stdin.
"""

import asyncio
import contextlib
import inspect
import json
import logging
import os
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from interception.demo.modules import start_module
from interception.demo.relay import SshRelay
from tunnel.teardown import run_to_end

ANSWER_TIMEOUT = 60.0
"""Seconds for the process to start, or to answer: only to end a hang."""


class Relay:
    """A relay in a process of its own, so that it can be stopped like one whose network has gone."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.known_hosts = folder / f"{name}.known_hosts"
        self.port = 0
        self.stopped = False
        self._folder = folder
        self._asking = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        self._process = await start_module("tests.chaos.relay")
        try:
            ready = await self._read()
        except BaseException:
            await run_to_end(self._end())
            raise
        self.port = ready["port"]
        self.known_hosts.write_text(ready["known_hosts"] + "\n")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await run_to_end(self._end())

    async def account(self, username: str) -> Path:
        """A new account's private key, in a file."""
        path = self._folder / f"{username}.key"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(await self.do("add_account", username))
        return path

    async def do(self, method: str, *arguments: Any) -> Any:
        """Have a method of the `SshRelay` called. A stopped one answers once it goes on."""
        assert self._process is not None
        assert self._process.stdin is not None
        async with self._asking:
            self._process.stdin.write(json.dumps([method, *arguments]).encode() + b"\n")
            return await self._read()

    def stop(self) -> None:
        """SIGSTOP: its connections stay open and nothing moves."""
        self._send(signal.SIGSTOP)
        self.stopped = True

    def go_on(self) -> None:
        self._send(signal.SIGCONT)
        self.stopped = False

    def _send(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def _read(self) -> Any:
        assert self._process is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(ANSWER_TIMEOUT):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has ended")
        return json.loads(line)

    async def _end(self) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        if process.returncode is None:
            self.go_on()
        process.stdin.close()
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        await process.stdout.read()  # to its end, for only then does asyncio close the pipe


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    async with SshRelay() as relay:
        commands = asyncio.StreamReader()
        stdin, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
        try:
            _say({"port": relay.port, "known_hosts": relay.known_hosts_line})
            while line := await commands.readline():
                method, *arguments = json.loads(line)
                result = getattr(relay, method)(*arguments)
                _say(await result if inspect.isawaitable(result) else result)
        finally:
            stdin.close()


def _say(answer: Any) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    # A cut connection is written to until its forwards have noticed; asyncio would complain of that on our terminal.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        asyncio.run(_serve())
