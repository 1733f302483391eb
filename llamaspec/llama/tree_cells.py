"""Trees of draft tokens in a KV cache: each branch is a llama.cpp sequence.

A tree needs no attention mask: a token belongs to the sequences of all branches through it, and attends only
to tokens of its sequences. The first branch belongs to the running sequence itself. The other branches also
hold the tokens before the tree, as long as the tree is cached. In a batch a token comes before its children,
so the cells of every path ascend.
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
    """A tree of draft tokens after a sequence."""

    n_old: int = 0  # tokens that were cached before the last evaluation
    tokens: TokenArray = field(default_factory=lambda: NO_TOKENS)  # [K]
    parents: TokenArray = field(default_factory=lambda: NO_TOKENS)  # [K]
    owners: list[list[int]] = field(default_factory=list)  # [K] seq_ids that each token was evaluated for
    tips: dict[int, int] = field(default_factory=dict)  # seq_id -> the last token of its branch; -1 = none
    cells: TokenArray = field(default_factory=lambda: NO_TOKENS)  # of the cached tokens, ascending

    def path(self, i: int) -> list[int]:
        """Return the indices of the tokens from the root to token `i`, including it."""
        path: list[int] = []
        while i >= 0:
            path.append(i)
            i = self.parents.item(i)
        return path[::-1]

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """Return the longest path whose tokens `tokens` begins with."""
        path: list[int] = []
        for token in tokens:
            parent = path[-1] if path else -1
            same = ((self.parents == parent) & (self.tokens == token)).nonzero()[0]
            if not len(same):
                break
            path.append(int(same[0]))
        return path

    def begins(self, request: ForwardRequest) -> bool:
        """Whether the tree of a request begins with this one, whose logits are known."""
        if request.parents is None or not 0 < request.n_known == len(self.tokens):
            return False
        same = (self.tokens, request.draft), (self.parents, request.parents)
        return all(np.array_equal(old, new[: request.n_known]) for old, new in same)


def n_leaves(parents: TokenArray) -> int:
    """Return the number of branches of a tree."""
    return len(parents) - len(set(parents.tolist()) - {-1})


class TreeCells:
    """The trees of all sequences of a context; their branches use `seq_ids`."""

    def __init__(self, table: CellTable, seq_ids: Iterable[int]) -> None:
        self._table, self._cells = table, table.cells
        self._seq_ids = list(seq_ids)
        self._free = list(self._seq_ids)
        self.cached: dict[int, Tree] = {}  # by the seq_id of the running sequence
        self.growing: dict[int, Tree] = {}  # the same, after the current evaluation

    def clear(self) -> None:
        """Forget all trees; the caller empties the cells."""
        self._free = list(self._seq_ids)
        self.cached, self.growing = {}, {}

    def settle(self, sequences: Iterable[CachedSequence]) -> None:
        """Drop all trees, and empty the cells that an interrupted evaluation has given to branches."""
        for sequence in sequences:
            self.drop(sequence)
        for seq_id in self._seq_ids:
            self._cells.remove(seq_id, 0)
        self.clear()

    def resume(self, sequence: CachedSequence, request: ForwardRequest) -> int:
        """Return how many cached draft tokens a request begins with.

        If none, append the accepted draft tokens to the sequence and drop the others.
        """
        tree, n = self.cached.get(sequence.seq_id), sequence.n
        if tree is None:
            return 0
        continues = sequence.shared(request.tokens) == n
        if continues and len(request.tokens) == n and tree.begins(request):
            return request.n_known
        following = request.tokens[n : n + len(tree.tokens)].tolist() if continues else []
        self._choose_path(sequence, tree, tree.follow(following))
        return 0

    def grow(
        self, sequence: CachedSequence, request: ForwardRequest, waiting: Sequence[CachedSequence]
    ) -> Segment:
        """Give every branch of a request's tree a seq_id; return what to evaluate for the request.

        If seq_ids are short, `waiting` sequences lose their trees.
        """
        assert request.parents is not None
        old, own, n = self.cached.get(sequence.seq_id) or Tree(), sequence.seq_id, sequence.n
        n_old, n_text, n_nodes = len(old.tokens), len(request.tokens), len(request.draft)
        owners = [*old.owners, *([] for _ in range(n_old, n_nodes))]
        tree = Tree(n_old, request.draft, request.parents, owners, dict(old.tips) or {own: -1}, old.cells)
        paths = [tree.path(i) for i in range(n_nodes)]
        ending_at = {tip: seq_id for seq_id, tip in tree.tips.items()}
        inner = set(request.parents.tolist())
        for leaf in range(n_old, n_nodes):
            if leaf in inner:
                continue
            known = [i for i in paths[leaf] if i < n_old]  # the cached tokens of the branch
            seq_id = ending_at.pop(known[-1] if known else -1, -1)
            if seq_id < 0:
                seq_id = self._free_seq_id(waiting)
                self._cells.share(own, seq_id, 0, n)
                if known:
                    self._cells.share(owners[known[-1]][0], seq_id, n, n + len(known))
            tree.tips[seq_id] = leaf
            for i in paths[leaf][len(known) :]:
                owners[i].append(seq_id)
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
        """Record the new tokens of a sequence and then of its tree; False if it has no growing tree."""
        tree = self.growing.pop(sequence.seq_id, None)
        if tree is None:
            return False
        n_text = len(tokens) - (len(tree.tokens) - tree.n_old)
        sequence.append(tokens[:n_text], cells[:n_text])
        tree.cells = np.concatenate((tree.cells, cells[n_text:]))
        self.cached[sequence.seq_id] = tree
        return True

    def n_positions(self, sequence: CachedSequence) -> int:
        """Return how many positions a sequence holds in llama.cpp, including its branch of the tree."""
        tree = self.cached.get(sequence.seq_id)
        return sequence.n + (0 if tree is None else len(tree.path(tree.tips[sequence.seq_id])))

    def drop(self, sequence: CachedSequence) -> None:
        """Drop a sequence's tree: none of its tokens was accepted."""
        tree = self.cached.get(sequence.seq_id)
        if tree is not None:
            self._choose_path(sequence, tree, [])

    def _choose_path(self, sequence: CachedSequence, tree: Tree, path: list[int]) -> None:
        """Append a path of a tree to its sequence; the cells of the other tokens become empty or garbage."""
        n, own, n_top, n_nodes = sequence.n, sequence.seq_id, 0, len(tree.tokens)
        while n_top < n_nodes:
            last = n_nodes - 1 - n_top
            if last in path or tree.cells[last] != self._table.top - 1 - n_top:
                break
            n_top += 1
        held = {*path, *range(n_nodes - n_top, n_nodes)}
        for seq_id, tip in tree.tips.items():
            branch = tree.path(tip)
            garbage = [depth for depth, i in enumerate(branch) if i not in held]
            if garbage:
                self._cells.share(seq_id, self._table.garbage, n + garbage[0], n + garbage[-1] + 1)
                held.update(branch)
        n_own = len({*tree.path(tree.tips[own])} & {*path})
        self._cells.remove(own, n + n_own)
        if n_own < len(path):
            self._cells.share(tree.owners[path[-1]][0], own, n + n_own, n + len(path))
        del self.cached[own]
        for seq_id in tree.tips.keys() - {own}:
            self._cells.remove(seq_id, 0)
            self._free.append(seq_id)
        self._table.drop(np.delete(tree.cells, path), n_top)
        sequence.append(tree.tokens[path], tree.cells[path])

    def _free_seq_id(self, waiting: Sequence[CachedSequence]) -> int:
        """Take an unused seq_id; drop trees of waiting sequences if there is none."""
        for sequence in waiting:
            if not self._free:
                self.drop(sequence)
        if not self._free:
            raise ValueError("a tree has too many branches")
        return self._free.pop()
