"""The KV cache of a context as a cache of token sequences: prefixes are found again, nobody says "go back".

Before an evaluation a row's sequence is cut to what it shares with the request, and takes over what another
sequence knows more of; sharing costs no memory. Cells are only ever appended: rejected tokens whose cells lie
between those of other rows stay there, as garbage, until they cost too much. The cells of a
sequence so always ascend with its positions, and attention adds up in the same order as for the text alone.
tests/test_rows.py compares, bit by bit, with texts that are alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

from llamaspec.errors import ContextFullError
from llamaspec.llama.branches import Growth
from llamaspec.llama.cached_sequence import CachedSequence, RowSequences, best_of
from llamaspec.llama.cells import Bytes, Cells, Scratch
from llamaspec.llama.clutter import MOVE, Clutter
from llamaspec.llama.compaction import Moved, copied_out
from llamaspec.llama.held_cells import HeldCells
from llamaspec.llama.parked import ParkedPrefixes
from llamaspec.llama.tree_cells import TreeCells
from llamaspec.values import ForwardRequest, TokenArray

Prepared: TypeAlias = tuple[int, ForwardRequest, int]  # row, request, positions of padding
TAKE_OVER = 32  # tokens that another sequence must know more for a running row to look for it
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
    n_branches : int
        More sequences, for branches of trees.
    price : float
        Of moving a cell (`Clutter`).
    """

    def __init__(
        self, cells: Cells, size: int, n_sequences: int, n_branches: int = 0, price: float = MOVE
    ) -> None:
        self._cells = cells
        self._size = size
        self._held = HeldCells(cells, size, garbage=n_sequences - 1)
        self._trees = TreeCells(self._held, range(n_sequences, n_sequences + n_branches))
        self._rows = RowSequences(n_sequences - 1)
        self._clock = itertools.count(1)
        self._is_evaluating = False  # llama.cpp may hold more than is noted here
        self._is_changing = False  # what is noted here may not be what llama.cpp holds
        self._n_compactions = 0
        self._parked, self._clutter = ParkedPrefixes(self._held), Clutter(self._held, price)
        self._scratch = Scratch()

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
            if self._clutter.is_due():
                self._tidy()
            if self._n_compactions == n_before:
                return answers

    def prepare(self, row: int, request: ForwardRequest, n_padding: int = 0) -> int:
        """Cut the row's sequence to the request, extend it by what others know, reserve cells for the rest.

        Returns the number of cached tokens. Raises ContextFullError, which concerns this row alone.
        """
        if self._is_changing or self._is_evaluating:
            self._settle()
        self._is_changing = True
        sequence = self._rows.of_row.get(row)
        is_new = sequence is None
        if sequence is None:
            sequence = self._rows.assign(row)
            self._held.cut(sequence, 0)
        n_read = 0 if sequence.tree is None else self._trees.go_on(sequence, request)
        n_before = len(request.tokens) - request.n_logits  # what may come out of the cache
        if is_new:
            room = self._size - self._held.top - self._rows.n_reserved
            self._parked.fetch(sequence, request.tokens[:n_before], self._rows.all, room)
        n = min(sequence.shared(request.tokens), n_before)
        if n < request.n_tokens:  # else keep what follows: it may be wanted next
            least = TAKE_OVER if n else 1  # a row that begins takes what it gets
            other = None
            if n_before >= n + least:
                others = [other for other in self._rows.all if other is not sequence]
                other, n_other = best_of(others, request.tokens[:n_before], n + least)
            self._held.cut(sequence, n)
            if other is not None:
                self._held.take_over(sequence, other, n_other)
                other.last_used = next(self._clock)
            n = sequence.n + n_read
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
        return self._rows.of_row[row]

    def find(self, row: int) -> CachedSequence | None:
        """What is held of a row that may not have asked yet."""
        return self._rows.of_row.get(row)

    def grow(self, row: int, request: ForwardRequest, rows: Collection[int]) -> Growth:
        """Give every branch of a prepared request's tree a sequence; `rows` are evaluated next."""
        self._is_evaluating = True
        return self._trees.grow(self._rows.of_row[row], request, self._rows.of_row, rows)

    def begin(self) -> None:
        """An evaluation starts: until `commit`, cells may hold what is not noted."""
        self._is_evaluating = True

    def commit(self, evaluated: Sequence[tuple[int, TokenArray]], n_padding: int = 0) -> None:
        """Note what an evaluation has put into the cells, in this order: rows and their new tokens.

        The padding lies behind the last row's tokens, and is taken out again.
        """
        self._is_changing = True
        for row, tokens in evaluated:
            sequence = self._rows.of_row[row]
            cells = self._held.take(len(tokens))
            if sequence.growth is None:
                sequence.append(tokens, cells)
            else:
                self._trees.commit(sequence, sequence.growth, tokens, cells)
            sequence.n_reserved -= len(tokens)
            if sequence.n_reserved <= sequence.n_padding:
                sequence.n_reserved = 0
        if n_padding:
            last = self._rows.of_row[evaluated[-1][0]]
            n = last.n if last.tree is None else last.n + len(last.tree.path(last.tree.tips[last.number]))
            self._cells.remove(last.number, n)
        self._is_evaluating = self._is_changing = False

    def release(self, row: int) -> None:
        """The row has ended; its sequence stays as a prefix that others may use."""
        was_changing, self._is_changing = self._is_changing, True
        sequence = self._rows.of_row.pop(row, None)
        if sequence is not None:
            if (sequence.branches or sequence.tree is not None) and not was_changing:
                self._trees.end(sequence)
            sequence.row, sequence.n_reserved = None, 0
            sequence.hidden = sequence.hidden.tail(sequence.n)
        self._is_changing = was_changing

    def forget(self) -> None:
        """Empty everything."""
        self._parked.clear()
        self._empty()

    def _empty(self) -> None:
        self._is_changing = True
        self._held.clear()
        for sequence in self._rows.all:
            sequence.n, sequence.tree, sequence.growth, sequence.branches = 0, None, None, []
        self._trees.clear()
        self._is_evaluating = self._is_changing = False

    def take_out(self) -> Iterator[Moved]:
        """What is held, the last used first, for `put_in` of another cache; this one is empty afterwards."""
        self._settle()
        self._is_changing = True
        try:
            yield from copied_out(self._cells, self._rows.prefixes()[::-1])
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
        free = self._rows.empty()
        if free is None or self._held.top + len(tokens) - n_shared > SLACK * self._size:
            return None
        self._is_changing = True
        self._held.fill(free, tokens, content, trunk, n_shared)
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
        return self._held.top

    def _settle(self) -> None:
        """Take out what an interrupted evaluation left behind."""
        if self._is_changing:
            self.forget()
            self._rows.release_all()
        elif self._is_evaluating:
            self._is_changing = True
            for sequence in self._rows.all:
                self._trees.drop(sequence)
                sequence.growth = None
                self._cells.remove(sequence.number, sequence.n)
                for branch in sequence.branches:
                    self._cells.remove(branch.number, branch.n)
            self._is_evaluating = self._is_changing = False

    def _make_room(self, asking: CachedSequence) -> None:
        """See to it that the cells that rows have reserved are empty."""
        n_reserved = self._rows.n_reserved
        if self._held.top + n_reserved <= self._size:
            return
        for sequence in self._rows.of_row.values():
            if not sequence.n_reserved:
                self._trees.drop(sequence)
        for sequence in self._rows.unused():
            if self._held.n_live + n_reserved <= SLACK * self._size:
                break
            self._held.cut(sequence, 0)
        n_wanted = self._held.n_live + n_reserved
        if n_wanted > self._size:
            n_own = asking.n + asking.n_reserved
            others = f", other texts hold {n_wanted - n_own}" if n_wanted > n_own else ""
            raise ContextFullError(
                f"the context of {self._size} tokens is full: this text needs {n_own}{others}"
            )
        if self._held.top + n_reserved > self._size:
            self._compact()

    def _tidy(self) -> None:
        """Where clutter is dear, put unused prefixes aside and close the gaps, if all can be copied."""
        unused = self._rows.unused()
        is_dear = self._clutter.is_dear(self._rows.n_reserved, unused)
        if is_dear and self._cells.can_copy([sequence.number for sequence in self._rows.prefixes()]):
            self._is_changing = True
            self._parked.put_aside(unused)
            self._compact()
            self._is_changing = False

    def _compact(self) -> None:
        """Move what is held to the beginning, in order and without the garbage.

        What two sequences share is moved once, and shared again. What cannot be moved is given up: its row
        reads its text again.
        """
        for sequence in self._rows.of_row.values():
            self._trees.drop(sequence)
        self._scratch.reset()
        moved = list(copied_out(self._cells, self._rows.prefixes(), self._scratch))
        self._empty()
        self._is_changing = True
        self._n_compactions += 1
        for move in moved:
            self._held.put_back(move)
