"""rLLM's model gateway with its defaults (each call is kept in SQLite): runs in its own interpreter."""

import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rllm_model_gateway.models import GatewayConfig, WorkerConfig
from rllm_model_gateway.server import create_app

from benchmarks.gateway.asgi import serving
from benchmarks.gateway.control import PATH, Served, Session, main


def sessions(number: int) -> list[Session]:
    """They begin with their first call."""
    return [Session(f"/sessions/{uuid.uuid4().hex}{PATH}", "key") for _ in range(number)]


@asynccontextmanager
async def gateway(upstream: str) -> AsyncIterator[Served]:
    with tempfile.TemporaryDirectory(prefix="benchmark-rllm-") as folder:
        config = GatewayConfig(
            workers=[WorkerConfig(worker_id="0", url=f"{upstream}/v1")], db_path=str(Path(folder, "traces.db"))
        )
        async with serving(create_app(config)) as base_url:
            yield Served(base_url, sessions)


if __name__ == "__main__":
    main(gateway)
