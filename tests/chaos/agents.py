"""Agents that know a base URL and a key and retry as the SDKs do: plain ones, and some that are the openai SDK."""

import asyncio
import random
import uuid
from abc import ABC, abstractmethod
from typing import Any

import aiohttp
import openai
import orjson

from interception import CALL_ID_HEADER, Slot

TRY_TIMEOUT = 30.0
"""Seconds for one try (the SDKs' own: 600). A harness that is not patient asks again while its first try is still on
its way."""

PATIENCE = 200.0
"""Seconds for which one call is tried again: a tunnel that is not lost serves again long before, and a rollout that
asks for so long hangs."""

BACKOFF_MAX = 1.0
"""Seconds between tries at most (the SDKs' own: 8)."""


class AgentFailedError(Exception):
    """An answer after which a harness gives up, or the wrong one."""


class _TryAgainError(Exception):
    """A try that failed as tries do on a road that is broken."""


class Agent(ABC):
    """One conversation. Each turn says one text of its own, which no other turn of any agent does."""

    def __init__(self, slot: Slot, texts: list[str], pause: float, rng: random.Random) -> None:
        self.slot = slot
        self.texts = texts
        self.asked: list[str] = []
        """What was said so far, whether it was answered or not."""
        self.answered: dict[str, str] = {}
        """The call ids of the answers, by what was said."""
        self.retries = 0
        self._pause = pause
        self._rng = rng
        self._messages: list[dict[str, str]] = []

    async def play(self) -> None:
        """Raises `AgentFailedError` for what no harness survives."""
        for text in self.texts:
            self.asked.append(text)
            self._messages.append({"role": "user", "content": text})
            heard, call_id = await self._ask()
            if heard != text:
                raise AgentFailedError(f"said {text!r} and heard {heard!r}")
            self.answered[text] = call_id
            self._messages.append({"role": "assistant", "content": heard})
            await asyncio.sleep(self._pause * self._rng.uniform(0.5, 1.5))

    async def _ask(self) -> tuple[str, str]:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + PATIENCE
        key, tries = uuid.uuid4().hex, 0
        while True:
            headers = {"Idempotency-Key": key}
            if tries:
                headers["x-stainless-retry-count"] = str(tries)
            try:
                return await self._call(headers)
            except _TryAgainError as error:
                if loop.time() > give_up_at:
                    raise AgentFailedError(f"no answer in {tries} tries over {PATIENCE:g} s: {error}") from error
            self.retries += 1
            await asyncio.sleep(min(BACKOFF_MAX, 0.025 * 2.0**tries) * self._rng.uniform(0.75, 1.25))
            tries += 1

    @abstractmethod
    async def _call(self, headers: dict[str, str]) -> tuple[str, str]:
        """One try: the text and the call id of the answer, else `_TryAgainError` or `AgentFailedError`."""


class PlainAgent(Agent):
    """Chat completions or messages, streamed or not."""

    def __init__(self, *args: Any, http: aiohttp.ClientSession) -> None:
        super().__init__(*args)
        self._http = http
        self._dialect = self._rng.choice(["chat", "messages"])
        self._streamed = self._rng.random() < 0.6

    async def _call(self, headers: dict[str, str]) -> tuple[str, str]:
        path = "/chat/completions" if self._dialect == "chat" else "/messages"
        body = {"model": "echo", "stream": self._streamed, "messages": self._messages, "max_tokens": 100}
        headers = {**headers, "Authorization": f"Bearer {self.slot.model_secret}"}
        timeout = aiohttp.ClientTimeout(total=TRY_TIMEOUT)
        try:
            async with self._http.post(
                f"{self.slot.base_url}/v1{path}", json=body, headers=headers, timeout=timeout
            ) as answer:
                content = await answer.read()
                if answer.status != 200:
                    _judge(answer.status, answer.headers, content.decode(errors="replace"))
                read = self._read_stream if self._streamed else self._read_whole
                return read(content), answer.headers[CALL_ID_HEADER]
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _TryAgainError(f"{type(error).__name__}: {error}") from error

    def _read_whole(self, content: bytes) -> str:
        answer = orjson.loads(content)
        return str(
            answer["choices"][0]["message"]["content"] if self._dialect == "chat" else answer["content"][0]["text"]
        )

    def _read_stream(self, content: bytes) -> str:
        data = [line[5:].strip() for line in content.splitlines() if line.startswith(b"data:")]
        events = [orjson.loads(part) for part in data if part != b"[DONE]"]
        if self._dialect == "chat":
            ended = b"[DONE]" in data
            texts = [choice["delta"].get("content") or "" for event in events for choice in event.get("choices", ())]
        else:
            ended = any(event["type"] == "message_stop" for event in events)
            texts = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
        if not ended:
            raise _TryAgainError("the stream broke off")
        return "".join(texts)


class OpenAiAgent(Agent):
    """The openai SDK with its own two retries; what it does not retry itself is asked again, marked as such."""

    def __init__(self, *args: Any, http: Any) -> None:
        super().__init__(*args)
        self._sdk = openai.AsyncOpenAI(
            base_url=self.slot.env()["OPENAI_BASE_URL"],
            api_key=self.slot.model_secret,
            timeout=TRY_TIMEOUT,
            http_client=http,
        )
        self._responses = self._rng.random() < 0.5

    async def _call(self, headers: dict[str, str]) -> tuple[str, str]:
        messages: Any = self._messages
        try:
            if self._responses:
                raw = await self._sdk.responses.with_raw_response.create(
                    model="echo", input=messages, extra_headers=headers
                )
                self.retries += raw.retries_taken
                return raw.parse().output_text, raw.headers[CALL_ID_HEADER]
            answer = await self._sdk.chat.completions.with_raw_response.create(
                model="echo", messages=messages, extra_headers=headers
            )
            self.retries += answer.retries_taken
            return answer.parse().choices[0].message.content or "", answer.headers[CALL_ID_HEADER]
        except openai.APIStatusError as error:
            _judge(error.status_code, error.response.headers, error.response.text)
            raise
        except openai.APIConnectionError as error:
            raise _TryAgainError(repr(error)) from error


def _judge(status: int, headers: Any, text: str) -> None:
    """Raises what a harness makes of an answer that is not 200."""
    passing = status in (408, 409, 429) or status >= 500
    # 404 is the page of a gateway that has no route: the server's own errors are JSON, and tell a harness to give up.
    passing = passing or (status == 404 and text.lstrip().startswith("<"))
    if passing and headers.get("x-should-retry") != "false":
        raise _TryAgainError(f"status {status}")
    raise AgentFailedError(f"status {status}: {text[:200]}")
