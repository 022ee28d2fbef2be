"""`python -m interception.tools FD`: a tool server's process, started by `interception.tools.process`."""

import asyncio
import contextlib
import logging
import sys

from interception.tools.process import serve

logging.basicConfig()  # to stderr, from warnings on; an MCPServer would show all that it does
with contextlib.suppress(asyncio.CancelledError):
    asyncio.run(serve(int(sys.argv[1])))
