"""Trees of draft tokens: their values, and how they grow.

The value of a token is its probability of acceptance: the product of calibrated probabilities along its path.
The target verifies the most valuable tokens, as many as are worth their cost. The draft model evaluates more
tokens while the expected gain exceeds the cost of a step. Knows no model and no clock.
tests/length/test_tree.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np

from llamaspec.length.acceptance import Acceptance
from llamaspec.length.belief import Array
from llamaspec.length.costs import Costs
from llamaspec.protocols import SequenceLength
from llamaspec.values import Draft, Round, Source, TokenArray

CONTEXT = -1  # in place of the index of a draft token: the sequence before the draft
SHARES = (0.45, 0.13, 0.06)  # of positions that the first candidate misses: of the second, third and fourth
LEARNT = 0.02  # weight of one such position in these shares
DEPTHS = (1, 2, 4, 8)  # draft steps to look ahead
WIDEST = 8  # tokens that the draft model evaluates in one step
SUREST = 0.02  # below this confidence, chances shrink in proportion; no chance exceeds 1 - SUREST / 10
EDGE = 1.1  # minimum expected speed of a tree, next to the best chain


@dataclass(slots=True)
class TreeAcceptance:
    """How likely the target draws each candidate of a position, as learnt from all completions."""

    first: Acceptance = field(default_factory=Acceptance)  # of first candidates: as in chains
    others: Acceptance = field(default_factory=lambda: Acceptance(level=0.0, slope=1.0))
    shares: list[float] = field(default_factory=lambda: list(SHARES))

    def chance(self, rank: int, confidence: float) -> float:
        """Return the chance that the target draws a candidate, given that it draws the token before."""
        chance = (self.others if rank else self.first).probability(confidence)
        return min(chance * min(confidence / SUREST, 1.0), 1.0 - SUREST / 10)

    def usual(self, acceptance: float) -> tuple[float, ...]:
        """Return the chances of unknown candidates, to two digits; `acceptance` is that of the first."""
        return tuple(round(each, 2) for each in (acceptance, *((1 - acceptance) * s for s in self.shares)))

    def learn(self, round_: Round) -> None:
        """Learn from a round how often the target drew the other candidates."""
        for node, drawn in zip((CONTEXT, *round_.path), (*round_.path, None), strict=True):
            children = round_.draft.children(node)
            for i, child in enumerate(children[1:]):
                self.others.learn(child == drawn, round_.confidences[child])
                if i < len(self.shares) and children[0] != drawn:
                    self.shares[i] += LEARNT * ((child == drawn) - self.shares[i])


@dataclass(slots=True, eq=False)
class CandidateTree:
    """All candidates of a round; of siblings, the best comes first."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # index of each parent, or `CONTEXT`
    confidences: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)  # among its siblings, from 0
    evaluated: list[int] = field(default_factory=list)  # nodes that the draft model evaluated, in this order

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, tokens: Sequence[int], confidences: Sequence[float]) -> None:
        """Add the candidates after a token, or after the context."""
        self.tokens += tokens
        self.confidences += confidences
        self.parents += [parent] * len(tokens)
        self.ranks += range(len(tokens))

    def path(self, node: int) -> TokenArray:
        """Return the tokens from the context to a node: int32 [n]."""
        path: list[int] = []
        while node != CONTEXT:
            path.append(self.tokens[node])
            node = self.parents[node]
        return np.array(path[::-1], dtype=np.int32)

    def draft(self, kept: Sequence[int], source: Source = Source.MODEL) -> Draft:
        """Return a draft of `kept`, which includes all ancestors: depth first, the best branch first.

        In this order, accepted tokens are mostly adjacent in the KV cache.
        """
        below: dict[int, list[int]] = {}
        for i in sorted(kept, reverse=True):
            below.setdefault(self.parents[i], []).append(i)
        order, stack = list[int](), below.get(CONTEXT, [])
        while stack:
            order.append(stack.pop())
            stack += below.get(order[-1], ())
        return self.listed(order, source)

    def listed(self, order: Sequence[int], source: Source = Source.MODEL) -> Draft:
        """Return a draft of these nodes in this order, in which each comes after its parent."""
        place = {i: n for n, i in enumerate(order)}
        return Draft(
            np.array([self.tokens[i] for i in order], dtype=np.int32),
            (),
            tuple(self.confidences[i] for i in order),
            source,
            np.array([place.get(self.parents[i], CONTEXT) for i in order], dtype=np.int32),
        )


class Growth(Protocol):
    """Decides how the tree of one round grows."""

    def expand(self, tree: CandidateTree) -> Sequence[int]:
        """Return the nodes that the draft model evaluates in the next step; first `CONTEXT`; none = stop."""

    def keep(self, tree: CandidateTree) -> Sequence[int]:
        """Return the nodes that the target verifies, each with its ancestors."""


