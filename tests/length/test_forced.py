"""Draft tokens that a constraint forces: accepted for sure, so wanted where a position is worth its time."""

from __future__ import annotations

import numpy as np

from llamaspec.length.auto_length import AutoLength
from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.row_length import AutoRow
from llamaspec.values import NO_DRAFT, NO_GRAMMAR_DRAFT, Draft, Round, Source

FLAT = CostCurve((1, 5, 17), (0.010, 0.011, 0.014), 0.001)
STEEP = CostCurve((1, 2, 17), (0.010, 0.0202, 0.172), 0.001)
STEP = CostCurve(
    (1, 4, 5, 17), (0.010, 0.011, 0.031, 0.271), 0.001
)  # 20 ms for each position behind the fourth


def started(curve: CostCurve) -> AutoRow:
    row = AutoLength(curve, sources={Source.MODEL}).start_row()
    row.observe(Round(NO_DRAFT, (), 0, 1, verify_seconds=curve.verify_seconds[0]))
    return row


def n_wanted(row: AutoRow) -> int:
    n = 0
    while row.wants_more(Draft(np.zeros(n, dtype=np.int32), (), (1.0,) * n, Source.GRAMMAR)):
        n += 1
    return n


def test_as_many_as_cost_less_than_they_gain() -> None:
    assert n_wanted(started(FLAT)) == 15
    assert 3 <= n_wanted(started(STEP)) <= 6
    assert n_wanted(started(STEEP)) == 0


def test_none_before_plain_decoding_is_timed() -> None:
    assert not AutoLength(FLAT).start_row().wants_more(NO_GRAMMAR_DRAFT)


def test_they_do_not_count_as_a_draft_models() -> None:
    policy = AutoLength(FLAT)
    before = policy.experience().log_odds
    forced = Round(Draft.certain([1, 2], 1.0, Source.GRAMMAR), (0, 1), 0, 3, verify_seconds=0.011)
    policy.start_row().observe(forced)
    assert policy.experience().log_odds == before
