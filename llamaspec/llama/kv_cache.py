"""The KV cache of a context as a cache of token sequences: prefixes are found again, nobody says "go back".

Before an evaluation a row's sequence is cut to what it shares with the request, and takes over what another
sequence knows more of; sharing costs no memory. Cells are only ever appended: rejected tokens whose cells lie
between those of other rows stay there, as garbage, until the cache is full and is compacted. The cells of a
sequence so always ascend with its positions, and attention adds up in the same order as for the text alone.
tests/test_rows.py compares, bit by bit, with texts that are alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from llamaspec.errors import ContextFullError
from llamaspec.values import NO_TOKENS, ForwardRequest, TokenArray

Bytes = npt.NDArray[np.uint8]
Prepared: TypeAlias = tuple[int, ForwardRequest, int]  # row, request, positions of padding
TAKE_OVER = 32  # tokens that another sequence must know more for a running row to look for it
SLACK = 0.875  # part of the cells that may be full when unused prefixes are given up


class Cells(Protocol):
    """What llama.cpp does with the cells of one context; `llama/context.py` has the real one."""

    def remove(self, sequence: int, start: int) -> None:
        """Take a sequence's positions from `start` on out of their cells."""

    def share(self, source: int, sequence: int, start: int, end: int) -> None:
        """Let `sequence` hold the cells of some positions of `source`, too."""

    def copy_out(self, sequence: int, start: int) -> Bytes | None:
        """The content of a sequence's cells from a position on; it gives up the cells before it.

        None where the content cannot be copied.
        """

    def copy_in(self, sequence: int, content: Bytes) -> bool:
        """Put the content into the first empty cells; False where that failed."""

    def clear(self) -> None:
        """Empty all cells."""


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

    def append(self, tokens: TokenArray, cells: npt.NDArray[np.int64]) -> None:
        """Hold more tokens. The length is set last, so an interruption leaves what was held before."""
        end = self.n + len(tokens)
        if end > len(self.tokens):
            grown = np.empty((2, max(2 * end, 256)), dtype=np.int32)
            grown[0, : self.n], grown[1, : self.n] = self.tokens[: self.n], self.cells[: self.n]
            self.tokens, self.cells = grown
        self.tokens[self.n : end], self.cells[self.n : end] = tokens, cells
        self.n = end

    def shared(self, tokens: TokenArray) -> int:
        """Length of the common beginning with other tokens."""
        return shared(self.tokens[: self.n], tokens)


