"""The account of gains and losses, entry by entry."""

from __future__ import annotations

import pytest

from llamaspec.length.regret_budget import ALLOWED, RATE, RECENT, SAVED, RegretBudget


def approximately(value: float) -> object:
    return pytest.approx(value, abs=1e-12)


def booked(*rounds: tuple[int, float], n_rows: int = 1, is_plain: bool = False) -> RegretBudget:
    """After rounds of so many tokens, which took as long as so many plain ones."""
    budget = RegretBudget()
    for n_made, spent in rounds:
        budget.book(n_made, spent, n_rows, is_plain=is_plain)
    return budget


def test_what_may_be_lost() -> None:
    """At first, and more for every token: at 600 tokens less than 1 % of their time."""
    assert RegretBudget().left == ALLOWED
    assert booked(*[(1, 1.0)] * 600).left == approximately(ALLOWED + 600 * RATE)
    assert 1.0 < ALLOWED < 2.5
    assert 600 * RATE + ALLOWED < 4.2


def test_a_round_is_a_gain_or_a_loss() -> None:
    lost, won = booked((3, 4.5)), booked((5, 2.25))
    assert (lost.gain, won.gain) == (-1.5, 2.75)
    assert lost.left == approximately(ALLOWED - 1.5 + 3 * RATE)
    assert won.left == approximately(ALLOWED + 2.75 + 5 * RATE)


def test_of_several_rows_each_has_its_part() -> None:
    """Three rows, of which one has lost 1.5: each may lose half a token less."""
    budget = booked((3, 4.5), n_rows=3)
    assert budget.gain == -1.5
    assert budget.left == approximately(ALLOWED + (3 * RATE - 1.5) / 3)


def test_alone_a_text_owes_nothing_and_has_little_of_what_was_won() -> None:
    debts, gains, rich = booked((3, 4.5)), booked((5, 4.75)), booked((40, 9.0))
    for budget in (debts, gains, rich):
        budget.start_text(is_alone=True)
    assert debts.left == ALLOWED
    assert gains.left == approximately(ALLOWED + 0.25 + 5 * RATE)
    assert rich.left == approximately(ALLOWED + SAVED)
    assert (debts.gain, gains.gain, rich.gain) == (-1.5, 0.25, 31.0)


def test_a_text_that_joins_others_owes_what_they_owe() -> None:
    debts, rich = booked((3, 4.5)), booked((40, 9.0))
    before = debts.left
    for budget in (debts, rich):
        budget.start_text(is_alone=False)
    assert debts.left == before < ALLOWED
    assert rich.left == approximately(ALLOWED + SAVED)


def test_recent_rounds_are_booked_anew_where_plain_decoding_takes_another_time() -> None:
    """A plain token takes twice as long as was believed, or 1 % less: the round took 1.5 of them, not 3."""
    slower, faster = booked((4, 3.0)), booked((4, 3.0))
    slower.correct(2.0, 1)
    faster.correct(0.99, 1)
    assert slower.gain == approximately(4 - 1.5)
    assert slower.left == approximately(ALLOWED + 4 * RATE + 4 - 1.5)
    assert faster.gain == approximately(4 - 3.0 / 0.99)


def test_old_rounds_keep_the_price_of_their_day() -> None:
    """Of many rounds that took 3 plain tokens each, as many as `RECENT` count as recent."""
    budget = booked(*[(4, 3.0)] * 20 * RECENT)
    gain = budget.gain
    budget.correct(2.0, 1)
    assert budget.gain - gain == pytest.approx(RECENT * 1.5)
    half = booked((4, 3.0), *[(1, 0.0)] * RECENT)
    half.correct(2.0, 1)
    assert half.gain == pytest.approx(1 + RECENT + 1.5 * (1 - 1 / RECENT) ** RECENT)


def test_rounds_without_drafts_took_what_plain_rounds_take() -> None:
    budget = booked((1, 1.0), (1, 1.25), is_plain=True)
    budget.correct(2.0, 1)
    assert budget.gain == approximately(-0.25)


def test_recent_rounds_of_several_rows_are_booked_anew_together() -> None:
    """Two rows, whose evaluation took 3 and 5 plain tokens of each: halved, they win 4 together."""
    budget = booked((2, 3.0), (2, 5.0), n_rows=2)
    recent = (3.0 + 5.0 - 1.5 / RECENT) / 2
    budget.correct(2.0, 2)
    assert budget.gain == approximately(-4.0 + 2 * recent / 2)
    assert budget.left == approximately(ALLOWED + 4 * RATE / 2 + (-4.0 + recent) / 2)


def test_what_is_booked_anew_twice_is_worth_what_it_is_at_last() -> None:
    """Plain decoding seems to take twice as long, and then as long as ever: nothing has happened."""
    budget = booked((4, 3.0), (1, 2.5))
    before = budget.gain, budget.left
    budget.correct(2.0, 1)
    budget.correct(0.5, 1)
    assert (budget.gain, budget.left) == (approximately(before[0]), approximately(before[1]))


def test_a_text_that_begins_alone_does_not_pay_for_what_earlier_ones_took() -> None:
    """Plain decoding turns out to be faster: drafts of the text before gained less, but not this one's."""
    budget = booked(*[(4, 3.0)] * RECENT)
    budget.start_text(is_alone=True)
    before = budget.left
    budget.correct(0.5, 1)
    assert budget.left == before


def test_rounds_that_are_long_over_are_not_recent() -> None:
    """Behind many rounds without drafts, plain decoding takes twice as long: a longer text does that."""
    budget = booked(*[(4, 3.0)] * RECENT)
    for _ in range(20 * RECENT):
        budget.book(1, 1.0, 1, is_plain=True)
    before = budget.gain
    budget.correct(2.0, 1)
    assert budget.gain == pytest.approx(before, abs=0.01)
