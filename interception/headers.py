"""Which headers cross the server, and which end at it."""

from collections.abc import Mapping

HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "expect",
    }
)
# The client library frames, encodes and addresses the request anew.
FRAMING = frozenset({"host", "content-length", "content-encoding", "accept-encoding"})
AUTH = frozenset({"authorization", "x-api-key", "api-key"})
# Digests of a body that may be sent differently, and keys that are ours to honour.
OURS = frozenset({"digest", "content-digest", "repr-digest", "content-md5", "idempotency-key"})


def _crossing(headers: Mapping[str, str], dropped: frozenset[str]) -> dict[str, str]:
    items = [(name, name.lower(), value) for name, value in headers.items()]
    named = {word.strip().lower() for _, name, value in items if name == "connection" for word in value.split(",")}
    crossing: dict[str, tuple[str, str]] = {}
    for name, lowered, value in items:
        if lowered not in dropped and lowered not in named and not lowered.startswith("x-forwarded-"):
            # One that is repeated says the same as a list (of cookies, which have no lists, the last one stays).
            known = crossing.get(lowered) if lowered != "set-cookie" else None
            crossing[lowered] = (name, value) if known is None else (known[0], f"{known[1]}, {value}")
    return dict(crossing.values())


def to_upstream(headers: Mapping[str, str]) -> dict[str, str]:
    """A harness's headers as they are forwarded: feature headers go through, ours and the hop's own do not."""
    return _crossing(headers, HOP_BY_HOP | FRAMING | AUTH | OURS)


def to_client(headers: Mapping[str, str]) -> dict[str, str]:
    """An upstream's headers as they are answered. The body is decoded and framed anew."""
    return _crossing(headers, HOP_BY_HOP | frozenset({"content-length", "content-encoding", "x-vf-call-id"}))


def secret_of(headers: Mapping[str, str]) -> str:
    """The secret a request carries: Anthropic's key wins over a bearer token; empty where there is none."""
    if key := headers.get("x-api-key", "").strip():
        return key
    kind, _, token = headers.get("Authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""
