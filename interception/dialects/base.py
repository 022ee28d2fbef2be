"""What the server asks of a dialect."""

from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit


class Dialect(Protocol):
    """One wire format."""

    @property
    def name(self) -> str:
        """As it stands in traces and logs."""
        ...

    @property
    def path(self) -> str:
        """Of its model route on our server."""
        ...

    def url(self, base_url: str, path: str) -> str:
        """Where our route `path` is found at an upstream, whose `base_url` is as its SDK takes it."""
        ...

    def auth(self, api_key: str) -> Mapping[str, str]:
        """The headers that carry the upstream's key."""
        ...

    def error(self, status: int, message: str) -> dict[str, Any]:
        """The body of an error answer."""
        ...


def openai_url(base_url: str, path: str) -> str:
    """OpenAI SDKs are given a base that ends in /v1 (or in a provider's own path), and add what follows."""
    return base_url + (path if not urlsplit(base_url).path else path.removeprefix("/v1"))


def openai_error(status: int, message: str) -> dict[str, Any]:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
