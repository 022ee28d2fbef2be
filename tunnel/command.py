"""Any client program as a tunnel: cloudflared, ngrok, frpc, ssh, or one of your own."""

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from tunnel.base import Tunnel
from tunnel.config import CommandTunnelConfig, _public_url
from tunnel.errors import TunnelError, TunnelGoneError, UrlChangedError
from tunnel.evidence import Outcome
from tunnel.keepalive import TunnelClient
from tunnel.probe import BAD_GATEWAYS, classify, describe, probe
from tunnel.teardown import cancel_and_wait, run_to_end

logger = logging.getLogger("tunnel")

WATCHDOG = Path(__file__).with_name("_watchdog.py")
TERM_GRACE = 5.0  # seconds from SIGTERM to SIGKILL
HANG_GRACE = 5.0  # seconds a watchdog may take beyond that (it is stopped, or its program hangs in the kernel)
DRAIN = 1.0  # seconds for the last words of a program that ended: what left its group may hold the pipe open
KEPT_LINES = 50
KEPT_WIDTH = 2_000
LINE_LIMIT = 8_192  # bytes of a line that are looked at: patterns may take a time that grows by the square of it
UNENDED = 1.0  # seconds of silence after which a line without an end counts: a prompt, or a URL printed bare
LOOK_SPACING = 0.1, 1.0  # seconds between two looks at a URL that does not lead here yet: at first, and at most
SECRET_LENGTH = 8  # shorter values of the environment are words like "info", not secrets
ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


NOT_YET = frozenset({Outcome.REFUSED, Outcome.NO_ANSWER, Outcome.NO_ROUTE, Outcome.HALF_OPEN, Outcome.WRONG})
"""What a URL shows that does not lead here, beside the gateway's own faults."""


class CommandTunnel(Tunnel):
    """A tunnel carried by any client program that makes `127.0.0.1:{port}` public.

    The program runs in a process group of its own, which ends as a whole: when the exposure ends, when it is
    restarted, when it exits by itself, and also when this process is killed. Its output is read all the time; the
    last 50 lines are quoted in errors, with the values of `config.env` (8 characters and more) masked.

    It is up when it has printed what `ready_pattern` finds. Without one, when its URL leads to the local service: a
    program shows its URL, if it is not known beforehand, before that serves.

    `expose` raises `TunnelError`, quoting the output, if the program cannot be started, exits, is not up within
    `config.start_timeout` seconds or prints what `gone_pattern` finds. In a restart that last one, and another URL
    than before, mean gone. Printed while the tunnel serves it only brings a probe forward: a tunnel that is said to be
    deleted and still serves stays in use.
    """

    def __init__(self, config: CommandTunnelConfig) -> None:
        super().__init__(config.policy, config.mark)
        self.config = config
        self._client: _Client | None = None

    async def _connect(self, port: int) -> TunnelClient:
        client = _Client(self.config, port, self.report)

        async def look(url: str) -> str | None:
            return await self._amiss(url, f"http://{self.local_host}:{port}")

        try:
            await client.start(look if self.config.ready_pattern is None else None)
        except TunnelGoneError as error:
            raise TunnelError(str(error)) from None  # nothing served yet that could be gone: a new try may help
        self._client = client
        return client

    async def _amiss(self, url: str, local: str) -> str | None:
        """Why the URL does not lead to the local service yet. None: it does, or cannot be judged from here."""
        timeout = self.policy.probe_timeout
        path = self.any_path if self.health_path is None else self.health_path
        outside, inside = await asyncio.gather(
            probe(url + path, timeout=timeout, through_proxy=True),
            probe(local + path, timeout=timeout, through_proxy=False),
        )
        if inside.status is None:
            return None  # a service that is down answers through no tunnel
        outcome = classify(outside, inside, self.policy.slow_404)
        if outcome in (Outcome.PATH, Outcome.NO_NAME):
            logger.warning("%s cannot be reached from here (%s)", url, outside.detail)
        ill = outcome is Outcome.BAD_GATEWAY and outside.status in BAD_GATEWAYS
        return describe(outcome, outside) if ill or outcome in NOT_YET else None

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.stop()


_Look = Callable[[str], Awaitable[str | None]]
"""Says what is amiss with a URL, or None."""


class _Client:
    """The program as `keep_serving` drives it: one run after the other, under one URL."""

    def __init__(self, config: CommandTunnelConfig, port: int, report: Callable[[str], None]) -> None:
        self.url: str | None = None
        self._config = config
        self._port = port
        self._report = report
        self._program: _Program | None = None

    @property
    def program(self) -> str:
        return self._config.command[0]

    @property
    def is_running(self) -> bool:
        return self._program is not None and self._program.is_running

    async def start(self, look: _Look | None = None) -> str:
        """Run the program until it is ready, and `look` finds nothing amiss with its URL; if that fails or is cancelled
        nothing of it is left."""
        program = _Program(self._config, self._port, self._said_gone)
        try:
            await run_to_end(program.start())
            url = await program.ready(look)
            if self.url is not None and self.url != url:
                raise UrlChangedError(self.url, url)
        except BaseException:
            await run_to_end(program.stop())
            raise
        self._program = program
        self.url = url
        return url

    async def restart(self) -> str:
        old = self._program
        if old is not None and not old.is_running:
            logger.warning("%s: %s", self.url, old.account)
        await self.stop()
        return await self.start()

    async def stop(self) -> None:
        # Forgotten first, so that nothing it says while it ends counts for its successor.
        program, self._program = self._program, None
        if program is not None:
            await run_to_end(program.stop())

    def _said_gone(self, program: "_Program", line: str) -> None:
        if program is self._program:
            self._report(f"the tunnel program says {line!r}")


