"""A task set that is there, and needs what is not."""

import what_nobody_has  # type: ignore[import-not-found]  # noqa: F401
