"""An ASGI app as a subject, served by uvicorn: runs in the interpreter of the subject whose app it is."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """Its URL. No access log: none of the others writes one."""
    import uvicorn  # in this environment, not in ours

    config = uvicorn.Config(app, log_level="warning", access_log=False, backlog=4096)
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started:
                if task.done():
                    await task
                    raise RuntimeError("the app did not start")
                await asyncio.sleep(0.05)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            await task
