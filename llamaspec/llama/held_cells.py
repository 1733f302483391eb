"""The cells of a context, and which sequences hold each: where sequences grow, shrink and share.

Cells below the top are full, those from there on empty; a cell that no sequence holds any more becomes empty
where it is the last full one, and else garbage, which a sequence of its own holds. Knows neither rows nor how
room is made for them. tests/llama/test_kv_cache.py checks every cell.
"""

from __future__ import annotations

import numpy as np

from llamaspec.llama.cached_sequence import CachedSequence
from llamaspec.llama.cells import Bytes, Cells
from llamaspec.llama.compaction import Moved
from llamaspec.values import TokenArray


class HeldCells:
    """Who holds which cells.

    Parameters
    ----------
    cells : Cells
    size : int
        Number of cells.
    garbage : int
        llama.cpp's seq_id of the sequence that holds the garbage.
    """

    def __init__(self, cells: Cells, size: int, garbage: int) -> None:
        self.cells = cells
        self.size = size
        self.garbage = garbage
        self.top = 0  # cells below are full, cells from here on are empty
        self._n_owners = np.zeros(size, dtype=np.int16)  # [size] sequences that hold each

    @property
    def n_live(self) -> int:
        """Cells that some sequence holds, without garbage."""
        return int(np.count_nonzero(self._n_owners[: self.top]))

    def n_alone(self, sequence: CachedSequence) -> int:
        """Cells that only this sequence holds."""
        return int(np.count_nonzero(self._n_owners[sequence.cells[: sequence.n]] == 1))

    def clear(self) -> None:
        """Empty all cells; the sequences are the caller's."""
        self.cells.clear()
        self._n_owners[:] = 0
        self.top = 0

    def take(self, n: int) -> TokenArray:
        """The next empty cells, which an evaluation has just filled, in order: [n] int32."""
        top = self.top + n
        self._n_owners[self.top : top] = 1
        taken = np.arange(self.top, top, dtype=np.int32)
        self.top = top
        return taken

    def drop(self, cells: TokenArray, n_top: int) -> None:
        """Nobody holds some cells any more; so many of them, the last full ones, become empty."""
        self._n_owners[cells] = 0
        self.top -= n_top

    def cut(self, sequence: CachedSequence, n: int) -> None:
        """Take the tokens from `n` on out of a sequence.

        Cells at the top become empty. Those below others would be filled again out of order, so the garbage
        sequence holds them.
        """
        n_held = sequence.n
        if n >= n_held:
            return
        cells = sequence.cells[n:n_held]
        owners = self._n_owners[cells]
        n_top = 0
        if cells[-1] == self.top - 1:
            is_top = (cells == np.arange(self.top - len(cells), self.top)) & (owners == 1)
            n_top = len(cells) if is_top.all() else int(is_top[::-1].argmin())
        if n_top < len(cells) and owners[: len(cells) - n_top].min() == 1:
            self.cells.share(sequence.number, self.garbage, n, n_held - n_top)
        sequence.n = n
        self.cells.remove(sequence.number, n)
        for branch in sequence.branches:
            if branch.n > n:
                self.cells.remove(branch.number, n)
                branch.n = n
        self._n_owners[cells] = owners - 1
        self.top -= n_top

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

    def fill(
        self,
        sequence: CachedSequence,
        tokens: TokenArray,
        content: Bytes,
        trunk: CachedSequence | None = None,
        n_shared: int = 0,
    ) -> None:
        """Let an empty sequence hold what was copied out; it stays empty where that fails."""
        sequence.append(tokens, np.zeros_like(tokens))  # the cells are known below
        sequence.n = 0
        self.put_back(Moved(sequence, len(tokens), trunk, n_shared, content))

    def put_back(self, move: Moved) -> None:
        """Copy what was copied out into the next empty cells; what it shared is shared again."""
        sequence, n_new = move.sequence, move.n - move.n_shared
        if move.content is None or (move.trunk is not None and move.trunk.n < move.n_shared):
            return
        if n_new and not self.cells.copy_in(sequence.number, move.content):
            self.cells.remove(sequence.number, 0)
            return
        if move.trunk is not None:
            self.cells.share(move.trunk.number, sequence.number, 0, move.n_shared)
            sequence.cells[: move.n_shared] = move.trunk.cells[: move.n_shared]
        sequence.cells[move.n_shared : move.n] = np.arange(self.top, self.top + n_new)
        self._n_owners[sequence.cells[: move.n]] += 1
        self.top += n_new
        sequence.n = move.n
