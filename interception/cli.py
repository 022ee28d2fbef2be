"""The command line: `interception`."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import typer
from pydantic import SecretStr, ValidationError
from rich.console import Console
from rich.table import Table

from interception.base import Slot
from interception.session import RolloutSession, Upstream
from interception.trace import Trace, Turn
from tunnel import PrimeTunnelConfig, SshTunnelConfig, TunnelConfig, TunnelError

T = TypeVar("T")

UPSTREAM_API_KEY = "UPSTREAM_API_KEY"

app = typer.Typer(
    name="interception",
    help="Catch the model calls of remote agents, through tunnels that keep serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"interception-toolkit {version('interception-toolkit')}")
        raise typer.Exit


@app.callback()
def _common(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    # What is worth telling is told by the commands; without a handler Python would print warnings a second time.
    for name in ("tunnel", "interception"):
        logging.getLogger(name).addHandler(logging.NullHandler())


@app.command()
def demo() -> None:
    """Run 30 rollouts through real SSH tunnels on this machine while one is cut and one is revoked (about 20 s).

    Nothing to configure: model, relay and agents are started here and ended again. Exits with 0 only if every
    rollout that was not on the revoked tunnel finished with all its turns recorded.
    """
    from interception.demo.run import Demo, Result

    console = Console()

    def show(result: Result) -> None:
        lost = [outcome for outcome in result.outcomes if outcome.error is not None]
        table = Table(title="What happened", show_header=False, title_justify="left")
        table.add_row("calls answered", str(sum(outcome.answered for outcome in result.outcomes)))
        table.add_row("turns recorded", str(sum(outcome.recorded for outcome in result.outcomes)))
        table.add_row("answered, not recorded", str(sum(outcome.lost for outcome in result.outcomes)))
        table.add_row("retries by the agents", str(sum(outcome.retries for outcome in result.outcomes)))
        table.add_row("servers started", str(result.servers))
        table.add_row("tunnels restarted", str(result.restarts))
        table.add_row("servers retired", str(result.retired))
        table.add_row("rollouts finished", str(len(result.outcomes) - len(lost)))
        table.add_row("rollouts failed", str(len(lost)))
        for reason in sorted({outcome.error or "" for outcome in lost}):
            count = sum(outcome.error == reason for outcome in lost)
            table.add_row("  why", f"{count} x {reason}")
        console.print(table)

    try:
        result = run_until_interrupted(Demo(typer.echo).run())
    except (RuntimeError, ExceptionGroup) as error:
        if isinstance(error, ExceptionGroup) and error.split(RuntimeError)[1] is not None:
            raise
        typer.echo(f"FAILED: {_first_cause(error)}", err=True)  # one of the demo's own processes has ended
        raise typer.Exit(1) from None
    show(result)
    for failure in result.failures:
        typer.echo(f"FAILED: {failure}", err=True)
    raise typer.Exit(1 if result.failures else 0)


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="Example: interception run --trace trace.jsonl -- codex exec 'fix the test'",
)
def run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The agent program and its arguments.")],
    upstream: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="The model endpoint's base URL, as an SDK takes it. Without it: an echo model."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model to ask for, whatever the program asks for.")
    ] = None,
    api_key_env: Annotated[
        str, typer.Option(metavar="VARIABLE", help="Holds the endpoint's key. It is kept from the program.")
    ] = UPSTREAM_API_KEY,
    tunnel: Annotated[
        str,
        typer.Option(
            metavar="TUNNEL", help="What the program reaches us through: none, prime or ssh://[USER@]HOST[:PORT]."
        ),
    ] = "none",
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the trace to this file (JSON lines), also after a failure."),
    ] = None,
) -> None:
    """Run an agent program with its model calls caught and recorded.

    OpenAI's and Anthropic's variables are set for the program only; each of its
    turns is shown on stderr.

    Exit status: the program's own, 128 + n if signal n ended it.
    3 if it was 0 and no call was seen.
    127 if there is no such program, 126 if it cannot be executed.
    1 if the tunnel cannot be made or is lost.
    """
    from interception.run import NO_CALLS, CannotRunError
    from interception.run import run as run_program

    target = _upstream(upstream, api_key_env)
    through = _tunnel(tunnel)
    if trace is not None:
        try:
            trace.open("ab").close()  # now, and not after the program has run for an hour
        except OSError as error:
            raise typer.BadParameter(f"{trace} cannot be written: {error.strerror}", param_hint="--trace") from None
    if target is None:
        _say("no --upstream given: the program talks to an echo model")
    sessions: list[RolloutSession] = []

    def ready(slot: Slot, session: RolloutSession) -> None:
        sessions.append(session)
        _say(f"model calls are caught at {slot.base_url}")

    try:
        status = asyncio.run(
            run_program(
                command,
                upstream=target,
                model=model,
                tunnel=through,
                hidden=[api_key_env],
                on_turn=lambda turn: _say(_turn_line(turn)),
                on_ready=ready,
            )
        )
    except CannotRunError as error:
        _say(str(error))
        raise typer.Exit(error.status) from None
    finally:
        # Also when the tunnel was lost, or we were told to end: what was recorded is kept.
        if sessions and trace is not None:
            _write(sessions[0].trace, trace)
    for session in sessions:
        for finding in session.findings:
            _say(finding)
        if status == 0 and not session.calls_seen:
            status = NO_CALLS
    raise typer.Exit(status)


def _say(line: str) -> None:
    # Names and errors come from the program and its upstream: nothing in them may speak to the terminal.
    line = "".join(mark if mark.isprintable() else "?" for mark in line)
    with contextlib.suppress(OSError, ValueError):  # a reader of ours that left is no reason not to run the program
        typer.echo(f"interception: {line}", err=True)


def _upstream(url: str | None, key_variable: str) -> Upstream | None:
    key = os.environ.get(key_variable)
    if key is None and key_variable != UPSTREAM_API_KEY:
        raise typer.BadParameter(f"{key_variable} is not set", param_hint="--api-key-env")
    if url is None:
        return None
    try:
        return Upstream(base_url=url, api_key=SecretStr(key) if key else None)
    except ValidationError as error:
        raise typer.BadParameter(_reason(error), param_hint="--upstream") from None


def _tunnel(name: str) -> TunnelConfig | None:
    if name == "none":
        return None
    if name == "prime":
        return PrimeTunnelConfig()
    try:
        parts = urlsplit(name)
        relay = parts.scheme == "ssh" and bool(parts.hostname) and not (parts.path.strip("/") or parts.query)
        port = parts.port or 22
    except ValueError:  # a port that is no number, or too large
        relay = False
    if not relay:
        # Not quoted back: a password may stand in it.
        raise typer.BadParameter("write none, prime or ssh://[USER@]HOST[:PORT]", param_hint="--tunnel")
    if parts.password is not None:
        raise typer.BadParameter("SSH logs in with a key, not by password", param_hint="--tunnel")
    return SshTunnelConfig(host=parts.hostname or "", port=port, username=parts.username)


def _reason(error: ValidationError) -> str:
    return "; ".join(problem["msg"].removeprefix("Value error, ") for problem in error.errors())


def _turn_line(turn: Turn) -> str:
    attempt = turn.attempts[-1]
    tokens = "? tokens"
    if turn.usage is not None:
        counts = ("?" if count is None else str(count) for count in (turn.usage.input_tokens, turn.usage.output_tokens))
        tokens = "{} tokens in, {} out".format(*counts)
    took = f"{(attempt.ended or 0) - (attempt.started or 0):.2f} s"
    line = f"{turn.dialect}, {turn.request.get('model', '?')}: status {attempt.status or '-'}, {tokens}, {took}"
    if len(turn.attempts) > 1:
        line += f", attempt {len(turn.attempts)}"
    return line + (f", {attempt.error}" if attempt.error else "")


def _write(record: Trace, file: Path) -> None:
    try:
        file.write_text(record.to_jsonl(), encoding="utf-8")
    except OSError as error:
        _say(f"the trace could not be written to {file}: {error.strerror}")
    else:
        _say(f"{len(record.turns)} turns written to {file}")


def run_until_interrupted(work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; SIGINT and SIGTERM, however many, cancel it once, and it is left to release what it holds.

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

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt, number)
        return await task

    try:
        return asyncio.run(watched())
    except asyncio.CancelledError:
        raise SystemExit(128 + received[0] if received else 1) from None


def _first_cause(error: BaseException) -> str:
    """The first thing that went wrong, out of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)


def main() -> None:
    """The entry point: no traceback for a foreseeable fault."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except TunnelError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
