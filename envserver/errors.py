"""What can go wrong with an env server, sorted by who hears of it."""


class EnvServerError(Exception):
    """An env server cannot be started, reached or used as asked."""


class EnvServerStartupError(EnvServerError):
    """A server or worker did not come up: it died, or took too long.

    The text says all that is known; the attributes are for programs. `seconds` is how long it lived, `returncode` its
    exit status (negative: the signal that ended it; None: it still runs), `tail` the end of its output.
    """

    def __init__(
        self,
        message: str,
        *,
        exit_reason: str | None = None,
        returncode: int | None = None,
        seconds: float | None = None,
        tail: str = "",
        log_path: str | None = None,
    ) -> None:
        super().__init__(message)
        self.exit_reason = exit_reason
        self.returncode = returncode
        self.seconds = seconds
        self.tail = tail
        self.log_path = log_path


class EnvRequestError(EnvServerError):
    """The server answered a request with `success=False`; the text is its `error`."""
