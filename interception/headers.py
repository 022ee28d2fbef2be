"""Which headers cross the server, and which end at it."""

import re
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from multidict import CIMultiDict

if TYPE_CHECKING:
    from interception.session import Upstream

CALL_ID_HEADER = "X-VF-Call-Id"
"""One id for a model call: in the log, the record, the answer's headers and the upstream's."""

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


UNFIT = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""What an upstream may write into a header's value as aiohttp reads it, and must not as aiohttp writes it."""

NOT_TO_UPSTREAM = HOP_BY_HOP | FRAMING | AUTH | OURS
NOT_TO_CLIENT = HOP_BY_HOP | {"content-length", "content-encoding", "x-vf-call-id"}


class _Plan(NamedTuple):
    """Which of the headers of these names, by their places, cross."""

    crossing: tuple[int, ...]
    repeated: tuple[str, ...]
    connection: tuple[int, ...]
    """Those that name others of this hop's."""


@lru_cache(maxsize=64)
def _plan(names: tuple[str, ...], dropped: frozenset[str]) -> _Plan:
    """One peer's names are the same each time, and so is what becomes of them."""
    lowered = [name.lower() for name in names]
    crossing = [at for at, name in enumerate(lowered) if name not in dropped and not name.startswith("x-forwarded-")]
    times = Counter(lowered[at] for at in crossing)
    return _Plan(
        tuple(crossing),
        tuple(names[lowered.index(name)] for name, number in times.items() if number > 1),
        tuple(at for at, name in enumerate(lowered) if name == "connection"),
    )


def _crossing(headers: Mapping[str, str], dropped: frozenset[str]) -> CIMultiDict[str]:
    fields = list(headers.items())
    plan = _plan(tuple([name for name, _ in fields]), dropped)
    crossing = CIMultiDict([fields[at] for at in plan.crossing])
    for name in plan.repeated:
        values = crossing.getall(name)
        # One that is repeated says the same as a list (of cookies, which have no lists, the last one stays).
        crossing[name] = values[-1] if name.lower() == "set-cookie" else ", ".join(values)
    for at in plan.connection:
        for word in fields[at][1].split(","):
            crossing.popall(word.strip(), None)
    return crossing


def to_upstream(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """A harness's headers as they are forwarded: feature headers go through, ours and the hop's own do not."""
    return _crossing(headers, NOT_TO_UPSTREAM)


class Sending:
    """Where calls go, and with which headers: all but a call's id. Calls share it."""

    __slots__ = ("_headers", "head", "made_of", "upstream", "url")

    def __init__(
        self, upstream: "Upstream", url: str, headers: CIMultiDict[str], made_of: tuple[Any, ...] = ()
    ) -> None:
        self.upstream = upstream
        self.url = url
        self.made_of = made_of
        self.head: bytes | None = None
        """The same as `interception.wire` writes it, once it has."""
        self._headers = headers

    def headers(self, call_id: str) -> CIMultiDict[str]:
        headers = self._headers.copy()
        headers[CALL_ID_HEADER] = call_id
        return headers

    def __repr__(self) -> str:
        return "<Sending>"  # keys stand in all of it


def to_client(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """An upstream's headers as they are answered. The body is decoded and framed anew."""
    crossing = _crossing(headers, NOT_TO_CLIENT)
    if not "".join(crossing.values()).isprintable():
        for name, value in list(crossing.items()):
            if (fit := UNFIT.sub("", value)) != value:
                crossing[name] = fit
    return crossing


def secret_of(headers: Mapping[str, str]) -> str:
    """The secret a request carries: Anthropic's key wins over a bearer token; empty where there is none."""
    if key := headers.get("x-api-key", "").strip():
        return key
    kind, _, token = headers.get("Authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""
