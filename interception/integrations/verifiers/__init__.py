"""verifiers (0.4) on our tunnels and pools: `install()`, or `make_agent(…, interception=make_interception(…))`.

Its servers' handlers, graph and dialects stay its own. Needs the extra `verifiers`.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    _VERSION = version("verifiers")
except PackageNotFoundError:
    raise ImportError("verifiers is not installed: pip install 'interception-toolkit[verifiers]'") from None

try:
    from interception.integrations.verifiers.installation import Installation, install, installed, uninstall
    from interception.integrations.verifiers.options import Options
    from interception.integrations.verifiers.pools import (
        ElasticInterceptionPool,
        StaticInterceptionPool,
        make_interception,
    )
    from interception.integrations.verifiers.serve import serve_env
    from interception.integrations.verifiers.server import InterceptionServer
except ImportError as error:
    raise ImportError(
        f"verifiers {_VERSION} is not as this integration knows it (0.4.0): {error}. "
        "Install verifiers==0.4.0, or a version of interception-toolkit that knows yours."
    ) from error

__all__ = [
    "ElasticInterceptionPool",
    "Installation",
    "InterceptionServer",
    "Options",
    "StaticInterceptionPool",
    "install",
    "installed",
    "make_interception",
    "serve_env",
    "uninstall",
]
