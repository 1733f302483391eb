"""What a measured curve says of draft lengths, worked out by hand."""

from __future__ import annotations

import pytest

from llamaspec.length.cost_curve import CostCurve
from llamaspec.measure.saturation import (
    BestFixedLength,
    best_fixed_length,
    best_length,
    break_even,
    break_even_acceptance,
    knees,
    round_seconds,
    saturation_width,
)

DIP = CostCurve((1, 2, 3, 4), (1.0, 2.0, 3.0, 1.5), 0.1)  # width 4 is cheaper than 2 and 3


def test_rounds_interpolate_and_pad() -> None:
    assert round_seconds(DIP) == pytest.approx([1.0, 1.6, 1.7, 1.8])
    assert round_seconds(CostCurve((1, 3), (1.0, 2.0), 0.0)) == [1.0, 1.5, 2.0]


@pytest.mark.parametrize(
    ("curve", "acceptance", "n_guesses", "speed_up"),
    [
        (DIP, 0.8, 3, 2.952 / 1.8),  # two guesses: 2.44 / 1.7
        (DIP, 0.0, 0, 1.0),
        (CostCurve((1, 2), (1.0, 1.5), 0.1), 0.5, 0, 1.0),  # one guess: 1.5 / 1.6
        (CostCurve((1, 2), (1.0, 1.5), 0.1), 0.8, 1, 1.8 / 1.6),
        (CostCurve((1, 2, 3), (2.0, 2.0, 2.0), 1.0), 0.5, 0, 1.0),  # a tie is not worth a draft
        (CostCurve((1, 2, 3), (1.0, 1.0, 1.0), 0.0), 1.0, 2, 3.0),
        (CostCurve((1,), (1.0,), 0.1), 0.9, 0, 1.0),  # nothing but width 1 was measured
    ],
)
def test_best_fixed_length(curve: CostCurve, acceptance: float, n_guesses: int, speed_up: float) -> None:
    best = best_fixed_length(curve, acceptance)
    assert best == BestFixedLength(n_guesses, pytest.approx(speed_up))  # type: ignore[arg-type]


def test_best_fixed_length_wants_a_probability() -> None:
    with pytest.raises(ValueError, match=r"acceptance must be in \[0, 1\], got 1.2"):
        best_fixed_length(DIP, 1.2)


@pytest.mark.parametrize(
    ("curve", "acceptance"),
    [
        (CostCurve((1, 2), (1.0, 1.5), 0.1), 0.6),  # (1 + a) / 1.6 > 1
        (CostCurve((1, 2), (1.0, 2.0), 0.1), None),  # 2 tokens in 2.1
        (CostCurve((1, 2), (1.0, 0.5), 0.1), 0.2),  # plain decoding pads too: (1 + a) / 0.6 > 1 / 0.5
        (CostCurve((1, 2, 3), (1.0, 2.5, 1.55), 0.1), 0.5),  # two guesses: 1 + a + a² = 1.75
        (CostCurve((1,), (1.0,), 0.0), None),
    ],
)
def test_break_even_acceptance(curve: CostCurve, acceptance: float | None) -> None:
    expected = None if acceptance is None else pytest.approx(acceptance, abs=1e-9)
    assert break_even_acceptance(curve) == expected


def test_the_best_length_and_the_acceptance_it_needs() -> None:
    """Rounds of 0, 1 and 2 draft tokens: 1 + a + a² = 1.75 tokens in 1.75 seconds at a = 0.5."""
    n_best, speed_up = best_length([1.0, 2.6, 1.75], 0.8)
    assert n_best == 2
    assert speed_up == pytest.approx(2.44 / 1.75)
    assert best_length([1.0, 2.6, 1.75], 0.4) == (0, 1.0)
    assert break_even([1.0, 2.6, 1.75]) == pytest.approx(0.5)
    assert break_even([1.0, 2.1]) is None


@pytest.mark.parametrize(
    ("seconds", "widest", "sharp"),
    [
        ((1.0, 1.4, 2.2), 4, [1]),  # 1.4 and 2.2 are less than 1.5 and 2.5; the first rise is a knee
        ((2.0, 2.1, 5.2), 2, [2]),  # 3.2 more than one position, where 3 would be half of three
        ((2.0, 2.1, 5.0), 4, [2]),
        ((2.0, 3.2, 3.4), 1, [1]),
        ((1.0, 1.09, 1.27), 4, []),  # less than a tenth of a position is no knee
    ],
)
def test_where_a_curve_saturates(seconds: tuple[float, ...], widest: int, sharp: list[int]) -> None:
    curve = CostCurve((1, 2, 4), seconds, 0.0)
    assert saturation_width(curve) == widest
    assert knees(curve) == sharp
