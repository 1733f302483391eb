"""Keeps the C library's allocator from growing with the number of threads.

glibc gives threads arenas of their own, up to eight for each core, and what is freed in one serves no other.
The server compiles each schema in a thread of its own, so its memory grew for thousands of requests by what
lay free in arenas. scripts/serve_soak.py shows it.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

_M_ARENA_MAX = -8  # of glibc's mallopt


def share_one_arena() -> None:
    """Let all threads of the process allocate from one arena, unless MALLOC_ARENA_MAX says otherwise.

    Before threads are started; without effect where the C library has no arenas. They hold Python's lock
    while they allocate, or do so too rarely to wait for each other.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        with suppress(AttributeError, OSError, TypeError):  # not on every system
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
