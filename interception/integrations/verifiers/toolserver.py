"""`python -m interception.integrations.verifiers.toolserver MODULE`: runs a tool server's module as `python -m MODULE`
does, with the health route in front of its MCP endpoint."""

import runpy
import secrets
import sys
from typing import Any

from mcp.server.mcpserver import MCPServer
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from tunnel import HEALTH_PATH, IDENTITY_HEADER

IDENTITY = secrets.token_hex(8)


async def health(request: Request) -> Response:
    return PlainTextResponse("ok", headers={IDENTITY_HEADER: IDENTITY})


def add_health_route() -> None:
    """To each MCP server of this process."""
    streamable_http_app = MCPServer.streamable_http_app

    def with_health(self: MCPServer, *args: Any, **kwargs: Any) -> Any:
        self.custom_route(HEALTH_PATH, methods=["GET"])(health)
        return streamable_http_app(self, *args, **kwargs)

    MCPServer.streamable_http_app = with_health  # type: ignore[method-assign]


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(f"usage: python -m {__spec__.name if __spec__ else 'toolserver'} MODULE [ARGUMENT ...]")
    module = sys.argv[1]
    del sys.argv[0]
    add_health_route()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
