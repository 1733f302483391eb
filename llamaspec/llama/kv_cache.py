"""The KV cache of a context as a cache of token sequences: prefixes are found again, nobody says "go back".

Before an evaluation a row's sequence is cut to what it shares with the request, and takes over what another
sequence knows more of; sharing costs no memory. If room is needed, the least recently used prefixes that
nobody uses are evicted. If that is not enough, or rejected tokens have left much garbage between the rows'
cells, the cache is defragmented.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

from llamaspec.errors import ContextFullError
from llamaspec.llama.cells import Bytes, CachedSequence, Cells, CellTable, CopiedSequence
from llamaspec.llama.tree_cells import Tree, TreeCells
from llamaspec.values import ForwardRequest, TokenArray

Prepared: TypeAlias = tuple[int, ForwardRequest, int]  # row, request, positions of padding
TAKE_OVER = 32  # tokens that another sequence must know more for a running row to look for it
SLACK = 0.875  # part of the cells that may be live when unused prefixes are evicted
BLOCK = 256  # cells: llama.cpp's attention goes over whole blocks
GARBAGE = 0.25  # part of the full cells that may be garbage: moving the others then pays within 50 steps
SPARE = 1024  # cells of unused prefixes that may always stay, beside as many as running rows use
RECENT = 512  # requests within which a prefix was used that stays in any case


class KVCache:
    """Which sequences the `size` cells of a context hold, and for whom.

    Of llama.cpp's sequences the first `n_sequences` are for rows and prefixes, the next one holds garbage,
    and `n_branches` behind that are for trees. The cache is defragmented if more than `min_garbage` cells and
    more than `max_garbage` of the full ones are garbage; 1 = only if it is full. With `evicts`, many unused
    prefixes are given up before their room is needed: without flash attention they slow every evaluation.
    """

    def __init__(
        self,
        cells: Cells,
        size: int,
        n_sequences: int,
        n_branches: int = 0,
        max_garbage: float = GARBAGE,
        min_garbage: int = BLOCK,
        *,
        evicts: bool = False,
    ) -> None:
        self._cells, self.size, self._evicts = cells, size, evicts
        self._max_garbage, self._min_garbage = max_garbage, min_garbage
        self._table = CellTable(cells, size, garbage=n_sequences)
        self._trees = TreeCells(self._table, range(n_sequences + 1, n_sequences + 1 + n_branches))
        self._sequences = [CachedSequence(i) for i in range(n_sequences)]
        self._of_row: dict[int, CachedSequence] = {}
        self._clock = itertools.count(1)
        self._is_evaluating = False  # llama.cpp may hold more than is noted here
        self._is_changing = False  # what is noted here may not be what llama.cpp holds
        self.n_defragmentations = 0

    @property
    def n_used(self) -> int:
        """Cells that hold something."""
        return self._table.top

    def prepare_all(self, batch: Sequence[Prepared]) -> list[int | ContextFullError]:
        """Prepare several rows; for each the number of cached tokens, or why it has no room."""
        while True:  # again if cells had to be moved: what could not be moved is cached no more
            n_before = self.n_defragmentations
            answers = [self._answer(*entry) for entry in batch]
            least = max(self._min_garbage, self._max_garbage * self._table.top)
            if self._table.n_garbage > least and self._cells.can_copy([x.number for x in self._prefixes()]):
                self.defragment()
            if self.n_defragmentations == n_before:
                return answers

    def _answer(self, row: int, request: ForwardRequest, n_padding: int) -> int | ContextFullError:
        self._settle()
        self._is_changing = True
        try:
            n_cached: int | ContextFullError = self._prepare(row, request, n_padding)
        except ContextFullError as error:
            n_cached = error
            if row in self._of_row:
                self._of_row[row].n_reserved = 0
        self._is_changing = False
        return n_cached

    def _prepare(self, row: int, request: ForwardRequest, n_padding: int) -> int:
        """Cut the row's sequence to the request, add what others know of it, reserve cells for the rest."""
        sequence = self._of_row.get(row) or self._assign(row)
        n_read = self._trees.go_on(sequence, request)
        n_before = len(request.tokens) - request.n_logits  # what may come out of the cache
        n = min(sequence.shared(request.tokens), n_before)
        sequence.n_reserved = 0
        if n < request.n_tokens:  # else keep what follows: it may be wanted next
            self._table.cut(sequence, n)
            # A row that begins takes what it gets, for each part of its prompt.
            least = TAKE_OVER if n and request.n_logits else 1
            if n_before >= n + least:
                self._take_over(sequence, request.tokens[:n_before], n + least)
            n = sequence.n + n_read
            sequence.n_reserved, sequence.n_padding = request.n_tokens - n + n_padding, n_padding
        sequence.last_used = next(self._clock)
        self._make_room(sequence)
        return n

    def _assign(self, row: int) -> CachedSequence:
        """A sequence for a new row: an empty one, or the prefix that was used least recently."""
        unused = [sequence for sequence in self._sequences if sequence.row is None]
        if not unused:
            raise ContextFullError(f"{len(self._sequences)} texts are running already; wait for one to end")
        sequence = min(unused, key=lambda sequence: (sequence.n > 0, sequence.last_used))
        sequence.row = row
        self._of_row[row] = sequence
        self._table.cut(sequence, 0)
        return sequence

    def _take_over(self, sequence: CachedSequence, tokens: TokenArray, least: int) -> None:
        """Let a sequence hold what another knows more of some tokens, if that is so much."""
        others = [other for other in self._sequences if other is not sequence]
        n_shared = [other.shared(tokens) for other in others]
        n = max(n_shared, default=0)
        if n >= least:
            other = others[n_shared.index(n)]
            self._table.take_over(sequence, other, n)
            other.last_used = next(self._clock)

    def n_shared(self, tokens: TokenArray) -> int:
        """How many of the first of some tokens are held."""
        return max([sequence.shared(tokens) for sequence in self._sequences], default=0)

    def find(self, row: int) -> CachedSequence | None:
        """What is held of a row; None before its first request."""
        return self._of_row.get(row)

    def sequence(self, row: int) -> CachedSequence:
        """What is held of a prepared row."""
        return self._of_row[row]

    def grow(self, row: int, request: ForwardRequest, rows: Collection[int]) -> Tree:
        """Give every branch of a prepared request's tree a sequence; `rows` are evaluated next."""
        self._is_evaluating = True
        waiting = [sequence for other, sequence in self._of_row.items() if other not in rows]
        return self._trees.grow(self._of_row[row], request, waiting)

    def n_text(self, row: int, n_new: int) -> int:
        """How many of a row's positions that were just committed are text, not draft tokens of a tree."""
        tree = self._trees.cached.get(self._of_row[row].number)
        return n_new if tree is None else n_new - (len(tree.tokens) - tree.n_old)

    def begin(self, n_scored: int) -> None:
        """An evaluation starts: until `commit`, cells may hold what is not noted."""
        self._is_evaluating = True

    def commit(self, evaluated: Sequence[tuple[int, TokenArray]], n_padding: int = 0) -> None:
        """Note what an evaluation has put into the cells, in this order: rows and their new tokens."""
        self._is_changing = True
        for row, tokens in evaluated:
            sequence = self._of_row[row]
            cells = self._table.take(len(tokens))
            if not self._trees.commit(sequence, tokens, cells):
                sequence.append(tokens, cells)
            sequence.n_reserved -= len(tokens)
            if sequence.n_reserved <= sequence.n_padding:
                sequence.n_reserved = 0
        if n_padding:  # it lies behind the last row's tokens
            last = self._of_row[evaluated[-1][0]]
            self._cells.remove(last.number, self._trees.n_positions(last))
        self._is_evaluating = self._is_changing = False

    def release(self, row: int) -> None:
        """The row has ended; its sequence stays as a prefix that others may use."""
        was_changing, self._is_changing = self._is_changing, True
        sequence = self._of_row.pop(row, None)
        if sequence is not None:
            if not was_changing:
                self._trees.drop(sequence)
            sequence.row, sequence.n_reserved = None, 0
            sequence.hidden = sequence.hidden.tail(sequence.n)
        self._is_changing = was_changing

    def forget(self) -> None:
        """Empty everything; rows that are running read their texts again."""
        self._is_changing = True
        self._table.clear()
        for sequence in self._sequences:
            sequence.n = 0
        self._trees.clear()
        self._is_evaluating = self._is_changing = False

    def defragment(self) -> None:
        """Move what is held to the beginning, without garbage; what cannot be moved is given up."""
        for sequence in self._of_row.values():
            self._trees.drop(sequence)
        copied = [*self._table.copy_out(self._prefixes())]
        self.forget()
        self._is_changing = True
        self.n_defragmentations += 1
        for each in copied:
            self._table.copy_in(each)
        self._is_changing = False

    def take_out(self) -> Iterator[CopiedSequence]:
        """What is held, the last used first, for `put_in` of another cache; this one is empty afterwards."""
        self._settle()
        self._is_changing = True
        try:
            yield from self._table.copy_out(self._prefixes()[::-1])
        finally:
            self.forget()

    def put_in(
        self, tokens: TokenArray, content: Bytes, trunk: CachedSequence | None, n_shared: int
    ) -> CachedSequence | None:
        """Hold a prefix that was taken out, older than all others; None if that failed or has no room.

        `content` is that of the cells behind the first `n_shared`, which `trunk` holds.
        """
        free = [sequence for sequence in self._sequences if sequence.row is None and not sequence.n]
        if not free or self._table.top + len(tokens) - n_shared > SLACK * self.size:
            return None
        self._is_changing = True
        sequence = free[0]
        sequence.append(tokens, tokens)  # its cells are known below
        sequence.n, sequence.last_used = 0, -next(self._clock)
        self._table.copy_in(CopiedSequence(sequence, len(tokens), trunk, n_shared, content))
        self._is_changing = False
        return sequence if sequence.n else None

    def _prefixes(self) -> list[CachedSequence]:
        """The sequences that hold something, the last used last."""
        return sorted([each for each in self._sequences if each.n], key=lambda each: each.last_used)

    def _settle(self) -> None:
        """Take out what an interrupted evaluation left behind."""
        if self._is_changing:
            self.forget()
            self._of_row.clear()
            for sequence in self._sequences:
                sequence.row, sequence.n_reserved = None, 0
        elif self._is_evaluating:
            self._is_changing = True
            self._trees.settle(self._sequences)
            for sequence in self._sequences:
                self._cells.remove(sequence.number, sequence.n)
            self._is_evaluating = self._is_changing = False

    def _make_room(self, asking: CachedSequence) -> None:
        """See to it that the cells that rows have reserved are empty, or raise ContextFullError."""
        table, size = self._table, self.size
        if self._evicts:
            self._evict_old(asking.last_used - RECENT)
        n_reserved = sum([sequence.n_reserved for sequence in self._of_row.values()])
        if table.top + n_reserved <= size:
            return
        for sequence in self._of_row.values():
            if not sequence.n_reserved:
                self._trees.drop(sequence)
        for sequence in self._prefixes():
            if table.n_live + n_reserved <= SLACK * size:
                break
            if sequence.row is None:
                table.cut(sequence, 0)
        n_wanted = table.n_live + n_reserved
        if n_wanted > size:
            n_own = asking.n + asking.n_reserved
            others = f", other texts hold {n_wanted - n_own}" if n_wanted > n_own else ""
            raise ContextFullError(f"the context of {size} tokens is full: this text needs {n_own}{others}")
        if table.top + n_reserved > size:
            self.defragment()

    def _evict_old(self, before: int) -> None:
        """Evict unused prefixes of more cells than may stay, if they were not used since a request."""
        most = SPARE + 2 * sum([sequence.n + sequence.n_reserved for sequence in self._of_row.values()])
        if self._table.n_live <= most:
            return
        for sequence in self._prefixes():
            if self._table.n_live <= most or sequence.last_used >= before:
                return
            if sequence.row is None:
                self._table.cut(sequence, 0)
