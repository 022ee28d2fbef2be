"""A stand-in for Prime's tunnel service and its frpc, driven by the real ``prime_tunnel`` SDK."""

from tests.prime.service import FakePrime

__all__ = ["FakePrime"]
