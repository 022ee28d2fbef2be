"""What `envserver.child.Child` executes: `python -P _child.py CONFIG_FD`. Nothing but the standard library is imported
before `sys.path` is the parent's."""

import faulthandler
import json
import os
import signal
import sys
import traceback
from typing import Any


def main() -> int:
    with open(int(sys.argv[1]), "rb") as file:
        config: dict[str, Any] = json.load(file)
    # What the child prints is in the log at once, and not only when a buffer is full or it ends well.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    inherited = {name: value for name, value in config.items() if name.endswith("_fd")}
    for fd in inherited.values():
        os.set_inheritable(fd, False)
    sys.path[:] = config["sys_path"]
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if home not in sys.path:
        sys.path.append(home)
    last_words = open(inherited["traceback_fd"], "wb", 0)  # noqa: SIM115 - open to the very end
    faulthandler.enable(last_words)
    try:
        from envserver.orphan import arm_death_signal, end_with_parent

        orphaned = end_with_parent([inherited["death_fd"]], config["parent"], kill_group=True)
        if config["death_signal"]:
            arm_death_signal(config["parent"])
        from envserver.jobs import perform

        try:
            perform(config["job"], inherited.get("report_fd"))
        finally:
            # What this process has started ends with it. The parent kills what is left of the group, unless it has
            # gone; then either sign may be first: a killed process closes its pipes before its children are adopted.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.killpg(0, signal.SIGTERM)
            if orphaned.is_set() or os.getppid() != config["parent"]:
                os.killpg(0, signal.SIGKILL)
    except SystemExit:
        raise
    except BaseException:  # noqa: BLE001 - KeyboardInterrupt too
        # Both to the log, where chatter may push it out of sight, and to where only this is written.
        text = traceback.format_exc()
        last_words.write(text.encode(errors="backslashreplace"))
        sys.stderr.write(text)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
