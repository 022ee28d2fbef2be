"""What the command line says, in words that cannot speak to the terminal."""

import contextlib
import logging
import time
from typing import Any

import typer
from pydantic import ValidationError
from rich.text import Text

from interception.trace import Turn


def say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a reader of ours that left is no reason not to run the program
        typer.echo(f"interception: {printable(line)}", err=True)


def printable(line: str) -> str:
    """Names and errors come from programs and upstreams: nothing in them may speak to the terminal."""
    return "".join(mark if mark.isprintable() else "?" for mark in line)


def block(text: str) -> str:
    """The same for text of several lines: errors quote what a tunnel program has printed."""
    return "\n".join(printable(line) for line in text.split("\n"))


def first_cause(error: BaseException) -> str:
    """The first thing that went wrong, out of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)


def reason(error: ValidationError) -> str:
    return "; ".join(problem["msg"].removeprefix("Value error, ") for problem in error.errors())


def turn_line(turn: Turn) -> str:
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


FINDINGS = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim"}


def finding_text(finding: Any) -> Text:
    def indented(text: str) -> str:
        return block(text).replace("\n", f"\n{'':18}")

    text = Text(f"{finding.status:<5}", style=FINDINGS[finding.status])
    text.append(f"{finding.check:<12} ", style="bold").append(indented(finding.detail), style="default")
    if finding.remedy is not None:
        text.append(f"\n{'':18}→ {indented(finding.remedy)}", style="cyan")
    return text


class Told(logging.Handler):
    """Log lines on stderr, as the commands say things."""

    def emit(self, record: logging.LogRecord) -> None:
        first, *quoted = record.getMessage().split("\n")
        say(f"{time.strftime('%H:%M:%S')} {first}")
        for line in quoted:
            say(line)
