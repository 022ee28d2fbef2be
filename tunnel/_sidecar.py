"""Waits for its owner to die, and has what it left behind ended then.

    python -IS _sidecar.py OWNER

Not imported: `tunnel.sidecar` runs it in a session of its own, so that what is sent to the owner's process group does
not reach it. Its stdin is the read end of a pipe: a line for each account whose records it must see to, and `bye` when
there is nothing left to wait for. It waits with nothing but a bare interpreter; all else is imported at the end.
"""

import os
import select
import signal
import sys

TOLD = 0
OWNER_POLL = 1.0  # where there are no pidfds; a child forked from the owner may keep the pipe open


def wait(owner: int) -> list[bytes]:
    """What was told until the owner died; nothing if it said that there is nothing left."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # it ends with its owner, not before
        signal.signal(number, signal.SIG_IGN)
    os.set_blocking(TOLD, False)
    poller = select.poll()
    poller.register(TOLD, select.POLLIN)
    timeout: float | None = 1000 * OWNER_POLL
    try:
        poller.register(os.pidfd_open(owner), select.POLLIN)
        timeout = None
    except (AttributeError, OSError):
        pass
    told, is_open = b"", True
    # The parent is the owner until that dies. The end of the pipe alone tells nothing: the owner may have closed all
    # its descriptors, as daemons do.
    while os.getppid() == owner:
        poller.poll(timeout)
        if is_open:
            said, is_open = _read()
            told += said
            if told.endswith(b"bye\n"):
                return []
            if not is_open:
                poller.unregister(TOLD)
    return (told + _read()[0]).splitlines()


def _read() -> tuple[bytes, bool]:
    """What there is to read, and whether more may come."""
    said = b""
    try:
        while part := os.read(TOLD, 65536):
            said += part
    except BlockingIOError:
        return said, True
    return said, False


def reap(told: list[bytes]) -> None:
    import json
    import site

    messages = [json.loads(line) for line in told]
    site.main()  # left out by -S; finders that .pth files install are needed for some packages
    known = messages[-1]["path"]
    sys.path[:] = [*known, *(part for part in sys.path if part not in known)]
    from tunnel.sidecar import reap as reap_now

    reap_now(messages)


if __name__ == "__main__":
    if told := wait(int(sys.argv[1])):
        reap(told)
