"""Tests with verifiers itself are found only where it is installed."""

from importlib.util import find_spec

if find_spec("verifiers") is None:
    collect_ignore_glob = ["test_*.py"]
