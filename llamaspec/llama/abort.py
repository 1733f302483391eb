"""A flag that ends a running evaluation: set by another thread, or by Ctrl-C while llama.cpp computes.

llama.cpp asks "abort?" at every node of its graph, by calling a function with a pointer. Asking Python
would take the interpreter's lock each time, and Python runs no signal handler before the evaluation is
over. So the function is C's strlen, and the pointer leads to a page that is empty (0: go on) or not (1:
abort). The page is the memory of a file, and that file is where Python's C-level signal handler writes the
number of a signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import tempfile
import threading
import weakref
from collections.abc import Iterator

from llama_cpp import llama_cpp as lib

STRLEN = lib.ggml_abort_callback(ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p).value or 0)


class AbortFlag:
    """The flag of one context."""

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as file:
            self._fd = os.dup(file.fileno())
        weakref.finalize(self, _close, self._fd)
        _ours.add(self._fd)
        os.truncate(self._fd, mmap.PAGESIZE)
        os.set_blocking(self._fd, False)  # signal.set_wakeup_fd insists
        self._page = mmap.mmap(self._fd, mmap.PAGESIZE)
        self._byte = ctypes.c_char.from_buffer(self._page)

    @property
    def address(self) -> int:
        """What llama.cpp hands to STRLEN."""
        return ctypes.addressof(self._byte)

    def set(self) -> None:
        """Abort the evaluation; from any thread."""
        self._byte.value = b"1"

    def clear(self) -> None:
        """Evaluations go on."""
        self._byte.value = b"\0"

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Clear the flag; in the main thread signals may set it until the end."""
        self.clear()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        os.lseek(self._fd, 0, os.SEEK_SET)
        try:
            _wake(self._fd)
            yield
        finally:
            _wake(_theirs[0])


# A second Ctrl-C may keep the end of `armed` from running. So what other code had set before is remembered
# here, and the next use puts it back.
_ours: set[int] = set()  # descriptors of flags
_theirs = [-1]  # the descriptor that other code, such as asyncio, wants woken


def _wake(fd: int) -> None:
    before = signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
    if before not in _ours:
        _theirs[0] = before


def _close(fd: int) -> None:
    """Close the descriptor of a flag; no signal is written to it any more."""
    if threading.current_thread() is threading.main_thread():
        before = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(_theirs[0] if before == fd else before, warn_on_full_buffer=False)
    _ours.discard(fd)
    os.close(fd)
