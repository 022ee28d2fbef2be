"""Tools for agents: an MCP server on this host, each call of which has its rollout's state. Needs the extra `mcp`."""

from interception.tools.client import OutcomeUnknownError, ToolCallError, ToolClient
from interception.tools.injection import State, Task, with_state
from interception.tools.server import ToolServer, ToolSlot

__all__ = [
    "OutcomeUnknownError",
    "State",
    "Task",
    "ToolCallError",
    "ToolClient",
    "ToolServer",
    "ToolSlot",
    "with_state",
]
