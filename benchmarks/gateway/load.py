"""Throughput: as many calls as go through so many connections in so many seconds, by wrk or by our own client."""

import asyncio
import json
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

from benchmarks.gateway import canned
from benchmarks.gateway.http import Connection

PATH = "/v1/chat/completions"

SCRIPT = Path(__file__).with_name("wrk.lua")

PATIENCE = 30
"""Seconds after which a call that has not been answered counts as an error."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a load showed."""

    requests: int
    seconds: float
    p50_ms: float
    p99_ms: float
    errors: int


def generator() -> str:
    """What makes the load here, and why."""
    wrk = shutil.which("wrk")
    if wrk is None:
        return "our own asyncio client (wrk is not installed: apt-get install wrk)"
    said = subprocess.run([wrk, "-v"], capture_output=True, text=True, check=False).stdout
    return " ".join(said.split()[:2]) or "wrk"


def load(base_url: str, keys: Sequence[str], body: bytes, connections: int, seconds: float) -> Load:
    """Puts load on a subject, the sessions of `keys` in turn; `RuntimeError` when calls fail.

    Where that was too short for each connection to be answered, it is done again, longer: up to `PATIENCE` seconds.
    """
    wrk = shutil.which("wrk")
    while True:
        if wrk is not None:
            seen = _by_wrk(wrk, base_url, keys, body, connections, seconds)
        else:
            seen = asyncio.run(_by_ourselves(base_url, keys, body, connections, seconds))
        if seen.requests >= connections or seen.errors or seconds >= PATIENCE:
            break
        seconds = min(3 * seconds, PATIENCE)
    if not seen.requests or seen.errors * 100 > seen.requests:
        raise RuntimeError(f"{seen.errors} calls failed, {seen.requests} were answered in {seen.seconds:.1f} s")
    return seen


def _by_wrk(wrk: str, base_url: str, keys: Sequence[str], body: bytes, connections: int, seconds: float) -> Load:
    # wrk takes whole seconds; it ends by SIGINT just as well, and tells what it saw until then.
    with tempfile.TemporaryDirectory(prefix="benchmark-load-") as folder:
        (body_file := Path(folder, "body")).write_bytes(body)
        (keys_file := Path(folder, "keys")).write_text("\n".join(keys))
        command = [wrk, "-t1", f"-c{connections}", f"-d{PATIENCE * 20}s", f"--timeout={PATIENCE}s", "-s", str(SCRIPT)]
        command += [base_url, "--", PATH, str(body_file), str(keys_file)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            time.sleep(seconds)
            process.send_signal(2)
            said, _ = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
            process.wait()
    try:
        return Load(**json.loads(said.splitlines()[-1]))
    except (ValueError, IndexError):
        raise RuntimeError(f"wrk failed:\n{said[-2000:]}") from None


async def _by_ourselves(base_url: str, keys: Sequence[str], body: bytes, connections: int, seconds: float) -> Load:
    times: list[float] = []
    errors = 0
    numbers = iter(range(random.randrange(9 * 10**9), 10**10))
    heads = [canned.head(PATH, key, len(body)) for key in keys]

    async def caller(connection: Connection) -> None:
        nonlocal errors
        while time.perf_counter() < until:
            number = next(numbers)
            try:
                reply = await connection.call(heads[number % len(heads)] + canned.stamped(body, number))
            except ConnectionError:
                errors += 1
                return
            errors += reply.status >= 400
            times.append(reply.lasted)

    made = [await Connection.to(base_url) for _ in range(connections)]
    began = time.perf_counter()
    until = began + seconds
    try:
        async with asyncio.timeout(seconds + PATIENCE):
            await asyncio.gather(*map(caller, made))
    finally:
        for connection in made:
            connection.close()
    lasted = time.perf_counter() - began
    cuts = [time * 1e3 for time in quantiles(times, n=100)] if len(times) > 1 else [0.0] * 99
    return Load(len(times), lasted, cuts[49], cuts[98], errors)
