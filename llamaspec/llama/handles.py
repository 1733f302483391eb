"""Pointers into llama.cpp that are freed exactly once: by `close`, or when nothing refers to them any more.

A handle refers to what it needs, as a context needs its weights. Never freed in a process
that was forked from the one that opened it: llama.cpp's threads do not exist there.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

from llamaspec.errors import ClosedError


class Handle:
    """Owns one pointer.

    Parameters
    ----------
    pointer : pointer
    free : callable
        Frees it.
    needs : sequence of object
        What must live as long as the pointer.
    """

    def __init__(self, pointer: Any, free: Callable[[Any], object], *needs: object) -> None:
        self.pointer = pointer
        self._process = os.getpid()
        weakref.finalize(self, _free, pointer, free, self._process, needs)

    def check(self) -> None:
        """Raise ClosedError in a forked process."""
        if os.getpid() != self._process:
            raise ClosedError("this model was opened before a fork; open it in the child process")


def _free(pointer: Any, free: Callable[[Any], object], process: int, needs: tuple[object, ...]) -> None:
    if os.getpid() == process:
        free(pointer)
    del needs  # it had to live until here
