"""``FakePrime``: Prime's tunnel service on loopback, in a thread of its own, for the SDK blocks its caller's loop.

with FakePrime(tmp_path, scale=0.05) as service:
    for name, value in service.env().items():
        monkeypatch.setenv(name, value)
    url = await prime_tunnel.Tunnel(local_port=port).start()
"""

import json
import os
import signal
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import ClassVar, Final, Self

from anyio.from_thread import BlockingPortal, start_blocking_portal
from prime_tunnel.binary import FRPC_VERSION

from tests.prime.control import API_KEY, ControlApi
from tests.prime.relay import Registration, Relay


class FakePrime:
    """Everything may be used from any thread while the service is entered; faults take effect at once."""

    relay_type: ClassVar[type[Relay]] = Relay

    def __init__(self, home: Path, scale: float = 1.0, domain: str | None = None) -> None:
        """``scale`` multiplies the waits of relay and frpc: 10 s for a work connection, 30 s keepalives, and so on.

        With a ``domain`` the URLs have names in it, all of which must resolve to 127.0.0.1; without, addresses.
        """
        self.home = home.resolve()
        self.scale = scale
        self._frpc = self.home / ".prime" / "bin" / "frpc"
        self._registrations: dict[str, Registration] = {}
        self._relay = self.relay_type(self._registrations, scale)
        self._api = ControlApi(self._registrations, self._relay, domain)
        self._stack = ExitStack()
        self._portal: BlockingPortal

        # Tunnel ids in the order of their creation, and of each DELETE that was carried out (bulk ones too).
        self.created: Final = self._api.created
        self.deletes: Final = self._api.deletes

        # Faults of the API by method, to be changed in place: seconds before a request is processed, seconds
        # between that and the answer, an answer instead (status, body, headers), and "process it, then drop the
        # connection".
        self.api_delay: Final = self._api.delay
        self.after_delay: Final = self._api.after_delay
        self.api_status: Final = self._api.status
        self.api_drop: Final = self._api.drop

        # Faults of the gateway by tunnel id, or "*" for all: a status to answer, "hang" or "reset".
        self.gateway: Final = self._relay.gateway

        # The same for the probes of a keepalive alone: the host's own way to the URL, which no rollout goes.
        self.host_path: Final = self._relay.host_path

    def __enter__(self) -> Self:
        self._frpc.parent.mkdir(parents=True, exist_ok=True)
        self._frpc.write_text(f"#!{sys.executable} -IS\n" + self._frpc_program())
        self._frpc.chmod(0o755)
        (self._frpc.parent / ".frpc_version").write_text(FRPC_VERSION)
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal())
            stack.enter_context(self._portal.wrap_async_context_manager(self._relay))
            stack.enter_context(self._portal.wrap_async_context_manager(self._api))
            stack.callback(self._kill_clients)
            self._stack = stack.pop_all()
        return self

    def _frpc_program(self) -> str:
        return Path(__file__).with_name("frpc_standin.py").read_text()

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def env(self, **frpc: float) -> dict[str, str]:
        """What points the SDK of this process, or of another one, here. ``frpc``: options of ``frpc_standin``."""
        no_proxy = "127.0.0.1,localhost"
        return {
            "HOME": str(self.home),
            "XDG_STATE_HOME": str(self.home / "state"),
            "PRIME_API_KEY": API_KEY,
            "PRIME_API_BASE_URL": self._api.url,
            "PRIME_CONTEXT": "",  # a developer's own profile would be looked for in this home
            "NO_PROXY": no_proxy,
            "no_proxy": no_proxy,
            "FRPC_FAKE": json.dumps({"timescale": self.scale} | frpc),
        }

    # Accounts

    @property
    def urls(self) -> dict[str, str]:
        """The public URL of each tunnel ever created, by its id."""
        return {registration.tunnel_id: registration.url for registration in list(self._registrations.values())}

    def status(self, tunnel_id: str) -> str:
        return self._registrations[tunnel_id].status

    def live(self) -> list[str]:
        """The tunnels that are neither expired nor terminated."""
        return [r.tunnel_id for r in list(self._registrations.values()) if not r.terminal]

    def logins(self, tunnel_id: str) -> int:
        return self._relay.logins[tunnel_id]

    def api_calls(self, method: str) -> int:
        return self._api.calls[method]

    def requests(self, tunnel_id: str, path: str | None = None) -> int:
        """How many http requests have come for the tunnel, whatever became of them. ``path`` includes the query."""
        seen = list(self._relay.requests)
        return sum(owner == tunnel_id and path in (None, requested) for owner, requested in seen)

    def frpc_pids(self) -> list[int]:
        return [pid for pid, arguments in self._processes() if str(self._frpc) in arguments]

    def config_files(self) -> list[Path]:
        return sorted((self.home / ".prime" / "tunnels").glob("*"))

    def _processes(self) -> list[tuple[int, list[str]]]:
        """The processes that run out of this home (a zombie has no command line), with their arguments."""
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended meanwhile
                arguments = (directory / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if any(argument.startswith(str(self._frpc)) for argument in arguments):
                    found.append((int(directory.name), arguments))
        return found

    def _kill_clients(self) -> None:
        while processes := self._processes():
            for pid, _ in processes:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)

    # Faults of a tunnel

    def expire(self, tunnel_id: str) -> None:
        """The record expires, and its frpc is thrown out."""
        self.expire_softly(tunnel_id)
        self._portal.call(self._relay.throw_out, tunnel_id)

    def expire_softly(self, tunnel_id: str) -> None:
        """The record expires: no login or proxy is accepted any more, but what is connected keeps serving."""
        self._end(tunnel_id, "EXPIRED", "tunnel is inactive")

    def terminate_softly(self, tunnel_id: str) -> None:
        """The record is terminated, and still what is connected keeps serving."""
        self._end(tunnel_id, "TERMINATED", "tunnel not registered")

    def _end(self, tunnel_id: str, status: str, refusal: str) -> None:
        registration = self._registrations[tunnel_id]
        registration.status, registration.refusal = status, refusal

    def forget(self, tunnel_id: str) -> None:
        """GET answers 404 and lists leave it out, though it serves, can be restarted and can be deleted."""
        self._registrations[tunnel_id].forgotten = True

    def remember(self, tunnel_id: str) -> None:
        self._registrations[tunnel_id].forgotten = False

    def lose_route(self, tunnel_id: str) -> None:
        """The gateway answers 404 until frpc logs in anew; frpc is not told."""
        self._portal.call(self._relay.lose_route, tunnel_id)

    def lose_route_everywhere(self) -> None:
        self._portal.call(self._relay.lose_route_everywhere)

    def half_open(self, tunnel_id: str) -> None:
        """The network under the present session goes. Each end learns of it by its own keepalive, 40 s * scale;
        until then requests wait 10 s * scale for their 404, and a restart is refused with "already exists".
        """
        self._portal.call(self._relay.half_open, tunnel_id)

    def hold_old_session(self, tunnel_id: str, seconds: float) -> None:
        """Once its frpc has gone, the present session is kept for so many seconds (not scaled): a restart
        is refused with "already exists" for that time.
        """
        self._portal.call(self._relay.hold_session, tunnel_id, seconds)

    # Faults of the API

    def refuse_creates(self, status: int, detail: str) -> None:
        """Until ``api_status.pop("POST")``. A quota is 400 with "maximum number of tunnels reached"."""
        self.api_status["POST"] = (status, {"detail": detail}, {})

    def limit_tunnels(self, quota: int | None) -> None:
        """Creates are refused while so many tunnels are neither expired nor terminated."""
        self._api.quota = quota

    def api_down(self) -> None:
        """Connections to the API are refused; those there are, are cut."""
        self._portal.call(self._api.down)

    def api_up(self) -> None:
        """The API serves again, on the port it had."""
        self._portal.call(self._api.up)
