"""What trees of draft tokens are worth: how likely candidates are, and what a round's tree may cost.

How a tree grows is the drafter's affair. Knows no model and no clock. tests/length/test_tree.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from llamaspec.length.acceptance import Acceptance
from llamaspec.values import Draft, Round

Array = npt.NDArray[np.float64]

SHARES = (
    0.45,
    0.13,
    0.06,
)  # of the positions that the first candidate misses: the second's, third's, fourth's
LEARNT = 0.02  # of the way to what was seen, with each such position
DEPTHS = (1, 2, 4, 8)  # steps that are looked ahead
WIDEST = 8  # tokens that the draft reads in one step
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
        for node, drawn in zip((-1, *round_.path), (*round_.path, None), strict=True):
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


@dataclass(frozen=True, slots=True, eq=False)
class TreePlan:
    """What the tree of one round of one row may cost, and what it can gain."""

    acceptance: TreeAcceptance
    usual: tuple[float, ...]  # chances of candidates that are not known yet
    prices: Array  # [1 + N] what 0, 1, ... verified tokens cost, in tokens
    steps: Array  # [1 + WIDEST] what a step of the draft costs that reads 0, 1, ... tokens, in tokens
    rate: float  # tokens per second that this time is worth


def tree_speed_up(usual: tuple[float, ...], prices: Array, steps: Array) -> float:
    """Of the best tree, next to none, as `speed_up` of a chain; prices in tokens of plain decoding."""
    best = 1.0
    for depth in DEPTHS:
        values = looked_ahead(usual, depth)[: len(prices) - 1]
        n = np.arange(1, len(values) + 1)
        widths = np.clip(n / depth, 1, WIDEST)
        stepping = depth * np.interp(widths, np.arange(len(steps)), steps)
        best = max(best, float(((1.0 + values.cumsum()) / (1.0 + prices[n] + stepping)).max()))
    return best


def looked_ahead(usual: tuple[float, ...], depth: int) -> Array:
    """The most valuable tokens of a tree of so many levels, where nothing is known yet, best first."""
    return _usual_values(tuple(round(chance, 2) for chance in usual), depth)


@lru_cache(maxsize=256)
def _usual_values(usual: tuple[float, ...], depth: int) -> Array:
    level, found = np.ones(1), np.empty(0)
    for _ in range(depth):
        level = -np.sort(-np.outer(level, usual).ravel())[:32]
        found = -np.sort(-np.concatenate([found, level]))[:64]
    return found
