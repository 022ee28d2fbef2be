"""`interception demo`, as a user runs it."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path


def start_demo() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "interception", "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def test_it_heals_the_cut_tunnel_retires_the_revoked_one_and_finishes_the_rest() -> None:
    demo = start_demo()
    out, err = demo.communicate(timeout=180)
    assert demo.returncode == 0, out + err
    assert err == ""
    assert "serving again" in out
    assert "gone for good, its server is retired" in out
    table = dict(re.findall(r"│ +([a-z, ]+?) +│ (\d+) +│", out))
    # An answer that was cut on its way was recorded all the same, and asked for again.
    assert int(table["calls answered"]) <= int(table["turns recorded"])
    assert table["answered, not recorded"] == "0"
    assert table["tunnels restarted"] == "1"
    assert table["servers retired"] == "1"
    assert int(table["rollouts failed"]) >= 1
    assert int(table["rollouts finished"]) + int(table["rollouts failed"]) == 30


def test_ctrl_c_leaves_nothing_running() -> None:
    demo = start_demo()
    assert demo.stdout is not None
    lines = iter(demo.stdout.readline, "")
    pids = next(re.findall(r"process (\d+)", line) for line in lines if "agents in process" in line)
    next(line for line in lines if "cutting" in line)
    demo.send_signal(signal.SIGINT)
    _, err = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert "Traceback" not in err
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a process of the demo is still there"
        time.sleep(0.02)
