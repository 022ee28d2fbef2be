"""Anthropic messages."""

from collections.abc import Mapping
from typing import Any


class Messages:
    name = "messages"
    path = "/v1/messages"

    def url(self, base_url: str, path: str) -> str:
        """Anthropic's SDK is given a base without /v1; one with it (as for vLLM) is understood too."""
        return base_url.removesuffix("/v1") + path

    def auth(self, api_key: str) -> Mapping[str, str]:
        return {"x-api-key": api_key}

    def error(self, status: int, message: str) -> dict[str, Any]:
        kinds = {
            401: "authentication_error",
            403: "permission_error",
            404: "not_found_error",
            413: "request_too_large",
            429: "rate_limit_error",
            529: "overloaded_error",
        }
        kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}


MESSAGES = Messages()
