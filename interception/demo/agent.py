"""The demo's harness: a process of its own that plays rollouts and knows nothing but a base URL and a key.

    python -m interception.demo.agent

It takes jobs on stdin, one JSON object a line, and says on stdout which calls were answered and how each rollout ended.
It ends at the end of stdin, so with its parent.
"""

import asyncio
import contextlib
import sys
from typing import Any

import aiohttp
import orjson

from interception.headers import CALL_ID_HEADER

TRIES = 8
RETRY_WAIT = 0.1
"""Seconds before the first retry, doubled up to a second: a cut tunnel is back within one."""


class Rollout:
    """A conversation of `turns` model calls in one dialect. An echo model must say again what was said."""

    def __init__(self, job: dict[str, Any], client: aiohttp.ClientSession) -> None:
        self.job = job
        self.client = client
        self.messages: list[dict[str, str]] = []
        self.retries = 0

    async def play(self) -> str | None:
        """What went wrong, if anything did."""
        for number in range(1, self.job["turns"] + 1):
            said = f"rollout {self.job['rollout']} says hello for the {number}. time"
            if not self.job["echo"]:
                said += "; answer in at most ten words"
            self.messages.append({"role": "user", "content": said})
            heard = await self._ask()
            if self.job["echo"] and heard != said:
                return f"turn {number}: expected an echo of {said!r}, got {heard!r}"
            self.messages.append({"role": "assistant", "content": heard})
            await asyncio.sleep(self.job["pause"])
        return None

    async def _ask(self) -> str:
        """One model call, tried again as the SDKs do, marked as a retry."""
        for attempt in range(TRIES):
            try:
                return await self._call(attempt)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                final = isinstance(error, aiohttp.ClientResponseError) and 400 <= error.status < 409
                if final or attempt == TRIES - 1:
                    raise
                self.retries += 1
                await asyncio.sleep(min(1.0, RETRY_WAIT * 2**attempt))
        raise AssertionError("unreachable")

    async def _call(self, attempt: int) -> str:
        dialect, streamed = self.job["dialect"], self.job["streamed"]
        body: dict[str, Any] = {"model": self.job["model"], "stream": streamed}
        body["input" if dialect == "responses" else "messages"] = self.messages
        if dialect == "messages":
            body["max_tokens"] = 100  # there, it must be said
        headers = {"Authorization": f"Bearer {self.job['key']}", "x-stainless-retry-count": str(attempt)}
        path = {"chat": "/chat/completions", "responses": "/responses", "messages": "/messages"}[dialect]
        async with self.client.post(f"{self.job['url']}/v1{path}", json=body, headers=headers) as answer:
            answer.raise_for_status()
            text = _streamed_text(dialect, await answer.text()) if streamed else _text(dialect, await answer.json())
            tell(rollout=self.job["rollout"], answered=answer.headers[CALL_ID_HEADER])
            return text


def tell(**fact: Any) -> None:
    sys.stdout.buffer.write(orjson.dumps(fact) + b"\n")
    sys.stdout.buffer.flush()


def _text(dialect: str, answer: dict[str, Any]) -> str:
    if dialect == "chat":
        return str(answer["choices"][0]["message"]["content"] or "")
    if dialect == "responses":
        return str(answer["output"][0]["content"][0]["text"])
    return str(answer["content"][0]["text"])


def _streamed_text(dialect: str, stream: str) -> str:
    """The text of a stream that came to its proper end; one that did not is a connection error."""
    events = [
        orjson.loads(line[5:]) for line in stream.splitlines() if line.startswith("data:") and "[DONE]" not in line
    ]
    kinds = {event.get("type") for event in events}
    if dialect == "chat":
        ended = "data: [DONE]" in stream
        parts = [choice["delta"].get("content") or "" for event in events for choice in event.get("choices", ())]
    elif dialect == "responses":
        ended = "response.completed" in kinds
        parts = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    else:
        ended = "message_stop" in kinds
        parts = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    if not ended:
        raise aiohttp.ClientPayloadError("the stream broke off")
    return "".join(parts)


async def main() -> None:
    loop = asyncio.get_running_loop()
    stdin = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    running: dict[int, asyncio.Task[None]] = {}

    async def play(job: dict[str, Any]) -> None:
        rollout = Rollout(job, client)
        try:
            wrong = await rollout.play()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            wrong = f"{type(error).__name__}: {error}"
        finally:
            running.pop(job["rollout"], None)
        tell(rollout=job["rollout"], ended=True, error=wrong, retries=rollout.retries)

    # A connection for each call, so that each goes through the tunnel as it is now.
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=30)) as client:
        while line := await stdin.readline():
            job = orjson.loads(line)
            if job["do"] == "play":
                running[job["rollout"]] = asyncio.create_task(play(job))
            elif job["rollout"] in running:
                running[job["rollout"]].cancel()
        tasks = list(running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        asyncio.run(main())
