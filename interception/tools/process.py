"""A tool server in a process of its own: it shares neither our event loop nor our fate, but it ends with us.

One socket pair carries what the two say to each other, a JSON object a line. Ours: first what to serve and where, then
`admit`, `dismiss` and `stop`. Its: `port` or `failed`, `admitted`, and of each request that it arrived and how many are
in flight. The end of that socket, which comes also when we are killed, ends the process; a watchdog sees to it that
nothing is left of it and of what it has started.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from interception.tools.host import ToolHost, as_mcp_server, load
from tunnel import PROBE_HEADER, Entrance, TunnelError
from tunnel.command import WATCHDOG
from tunnel.teardown import run_to_end

logger = logging.getLogger("interception")

ROOT = Path(__file__).parents[2]
"""Where this very package lies."""

START_TIMEOUT = 60.0
"""Seconds for an interpreter, the tools' own imports and what their server sets up."""

ANSWER_TIMEOUT = 30.0
"""Seconds for a word from a process that serves; its tools may hold its interpreter for a while."""

STOP_TIMEOUT = 5.0
"""Seconds to end by itself when it is told to."""

KILL_GRACE = 0.7
"""Seconds from SIGTERM to SIGKILL, after that or when we were killed."""

ARRIVAL_HEADERS = ("Host", "X-Forwarded-Host", PROBE_HEADER)

ARRIVAL_TOLD = 1000
"""Characters of each of those, and of the path: more than any that means something."""

LINE_LIMIT = 2**20

TOLD = 2000
"""Characters that the launcher is told of why the tools failed; the process's log has the rest."""


class ToolProcess:
    """The process, from here."""

    def __init__(
        self, spec: str, entrance: Entrance, identity: str, grace: float | None, on_end: Callable[[str], None]
    ) -> None:
        self._spec = spec
        self._grace = grace
        self._entrance = entrance
        self._identity = identity
        self._on_end = on_end
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._watchdog: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._status: asyncio.Task[str] | None = None
        self._serves = False
        self._stopping = False
        self._in_flight = 0
        entrance.in_flight = lambda: self._in_flight

    @property
    def pid(self) -> int | None:
        """Of its watchdog, which leads its process group."""
        return self._process.pid if self._process is not None else None

    async def start(self, host: str, port: int) -> int:
        """The port it listens on. `TunnelError` if it cannot; then it is to be stopped all the same."""
        await run_to_end(self._spawn())
        answer = await self._ask(
            START_TIMEOUT,
            serve=self._spec,
            host=host,
            port=port,
            prefix=self._entrance.path_prefix,
            identity=self._identity,
            grace=self._grace,
            path=sys.path,
        )
        self._serves = True
        return int(answer["port"])

    async def admit(self, secret: str, state_url: str, state_secret: str) -> None:
        await self._ask(ANSWER_TIMEOUT, admit=secret, state_url=state_url, state_secret=state_secret)

    def dismiss(self, secret: str) -> None:
        self._say(dismiss=secret)

    async def stop(self) -> None:
        self._stopping = True
        if self._process is not None and self._status is not None and self._watchdog is not None:
            if self._serves:  # else it is busy with imports, and has nothing to put in order
                self._say(stop=True)
                await asyncio.wait([self._status], timeout=STOP_TIMEOUT)
            self._watchdog.write_eof()
            try:
                async with asyncio.timeout(STOP_TIMEOUT):
                    await self._process.wait()
            except TimeoutError:
                logger.warning("the watchdog of the tool server hangs; ending its group")
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                await self._process.wait()
        for writer in (self._writer, self._watchdog):
            if writer is not None:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()
        if listening := [task for task in (self._listening, self._status) if task is not None]:
            await asyncio.wait(listening)

    # -- parts ---------------------------------------------------------------------------------

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        watch, watched = socket.socketpair()
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with theirs, watched:
            try:
                reader, self._writer = await asyncio.open_connection(sock=ours, limit=LINE_LIMIT)
                reports, self._watchdog = await asyncio.open_connection(sock=watch)
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-IS", str(WATCHDOG), str(os.getpid()), str(KILL_GRACE)),
                    *(sys.executable, "-P", "-m", "interception.tools", str(theirs.fileno())),
                    stdin=watched.fileno(),
                    pass_fds=(theirs.fileno(),),
                    env={**os.environ, "PYTHONPATH": path},
                    start_new_session=True,  # Ctrl-C is for us, who then end it in our own order
                )
            except OSError as error:
                raise TunnelError(f"the tool server's process cannot be started: {error}") from error
        self._status = asyncio.create_task(self._watch(reports), name="watch the tool server's process")
        self._listening = asyncio.create_task(self._listen(reader), name="listen to the tool server's process")

    async def _watch(self, reports: asyncio.StreamReader) -> str:
        """How it ended."""
        ended = "was ended together with its watchdog"
        with contextlib.suppress(ConnectionError):
            while line := await reports.readline():
                word, _, number = line.decode().strip().partition(" ")
                if word == "failed":
                    ended = f"cannot be started: {os.strerror(int(number))}"
                    break
                if word == "exited":
                    code = os.waitstatus_to_exitcode(int(number))
                    ended = f"exited with status {code}" if code >= 0 else f"was ended by signal {-code}"
                    break
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(TunnelError(f"the tool server's process {ended}"))
        if not self._stopping:
            logger.error("the tool server's process %s", ended)
            self._on_end(ended)
        return ended

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                said = json.loads(line)
                if "arrived" in said:
                    self._entrance.note_arrival(said["arrived"], said["path"])
                elif "in_flight" in said:
                    self._in_flight = said["in_flight"]
                elif (answer := self._answers.get(said["id"])) is not None and not answer.done():
                    if "failed" in said:
                        answer.set_exception(TunnelError(f"the tool server {self._spec} failed: {said['failed']}"))
                    else:
                        answer.set_result(said)

    async def _ask(self, timeout: float, **what: Any) -> dict[str, Any]:
        ident = next(self._ids)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[ident] = answer
        try:
            if self._status is None or self._status.done():
                raise TunnelError("the tool server's process does not run")
            self._say(id=ident, **what)
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            raise TunnelError(f"the tool server's process gave no answer within {timeout:g} s") from None
        finally:
            del self._answers[ident]
            if answer.done() and not answer.cancelled():
                answer.exception()

    def _say(self, **what: Any) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(what).encode() + b"\n")


