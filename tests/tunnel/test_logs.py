"""The SDK's own messages, brought into a run's logs."""

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tunnel import TunnelLogHandler
from tunnel.logs import install_log_handler

SDK = logging.getLogger("prime_tunnel")


@pytest.fixture
def attached() -> Iterator[None]:
    """The SDK's logger with nothing but our handler, as a run that logs at INFO has it."""
    handlers, level = SDK.handlers, SDK.level
    SDK.handlers = []
    SDK.setLevel(logging.DEBUG)
    install_log_handler()
    yield
    SDK.handlers = handlers
    SDK.setLevel(level)


@pytest.fixture
def forwarded(attached: None, caplog: pytest.LogCaptureFixture) -> Iterator[list[logging.LogRecord]]:
    """What reached the logger `tunnel`."""
    caplog.set_level(logging.DEBUG)
    records: list[logging.LogRecord] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    collect, tunnel = Collect(), logging.getLogger("tunnel")
    tunnel.addHandler(collect)
    yield records
    tunnel.removeHandler(collect)


@pytest.mark.parametrize("level", [logging.WARNING, logging.ERROR, logging.CRITICAL])
@pytest.mark.parametrize("name", ["prime_tunnel", "prime_tunnel.frpc"])
def test_warnings_and_errors_are_forwarded(forwarded: list[logging.LogRecord], name: str, level: int) -> None:
    logging.getLogger(name).log(level, "connection to %s lost", "frps")
    [record] = forwarded
    assert (record.name, record.levelno, record.getMessage()) == ("tunnel", level, "connection to frps lost")


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("Tunnel t-1 lost its connection", "t-1 lost its connection"),
        ("frpc t-1: login failed", "t-1: login failed"),
        ("no Tunnel or frpc in front", "no Tunnel or frpc in front"),
        ("Tunnels are down", "Tunnels are down"),
        ("frpc: down", "frpc: down"),
        ("100 % of %s lost", "100 % of %s lost"),
    ],
)
def test_a_leading_word_that_the_loggers_name_says_already_is_dropped(
    forwarded: list[logging.LogRecord], message: str, shown: str
) -> None:
    SDK.warning(message)
    assert [record.getMessage() for record in forwarded] == [shown]


def test_of_the_rest_only_the_login_after_a_reconnect_is_forwarded(forwarded: list[logging.LogRecord]) -> None:
    SDK.info("Tunnel t-1 started")
    SDK.debug("frpc t-1: login to server success, get run id [x]")
    SDK.info("frpc t-1: [proxy] start proxy success")
    SDK.info("frpc t-1: login to server success, get run id [x]")
    [record] = forwarded
    assert record.levelno == logging.INFO
    assert record.getMessage() == "t-1: login to server success, get run id [x]"


def test_the_traceback_goes_along(forwarded: list[logging.LogRecord]) -> None:
    try:
        raise OSError("no such file")
    except OSError:
        SDK.exception("frpc could not be run")
    [record] = forwarded
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], OSError)


def test_a_message_that_cannot_be_formatted_does_not_raise_in_the_sdks_threads(
    forwarded: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    SDK.propagate = False  # pytest's own handler would raise
    try:
        SDK.warning("%d connections", "many")
    finally:
        SDK.propagate = True
    SDK.warning("still here")
    assert forwarded[-1].getMessage() == "still here"


def test_installed_twice_one_is_attached(forwarded: list[logging.LogRecord]) -> None:
    install_log_handler()
    install_log_handler()
    assert len([handler for handler in SDK.handlers if isinstance(handler, TunnelLogHandler)]) == 1
    SDK.warning("once")
    assert len(forwarded) == 1


def test_importing_tunnel_attaches_nothing() -> None:
    code = (
        "import logging, tunnel, tunnel.logs\n"
        "loggers = [logging.getLogger(name) for name in (None, 'tunnel', 'prime_tunnel', 'prime_tunnel.frpc')]\n"
        "assert not any(logger.handlers for logger in loggers), loggers\n"
        "assert all(logger.level == logging.NOTSET for logger in loggers[1:]), loggers\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
