"""The parent's end of the demo's harness process."""

import asyncio
from types import TracebackType
from typing import Any, Self

import orjson

from interception.base import Slot
from interception.demo.modules import start_module
from tunnel.teardown import cancel_and_wait, run_to_end

ENDED_EARLY = "the demo's harness process ended early"

END_TIMEOUT = 3.0
"""Seconds for the process to end by itself."""


class Play:
    """What a rollout's harness said of it so far."""

    def __init__(self) -> None:
        self.answered: list[str] = []
        """The ids of its answered calls."""
        self.retries = 0
        self.ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        """What went wrong, if anything did."""


class AgentProcess:
    """Starts the harness process and plays rollouts in it. It ends with the context, or with this process."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._listener: asyncio.Task[None] | None = None
        self._plays: dict[int, Play] = {}

    async def __aenter__(self) -> Self:
        self._process = await start_module("interception.demo.agent")
        self._listener = asyncio.create_task(self._listen(self._process))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await run_to_end(self._end())

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def play(self, play: Play, rollout: int, slot: Slot, **job: Any) -> str | None:
        """Plays one rollout and returns what went wrong, if anything did; `play` fills up meanwhile.

        `job`: `dialect`, `streamed`, `turns`, `pause` (seconds between them), `model`, and whether that is an `echo`.
        """
        if self._listener is None or self._listener.done():
            return ENDED_EARLY
        self._plays[rollout] = play
        self._tell(do="play", rollout=rollout, url=slot.base_url, key=slot.model_secret, **job)
        try:
            return await play.ended
        except asyncio.CancelledError:
            self._tell(do="cancel", rollout=rollout)
            raise
        finally:
            del self._plays[rollout]

    def _tell(self, **job: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(orjson.dumps(job) + b"\n")

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            fact = orjson.loads(line)
            play = self._plays.get(fact["rollout"])
            if play is None:
                continue
            if "answered" in fact:
                play.answered.append(fact["answered"])
            elif not play.ended.done():
                play.retries = fact["retries"]
                play.ended.set_result(fact["error"])
        for play in self._plays.values():
            if not play.ended.done():
                play.ended.set_result(ENDED_EARLY)

    async def _end(self) -> None:
        if self._process is None or self._listener is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(END_TIMEOUT):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await cancel_and_wait(self._listener)
