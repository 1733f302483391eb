"""The KV cache of a context as a cache of token sequences: prefixes are found again, nobody says "go back".

Before an evaluation a row's sequence is cut to what it shares with the request, and takes over what another
sequence knows more of; sharing costs no memory. Cells are only ever appended: rejected tokens whose cells lie
between those of other rows stay there, as garbage, until the cache is full and is compacted. The cells of a
sequence so always ascend with its positions, and attention adds up in the same order as for the text alone.
tests/test_rows.py compares, bit by bit, with texts that are alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from llamaspec.errors import ContextFullError
from llamaspec.llama.cached_sequence import CachedSequence, shared
from llamaspec.llama.cells import Bytes, Cells
from llamaspec.llama.compaction import Moved, copied_out
from llamaspec.llama.parked import ParkedPrefixes
from llamaspec.values import ForwardRequest, TokenArray

Prepared: TypeAlias = tuple[int, ForwardRequest, int]  # row, request, positions of padding
TAKE_OVER = 32  # tokens that another sequence must know more for a running row to look for it
CLUTTER = 1024  # cells besides twice those of rows that may be full; more would slow every evaluation down
SLACK = 0.875  # part of the cells that may be full when unused prefixes are given up


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
        self._parked = ParkedPrefixes(size)

    def prepare_all(self, batch: Sequence[Prepared]) -> list[int | ContextFullError]:
        """Prepare several rows; for each the number of cached tokens, or why it has no room.

        Again from the beginning where cells had to be moved: what could not be moved is cached no more.
        """
        while True:
            n_before = self._n_compactions
            answers: list[int | ContextFullError] = []
            for entry in batch:
                try:
                    answers.append(self.prepare(*entry))
                except ContextFullError as error:  # noqa: PERF203
                    answers.append(error)
            if self._n_compactions == n_before:
                return answers

    def prepare(self, row: int, request: ForwardRequest, n_padding: int = 0) -> int:
        """Cut the row's sequence to the request, extend it by what others know, reserve cells for the rest.

        Returns the number of cached tokens. Raises ContextFullError, which concerns this row alone.
        """
        if self._is_changing or self._is_evaluating:
            self._settle()
        self._is_changing = True
        sequence = self._of_row.get(row)
        is_new = sequence is None
        sequence = sequence or self._assign(row)
        n_before = len(request.tokens) - request.n_logits  # what may come out of the cache
        if is_new:
            self._fetch(sequence, request.tokens[:n_before])
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
        if is_new:
            self._park()
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

    def find(self, row: int) -> CachedSequence | None:
        """What is held of a row that may not have asked yet."""
        return self._of_row.get(row)

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
            top = self._top + len(tokens)
            self._n_owners[self._top : top] = 1
            sequence.append(tokens, np.arange(self._top, top, dtype=np.int32))
            sequence.n_reserved -= len(tokens)
            if sequence.n_reserved <= sequence.n_padding:
                sequence.n_reserved = 0
            self._top = top
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
            sequence.hidden = sequence.hidden.tail(sequence.n)
        self._is_changing = was_changing

    def forget(self) -> None:
        """Empty everything."""
        self._parked.clear()
        self._empty()

    def _empty(self) -> None:
        self._is_changing = True
        self._cells.clear()
        for sequence in self._sequences:
            sequence.n = 0
        self._n_owners[:] = 0
        self._top = 0
        self._is_evaluating = self._is_changing = False

    def take_out(self) -> Iterator[Moved]:
        """What is held, the last used first, for `put_in` of another cache; this one is empty afterwards."""
        self._settle()
        self._is_changing = True
        try:
            yield from copied_out(self._cells, self._held()[::-1])
            yield from self._parked.moved()
        finally:
            self.forget()

    def put_in(
        self, tokens: TokenArray, content: Bytes, trunk: CachedSequence | None, n_shared: int
    ) -> CachedSequence | None:
        """Hold a prefix that was taken out, older than all others; None where that failed or has no room.

        Parameters
        ----------
        tokens : [n] int32
        content : Bytes
            Of the cells behind the first `n_shared`, which `trunk` holds.
        """
        free = next(
            (sequence for sequence in self._sequences if sequence.row is None and not sequence.n), None
        )
        if free is None or self._top + len(tokens) - n_shared > SLACK * self._size:
            return None
        self._is_changing = True
        self._fill(free, tokens, content, trunk, n_shared)
        free.last_used = -next(self._clock)
        self._is_changing = False
        return free if free.n else None

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
        sequence.append(other.tokens[start:n], cells)
        sequence.hidden = other.hidden.tail(n)

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
        n_reserved = 0
        for sequence in self._of_row.values():
            n_reserved += sequence.n_reserved
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

    def _held(self) -> list[CachedSequence]:
        """The sequences that hold something, the last used last."""
        held = [sequence for sequence in self._sequences if sequence.n]
        return sorted(held, key=lambda sequence: sequence.last_used)

    def _park(self) -> None:
        """Put prefixes that nobody uses aside, where they are so many that attention slows down.

        For llama.cpp goes over all cells up to the last full one, whoever needs them.
        """
        n_needed = sum(sequence.n + sequence.n_reserved for sequence in self._of_row.values())
        unused = [sequence for sequence in self._held() if sequence.row is None]
        if not unused or self._top <= 2 * n_needed + CLUTTER:
            return
        for sequence in unused:
            content = self._cells.copy_out(sequence.number, 0)
            if content is None:
                break
            self._parked.add(sequence.tokens[: sequence.n].copy(), content)
            self._cut(sequence, 0)
        else:
            self._compact()

    def _fetch(self, sequence: CachedSequence, tokens: TokenArray) -> None:
        """Let a sequence hold the prefix that shares most of some tokens, if no other knows as much."""
        found = self._parked.best(tokens)
        if found is None or self._top + len(found.tokens) > self._size:
            return
        n_shared = shared(found.tokens, tokens)
        if n_shared > max(other.shared(tokens) for other in self._sequences):
            self._fill(sequence, found.tokens, found.content)
            if sequence.n == n_shared:  # else the rest of it may still be wanted
                self._parked.remove(found)

    def _fill(
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
        self._put_back(Moved(sequence, len(tokens), trunk, n_shared, content))

    def _compact(self) -> None:
        """Move what is held to the beginning, in order and without the garbage.

        What two sequences share is moved once, and shared again. What cannot be moved is given up: its row
        reads its text again.
        """
        moved = list(copied_out(self._cells, self._held()))
        self._empty()
        self._is_changing = True
        self._n_compactions += 1
        for move in moved:
            self._put_back(move)

    def _put_back(self, move: Moved) -> None:
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
