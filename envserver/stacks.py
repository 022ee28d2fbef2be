"""Where a process of ours is when its loop has gone silent: it writes down its own stacks. Those of a worker the broker
quotes; those of a broker, and of a server without workers, are on their stderr.

The beat of the loop puts off, again and again, what `faulthandler` does when it is put off no more: a thread of
C code writes the stacks of all threads to a file. So they are there even while C code holds the GIL.

`faulthandler.dump_traceback_later` exists once in a process: an env that calls it itself loses its dump at the next
beat, a second later. With ENVSERVER_STACKS=0 in the environment it is left alone, and reports have no stacks.
"""

import asyncio
import contextlib
import faulthandler
import logging
import os
import re
import sys
import time
from collections.abc import Mapping

logger = logging.getLogger("envserver")

SWITCH = "ENVSERVER_STACKS"

SILENT_AFTER = 10.0
"""Seconds. Of a worker it is the policy's that counts."""

BEATS = 10
"""In the time after which the stacks are written."""

MAX_FRAMES = 30
"""Of each thread, the innermost."""

MAX_BYTES = 8192

OURS = "envserver/orphan.py"
"""In the stack of a thread that each worker has: it waits for its parent to end."""

_THREAD = re.compile(r"^(?=(?:Current thread|Thread) 0x)", re.MULTILINE)


def wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether stacks are to be written down."""
    return environment.get(SWITCH, "1") != "0"


async def beat(path: str | None, after: float) -> None:
    """Until it is cancelled: have this process write its stacks to the file `path`, or to stderr, once its loop is
    silent for `after` seconds. When the loop goes round again that is told to the log, and the file is emptied. Where
    stderr is no file, nothing is written."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(path or os.dup(sys.stderr.fileno()), "ab", 0))  # noqa: ASYNC230 - local
        except (AttributeError, OSError, ValueError):
            if path is None:
                return
            raise
        stack.callback(faulthandler.cancel_dump_traceback_later)
        last = time.monotonic()
        while True:
            now = time.monotonic()
            if now - last >= after:
                logger.warning("the event loop stood still for %.1f s, and all that this process runs", now - last)
            if path is not None and os.fstat(file.fileno()).st_size:
                file.truncate(0)
            last = now
            faulthandler.dump_traceback_later(after, file=file)
            await asyncio.sleep(after / BEATS)
            faulthandler.cancel_dump_traceback_later()


def read_stacks(path: str | os.PathLike[str]) -> str:
    """What the process that beats for `path` has written: the thread of the loop first, each from the innermost call.
    Empty if there is nothing."""
    try:
        with open(path, "rb") as file:
            text = file.read(1 << 20).decode(errors="replace")
    except OSError:
        return ""
    _, *threads = _THREAD.split(text)
    threads.reverse()  # the first that was started is the last that is written
    shown = "\n".join(_shortened(thread) for thread in threads if OURS not in thread)
    return shown if len(shown) <= MAX_BYTES else shown[:MAX_BYTES] + " …"


def _shortened(thread: str) -> str:
    head, *frames = thread.strip().splitlines()
    more = [] if len(frames) <= MAX_FRAMES else [f"  … {len(frames) - MAX_FRAMES} more"]
    return "\n".join([head, *frames[:MAX_FRAMES], *more])