class _Program:
    """One run of the program, from its start to the end of its whole process group."""

    def __init__(self, config: CommandTunnelConfig, port: int, said_gone: Callable[["_Program", str], None]) -> None:
        self._config = config
        self._port = port
        self._said_gone = said_gone
        self._process: asyncio.subprocess.Process | None = None
        self._output = _Output(self._heed, config.env.values())
        self._reports = _Reports(self._decide)
        self._url = config.url
        self._ready_seen = config.ready_pattern is None
        self._gone_line: str | None = None
        self._bad_url: str | None = None
        self._decided = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._amiss = ""  # what the last look found
        self._serving = False

    @property
    def is_running(self) -> bool:
        return self._process is not None and not self._reports.ended

    @property
    def account(self) -> str:
        """What became of it, and its last words."""
        return self._quote(self._reports.end)

    async def start(self) -> None:
        """Start the program. Not to be cancelled; after a failure too it must be stopped."""
        loop = asyncio.get_running_loop()
        command = [argument.replace("{port}", str(self._port)) for argument in self._config.command]
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                await loop.create_unix_connection(lambda: self._reports, sock=ours)
                read_end, write_end = os.pipe()
                with os.fdopen(write_end, "wb", 0) as output:
                    # A pipe of our own: one of asyncio's, held open by what left the group, would keep wait() waiting.
                    await loop.connect_read_pipe(lambda: self._output, os.fdopen(read_end, "rb", 0))
                    self._process = await asyncio.create_subprocess_exec(
                        sys.executable,
                        "-IS",
                        str(WATCHDOG),
                        str(os.getpid()),
                        str(TERM_GRACE),
                        *command,
                        stdin=theirs.fileno(),
                        stdout=output,
                        stderr=output,
                        env={**os.environ, **self._config.env},
                        start_new_session=True,
                    )
        except (OSError, ValueError) as error:  # a NUL in an argument, no descriptors left
            raise TunnelError(f"the tunnel program {self._name!r} cannot be started: {error}") from None

    async def ready(self, look: _Look | None) -> str:
        """The URL, once the program has said all that it must, and it leads here as far as `look` can tell."""
        timeout = self._config.start_timeout
        try:
            async with asyncio.timeout(timeout):
                await self._decided.wait()
                if look is not None and self._url is not None and not self._over:
                    await self._reached(look, self._url)
        except TimeoutError:
            if self._amiss:
                wrong = (
                    f"runs, but {self._url} does not lead here after {timeout:g} s ({self._amiss}); if it does for all "
                    "but this host, give a ready_pattern"
                )
            else:
                wrong = f"{'showed no URL' if self._url is None else 'was not ready'} within {timeout:g} s"
                if self._output.is_empty:
                    wrong += " (some hold back what they print where it is no terminal: run it by `stdbuf -oL`?)"
            raise TunnelError(self._quote(wrong)) from None
        if self._reports.ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN):
                    await self._output.closed.wait()
        if self._reports.failure is not None:
            raise TunnelError(f"the tunnel program {self._name!r} cannot be started: {self._reports.failure}")
        if self._gone_line is not None:
            raise TunnelGoneError(self._quote(f"says that its tunnel is gone: {self._gone_line!r}"))
        if self._bad_url is not None:
            raise TunnelError(self._quote(f"printed what url_pattern takes for its URL: {self._bad_url}"))
        if self._reports.ended or self._url is None:
            hint = " (it must stay in the foreground)" if self._reports.status == 0 else ""
            raise TunnelError(self._quote(f"{self._reports.end} before it was ready{hint}"))
        self._serving = True
        return self._url

    async def stop(self) -> None:
        """End the whole process group. Not to be cancelled."""
        process = self._process
        if process is not None:
            self._reports.shut_down()
            try:
                async with asyncio.timeout(TERM_GRACE + HANG_GRACE):
                    await self._reports.closed.wait()
                hangs = False
            except TimeoutError:
                hangs = True
            if hangs or self._reports.status is None:
                logger.warning(
                    "the watchdog of %r %s; ending its group", self._name, "hangs" if hangs else "was killed"
                )
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        await self._reports.close()
        await self._output.close()

    @property
    def _name(self) -> str:
        return self._config.command[0]  # the arguments may hold tokens

    @property
    def _over(self) -> bool:
        return self._reports.ended or self._gone_line is not None or self._bad_url is not None

    async def _reached(self, look: _Look, url: str) -> None:
        """Returns when `look` finds nothing amiss with the URL any more, or the start has failed."""

        async def until_it_is() -> None:
            spacing, most = LOOK_SPACING
            while amiss := await look(url):
                self._amiss = amiss
                await asyncio.sleep(spacing)
                spacing = min(most, 2 * spacing)

        self._looking = asyncio.create_task(until_it_is(), name=f"reach {url}")
        try:
            await asyncio.wait([self._looking])
        finally:
            await run_to_end(cancel_and_wait(self._looking))

    def _quote(self, what: str) -> str:
        return f"the tunnel program {self._name!r} {what}; {self._output.quoted()}"

    def _heed(self, line: str) -> None:
        """A line of output, as it came."""
        config = self._config
        if config.gone_pattern is not None and self._gone_line is None and re.search(config.gone_pattern, line):
            self._gone_line = self._output.presentable(line)
            if self._serving:
                self._said_gone(self, self._gone_line)
        if self._serving:
            return
        if self._url is None and config.url_pattern is not None and (match := re.search(config.url_pattern, line)):
            found = next(filter(None, match.groups()), match[0])
            try:
                self._url = _public_url(found)
            except ValueError as error:
                self._bad_url = self._output.presentable(f"{found!r} is {error}")
        if config.ready_pattern is not None and re.search(config.ready_pattern, line):
            self._ready_seen = True
        self._decide()

    def _decide(self) -> None:
        """Wake `ready` as soon as it can say how the start went."""
        if self._over and self._looking is not None:
            self._looking.cancel()
        if self._over or (self._reports.started and self._url is not None and self._ready_seen):
            self._decided.set()


