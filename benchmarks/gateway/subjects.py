"""Who is measured: the subjects by name, each a process that runs for the whole of a run, or the upstream itself."""

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gateway import canned
from benchmarks.gateway.control import Session, keyless
from benchmarks.gateway.http import Connection, Reply
from benchmarks.gateway.processes import Cores, Process, running

OURS, BARE, DIRECT = "ours", "bare", "direct"

PEERS = {
    "verifiers": "benchmarks.gateway.subject_verifiers",
    "rllm-model-gateway": "benchmarks.gateway.subject_rllm",
    "litellm": "benchmarks.gateway.subject_litellm",
}
"""The module that runs a peer in its own interpreter."""

CHECK_TIMEOUT = 60.0
"""Seconds that a subject's first calls may take: LiteLLM imports as they come."""


@dataclass(slots=True)
class Subject:
    """One that is measured. `process` is None for the upstream itself: what it costs is none of a proxy's."""

    name: str
    base_url: str
    process: Process | None = None

    def sessions(self, number: int) -> list[Session]:
        """So many new sessions; those before are over."""
        if self.process is None:
            return keyless(number)
        self.process.tell(str(number))
        told = self.process.answer()
        assert isinstance(told, list)
        return [Session(*session) for session in told]

    def cpu(self) -> float:
        """Seconds of CPU it has had so far."""
        return self.process.cpu() if self.process else 0.0

    def check(self) -> None:
        """Its answers must be the upstream's, also streamed; `RuntimeError` if they are not."""
        (session,) = self.sessions(1)
        whole = asyncio.run(self._call(session, canned.request()))
        if whole.status != 200 or not canned.said(bytes(whole.body)).startswith("answer "):
            raise RuntimeError(f"it answers a call with {whole.status}: {bytes(whole.body[:500])!r}")
        stream = asyncio.run(self._call(session, canned.request(stream=True)))
        if stream.status != 200 or b" word7" not in stream.body or not stream.body.rstrip().endswith(b"data: [DONE]"):
            raise RuntimeError(f"it answers a streamed call with {stream.status}: {bytes(stream.body[-500:])!r}")

    async def _call(self, session: Session, body: bytes) -> Reply:
        connection = await Connection.to(self.base_url)
        try:
            async with asyncio.timeout(CHECK_TIMEOUT):
                return await connection.call(canned.post(*session, body))
        finally:
            connection.close()


@dataclass(frozen=True, slots=True)
class Starting:
    """How a subject is started: `module` in the interpreter `python`."""

    name: str
    module: str
    python: Path = Path(sys.executable)

    @contextmanager
    def running(self, upstream: str, cores: Cores) -> Iterator[Process]:
        """Its process, which is still starting; `started` waits for it."""
        with running([self.python, "-m", self.module, upstream], cores.subject) as process:
            yield process

    def started(self, process: Process) -> Subject:
        """The subject, once it serves; `RuntimeError` if it does not, or serves something else than it was asked."""
        base_url = process.answer()
        assert isinstance(base_url, str)
        subject = Subject(self.name, base_url, process)
        subject.check()
        return subject


LOCAL: Sequence[Starting] = (
    Starting(OURS, "benchmarks.gateway.subject_ours"),
    Starting(BARE, "benchmarks.gateway.subject_bare"),
)
"""Those that need no environment of their own."""
