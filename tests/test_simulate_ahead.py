"""Drafting ahead on a clock that can be followed by hand: a draft step of 2, a verification of 5."""

from __future__ import annotations

import numpy as np
import pytest

from simulate_ahead import Costs, seconds

COSTS = Costs(verify=[4.0, 5.0, 5.0], step=2.0)


@pytest.mark.parametrize(
    ("agreed", "n_draft", "after", "ahead"),
    [
        ([1, 1, 1, 1, 1, 1], 0, 24, 24),  # plain
        ([1, 1, 1, 1, 1, 1], 2, 18, 4 + 6 + 6),  # while it verifies, three steps: the guess and two tokens
        ([1, 1, 0, 1, 1, 1], 2, 18, 4 + 6 + 4 + 6),  # the guess is wrong
        ([1, 0, 1, 1, 1, 1], 2, 27, 4 + 6 + 4 + 6 + 6),  # a draft token is wrong: two tokens, three, and one
        ([1, 1, 1, 1], 1, 14, 2 + 5 + 5),  # two steps are enough for the guess and one
        ([1], 1, 7, 7),
    ],
)
def test_by_hand(agreed: list[int], n_draft: int, after: float, ahead: float) -> None:
    text = np.array(agreed, dtype=bool)
    assert seconds(text, n_draft, COSTS, ahead=False) == after
    assert seconds(text, n_draft, COSTS, ahead=True) == ahead
