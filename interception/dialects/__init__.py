"""The wire formats a harness may speak. Nothing is translated: a turn goes out in the dialect it came in."""

from interception.dialects.base import Dialect
from interception.dialects.chat import CHAT
from interception.dialects.messages import MESSAGES
from interception.dialects.responses import RESPONSES

DIALECTS: tuple[Dialect, ...] = (CHAT, RESPONSES, MESSAGES)

__all__ = ["CHAT", "DIALECTS", "MESSAGES", "RESPONSES", "Dialect"]