class KVCache:
    """Which sequences the cells of a context hold, and for whom.

    Parameters
    ----------
    cells : Cells
    size : int
        Number of cells.
    n_sequences : int
        Sequences that llama.cpp can tell apart; the last one holds the garbage.
    """

    def __init__(self, cells: Cells, size: int, n_sequences: int) -> None:
        self._cells = cells
        self._size = size
        self._garbage = n_sequences - 1
        self._sequences = [CachedSequence(i) for i in range(n_sequences - 1)]
        self._of_row: dict[int, CachedSequence] = {}
        self._n_owners = np.zeros(size, dtype=np.int16)  # of each cell: sequences that hold it
        self._top = 0  # cells below are full, cells from here on are empty
        self._clock = itertools.count(1)
        self._is_evaluating = False  # llama.cpp may hold more than is noted here
        self._is_changing = False  # what is noted here may not be what llama.cpp holds
        self._n_compactions = 0

    def prepare_all(self, batch: Sequence[Prepared]) -> list[int | ContextFullError]:
        """Prepare several rows; for each the number of cached tokens, or why it has no room.

        Again from the beginning where cells had to be moved: what could not be moved is cached no more.
        """
        while True:
            n_before = self._n_compactions
            answers = [self._prepared(*entry) for entry in batch]
            if self._n_compactions == n_before:
                return answers

    def _prepared(self, row: int, request: ForwardRequest, n_padding: int) -> int | ContextFullError:
        try:
            return self.prepare(row, request, n_padding)
        except ContextFullError as error:
            return error

    def prepare(self, row: int, request: ForwardRequest, n_padding: int = 0) -> int:
        """Cut the row's sequence to the request, extend it by what others know, reserve cells for the rest.

        Returns the number of cached tokens. Raises ContextFullError, which concerns this row alone.
        """
        self._settle()
        self._is_changing = True
        sequence = self._of_row.get(row) or self._assign(row)
        n_before = len(request.tokens) - request.n_logits  # what may come out of the cache
        n = min(sequence.shared(request.tokens), n_before)
        if n < request.n_tokens:  # else keep what follows: it may be wanted next
            other, n_other = self._best_other(sequence, request.tokens[:n_before], n)
            self._cut(sequence, n)
            if other is not None:
                self._take_over(sequence, other, n_other)
            n = sequence.n
            sequence.n_reserved, sequence.n_padding = request.n_tokens - n + n_padding, n_padding
        else:
            sequence.n_reserved = 0
        sequence.last_used = next(self._clock)
        try:
            self._make_room(sequence)
        except ContextFullError:
            sequence.n_reserved, self._is_changing = 0, False
            raise
        self._is_changing = False
        return n

    def sequence(self, row: int) -> CachedSequence:
        """What is held of a prepared row."""
        return self._of_row[row]

    def begin(self) -> None:
        """An evaluation starts: until `commit`, cells may hold what is not noted."""
        self._is_evaluating = True

    def commit(self, evaluated: Sequence[tuple[int, TokenArray]], n_padding: int = 0) -> None:
        """Note what an evaluation has put into the cells, in this order: rows and their new tokens.

        The padding lies behind the last row's tokens, and is taken out again.
        """
        self._is_changing = True
        for row, tokens in evaluated:
            sequence = self._of_row[row]
            cells = np.arange(self._top, self._top + len(tokens))
            self._n_owners[self._top : self._top + len(tokens)] += 1
            sequence.append(tokens, cells)
            sequence.n_reserved -= len(tokens)
            if sequence.n_reserved <= sequence.n_padding:
                sequence.n_reserved = 0
            self._top += len(tokens)
        if n_padding:
            last = self._of_row[evaluated[-1][0]]
            self._cells.remove(last.number, last.n)
        self._is_evaluating = self._is_changing = False

    def release(self, row: int) -> None:
        """The row has ended; its sequence stays as a prefix that others may use."""
        was_changing, self._is_changing = self._is_changing, True
        sequence = self._of_row.pop(row, None)
        if sequence is not None:
            sequence.row, sequence.n_reserved = None, 0
        self._is_changing = was_changing

    def forget(self) -> None:
        """Empty everything."""
        self._is_changing = True
        self._cells.clear()
        for sequence in self._sequences:
            sequence.n = 0
        self._n_owners[:] = 0
        self._top = 0
        self._is_evaluating = self._is_changing = False

    @property
    def size(self) -> int:
        """Cells."""
        return self._size

    @property
    def n_used(self) -> int:
        """Cells that hold something."""
        return self._top

    def _settle(self) -> None:
        """Take out what an interrupted evaluation left behind."""
        if self._is_changing:
            self.forget()
            self._of_row.clear()
            for sequence in self._sequences:
                sequence.row, sequence.n_reserved = None, 0
        elif self._is_evaluating:
            for sequence in self._sequences:
                self._cells.remove(sequence.number, sequence.n)
            self._is_evaluating = False

    def _assign(self, row: int) -> CachedSequence:
        """A sequence for a new row: an empty one, or the prefix that was used least recently."""
        unused = [sequence for sequence in self._sequences if sequence.row is None]
        if not unused:
            raise ContextFullError(f"{len(self._sequences)} texts are running already; wait for one to end")
        sequence = min(unused, key=lambda sequence: (sequence.n > 0, sequence.last_used))
        self._cut(sequence, 0)
        sequence.row = row
        self._of_row[row] = sequence
        return sequence

    def _best_other(
        self, own: CachedSequence, tokens: TokenArray, n_own: int
    ) -> tuple[CachedSequence | None, int]:
        """The other sequence that shares most of some tokens, if that is worth taking over, and how much."""
        least = TAKE_OVER if n_own else 1  # a row that begins takes what it gets
        if len(tokens) - n_own < least:
            return None, 0
        others = [sequence for sequence in self._sequences if sequence is not own and sequence.n]
        n, i = max(((other.shared(tokens), i) for i, other in enumerate(others)), default=(0, -1))
        return (others[i], n) if n >= n_own + least else (None, 0)

    def _take_over(self, sequence: CachedSequence, other: CachedSequence, n: int) -> None:
        start = sequence.n
        if start and other.cells[start] < sequence.cells[start - 1]:
            self._cut(sequence, 0)  # else the cells would not ascend: take the beginning over, too
            start = 0
        self._cells.share(other.number, sequence.number, start, n)
        cells = other.cells[start:n]
        self._n_owners[cells] += 1
        other.last_used = next(self._clock)
        sequence.append(other.tokens[start:n], cells.astype(np.int64))

    def _cut(self, sequence: CachedSequence, n: int) -> None:
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
        if cells[-1] == self._top - 1:
            is_top = (cells == np.arange(self._top - len(cells), self._top)) & (owners == 1)
            n_top = len(cells) if is_top.all() else int(is_top[::-1].argmin())
        if n_top < len(cells) and owners[: len(cells) - n_top].min() == 1:
            self._cells.share(sequence.number, self._garbage, n, n_held - n_top)
        sequence.n = n
        self._cells.remove(sequence.number, n)
        self._n_owners[cells] = owners - 1
        self._top -= n_top

    def _make_room(self, asking: CachedSequence) -> None:
        """See to it that the cells that rows have reserved are empty."""
        n_reserved = sum(sequence.n_reserved for sequence in self._of_row.values())
        if self._top + n_reserved <= self._size:
            return
        unused = (sequence for sequence in self._sequences if sequence.row is None and sequence.n)
        for sequence in sorted(unused, key=lambda sequence: sequence.last_used):
            if self._n_live + n_reserved <= SLACK * self._size:
                break
            self._cut(sequence, 0)
        n_wanted = self._n_live + n_reserved
        if n_wanted > self._size:
            n_own = asking.n + asking.n_reserved
            others = f", other texts hold {n_wanted - n_own}" if n_wanted > n_own else ""
            raise ContextFullError(
                f"the context of {self._size} tokens is full: this text needs {n_own}{others}"
            )
        if self._top + n_reserved > self._size:
            self._compact()

    @property
    def _n_live(self) -> int:
        """Cells that some sequence holds, without garbage."""
        return int(np.count_nonzero(self._n_owners))

    def _compact(self) -> None:
        """Move what is held to the beginning, in order and without the garbage.

        What two sequences share is moved once, and shared again. What cannot be moved is given up: its row
        reads its text again.
        """
        held = [sequence for sequence in self._sequences if sequence.n]
        moved: list[_Moved] = []
        for sequence in sorted(held, key=lambda sequence: sequence.last_used):
            trunk, n_shared = _trunk(sequence, [before.sequence for before in moved])
            content = self._cells.copy_out(sequence.number, n_shared)
            moved.append(_Moved(sequence, sequence.n, trunk, n_shared, content))
        self.forget()
        self._is_changing = True
        self._n_compactions += 1
        for move in moved:
            self._put_back(move)

    def _put_back(self, move: _Moved) -> None:
        sequence, n_new = move.sequence, move.n - move.n_shared
        if move.content is None or (move.trunk is not None and move.trunk.n < move.n_shared):
            return
        if n_new and not self._cells.copy_in(sequence.number, move.content):
            self._cells.remove(sequence.number, 0)
            return
        if move.trunk is not None:
            self._cells.share(move.trunk.number, sequence.number, 0, move.n_shared)
            sequence.cells[: move.n_shared] = move.trunk.cells[: move.n_shared]
        sequence.cells[move.n_shared : move.n] = np.arange(self._top, self._top + n_new)
        self._n_owners[sequence.cells[: move.n]] += 1
        self._top += n_new
        sequence.n = move.n


@dataclass(frozen=True, slots=True, eq=False)
class _Moved:
    """A sequence whose cells are moved."""

    sequence: CachedSequence
    n: int
    trunk: CachedSequence | None  # moved before, and holds the first `n_shared` cells too
    n_shared: int
    content: Bytes | None


def _trunk(sequence: CachedSequence, others: Sequence[CachedSequence]) -> tuple[CachedSequence | None, int]:
    """The sequence among others that holds most of the same cells, and how many of the first."""
    cells = sequence.cells[: sequence.n]
    n, i = max(
        ((shared(other.cells[: other.n], cells), i) for i, other in enumerate(others)), default=(0, -1)
    )
    return (others[i], n) if n else (None, 0)


def shared(a: TokenArray, b: TokenArray) -> int:
    """Length of the common beginning of two sequences."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n
