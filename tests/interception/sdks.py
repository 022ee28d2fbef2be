"""The real SDKs, asked in whichever dialect, through their strictest helpers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai

from interception.dialects import CHAT, RESPONSES
from tests.interception.scripted import Rollout, Wire


class Told(Exception):
    """The SDK handed over an event that says that the response failed; of such it makes no exception itself."""


SDK_ERRORS = (openai.APIError, anthropic.APIError, Told)
STATUS_ERRORS = (openai.APIStatusError, anthropic.APIStatusError)


class Sdk:
    def __init__(self, wire: Wire, oai: openai.AsyncOpenAI, ant: anthropic.AsyncAnthropic) -> None:
        self._wire, self.oai, self.ant = wire, oai, ant

    async def ask(self, text: str = "hi", *, stream: bool = False) -> str:
        """The text of the answer."""
        body: Any = self._wire.request(text)
        if self._wire.dialect is CHAT:
            if stream:
                async with self.oai.chat.completions.stream(**body) as chat:
                    said = (await chat.get_final_completion()).choices[0].message.content
            else:
                said = (await self.oai.chat.completions.create(**body)).choices[0].message.content
        elif self._wire.dialect is RESPONSES:
            if stream:
                async with self.oai.responses.stream(**body) as responses:
                    async for event in responses:
                        if event.type == "response.failed":
                            assert event.response.error is not None
                            raise Told(event.response.error.message)
                        if event.type == "error":
                            raise Told(event.message)
                    said = (await responses.get_final_response()).output_text
            else:
                said = (await self.oai.responses.create(**body)).output_text
        elif stream:
            async with self.ant.messages.stream(**body) as messages:
                said = await messages.get_final_text()
        else:
            block = (await self.ant.messages.create(**body)).content[0]
            said = block.text if block.type == "text" else None
        assert said is not None
        return said


@asynccontextmanager
async def sdk(running: Rollout, wire: Wire, *, max_retries: int = 0) -> AsyncIterator[Sdk]:
    env = running.slot.env()
    # Without certificates, which would be loaded for each client, a third of a second each.
    async with (
        openai.AsyncOpenAI(
            base_url=env["OPENAI_BASE_URL"],
            api_key=env["OPENAI_API_KEY"],
            max_retries=max_retries,
            http_client=openai.DefaultAsyncHttpxClient(verify=False),
        ) as oai,
        anthropic.AsyncAnthropic(
            base_url=env["ANTHROPIC_BASE_URL"],
            api_key=env["ANTHROPIC_API_KEY"],
            max_retries=max_retries,
            http_client=anthropic.DefaultAsyncHttpxClient(verify=False),
        ) as ant,
    ):
        yield Sdk(wire, oai, ant)
