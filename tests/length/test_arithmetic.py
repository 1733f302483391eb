"""Draft tokens that are all as likely to be accepted: what they gain, by hand."""

from __future__ import annotations

import pytest

from llamaspec.length.arithmetic import expected_accepted, speed_up


@pytest.mark.parametrize(
    ("acceptance", "longest", "accepted"),
    [
        (0.5, 3, [0.0, 0.5, 0.75, 0.875]),
        (0.2, 2, [0.0, 0.2, 0.24]),
        (1.0, 2, [0.0, 1.0, 2.0]),
        (0.0, 2, [0.0, 0.0, 0.0]),
        (0.7, 0, [0.0]),
    ],
)
def test_expected_accepted_is_a_geometric_sum(acceptance: float, longest: int, accepted: list[float]) -> None:
    assert expected_accepted(acceptance, longest) == pytest.approx(accepted, abs=1e-15)


def test_the_best_number_of_draft_tokens() -> None:
    costs, gains = [0.0, 1.0, 1.5, 9.0], [0.0, 0.5, 0.75, 0.9]
    assert speed_up(costs, gains, 0.2) == 1.75 / 1.3
    assert speed_up(costs, gains, 1.0) == 1.0
    assert speed_up(costs[:2], gains, 0.2) == 1.5 / 1.2
    assert speed_up(costs, gains[:2], 0.2) == 1.5 / 1.2
    assert speed_up([0.0], gains, 0.2) == 1.0
