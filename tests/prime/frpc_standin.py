"""A stand-in for the frpc 0.66 binary: its command line, its config file and its log lines.

    frpc -c FILE

To ``relay.py`` it speaks a small protocol of its own: a message a line, its fields parted by tabs. ``FRPC_FAKE``
(JSON in the environment) tunes it:

    timescale             multiplies frpc's own waits (30 s keepalive, 10 s time-outs, 30 s until a proxy is retried)
    ignore_term           SIGTERM does nothing
    child                 seconds for which a child process keeps the pipes open, even after frpc's death
    exit_after            seconds after which the process exits with status 3
    stdout_flood          lines printed as soon as the proxy has started
    mute_after_connect    once the proxy has started nothing is answered any more, though the process lives
"""

# Tests start hundreds of these: the C modules load in 1 ms, where socket, threading, json, os and tomllib take 45.
# ruff: noqa: SIM105 (contextlib is one more of them)
import sys
import time
from _socket import AF_INET, IPPROTO_TCP, SHUT_RDWR, SOCK_STREAM, TCP_NODELAY, socket
from _thread import start_new_thread
from posix import _exit, environ, execv, fork, write

OPTIONS: dict[str, float] = eval(environ.get(b"FRPC_FAKE", b"{}"), {"true": True, "false": False, "null": None})
SCALE = float(OPTIONS.get("timescale", 1.0))
# frpc's 10 s time-outs; however fast a test's clock runs, a loaded machine needs a second to answer.
PATIENCE = max(10 * SCALE, 1.0)
NEVER = float("inf")
COLOURS = {"I": "\x1b[1;34m", "W": "\x1b[1;33m", "E": "\x1b[1;31m"}


def log(level: str, source: str, message: str, *context: str) -> None:
    now = time.time()
    stamp = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))}.{int(now * 1000) % 1000:03d}"
    prefix = "".join(f"[{item}] " for item in context if item)
    try:
        write(1, f"{COLOURS[level]}{stamp} [{level}] [{source}] {prefix}{message}\x1b[0m\n".encode())
    except BrokenPipeError:  # a Go program dies of SIGPIPE on its stdout
        _exit(1)


def connect(host: str, port: int) -> socket:
    """A connection without time-outs. OSError has the text that Go would give it."""
    connection = socket(AF_INET, SOCK_STREAM)
    connection.settimeout(PATIENCE)
    try:
        connection.connect((host, port))
    except TimeoutError:
        raise OSError(f"dial tcp {host}:{port}: i/o timeout") from None
    except OSError as error:
        raise OSError(f"dial tcp {host}:{port}: connect: {(error.strerror or str(error)).lower()}") from None
    connection.settimeout(None)
    connection.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
    return connection


def send(connection: socket, *fields: str) -> None:
    connection.sendall("\t".join(fields).encode() + b"\n")


def pump(source: socket, sink: socket) -> None:
    """Copy until either end has gone, then end both: that wakes the thread which copies the other way."""
    try:
        while data := source.recv(65536):
            sink.sendall(data)
    except OSError:
        pass
    for end in (source, sink):
        try:
            end.shutdown(SHUT_RDWR)
        except OSError:
            pass


