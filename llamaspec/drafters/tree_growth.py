"""How trees of draft tokens grow: which candidates the draft reads next, and which the target verifies.

A tree grows by levels: each is one step of the draft, which reads several tokens at once. The value of a
token is the chance that the text takes it: the product of calibrated chances along its path. The target
verifies the most valuable ones, as many as pay; the draft reads on where what it would find pays for one more
step, or for several. With steep costs that is a chain. Knows neither models nor what tokens mean.
tests/drafters/test_tree_growth.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from llamaspec.length.tree import DEPTHS, WIDEST, Array, TreePlan, looked_ahead
from llamaspec.protocols import RowLength
from llamaspec.values import Draft, Round, Source

CONTEXT = -1  # in place of a draft token: what stands before all of them
N_CANDIDATES = 4  # for each position


@dataclass(slots=True, eq=False)
class CandidateTree:
    """Everything that a draft offers in a round; the children of a token stand best first."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # index of the one before; -1 = the context
    confidences: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)  # among its siblings, from 0
    depths: list[int] = field(default_factory=list)  # tokens before it
    read: list[int] = field(default_factory=list)  # those that the draft model has read, in this order

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, tokens: Sequence[int], confidences: Sequence[float]) -> None:
        """What may follow one of them, or the context."""
        self.tokens += tokens
        self.confidences += confidences
        self.parents += [parent] * len(tokens)
        self.depths += [self.depths[parent] + 1 if parent >= 0 else 0] * len(tokens)
        self.ranks += range(len(tokens))

    def draft(self, kept: Sequence[int], source: Source) -> Draft:
        """Some of them, with all that stand before these: first the branch of the best ones.

        So accepted tokens mostly lie next to each other in the KV cache.
        """
        order: list[int] = []
        stack = sorted((i for i in kept if self.parents[i] < 0), reverse=True)
        below: dict[int, list[int]] = {}
        for i in kept:
            below.setdefault(self.parents[i], []).append(i)
        while stack:
            i = stack.pop()
            order.append(i)
            stack += sorted(below.get(i, ()), reverse=True)
        place = {i: n for n, i in enumerate(order)}
        parents = np.array([place.get(self.parents[i], CONTEXT) for i in order], dtype=np.int32)
        return Draft(
            np.array([self.tokens[i] for i in order], dtype=np.int32),
            (),
            tuple(self.confidences[i] for i in order),
            source,
            parents,
        )


class Growth(Protocol):
    """How the tree of one round grows."""

    @property
    def n_candidates(self) -> int:
        """How many are wanted of each distribution."""

    def expand(self, tree: CandidateTree) -> Sequence[int]:
        """Which tokens the draft reads next, in one step; first the context alone; none = enough."""

    def keep(self, tree: CandidateTree) -> Sequence[int]:
        """Which tokens the target verifies: a token only together with those before it."""


@runtime_checkable
class TreeLength(RowLength, Protocol):
    """A row's length that also lets trees grow."""

    def tree(self, grow: Callable[[TreePlan], Growth]) -> Growth | None:
        """How a tree grows in the coming round, as `grow` makes it; None where a chain is as good."""


@dataclass(slots=True, eq=False)
class TreeGrowth:
    """The tree of one round of one row."""

    plan: TreePlan
    n_candidates: int = N_CANDIDATES
    _values: list[float] = field(default_factory=list)

    def expand(self, tree: CandidateTree) -> list[int]:
        """What the draft reads next: where it pays."""
        return self._most_promising(tree) if len(tree) else [CONTEXT]

    def keep(self, tree: CandidateTree) -> list[int]:
        """The most valuable tokens, as many as pay."""
        values = self._valued(tree)
        order = (-values).argsort(kind="stable")
        n, _ = _best(values[order], self.plan.prices)
        return sorted(order[:n].tolist())

    def _valued(self, tree: CandidateTree) -> Array:
        """The chance of each candidate that the text takes it: less than that of the one before it."""
        values = self._values
        for i in range(len(values), len(tree)):
            chance = self.plan.acceptance.chance(tree.ranks[i], tree.confidences[i])
            if tree.ranks[i]:
                chance = min(chance, values[i - 1] / max(self._before(tree, i), 1e-12))
            values.append(chance * self._before(tree, i))
        return np.array(values)

    def _before(self, tree: CandidateTree, i: int) -> float:
        parent = tree.parents[i]
        return self._values[parent] if parent != CONTEXT else 1.0

    def _most_promising(self, tree: CandidateTree) -> list[int]:
        values = self._valued(tree)
        open_ = np.ones(len(values), dtype=bool)
        open_[tree.read] = False
        unread = open_.nonzero()[0]
        unread = unread[(-values[unread]).argsort(kind="stable")][:WIDEST]
        _, best = _best(-np.sort(-values), self.plan.prices)
        chosen: list[int] = []
        for depth in DEPTHS:
            ahead = np.outer(values[unread], looked_ahead(self.plan.usual, depth)).ravel()
            pool = -np.sort(-np.concatenate([values, ahead]))
            n, worth = _best(pool, self.plan.prices)
            if not n:
                continue
            nodes = unread[values[unread] * self.plan.usual[0] >= pool[n - 1]]
            worth -= depth * float(self.plan.steps[len(nodes)])
            if len(nodes) and worth > best:
                best, chosen = worth, nodes.tolist()
        return chosen


def _best(values: Array, prices: Array) -> tuple[int, float]:
    """How many of some tokens to verify, the most valuable first, and what that is worth."""
    values = values[: len(prices) - 1]
    worth = values.cumsum() - prices[1 : len(values) + 1]
    n = int(worth.argmax()) if len(worth) else 0
    return (n + 1, float(worth[n])) if len(worth) and worth[n] > 0 else (0, 0.0)


@dataclass(frozen=True, slots=True)
class FixedTree:
    """Always the same tree: `widths[d]` children for every token of level d. For tests and comparisons."""

    widths: tuple[int, ...]

    @property
    def n_candidates(self) -> int:
        """The widest."""
        return max(self.widths, default=0)

    def start_row(self, *, drops: bool = False) -> FixedTree:
        """Itself: it has no state."""
        return self

    def tree(self, grow: Callable[[TreePlan], Growth]) -> FixedTree:
        """Itself."""
        return self

    def expand(self, tree: CandidateTree) -> Sequence[int]:
        """All of the next level."""
        if not len(tree):
            return [CONTEXT] if self.widths else []
        kept = self.keep(tree)
        last = max(tree.depths[i] for i in kept)
        if last + 1 >= len(self.widths) or any(tree.depths[i] == last for i in tree.read):
            return []
        return [i for i in kept if tree.depths[i] == last]

    def keep(self, tree: CandidateTree) -> Sequence[int]:
        """As wide as each level may be."""
        kept: list[int] = []
        for i, parent in enumerate(tree.parents):
            if tree.ranks[i] < self.widths[tree.depths[i]] and (parent < 0 or parent in kept):
                kept.append(i)
        return kept

    def wants_more(self, draft: Draft) -> bool:
        """Where no tree can grow, a chain as deep."""
        return len(draft) < len(self.widths)

    def n_verified(self, draft: Draft) -> int:
        """All."""
        return len(draft)

    def width(self, n_positions: int) -> int:
        """No padding."""
        return n_positions

    def observe(self, round_: Round) -> None:
        """Learns nothing."""

    def close(self) -> None:
        """Nothing to do."""
