"""Shares of a surprise, by hand."""

from __future__ import annotations

import pytest

from llamaspec.length.beliefs import Belief, learn


def test_a_surprise_is_shared_by_variance() -> None:
    """Variances 4 and 1 and noise 3: half of the surprise, an eighth, and the rest is noise."""
    scale, own = Belief(1.0, 4.0), Belief(0.0, 1.0)
    learn([(scale, 1.0), (own, 1.0)], 0.8, 3.0)
    assert (scale.mean, own.mean) == pytest.approx((1.4, 0.1))
    assert (scale.variance, own.variance) == pytest.approx((2.0, 0.875))


def test_a_weight_scales_the_part() -> None:
    """Weight 2: variance 4 of 5 in the sum, so the mean moves by half of 0.8 of the surprise."""
    slope = Belief(0.0, 1.0)
    learn([(slope, 2.0)], 1.0, 1.0)
    assert slope.mean == pytest.approx(0.4)
    assert slope.variance == pytest.approx(0.2)


def test_many_measurements_find_the_sum() -> None:
    parts = [(Belief(0.0, 1.0), 1.0), (Belief(0.0, 0.1), 3.0)]
    for _ in range(200):
        learn(parts, 2.0 - sum(belief.mean * weight for belief, weight in parts), 0.1)
    assert sum(belief.mean * weight for belief, weight in parts) == pytest.approx(2.0, abs=0.01)
