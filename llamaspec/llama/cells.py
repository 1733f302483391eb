"""The cells of a context's KV cache, each of which holds one position of one or more sequences.

What llama.cpp can do with them, and nothing of which tokens they stand for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib

from llamaspec.llama import runtime

LARGE = 64 << 20  # bytes of copies: for more the machine is asked whether it has room, and none is kept

Bytes = npt.NDArray[np.uint8]


class Scratch:
    """Memory for copies that are needed together, and then no more: used again, for fresh memory is slow."""

    def __init__(self) -> None:
        self._memory, self._n_taken = np.empty(0, dtype=np.uint8), 0

    def take(self, n_bytes: int) -> Bytes:
        """So many bytes, valid until `reset`."""
        start, self._n_taken = self._n_taken, self._n_taken + n_bytes
        if self._n_taken > len(self._memory):
            return np.empty(n_bytes, dtype=np.uint8)
        return self._memory[start : self._n_taken]

    def reset(self) -> None:
        """Nothing of it is needed any more; the next time there is room for as much."""
        if len(self._memory) < self._n_taken <= LARGE:
            self._memory = np.empty(min(2 * self._n_taken, LARGE), dtype=np.uint8)
        self._n_taken = 0


class Cells(Protocol):
    """What llama.cpp does with the cells of one context."""

    def remove(self, sequence: int, start: int) -> None:
        """Take a sequence's positions from `start` on out of their cells."""

    def share(self, source: int, sequence: int, start: int, end: int) -> None:
        """Let `sequence` hold the cells of some positions of `source`, too."""

    def can_copy(self, sequences: Sequence[int]) -> bool:
        """Whether the contents of some sequences can be copied out, and the machine has room for all."""

    def copy_out(self, sequence: int, start: int, scratch: Scratch | None = None) -> Bytes | None:
        """The content of a sequence's cells from a position on; it gives up the cells before it.

        None where the content cannot be copied, or the machine has no room for it. `scratch`: where to put
        what is not to be kept.
        """

    def copy_in(self, sequence: int, content: Bytes) -> bool:
        """Put the content into the first empty cells; False where that failed."""

    def clear(self) -> None:
        """Empty all cells."""


class LlamaCells:
    """The cells of a context whose layers keep keys and values.

    Parameters
    ----------
    context : llama_context pointer
    can_copy : bool
        Whether a copy of a sequence has all its positions: not where some layers look through a window.
    """

    def __init__(self, context: Any, *, can_copy: bool) -> None:
        self._context = context
        self._memory = lib.llama_get_memory(context)
        self._can_copy = can_copy

    def remove(self, sequence: int, start: int) -> None:
        """Take a sequence's positions from `start` on out of their cells."""
        lib.llama_memory_seq_rm(self._memory, sequence, start, -1)

    def share(self, source: int, sequence: int, start: int, end: int) -> None:
        """Let `sequence` hold the cells of some positions of `source`, too."""
        lib.llama_memory_seq_cp(self._memory, source, sequence, start, end)

    def can_copy(self, sequences: Sequence[int]) -> bool:
        """Whether the contents of some sequences can be copied out, and the machine has room for all."""
        if not self._can_copy:
            return False
        n_bytes = sum(map(self._n_bytes, sequences))
        room = runtime.available_bytes() if n_bytes >= LARGE else None
        return room is None or room >= 2 * n_bytes

    def copy_out(self, sequence: int, start: int, scratch: Scratch | None = None) -> Bytes | None:
        """The content of a sequence's cells from a position on; it gives up the cells before it."""
        if not self._can_copy:
            return None
        lib.llama_memory_seq_rm(self._memory, sequence, 0, start)
        if not self.can_copy([sequence]):
            return None
        content = (scratch or Scratch()).take(self._n_bytes(sequence))
        n = lib.llama_state_seq_get_data(self._context, _bytes(content), len(content), sequence)
        return content if n == len(content) else None

    def copy_in(self, sequence: int, content: Bytes) -> bool:
        """Put the content into the first empty cells."""
        n = lib.llama_state_seq_set_data(self._context, _bytes(content), len(content), sequence)
        return bool(n == len(content))

    def _n_bytes(self, sequence: int) -> int:
        n: int = lib.llama_state_seq_get_size(self._context, sequence)
        return n

    def clear(self) -> None:
        """Empty all cells."""
        lib.llama_memory_clear(self._memory, False)


def _bytes(content: Bytes) -> Any:
    return content.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
