"""What a run would need, checked one after the other, and how to mend what is missing: `interception doctor`."""

import asyncio
import email.utils
import importlib.metadata
import os
import re
import resource
import secrets
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from aiohttp import web

from tunnel import (
    CommandTunnelConfig,
    CustomTunnelConfig,
    PrimeTunnelConfig,
    SshTunnelConfig,
    TunnelConfig,
    TunnelError,
    TunnelLimitError,
    make_tunnel,
)

Status = Literal["ok", "warn", "fail", "skip"]

UNTRIED = (3, 14)

OPEN_FILES = 1024
"""Fewer are soon used up: a rollout has some three connections, each tunnel client two pipes."""

CLOCK_OFF = 60.0
"""Seconds by which a clock may be wrong before it is told."""

DEFAULT_PORTS = {"http": 80, "https": 443}

CALL_TIMEOUT = 15.0
URL_TIMEOUT = 30.0
"""Seconds for a new URL to serve: its name may have to become known first."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. `ok` · `warn` a run may get along with it · `fail` the tunnel would not work · `skip` not checked."""

    check: str
    status: Status
    detail: str
    remedy: str | None = None


async def examine(config: TunnelConfig | None, on_finding: Callable[[Finding], None]) -> list[Finding]:
    """All checks for a run through this tunnel (None: without one), each told as it ends.

    The last one opens the tunnel and calls a server of ours through its URL: for Prime that makes a registration, and
    deletes it again.
    """
    findings: list[Finding] = []
    async for finding in _checks(config, findings):
        findings.append(finding)
        on_finding(finding)
    return findings


def works(findings: list[Finding]) -> bool:
    """Whether the tunnel would work."""
    return all(finding.status != "fail" for finding in findings)


async def _checks(config: TunnelConfig | None, before: list[Finding]) -> AsyncIterator[Finding]:
    yield _python()
    yield _packages()
    yield _open_files()
    yield _ports(config)
    match config:
        case PrimeTunnelConfig():
            yield _proxies()
            credentials = _credentials(config)
            yield credentials
            yield (resolves := await _found(_api_url()))
            if credentials.status == resolves.status == "ok":
                api, clock = await _api()
                yield api
                yield clock
            else:
                yield Finding("api", "skip", "not asked: see above")
            yield await _frpc()
        case SshTunnelConfig():
            async for finding in _ssh(config):
                yield finding
        case CommandTunnelConfig():
            yield _program(config.command[0])
        case CustomTunnelConfig():
            yield await _found(config.url)
    if config is None:
        yield Finding("tunnel", "skip", "none is asked for: agents of this host alone reach the server")
    elif not works(before):
        yield Finding("tunnel", "skip", "not tried: see above")
    else:
        yield await _through(config)


# -- this host -----------------------------------------------------------------------------------------


def _python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= UNTRIED:
        return Finding("python", "warn", f"{found} is newer than what this was tried with", "use Python 3.11 to 3.13")
    return Finding("python", "ok", f"{found} ({sys.executable})")


def _packages() -> Finding:
    """Ours, and what it requires at least."""
    try:
        required = importlib.metadata.requires("interception-toolkit") or []
        ours = importlib.metadata.version("interception-toolkit")
    except importlib.metadata.PackageNotFoundError:
        return Finding("packages", "fail", "interception-toolkit is not installed", "pip install interception-toolkit")
    found, wrong = [f"interception-toolkit {ours}"], []
    for requirement in required:
        match = re.match(r"([\w.-]+)\s*(?:>=\s*([\d.]+))?", requirement)
        if match is None or ";" in requirement:  # of an extra, or for other Pythons
            continue
        name, least = match.groups()
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        if least is not None and _numbers(version) < _numbers(least):
            wrong.append(f"{name} {version} is older than {least}")
        elif name in ("prime-tunnel", "asyncssh", "aiohttp"):
            found.append(f"{name} {version}")
    if wrong:
        return Finding("packages", "fail", "; ".join(wrong), "pip install --upgrade interception-toolkit")
    return Finding("packages", "ok", ", ".join(found))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= OPEN_FILES:
        return Finding("files", "ok", f"{'any number' if soft == resource.RLIM_INFINITY else soft} may be open")
    more = min(4096, hard) if hard != resource.RLIM_INFINITY else 4096
    return Finding("files", "warn", f"only {soft} may be open at a time", f"ulimit -n {more}")


def _ports(config: TunnelConfig | None) -> Finding:
    host, port = ("127.0.0.1", 0)
    if isinstance(config, CustomTunnelConfig):
        host, port = config.bind_host, config.port
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            found = probe.getsockname()[1]
    except OSError as error:
        remedy = "end what holds it (`ss -ltnp`), or give another port" if port else "see `ip address show lo`"
        return Finding("ports", "fail", f"a server cannot listen on {host}:{port}: {error.strerror}", remedy)
    return Finding("ports", "ok", f"{host}:{port} is free" if port else f"free ones on {host}, {found} for one")


