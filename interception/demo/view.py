"""What the demo shows: on a terminal a live view below its events, anywhere else plain lines."""

import asyncio
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from interception.demo.run import MULTIPLEX, TURNS, Demo, Plan, Result
from interception.stats import PoolStats
from tunnel.teardown import cancel_and_wait, run_to_end

REFRESH = 0.125
"""Seconds between two looks."""

STYLES = {
    "serving": "green",
    "suspect": "yellow",
    "restarting": "yellow",
    "local_down": "red",
    "path_fault": "red",
    "gone": "red",
}


async def show(console: Console, plan: Plan) -> Result:
    """Run the demo with its events shown as they happen."""
    if not console.is_terminal or console.is_dumb_terminal:
        return await Demo(lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True), plan).run()
    with Live(console=console, auto_refresh=False, transient=True, redirect_stderr=False) as live:
        demo = Demo(lambda line: live.console.print(_event(line)), plan)
        refreshing = asyncio.create_task(_refresh(live, lambda: view(demo)))
        try:
            return await demo.run()
        finally:
            await run_to_end(cancel_and_wait(refreshing))


async def _refresh(live: Live, look: Callable[[], RenderableType]) -> None:
    # In a task and not in Live's own thread, which would read a pool while it changes.
    while True:
        live.update(look(), refresh=True)
        await asyncio.sleep(REFRESH)


def view(demo: Demo) -> RenderableType:
    """One frame."""
    stats = None if demo.pool is None else demo.pool.stats()
    return Group(_servers(stats), _progress(demo))


def _servers(stats: PoolStats | None) -> RenderableType:
    table = Table(title_justify="left", expand=False, border_style="dim")
    for name in ("server", "tunnel", "rollouts", "restarts", "why"):
        table.add_column(name, justify="right" if name == "restarts" else "left", no_wrap=True)
    for server in () if stats is None else (*stats.servers, *stats.retired):
        slots = "●" * server.load + "○" * max(0, MULTIPLEX - server.load)
        state = Text(server.state, style=STYLES.get(server.state, ""))
        table.add_row(
            server.base_url, state, slots, str(server.restarts or ""), Text(server.reason, overflow="ellipsis")
        )
    for start in () if stats is None else stats.starting:
        table.add_row("(starting)", Text(f"try {max(1, start.tries)}", style="cyan"), "", "", start.error or "")
    if not table.row_count:
        table.add_row("(starting)", "", "", "", "")
    return table


def _progress(demo: Demo) -> RenderableType:
    progress, plan = demo.progress, demo.plan
    turns = plan.rollouts * TURNS
    row = Table.grid(padding=(0, 1))
    row.add_row(
        ProgressBar(total=plan.rollouts, completed=progress.finished + progress.failed, width=30),
        f"{progress.finished + progress.failed}/{plan.rollouts} rollouts",
        f"{progress.playing} playing",
        f"{progress.answered} of {turns} calls answered",
        Text(f"{progress.failed} failed", style="red") if progress.failed else "",
    )
    return row


def _event(line: str) -> Text:
    text = Text(line)
    text.highlight_regex(r"^ *[\d.]+ s", "dim")
    text.highlight_regex(r"https?://\S+[\w/]", "cyan")
    text.highlight_regex(r"serving again|back under the same URL", "green")
    text.highlight_regex(r"gone for good.*|ended: .*", "red")
    text.highlight_regex(r"^ *[\d.]+ s  (cutting|revoking) .*", "bold")
    return text


def summary(result: Result) -> Table:
    """What happened, in numbers."""
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
        table.add_row("  why", Text(f"{count} x {reason}"))
    return table
