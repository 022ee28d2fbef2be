"""Bringing the SDK's own messages into a run's logs."""

import logging

logger = logging.getLogger("tunnel")


class TunnelLogHandler(logging.Handler):
    """Forwards the `prime_tunnel` logger to `tunnel`: warnings and errors, and at INFO the login after a reconnect.

    A leading "Tunnel " or "frpc " is dropped, for the logger's name says it already.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except (TypeError, ValueError):
            self.handleError(record)  # as every handler does; the SDK's own threads must not die of it
            return
        if record.levelno < logging.WARNING and (
            record.levelno < logging.INFO or "login to server success" not in message
        ):
            return
        for lead in ("Tunnel ", "frpc "):
            if message.startswith(lead):
                message = message.removeprefix(lead)
                break
        logger.log(record.levelno, "%s", message, exc_info=record.exc_info)


def install_log_handler() -> None:
    """Attach one `TunnelLogHandler` to the SDK's logger, however often it is called."""
    source = logging.getLogger("prime_tunnel")
    if not any(isinstance(handler, TunnelLogHandler) for handler in source.handlers):
        source.addHandler(TunnelLogHandler())
