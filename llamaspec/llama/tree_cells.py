"""Trees of draft tokens in a KV cache: every branch has a llama.cpp sequence of its own.

llama.cpp needs no mask for a tree: a position belongs to the sequences of all leaves above it, and sees what
its sequence holds. The first branch is the row's own sequence. The others also hold the text before the tree,
and keep it from round to round, so that only what is new has to be shared. A token comes before its children
in the batch, so the cells of every path ascend. tests/llama/test_branches.py compares with chains,
tests/llama/test_kv_cache.py checks every cell.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from llamaspec.llama.cells import Branch, CachedSequence, CellTable
from llamaspec.values import NO_TOKENS, ForwardRequest, TokenArray


@dataclass(slots=True, eq=False)
class CachedTree:
    """The draft tokens that are cached behind the text of a sequence."""

    tokens: TokenArray = field(default_factory=lambda: NO_TOKENS)  # [K]
    parents: TokenArray = field(default_factory=lambda: NO_TOKENS)  # [K]
    cells: TokenArray = field(default_factory=lambda: NO_TOKENS)  # [K] ascending
    through: list[int] = field(default_factory=list)  # [K] a seq_id that holds the path to each
    tips: dict[int, int] = field(default_factory=dict)  # seq_id -> the last token of its branch; -1 = none

    def path(self, i: int) -> list[int]:
        """Indices of the tokens from the text to token `i`, with it."""
        path: list[int] = []
        while i >= 0:
            path.append(i)
            i = int(self.parents[i])
        return path[::-1]

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """The longest path that some tokens begin with."""
        path: list[int] = []
        for token in tokens:
            parent = path[-1] if path else -1
            same = ((self.parents == parent) & (self.tokens == token)).nonzero()[0]
            if not len(same):
                break
            path.append(int(same[0]))
        return path

    def begins(self, request: ForwardRequest) -> bool:
        """Whether these are the draft tokens whose logits a request knows."""
        n = request.n_read
        return (
            n == len(self.tokens) > 0
            and request.parents is not None
            and bool((self.tokens == request.draft[:n]).all())
            and bool((self.parents == request.parents[:n]).all())
        )


@dataclass(frozen=True, slots=True, eq=False)
class Growth:
    """What an evaluation adds to a tree."""

    n_old: int  # tokens of the tree that are cached
    tokens: TokenArray  # [K] of the whole tree
    parents: TokenArray  # [K]
    depths: list[int]  # [K] tokens of the tree before each
    owners: list[list[int]]  # [K - n_old] seq_ids that each new token belongs to
    tips: dict[int, int]  # seq_id -> last token, afterwards; new text before the tree belongs to each
    new: dict[int, int]  # seq_id of a new branch -> the cached token that it begins behind; -1 = the text


def n_leaves(parents: TokenArray) -> int:
    """Branches of a tree."""
    return len(parents) - len(set(parents.tolist()) - {-1})


class TreeCells:
    """The trees of all sequences of a context, and the further sequences for their branches.

    Parameters
    ----------
    table : CellTable
    numbers : iterable of int
        llama.cpp's seq_ids for branches beside the rows' own sequences.
    """

    def __init__(self, table: CellTable, numbers: Iterable[int]) -> None:
        self._table, self._cells = table, table.cells
        self._branches = [Branch(number) for number in numbers]
        self.free = list(self._branches)
        self.cached: dict[int, CachedTree] = {}  # by the seq_id of the row's own sequence
        self.growing: dict[int, Growth] = {}  # what the evaluation that is running adds

    def clear(self) -> None:
        """All branches are empty and free; the cells are the caller's."""
        for branch in self._branches:
            branch.n = 0
        self.free = list(self._branches)
        self.cached, self.growing = {}, {}

    def go_on(self, sequence: CachedSequence, request: ForwardRequest) -> int:
        """How many cached draft tokens a request goes on with; if none, keep those that are text now."""
        tree, n = self.cached.get(sequence.number), sequence.n
        if tree is None:
            return 0
        is_behind = sequence.shared(request.tokens) == n
        if is_behind and len(request.tokens) == n and tree.begins(request):
            return request.n_read
        behind = request.tokens[n : n + len(tree.tokens)].tolist() if is_behind else []
        self._choose_path(sequence, tree, tree.follow(behind))
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
        tree = self.cached.get(sequence.number) or CachedTree()
        unused = [branch for branch in sequence.branches if branch.number not in tree.tips]
        n_wanted = n_leaves(request.parents) - max(len(tree.tips), 1)
        while len(unused) < n_wanted:
            branch = self.free.pop() if self.free else self._taken_branch(sequence, running, rows)
            sequence.branches.append(branch)
            unused.append(branch)
        growth = _growth(tree, request, sequence.number, [branch.number for branch in unused])
        n = sequence.n
        for branch in unused:
            if branch.number not in growth.new:
                continue
            if branch.n < n:
                self._cells.share(sequence.number, branch.number, branch.n, n)
                branch.n = n
            before = growth.new[branch.number]
            if before >= 0:
                self._cells.share(tree.through[before], branch.number, n, n + growth.depths[before] + 1)
        self.growing[sequence.number] = growth
        return growth

    def commit(self, sequence: CachedSequence, tokens: TokenArray, cells: TokenArray) -> bool:
        """Note new text and, behind it, new tokens of the tree; False if the sequence grows none."""
        growth = self.growing.get(sequence.number)
        if growth is None:
            return False
        n_text = len(tokens) - len(growth.owners)
        old = self.cached.get(sequence.number) or CachedTree()
        sequence.append(tokens[:n_text], cells[:n_text])
        self.cached[sequence.number] = CachedTree(
            growth.tokens,
            growth.parents,
            np.concatenate((old.cells, cells[n_text:])),
            old.through + [owners[0] for owners in growth.owners],
            growth.tips,
        )
        for branch in sequence.branches:
            if branch.number in growth.tips:
                branch.n = sequence.n
        del self.growing[sequence.number]
        return True

    def n_positions(self, sequence: CachedSequence) -> int:
        """Positions that llama.cpp's sequence holds: the text, and its branch of the tree."""
        tree = self.cached.get(sequence.number)
        return sequence.n + (0 if tree is None else len(tree.path(tree.tips[sequence.number])))

    def drop(self, sequence: CachedSequence) -> None:
        """No token of a sequence's tree is text; who wants them reads them again."""
        tree = self.cached.get(sequence.number)
        if tree is not None:
            self._choose_path(sequence, tree, [])

    def end(self, sequence: CachedSequence) -> None:
        """Give a sequence's branches away."""
        self.drop(sequence)
        self.growing.pop(sequence.number, None)
        for branch in sequence.branches:
            self._cells.remove(branch.number, 0)
            branch.n = 0
        self.free += sequence.branches
        sequence.branches = []

    def settle(self, sequences: Iterable[CachedSequence]) -> None:
        """Take out of the cells what an interrupted evaluation may have left behind."""
        self.growing = {}
        for sequence in sequences:
            self.drop(sequence)
            self._cells.remove(sequence.number, sequence.n)
            for branch in sequence.branches:
                self._cells.remove(branch.number, branch.n)

    def _choose_path(self, sequence: CachedSequence, tree: CachedTree, path: list[int]) -> None:
        """Make a path of a tree text; the cells of its other tokens become empty, or garbage."""
        n, own, n_top, n_nodes = sequence.n, sequence.number, 0, len(tree.tokens)
        while n_top < n_nodes:
            last = n_nodes - 1 - n_top
            if last in path or tree.cells[last] != self._table.top - 1 - n_top:
                break
            n_top += 1
        held = {*path, *range(n_nodes - n_top, n_nodes)}
        paths = {number: tree.path(tip) for number, tip in tree.tips.items()}
        for number, branch in paths.items():
            garbage = [depth for depth, i in enumerate(branch) if i not in held]
            if garbage:
                self._cells.share(number, self._table.garbage, n + garbage[0], n + garbage[-1] + 1)
                held.update(branch)
        n_own = sum(a == b for a, b in zip(paths[own], path, strict=False))
        self._cells.remove(own, n + n_own)
        if n_own < len(path):
            self._cells.share(tree.through[path[-1]], own, n + n_own, n + len(path))
        for other in sequence.branches:
            if other.number in tree.tips:
                self._cells.remove(other.number, n)
        del self.cached[own]
        self._table.drop(np.delete(tree.cells, path), n_top)
        sequence.append(tree.tokens[path], tree.cells[path])

    def _taken_branch(
        self, asking: CachedSequence, running: Mapping[int, CachedSequence], rows: Collection[int]
    ) -> Branch:
        """A branch that was another row's: one that is not in use, or of a tree that can be read again."""
        idle = [sequence for sequence in running.values() if sequence is not asking]
        others = [sequence for row, sequence in running.items() if row not in rows]
        for i, sequence in enumerate([*idle, *others]):
            if i >= len(idle):
                self.drop(sequence)
            used = self.growing.get(sequence.number) or self.cached.get(sequence.number)
            for branch in sequence.branches:
                if used is None or branch.number not in used.tips:
                    sequence.branches.remove(branch)
                    self._cells.remove(branch.number, 0)
                    branch.n = 0
                    return branch
        raise ValueError("a tree has too many branches")


def _growth(tree: CachedTree, request: ForwardRequest, own: int, free: Sequence[int]) -> Growth:
    """The tree that a request makes of a cached one; `own` is the row's seq_id, `free` for new branches."""
    assert request.parents is not None
    parents: list[int] = request.parents.tolist()
    n_old, unused = len(tree.tokens), list(free)
    tips = dict(tree.tips) or {own: -1}
    old_tips = {tip: number for number, tip in tips.items()}
    owners: list[list[int]] = [[] for _ in parents[n_old:]]
    new: dict[int, int] = {}
    inner = set(parents)
    for leaf in range(n_old, len(parents)):
        if leaf in inner:
            continue
        path = [leaf]
        while parents[path[-1]] >= n_old:
            path.append(parents[path[-1]])
        before = parents[path[-1]]  # the last cached token of the branch
        number = old_tips.pop(before, None)
        if number is None:
            number = unused.pop(0)
            new[number] = before
        tips[number] = leaf
        for i in path:
            owners[i - n_old].append(number)
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return Growth(n_old, request.draft, request.parents, depths, owners, tips, new)
