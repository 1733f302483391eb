"""What trees of draft tokens are worth: how likely candidates are, and what a round's tree may cost.

How a tree grows is the drafter's affair; the policy calls `plan_tree`. Knows no model and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from llamaspec.length.acceptance import Acceptance
from llamaspec.length.costs import Array, Costs
from llamaspec.values import Round

SHARES = (0.45, 0.13, 0.06)  # of positions that the first candidate misses: the second's, third's, fourth's
LEARNT = 0.02  # of the way to what was seen, with each such position
DEPTHS = (1, 2, 4, 8)  # steps that are looked ahead
WIDEST = 8  # tokens that the draft reads in one step
SUREST = 0.02  # a confidence below is worth proportionally less; no chance is closer to 1 than a tenth of it
EDGE = 1.1  # what a tree must promise, next to the best chain


@dataclass(slots=True)
class TreeAcceptance:
    """How likely the candidates of a position are: what all rows have learnt of one draft."""

    first: Acceptance = field(default_factory=Acceptance)  # the draft's; the policy teaches it
    others: Acceptance = field(default_factory=lambda: Acceptance(level=0.0, slope=1.0))
    shares: list[float] = field(default_factory=lambda: list(SHARES))

    def chance(self, rank: int, confidence: float) -> float:
        """That the target draws a candidate, where it comes as far."""
        chance = (self.others if rank else self.first).probability(confidence)
        return min(chance * min(confidence / SUREST, 1.0), 1.0 - SUREST / 10)

    def usual(self, acceptance: float) -> tuple[float, ...]:
        """Of candidates that are not known yet, to two digits; `acceptance`: of the first."""
        return tuple(round(each, 2) for each in (acceptance, *((1 - acceptance) * s for s in self.shares)))

    def learn(self, round_: Round) -> None:
        """Learn from a round which of the other candidates the target drew."""
        for node, drawn in zip((-1, *round_.path), (*round_.path, None), strict=True):
            children = round_.draft.children(node)
            for i, child in enumerate(children[1:]):
                self.others.learn(child == drawn, round_.confidences[child])
                if i < len(self.shares) and children[0] != drawn:
                    self.shares[i] += LEARNT * ((child == drawn) - self.shares[i])


@dataclass(frozen=True, slots=True, eq=False)
class TreePlan:
    """What the tree of one round of one row may cost, and what it can gain."""

    acceptance: TreeAcceptance
    usual: tuple[float, ...]  # chances of candidates that are not known yet
    prices: Array  # [1 + N] what 0, 1, ... verified tokens cost, in tokens
    steps: Array  # [1 + WIDEST] what a step of the draft costs that reads 0, 1, ... tokens, in tokens
    rate: float  # tokens per second that this time is worth


def plan_tree(
    acceptance: TreeAcceptance,
    chance: float,
    prices: Array,
    step: float,
    costs: Costs,
    rate: float,
    plain: float,
) -> TreePlan | None:
    """A tree instead of the best chain, where that promises a tenth more.

    `chance`: that a first candidate is accepted. `prices`: seconds of 0, 1, ... verified tokens, [1 + N].
    `step`, `plain`: seconds of a draft step, of a plain token. `rate`: tokens per second of the chain.
    """
    usual = acceptance.usual(chance)
    if len(prices) < 3 or rate * prices[-1] > (len(prices) - 1) * usual[1]:
        return None  # second candidates are not worth their positions
    widths = costs.padded_seconds(1, WIDEST)  # a step of the draft costs more where an evaluation does
    steps, best = step * np.concatenate(([0.0], widths / widths[0])), 0.0
    for depth in DEPTHS:
        values = looked_ahead(usual, depth)[: len(prices) - 1]
        n = np.arange(1, len(values) + 1)
        stepping = depth * np.interp(np.clip(n / depth, 1, WIDEST), np.arange(len(steps)), steps)
        best = max(best, float(((1.0 + values.cumsum()) / (plain + prices[n] + stepping)).max()))
    return TreePlan(acceptance, usual, best * prices, best * steps, best) if best >= EDGE * rate else None


@lru_cache(maxsize=256)
def looked_ahead(usual: tuple[float, ...], depth: int) -> Array:
    """The most valuable tokens of a tree of so many levels, where nothing is known yet, best first."""
    level, found = np.ones(1), np.empty(0)
    for _ in range(depth):
        level = -np.sort(-np.outer(level, usual).ravel())[:32]
        found = -np.sort(-np.concatenate([found, level]))[:64]
    return found
