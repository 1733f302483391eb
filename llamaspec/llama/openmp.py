"""Ends the threads that OpenMP keeps for a thread that computes no more.

llama.cpp computes with the threads that GNU's OpenMP keeps for each thread that asks. Once there are more of
them than cores, none spins while it waits for the others, and every evaluation takes longer: up to 1.5 times
as long on two cores. https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

_LIBRARY = "libgomp.so.1"
_HARD = 2  # omp_pause_hard: nothing is kept


def end_own_threads() -> None:
    """End those of the calling thread, before another one computes; without effect with other libraries.

    The next evaluation of this thread starts them anew.
    """
    library = _library()
    if library is not None:
        library.omp_pause_resource_all(_HARD)


@functools.cache
def _library() -> Any | None:
    try:
        library = ctypes.CDLL(_LIBRARY)
        library.omp_pause_resource_all  # noqa: B018  # an old one has none
    except (AttributeError, OSError):
        return None
    return library
