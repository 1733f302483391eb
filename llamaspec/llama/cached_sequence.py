"""Which tokens the sequences of llama.cpp hold, in which cells, and for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from llamaspec.errors import ContextFullError
from llamaspec.llama.branches import Branch, CachedTree, Growth
from llamaspec.llama.hidden_rows import HiddenRows
from llamaspec.values import NO_TOKENS, TokenArray


@dataclass(slots=True, eq=False)
class CachedSequence:
    """Tokens whose keys and values are cached."""

    number: int  # llama.cpp's seq_id
    row: int | None = None  # the row that uses it; None = a prefix that nobody uses
    last_used: int = 0
    n_reserved: int = 0  # cells that its row will fill next
    n_padding: int = 0  # of them, those that padding may fill
    n: int = 0
    tokens: TokenArray = field(default_factory=lambda: NO_TOKENS)  # [capacity] the first n count
    cells: TokenArray = field(default_factory=lambda: NO_TOKENS)  # [capacity] index of each token's cell
    hidden: HiddenRows = field(default_factory=HiddenRows)  # of its last tokens, for prediction heads
    tree: CachedTree | None = None  # draft tokens behind these, of which some may become text
    growth: Growth | None = None  # what the evaluation that is running adds to the tree
    branches: list[Branch] = field(default_factory=list)  # of such trees

    def append(self, tokens: TokenArray, cells: TokenArray) -> None:
        """Hold more tokens. The length is set last, so an interruption leaves what was held before."""
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


class RowSequences:
    """The sequences of a KV cache, and the rows that use them.

    Parameters
    ----------
    n : int
        Number of sequences.
    """

    def __init__(self, n: int) -> None:
        self.all = [CachedSequence(i) for i in range(n)]
        self.of_row: dict[int, CachedSequence] = {}

    @property
    def n_reserved(self) -> int:
        """Cells that rows will fill next."""
        n = 0
        for sequence in self.of_row.values():
            n += sequence.n_reserved
        return n

    def assign(self, row: int) -> CachedSequence:
        """A sequence for a new row: an empty one, or the prefix that was used least recently.

        Raises
        ------
        ContextFullError
            Rows use all of them.
        """
        unused = [sequence for sequence in self.all if sequence.row is None]
        if not unused:
            raise ContextFullError(f"{len(self.all)} texts are running already; wait for one to end")
        sequence = min(unused, key=lambda sequence: (sequence.n > 0, sequence.last_used))
        sequence.row = row
        self.of_row[row] = sequence
        return sequence

    def release_all(self) -> None:
        """No row uses any."""
        self.of_row.clear()
        for sequence in self.all:
            sequence.row, sequence.n_reserved = None, 0

    def empty(self) -> CachedSequence | None:
        """One that holds nothing and that nobody uses."""
        return next((sequence for sequence in self.all if sequence.row is None and not sequence.n), None)

    def prefixes(self) -> list[CachedSequence]:
        """Those that hold something, the last used last."""
        return sorted([sequence for sequence in self.all if sequence.n], key=lambda each: each.last_used)

    def unused(self) -> list[CachedSequence]:
        """Those that hold something and that nobody uses, the last used last."""
        return [sequence for sequence in self.prefixes() if sequence.row is None]


def best_of(
    sequences: Sequence[CachedSequence], tokens: TokenArray, least: int
) -> tuple[CachedSequence | None, int]:
    """The sequence that shares most of some tokens, at least so many, and how many."""
    n, i = max(((sequence.shared(tokens), i) for i, sequence in enumerate(sequences)), default=(0, -1))
    return (sequences[i], n) if n >= least else (None, 0)


def shared(a: TokenArray, b: TokenArray) -> int:
    """Length of the common beginning of two sequences."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n
