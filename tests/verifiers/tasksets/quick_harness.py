"""A harness in this process: the OpenAI SDK with its own retries, and no interpreter to start for each rollout."""

from typing import Any

import openai
import verifiers.v1 as vf
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.runtimes import ProgramResult


class QuickConfig(HarnessConfig):
    turns: int = 2
    swallow: bool = False
    """Exits 0 whatever became of its calls."""
    hangs: bool = False
    """Waits for ever once a call has failed."""


class Quick(vf.Harness[QuickConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False
    SUPPORTS_MCP = True  # it is told of tools, and calls none
    APPENDS_SYSTEM_PROMPT = True

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> ProgramResult:
        said: list[Any] = []
        try:
            async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=60) as client:
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
