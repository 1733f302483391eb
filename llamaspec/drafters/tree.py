"""Trees of draft tokens from a small model, which reads a whole level in one step.

The candidates of a position are the greatest log q + g, with the noise g that the target will draw with; the
first is what a chain would draft. The value of a token is the chance that it is accepted: the product of
calibrated chances along its path. The target verifies the most valuable ones, as many as pay; the draft reads
on where what it would find pays for the steps. Only the coupled rule verifies trees.
tests/drafters/test_tree.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from llamaspec.drafters.model import ModelDrafter
from llamaspec.errors import EVALUATION_FAULTS
from llamaspec.length.costs import Array
from llamaspec.length.tree import DEPTHS, WIDEST, TreePlan, looked_ahead
from llamaspec.protocols import Drafting, SequenceLength
from llamaspec.sampling.sampler import Sampler, candidates
from llamaspec.values import Draft, ForwardRequest, Source, TokenArray

CONTEXT = -1  # in place of a draft token: the text before all of them
N_CANDIDATES = 4  # for each position
DEEPEST = 64  # draft tokens that a tree may have in a row


@dataclass(slots=True, eq=False)
class CandidateTree:
    """Everything that a draft offers in a round; siblings are in order, the best first."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # index of the one before; -1 = the context
    confidences: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)  # among its siblings, from 0
    read: list[int] = field(default_factory=list)  # those that the draft model has read, in this order

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, tokens: Sequence[int], confidences: Sequence[float]) -> None:
        """What may follow one of them, or the context."""
        self.tokens += tokens
        self.confidences += confidences
        self.parents += [parent] * len(tokens)
        self.ranks += range(len(tokens))

    def path(self, node: int) -> TokenArray:
        """The tokens from the context to one of them: int32 [n]."""
        path: list[int] = []
        while node != CONTEXT:
            path.append(self.tokens[node])
            node = self.parents[node]
        return np.array(path[::-1], dtype=np.int32)

    def draft(self, kept: Sequence[int], source: Source) -> Draft:
        """Some of them, each with those before it: depth first, the branch of the best ones first.

        So accepted tokens mostly lie next to each other in the KV cache.
        """
        below: dict[int, list[int]] = {}
        for i in sorted(kept, reverse=True):
            below.setdefault(self.parents[i], []).append(i)
        order, stack = list[int](), below.get(CONTEXT, [])
        while stack:
            order.append(stack.pop())
            stack += below.get(order[-1], ())
        confidences = tuple(self.confidences[i] for i in order)
        return Draft(self._tokens(order), (), confidences, source, self._parents(order))

    def request(self, model: str, context: TokenArray, nodes: Sequence[int]) -> ForwardRequest:
        """Let a model read some of them, each behind those before it."""
        if nodes[0] == CONTEXT:
            return ForwardRequest(model, context)
        n_read = len(self.read)
        self.read += nodes
        return ForwardRequest(model, context, 0, self._tokens(self.read), self._parents(self.read), n_read)

    def _tokens(self, order: Sequence[int]) -> TokenArray:
        return np.array([self.tokens[i] for i in order], dtype=np.int32)

    def _parents(self, order: Sequence[int]) -> TokenArray:
        place = {i: n for n, i in enumerate(order)}
        return np.array([place.get(self.parents[i], CONTEXT) for i in order], dtype=np.int32)


class Growth(Protocol):
    """How the tree of one round grows."""

    def expand(self, tree: CandidateTree) -> Sequence[int]:
        """Which tokens the draft reads next, in one step; first the context alone; none = enough."""

    def keep(self, tree: CandidateTree) -> Sequence[int]:
        """Which tokens the target verifies: a token only together with those before it."""


@runtime_checkable
class TreeLength(SequenceLength, Protocol):
    """A sequence's length that also lets trees grow."""

    def tree(self, grow: Callable[[TreePlan], Growth]) -> Growth | None:
        """How a tree grows in the coming round, as `grow` makes it; None where a chain is as good."""


@dataclass(slots=True)
class TreeDrafter(ModelDrafter):
    """Drafts trees where the length policy lets them grow, else chains."""

    trees: TreeLength = field(kw_only=True)

    def propose(self, context: TokenArray, length: SequenceLength) -> Drafting:
        """A tree, or a chain."""
        has_room = len(context) + DEEPEST <= self.context_size
        can_grow = has_room and self.fault is None and self.tokens is None and self.constraint is None
        growth = self.trees.tree(TreeGrowth) if can_grow else None
        return ModelDrafter.propose(self, context, length) if growth is None else self._grow(context, growth)

    def _grow(self, context: TokenArray, growth: Growth) -> Drafting:
        known, tree = self.known(context), CandidateTree()
        sampler = Sampler(self.sampling, self.n_prompt)
        while nodes := growth.expand(tree):
            try:
                forward = yield tree.request(self.model, known, nodes)
            except EVALUATION_FAULTS as error:
                self.note_fault(error)
                break
            for node, logits in zip(nodes, forward.logits[:, : self.n_drawn], strict=True):
                path = np.concatenate([known, tree.path(node)])
                tree.add(node, *candidates(logits, sampler, path, self.streams, N_CANDIDATES))
        return tree.draft(growth.keep(tree), self.source)


@dataclass(slots=True, eq=False)
class TreeGrowth:
    """The tree of one round of one sequence, as large as its plan says it pays."""

    plan: TreePlan
    _values: list[float] = field(default_factory=list)

    def expand(self, tree: CandidateTree) -> list[int]:
        """What the draft reads next: where looking some levels ahead pays most."""
        if not len(tree):
            return [CONTEXT]
        values = self._valued(tree)
        is_open = np.ones(len(values), dtype=bool)
        is_open[tree.read] = False
        unread = is_open.nonzero()[0]
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
            before = values[tree.parents[i]] if tree.parents[i] != CONTEXT else 1.0
            if tree.ranks[i]:  # no likelier than its better sibling
                chance = min(chance, values[i - 1] / max(before, 1e-12))
            values.append(chance * before)
        return np.array(values)


def _best(values: Array, prices: Array) -> tuple[int, float]:
    """How many of some tokens to verify, the most valuable first, and what that is worth."""
    values = values[: len(prices) - 1]
    worth = values.cumsum() - prices[1 : len(values) + 1]
    n = int(worth.argmax()) if len(worth) else 0
    return (n + 1, float(worth[n])) if len(worth) and worth[n] > 0 else (0, 0.0)
