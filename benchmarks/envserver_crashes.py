"""How soon a parent hears that the server it started has crashed, from the line before the one that raises."""

import multiprocessing
import tempfile
import time
from pathlib import Path

from envserver import EnvServerStartupError, serve_env, wait_for_address


async def crash(folder: Path, max_workers: int) -> float:
    """Seconds until `wait_for_address` raises for a server, or a pool, whose env cannot be loaded."""
    file = folder / "crashed"
    context = multiprocessing.get_context("spawn")
    addresses = context.Queue()
    log = folder / "log"
    process = context.Process(
        target=serve_env,
        args=("benchmarks.envserver_env:crashing", {"file": str(file)}),
        kwargs={
            "max_workers": max_workers,
            "address": "tcp://127.0.0.1:0",
            "address_queue": addresses,
            "log_path": str(log),
        },
    )
    process.start()
    try:
        address = await wait_for_address(process, addresses, log_path=str(log))
    except EnvServerStartupError as error:
        heard = time.monotonic()
        if "the env cannot be loaded" not in str(error):
            raise RuntimeError(f"the error does not say why: {error}") from error
        return heard - float(file.read_text())
    finally:
        process.kill()
        process.join()
        process.close()
    raise RuntimeError(f"a server that crashed has an address: {address}")


async def crashes(number: int) -> list[float]:
    """So many, single servers and pools in turn."""
    times = []
    for index in range(number):
        with tempfile.TemporaryDirectory(prefix="benchmark-crash-") as folder:
            times.append(await crash(Path(folder), max_workers=1 if index % 2 == 0 else 4))
    return times
