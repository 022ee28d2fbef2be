"""Running one agent program with its model calls caught: what `interception run` does."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from interception.base import Slot
from interception.config import InterceptionServerConfig
from interception.echo import EchoModel
from interception.programs import launch
from interception.server import InterceptionServer
from interception.session import RolloutSession, Upstream
from interception.trace import Turn
from tunnel import TunnelConfig
from tunnel.teardown import run_to_end

END_TIMEOUT = 10.0
"""Seconds that a program which is told to end gets to do so by itself."""

NO_CALLS = 3
"""Exit status where the program ended with 0 but was never seen."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class CannotRunError(Exception):
    """The command cannot be started; `status` is what a shell would end with: 127 not found, 126 not executable."""

    def __init__(self, command: str, error: OSError) -> None:
        super().__init__(f"{command} cannot be run: {error.strerror or error}")
        self.status = 127 if isinstance(error, FileNotFoundError) else 126


@asynccontextmanager
async def endpoint(upstream: Upstream | None) -> AsyncIterator[Upstream]:
    """The upstream, or an echo model where none is given."""
    if upstream is not None:
        yield upstream
        return
    async with EchoModel() as echo:
        yield Upstream(base_url=echo.base_url)


async def run(
    command: Sequence[str],
    *,
    upstream: Upstream | None = None,
    model: str | None = None,
    tunnel: TunnelConfig | None = None,
    hidden: Iterable[str] = (),
    on_turn: Callable[[Turn], None] | None = None,
    on_ready: Callable[[Slot, RolloutSession], None] | None = None,
    on_server: Callable[[InterceptionServer], object] = lambda server: None,
) -> int:
    """Run `command` with the slot's variables in its environment; its exit status, as a shell tells it (128 + n for a
    signal). Variables of ours named in `hidden` are kept from it.

    Signals that would end us are passed on to the command, which is killed if it has not ended `END_TIMEOUT` seconds
    later. Main thread only. Raises `CannotRunError`, and `TunnelError` if its tunnel cannot be made or is lost; then
    the command is ended.
    """
    config = InterceptionServerConfig(tunnel=tunnel) if tunnel is not None else InterceptionServerConfig()
    with _Signals() as signals:
        try:
            async with (
                endpoint(upstream) as target,
                InterceptionServer(config, requires_tunnel=tunnel is not None) as server,
            ):
                on_server(server)
                session = RolloutSession(target, model=model)
                session.on_turn = on_turn
                async with server.acquire(session) as slot:
                    if on_ready is not None:
                        on_ready(slot, session)
                    arguments, env = launch(command, slot.env(), os.environ, hidden=hidden)
                    return await session.guard(_program(arguments, env, signals, name=command[0]))
        except asyncio.CancelledError:
            if signals.before_start is None:
                raise
            return 128 + signals.before_start


async def _program(command: Sequence[str], env: Mapping[str, str], signals: "_Signals", *, name: str) -> int:
    # On a terminal the program must stay in its foreground group, to be able to read from it. Anywhere else it gets a
    # group of its own, so that what it has started itself can be ended with it.
    grouped = not _in_foreground()
    try:
        process = await asyncio.create_subprocess_exec(*command, env=env, process_group=0 if grouped else None)
    except OSError as error:
        raise CannotRunError(name, error) from None
    program = signals.program = _Program(process, grouped=grouped)
    try:
        status = await process.wait()
    finally:
        await run_to_end(program.close())
    return status if status >= 0 else 128 - status


class _Program:
    """The running command."""

    def __init__(self, process: asyncio.subprocess.Process, *, grouped: bool) -> None:
        self._process = process
        self._grouped = grouped
        self._patience: asyncio.TimerHandle | None = None

    def end(self, number: int) -> None:
        """Tell it to end by this signal."""
        if self._process.returncode is not None or (number == signal.SIGINT and not self._grouped):
            return  # Ctrl-C has come to it from the terminal; how it answers is its own affair
        self._send(number)
        if self._patience is None:
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(END_TIMEOUT, self._send, signal.SIGKILL)

    async def close(self) -> None:
        """Returns once it has ended, and with it what it has started if it did not end by itself."""
        self.end(signal.SIGTERM)
        await self._process.wait()
        if self._patience is not None:
            self._patience.cancel()
            if self._grouped:
                self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._grouped:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)


class _Signals:
    """While it is entered, a signal that would end us ends the program instead, or our start if there is none yet."""

    def __init__(self) -> None:
        self.program: _Program | None = None
        self.before_start: int | None = None

    def __enter__(self) -> Self:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        # One that we were started to ignore (nohup, a shell's background job) stays ignored, by the program too.
        self._handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        for number in self._handled:
            self._loop.add_signal_handler(number, self._received, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in self._handled:
            self._loop.remove_signal_handler(number)

    def _received(self, number: int) -> None:
        if self.program is not None:
            self.program.end(number)
        elif self.before_start is None:
            self.before_start = number
            assert self._task is not None
            self._task.cancel()


def _in_foreground() -> bool:
    """Whether a terminal's Ctrl-C comes to us, and so to the programs of our group."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