class _Stream(asyncio.Protocol):
    """The end of a pipe or socket that can be closed and waited for."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set()

    async def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
            await self.closed.wait()


class _Reports(_Stream):
    """What the watchdog says of its program. That the socket closes means that the watchdog has ended."""

    def __init__(self, changed: Callable[[], None]) -> None:
        super().__init__()
        self.started = False
        self.failure: str | None = None
        self.status: int | None = None
        self._changed = changed

    @property
    def ended(self) -> bool:
        return self.status is not None or self.closed.is_set()

    @property
    def end(self) -> str:
        if self.status is None:
            return "ended together with its watchdog"
        if self.status >= 0:
            return f"exited with status {self.status}"
        try:
            return f"was ended by {signal.Signals(-self.status).name}"
        except ValueError:  # a real-time signal
            return f"was ended by signal {-self.status}"

    def data_received(self, data: bytes) -> None:
        for message in data.splitlines():  # each is one small write, which a local socket does not cut
            word, _, number = message.decode().partition(" ")
            if word == "started":
                self.started = True
            elif word == "failed":
                self.failure = os.strerror(int(number))
            elif word == "exited":
                self.status = os.waitstatus_to_exitcode(int(number))
        self._changed()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._changed()

    def shut_down(self) -> None:
        """Have the watchdog end its program."""
        if isinstance(self._transport, asyncio.WriteTransport):
            self._transport.write_eof()


class _Output(_Stream):
    """The program's output in lines: read whatever happens, without colours, the last ones kept without secrets."""

    def __init__(self, heed: Callable[[str], None], secrets: Iterable[str]) -> None:
        super().__init__()
        self._heed = heed
        # Line by line, as they would be printed; the longest first, for one may contain another.
        parts = {part for value in secrets for part in value.splitlines() if len(part) >= SECRET_LENGTH}
        self._secrets = sorted(parts, key=len, reverse=True)
        self._kept: deque[str] = deque(maxlen=KEPT_LINES)
        self._rest = b""
        self._silence: asyncio.TimerHandle | None = None

    @property
    def is_empty(self) -> bool:
        return not (self._kept or self._rest)

    def data_received(self, data: bytes) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
        *lines, rest = re.split(rb"[\r\n]+", self._rest + data)
        self._rest = rest[:LINE_LIMIT]
        for raw in lines:
            if line := self._clean(raw[:LINE_LIMIT]):
                self._kept.append(self.presentable(line))
                self._heed(line)
        if self._rest:
            self._silence = asyncio.get_running_loop().call_later(UNENDED, self._heed_rest)

    def _heed_rest(self) -> None:
        if line := self._clean(self._rest):
            self._heed(line)

    def connection_lost(self, error: Exception | None) -> None:
        self.data_received(b"\n")  # a last line without an end
        super().connection_lost(error)

    def presentable(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text if len(text) <= KEPT_WIDTH else text[: KEPT_WIDTH - 1] + "…"

    def quoted(self) -> str:
        lines = [*self._kept]
        if rest := self._clean(self._rest):  # a question that waits for its answer has no line end
            lines.append(self.presentable(rest))
        return "\n  ".join(["its output:", *lines[-KEPT_LINES:]]) if lines else "it printed nothing"

    @staticmethod
    def _clean(raw: bytes) -> str:
        return ANSI.sub("", raw.decode(errors="replace")).rstrip()
