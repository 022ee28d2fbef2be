"""Runs a tool server's module as `python -m MODULE` does, with the health route in front of its MCP endpoint.

    python -P toolserver.py LAUNCHER MODULE [ARGUMENT ...]

LAUNCHER is the process id of who starts it: when that one is gone, by SIGKILL too, so is the tool server. It is run as
a file, not as a part of its package, which imports verifiers: that takes ten seconds, in which the launcher may end.
"""

import os
import runpy
import secrets
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

LAUNCHER_POLL = 1.0
"""Seconds. verifiers' own death signal is set only after all imports, and is Linux's alone."""


def die_with(launcher: int) -> None:
    """Ends this process, and what else is in its session's group, once it is no longer the launcher's child."""

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(LAUNCHER_POLL)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="watch the launcher", daemon=True).start()


def add_health_route() -> None:
    """To each MCP server of this process."""
    from mcp.server.mcpserver import MCPServer
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response

    from tunnel import HEALTH_PATH, IDENTITY_HEADER

    headers = {IDENTITY_HEADER: secrets.token_hex(8)}
    streamable_http_app = MCPServer.streamable_http_app

    async def health(request: Request) -> Response:
        return PlainTextResponse("ok", headers=headers)

    def with_health(self: MCPServer, *args: Any, **kwargs: Any) -> Any:
        self.custom_route(HEALTH_PATH, methods=["GET"])(health)
        return streamable_http_app(self, *args, **kwargs)

    MCPServer.streamable_http_app = with_health  # type: ignore[method-assign]


def main() -> None:
    launcher, module = int(sys.argv[1]), sys.argv[2]
    die_with(launcher)
    del sys.argv[:2]
    sys.path.insert(0, os.getcwd())  # as `python -m` has it
    sys.path.append(str(Path(__file__).parents[3]))  # where `tunnel` lies, should the launcher alone have known
    add_health_route()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
