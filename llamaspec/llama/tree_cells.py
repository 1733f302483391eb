"""Trees of draft tokens in a KV cache: every branch has a llama.cpp sequence of its own.

llama.cpp needs no mask for a tree: a position belongs to the sequences of all branches through it, and
attends to what its sequences hold. The first branch is the row's own sequence; the others hold the tokens
before the tree, too, as long as the tree is cached. A token comes before its children in the batch, so the
cells of every path ascend.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from llamaspec.llama.batch import Segment
from llamaspec.llama.cells import CachedSequence, CellTable
from llamaspec.values import NO_TOKENS, ForwardRequest, TokenArray


@dataclass(slots=True, eq=False)
class Tree:
    """Draft tokens behind a sequence; `n_old` were cached before the last evaluation."""

    n_old: int = 0
    tokens: TokenArray = field(default_factory=lambda: NO_TOKENS)  # [K]
    parents: TokenArray = field(default_factory=lambda: NO_TOKENS)  # [K]
    owners: list[list[int]] = field(default_factory=list)  # [K] seq_ids that each was evaluated for
    tips: dict[int, int] = field(default_factory=dict)  # seq_id -> the last token of its branch; -1 = none
    cells: TokenArray = field(default_factory=lambda: NO_TOKENS)  # of the cached tokens, ascending

    def path(self, i: int) -> list[int]:
        """Indices of the tokens from the root to token `i`, including it."""
        path: list[int] = []
        while i >= 0:
            path.append(i)
            i = self.parents.item(i)
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
        """Whether a request goes on with this tree, whose logits are known."""
        if request.parents is None or not 0 < request.n_read == len(self.tokens):
            return False
        same = (self.tokens, request.draft), (self.parents, request.parents)
        return all(np.array_equal(old, new[: request.n_read]) for old, new in same)


def n_leaves(parents: TokenArray) -> int:
    """Branches of a tree."""
    return len(parents) - len(set(parents.tolist()) - {-1})


class TreeCells:
    """The trees of all sequences of a context; `numbers` are llama.cpp's seq_ids for their branches."""

    def __init__(self, table: CellTable, numbers: Iterable[int]) -> None:
        self._table, self._cells = table, table.cells
        self._numbers = list(numbers)
        self._free = list(self._numbers)
        self.cached: dict[int, Tree] = {}  # by the seq_id of the row's own sequence
        self.growing: dict[int, Tree] = {}  # the same, after the running evaluation

    def clear(self) -> None:
        """Forget all trees; the caller empties the cells."""
        self._free = list(self._numbers)
        self.cached, self.growing = {}, {}

    def settle(self, sequences: Iterable[CachedSequence]) -> None:
        """Drop all trees, and what an interrupted evaluation may have left of them in the cells."""
        for sequence in sequences:
            self.drop(sequence)
        for number in self._numbers:
            self._cells.remove(number, 0)
        self.clear()

    def go_on(self, sequence: CachedSequence, request: ForwardRequest) -> int:
        """How many cached draft tokens a request goes on with; if none, keep those that were accepted."""
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
        self, sequence: CachedSequence, request: ForwardRequest, waiting: Sequence[CachedSequence]
    ) -> Segment:
        """Give every branch of a request's tree a seq_id; return what must be evaluated of the request.

        `waiting` sequences may lose their trees for it.
        """
        assert request.parents is not None
        old, own, n = self.cached.get(sequence.number) or Tree(), sequence.number, sequence.n
        n_old, n_text, n_nodes = len(old.tokens), len(request.tokens), len(request.draft)
        owners = [*old.owners, *([] for _ in range(n_old, n_nodes))]
        tree = Tree(n_old, request.draft, request.parents, owners, dict(old.tips) or {own: -1}, old.cells)
        paths = [tree.path(i) for i in range(n_nodes)]
        ending_at = {tip: number for number, tip in tree.tips.items()}
        inner = set(request.parents.tolist())
        for leaf in range(n_old, n_nodes):
            if leaf in inner:
                continue
            known = [i for i in paths[leaf] if i < n_old]  # the cached tokens of the branch
            number = ending_at.pop(known[-1] if known else -1, -1)
            if number < 0:
                number = self._free_number(waiting)
                self._cells.share(own, number, 0, n)
                if known:
                    self._cells.share(owners[known[-1]][0], number, n, n + len(known))
            tree.tips[number] = leaf
            for i in paths[leaf][len(known) :]:
                owners[i].append(number)
        self.growing[own] = tree
        places = [*range(n, n_text), *[n_text + len(path) - 1 for path in paths[n_old:]]]
        return Segment(
            own,
            n,
            np.concatenate((request.tokens[n:], request.draft[n_old:])),
            request.n_scored,
            positions=np.array(places, dtype=np.int32),
            owners=[list(tree.tips)] * (n_text - n) + owners[n_old:],
            end=n_text + len(tree.path(tree.tips[own])),
        )

    def commit(self, sequence: CachedSequence, tokens: TokenArray, cells: TokenArray) -> bool:
        """Note new tokens of a sequence and, behind them, of its tree; False if it grows none."""
        tree = self.growing.pop(sequence.number, None)
        if tree is None:
            return False
        n_text = len(tokens) - (len(tree.tokens) - tree.n_old)
        sequence.append(tokens[:n_text], cells[:n_text])
        tree.cells = np.concatenate((tree.cells, cells[n_text:]))
        self.cached[sequence.number] = tree
        return True

    def n_positions(self, sequence: CachedSequence) -> int:
        """Positions that llama.cpp's sequence holds, including its branch of the tree."""
        tree = self.cached.get(sequence.number)
        return sequence.n + (0 if tree is None else len(tree.path(tree.tips[sequence.number])))

    def drop(self, sequence: CachedSequence) -> None:
        """Drop a sequence's tree: none of its tokens was accepted."""
        tree = self.cached.get(sequence.number)
        if tree is not None:
            self._choose_path(sequence, tree, [])

    def _choose_path(self, sequence: CachedSequence, tree: Tree, path: list[int]) -> None:
        """Append a path of a tree to its sequence; the cells of other tokens become empty, or garbage."""
        n, own, n_top, n_nodes = sequence.n, sequence.number, 0, len(tree.tokens)
        while n_top < n_nodes:
            last = n_nodes - 1 - n_top
            if last in path or tree.cells[last] != self._table.top - 1 - n_top:
                break
            n_top += 1
        held = {*path, *range(n_nodes - n_top, n_nodes)}
        for number, tip in tree.tips.items():
            branch = tree.path(tip)
            garbage = [depth for depth, i in enumerate(branch) if i not in held]
            if garbage:
                self._cells.share(number, self._table.garbage, n + garbage[0], n + garbage[-1] + 1)
                held.update(branch)
        n_own = len({*tree.path(tree.tips[own])} & {*path})
        self._cells.remove(own, n + n_own)
        if n_own < len(path):
            self._cells.share(tree.owners[path[-1]][0], own, n + n_own, n + len(path))
        del self.cached[own]
        for number in tree.tips.keys() - {own}:
            self._cells.remove(number, 0)
            self._free.append(number)
        self._table.drop(np.delete(tree.cells, path), n_top)
        sequence.append(tree.tokens[path], tree.cells[path])

    def _free_number(self, waiting: Sequence[CachedSequence]) -> int:
        """A seq_id that nobody uses, if need be after dropping trees of waiting sequences."""
        for sequence in waiting:
            if not self._free:
                self.drop(sequence)
        if not self._free:
            raise ValueError("a tree has too many branches")
        return self._free.pop()
