"""Runs a program, and sees to it that nothing of it is left: when it ends, when it shall end, when its owner is killed.

    python -IS _watchdog.py OWNER GRACE PROGRAM [ARGUMENT...]

Not imported: `tunnel.command` runs it as the leader of a new session, one for each program, because a death signal
(PR_SET_PDEATHSIG) would have to be set between fork and exec of a process that has threads, and is Linux's alone.
Here is only one thread. Its stdin is one end of a socket pair: closed or shut down at the other end, it means "end
the program", so that an owner killed by SIGKILL needs to do nothing. On the same socket it says `started`, or `failed
ERRNO`, and at last `exited STATUS`. The program inherits neither; it shares the process group, which dies as a whole.
On Linux it also ends what has left that group, as daemons do: orphans of the program become children of this process.
"""

import os
import select
import signal
import sys
import time
from typing import NoReturn

CONTROL = 0
OWNER_POLL = 1.0  # a process forked from the owner keeps the other end open, and then only the parent's id tells
GROUP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
PR_SET_CHILD_SUBREAPER = 36  # Linux's prctl.h
FAMILY_GRACE = 1.0  # for what was killed to be seen ended; one that the kernel holds up is not waited for longer


def run(owner: int, grace: float, command: list[str]) -> NoReturn:
    # What is sent to the group is meant for the program; this process ends last, and by its own hand.
    inherited = {number: signal.signal(number, signal.SIG_IGN) for number in GROUP_SIGNALS}
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    _adopt_orphans()
    failed, fail = os.pipe()  # closed by a successful exec, and then empty
    program = os.fork()
    if program == 0:
        try:
            for number, handler in inherited.items():
                signal.signal(number, handler)
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, which its children should not inherit
                signal.signal(number, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), CONTROL)
            os.execvp(command[0], command)
        except OSError as error:
            os.write(fail, b"%d" % (error.errno or 0))
        finally:
            os._exit(127)
    os.close(fail)
    errno = os.read(failed, 16)
    os.close(failed)
    _say(b"failed %s\n" % errno if errno else b"started\n")
    status = _wait(program, owner, grace, woken)
    _say(b"exited %d\n" % status)
    _end_family()
    os.killpg(0, signal.SIGKILL)  # what the program left behind, and this process
    raise AssertionError("unreachable")


def _wait(program: int, owner: int, grace: float, woken: int) -> int:
    """The wait status of the program, once it has ended or was made to end."""
    poller = select.poll()
    poller.register(CONTROL, select.POLLIN)
    poller.register(woken, select.POLLIN)
    kill_at: float | None = None
    while True:
        while True:
            ended, status = os.waitpid(-1, os.WNOHANG)  # orphans, too
            if ended == program:
                return status
            if not ended:
                break
        now = time.monotonic()
        if kill_at is not None and now >= kill_at:
            os.kill(program, signal.SIGKILL)
            return os.waitpid(program, 0)[1]
        ready = [fd for fd, _ in poller.poll(1000 * (OWNER_POLL if kill_at is None else kill_at - now))]
        if woken in ready:
            os.read(woken, 512)
        if kill_at is None and (CONTROL in ready or os.getppid() != owner):
            poller.unregister(CONTROL)
            os.killpg(0, signal.SIGTERM)
            os.killpg(0, signal.SIGCONT)  # one that is stopped would not take it
            kill_at = time.monotonic() + grace


def _adopt_orphans() -> None:
    if sys.platform == "linux":
        try:
            import ctypes

            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        except (ImportError, OSError, AttributeError):  # then its group alone is ended
            pass


def _end_family() -> None:
    """Kills the orphans, and theirs as they become ours. No pid of theirs can be another's: only we reap them."""
    deadline = time.monotonic() + FAMILY_GRACE
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for child in _children():
            try:  # noqa: SIM105 - see below
                os.kill(child, signal.SIGKILL)
            except OSError:  # another user's
                pass
        time.sleep(0.005)


def _children() -> "list[int]":
    me, found = os.getpid(), []
    try:
        names = os.listdir("/proc")
    except OSError:  # a sandbox without it
        return []
    for name in names:
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # After the name, which may hold spaces and brackets: the state, and the parent.
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):  # it has ended meanwhile
                continue
            if parent == me:
                found.append(int(name))
    return found


def _say(message: bytes) -> None:
    try:  # noqa: SIM105 - contextlib takes as long to import as all the rest
        os.write(CONTROL, message)
    except OSError:  # the owner is gone
        pass


if __name__ == "__main__":
    run(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
