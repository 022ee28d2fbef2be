"""Registrations at Prime's API: asked for at the permitted pace, and deleted by the label they carry."""

import asyncio
from collections.abc import Callable
from typing import Any

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
        self._creates = creates
        self._deletes = deletes
        self._before_create = before_create
        self._creating = 0

    async def create_tunnel(self, *args: Any, **kwargs: Any) -> Any:
        await self.may_create()
        self._creating = 1
        try:
            return await super().create_tunnel(*args, **kwargs)
        finally:
            self._creating = 0

    async def delete_tunnel(self, tunnel_id: str) -> Any:
        if self._deletes is not None:
            await self._deletes.wait()
        return await super().delete_tunnel(tunnel_id)

    async def _get_client(self) -> Any:
        # The SDK's own, and asked for before each request: a create whose connection broke is repeated, and counts.
        if self._creating:
            self._creating += 1
            if self._creating > 2:
                await self.may_create()
        return await super()._get_client()

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
        """Whether nothing is left. A failed request is tried again, unless the key is refused."""
        for wait in (*RETRIES, None):
            try:
                await self.once()
                return True
            except prime_tunnel.TunnelAuthError as error:
                self.reason = str(error)
                return False
            except Exception as error:  # noqa: BLE001 - whatever the API answers
                self.reason = str(error) or type(error).__name__
            if wait is not None:
                await asyncio.sleep(wait)
        return False

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
