"""How many guesses pay at given prices: arithmetic without memory.

A round of K guesses, each of which stands with chance a, brings 1 + a + ... + a^K tokens and costs K steps
of the draft and one evaluation at width K + 1 (or wider, where wider is cheaper). Everything here follows
from that. Knows nothing of time series. tests/rules/test_planning.py has hand-computed tables.

References: section 3 of Leviathan et al., arXiv 2211.17192, with a measured cost for every width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llamaspec.values import CostCurve


@dataclass(frozen=True, slots=True)
class Prices:
    """What a round costs."""

    batch_seconds: Sequence[float]  # [K] of an evaluation that judges K guesses, K = 0 .. longest
    step_seconds: float  # one guess of the draft
    rest_seconds: float = 0.0  # of a round, besides the models

    @property
    def longest(self) -> int:
        """The largest number of guesses that has a price."""
        return len(self.batch_seconds) - 1

    @property
    def plain_seconds(self) -> float:
        """A round without guesses: what one token costs in plain decoding."""
        return self.batch_seconds[0] + self.rest_seconds

    def seconds(self, n_guesses: int) -> float:
        """A round with a number of guesses."""
        return self.batch_seconds[n_guesses] + n_guesses * self.step_seconds + self.rest_seconds


@dataclass(frozen=True, slots=True)
class FixedPlan:
    """The best number of guesses for a constant acceptance."""

    n_guesses: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class BestFixedLength:
    """The best constant number of guesses, and what it is worth."""

    n_guesses: int  # 0 where guessing does not pay
    speed_up: float  # predicted tokens per second, divided by those of plain decoding


def expected_accepted(chance: float, longest: int) -> list[float]:
    """Guesses that stand, on average, of 0 .. longest guesses.

    Examples
    --------
    >>> expected_accepted(0.5, 3)
    [0.0, 0.5, 0.75, 0.875]
    """
    sums, standing = [0.0], 1.0
    for _ in range(longest):
        standing *= chance
        sums.append(sums[-1] + standing)
    return sums


def best_plan(prices: Prices, chance: float, longest: int) -> FixedPlan:
    """The fastest of 1 .. longest guesses; plain decoding is not among the candidates."""
    best, n_best, tokens, standing = 0.0, 0, 1.0, 1.0
    batch, step, rest = prices.batch_seconds, prices.step_seconds, prices.rest_seconds
    for n in range(1, longest + 1):
        standing *= chance
        tokens += standing
        rate = tokens / (batch[n] + n * step + rest)
        if rate > best:
            best, n_best = rate, n
    return FixedPlan(n_best, best)


def stopping_thresholds(prices: Prices, chance: float, rate: float) -> list[float]:
    """How likely all guesses so far must stand for one more to pay, after 0 .. longest - 1 guesses.

    One more, or several: at a dip of the curve the next guess may not pay by itself, but on the way to a
    width that is cheaper for each token. `m` more guesses bring s * (a + ... + a^m) tokens, where s is the
    chance that those before stand; their time could have brought `rate` tokens a second.
    """
    batch, step, longest = prices.batch_seconds, prices.step_seconds, prices.longest
    gains = expected_accepted(max(chance, 1e-6), longest)
    return [
        min(rate * (m * step + batch[n + m] - batch[n]) / gains[m] for m in range(1, longest - n + 1))
        for n in range(longest)
    ]


def prices_of(curve: CostCurve) -> Prices:
    """Prices from a probe: straight lines between its widths, padded where a wider batch is cheaper."""
    widths = np.arange(1, curve.widths[-1] + 1)
    seconds = np.interp(widths, curve.widths, curve.verify_seconds)
    padded = np.minimum.accumulate(seconds[::-1])[::-1]
    return Prices(tuple(padded.tolist()), curve.draft_step_seconds)


def best_fixed_length(curve: CostCurve, acceptance: float) -> BestFixedLength:
    """The constant number of guesses with the highest predicted speed.

    Parameters
    ----------
    curve : CostCurve
        At most its widest width less one are considered.
    acceptance : float
        Chance that a guess stands given that those before it do, in [0, 1].

    Examples
    --------
    >>> best_fixed_length(CostCurve((1, 2), (1.0, 1.0), 0.25), acceptance=0.5)
    BestFixedLength(n_guesses=1, speed_up=1.2)

    Raises
    ------
    ValueError
        The acceptance is no chance.
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance must be in [0, 1], got {acceptance}")
    prices = prices_of(curve)
    plan = best_plan(prices, acceptance, prices.longest)
    speed_up = plan.tokens_per_second * prices.plain_seconds
    return BestFixedLength(plan.n_guesses, speed_up) if speed_up > 1 else BestFixedLength(0, 1.0)


def break_even_acceptance(curve: CostCurve) -> float | None:
    """The smallest constant acceptance above which guessing beats plain decoding; None if none does."""
    return break_even(prices_of(curve))


def break_even(prices: Prices) -> float | None:
    """The same, at given prices: bisection, because more acceptance never makes a plan slower."""
    plain = 1.0 / prices.plain_seconds
    if best_plan(prices, 1.0, prices.longest).tokens_per_second <= plain:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if best_plan(prices, middle, prices.longest).tokens_per_second > plain:
            high = middle
        else:
            low = middle
    return high
