"""The KV cache of a context: which sequences it holds, and where their tokens are found again.

Cells hold what running rows need. Before an evaluation a row's sequence is cut to what it shares with the
request. If another row or a finished sequence has more of the request's tokens, its cells are shared, at no
cost, or copied back from the store. A sequence that has ended moves to the store: at once if others are
running, because their attention passes over its cells, otherwise when the next row begins.
tests/llama/test_kv_cache.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import TypeAlias

from llamaspec.errors import ContextFullError
from llamaspec.llama.batch import Segment
from llamaspec.llama.cells import CachedSequence, Cells, CellTable
from llamaspec.llama.prefix_store import Bytes, PrefixStore
from llamaspec.llama.tree_cells import TreeCells
from llamaspec.values import ForwardRequest, TokenArray

Prepared: TypeAlias = tuple[int, ForwardRequest, int]  # row, request, positions of padding
TAKE_OVER = 32  # tokens that a running row must lack before it looks for them elsewhere
WORTH_COPYING = 8  # tokens that are worth a copy to the store or back
GARBAGE = 0.25  # part of the full cells that may be garbage: moving the others then pays within 50 steps


class KVCache:
    """Which sequences the `size` cells of a context hold, and for which rows.

    Of llama.cpp's sequences the first `n_sequences` are for rows, the next one holds garbage, and
    `n_branches` behind that are for trees. Finished sequences go to `store`. With `keeps_finished` they keep
    their cells until the room is needed: on a GPU, attention passes over them fast, and moving them is slow.
    """

    def __init__(
        self,
        cells: Cells,
        size: int,
        n_sequences: int,
        n_branches: int = 0,
        *,
        store: PrefixStore | None = None,
        keeps_finished: bool = False,
    ) -> None:
        self._cells, self.size = cells, size
        self._store = store or PrefixStore()
        self._keeps_finished = keeps_finished
        self._table = CellTable(cells, size, garbage=n_sequences)
        self._trees = TreeCells(self._table, range(n_sequences + 1, n_sequences + 1 + n_branches))
        self._sequences = [CachedSequence(i) for i in range(n_sequences)]
        self.of_row: dict[int, CachedSequence] = {}
        self._clock = itertools.count(1)
        self._is_evaluating = False  # llama.cpp may hold more than is noted here
        self._is_changing = False  # what is noted here may not be what llama.cpp holds
        self._has_left = False  # a sequence has left cells between those of others
        self.n_compactions = 0
        self.shares = True  # rows take over what others have computed

    @property
    def n_used(self) -> int:
        """Cells that hold something."""
        return self._table.top

    @property
    def can_store(self) -> bool:
        """Whether sequences can go to the store."""
        return bool(self._store.limit and self._cells.block)

    def prepare_all(self, batch: Sequence[Prepared]) -> list[int | ContextFullError]:
        """Prepare several rows; return for each the number of cached tokens, or why it has no room."""
        self._start_change()
        while True:
            n_before = self.n_compactions
            answers = [self._answer(*entry) for entry in batch]
            if self._has_much_garbage():
                self.compact()
            if self.n_compactions == n_before:  # else again: what could not be moved is no longer cached
                self._is_changing = False
                return answers

    def _answer(self, row: int, request: ForwardRequest, n_padding: int) -> int | ContextFullError:
        try:
            return self._prepare(row, request, n_padding)
        except ContextFullError as error:
            if row in self.of_row:
                self.of_row[row].n_reserved = 0
            return error

    def _prepare(self, row: int, request: ForwardRequest, n_padding: int) -> int:
        """Cut the row's sequence to the request, add what is known elsewhere, reserve cells for the rest."""
        n_before = request.n_before  # what may come out of the cache
        sequence = self.of_row.get(row) or self._assign(row, request.tokens[:n_before])
        n_read = self._trees.go_on(sequence, request)
        n = min(sequence.shared(request.tokens), n_before)
        sequence.n_reserved = 0
        if n < request.n_tokens:  # else keep what follows: it may be wanted next
            self._table.cut(sequence, n)
            # A row that begins takes what it gets, for each part of its prompt.
            least = n + (TAKE_OVER if n and request.n_logits else 1)
            if n_before >= least:
                self._take_over(sequence, request.tokens[:n_before], least)
            sequence.n_reserved = request.n_tokens - n_read - sequence.n + n_padding
            sequence.n_padding = n_padding
            self._make_room(sequence)
            if self.shares and n_before >= max(least, sequence.n + WORTH_COPYING):
                self._restore(sequence, request.tokens[:n_before])
            n = sequence.n + n_read
        sequence.last_used = next(self._clock)
        return n

    def _assign(self, row: int, tokens: TokenArray) -> CachedSequence:
        """A sequence for a new row, with the tokens that a finished one has."""
        unused = self._unused()
        if not unused:
            raise ContextFullError(f"{len(self._sequences)} texts are running already; wait for one to end")
        finished = [sequence for sequence in unused if sequence.n]
        if len(finished) == len(unused):
            oldest = min(finished, key=lambda each: each.last_used)
            self._move_to_store(oldest)
            finished.remove(oldest)
        sequence = self.of_row[row] = min(unused, key=lambda each: each.n)  # an empty one
        if finished and not self._keeps_finished:
            best = max(finished, key=lambda each: each.shared(tokens))
            n = best.shared(tokens) if self.shares else 0
            if n > 0 and n >= self._store.find(tokens).n:
                self._table.take_over(sequence, best, n)
            for each in finished:
                self._move_to_store(each, n if each is best else 0)
        return sequence

    def _unused(self) -> list[CachedSequence]:
        """The sequences that no row uses: empty or finished ones."""
        used = set(self.of_row.values())
        return [sequence for sequence in self._sequences if sequence not in used]

    def _take_over(self, sequence: CachedSequence, tokens: TokenArray, least: int) -> None:
        """Let a sequence hold the longest beginning of some tokens that another has, if at least `least`."""
        others = [other for other in self._sequences if other is not sequence] if self.shares else []
        n_shared = [other.shared(tokens) for other in others]
        n = max(n_shared, default=0)
        if n >= least:
            other = others[n_shared.index(n)]
            self._table.take_over(sequence, other, n)
            other.last_used = next(self._clock)

    def _restore(self, sequence: CachedSequence, tokens: TokenArray) -> None:
        """Copy back from the store what a sequence lacks of some tokens."""
        found, start = self._store.find(tokens), 0
        if found.n < sequence.n + WORTH_COPYING:
            return
        self._store.touch(found)
        for node in found.nodes:
            end, n = min(start + len(node.tokens), found.n), sequence.n
            if end > n:
                # A block goes in as a whole, and nowhere else than behind the last full cell.
                fits = self._n_free() >= len(node.tokens) - (end - n)
                if not fits or not self._table.put_in(sequence, tokens[n:end], start, node.content):
                    return
                sequence.n_reserved -= end - n
            start = end

    def n_known(self, tokens: TokenArray) -> int:
        """How many of the first of some tokens need not be evaluated again."""
        if not self.shares:
            return 0
        return max([self._store.find(tokens).n, *(sequence.shared(tokens) for sequence in self._sequences)])

    def segment(self, row: int, request: ForwardRequest, rows: Collection[int]) -> Segment:
        """What must be evaluated of a prepared request, together with all `rows`."""
        sequence = self.of_row[row]
        if not request.is_tree:
            return sequence.segment(request)
        self._is_evaluating = True  # branches are about to hold cells
        waiting = [sequence for other, sequence in self.of_row.items() if other not in rows]
        return self._trees.grow(sequence, request, waiting)

    def begin(self, n_scored: int) -> None:
        """Start an evaluation: until `commit`, cells may hold what is not noted."""
        self._is_evaluating = True

    def commit(self, evaluated: Sequence[tuple[int, TokenArray]], n_padding: int = 0) -> None:
        """Note what an evaluation has put into the cells, in this order: rows and their new tokens."""
        self._is_changing = True
        for row, tokens in evaluated:
            sequence = self.of_row[row]
            cells = self._table.take(len(tokens))
            if not self._trees.commit(sequence, tokens, cells):
                sequence.append(tokens, cells)
            sequence.n_reserved -= len(tokens)
            if sequence.n_reserved <= sequence.n_padding:
                sequence.n_reserved = 0
        if n_padding:  # behind the last row's tokens
            last = self.of_row[evaluated[-1][0]]
            self._cells.remove(last.number, self._trees.n_positions(last))
        self._is_evaluating = self._is_changing = False

    def release(self, row: int) -> None:
        """End a row; its sequence stays, here or in the store."""
        self._start_change()
        sequence = self.of_row.pop(row, None)
        if sequence is not None:
            self._trees.drop(sequence)
            sequence.n_reserved = 0
            sequence.hidden = sequence.hidden.tail(sequence.n)
            if self.of_row and not self._keeps_finished:
                self._move_to_store(sequence)
                self._has_left = True
        self._is_changing = False

    def store_row(self, row: int) -> None:
        """Copy what is cached of a running row to the store."""
        self._put(self.of_row[row])

    def store_finished(self) -> None:
        """Move all finished sequences to the store."""
        self._start_change()
        for sequence in self._unused():
            self._move_to_store(sequence)
        self._is_changing = False

    def forget(self) -> None:
        """Empty all cells; running rows find their tokens in the store, or they are evaluated again."""
        self._is_changing = True
        self._table.clear()
        for sequence in self._sequences:
            sequence.n = 0
        self._trees.clear()
        self._is_evaluating = self._is_changing = False

    def clear(self) -> None:
        """Forget everything, including what is in the store."""
        self.forget()
        self._store.clear()

    def compact(self) -> None:
        """Move what is held down over the garbage; what cannot be moved is given up."""
        for sequence in self.of_row.values():
            self._trees.drop(sequence)
        self.n_compactions += 1
        held = [sequence for sequence in self._sequences if sequence.n]
        self._table.compact(sorted(held, key=lambda each: each.last_used))

    def _move_to_store(self, sequence: CachedSequence, n_known: int = 0) -> None:
        """Empty a finished sequence; it is stored if it has many tokens more than `n_known`."""
        if sequence.n >= n_known + WORTH_COPYING:
            self._put(sequence)
        self._table.cut(sequence, 0)

    def _put(self, sequence: CachedSequence) -> None:
        def copy(start: int, end: int) -> Bytes | None:
            return self._cells.copy_out(sequence.number, start, end)

        if self._cells.block and self.shares:
            self._store.put(sequence.tokens[: sequence.n], self._cells.block, copy)

    def _has_much_garbage(self) -> bool:
        """Whether moving cells pays: never for less than a block, unless a row is alone after others."""
        block, table = self._cells.block, self._table
        if self._keeps_finished or not block:
            return False
        has_left, self._has_left = self._has_left, False
        if has_left:
            return table.n_garbage > (0 if len(self.of_row) == 1 else block)
        return table.n_garbage > max(block, GARBAGE * table.top)

    def _start_change(self) -> None:
        """Take out what an interrupted evaluation or change left behind, and begin a change."""
        if self._is_changing:
            self.forget()
            self.of_row.clear()
            for sequence in self._sequences:
                sequence.n_reserved = 0
        self._is_changing = True
        if self._is_evaluating:
            self._trees.settle(self._sequences)
            for sequence in self._sequences:
                self._cells.remove(sequence.number, sequence.n)
            self._is_evaluating = False

    def _n_free(self) -> int:
        """Empty cells that no row has reserved."""
        return self.size - self._table.top - sum([each.n_reserved for each in self.of_row.values()])

    def _make_room(self, asking: CachedSequence) -> None:
        """Empty as many cells as rows have reserved, or raise ContextFullError."""
        table, size = self._table, self.size
        if self._n_free() >= 0:
            return
        n_reserved = sum([sequence.n_reserved for sequence in self.of_row.values()])
        for sequence in self.of_row.values():
            if not sequence.n_reserved:
                self._trees.drop(sequence)
        finished = [sequence for sequence in self._unused() if sequence.n]
        for sequence in sorted(finished, key=lambda each: each.last_used):
            if table.n_live + n_reserved <= size:
                break
            self._move_to_store(sequence)
        n_wanted = table.n_live + n_reserved
        if n_wanted > size:
            n_own = asking.n + asking.n_reserved
            others = f", other texts hold {n_wanted - n_own}" if n_wanted > n_own else ""
            raise ContextFullError(f"the context of {size} tokens is full: this text needs {n_own}{others}")
        if table.top + n_reserved > size:
            self.compact()
