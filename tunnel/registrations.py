"""Registrations at Prime's API: asked for at the permitted pace, and deleted by the label they carry."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import prime_tunnel

from tunnel.account import Account
from tunnel.pace import Pacer

TERMINATED = "terminated"  # deletion is soft: the record stays, and says so

RETRIES = (0.2, 1.0, 3.0)
"""Seconds between the tries of a deletion."""


class PacedApi(prime_tunnel.TunnelClient):
    """The SDK's API client, which waits before each create and delete until it may ask."""

    def __init__(
        self,
        account: Account,
        creates: Pacer | None,
        deletes: Pacer | None,
        before_create: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(api_key=account.api_key)
        self.base_url = account.base_url
        self.waits_to_create = False
        """Whether a create waits for its permit: nothing of it is on its way then."""
        self.may_have_made = 0
        """Registrations: the creates that were sent, without those whose answer says that nothing was made."""
        self._creates = creates
        self._deletes = deletes
        self._before_create = before_create

    async def _get_client(self) -> Any:
        client = await super()._get_client()
        # Of each request, for the SDK repeats one whose connection broke: it counts, and may have been carried out.
        client.event_hooks = {"request": [self._before], "response": [self._after]}
        return client

    async def _before(self, request: httpx.Request) -> None:
        if request.method == "POST":
            await self.may_create()
            request.extensions = {**request.extensions, "trace": self._trace_create}
        elif request.method == "DELETE" and self._deletes is not None:
            await self._deletes.wait()

    async def _trace_create(self, step: str, about: Any) -> None:
        if step.endswith(".send_request_headers.started"):  # a connection that is refused does not get so far
            self.may_have_made += 1

    async def _after(self, response: httpx.Response) -> None:
        if response.request.method == "POST" and 400 <= response.status_code < 500:
            self.may_have_made -= 1

    async def may_create(self) -> None:
        """Return once a create may be sent."""
        if self._creates is not None:
            self.waits_to_create = True
            try:
                await self._creates.wait()
            finally:
                self.waits_to_create = False
        self._before_create()


class Deletion:
    """Deletes what carries a label and is not deleted yet; `known` is the id of one of them, if it is known.

    `run` may be cancelled at any time, and `left` and `reason` then say what it has not done, and why.
    """

    def __init__(self, api: "prime_tunnel.TunnelClient", label: str, team_id: str | None, known: str | None) -> None:
        self.left = [known] if known else []
        self.reason = "no answer"
        self.found: set[str] = set()
        """All that were ever seen to carry the label."""
        self.deleted = 0
        self._api = api
        self._label = label
        self._team_id = team_id

    async def run(self) -> bool:
        """Whether nothing is left. A failed request is tried again, unless the key is refused or nothing is known to be
        there: while the API is away, those who only want to make sure do not insist.
        """
        for wait in (*RETRIES, None):
            try:
                await self.once()
                return True
            except prime_tunnel.TunnelAuthError as error:
                self.reason = str(error)
                return False
            except Exception as error:  # noqa: BLE001 - whatever the API answers
                self.reason = str(error) or type(error).__name__
            if wait is None or not self.left:
                return False
            await asyncio.sleep(wait)
        raise AssertionError("unreachable")

    async def once(self) -> None:
        # An empty team id means none at all, None the one that is configured here.
        records = await self._api.list_tunnels(labels=[self._label], team_id=self._team_id or "")
        # Filtered here as well: a service that ignored the label would have us delete it all.
        ours = {record.tunnel_id: (record.status or "").lower() for record in records if self._label in record.labels}
        self.found |= set(ours)
        # One that was known and is not listed may be there all the same.
        unlisted = [tunnel_id for tunnel_id in self.left if tunnel_id not in ours]
        self.left = [*unlisted, *(tunnel_id for tunnel_id, status in ours.items() if status != TERMINATED)]
        while self.left:
            self.deleted += bool(await self._api.delete_tunnel(self.left[0]))
            self.left.pop(0)
