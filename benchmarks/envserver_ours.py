"""Our env server pool over a tiny env, for `benchmarks.envserver`: prints its address and serves.

Its waits before a dead worker is replaced are cut, so that hundreds can be killed in minutes; nothing that is measured
hangs on them.
"""

import asyncio

from envserver import EnvServerPool
from envserver.limits import PoolPolicy

WORKERS = 4

POLICY = PoolPolicy(free_restarts=10_000, spawn_floor=1_000, reap_interval=0.05)


async def serve() -> None:
    pool = EnvServerPool(
        "benchmarks.envserver_env:Tiny",
        max_workers=WORKERS,
        elastic=False,
        address="tcp://127.0.0.1:0",
        policy=POLICY,
    )
    await pool.start()
    try:
        print(pool.address, flush=True)
        await pool.wait_failed()
    finally:
        await pool.stop()


if __name__ == "__main__":
    asyncio.run(serve())
