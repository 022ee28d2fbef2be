"""Every number the server goes by when it serves a call, in one place."""

from pydantic import BaseModel, ConfigDict, Field


class ServingPolicy(BaseModel):
    """How answers are served and how long they are kept. Times are in seconds, sizes in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    grace: float = Field(45.0, gt=0)
    """Behind a tunnel an answer is begun at the latest after this long: edges cut a request without one at 60 s."""

    keepalive_interval: float = Field(5.0, gt=0)
    """Between two signs of life while an answer that was begun is silent."""

    keepalive_unstreamed: bool = True
    """Whether calls that are not streamed are begun after `grace` too: with white space, then the body. Off: the edge
    cuts them, and the client sees a gateway error."""

    hold: float = Field(2.0, ge=0)
    """Chat: how long the chunk with the last finish reason is held for what may follow it (usage, `[DONE]`)."""

    request_usage: bool = True
    """Whether a streamed chat request that does not ask for usage is made to; the extra chunk is withheld."""

    body_cap: int = Field(256 * 1024**2, gt=0)
    """Of one request body, decoded. Parsers hold the GIL: 200 MB stall the loop for 0.2 s (orjson) to 0.7 s (json)."""

    state_cap: int = Field(8 * 1024**2, gt=0)
    """Of a state that a tool server writes, decoded. Checking and tagging one of 6.5 MB takes 0.3 s of the loop."""

    models_timeout: float = Field(30.0, gt=0)
    """For the upstream's model list and its token counts."""

    replay_count: int = Field(64, ge=0)
    """Finished calls of a session that can be served again to a retry. The SDKs retry within seconds, the last call."""

    replay_bytes: int = Field(64 * 1024**2, ge=0)
    """Bytes of answers kept for that, for each session."""

    replay_age: float = Field(600.0, gt=0)
    """How long they are kept: as long as the SDKs' own timeout of a call, after which they retry."""
