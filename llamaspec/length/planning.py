"""How many draft tokens pay at given prices: arithmetic without memory.

A round of K draft tokens, each accepted with probability a, makes 1 + a + ... + a^K tokens and costs K draft
steps and one evaluation at width K + 1 (or wider, where wider is cheaper). Everything here follows from
that: section 3 of Leviathan et al., arXiv 2211.17192, with a measured cost for every width.
"""

from __future__ import annotations

from collections.abc import Sequence


def expected_accepted(acceptance: float, longest: int) -> list[float]:
    """Draft tokens that are accepted, on average, of 0 .. longest.

    Examples
    --------
    >>> expected_accepted(0.5, 3)
    [0.0, 0.5, 0.75, 0.875]
    """
    sums, standing = [0.0], 1.0
    for _ in range(longest):
        standing *= acceptance
        sums.append(sums[-1] + standing)
    return sums


def best_length(round_seconds: Sequence[float], acceptance: float) -> tuple[int, float]:
    """The best constant number of draft tokens, and its predicted speed divided by that of plain decoding.

    `round_seconds`: [longest + 1] of a round with 0, 1, ... draft tokens.
    """
    best, n_best = 1.0, 0
    for n, accepted in enumerate(expected_accepted(acceptance, len(round_seconds) - 1)):
        if (1.0 + accepted) * round_seconds[0] > best * round_seconds[n]:
            best, n_best = (1.0 + accepted) * round_seconds[0] / round_seconds[n], n
    return n_best, best


def break_even(round_seconds: Sequence[float]) -> float | None:
    """The smallest constant acceptance above which drafting beats plain decoding; None if none does."""
    if best_length(round_seconds, 1.0)[0] == 0:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):  # bisection, because more acceptance never makes a plan slower
        middle = (low + high) / 2
        low, high = (low, middle) if best_length(round_seconds, middle)[0] else (middle, high)
    return high


def stopping_threshold(costs: Sequence[float], gains: Sequence[float], rate: float) -> float:
    """How likely all draft tokens so far must be accepted for one more to pay.

    One more, or several: at a dip of the curve the next token may not pay by itself, but on the way to a
    width that is cheaper for each token. `m` more tokens gain s * gains[m], where s is the probability that
    those before are accepted; their seconds, costs[m], could have given `rate` tokens a second.
    """
    return min((rate * c / g for c, g in zip(costs[1:], gains[1:], strict=False)), default=float("inf"))
