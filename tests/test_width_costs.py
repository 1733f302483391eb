"""`scripts/bench.py --widths`: what it says of a cost model that sees evaluations one by one."""

from __future__ import annotations

import numpy as np
import pytest

from llamaspec.values import Draft, Round
from width_costs import width_costs

WIDTHS = (1, 2, 3, 4, 5, 7, 9)


def seconds(width: int, n_experts: int, n_used: int) -> float:
    """Of a mixture: the more tokens, the more of its experts are read."""
    touched = n_experts * (1 - (1 - n_used / n_experts) ** width)
    return 4e-3 + 1e-3 * touched + 2e-4 * width


def rounds(n: int, noise: float, n_experts: int = 32, n_used: int = 4) -> list[Round]:
    rng = np.random.default_rng(1)
    found = []
    for i in range(n):
        width = WIDTHS[i % len(WIDTHS)]
        measured = seconds(width, n_experts, n_used) * float(np.exp(noise * rng.standard_normal()))
        found.append(Round(Draft(), (), 0, width=width, verify_seconds=measured))
    return found


@pytest.mark.parametrize(("n_experts", "n_used"), [(32, 4), (128, 8), (4, 4)])
def test_mixtures_of_experts_are_foreseen(n_experts: int, n_used: int) -> None:
    """Even where tokens that agree touch other numbers of experts each time: 15 % of spread."""
    found = width_costs(rounds(400, 0.15, n_experts, n_used))
    assert [cost.width for cost in found] == list(WIDTHS)
    for cost in found:
        assert cost.ratio == pytest.approx(1, abs=0.1)
        assert cost.measured_seconds == pytest.approx(seconds(cost.width, n_experts, n_used), rel=0.1)


def test_what_is_not_foreseen_is_seen() -> None:
    """A machine that suddenly is three times slower: the first evaluations are far off."""
    slow = [Round(Draft(), (), 0, width=1, verify_seconds=0.03) for _ in range(2)]
    quick = [Round(Draft(), (), 0, width=1, verify_seconds=0.01) for _ in range(3)]
    (cost,) = width_costs([*quick, *slow])
    assert cost.n == 3
    assert cost.ratio < 0.5
