"""An SSH relay on this host that forwards ports back to its accounts and does nothing else, with faults to order.

As a program (`python -m interception.demo.relay`) it prints one JSON line when it is ready,
`{"port": ..., "known_hosts": ...}`, then answers each JSON command, one a line on stdin, with one JSON line:
`{"do": "account", "username": ..., "public_key": ...}`, `{"do": "cut", "username": ...}` and
`{"do": "revoke", "username": ...}`. It ends at the end of stdin, so with its parent, and at SIGTERM.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import asyncssh

from tunnel.teardown import run_to_end

HOST = "127.0.0.1"
KEY_TYPE = "ssh-ed25519"


class SshRelay:
    """An SSH server on 127.0.0.1 for remote forwarding (`ssh -R`): no shell, no command, no forwarding inwards.

    Forwarded ports listen on 127.0.0.1 whatever address is asked for. It keeps its port, its host key and its accounts
    over a `stop` and the next `start`. Methods about an account raise `ValueError` if there is none of that name.
    """

    def __init__(self) -> None:
        self._host_key = asyncssh.generate_private_key(KEY_TYPE)
        self._port = 0  # any, at the first start
        self._accounts: dict[str, _Account] = {}
        self._connections: set[asyncssh.SSHServerConnection] = set()
        self._acceptor: asyncssh.SSHAcceptor | None = None

    @property
    def port(self) -> int:
        """The SSH port, from the first start on."""
        if not self._port:
            raise RuntimeError("the relay has no port yet: call start()")
        return self._port

    @property
    def known_hosts_line(self) -> str:
        """The line of a known_hosts file that vouches for this relay."""
        return f"[{HOST}]:{self.port} {self._host_key.export_public_key().decode().strip()}"

    def write_known_hosts(self, path: Path) -> Path:
        """Write a known_hosts file with this relay alone in it, and return its path."""
        path.write_text(self.known_hosts_line + "\n")
        return path

    async def start(self) -> None:
        """Listen. Raises `RuntimeError` if it does already, `OSError` if its port is taken."""
        if self._acceptor is not None:
            raise RuntimeError("the relay has been started already")
        try:
            # Not cancellable half-way: asyncio would lose the socket it has just bound.
            await run_to_end(self._listen())
        except asyncio.CancelledError:
            await run_to_end(self.stop())
            raise

    async def stop(self) -> None:
        """Close the port, all connections and all forwards. Does nothing if it is not started."""
        acceptor, self._acceptor = self._acceptor, None
        if acceptor is not None:
            acceptor.close()
        await _abort(self._connections)
        for account in self._accounts.values():
            account.let_go()
        if acceptor is not None:
            await acceptor.wait_closed()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await run_to_end(self.stop())

    # -- accounts ------------------------------------------------------------------------------

    def add_account(self, username: str) -> str:
        """Let `username` in with a new key; returns the private key (OpenSSH text, not encrypted)."""
        key = asyncssh.generate_private_key(KEY_TYPE)
        self.authorize(username, key.export_public_key().decode())
        return key.export_private_key().decode()

    def authorize(self, username: str, public_key: str) -> None:
        """Let `username` in with `public_key` (OpenSSH text), and with that key alone.

        Raises `ValueError` if it is no public key.
        """
        key = asyncssh.import_public_key(public_key).public_data
        self._accounts.setdefault(username, _Account()).key = key

    def forwards(self, username: str) -> list[int]:
        """The ports that the account's connections have forwarded now."""
        return sorted(port for session in self._account(username).sessions for port in session.ports)

    def logins(self, username: str) -> int:
        """How often the account has logged in so far."""
        return self._account(username).logins

    # -- faults --------------------------------------------------------------------------------

    async def cut(self, username: str) -> None:
        """Drop the account's connections without a word; once this returns their forwarded ports are closed."""
        await _abort({session.connection for session in self._account(username).sessions})

    async def revoke(self, username: str) -> None:
        """Refuse the account's key from now on, and cut it."""
        self._account(username).key = None
        await self.cut(username)

    def refuse_forwards(self, username: str, on: bool) -> None:
        """Whether the account's requests for a forward are refused. Those that stand are left alone."""
        self._account(username).refuses = on

    def hold(self, username: str) -> None:
        """Have the ports of the account's next cut stay in use, as by a half-open session, until `let_go`."""
        self._account(username).holds = True

    def let_go(self, username: str) -> None:
        """Free the ports that were held."""
        self._account(username).let_go()

    # -- parts ---------------------------------------------------------------------------------

    async def _listen(self) -> None:
        self._acceptor = await asyncssh.listen(
            HOST,
            self._port,
            server_factory=lambda: _Session(self._accounts, self._connections),
            server_host_keys=[self._host_key],
            allow_scp=False,
            agent_forwarding=False,
            x11_forwarding=False,
        )
        self._port = self._acceptor.get_port()

    def _account(self, username: str) -> "_Account":
        try:
            return self._accounts[username]
        except KeyError:
            raise ValueError(f"the relay has no account {username!r}") from None


