"""OpenAI Responses."""

from collections.abc import Mapping
from typing import Any

from interception.dialects.base import openai_error, openai_url


class Responses:
    name = "responses"
    path = "/v1/responses"

    def url(self, base_url: str, path: str) -> str:
        return openai_url(base_url, path)

    def auth(self, api_key: str) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {api_key}"}

    def error(self, status: int, message: str) -> dict[str, Any]:
        return openai_error(status, message)


RESPONSES = Responses()
