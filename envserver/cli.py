"""The command line: `python -m envserver`."""

import asyncio
import json
import logging
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler
from rich.text import Text

from envserver.client import EnvClient
from envserver.errors import EnvServerError
from envserver.limits import MIB, PoolPolicy
from envserver.plan import Plan
from envserver.serve import serve_until_told

if TYPE_CHECKING:
    from envserver.pool import EnvServerPool
    from envserver.server import EnvServer

LIVE_PERIOD = 0.25
"""Seconds between two looks at the workers' states."""

app = typer.Typer(
    name="envserver",
    help="Serve rollouts from worker processes that fail fast, not silently.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command(
    epilog="Example: python -m envserver serve my_package.my_env:make --workers 4 --address tcp://0.0.0.0:5000"
)
def serve(
    env: Annotated[str, typer.Argument(metavar="PACKAGE.MODULE:FACTORY", help="What makes the env when called.")],
    workers: Annotated[
        int, typer.Option(min=1, metavar="N", help="Worker processes. 1: this process serves by itself.")
    ] = 1,
    elastic: Annotated[
        bool,
        typer.Option("--elastic", help="Start with --min-workers, more up to --workers as load grows."),
    ] = False,
    min_workers: Annotated[
        int, typer.Option(min=1, metavar="N", help="With --elastic: start with so many, and keep them.")
    ] = 1,
    max_worker_rss: Annotated[
        int | None,
        typer.Option(min=1, metavar="MIB", help="Replace a worker that has more memory.", show_default="never"),
    ] = None,
    max_worker_age: Annotated[
        float | None,
        typer.Option(min=1, metavar="SECONDS", help="Replace a worker that is older.", show_default="never"),
    ] = None,
    multiplex: Annotated[
        int, typer.Option(min=1, metavar="N", help="Runs that one worker takes before another is started.")
    ] = 128,
    address: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen. The protocol has no authentication.")
    ] = "tcp://127.0.0.1:5000",
    kill_blocked_after: Annotated[
        float | None,
        typer.Option(
            min=PoolPolicy().silent_after,
            metavar="SECONDS",
            help="Kill a worker that does not answer once its processes have used no CPU for so long.",
            show_default="never",
        ),
    ] = None,
    kwargs: Annotated[str, typer.Option(metavar="JSON", help="The factory's arguments, a JSON object.")] = "{}",
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, metavar="PORT", help="Numbers for Prometheus at /metrics, on 127.0.0.1. 0: any free port."
        ),
    ] = None,
) -> None:
    """Serve an env until Ctrl-C, SIGTERM or SIGHUP, with a live line of worker states.

    The first signal lets runs under way end (at most 30 s), a second one does not.

    Exit status: 0 if it was told to end, 1 if it could not serve.
    """
    console = Console(stderr=True)
    _log_to(console)
    try:
        arguments = json.loads(kwargs)
    except ValueError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint="--kwargs") from None
    if not isinstance(arguments, dict):
        raise typer.BadParameter('write a JSON object, like {"split": "test"}', param_hint="--kwargs")
    sys.path.insert(0, "")  # an env in the current folder, as `python -m` has it for itself
    with _told_in_short(f"{env} could not be loaded"):
        server = Plan(
            env=env,
            env_kwargs=arguments,
            max_workers=workers,
            elastic=elastic,
            multiplex=multiplex,
            address=_full(address),
            kill_blocked_after=kill_blocked_after,
            min_workers=min_workers,
            max_worker_rss=None if max_worker_rss is None else max_worker_rss * MIB,
            max_worker_age=max_worker_age,
        ).make()
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # not under nohup
        # The terminal is closed: an end like any, for a broker that is killed leaves its folder behind.
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    with _told_in_short(f"{env} could not be served"):
        serve_until_told(server, alongside=lambda: _show_states(server, console), metrics_port=metrics_port)


@app.command()
def health(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="Like tcp://127.0.0.1:5000.")],
    timeout: Annotated[float, typer.Option(min=0.01, metavar="SECONDS", help="How long to wait for an answer.")] = 2.0,
) -> None:
    """Ask a server how it is.

    Exit status: 0 if a worker takes runs (a suspect one, silent for 30 s, does if no other can), 1 if there is none or
    no answer.
    """

    async def ask() -> dict[str, Any]:
        async with EnvClient(_full(address)) as client:
            return await client.health(timeout=timeout)

    answer = asyncio.run(ask())
    typer.echo(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in answer.items()) or "serving")
    raise typer.Exit(0 if answer.get("ready", 1) or answer.get("suspect") else 1)


def _full(address: str) -> str:
    return address if "://" in address else f"tcp://{address}"


def _log_to(console: Console) -> None:
    """What the server tells, above the live line or as plain lines."""
    if console.is_terminal:
        handler: logging.Handler = RichHandler(console=console, show_path=False, markup=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.getLogger("envserver").setLevel(logging.INFO)


async def _show_states(server: "EnvServer | EnvServerPool", console: Console) -> None:
    """One line that is always true; where there is no terminal, a line when it has changed."""
    with ExitStack() as stack:
        live = None
        if console.is_terminal:
            live = stack.enter_context(Live(console=console, auto_refresh=False, transient=True))
        shown: dict[str, int] = {}
        while True:
            states = server.states()
            # Runs come and go all the time: worth a moving line, not a line each.
            workers = {name: count for name, count in states.items() if name not in ("in flight", "waiting")}
            if live is not None:
                live.update(Text(_line(server.address, states)), refresh=True)
            elif workers != shown:
                console.print(_line(server.address, workers), highlight=False, markup=False, soft_wrap=True)
                shown = workers
            await asyncio.sleep(LIVE_PERIOD)


def _line(address: str, states: dict[str, int]) -> str:
    return f"{address}: " + ", ".join(f"{count} {name}" for name, count in states.items())


@contextmanager
def _told_in_short(what: str) -> Iterator[None]:
    try:
        yield
    except EnvServerError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the env's own code does
        _show_theirs(error)
        raise EnvServerError(f"{what}: {type(error).__name__}: {error}") from None


def _show_theirs(error: Exception) -> None:
    """The traceback of what the env's own code did, without ours above it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _ours(frame.filename)]
    typer.echo("".join(traceback.format_list(frames)).rstrip(), err=True)


def _ours(filename: str) -> bool:
    ours = __file__.removesuffix("cli.py"), asyncio.__file__.removesuffix("__init__.py"), "<frozen importlib"
    return filename.startswith(ours) or "/importlib/" in filename


def main() -> None:
    """The entry point: no traceback for a foreseeable fault."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except EnvServerError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
