"""What can go wrong with a tunnel, sorted by what the caller should do about it."""


class TunnelError(Exception):
    """A local port could not be made, or kept, reachable. Trying again may help."""


class TunnelGoneError(TunnelError):
    """The registration can never serve again: only a new tunnel, with a new URL, helps."""


class TunnelLimitError(TunnelError):
    """A quota is spent or the credentials are missing or refused.

    Never retried like a blip: the same call fails until somebody frees a tunnel, pays or logs in.
    """
