"""The health route every server behind a tunnel answers, and the headers of its probes."""

HEALTH_PATH = "/vf/health"
"""Answers 200, `text/plain`, body `ok`, without authentication."""

IDENTITY_HEADER = "X-VF-Identity"
"""On the health answer: a nonce of the server that answers, so that a stranger under our URL is told apart."""

PROBE_HEADER = "X-VF-Probe"
"""On a probe: its nonce, so that the server can tell that the probe arrived even when the answer is lost."""
