"""How often all objects of the process are searched for garbage while a server runs in it."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARER = 10
"""By how much: a search stops every stream. 4,096 sessions with an open stream each are 650,000 objects; until they
were there the interpreter searched all 16 times, 7 of 22 seconds, and the last searches took a second each."""

DEFAULT = 10
"""Python's third threshold: a full search comes at every tenth of the middle generation, at most."""

_users = 0


@contextmanager
def rare_full_searches() -> Iterator[None]:
    """Within it full searches are `RARER` times as rare, for the whole process; the young generations are searched as
    ever. Nothing changes where the program has set the threshold itself, before or within. May be nested.

    What a server keeps and lets go of has no cycles: it is freed at once, without any search.
    """
    global _users
    young, middle, full = gc.get_threshold()
    if not _users and full == DEFAULT:
        gc.set_threshold(young, middle, DEFAULT * RARER)
    _users += 1
    try:
        yield
    finally:
        _users -= 1
        young, middle, full = gc.get_threshold()
        if not _users and full == DEFAULT * RARER:
            gc.set_threshold(young, middle, DEFAULT)
