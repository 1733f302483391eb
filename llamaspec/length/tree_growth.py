"""Trees whose tokens are worth their positions, and whose levels are worth a step of the draft.

The value of a token is the chance that the text takes it: the product of calibrated chances along its path.
The target verifies the most valuable ones, as many as pay; the draft reads on where what it would find pays
for one more step, or for several. With steep costs that is a chain. Knows no model and no clock.
tests/length/test_tree.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from llamaspec.length.acceptance import Acceptance
from llamaspec.length.allocator import Pledge
from llamaspec.length.tree import CONTEXT, CandidateTree
from llamaspec.values import Draft, Round

Array = npt.NDArray[np.float64]

N_CANDIDATES = 4  # for each position
SHARES = (
    0.45,
    0.13,
    0.06,
)  # of the positions that the first candidate misses: the second's, third's, fourth's
LEARNT = 0.02  # of the way to what was seen, with each such position
DEPTHS = (1, 2, 4, 8)  # steps that are looked ahead
WIDEST = 8  # tokens that the draft reads in one step
EDGE = 1.02  # what a tree must promise, next to the best chain
SUREST = (
    0.02  # a confidence below this is worth proportionally less; no chance is closer to 1 than this by ten
)


@dataclass(slots=True)
class TreeAcceptance:
    """How likely the candidates of a position are: what all rows have learnt of one draft."""

    first: Acceptance = field(default_factory=lambda: Acceptance(0.4, 0.8))
    others: Acceptance = field(default_factory=lambda: Acceptance(0.0, 1.0))
    shares: list[float] = field(default_factory=lambda: list(SHARES))

    def chance(self, rank: int, confidence: float) -> float:
        """That the target draws a candidate, where it comes as far."""
        chance = (self.others if rank else self.first).probability(confidence)
        return min(chance * min(confidence / SUREST, 1.0), 1.0 - SUREST / 10)

    def usual(self, acceptance: float) -> tuple[float, ...]:
        """Of candidates that are not known yet; `acceptance`: of the first."""
        return (acceptance, *((1.0 - acceptance) * share for share in self.shares))

    def learn(self, round_: Round) -> list[bool]:
        """Learn from a round; for each position that was verified, whether its first candidate was drawn."""
        found: list[bool] = []
        for node, drawn in zip((CONTEXT, *round_.path), (*round_.path, None), strict=True):
            children = round_.draft.children(node)
            if not children:
                break
            self._learn_position(round_.draft, children, drawn)
            found.append(children[0] == drawn)
        return found

    def _learn_position(self, draft: Draft, children: Sequence[int], drawn: int | None) -> None:
        for rank, child in enumerate(children):
            belief = self.others if rank else self.first
            belief.pass_tokens(1)
            belief.learn(child == drawn, draft.confidences[child])
            if rank and children[0] != drawn and rank <= len(self.shares):
                self.shares[rank - 1] += LEARNT * ((child == drawn) - self.shares[rank - 1])


@dataclass(slots=True, eq=False)
class TreeGrowth:
    """The tree of one round of one row.

    Parameters
    ----------
    acceptance : TreeAcceptance
    usual : tuple of float
        Chances of candidates that are not known yet.
    prices : [1 + N] float64
        What 0, 1, ... verified tokens cost, in tokens.
    steps : [1 + WIDEST] float64
        What a step of the draft costs that reads 0, 1, ... tokens, in tokens.
    pledge : Pledge
        The row's part of the coming evaluation.
    rate : float
        Tokens per second that time is worth.
    """

    acceptance: TreeAcceptance
    usual: tuple[float, ...]
    prices: Array
    steps: Array
    pledge: Pledge
    rate: float
    n_candidates: int = N_CANDIDATES
    _values: list[float] = field(default_factory=list)

    def expand(self, tree: CandidateTree) -> list[int]:
        """What the draft reads next: where it pays."""
        self.pledge.is_drafting = True
        return self._most_promising(tree) if len(tree) else [CONTEXT]

    def keep(self, tree: CandidateTree) -> list[int]:
        """The most valuable tokens, as many as pay."""
        values = self._valued(tree)
        order = (-values).argsort(kind="stable")
        n, _ = _best(values[order], self.prices)
        self.pledge.n_draft, self.pledge.is_drafting = n, False
        return sorted(order[:n].tolist())

    def _valued(self, tree: CandidateTree) -> Array:
        """The chance of each candidate that the text takes it: less than that of the one before it."""
        values = self._values
        for i in range(len(values), len(tree)):
            chance = self.acceptance.chance(tree.ranks[i], tree.confidences[i])
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
        _, best = _best(-np.sort(-values), self.prices)
        chosen: list[int] = []
        for depth in DEPTHS:
            ahead = np.outer(values[unread], _ahead(self.usual, depth)).ravel()
            pool = -np.sort(-np.concatenate([values, ahead]))
            n, worth = _best(pool, self.prices)
            if not n:
                continue
            nodes = unread[values[unread] * self.usual[0] >= pool[n - 1]]
            worth -= depth * float(self.steps[len(nodes)])
            if len(nodes) and worth > best:
                best, chosen = worth, nodes.tolist()
        return chosen


def tree_speed_up(usual: tuple[float, ...], prices: Array, steps: Array) -> float:
    """Of the best tree, next to none, as `speed_up` of a chain; prices in tokens of plain decoding."""
    best = 1.0
    for depth in DEPTHS:
        values = _ahead(usual, depth)[: len(prices) - 1]
        n = np.arange(1, len(values) + 1)
        widths = np.clip(n / depth, 1, WIDEST)
        stepping = depth * np.interp(widths, np.arange(len(steps)), steps)
        best = max(best, float(((1.0 + values.cumsum()) / (1.0 + prices[n] + stepping)).max()))
    return best


def _best(values: Array, prices: Array) -> tuple[int, float]:
    """How many of some tokens to verify, the most valuable first, and what that is worth."""
    values = values[: len(prices) - 1]
    worth = values.cumsum() - prices[1 : len(values) + 1]
    n = int(worth.argmax()) if len(worth) else 0
    return (n + 1, float(worth[n])) if len(worth) and worth[n] > 0 else (0, 0.0)


def _ahead(usual: tuple[float, ...], depth: int) -> Array:
    """The most valuable tokens of a tree of so many levels, where nothing is known yet, best first."""
    return _usual_values(tuple(round(chance, 2) for chance in usual), depth)


@lru_cache(maxsize=256)
def _usual_values(usual: tuple[float, ...], depth: int) -> Array:
    level, found = np.ones(1), np.empty(0)
    for _ in range(depth):
        level = -np.sort(-np.outer(level, usual).ravel())[:32]
        found = -np.sort(-np.concatenate([found, level]))[:64]
    return found
