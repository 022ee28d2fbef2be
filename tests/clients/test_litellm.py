"""litellm, in the three dialects. It is 200 MB, so it is installed with the agent programs, and tested with them."""

import asyncio
import json
from pathlib import Path

import pytest

from interception import InterceptionServer, RolloutSession, Upstream
from interception.echo import EchoModel
from interception.programs import launch
from tests.clients import install
from tests.clients.proxy import CuttingProxy

pytestmark = [
    pytest.mark.agents,
    pytest.mark.skipif(
        bool(install.missing(agents=True)), reason=f"not installed: {install.COMMAND} --agents installs them"
    ),
]

PROGRAM = """\
import asyncio, json
import litellm

def messages(text):
    return [{"role": "user", "content": text}]

def streamed(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

async def asynchronous():
    answer = await litellm.acompletion(model="openai/m", messages=messages("by async"))
    chunks = await litellm.acompletion(model="anthropic/m", messages=messages("streamed by async"), stream=True)
    return [answer.choices[0].message.content, streamed([chunk async for chunk in chunks])]

said = []
for model in ("openai/m", "anthropic/m"):
    said.append(litellm.completion(model=model, messages=messages("hello")).choices[0].message.content)
    said.append(streamed(litellm.completion(model=model, messages=messages("a stream"), stream=True)))
said.append(litellm.responses(model="openai/m", input="a response").output[0].content[0].text)
tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
call = litellm.completion(model="openai/m", messages=messages('!call add {"a": 1}'), tools=tools)
said.append(call.choices[0].message.tool_calls[0].function.arguments)
said += asyncio.run(asynchronous())
said.append(litellm.completion(model="openai/m", messages=messages("cut me")).choices[0].message.content)
print(json.dumps(said))
"""


async def test_litellm(tmp_path: Path) -> None:
    async with EchoModel() as echo, InterceptionServer() as server:
        session = RolloutSession(Upstream(base_url=echo.base_url))
        async with server.acquire(session) as slot, CuttingProxy(slot.base_url) as proxy:
            proxy.cut_at(b"cut me")
            environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
            command, env = launch(
                [str(install.MINI_PYTHON), "-c", PROGRAM], slot._replace(base_url=proxy.url).env(), environ
            )
            process = await asyncio.create_subprocess_exec(
                *command, env=env, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )
            try:
                async with asyncio.timeout(240):
                    out, err = await process.communicate()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            assert process.returncode == 0, err.decode()
            calls = echo.calls
    assert json.loads(out.splitlines()[-1]) == [
        *("hello", "a stream", "hello", "a stream", "a response", '{"a": 1}'),
        *("by async", "streamed by async", "cut me"),
    ]
    turns = session.trace.turns
    assert len(turns) == calls == 9
    assert all(turn.complete and turn.delivered for turn in turns)
    assert [turn.dialect for turn in turns[:5]] == ["chat completions"] * 2 + ["messages"] * 2 + ["responses"]
