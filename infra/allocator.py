"""Memory of a process that lives for days: what it freed goes back to the system.

The C library's allocator keeps freed memory, in a pool for every thread that ever allocated; in a process of several
threads the kept part grows for hours though what is in use does not.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

TRIM_EVERY_S = 60.0
_MAX_POOLS = 2
_M_ARENA_MAX = -8  # of mallopt(3); glibc calls its pools arenas


@cache
def keep_lean() -> None:
    """Share two pools among the threads of this process, and trim them every minute; does nothing without glibc."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        trim = library.malloc_trim
        library.mallopt(_M_ARENA_MAX, _MAX_POOLS)
        threading.Thread(target=_trim_forever, args=(trim,), name="trim", daemon=True).start()


def _trim_forever(trim: Callable[[Any], int]) -> None:
    while True:
        time.sleep(TRIM_EVERY_S)
        trim(ctypes.c_size_t(0))
