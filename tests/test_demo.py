"""`interception demo`, as a user runs it."""

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import interception.cli

ANOTHER_MODEL = """
import json, os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Model(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        os.write(1, f"{self.path} {body['model']}\\n".encode())  # whole, whichever thread writes beside it
        choice = {"index": 0, "finish_reason": "stop"}
        if body["stream"]:
            chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "mine"}
            first = chunk | {"choices": [{"index": 0, "delta": {"content": "Of"}, "finish_reason": None}]}
            last = chunk | {"choices": [choice | {"delta": {"content": " course."}}]}
            data = "".join(f"data: {json.dumps(part)}\\n\\n" for part in (first, last)) + "data: [DONE]\\n\\n"
            kind = "text/event-stream"
        else:
            message = {"role": "assistant", "content": "Of course."}
            answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "mine"}
            data, kind = json.dumps(answer | {"choices": [choice | {"message": message}]}), "application/json"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data.encode())

    def log_message(self, *arguments):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
print(f"http://127.0.0.1:{server.server_port}/v1", flush=True)
server.serve_forever()
"""


def start_demo(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "interception", "demo", *arguments],
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


def test_on_a_terminal_it_shows_its_servers_while_they_serve_and_then_the_table() -> None:
    """Few rollouts too see their tunnels cut; the view is gone when it ends."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    demo = subprocess.Popen(
        [sys.executable, "-m", "interception", "demo", "--rollouts", "3"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # so Linux says that the other end is closed
        while data := os.read(ours, 65536):
            shown += data
    os.close(ours)
    assert demo.wait(timeout=60) == 0, shown.decode()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert re.search(r"│ http://127\.0\.0\.1:\d+ │ serving +│ ●●●○○○", plain)
    assert re.search(r"0/3 rollouts 3 playing \d+ of 18 calls answered", plain)
    assert "cutting the connection" in plain
    assert "serving again" in plain
    assert "Traceback" not in plain
    assert "\x1b[?25h" in shown.decode(), "the cursor is back"


def test_without_a_tunnel_and_with_a_model_of_the_users() -> None:
    """Chat completions only, and whatever it answers is right."""
    other = subprocess.Popen([sys.executable, "-c", ANOTHER_MODEL], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    url = other.stdout.readline().strip()
    demo = start_demo("--rollouts", "3", "--tunnel", "none", "--upstream", url, "--model", "mine")
    out, err = demo.communicate(timeout=120)
    other.kill()
    asked, _ = other.communicate()
    assert demo.returncode == 0, out + err
    assert f"model mine at {url}" in out
    table = dict(re.findall(r"│ +([a-z, ]+?) +│ (\d+) +│", out))
    assert (table["calls answered"], table["rollouts finished"], table["tunnels restarted"]) == ("18", "3", "0")
    assert set(asked.split("\n")) == {"/v1/chat/completions mine", ""}


@pytest.mark.parametrize(
    "arguments", [["--model", "m"], ["--upstream", "http://h/v1"], ["--rollouts", "0"], ["--tunnel", "x"]]
)
def test_a_wrong_option_is_told(arguments: list[str]) -> None:
    ran = CliRunner().invoke(interception.cli.app, ["demo", *arguments])
    assert ran.exit_code == 2
    assert ran.exception is None or isinstance(ran.exception, SystemExit)


def test_prime_without_credentials_is_one_line(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PRIME_")}
    ran = subprocess.run(
        [sys.executable, "-m", "interception", "demo", "--tunnel", "prime"],
        env={**kept, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ran.returncode, ran.stderr) == (1, "error: no Prime credentials: set PRIME_API_KEY or run `prime login`\n")


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
