"""A harness in this process: the OpenAI SDK with its own retries, and no interpreter to start for each rollout."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy
import openai
import verifiers.v1 as vf
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.runtimes import ProgramResult


class QuickConfig(HarnessConfig):
    turns: int = 2
    retries: int = 2
    """The SDK's own: some 1.4 s."""
    swallow: bool = False
    """Exits 0 whatever became of its calls."""
    hangs: bool = False
    """Waits for ever once a call has failed."""
    notes: bool = False
    """Leaves in the trace what JSON and msgpack have no form for."""


NOTES = {
    "array": numpy.arange(6, dtype=numpy.float32).reshape(2, 3),
    "when": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    "path": Path("/a/b"),
    "id": UUID(int=7),
    "kinds": {"one"},
    "share": numpy.float64(0.5),
    "bytes": b"\xff",
}


class Quick(vf.Harness[QuickConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False
    SUPPORTS_MCP = True  # it is told of tools, and calls none
    APPENDS_SYSTEM_PROMPT = True

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> ProgramResult:
        if self.config.notes:
            trace.info.update(NOTES)
        said: list[Any] = []
        try:
            async with openai.AsyncOpenAI(
                base_url=endpoint, api_key=secret, timeout=60, max_retries=self.config.retries
            ) as client:
                for _ in range(self.config.turns):
                    said.append({"role": "user", "content": data.prompt})
                    answer = await client.chat.completions.create(model=ctx.model, messages=said)
                    said.append({"role": "assistant", "content": answer.choices[0].message.content})
        except openai.OpenAIError as error:
            if self.config.hangs:
                await runtime.run(["sleep", "600"], {})
            if not self.config.swallow:
                return ProgramResult(exit_code=1, stdout="", stderr=f"{type(error).__name__}: {error}")
        return ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Quick"]
