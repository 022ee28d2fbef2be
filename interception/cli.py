"""The command line: `interception`."""

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import asdict
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import SecretStr, ValidationError
from rich.console import Console
from rich.text import Text

from interception.base import Slot
from interception.session import RolloutSession, Upstream
from interception.settings import PREFIX, TUNNELS, Settings, SettingsError
from interception.trace import Trace
from interception.words import Told, block, finding_text, first_cause, reason, say, turn_line
from tunnel import Tunnel, TunnelConfig, TunnelError

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Those by which a command is told to end."""

UPSTREAM_API_KEY = "UPSTREAM_API_KEY"


class DemoTunnel(StrEnum):
    """What the demo can run on."""

    ssh = "ssh"
    prime = "prime"
    none = "none"


app = typer.Typer(
    name="interception",
    help="Catch the model calls of remote agents, through tunnels that keep serving.",
    epilog=(
        "Every option can also stand in a TOML file, in a table named after its command, or in the variable shown "
        "beside it. A flag wins over a variable, and that over the file. A tunnel's fields: a table `[ssh]` with its "
        "`host` and so on, `INTERCEPTION_SSH_HOST`, or `--set host=…`."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"interception-toolkit {version('interception-toolkit')}")
        raise typer.Exit


@app.callback()
def _common(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar=f"{PREFIX}CONFIG",
            help="Settings to read. Without it: ~/.config/interception.toml, if it is there.",
        ),
    ] = None,
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    # What is worth telling is told by the commands; without a handler Python would print warnings a second time.
    for name in ("tunnel", "interception"):
        logging.getLogger(name).addHandler(logging.NullHandler())
    group: Any = context.command
    # Those that have a variable can stand in the file, under the name by which they are typed.
    options = {
        command: {option.opts[-1].lstrip("-").replace("-", "_"): option for option in made.params if option.envvar}
        for command, made in group.commands.items()
    }
    settings = Settings.load(config, options)
    context.obj = settings
    context.default_map = {
        command: {
            table[key].name: _fits(context, table[key], value, f"{settings.source}: {command}.{key}")
            for key, value in settings.options(command).items()
        }
        for command, table in options.items()
    }
    variables = [option.envvar for table in options.values() for option in table.values()]
    for line in settings.strays([f"{PREFIX}CONFIG", *variables]):
        say(line)


def _fits(context: typer.Context, option: Any, value: Any, place: str) -> Any:
    """A value of the file, if it is one for that option; the option's own error would name its flag and variable."""
    try:
        if isinstance(value, bool) != option.is_flag:
            raise typer.BadParameter("true or false is wanted" if option.is_flag else "not true or false")
        option.process_value(context, value)
    except typer.BadParameter as error:
        raise SettingsError(f"{place}: {error.message}") from None
    return value


def _variable(command: str, option: str) -> str:
    return f"{PREFIX}{command}_{option}".upper()


SET_HELP = (
    "A field of the tunnel's config, e.g. remote_port=8080, policy.give_up_after=300 or env.NAME=value. May be given "
    "repeatedly."
)


METRICS_HELP = "Numbers for Prometheus at /metrics, on 127.0.0.1. 0: any free port."


@app.command(epilog="Example: interception demo --upstream http://gpu:8000/v1 --model qwen --rollouts 60")
def demo(
    rollouts: Annotated[
        int, typer.Option(metavar="N", min=1, max=10_000, envvar=_variable("demo", "rollouts"), help="How many.")
    ] = 30,
    tunnel: Annotated[
        DemoTunnel,
        typer.Option(
            envvar=_variable("demo", "tunnel"),
            help="What the agents reach us through. Only the ssh relay of its own is disturbed on purpose.",
        ),
    ] = DemoTunnel.ssh,
    upstream: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar=_variable("demo", "upstream"),
            help="A real model endpoint. Without it: an echo model.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", envvar=_variable("demo", "model"), help="The model to ask for there.")
    ] = None,
    api_key_env: Annotated[
        str,
        typer.Option(metavar="VARIABLE", envvar=_variable("demo", "api_key_env"), help="Holds the endpoint's key."),
    ] = UPSTREAM_API_KEY,
) -> None:
    """Run rollouts through real tunnels on this machine while one is cut and one is revoked (about 20 s).

    Nothing to configure: model, SSH relay and agents are started here and ended again. On a terminal it shows its
    servers, their tunnels and load as it goes.

    Exit status: 0 only if every rollout that was not on the revoked tunnel finished with all its turns recorded.
    """
    from interception.demo.run import Plan
    from interception.demo.view import show, summary

    target = _upstream(upstream, api_key_env)
    if (target is None) != (model is None):
        missing = "--model" if model is None else "--upstream"
        raise typer.BadParameter("a real model needs both --upstream and --model", param_hint=missing)
    plan = Plan(rollouts=rollouts, tunnel=tunnel.value, upstream=target, model=model or "echo")
    console = Console()
    try:
        result = run_until_interrupted(show(console, plan))
    except (RuntimeError, ExceptionGroup) as error:
        if isinstance(error, ExceptionGroup) and error.split(RuntimeError)[1] is not None:
            raise
        typer.echo(f"FAILED: {first_cause(error)}", err=True)  # one of the demo's own processes has ended
        raise typer.Exit(1) from None
    console.print(summary(result))
    for failure in result.failures:
        typer.echo(f"FAILED: {failure}", err=True)
    raise typer.Exit(1 if result.failures else 0)