def _proxies() -> Finding:
    from tunnel.prime import PROXY_VARIABLES

    if found := [name for name in PROXY_VARIABLES if os.environ.get(name)]:
        names = ", ".join(found)
        return Finding("proxy", "warn", f"frpc inherits {names}", f"if it cannot connect: unset {' '.join(found)}")
    return Finding("proxy", "ok", "no variable that frpc would go by")


async def _found(url: str) -> Finding:
    """Whether the name in a URL resolves; behind a proxy that is the proxy's affair, and its own name must."""
    parts = urlsplit(url)
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return await _resolves(parts.hostname or "", parts.port or DEFAULT_PORTS.get(parts.scheme, 0))
    # Its URL may hold a password, and be without a scheme.
    through = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    try:
        port = through.port or DEFAULT_PORTS.get(through.scheme, 0)
    except ValueError:
        return Finding("dns", "fail", "the proxy variable for it is no URL", "set it to http://HOST:PORT, or unset it")
    found = await _resolves(through.hostname or "", port)
    return replace(found, detail=f"{parts.hostname} is left to the proxy; {found.detail}")


async def _resolves(host: str, port: int) -> Finding:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CALL_TIMEOUT):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:
        return Finding("dns", "fail", f"{host} can be no name: it, or a part of it, is too long or empty")
    except (OSError, TimeoutError) as error:
        reason = getattr(error, "strerror", None) or f"no answer within {CALL_TIMEOUT:g} s"
        return Finding("dns", "fail", f"{host} does not resolve: {reason}", "look at /etc/resolv.conf, or the spelling")
    address = found[0][4][0]
    return Finding("dns", "ok", f"{host} is {'an address' if address == host else address}")


def _clock(theirs: float | None, of: str) -> Finding:
    if theirs is None:
        return Finding("clock", "skip", f"{of} does not say the time")
    off = time.time() - theirs
    if abs(off) > CLOCK_OFF:
        return Finding(
            "clock", "warn", f"{off:+.0f} s off that of {of}", "certificates may be refused: run an NTP client"
        )
    return Finding("clock", "ok", f"within {max(1.0, abs(off)):.0f} s of {of}")


# -- Prime ---------------------------------------------------------------------------------------------


def _credentials(config: PrimeTunnelConfig) -> Finding:
    try:
        make_tunnel(config)
    except TunnelError as error:
        return Finding("credentials", "fail", str(error))
    where = "PRIME_API_KEY" if os.environ.get("PRIME_API_KEY") else "`prime login`"
    return Finding("credentials", "ok", f"a key is there (from {where})")


def _api_url() -> str:
    import prime_tunnel

    try:
        return str(prime_tunnel.Config().base_url)
    except ValueError:  # a profile that is not there, as the credentials tell
        return str(prime_tunnel.Config.DEFAULT_BASE_URL)


async def _api() -> tuple[Finding, Finding]:
    """Whether Prime's API answers and takes the key; and what it says the time is."""
    import prime_tunnel

    url = _api_url()
    date = None
    try:
        async with asyncio.timeout(CALL_TIMEOUT):
            async with (
                aiohttp.ClientSession(trust_env=True) as session,
                session.get(url, allow_redirects=False) as answer,
            ):
                if header := answer.headers.get("Date"):
                    date = email.utils.parsedate_to_datetime(header).timestamp()
            async with prime_tunnel.TunnelClient() as client:
                began = time.monotonic()
                await client.list_tunnels(per_page=1)
                took = time.monotonic() - began
    except prime_tunnel.TunnelAuthError as error:
        found = Finding(
            "api", "fail", f"{url} refuses the key: {error}", "run `prime login`, or set another PRIME_API_KEY"
        )
    except (prime_tunnel.TunnelError, aiohttp.ClientError, OSError, ValueError) as error:
        reason = str(error) or f"no answer within {CALL_TIMEOUT:g} s"
        found = Finding(
            "api", "fail", f"{url}: {reason}", "is there a way out of this network (firewall, HTTPS_PROXY)?"
        )
    else:
        found = Finding("api", "ok", f"{url} takes the key ({took * 1000:.0f} ms)")
    return found, _clock(date, "Prime's API")


