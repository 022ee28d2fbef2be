"""LiteLLM's proxy with one model and no database, so nothing is recorded: runs in its own interpreter."""

import json
import os
import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.gateway.asgi import serving
from benchmarks.gateway.canned import MODEL
from benchmarks.gateway.control import PATH, Served, Session, main


def configure(upstream: str, key: str, file: Path) -> None:
    endpoint = {"model": f"openai/{MODEL}", "api_base": f"{upstream}/v1", "api_key": "upstream-key"}
    models = [{"model_name": MODEL, "litellm_params": endpoint}]
    config = {"model_list": models, "general_settings": {"master_key": key}}
    file.write_text(json.dumps(config))  # which is YAML, too


@asynccontextmanager
async def proxy(upstream: str) -> AsyncIterator[Served]:
    with tempfile.TemporaryDirectory(prefix="benchmark-litellm-") as folder:
        file = Path(folder, "config.yaml")
        key = f"sk-{secrets.token_hex(32)}"  # it does not start without one
        configure(upstream, key, file)
        # Its prices come with it: it must not go and fetch newer ones.
        os.environ.update(CONFIG_FILE_PATH=str(file), LITELLM_LOCAL_MODEL_COST_MAP="True", LITELLM_LOG="ERROR")
        from litellm.proxy.proxy_server import app  # reads its environment as it is imported

        async with serving(app) as base_url:
            yield Served(base_url, lambda number: [Session(PATH, key)] * number)


if __name__ == "__main__":
    main(proxy)
