"""The other end of the state channel: for tools that share a rollout's state, on whatever host they run."""

import contextlib
import json
import uuid
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp
import stamina

from interception.base import STATE_ROUTE_HEADER
from interception.upstream import proxy_for

REQUEST_TIMEOUT = 30.0
"""Seconds for one attempt."""

WAIT_MAX = 5.0
"""Seconds between two attempts, at most; the first one follows after a tenth."""

QUOTED = 500
"""Characters of a refusal that are quoted."""


class StateError(Exception):
    """The state could not be read or written. `status`: what refused it, or None where nobody answered."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed a little later: nobody answered, or with a 5xx."""
        return self.status is None or self.status >= 500


class StateConflictError(StateError):
    """Somebody else changed the state since it was read."""


class StateClient:
    """Reads and writes one rollout's state; use it in `async with`, or `close` it.

    :param base_url: the slot's, without a trailing slash.
    :param secret: the slot's state secret, or a shared tool server's (`state_service_secrets`) with `session_id`.
    :param session_id: which session a shared tool server speaks for.
    :param patience: seconds for which a request that got no answer, or a 5xx, is made again. A 4xx is final.

    A write is made once, also where it is sent again because its answer was lost: it carries a key of its own. All
    methods raise `StateError`, in whose text there is no secret.
    """

    def __init__(
        self,
        base_url: str,
        secret: str,
        *,
        session_id: str | None = None,
        patience: float = 45.0,
        http: aiohttp.ClientSession | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {secret}"}
        if session_id is not None:
            self._headers[STATE_ROUTE_HEADER] = session_id
        self._patience = patience
        self._http = http
        self._owns_http = http is None

    async def get(self) -> tuple[Any, str]:
        """The state, and its tag for `put`."""
        body, present = await self.read()
        return _parsed(body), present

    async def put(self, state: Any, *, if_match: str | None = None) -> str:
        """Replace the state by a JSON value; its new tag.

        With the tag of what was read as `if_match` it raises `StateConflictError` if that is not the state any more;
        without, the last write wins. ValueError if it is no JSON.
        """
        return await self.write(json.dumps(state, allow_nan=False).encode(), if_match=if_match)

    async def update(self, change: Callable[[Any], Any]) -> Any:
        """Read the state, have `change` change it (in place, or by what it returns), and write it; what was written.

        If somebody else writes meanwhile, all of that is done again with their state: no update is lost.
        """
        while True:
            state, present = await self.get()
            changed = change(state)
            state = state if changed is None else changed
            with contextlib.suppress(StateConflictError):
                await self.put(state, if_match=present)
                return state

    async def task(self) -> Any:
        """What the rollout is about."""
        return _parsed(await self.read_task())

    # -- as bytes, for those who parse for themselves ------------------------------------------

    async def read(self) -> tuple[bytes, str]:
        body, headers = await self._request("GET", "/state")
        return body, headers.get("ETag", "")

    async def read_task(self) -> bytes:
        return (await self._request("GET", "/task"))[0]

    async def write(self, body: bytes, *, if_match: str | None = None) -> str:
        headers = {"Content-Type": "application/json", "Idempotency-Key": uuid.uuid4().hex}
        if if_match is not None:
            headers["If-Match"] = if_match
        _, answered = await self._request("PUT", "/state", headers, body)
        return answered.get("ETag", "")

    # -- life ----------------------------------------------------------------------------------

    async def close(self) -> None:
        if self._owns_http and self._http is not None:
            await self._http.close()
            self._http = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<StateClient {self.base_url}>"

    # -- parts ---------------------------------------------------------------------------------

    async def _request(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> tuple[bytes, Mapping[str, str]]:
        async for attempt in stamina.retry_context(
            on=lambda error: isinstance(error, StateError) and error.may_pass,
            attempts=None,
            timeout=self._patience,
            wait_max=WAIT_MAX,
        ):
            with attempt:
                return await self._once(method, path, {**self._headers, **(headers or {})}, body)
        raise AssertionError("unreachable")

    async def _once(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> tuple[bytes, Mapping[str, str]]:
        what = f"{method} {self.base_url}{path}"
        if self._http is None:
            self._http = aiohttp.ClientSession(proxy=proxy_for(self.base_url))
        try:
            async with self._http.request(
                method,
                self.base_url + path,
                headers=headers,
                data=body,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT),
            ) as response:
                answer = await response.read()
        except TimeoutError:
            raise StateError(f"{what}: no answer within {REQUEST_TIMEOUT:g} s") from None
        except aiohttp.InvalidURL:
            raise StateError(f"{what}: not a URL", 400) from None
        except (aiohttp.ClientError, OSError) as error:
            raise StateError(f"{what}: {error or type(error).__name__}") from None
        if response.status == (204 if method == "PUT" else 200):  # a page that a stranger gives to a PUT stores nothing
            return answer, response.headers
        kind = StateConflictError if response.status == 412 else StateError
        raise kind(f"{what}: {response.status}, {_told(answer)}", response.status)


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise StateError("what answers here is no interception server: its answer is no JSON") from None


def _told(body: bytes) -> str:
    """The reason that a refusal gives."""
    try:
        message = json.loads(body)["error"]["message"]
        return str(message)[:QUOTED]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "without a reason"