async def _frpc() -> Finding:
    """Whether it is there, is what the SDK wants, and runs. One that is not is fetched as the tunnel starts."""
    import prime_tunnel
    from prime_tunnel.binary import FRPC_VERSION

    try:
        folder = Path(prime_tunnel.Config().bin_dir)
    except ValueError:
        return Finding("frpc", "skip", "the Prime profile cannot be read")
    except OSError as error:
        what = f"its folder {error.filename} cannot be made: {error.strerror}"
        return Finding("frpc", "fail", what, "set HOME to a folder that you may write to")
    path, note = folder / "frpc", folder / ".frpc_version"
    if not (path.exists() or os.access(folder, os.W_OK)):
        what = f"{path} is not there, and {folder} cannot be written"
        return Finding("frpc", "fail", what, "set HOME to a folder that you may write to")
    if not path.exists():
        return Finding(
            "frpc", "warn", f"{path} is not there yet; {FRPC_VERSION} is downloaded from GitHub at the first start"
        )
    noted = note.read_text().strip() if note.exists() else "unknown"
    if noted != FRPC_VERSION:
        return Finding("frpc", "warn", f"{path} is of version {noted}; {FRPC_VERSION} is downloaded at the next start")
    try:
        process = await asyncio.create_subprocess_exec(
            path,
            "-v",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(CALL_TIMEOUT):
                said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    except OSError as error:
        return Finding(
            "frpc", "fail", f"{path} cannot be run: {error.strerror}", f"rm {path} {note}: it is downloaded anew"
        )
    except TimeoutError:
        return Finding("frpc", "fail", f"`{path} -v` hangs", f"rm {path} {note}: it is downloaded anew")
    version = said.decode(errors="replace").strip()
    if process.returncode or version != FRPC_VERSION:
        return Finding(
            "frpc", "warn", f"{path} says {version[:80]!r}, the SDK wants {FRPC_VERSION}", f"rm {path} {note}"
        )
    return Finding("frpc", "ok", f"{version} ({path})")


# -- SSH, and any program ------------------------------------------------------------------------------


async def _ssh(config: SshTunnelConfig) -> AsyncIterator[Finding]:
    from tunnel.ssh_login import Login, LoginRefusedError, end

    login = Login(config)
    try:
        first = await login.first_address()
    except TunnelError as error:
        yield Finding("login", "fail", str(error), "mend ~/.ssh/config")
        return
    if first is not None:
        yield (resolves := await _resolves(*first))
        if resolves.status == "fail":
            return
    began = time.monotonic()
    try:
        async with asyncio.timeout(config.start_timeout):
            connection = await login.connect()
    except TimeoutError:
        said = f"{login.relay} did not let us in within {config.start_timeout:g} s"
        yield Finding("login", "fail", said, "is that its ssh port, and is it open to you?")
        return
    except LoginRefusedError as error:
        remedy = f"put your public key into its ~/.ssh/authorized_keys, until `ssh {config.host}` asks for nothing"
        yield Finding("login", "fail", str(error), remedy)
        return
    except TunnelError as error:
        # Those of a key file, a known_hosts file or a host key say themselves what to do.
        clear = isinstance(error, TunnelLimitError) or "known_hosts" in str(error)
        yield Finding("login", "fail", str(error), None if clear else "is it up, and reachable?")
        return
    version = str(connection.get_extra_info("server_version") or "").removeprefix("SSH-2.0-")
    await end(connection)
    yield Finding("login", "ok", f"{login.relay} let us in ({version}, {(time.monotonic() - began) * 1000:.0f} ms)")


def _program(name: str) -> Finding:
    found = shutil.which(name)
    if found is None:
        return Finding("program", "fail", f"there is no program {name}", "install it, or give its whole path")
    return Finding("program", "ok", found)


# -- through it ----------------------------------------------------------------------------------------


async def _through(config: TunnelConfig) -> Finding:
    """The proof: a server here, called through the tunnel's URL."""
    word = secrets.token_hex(8)

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=word)

    app = web.Application()
    app.router.add_route("GET", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        tunnel = make_tunnel(config)
        await web.TCPSite(runner, tunnel.bind_host, tunnel.bind_port).start()
        began = time.monotonic()
        async with tunnel.expose(runner.addresses[0][1]) as url:
            opened = time.monotonic()
            reason = await _heard(url, word)
            if reason is not None:
                return Finding("tunnel", "fail", f"{url} does not lead here: {reason}", _url_remedy(config))
            took = f"up in {opened - began:.1f} s, answered after {time.monotonic() - opened:.1f} s"
            return Finding("tunnel", "ok", f"{url} leads here ({took})")
    except (TunnelError, OSError) as error:
        return Finding("tunnel", "fail", str(error))
    finally:
        await runner.cleanup()


async def _heard(url: str, word: str) -> str | None:
    """None as soon as `word` is heard through the URL, else why it was not."""
    reason = "no answer"
    deadline = time.monotonic() + URL_TIMEOUT
    timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT)
    async with aiohttp.ClientSession(trust_env=True, timeout=timeout) as session:
        while time.monotonic() < deadline:
            try:
                async with session.get(f"{url}/doctor", allow_redirects=False) as answer:
                    if word in await answer.text():
                        return None
                    reason = f"somebody else answers there, with status {answer.status}"
            except (aiohttp.ClientError, OSError, UnicodeDecodeError) as error:
                reason = str(error) or f"no answer within {CALL_TIMEOUT:g} s"
            await asyncio.sleep(1)
    return reason


def _url_remedy(config: TunnelConfig) -> str:
    match config:
        case SshTunnelConfig():
            return "open the port in the relay's firewall, or set remote_port to one that is open"
        case CustomTunnelConfig():
            return f"have your proxy forward to port {config.port} of this host"
    return "its own output or dashboard may say more"
