"""Unknown numbers, learnt from noisy measurements of their sums.

A measurement differs from what was expected by a surprise. Each part of the sum takes the share that its
variance has in the whole, and is surer afterwards: a Kalman filter that keeps no covariances. Costs are sums
of logarithms of seconds, acceptance a sum of log-odds. tests/length/test_beliefs.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Belief:
    """A number that is not known exactly."""

    mean: float
    variance: float


Part = tuple[Belief, float]  # and how much it weighs in the sum


def learn(parts: Sequence[Part], surprise: float, noise: float) -> None:
    """Take in a measurement that exceeds the expected sum by `surprise`; `noise` is its variance."""
    total = noise + sum([weight * weight * belief.variance for belief, weight in parts])
    for belief, weight in parts:
        gain = weight * belief.variance / total
        belief.mean += gain * surprise
        belief.variance *= 1.0 - gain * weight
