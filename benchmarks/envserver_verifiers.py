"""verifiers' env server pool over the stub worker, for `benchmarks.envserver`: runs in verifiers' own interpreter.

Its pool, broker and process handling are as installed. Only the class that its workers would serve an env with is
another one, put in its place by the `log_setup` that each worker calls first.

`python -m … serve` prints its address and serves. `python -m … crash FILE SECONDS` starts a server that crashes, which
writes the time to FILE as it does, and prints how long after that its parent heard of it; `null` if not in SECONDS.
"""

import json
import multiprocessing
import queue
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import verifiers.v1.serve.pool as peer

from benchmarks import envserver_stub

WORKERS = 4


class StubServer:
    @classmethod
    def run_server(cls, address: str, address_queue: Any = None) -> None:
        envserver_stub.serve(address)


class CrashingServer:
    """As a server whose env cannot be loaded."""

    file: Path

    @classmethod
    def run_server(cls, address: str, address_queue: Any = None) -> None:
        cls.file.write_text(str(time.monotonic()))
        raise RuntimeError("the env cannot be loaded")


class Printer:
    """An address queue for whoever reads our output."""

    def put(self, address: str) -> None:
        print(address, flush=True)


def use_stub() -> None:
    peer.EnvServer = StubServer


def use_crashing(file: Path) -> None:
    CrashingServer.file = file
    peer.EnvServer = CrashingServer


def crash(file: Path, seconds: float) -> float | None:
    """Waits for the address as its users do: for something in the queue."""
    context = multiprocessing.get_context("spawn")
    addresses = context.Queue()
    process = context.Process(
        target=peer.serve_env,
        kwargs={"max_workers": 1, "address_queue": addresses, "log_setup": partial(use_crashing, file)},
    )
    process.start()
    process.join()  # not to wait long: only from here on does a watching parent have something to see
    crashed = float(file.read_text())
    try:
        addresses.get(timeout=seconds)
    except queue.Empty:
        return None
    return time.monotonic() - crashed


def main() -> None:
    if sys.argv[1] == "crash":
        print(json.dumps(crash(Path(sys.argv[2]), float(sys.argv[3]))))
    else:
        peer.serve_env(
            max_workers=WORKERS,
            address="tcp://127.0.0.1:0",
            address_queue=Printer(),
            log_setup=use_stub,
            elastic=False,
        )


if __name__ == "__main__":
    main()
