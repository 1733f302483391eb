"""The KV cache of a context as a cache of token sequences: prefixes are found again, nobody says "go back".

Before an evaluation a row's sequence is cut to what it shares with the request, and takes over what another
sequence knows more of; sharing costs no memory. Cells are only ever appended: rejected tokens whose cells lie
between those of other rows stay there, as garbage, until the cache is full and is compacted. The cells of a
sequence so always ascend with its positions, and attention adds up in the same order as for the text alone.
tests/test_rows.py compares, bit by bit, with texts that are alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from llamaspec.errors import ContextFullError
from llamaspec.llama.branches import Branch, CachedTree, Growth, grown, n_leaves
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
    n_branches : int
        More sequences, for branches of trees.
    """

    def __init__(self, cells: Cells, size: int, n_sequences: int, n_branches: int = 0) -> None:
        self._cells = cells
        self._size = size
        self._garbage = n_sequences - 1
        self._sequences = [CachedSequence(i) for i in range(n_sequences - 1)]
        self._branches = [Branch(n_sequences + i) for i in range(n_branches)]
        self._free_branches = list(self._branches)
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
        n_read = 0 if sequence.tree is None else self._go_on_with_tree(sequence, request)
        n_before = len(request.tokens) - request.n_logits  # what may come out of the cache
        if is_new:
            self._fetch(sequence, request.tokens[:n_before])
        n = min(sequence.shared(request.tokens), n_before)
        if n < request.n_tokens:  # else keep what follows: it may be wanted next
            other, n_other = self._best_other(sequence, request.tokens[:n_before], n)
            self._cut(sequence, n)
            if other is not None:
                self._take_over(sequence, other, n_other)
            n = sequence.n + n_read
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

    def grow(self, row: int, request: ForwardRequest, rows: Collection[int]) -> Growth:
        """Give every branch of a prepared request's tree a sequence; `rows` are evaluated next."""
        assert request.parents is not None
        self._is_evaluating = True
        sequence = self._of_row[row]
        tree = sequence.tree or CachedTree()
        unused = [branch for branch in sequence.branches if branch.number not in tree.tips]
        n_wanted = n_leaves(request.parents) - max(len(tree.tips), 1)
        while len(unused) < n_wanted:
            branch = self._free_branches.pop() if self._free_branches else self._taken_branch(sequence, rows)
            sequence.branches.append(branch)
            unused.append(branch)
        growth = grown(tree, request, sequence.number, [branch.number for branch in unused])
        for branch in unused:
            if branch.number not in growth.new:
                continue
            if branch.n < sequence.n:
                self._cells.share(sequence.number, branch.number, branch.n, sequence.n)
                branch.n = sequence.n
            before = growth.new[branch.number]
            if before >= 0:
                n = sequence.n
                self._cells.share(tree.through[before], branch.number, n, n + growth.depths[before] + 1)
        sequence.growth = growth
        return growth

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
            cells = np.arange(self._top, top, dtype=np.int32)
            if sequence.growth is None:
                sequence.append(tokens, cells)
            else:
                self._commit_tree(sequence, sequence.growth, tokens, cells)
            sequence.n_reserved -= len(tokens)
            if sequence.n_reserved <= sequence.n_padding:
                sequence.n_reserved = 0
            self._top = top
        if n_padding:
            last = self._of_row[evaluated[-1][0]]
            n = last.n if last.tree is None else last.n + len(last.tree.path(last.tree.tips[last.number]))
            self._cells.remove(last.number, n)
        self._is_evaluating = self._is_changing = False

    def release(self, row: int) -> None:
        """The row has ended; its sequence stays as a prefix that others may use."""
        was_changing, self._is_changing = self._is_changing, True
        sequence = self._of_row.pop(row, None)
        if sequence is not None:
            if (sequence.branches or sequence.tree is not None) and not was_changing:
                self._end_branches(sequence)
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
            sequence.n, sequence.tree, sequence.growth, sequence.branches = 0, None, None, []
        for branch in self._branches:
            branch.n = 0
        self._free_branches = list(self._branches)
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
            self._is_changing = True
            for sequence in self._sequences:
                if sequence.tree is not None:
                    self._choose_path(sequence, sequence.tree, [])
                sequence.growth = None
                self._cells.remove(sequence.number, sequence.n)
                for branch in sequence.branches:
                    self._cells.remove(branch.number, branch.n)
            self._is_evaluating = self._is_changing = False

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

    def _go_on_with_tree(self, sequence: CachedSequence, request: ForwardRequest) -> int:
        """How many cached draft tokens a request goes on with; where none, keep those that are text now."""
        tree, n = sequence.tree, sequence.n
        assert tree is not None
        is_behind = sequence.shared(request.tokens) == n
        if is_behind and len(request.tokens) == n and tree.begins(request):
            return request.n_read
        behind = request.tokens[n : n + len(tree.tokens)].tolist() if is_behind else []
        self._choose_path(sequence, tree, tree.follow(behind))
        return 0

    def _commit_tree(
        self, sequence: CachedSequence, growth: Growth, tokens: TokenArray, cells: TokenArray
    ) -> None:
        """Note new text and, behind it, new tokens of a tree."""
        n_text = len(tokens) - len(growth.owners)
        old = sequence.tree or CachedTree()
        sequence.append(tokens[:n_text], cells[:n_text])
        sequence.tree = CachedTree(
            growth.tokens,
            growth.parents,
            np.concatenate((old.cells, cells[n_text:])),
            old.through + [owners[0] for owners in growth.owners],
            growth.tips,
        )
        for branch in sequence.branches:
            if branch.number in growth.tips:
                branch.n = sequence.n
        sequence.growth = None

    def _choose_path(self, sequence: CachedSequence, tree: CachedTree, path: list[int]) -> None:
        """Make a path of a tree text; the cells of its other tokens become empty, or garbage."""
        n, own, n_top, n_nodes = sequence.n, sequence.number, 0, len(tree.tokens)
        while n_top < n_nodes:
            last = n_nodes - 1 - n_top
            if last in path or tree.cells[last] != self._top - 1 - n_top:
                break
            n_top += 1
        held = {*path, *range(n_nodes - n_top, n_nodes)}
        lost = np.array([i for i in range(n_nodes) if i not in path], dtype=np.int64)
        for number, tip in tree.tips.items():
            branch = tree.path(tip)
            garbage = [depth for depth, i in enumerate(branch) if i not in held]
            if garbage:
                self._cells.share(number, self._garbage, n + garbage[0], n + garbage[-1] + 1)
                held.update(branch)
        n_own = sum(a == b for a, b in zip(tree.path(tree.tips[own]), path, strict=False))
        self._cells.remove(own, n + n_own)
        if n_own < len(path):
            self._cells.share(tree.through[path[-1]], own, n + n_own, n + len(path))
        for other in sequence.branches:
            if other.number in tree.tips:
                self._cells.remove(other.number, n)
        sequence.tree = None
        self._n_owners[tree.cells[lost]] = 0
        self._top -= n_top
        sequence.append(tree.tokens[path], tree.cells[path])

    def _taken_branch(self, asking: CachedSequence, rows: Collection[int]) -> Branch:
        """A branch that was another row's: one that is not in use, or of a tree that can be read again."""
        others = [sequence for row, sequence in self._of_row.items() if row not in rows]
        idle = [sequence for sequence in self._of_row.values() if sequence is not asking]
        for i, sequence in enumerate([*idle, *others]):
            if i >= len(idle) and sequence.tree is not None:
                self._choose_path(sequence, sequence.tree, [])
            used = sequence.growth or sequence.tree
            for branch in sequence.branches:
                if used is None or branch.number not in used.tips:
                    sequence.branches.remove(branch)
                    self._cells.remove(branch.number, 0)
                    branch.n = 0
                    return branch
        raise ValueError("a tree has too many branches")

    def _end_branches(self, sequence: CachedSequence) -> None:
        """Give a sequence's branches away."""
        if sequence.tree is not None:
            self._choose_path(sequence, sequence.tree, [])
        for branch in sequence.branches:
            self._cells.remove(branch.number, 0)
            branch.n = 0
        self._free_branches += sequence.branches
        sequence.branches, sequence.growth = [], None

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
        for branch in sequence.branches:
            if branch.n > n:
                self._cells.remove(branch.number, n)
                branch.n = n
        self._n_owners[cells] = owners - 1
        self._top -= n_top

    def _make_room(self, asking: CachedSequence) -> None:
        """See to it that the cells that rows have reserved are empty."""
        n_reserved = 0
        for sequence in self._of_row.values():
            n_reserved += sequence.n_reserved
        if self._top + n_reserved <= self._size:
            return
        for sequence in self._of_row.values():
            if sequence.tree is not None and not sequence.n_reserved:
                self._choose_path(sequence, sequence.tree, [])
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
        for sequence in self._of_row.values():
            if sequence.tree is not None:  # it is read again
                self._choose_path(sequence, sequence.tree, [])
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
