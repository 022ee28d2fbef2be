"""A real OpenSSH server on loopback, run by hand as whoever runs the tests: `Sshd`.

The tests that need it are skipped where there is none: `apt-get install -y openssh-server` (the CI script does).
"""

import asyncio
import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import asyncssh
import pytest

SSHD = shutil.which("sshd", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin")))

needs_sshd = pytest.mark.skipif(SSHD is None, reason="no sshd here: apt-get install -y openssh-server")
needs_ssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh here: apt-get install -y openssh-client")

PRIVILEGE_SEPARATION = Path("/run/sshd")
"""sshd wants it when it runs as root; Debian's service makes it."""


class Sshd:
    """An sshd that lets the user of the tests in with `key`, and forwards ports. `options` are sshd_config's own.

    It keeps its port and its host key over a `stop` and the next `start`.
    """

    def __init__(self, folder: Path, **options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.user = getpass.getuser()
        self.port = free_port()
        self.key = _new_key(folder / "key")
        self.host_key = _new_key(folder / "host_key")
        self.options = options
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "authorized_keys").write_text((folder / "key.pub").read_text())
        self.known_hosts = folder / "known_hosts"
        self.vouch("127.0.0.1", self.port)

    def vouch(self, host: str, port: int) -> None:
        """Have `known_hosts` say that its key is also this address's."""
        with self.known_hosts.open("a") as file:
            file.write(f"[{host}]:{port} {(self.folder / 'host_key.pub').read_text()}")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Returns once it takes connections."""
        assert SSHD is not None
        assert self._process is None
        if os.getuid() == 0:
            PRIVILEGE_SEPARATION.mkdir(exist_ok=True)
        settings = {
            "HostKey": str(self.host_key),
            "AuthorizedKeysFile": str(self.folder / "authorized_keys"),
            "PidFile": "none",
            "ListenAddress": "127.0.0.1",
            "Port": str(self.port),
            "PasswordAuthentication": "no",
            "PermitRootLogin": "prohibit-password",
            "StrictModes": "no",  # the folder is below /tmp
            "UsePAM": "no",
            # Off by default: a session whose client is gone would hold its port for good.
            "ClientAliveInterval": "0",
            **self.options,
        }
        config = self.folder / "sshd_config"
        config.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        with (self.folder / "sshd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", str(config)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection((settings["ListenAddress"], self.port), 5).close()
                return
            except OSError:
                assert self._process.poll() is None, self.log
                assert time.monotonic() < deadline, self.log
            time.sleep(0.01)

    def stop(self) -> None:
        """Ends it with its sessions, as a host that reboots does."""
        process, self._process = self._process, None
        if process is None:
            return
        _signal(_family(process.pid), signal.SIGKILL)
        process.wait()

    @property
    def log(self) -> str:
        return (self.folder / "sshd.log").read_text()

    def sessions(self) -> list[int]:
        """The processes of its sessions."""
        assert self._process is not None
        return _family(self._process.pid)[1:]

    def freeze(self) -> None:
        """SIGSTOP to it and all its sessions: connections are half-open, and its kernel still takes new ones."""
        assert self._process is not None
        _signal(_family(self._process.pid), signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        _signal(_family(self._process.pid), signal.SIGCONT)

    def end_sessions(self) -> None:
        """Ends the sessions alone: connections break, the server goes on."""
        _signal(self.sessions(), signal.SIGKILL)

    def revoke(self) -> None:
        """Refuse the key from now on, and end the sessions."""
        (self.folder / "authorized_keys").write_text("")
        self.end_sessions()

    def new_host_key(self) -> Path:
        """As a relay that was set up anew, or one that is not ours; returns the old one. For the next start."""
        old, self.host_key = self.host_key, _new_key(self.folder / "another_host_key")
        return old


class Cable:
    """What lies between a client and a port of 127.0.0.1: `tear` it, and neither end is told."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._torn: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.tear()
        for writer in self._writers:
            writer.transport.abort()
        await self._server.wait_closed()

    def tear(self) -> None:
        """Nothing goes through the present connections any more; both ends stay open. New ones are whole."""
        for task in self._torn:
            task.cancel()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        their_reader, their_writer = await asyncio.open_connection("127.0.0.1", self._to)
        self._writers += [writer, their_writer]
        for source, sink in ((reader, their_writer), (their_reader, writer)):
            self._torn.add(asyncio.create_task(self._carry(source, sink)))

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
            sink.close()


def _family(pid: int) -> list[int]:
    """The process and all that descend from it, parents first."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    family = [pid]
    for member in family:
        family += [child for child, parent in parents.items() if parent == member]
    return family


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _new_key(path: Path) -> Path:
    key = asyncssh.generate_private_key("ssh-ed25519")
    path.write_bytes(key.export_private_key())
    path.chmod(0o600)
    path.with_name(path.name + ".pub").write_bytes(key.export_public_key())
    return path
