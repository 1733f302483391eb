"""What draft tokens gain, where each is accepted with the same probability."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat
from operator import mul


def expected_accepted(acceptance: float, longest: int) -> list[float]:
    """Draft tokens that are accepted, on average, of 0 .. longest.

    Examples
    --------
    >>> expected_accepted(0.5, 3)
    [0.0, 0.5, 0.75, 0.875]
    """
    return [*accumulate(accumulate(repeat(acceptance, longest), mul), initial=0.0)]


def speed_up(costs: Sequence[float], gains: Sequence[float], plain_rate: float) -> float:
    """Of the best number of draft tokens, next to none: tokens of a row over its share of the time."""
    return max((1.0 + gain) / (1.0 + plain_rate * cost) for cost, gain in zip(costs, gains, strict=False))