@runtime_checkable
class TreeLength(SequenceLength, Protocol):
    """A `SequenceLength` that also lets trees grow."""

    def tree(self) -> Growth | None:
        """Return how the next round's tree grows; None if a chain is as good."""


@dataclass(slots=True, eq=False)
class TreePlan:
    """Grows the tree of one round by expected gains and costs."""

    acceptance: TreeAcceptance
    usual: tuple[float, ...]  # chances of candidates that are not known yet
    prices: Array  # [1 + N] cost of 0, 1, ... verified tokens, in tokens
    steps: Array  # [1 + WIDEST] cost of a draft step that evaluates 0, 1, ... tokens, in tokens
    _values: list[float] = field(default_factory=list, init=False)  # of the known candidates

    def expand(self, tree: CandidateTree) -> list[int]:
        """Return the nodes whose descendants have the largest expected net gain, some levels ahead."""
        if not len(tree):
            return [CONTEXT]
        values = self._valued(tree)
        is_open = np.ones(len(values), dtype=bool)
        is_open[tree.evaluated] = False
        unread = is_open.nonzero()[0]
        unread = unread[(-values[unread]).argsort(kind="stable")][:WIDEST]
        _, best = self._best(-np.sort(-values))
        chosen: list[int] = []
        for depth in DEPTHS:
            ahead = np.outer(values[unread], looked_ahead(self.usual, depth)).ravel()
            pool = -np.sort(-np.concatenate([values, ahead]))
            n, gain = self._best(pool)
            if not n:
                continue
            nodes = unread[values[unread] * self.usual[0] >= pool[n - 1]]
            gain -= depth * float(self.steps[len(nodes)])
            if len(nodes) and gain > best:
                best, chosen = gain, nodes.tolist()
        return chosen

    def keep(self, tree: CandidateTree) -> list[int]:
        """Return the most valuable nodes, as many as are worth their cost."""
        values = self._valued(tree)
        order = (-values).argsort(kind="stable")
        n, _ = self._best(values[order])
        return sorted(order[:n].tolist())

    def _valued(self, tree: CandidateTree) -> Array:
        """Return each candidate's probability of acceptance, which is below its parent's."""
        values = self._values
        for i in range(len(values), len(tree)):
            chance = self.acceptance.chance(tree.ranks[i], tree.confidences[i])
            before = values[tree.parents[i]] if tree.parents[i] != CONTEXT else 1.0
            if tree.ranks[i]:  # not above its better sibling's
                chance = min(chance, values[i - 1] / max(before, 1e-12))
            values.append(chance * before)
        return np.array(values)

    def _best(self, values: Array) -> tuple[int, float]:
        """Return the number of tokens to verify, given values in descending order, and the net gain."""
        values = values[: len(self.prices) - 1]
        gains = values.cumsum() - self.prices[1 : len(values) + 1]
        n = int(gains.argmax()) if len(gains) else 0
        return (n + 1, float(gains[n])) if len(gains) and gains[n] > 0 else (0, 0.0)


def plan_tree(
    acceptance: TreeAcceptance,
    chance: float,
    prices: Array,
    step: float,
    costs: Costs,
    rate: float,
    plain: float,
) -> TreePlan | None:
    """Return a plan if a tree is expected to be faster than the best chain by `EDGE`; else None.

    `chance`: that a first candidate is accepted. `prices`: seconds of 0, 1, ... verified tokens, [1 + N].
    `step`, `plain`: seconds of a draft step, of a plain token. `rate`: tokens per second of the chain.
    """
    usual = acceptance.usual(chance)
    if len(prices) < 3 or rate * prices[-1] > (len(prices) - 1) * usual[1]:
        return None  # second candidates are not worth their positions
    widths = costs.seconds_of(
        1, WIDEST
    )  # a guess: wider draft steps slow down as the target's evaluations do
    steps, best = step * np.concatenate(([0.0], widths / widths[0])), 0.0
    for depth in DEPTHS:
        values = looked_ahead(usual, depth)[: len(prices) - 1]
        n = np.arange(1, len(values) + 1)
        stepping = depth * np.interp(np.clip(n / depth, 1, WIDEST), np.arange(len(steps)), steps)
        best = max(best, float(((1.0 + values.cumsum()) / (plain + prices[n] + stepping)).max()))
    return TreePlan(acceptance, usual, best * prices, best * steps) if best >= EDGE * rate else None


@lru_cache(maxsize=256)
def looked_ahead(usual: tuple[float, ...], depth: int) -> Array:
    """Return the greatest values in a tree of unknown candidates with `depth` levels, descending."""
    level, found = np.ones(1), np.empty(0)
    for _ in range(depth):
        level = -np.sort(-np.outer(level, usual).ravel())[:32]
        found = -np.sort(-np.concatenate([found, level]))[:64]
    return found