@app.command(
    name="tunnel",
    epilog="Example: interception tunnel 8000 --type ssh://me@relay.example --health /healthz",
)
def tunnel_(
    context: typer.Context,
    port: Annotated[int, typer.Argument(min=1, max=65535, help="The local port to make public.")],
    kind: Annotated[
        str, typer.Option("--type", metavar="TUNNEL", envvar=_variable("tunnel", "type"), help=f"{TUNNELS}.")
    ] = "prime",
    health: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            envvar=_variable("tunnel", "health"),
            help="Where the service answers 200. Without it: /vf/health if it has that, else any answer will do.",
        ),
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help=SET_HELP)] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, metavar="PORT", envvar=_variable("tunnel", "metrics_port"), help=METRICS_HELP),
    ] = None,
) -> None:
    """Make a local service public, and keep it so until Ctrl-C.

    Prints the URL, alone, on stdout; what happens to it on stderr. The tunnel is watched, and its client restarted
    under the same URL when that helps.

    Exit status: 1 if the tunnel cannot be made or is gone for good.
    """
    from interception.exposing import expose

    if health is not None and not health.startswith("/"):
        raise typer.BadParameter("a path begins with /", param_hint="--health")
    config = _tunnel(context, kind, set_, hint="--type")
    if config is None:
        raise typer.BadParameter(f"a tunnel is what this makes: write {TUNNELS}", param_hint="--type")
    logger = logging.getLogger("tunnel")
    logger.addHandler(Told())
    logger.setLevel(logging.INFO)

    def on_url(url: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(url, flush=True)
        say(f"{url} leads to 127.0.0.1:{port}; Ctrl-C ends it")

    with _metrics_page(metrics_port) as show:
        run_until_interrupted(expose(config, port, health=health, on_url=on_url, say=say, on_tunnel=show))


@app.command(epilog="Example: interception doctor --tunnel ssh://me@relay.example --json")
def doctor(
    context: typer.Context,
    tunnel: Annotated[
        str, typer.Option(metavar="TUNNEL", envvar=_variable("doctor", "tunnel"), help=f"none, {TUNNELS}.")
    ] = "prime",
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help=SET_HELP)] = None,
    as_json: Annotated[
        bool, typer.Option("--json", envvar=_variable("doctor", "json"), help="Print one JSON object instead.")
    ] = False,
) -> None:
    """Check what a run through a tunnel would need, and say how to mend what is missing.

    The last check opens the tunnel and calls a server of ours through its URL.

    Exit status: 0 only if the tunnel would work.
    """
    from interception.doctor import Finding, examine, works

    config = _tunnel(context, tunnel, set_, hint="--tunnel")
    kind = "none" if config is None else config.type
    console = Console(soft_wrap=True, highlight=False)

    def tell(finding: Finding) -> None:
        if not as_json:
            console.print(finding_text(finding))

    findings = run_until_interrupted(examine(config, tell))
    good = works(findings)
    if as_json:
        checks = [asdict(finding) for finding in findings]
        typer.echo(json.dumps({"tunnel": kind, "works": good, "checks": checks}, indent=2))
    else:
        what = "A run without a tunnel" if config is None else f"The {kind} tunnel"
        failed = sum(finding.status == "fail" for finding in findings)
        verdict = "works" if good else f"would not work: {failed} check{'s' * (failed > 1)} failed"
        console.print(Text(f"{what} {verdict}.", style="bold green" if good else "bold red"))
    raise typer.Exit(0 if good else 1)


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="Example: interception run --trace trace.jsonl -- codex exec 'fix the test'",
)
def run(
    context: typer.Context,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The agent program and its arguments.")],
    upstream: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar=_variable("run", "upstream"),
            help="The model endpoint's base URL, as an SDK takes it. Without it: an echo model.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            envvar=_variable("run", "model"),
            help="The model to ask for, whatever the program asks for.",
        ),
    ] = None,
    api_key_env: Annotated[
        str,
        typer.Option(
            metavar="VARIABLE",
            envvar=_variable("run", "api_key_env"),
            help="Holds the endpoint's key. It is kept from the program.",
        ),
    ] = UPSTREAM_API_KEY,
    tunnel: Annotated[
        str,
        typer.Option(
            metavar="TUNNEL",
            envvar=_variable("run", "tunnel"),
            help=f"What the program reaches us through: none, {TUNNELS}.",
        ),
    ] = "none",
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help=SET_HELP)] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar=_variable("run", "trace"),
            help="Write the trace to this file (JSON lines), also after a failure.",
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, metavar="PORT", envvar=_variable("run", "metrics_port"), help=METRICS_HELP),
    ] = None,
) -> None:
    """Run an agent program with its model calls caught and recorded.

    OpenAI's and Anthropic's variables are set for the program only; each of its turns is shown on stderr.

    Exit status: the program's own, 128 + n if signal n ended it; 3 if it was 0 and no call was seen; 127 if there is
    no such program, 126 if it cannot be executed; 1 if the tunnel cannot be made or is lost.
    """
    from interception.run import NO_CALLS, CannotRunError
    from interception.run import run as run_program

    if command[0].startswith("-"):  # else it would be the program, and what it was meant to set would be missing
        raise typer.BadParameter("no such option, and no program either", param_hint=command[0].partition("=")[0])
    target = _upstream(upstream, api_key_env)
    through = _tunnel(context, tunnel, set_, hint="--tunnel")
    if trace is not None:
        try:
            trace.open("ab").close()  # now, and not after the program has run for an hour
        except OSError as error:
            raise typer.BadParameter(f"{trace} cannot be written: {error.strerror}", param_hint="--trace") from None
    if target is None:
        say("no --upstream given: the program talks to an echo model")
    sessions: list[RolloutSession] = []

    def ready(slot: Slot, session: RolloutSession) -> None:
        sessions.append(session)
        say(f"model calls are caught at {slot.base_url}")

    try:
        with _metrics_page(metrics_port) as show:
            status = asyncio.run(
                run_program(
                    command,
                    upstream=target,
                    model=model,
                    tunnel=through,
                    hidden=[api_key_env],
                    on_turn=lambda turn: say(turn_line(turn)),
                    on_ready=ready,
                    on_server=show,
                )
            )
    except CannotRunError as error:
        say(str(error))
        raise typer.Exit(error.status) from None
    finally:
        # Also when the tunnel was lost, or we were told to end: what was recorded is kept.
        if sessions and trace is not None:
            _write(sessions[0].trace, trace)
    for session in sessions:
        for finding in session.findings:
            say(finding)
        if status == 0 and not session.calls_seen:
            status = NO_CALLS
    raise typer.Exit(status)


