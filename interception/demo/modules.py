"""Starting a module of this package as a process of its own."""

import asyncio
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]  # where this very package lies


async def start_module(name: str) -> asyncio.subprocess.Process:
    """`python -m name` with pipes to its stdin and from its stdout."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # a file of our name where the user stands must not be taken for this package
        "-m",
        name,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,  # Ctrl-C is for us, who then end it in our own order
    )
