"""How often the objects of the process are searched for garbage while a server runs in it."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

DEFAULTS = frozenset({(700, 10, 10), (2000, 10, 10)})
"""What Python sets, up to 3.12 and from 3.13 on."""

RARE = (5000, 10, 20)
"""A search of the young, which comes after so many objects more, is through all that belong to calls in flight, 70 each
(160 of a stream): with 32 of them at Python's 700 it comes at every 29th call and takes 25 to 37 us of each, at 5000 a
third, and of 256 or 4,096 no more than before. One of all objects stops every stream: 4,096 open ones are 650,000,
through which it takes a second. It comes after a million more; at Python's own it came 16 times until they were there.
"""

_users = 0
_before = RARE


@contextmanager
def rare_searches() -> Iterator[None]:
    """Within it searches are as rare as `RARE` says, for the whole process. Nothing changes where the program has set
    the thresholds itself, before or within. May be nested.

    What a server keeps and lets go of has no cycles: it is freed at once, without any search.
    """
    global _users, _before
    if not _users:
        _before = gc.get_threshold()
        if _before in DEFAULTS:
            gc.set_threshold(*RARE)
    _users += 1
    try:
        yield
    finally:
        _users -= 1
        if not _users and _before in DEFAULTS and gc.get_threshold() == RARE:
            gc.set_threshold(*_before)
