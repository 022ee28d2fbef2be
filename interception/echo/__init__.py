"""The echo model: a stand-in model endpoint that needs no key, no network and no GPU.

It speaks the three dialects (chat completions, responses, messages), streamed and not, in their full wire shape,
and answers with what it was told. Demos, tests and `interception run` without an upstream use it.
"""

from interception.echo.server import EchoModel

__all__ = ["EchoModel"]
