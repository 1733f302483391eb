"""Cells of trees of draft tokens: branches begin, grow, and become text or empty again.

What a tree is, and which sequences its positions belong to, is said in `branches.py`; here its cells follow.
Extra sequences go from row to row, and keep a row's text from round to round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from llamaspec.llama.branches import Branch, CachedTree, Growth, grown, n_leaves
from llamaspec.llama.cached_sequence import CachedSequence
from llamaspec.llama.held_cells import HeldCells
from llamaspec.values import ForwardRequest, TokenArray


class TreeCells:
    """The branches of all trees in a context.

    Parameters
    ----------
    held : HeldCells
        The cells.
    numbers : iterable of int
        llama.cpp's seq_ids for branches beside the rows' own sequences.
    """

    def __init__(self, held: HeldCells, numbers: Iterable[int]) -> None:
        self._held = held
        self._cells = held.cells
        self._branches = [Branch(number) for number in numbers]
        self._free = list(self._branches)

    def clear(self) -> None:
        """All branches are empty and free; the cells are the caller's."""
        for branch in self._branches:
            branch.n = 0
        self._free = list(self._branches)

    def go_on(self, sequence: CachedSequence, request: ForwardRequest) -> int:
        """How many cached draft tokens a request goes on with; where none, keep those that are text now."""
        tree, n = sequence.tree, sequence.n
        assert tree is not None
        is_behind = sequence.shared(request.tokens) == n
        if is_behind and len(request.tokens) == n and tree.begins(request):
            return request.n_read
        behind = request.tokens[n : n + len(tree.tokens)].tolist() if is_behind else []
        self.choose_path(sequence, tree, tree.follow(behind))
        return 0

    def grow(
        self,
        sequence: CachedSequence,
        request: ForwardRequest,
        running: Mapping[int, CachedSequence],
        rows: Collection[int],
    ) -> Growth:
        """Give every branch of a request's tree a sequence.

        Parameters
        ----------
        sequence : CachedSequence
            That of the request's row.
        running : mapping of int to CachedSequence
            The sequences of all rows.
        rows : collection of int
            Those that are evaluated next.
        """
        assert request.parents is not None
        tree = sequence.tree or CachedTree()
        unused = [branch for branch in sequence.branches if branch.number not in tree.tips]
        n_wanted = n_leaves(request.parents) - max(len(tree.tips), 1)
        while len(unused) < n_wanted:
            branch = self._free.pop() if self._free else self._taken_branch(sequence, running, rows)
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

    def commit(self, sequence: CachedSequence, growth: Growth, tokens: TokenArray, cells: TokenArray) -> None:
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

    def choose_path(self, sequence: CachedSequence, tree: CachedTree, path: list[int]) -> None:
        """Make a path of a tree text; the cells of its other tokens become empty, or garbage."""
        n, own, n_top, n_nodes = sequence.n, sequence.number, 0, len(tree.tokens)
        while n_top < n_nodes:
            last = n_nodes - 1 - n_top
            if last in path or tree.cells[last] != self._held.top - 1 - n_top:
                break
            n_top += 1
        held = {*path, *range(n_nodes - n_top, n_nodes)}
        lost = np.array([i for i in range(n_nodes) if i not in path], dtype=np.int64)
        paths = {number: tree.path(tip) for number, tip in tree.tips.items()}
        for number, branch in paths.items():
            garbage = [depth for depth, i in enumerate(branch) if i not in held]
            if garbage:
                self._cells.share(number, self._held.garbage, n + garbage[0], n + garbage[-1] + 1)
                held.update(branch)
        n_own = sum(a == b for a, b in zip(paths[own], path, strict=False))
        self._cells.remove(own, n + n_own)
        if n_own < len(path):
            self._cells.share(tree.through[path[-1]], own, n + n_own, n + len(path))
        for other in sequence.branches:
            if other.number in tree.tips:
                self._cells.remove(other.number, n)
        sequence.tree = None
        self._held.drop(tree.cells[lost], n_top)
        sequence.append(tree.tokens[path], tree.cells[path])

    def drop(self, sequence: CachedSequence) -> None:
        """No token of a sequence's tree is text; who wants them reads them again."""
        if sequence.tree is not None:
            self.choose_path(sequence, sequence.tree, [])

    def end(self, sequence: CachedSequence) -> None:
        """Give a sequence's branches away."""
        self.drop(sequence)
        for branch in sequence.branches:
            self._cells.remove(branch.number, 0)
            branch.n = 0
        self._free += sequence.branches
        sequence.branches, sequence.growth = [], None

    def _taken_branch(
        self, asking: CachedSequence, running: Mapping[int, CachedSequence], rows: Collection[int]
    ) -> Branch:
        """A branch that was another row's: one that is not in use, or of a tree that can be read again."""
        others = [sequence for row, sequence in running.items() if row not in rows]
        idle = [sequence for sequence in running.values() if sequence is not asking]
        for i, sequence in enumerate([*idle, *others]):
            if i >= len(idle):
                self.drop(sequence)
            used = sequence.growth or sequence.tree
            for branch in sequence.branches:
                if used is None or branch.number not in used.tips:
                    sequence.branches.remove(branch)
                    self._cells.remove(branch.number, 0)
                    branch.n = 0
                    return branch
        raise ValueError("a tree has too many branches")
