"""verifiers' envs behind our env server: `python -m envserver serve interception.integrations.verifiers.worker:make`.

Requests and answers are those of verifiers' own worker, so that verifiers' `EnvClient` drives it unchanged.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from pydantic import ValidationError
from verifiers.v1.clients import ModelContext
from verifiers.v1.serve.delta import DeltaStreamer, TraceSummary, dump, pack
from verifiers.v1.serve.types import RunRequest
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from envserver import Emit, EnvServerError
from interception.integrations.verifiers import installation
from interception.integrations.verifiers.options import Options, options_from_json

FACTORY = f"{__name__}:make"
"""What the workers load."""

HOW = '--kwargs \'{"config": {"taskset": {"id": "my-taskset"}, "agent": {"harness": {"id": "null"}}}}\''


class VerifiersEnv:
    """An env of verifiers as `envserver` runs it, with `install(options)` done while it serves.

    `max_concurrent` bounds the episodes under way in this process (None: no bound). `options` None: what is installed
    here already, or the defaults.
    """

    def __init__(self, env: Any, *, max_concurrent: int | None = None, options: Options | None = None) -> None:
        self.env = env
        self.options = options
        self._gate = asyncio.Semaphore(max_concurrent) if max_concurrent else None
        self._task_type = type(env.taskset).task_type()
        self._data_type = self._task_type.data_type()
        lost = [name for name, field in self._data_type.model_fields.items() if field.exclude]
        if lost:
            raise EnvServerError(
                f"{self._data_type.__name__} cannot be served: {', '.join(lost)} would not reach the worker, for such "
                "fields have exclude=True. Take that away, or make the field part of the task set's config."
            )

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        as_it_is = self.options is None and installation.current() is not None
        with contextlib.nullcontext() if as_it_is else installation.installed(self.options):
            async with self.env.serving():
                yield

    async def run(self, request: dict[str, Any], emit: Emit) -> dict[str, Any]:
        """One episode of the task in `request`: its traces as they grow, then the episode without them."""
        asked = RunRequest.model_validate(request)
        task = self._task_type(self._data_type.model_validate(asked.task_data), self.env.config.taskset.task)
        [slot] = self.env.slots(task)
        context = ModelContext(client=asked.client, model=asked.model, sampling=asked.sampling)
        async with DeltaStreamer(lambda: slot.traces, lambda delta: emit(_packed(delta))) as streamer:
            episode = await self.env.run_slot(slot, context, self._gate, on_trace=streamer.watch)
        summaries = [
            TraceSummary(id=trace.id, nodes=len(trace.nodes), calls=len(trace.calls)).model_dump()
            for trace in episode.traces
        ]
        return _packed({"head": dump(episode, exclude={"traces"}), "traces": summaries})


def _packed(fields: dict[str, Any]) -> dict[str, Any]:
    """Each value as verifiers packs it: arrays, dates and the like have a form of their own there."""
    return {name: msgspec.Raw(pack(value)) for name, value in fields.items()}


def make(
    config: Mapping[str, Any] | None = None,
    *,
    max_concurrent: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> VerifiersEnv:
    """The env that verifiers' config describes. All arguments are JSON values.

    `config` is verifiers' `[env]` block, as `env_config_data` writes it; `max_concurrent` bounds the episodes under way
    in one worker; `options` has the fields of `Options`, like `{"tunnel": {"type": "ssh", "host": "relay"}}`. Raises
    `EnvServerError` for what verifiers or we do not know in there.
    """
    if not isinstance(config, Mapping):
        found = "" if config is None else f", not a {type(config).__name__}"
        raise EnvServerError(f"config must be verifiers' [env] block{found}; on a command line: {HOW}")
    if not isinstance(taskset := config.get("taskset"), Mapping) or not taskset.get("id"):
        raise EnvServerError(f"config has no taskset.id; on a command line: {HOW}")
    if max_concurrent is not None and max_concurrent < 1:
        raise EnvServerError(f"max_concurrent must be 1 or more, or null, not {max_concurrent}")
    try:
        chosen = None if options is None else options_from_json(options)
        env = load_environment(resolve_env_config(dict(config)))
    except ValidationError as error:
        # Without what was given there: a config may hold keys.
        faults = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors(include_input=False))
        raise EnvServerError(f"{error.title}: {'; '.join(faults)}") from None
    except ModuleNotFoundError as error:
        # verifiers says so, too, of a task set that is there, and imports what is not.
        cause = "" if error.__cause__ is None else f" ({error.__cause__})"
        raise EnvServerError(f"{error}{cause}") from None
    return VerifiersEnv(env, max_concurrent=max_concurrent, options=chosen)
