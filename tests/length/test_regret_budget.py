"""The account of gains and losses, entry by entry."""

from __future__ import annotations

import pytest

from llamaspec.length.regret_budget import RegretBudget


def approximately(value: float) -> object:
    return pytest.approx(value, abs=1e-12)


def booked(*entries: tuple[int, float, float]) -> RegretBudget:
    budget = RegretBudget()
    for entry in entries:
        budget.book(*entry)
    return budget


def test_what_may_be_lost() -> None:
    """1.6 plain tokens for each row, and 2 % of what comes behind its first 96."""
    budget = RegretBudget()
    assert budget.left(0, 1) == approximately(1.6)
    assert budget.left(96, 1) == approximately(1.6)
    assert budget.left(146, 1) == approximately(2.6)
    assert budget.left(192, 2) == approximately(3.2)
    assert budget.left(242, 2) == approximately(4.2)


def test_an_evaluation_is_a_gain_or_a_loss() -> None:
    lost, won = booked((3, 2.0, 0.5)), booked((5, 1.0, 0.5))
    assert (lost.gain, won.gain) == (-1.0, 3.0)
    assert lost.left(3, 1) == approximately(0.6)
    assert won.left(5, 1) == approximately(4.6)


def test_a_text_owes_the_debts_of_earlier_ones_and_has_little_of_their_gain() -> None:
    """4 % of the tokens of the earlier text were allowed to be lost, from its first on."""
    debts, gains, little = booked((3, 2.0, 0.5)), booked((5, 1.0, 0.5)), booked((3, 2.0, 0.5))
    debts.start_text(10)
    assert debts.left(10, 1) == approximately(1.6 - 0.6)
    assert debts.left(10 + 96 + 50, 1) == approximately(1.6 - 0.6 + 1.0)
    debts.start_text(20)  # of the 0.6, 0.4 have been earned meanwhile
    assert debts.left(20, 1) == approximately(1.6 - 0.2)
    gains.start_text(10)
    assert gains.left(10, 1) == approximately(1.6 + 0.3)
    gains.book(2, 2.0, 0.5)
    assert gains.left(12, 1) == approximately(1.6 + 0.3 - 2.0)
    little.start_text(60)
    assert little.left(60, 1) == approximately(1.6)
    rich = booked((43, 1.0, 0.5))
    rich.start_text(43)
    assert rich.left(43, 1) == approximately(1.6 + 2.0)  # of 41


def test_recent_evaluations_are_priced_anew_and_old_ones_are_settled() -> None:
    """When a plain token turns out to take 0.5 s and not 1 s, the last 32 evaluations were losses."""
    ordinary = (1, 1.0, 1.0)
    assert booked(ordinary, (1, 1.0, 0.5)).gain == 2 - 2.0 / 0.5
    assert booked(*[ordinary] * 31, (1, 0.5, 0.5)).gain == 32 - 31.5 / 0.5
    assert booked(*[ordinary] * 32, (1, 0.5, 0.5)).gain == 0.0
    settled = booked(*[(2, 1.0, 1.0)] * 32, (1, 1.0, 0.5))
    assert settled.gain == 32 + 1 - 2
    settled.book(1, 1.0, 0.25)
    assert settled.gain == 32 + 2 - 8
