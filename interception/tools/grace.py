"""Slow calls behind an edge that cuts what has not begun after 60 s: their answers are begun with white space."""

import asyncio
from typing import Any

from tunnel.serving import AsgiApp, Receive, Scope, Send


def begun_in_time(app: AsgiApp, *, grace: float, interval: float) -> AsgiApp:
    """`app`, whose JSON answers are begun after `grace` seconds, and then kept alive every `interval` seconds.

    White space before it is no change to JSON. An error of MCP's is in the body, so that a status of 200 hides none.
    """

    async def graced(scope: Scope, receive: Receive, send: Send) -> None:
        began = False

        async def bridge() -> None:
            nonlocal began
            await asyncio.sleep(grace)
            began = True
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while True:
                await send({"type": "http.response.body", "body": b" ", "more_body": True})
                await asyncio.sleep(interval)

        async def passed_on(message: Any) -> None:
            if message["type"] == "http.response.start":
                bridging.cancel()
                await asyncio.wait([bridging])  # nothing of it comes in between
                if began:
                    return
            await send(message)

        bridging = asyncio.create_task(bridge(), name="bridge a slow tool call")
        try:
            await app(scope, receive, passed_on)
        finally:
            bridging.cancel()

    return graced