class _Account:
    """What the relay knows of one user."""

    def __init__(self) -> None:
        self.key: bytes | None = None  # None: revoked
        self.logins = 0
        self.refuses = False
        self.holds = False
        self.sessions: set[_Session] = set()
        self._held: list[socket.socket] = []

    def hold(self, ports: set[int]) -> None:
        """Keep `ports` in use: connections to them get no answer, as behind a half-open session."""
        for port in ports:
            held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((HOST, port))
            held.listen()
            self._held.append(held)

    def let_go(self) -> None:
        self.holds = False
        while self._held:
            self._held.pop().close()


class _Session(asyncssh.SSHServer):
    """One connection to the relay; what it does not allow here asyncssh refuses."""

    def __init__(self, accounts: dict[str, _Account], connections: set[asyncssh.SSHServerConnection]) -> None:
        self.connection: asyncssh.SSHServerConnection
        self.ports: set[int] = set()
        self._accounts = accounts
        self._connections = connections
        self._account: _Account | None = None  # known once it has logged in

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self.connection = conn
        self._connections.add(conn)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self.connection)
        if self._account is not None:
            self._account.sessions.discard(self)
            if self._account.holds:
                self._account.holds = False
                # asyncssh has closed the listeners by now; nothing of this process can come in between.
                self._account.hold(self.ports)

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        account = self._accounts.get(username)
        return account is not None and account.key == key.public_data

    def auth_completed(self) -> None:
        self._account = self._accounts[self.connection.get_extra_info("username")]
        self._account.logins += 1
        self._account.sessions.add(self)

    async def server_requested(self, listen_host: str, listen_port: int) -> asyncssh.SSHListener | bool:
        if self._account is None or self._account.refuses:
            return False
        listener = await self.connection.forward_local_port(HOST, listen_port, listen_host, listen_port)
        if self.connection.is_closed():  # cut meanwhile: asyncssh has closed what it knew of, not this one
            listener.close()
            return False
        self.ports.add(listener.get_port())
        return listener


async def _abort(connections: set[asyncssh.SSHServerConnection]) -> None:
    aborted = list(connections)
    for connection in aborted:
        connection.abort()
    for connection in aborted:
        await connection.wait_closed()


# -- as a program ------------------------------------------------------------------------------


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    async with SshRelay() as relay:
        commands = asyncio.StreamReader()
        stdin, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
        try:
            _say({"port": relay.port, "known_hosts": relay.known_hosts_line})
            while line := await commands.readline():
                _say(await _obey(relay, line))
        finally:
            stdin.close()


async def _obey(relay: SshRelay, line: bytes) -> dict[str, Any]:
    """Carry out one command; `id`, if it has one, comes back with the answer."""
    ident = None
    try:
        command = json.loads(line)
        ident = command.get("id")
        match command:
            case {"do": "account", "username": str(username), "public_key": str(key)}:
                relay.authorize(username, key)
            case {"do": "cut", "username": str(username)}:
                await relay.cut(username)
            case {"do": "revoke", "username": str(username)}:
                await relay.revoke(username)
            case _:
                raise ValueError(f"no such command: {command}")
    except (ValueError, AttributeError) as error:
        return {"id": ident, "ok": False, "error": str(error)}
    return {"id": ident, "ok": True}


def _say(answer: dict[str, Any]) -> None:
    # Past sys.stdout, whose flush at exit would complain of a parent that is gone.
    os.write(1, json.dumps(answer).encode() + b"\n")


def main() -> None:
    # A cut connection is written to until its forwards have noticed; asyncio would complain of that on our terminal.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    # A signal cancels; a parent that is gone breaks the pipe. Either is a way to end, not a failure.
    with contextlib.suppress(asyncio.CancelledError, BrokenPipeError):
        asyncio.run(_serve())


if __name__ == "__main__":
    main()
