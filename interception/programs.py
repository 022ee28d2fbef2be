"""How an agent program is started so that its model calls come to a slot.

Programs that find their model through OpenAI's and Anthropic's environment variables need nothing more. What others
need is one row each in `PROGRAMS`, by the name of their executable, tried with the version named beside it.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from types import MappingProxyType
from typing import NamedTuple


class Program(NamedTuple):
    """What is added to a program's command line (right after its name) and environment; `{NAME}` in these texts is
    that variable of the slot's. `without`: variables that would lead its calls past the slot.
    """

    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = MappingProxyType({})
    without: tuple[str, ...] = ()


PROGRAMS: Mapping[str, Program] = {
    # @openai/codex 0.171.0 reads no OPENAI_BASE_URL any more, and OPENAI_API_KEY only when it logs in.
    "codex": Program(
        arguments=("-c", "openai_base_url={OPENAI_BASE_URL}"),
        env={"CODEX_API_KEY": "{OPENAI_API_KEY}"},
    ),
    # @anthropic-ai/claude-code 2.1.332 finds the slot by itself, unless it was told of a cloud.
    "claude": Program(without=("CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY")),
    # mini-swe-agent 2.4.6 (on litellm 1.110.2) would ask for a key first, and give up on a model without a price.
    "mini": Program(env={"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}),
}

ASTRAY = ("OPENAI_API_BASE", "ANTHROPIC_API_BASE", "ANTHROPIC_AUTH_TOKEN")
"""Older and rarer names for what the slot's variables say, taken from every program: some would go by them instead."""


def launch(
    command: Sequence[str], slot: Mapping[str, str], environ: Mapping[str, str], *, hidden: Iterable[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment by which `command` comes to the slot whose variables are `slot`.

    Its environment is `environ` (which is left as it is) without the variables of `hidden`.
    """
    program = PROGRAMS.get(PurePath(command[0]).name, Program())
    added = [argument.format_map(slot) for argument in program.arguments]
    dropped = {*hidden, *ASTRAY, *program.without}
    env = {name: value for name, value in environ.items() if name not in dropped}
    env.update(slot)
    env.update({name: value.format_map(slot) for name, value in program.env.items()})
    # A proxy must not be asked for our own loopback address.
    exceptions = [name for name in environ.get("NO_PROXY", environ.get("no_proxy", "")).split(",") if name]
    env["NO_PROXY"] = env["no_proxy"] = ",".join([*exceptions, "127.0.0.1", "localhost"])
    return [command[0], *added, *command[1:]], env