class Frpc:
    def __init__(self, path: str) -> None:
        with open(path) as file:
            # The part of TOML which the SDK writes: lines of ``key = value``, no key twice, no escapes.
            pairs = [line.strip().partition(" = ") for line in file if not line.startswith("#")]
        self.config = {key: value.strip('"') for key, _, value in pairs}
        self.name = self.config["name"]
        self.server = self.config["serverAddr"], int(self.config["serverPort"])
        self.keepalive = float(self.config["transport.tcpMuxKeepaliveInterval"]) * SCALE
        self.run_id = ""
        self.unread = b""

    def run(self) -> None:
        """Log in, serve until the session breaks, log in again: for ever, as frpc does."""
        delay, longest_delay, quick_returns = SCALE, 10 * SCALE, 3
        while True:
            log("I", "client/service.go:320", "try to connect to server...", self.run_id)
            try:
                control = self.log_in()
            except OSError as error:
                log("W", "client/service.go:323", f"connect to server error: {error}", self.run_id)
                time.sleep(delay)
                delay = min(2 * delay, longest_delay)
                continue
            try:
                self.serve(control)
            except OSError:
                pass  # the session broke
            control.close()
            delay, longest_delay = SCALE, 20 * SCALE
            time.sleep(0.2 * SCALE if quick_returns > 0 else SCALE)
            quick_returns -= 1

    def log_in(self) -> socket:
        control = connect(*self.server)
        self.unread = b""
        token, secret = self.config["auth.token"], self.config["metadatas.binding_secret"]
        send(control, "login", self.config["user"], token, secret, self.run_id)
        try:
            _, run_id, error = self.receive(control, PATIENCE)
        except TimeoutError:
            raise OSError("i/o deadline reached") from None
        if error:
            raise OSError(error)
        self.run_id = run_id
        log("I", "client/service.go:331", f"login to server success, get run id [{run_id}]", run_id)
        return control

    def serve(self, control: socket) -> None:
        """Answer the relay until the session breaks (OSError) or a keepalive has gone unanswered."""
        log("I", "proxy/proxy_manager.go:177", f"proxy added: [{self.name}]", self.run_id)
        send(control, "new_proxy", self.name)
        next_ping, give_up, retry_proxy = time.monotonic() + self.keepalive, NEVER, NEVER
        while (now := time.monotonic()) < give_up:
            if now >= next_ping:
                send(control, "ping")
                next_ping, give_up = now + self.keepalive, min(give_up, now + PATIENCE)
            if now >= retry_proxy:
                send(control, "new_proxy", self.name)
                retry_proxy = NEVER
            try:
                kind, *fields = self.receive(control, min(next_ping, give_up, retry_proxy) - now)
            except TimeoutError:
                continue
            if kind == "pong":
                give_up = NEVER
            elif kind == "req_work":
                start_new_thread(self.work, (fields[0],))
            elif fields[0]:
                log("W", "client/control.go:168", f"start error: {fields[0]}", self.run_id, self.name)
                retry_proxy = now + 30 * SCALE
            else:
                self.started()

    def receive(self, control: socket, timeout: float) -> list[str]:
        """The next message, a ``TimeoutError`` if none comes in time, or an ``OSError`` at the end of the session."""
        control.settimeout(max(timeout, 0.001))
        while b"\n" not in self.unread:
            data = control.recv(65536)
            if not data:
                raise OSError("EOF")
            self.unread += data
        control.settimeout(None)
        line, _, self.unread = self.unread.partition(b"\n")
        return line.decode().split("\t")

    def started(self) -> None:
        log("I", "client/control.go:172", "start proxy success", self.run_id, self.name)
        for number in range(int(OPTIONS.get("stdout_flood", 0))):
            log("I", "client/control.go:200", f"line {number} of a flood", self.run_id, self.name)
        while OPTIONS.get("mute_after_connect"):
            time.sleep(3600)

    def work(self, work_id: str) -> None:
        """Carry one request: a connection to the relay, one to the local service, and bytes between them."""
        try:
            relay = connect(*self.server)
            send(relay, "work", work_id)
        except OSError as error:
            log("W", "client/control.go:120", f"start new connection to server error: {error}", self.run_id)
            return
        address = self.config["localIP"], int(self.config["localPort"])
        try:
            service = connect(*address)
        except OSError as error:
            text = f"connect to local service [{address[0]}:{address[1]}] error: {error}"
            log("E", "proxy/proxy.go:208", text, self.run_id, self.name)
            relay.close()
            return
        # Neither thread closes a socket under the other's hands: the last one to let go of it does.
        start_new_thread(pump, (service, relay))
        pump(relay, service)


def exit_later(seconds: float) -> None:
    time.sleep(seconds)
    _exit(3)


def main() -> None:
    _, option, path = sys.argv
    if option != "-c":
        sys.exit("usage: frpc -c FILE")
    if OPTIONS.get("ignore_term"):
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if (seconds := OPTIONS.get("child")) and fork() == 0:
        # Named after this program, so that whoever cleans up after it finds the child too.
        execv(sys.executable, [sys.executable, "-ISc", f"import time; time.sleep({seconds})", f"{sys.argv[0]}-child"])
    if (seconds := OPTIONS.get("exit_after")) is not None:
        start_new_thread(exit_later, (seconds,))
    log("I", "sub/root.go:149", f"start frpc service for config file [{path}]")
    Frpc(path).run()


if __name__ == "__main__":
    main()
