"""Prices in round numbers, answers worked out by hand."""

from __future__ import annotations

import pytest

from llamaspec.length.planning import best_length, break_even, expected_accepted, stopping_threshold


def test_expected_accepted_is_a_geometric_sum() -> None:
    assert expected_accepted(0.5, 3) == [0.0, 0.5, 0.75, 0.875]
    assert expected_accepted(1.0, 2) == [0.0, 1.0, 2.0]
    assert expected_accepted(0.0, 2) == [0.0, 0.0, 0.0]


def test_the_best_length_and_the_acceptance_it_needs() -> None:
    """Rounds of 0, 1 and 2 draft tokens: 1 + a + a² = 1.75 tokens in 1.75 seconds at a = 0.5."""
    n_best, speed_up = best_length([1.0, 2.6, 1.75], 0.8)
    assert n_best == 2
    assert speed_up == pytest.approx(2.44 / 1.75)
    assert best_length([1.0, 2.6, 1.75], 0.4) == (0, 1.0)
    assert break_even([1.0, 2.6, 1.75]) == pytest.approx(0.5)
    assert break_even([1.0, 2.1]) is None


def test_the_threshold_looks_past_a_step() -> None:
    """One more token costs 1.1 and gains 0.5; two more cost 1.4 and gain 0.75."""
    assert stopping_threshold([0.0, 1.1, 1.4], [0.0, 0.5, 0.75], rate=1.0) == pytest.approx(1.4 / 0.75)
    assert stopping_threshold([0.0, 1.1, 1.4], [0.0, 0.5, 0.75], rate=2.0) == pytest.approx(2.8 / 0.75)
    assert stopping_threshold([0.0, 0.3], [0.0, 0.5], rate=1.0) == pytest.approx(0.3 / 0.5)
    assert stopping_threshold([0.0], [0.0], rate=1.0) == float("inf")