@contextlib.contextmanager
def _metrics_page(port: int | None) -> Iterator[Callable[[Any], object]]:
    """Serves the page, if there is to be one; yields what shows a tunnel or a server there."""
    if port is None:
        yield lambda source: None
        return
    try:
        from interception.prometheus import register
        from tunnel import prometheus as tunnels
    except ImportError as error:
        raise typer.BadParameter(str(error), param_hint="--metrics-port") from None

    def show(source: Any) -> None:
        shown = tunnels.register if isinstance(source, Tunnel) else register
        stack.callback(shown(source, "interception"))

    with contextlib.ExitStack() as stack:
        try:
            url = tunnels.serve_page(stack, port)
        except OSError as error:
            raise typer.BadParameter(f"port {port} cannot be had: {error}", param_hint="--metrics-port") from None
        say(f"metrics are on {url}")
        yield show


def _upstream(url: str | None, key_variable: str) -> Upstream | None:
    key = os.environ.get(key_variable)
    if key is None and key_variable != UPSTREAM_API_KEY:
        raise typer.BadParameter(f"{key_variable} is not set", param_hint="--api-key-env")
    if url is None:
        return None
    try:
        return Upstream(base_url=url, api_key=SecretStr(key) if key else None)
    except ValidationError as error:
        raise typer.BadParameter(reason(error), param_hint="--upstream") from None


def _tunnel(context: typer.Context, name: str, assignments: Iterable[str] | None, *, hint: str) -> TunnelConfig | None:
    settings: Settings = context.obj
    try:
        return settings.tunnel(name, assignments or ())
    except SettingsError as error:
        raise typer.BadParameter(str(error), param_hint=hint) from None


def _write(record: Trace, file: Path) -> None:
    try:
        file.write_text(record.to_jsonl(), encoding="utf-8")
    except OSError as error:
        say(f"the trace could not be written to {file}: {error.strerror}")
    else:
        say(f"{len(record.turns)} turns written to {file}")


def run_until_interrupted(work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; SIGINT, SIGTERM and SIGHUP, however many, cancel it once, and it is left to release what it holds.

    Then exits as a shell would tell it: 128 + the signal's number.
    """
    received: list[int] = []

    async def watched() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work)

        def interrupt(number: int) -> None:
            if not received:
                task.cancel()
            received.append(number)

        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, a shell's background job
                loop.add_signal_handler(number, interrupt, number)
        return await task

    try:
        return asyncio.run(watched())
    except asyncio.CancelledError:
        raise SystemExit(128 + received[0] if received else 1) from None


def main() -> None:
    """The entry point: no traceback for a foreseeable fault."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except TunnelError as error:
        typer.echo(f"error: {block(str(error))}", err=True)
        sys.exit(1)
    except SettingsError as error:
        typer.echo(f"error: {block(str(error))}", err=True)
        sys.exit(2)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        say(f"what it has to say could not be written: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python's own end tries once more
        sys.exit(1)
