"""`python -m interception.tools FD`: a tool server's process, started by `interception.tools.process`."""

import asyncio
import contextlib
import sys

from interception.tools.process import serve

with contextlib.suppress(asyncio.CancelledError):
    asyncio.run(serve(int(sys.argv[1])))
