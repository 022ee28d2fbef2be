"""Throughput: as many calls as go through so many connections in so many seconds, by wrk or by our own client."""

import asyncio
import itertools
import json
import math
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.gateway import canned
from benchmarks.gateway.control import Session
from benchmarks.gateway.http import Connection

SCRIPT = Path(__file__).with_name("wrk.lua")

PATIENCE = 30
"""Seconds after which a call that has not been answered counts as an error."""

ENOUGH = 16
"""Answers from which a rate can be told; fewer where there are fewer connections."""

LONGER = (4.0, float(PATIENCE))
"""Seconds of a load's second try, and of its third, which is made if nothing at all was answered."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a load showed."""

    requests: int
    seconds: float
    p50_ms: float
    p99_ms: float
    errors: int
    cpu_us: float = 0.0
    """Of the subject, for each request."""


def generator() -> str:
    """What makes the load here, and why."""
    wrk = shutil.which("wrk")
    if wrk is None:
        return "our own asyncio client (wrk is not installed: apt-get install wrk)"
    said = subprocess.run([wrk, "-v"], capture_output=True, text=True, check=False).stdout
    return " ".join(said.split()[:2]) or "wrk"


def load(
    base_url: str,
    sessions: Sequence[Session],
    body: bytes,
    connections: int,
    seconds: float,
    cpu: Callable[[], float] = lambda: 0.0,
) -> Load:
    """Puts load on a subject, its sessions in turn; `RuntimeError` when calls fail. `cpu`: seconds it has had so far.

    Where too few were answered in that time to tell, it is done again, longer.
    """
    wrk = shutil.which("wrk")
    for lasting in (seconds, *(longer for longer in LONGER if longer > seconds)):
        before = cpu()
        if wrk is not None:
            seen = _by_wrk(wrk, base_url, sessions, body, connections, lasting)
        else:
            seen = asyncio.run(_by_ourselves(base_url, sessions, body, connections, lasting))
        spent = cpu() - before
        if seen.errors or seen.requests >= (min(connections, ENOUGH) if lasting == seconds else 1):
            break
    if not seen.requests or seen.errors * 100 > seen.requests:
        raise RuntimeError(f"{seen.errors} calls failed, {seen.requests} were answered in {seen.seconds:.1f} s")
    return replace(seen, cpu_us=spent / seen.requests * 1e6)


def _by_wrk(
    wrk: str, base_url: str, sessions: Sequence[Session], body: bytes, connections: int, seconds: float
) -> Load:
    # wrk takes whole seconds; it ends by SIGINT just as well, and tells what it saw until then.
    with tempfile.TemporaryDirectory(prefix="benchmark-load-") as folder:
        (body_file := Path(folder, "body")).write_bytes(body)
        (sessions_file := Path(folder, "sessions")).write_text("\n".join(map(" ".join, sessions)))
        command = [wrk, "-t1", f"-c{connections}", f"-d{PATIENCE * 20}s", f"--timeout={PATIENCE}s", "-s", str(SCRIPT)]
        command += [base_url, "--", str(body_file), str(sessions_file)]
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


async def _by_ourselves(
    base_url: str, sessions: Sequence[Session], body: bytes, connections: int, seconds: float
) -> Load:
    numbers = itertools.count(random.randrange(9 * 10**9))
    until = time.perf_counter() + seconds

    def requests() -> Iterator[bytes]:
        while time.perf_counter() < until:
            number = next(numbers)
            path, key = sessions[number % len(sessions)]
            yield canned.post(path, key, canned.stamped(body, number))

    return await calls(base_url, requests(), connections, seconds + PATIENCE)


async def calls(base_url: str, requests: Iterator[bytes], connections: int, timeout: float) -> Load:
    """Sends all `requests`, through so many connections."""
    times: list[float] = []
    errors = 0

    async def caller(connection: Connection) -> None:
        nonlocal errors
        for request in requests:
            try:
                reply = await connection.call(request)
            except ConnectionError:
                errors += 1
                return
            errors += reply.status >= 400
            times.append(reply.lasted)

    made = [await Connection.to(base_url) for _ in range(connections)]
    began = time.perf_counter()
    try:
        async with asyncio.timeout(timeout):
            await asyncio.gather(*map(caller, made))
    except TimeoutError:
        errors += connections
    finally:
        for connection in made:
            connection.close()
    lasted = time.perf_counter() - began
    return Load(len(times), lasted, quantile(times, 0.5) * 1e3, quantile(times, 0.99) * 1e3, errors)


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that so large a share of them does not exceed; 0 where there are none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0