# -- in the process ----------------------------------------------------------------------------


class _Entrance:
    """Tells the launcher what arrives."""

    def __init__(self, path_prefix: str, say: Callable[..., None]) -> None:
        self.path_prefix = path_prefix
        self.in_flight: Callable[[], int] = lambda: 0
        self._say = say

    def note_arrival(self, headers: Mapping[str, str], path: str = "") -> None:
        # Strangers are told of, too: what they send must not be longer than a line may be.
        told = {name: headers[name][:ARRIVAL_TOLD] for name in ARRIVAL_HEADERS if name in headers}
        self._say(arrived=told, path=path[:ARRIVAL_TOLD])


async def serve(control: int) -> None:
    """What the process does, with its end of the socket pair."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=control), limit=LINE_LIMIT)
    try:
        await _serve(reader, writer)
    finally:
        writer.close()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    me = asyncio.current_task()
    assert me is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)

    def say(**what: Any) -> None:
        if not writer.is_closing():
            writer.write(json.dumps(what).encode() + b"\n")

    line = await reader.readline()
    if not line or "stop" in (order := json.loads(line)):
        return  # its start was cancelled
    sys.path[:] = order["path"]
    entrance = _Entrance(order["prefix"], say)
    host: ToolHost | None = None
    try:
        try:
            tools = as_mcp_server(load(order["serve"]), order["serve"])
            host = ToolHost(
                tools,
                entrance,
                identity=order["identity"],
                grace=order["grace"],
                on_count=lambda count: say(in_flight=count),
            )
            say(id=order["id"], port=await host.start(order["host"], order["port"]))
        except Exception as error:  # whatever the tools' module raises, the launcher is to hear it
            logger.exception("the tool server %s could not be started", order["serve"])
            say(id=order["id"], failed=f"{type(error).__name__}: {error}"[:TOLD])
            await writer.drain()
            return
        while line := await reader.readline():
            order = json.loads(line)
            if "admit" in order:
                await host.admit(order["admit"], order["state_url"], order["state_secret"])
                say(id=order["id"], admitted=True)
            elif "dismiss" in order:
                host.dismiss(order["dismiss"])
            else:
                break
    finally:
        if host is not None:
            await run_to_end(host.stop())  # told to by the launcher's end, and by SIGTERM at once after it
