"""The cells of a KV cache: what llama.cpp does with them, and which sequences hold each.

Cells below the top are full, those from there on are empty. A cell that no sequence holds any more becomes
empty if it is the last full one, and garbage otherwise, which a llama.cpp sequence of its own holds. So new
cells are only appended, and the cells of a sequence ascend with its positions: attention adds up in the same
order as for that text alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib

from llamaspec.llama import runtime
from llamaspec.values import NO_TOKENS, TokenArray

Bytes = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.float32]  # [n, E] hidden rows

LARGE = 64 << 20  # bytes of copies from which on free memory is checked
KEPT_ROWS = 512  # hidden rows kept of a running text, if there were so many: one part of a prompt
TAIL_ROWS = 65  # hidden rows kept of a text that ended: what a round may have left unread


class Cells:
    """llama.cpp's cells of one context; they can be copied unless a layer has a sliding window."""

    def __init__(self, context: Any, *, can_copy: bool) -> None:
        self._context, self._can_copy = context, can_copy
        self._memory = lib.llama_get_memory(context)

    def remove(self, sequence: int, start: int) -> None:
        """Take a sequence's positions from `start` on out of their cells."""
        lib.llama_memory_seq_rm(self._memory, sequence, start, -1)

    def share(self, source: int, sequence: int, start: int, end: int) -> None:
        """Let `sequence` hold the cells of some positions of `source`, too."""
        lib.llama_memory_seq_cp(self._memory, source, sequence, start, end)

    def can_copy(self, sequences: Sequence[int]) -> bool:
        """Whether some sequences can be copied out, and the machine has room for all their contents."""
        if not self._can_copy:
            return False
        n_bytes: int = sum(lib.llama_state_seq_get_size(self._context, sequence) for sequence in sequences)
        return n_bytes < LARGE or runtime.available_bytes() >= 2 * n_bytes

    def copy_out(self, sequence: int, start: int) -> Bytes | None:
        """The content of a sequence's cells from a position on, if it can be copied; it gives up the rest."""
        if not self._can_copy:
            return None
        lib.llama_memory_seq_rm(self._memory, sequence, 0, start)
        if not self.can_copy([sequence]):
            return None
        content = np.empty(lib.llama_state_seq_get_size(self._context, sequence), dtype=np.uint8)
        n = lib.llama_state_seq_get_data(self._context, as_pointer(content), len(content), sequence)
        return content if n == len(content) else None

    def copy_in(self, sequence: int, content: Bytes) -> bool:
        """Put the content into the first empty cells; False if that failed."""
        n = lib.llama_state_seq_set_data(self._context, as_pointer(content), len(content), sequence)
        return bool(n == len(content))

    def clear(self) -> None:
        """Empty all cells."""
        lib.llama_memory_clear(self._memory, False)


class HiddenRows:
    """The target's hidden rows of the last positions of a sequence, which its prediction heads read."""

    def __init__(self) -> None:
        self.first = 0  # position of the first row
        self.end = 0  # position behind the last row
        self._rows: Rows = np.empty((0, 0), dtype=np.float32)  # [capacity, E]; the first `end - first` count

    def rows(self, start: int, end: int) -> Rows:
        """The rows of some positions, all of them known: a view."""
        return self._rows[start - self.first : end - self.first]

    def add(self, start: int, rows: Rows) -> None:
        """Note the rows of positions from `start` on, in place of what was known from there on."""
        self.cut(start)
        if start != self.end:
            self.first = self.end = start
        n, n_new = self.end - self.first, len(rows)
        if n + n_new > len(self._rows):
            kept = self.rows(max(self.first, self.end - KEPT_ROWS), self.end)
            grown = np.empty((2 * (len(kept) + n_new), rows.shape[1]), dtype=np.float32)
            grown[: len(kept)] = kept.reshape(len(kept), rows.shape[1])
            self._rows, self.first, n = grown, self.end - len(kept), len(kept)
        self._rows[n : n + n_new] = rows
        self.end = start + n_new  # last, so that an exception leaves what was known before

    def cut(self, n: int) -> None:
        """Forget the rows of positions from `n` on."""
        self.end = min(self.end, n)
        self.first = min(self.first, self.end)

    def tail(self, n: int) -> HiddenRows:
        """A copy of the last rows before position `n`."""
        tail, end = HiddenRows(), max(self.first, min(self.end, n))
        tail.first, tail.end = max(self.first, end - TAIL_ROWS), end
        tail._rows = self.rows(tail.first, tail.end).copy()
        return tail


@dataclass(slots=True, eq=False)
class CachedSequence:
    """Tokens whose keys and values are cached, and for whom."""

    number: int  # llama.cpp's seq_id
    row: int | None = None  # the row that uses it; None = an unused prefix
    last_used: int = 0
    n_reserved: int = 0  # cells that its row will fill next
    n_padding: int = 0  # of these, cells for padding
    n: int = 0
    tokens: TokenArray = field(default_factory=lambda: NO_TOKENS)  # [capacity]; the first n count
    cells: TokenArray = field(default_factory=lambda: NO_TOKENS)  # [capacity] index of each token's cell
    hidden: HiddenRows = field(default_factory=HiddenRows)

    def append(self, tokens: TokenArray, cells: TokenArray) -> None:
        """Hold more tokens. The length is set last, so an exception leaves what was held before."""
        end = self.n + len(tokens)
        self.hidden.cut(self.n)
        if end > len(self.tokens):
            grown = np.empty((2, max(2 * end, 256)), dtype=np.int32)
            grown[0, : self.n], grown[1, : self.n] = self.tokens[: self.n], self.cells[: self.n]
            self.tokens, self.cells = grown
        self.tokens[self.n : end], self.cells[self.n : end] = tokens, cells
        self.n = end

    def shared(self, tokens: TokenArray) -> int:
        """Length of the common beginning with other tokens."""
        return shared(self.tokens[: self.n], tokens)


