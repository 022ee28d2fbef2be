"""What can go wrong with a tunnel, sorted by what the caller should do about it."""


class TunnelError(Exception):
    """A local port could not be made, or kept, reachable. Trying again may help."""

    tries: int = 1
    """How often it had been tried by then: who tries it again shall count them all."""


class TunnelGoneError(TunnelError):
    """The registration can never serve again: only a new tunnel, with a new URL, helps."""


class UrlChangedError(TunnelGoneError):
    """A restarted client serves under another URL, which nobody was told of: `old` is gone, `new` is not used."""

    def __init__(self, old: str, new: str) -> None:
        super().__init__(f"the restarted tunnel client serves under another URL: {new} instead of {old}")
        self.old = old
        self.new = new


class TunnelLimitError(TunnelError):
    """A quota is spent or the credentials are missing or refused.

    Never retried like a blip: the same call fails until somebody frees a tunnel, pays or logs in.
    """
