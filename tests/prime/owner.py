"""A program that has Prime tunnels and is killed, and what is beside it."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Timer

from tests.prime.service import FakePrime

PROGRAM = """
import asyncio, os, signal, subprocess, sys
import prime_tunnel
from prime_tunnel import tunnel as sdk
from tunnel import KeepAlivePolicy, PrimeTunnel, PrimeTunnelConfig

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

async def main():
    policy = KeepAlivePolicy(rule="plain", exit_poll=0.01, restart_backoff=0.01)
    tunnel = PrimeTunnel(PrimeTunnelConfig(policy=policy))
    print("starting", flush=True)
    async with tunnel.expose(1) as url:
        print(url, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)

{extra}
asyncio.run(main())
"""


class Owner:
    """It serves until its stdin has a line, or until it is killed. ``extra``: code that runs before it starts."""

    def __init__(self, service: FakePrime, extra: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.replace("{extra}", extra)],
            env={**os.environ, **service.env()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._line() == "starting"

    @property
    def pid(self) -> int:
        return self.process.pid

    def served(self) -> str:
        """Return its URL, once it serves."""
        url = self._line()
        assert url, "it ended before it served"
        return url

    def _line(self) -> str:
        assert self.process.stdout is not None
        hangs = Timer(60, self.process.kill)
        hangs.start()
        try:
            return self.process.stdout.readline().strip()
        finally:
            hangs.cancel()

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def sidecars(owner: int) -> list[int]:
    """The pids of the sidecars of that process, also after its death."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            arguments = (directory / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
            if len(arguments) > 1 and arguments[-2].endswith("_sidecar.py") and arguments[-1] == str(owner):
                found.append(int(directory.name))
    return found


def records(service: FakePrime) -> list[Path]:
    return sorted(service.home.glob("state/*/*/*.json"))
