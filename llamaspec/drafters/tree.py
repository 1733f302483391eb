"""Trees of draft tokens from a small model, which evaluates a whole level in one step.

The candidates of a position have the greatest log q + g, with the noise g that the target will sample with;
the first is the token that a chain would draft. The value of a token is its probability of acceptance: the
product of calibrated probabilities along its path. The target verifies the most valuable tokens while each is
worth its cost; the draft model expands tokens while the expected gain exceeds the cost of the step. Only the
coupled rule verifies trees. tests/drafters/test_tree.py.
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
from llamaspec.sampling.filters import Sampler, candidates
from llamaspec.values import Draft, ForwardRequest, Source, TokenArray

CONTEXT = -1  # in place of the index of a draft token: the text before the draft
N_CANDIDATES = 4  # for each position
DEEPEST = 64  # maximum depth of a tree


@dataclass(slots=True, eq=False)
class CandidateTree:
    """All candidates of a round; siblings are in order, the best first."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # index of the parent; -1 = the context
    confidences: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)  # among its siblings, from 0
    read: list[int] = field(default_factory=list)  # those that the draft model has evaluated, in this order

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, tokens: Sequence[int], confidences: Sequence[float]) -> None:
        """Add candidates that follow a token, or the context."""
        self.tokens += tokens
        self.confidences += confidences
        self.parents += [parent] * len(tokens)
        self.ranks += range(len(tokens))

    def path(self, node: int) -> TokenArray:
        """The tokens from the context to a node: int32 [n]."""
        path: list[int] = []
        while node != CONTEXT:
            path.append(self.tokens[node])
            node = self.parents[node]
        return np.array(path[::-1], dtype=np.int32)

    def draft(self, kept: Sequence[int], source: Source) -> Draft:
        """A draft of some nodes and their ancestors: depth first, the best branch first.

        In this order accepted tokens are mostly adjacent in the KV cache.
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
        """Request the evaluation of some nodes, each after its ancestors."""
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
    """Decides how the tree of one round grows."""

    def expand(self, tree: CandidateTree) -> Sequence[int]:
        """The nodes that the draft model evaluates next, in one step; first the context; none = stop."""

    def keep(self, tree: CandidateTree) -> Sequence[int]:
        """The nodes that the target verifies; each with its ancestors."""


@runtime_checkable
class TreeLength(SequenceLength, Protocol):
    """A sequence's length that also lets trees grow."""

    def tree(self, grow: Callable[[TreePlan], Growth]) -> Growth | None:
        """The growth of the next round's tree, made by `grow`; None if a chain is as good."""


@dataclass(slots=True)
class TreeDrafter(ModelDrafter):
    """Drafts trees if the length policy allows them, else chains."""

    trees: TreeLength = field(kw_only=True)

    def propose(self, context: TokenArray, length: SequenceLength) -> Drafting:
        """Draft a tree or a chain."""
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
    """Grows the tree of one round of one sequence by the expected gain and cost in its plan."""

    plan: TreePlan
    _values: list[float] = field(default_factory=list)

    def expand(self, tree: CandidateTree) -> list[int]:
        """The nodes whose descendants, some levels ahead, promise the largest net gain."""
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
        """The most valuable nodes, as many as are worth their cost."""
        values = self._valued(tree)
        order = (-values).argsort(kind="stable")
        n, _ = _best(values[order], self.plan.prices)
        return sorted(order[:n].tolist())

    def _valued(self, tree: CandidateTree) -> Array:
        """Each candidate's probability of acceptance, which is below its parent's."""
        values = self._values
        for i in range(len(values), len(tree)):
            chance = self.plan.acceptance.chance(tree.ranks[i], tree.confidences[i])
            before = values[tree.parents[i]] if tree.parents[i] != CONTEXT else 1.0
            if tree.ranks[i]:  # not above its better sibling's
                chance = min(chance, values[i - 1] / max(before, 1e-12))
            values.append(chance * before)
        return np.array(values)


def _best(values: Array, prices: Array) -> tuple[int, float]:
    """The number of tokens to verify, the most valuable first, and the net gain."""
    values = values[: len(prices) - 1]
    worth = values.cumsum() - prices[1 : len(values) + 1]
    n = int(worth.argmax()) if len(worth) else 0
    return (n + 1, float(worth[n])) if len(worth) and worth[n] > 0 else (0, 0.0)