@dataclass(frozen=True, slots=True, eq=False)
class CopiedSequence:
    """A sequence whose cells were copied out, to be moved within the cache or to a file."""

    sequence: CachedSequence
    n: int
    trunk: CachedSequence | None  # copied before; the first `n_shared` cells are the same
    n_shared: int
    content: Bytes | None  # of the other cells; None if copying failed


class CellTable:
    """Which sequences hold which of `size` cells; changes llama.cpp's cells and its own notes together."""

    def __init__(self, cells: Cells, size: int, garbage: int) -> None:
        self.cells, self.size = cells, size
        self.garbage = garbage  # llama.cpp's seq_id of what holds the garbage
        self.top = 0  # cells below are full, cells from here on are empty
        self.n_garbage = 0
        self._n_owners = np.zeros(size, dtype=np.int16)  # [size] sequences that hold each cell

    @property
    def n_live(self) -> int:
        """Cells that some sequence holds, without garbage."""
        return self.top - self.n_garbage

    def clear(self) -> None:
        """Empty all cells; the sequences are the caller's."""
        self.cells.clear()
        self._n_owners[:] = 0
        self.top = self.n_garbage = 0

    def take(self, n: int) -> TokenArray:
        """The next empty cells, which an evaluation has just filled, in order: [n] int32."""
        taken = np.arange(self.top, self.top + n, dtype=np.int32)
        self._n_owners[taken] = 1
        self.top += n
        return taken

    def drop(self, cells: TokenArray, n_top: int) -> None:
        """Nobody holds some cells any more; the last `n_top` full ones become empty, the others garbage."""
        self._n_owners[cells] = 0
        self.top -= n_top
        self.n_garbage += len(cells) - n_top

    def cut(self, sequence: CachedSequence, n: int) -> None:
        """Take the tokens from `n` on out of a sequence."""
        n_held = sequence.n
        if n >= n_held:
            return
        cells = sequence.cells[n:n_held]
        owners = self._n_owners[cells]
        n_top = 0
        if cells[-1] == self.top - 1:
            is_top = (cells == np.arange(self.top - len(cells), self.top)) & (owners == 1)
            n_top = len(cells) if is_top.all() else int(is_top[::-1].argmin())
        n_garbage = int(np.count_nonzero(owners[: len(cells) - n_top] == 1))
        if n_garbage:
            self.cells.share(sequence.number, self.garbage, n, n_held - n_top)
        sequence.n = n
        self.cells.remove(sequence.number, n)
        self._n_owners[cells] = owners - 1
        self.top -= n_top
        self.n_garbage += n_garbage

    def take_over(self, sequence: CachedSequence, other: CachedSequence, n: int) -> None:
        """Let a sequence hold the first `n` tokens of another too, of which it has the beginning."""
        start = sequence.n
        if start and other.cells[start] < sequence.cells[start - 1]:
            self.cut(sequence, 0)  # else the cells would not ascend: take the beginning over, too
            start = 0
        self.cells.share(other.number, sequence.number, start, n)
        cells = other.cells[start:n]
        self._n_owners[cells] += 1
        sequence.append(other.tokens[start:n], cells)
        sequence.hidden = other.hidden.tail(n)

    def copy_out(self, sequences: Sequence[CachedSequence]) -> Iterator[CopiedSequence]:
        """Copy sequences out, in this order; what one shares with an earlier one is copied once.

        llama.cpp's sequences hold less and less meanwhile: `clear` afterwards.
        """
        for i, sequence in enumerate(sequences):
            own = sequence.cells[: sequence.n]
            n_shared = [shared(other.cells[: other.n], own) for other in sequences[:i]]
            n = max(n_shared, default=0)
            trunk = sequences[n_shared.index(n)] if n else None
            yield CopiedSequence(sequence, sequence.n, trunk, n, self.cells.copy_out(sequence.number, n))

    def copy_in(self, copied: CopiedSequence) -> None:
        """Put what was copied out into the next empty cells; the sequence stays empty if that fails."""
        sequence, trunk, n_shared = copied.sequence, copied.trunk, copied.n_shared
        if copied.content is None or (trunk is not None and trunk.n < n_shared):
            return
        n_new = copied.n - n_shared
        if n_new and not self.cells.copy_in(sequence.number, copied.content):
            self.cells.remove(sequence.number, 0)
            return
        if trunk is not None:
            self.cells.share(trunk.number, sequence.number, 0, n_shared)
            sequence.cells[:n_shared] = trunk.cells[:n_shared]
        sequence.cells[n_shared : copied.n] = np.arange(self.top, self.top + n_new)
        self._n_owners[sequence.cells[: copied.n]] += 1
        self.top += n_new
        sequence.n = copied.n


def shared(a: TokenArray, b: TokenArray) -> int:
    """Length of the common beginning of two sequences."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def as_pointer(content: Bytes) -> Any:
    """As llama.cpp wants it."""
    return content.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
