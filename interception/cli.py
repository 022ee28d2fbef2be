"""The command line: `interception`."""

import asyncio
import logging
import signal
import sys
from collections.abc import Coroutine
from importlib.metadata import version
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from tunnel import TunnelError

T = TypeVar("T")

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
        typer.echo(f"FAILED: {_reason(error)}", err=True)  # one of the demo's own processes has ended
        raise typer.Exit(1) from None
    show(result)
    for failure in result.failures:
        typer.echo(f"FAILED: {failure}", err=True)
    raise typer.Exit(1 if result.failures else 0)


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


def _reason(error: BaseException) -> str:
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
