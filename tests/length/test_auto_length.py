"""Policies by hand: what is drafted and evaluated, round by round."""

from __future__ import annotations

import numpy as np
import pytest

from llamaspec.length.auto_length import AutoLength
from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.fixed_length import FixedLength
from llamaspec.length.prior import LOG_ODDS, LearnedPrior
from llamaspec.length.row_length import AutoRow
from llamaspec.values import Draft, Round, Source
from simulated import machine, text
from simulator import play


def draft_of(n: int, confidence: float = 0.9) -> Draft:
    return Draft(np.zeros(n, dtype=np.int32), (), (confidence,) * n)


def round_of(n: int, n_accepted: int, verify_seconds: float, step_seconds: float = 0.001) -> Round:
    return Round(
        draft=draft_of(n),
        path=tuple(range(n_accepted)),
        next_token=0,
        width=n + 1,
        n_draft_steps=n,
        draft_seconds=n * step_seconds,
        verify_seconds=verify_seconds,
        overhead_seconds=0.0001,
    )


def test_fixed_length() -> None:
    assert [FixedLength(2).wants_more(draft_of(n)) for n in range(4)] == [True, True, False, False]
    assert not FixedLength(0).wants_more(Draft())
    assert [FixedLength(2).width(n) for n in (1, 2, 9)] == [1, 2, 9]
    assert FixedLength(2).start_row() == FixedLength(2)
    FixedLength(2).observe(round_of(2, 1, 0.01))
    FixedLength(2).close()
    with pytest.raises(ValueError, match="draft length must be >= 0, got -1"):
        FixedLength(-1)


def test_auto_length_checks_its_arguments() -> None:
    with pytest.raises(ValueError, match=r"width 1 must be allowed, got \[2, 4\]"):
        AutoLength(widths=(4, 2))
    with pytest.raises(ValueError, match="the longest draft must be >= 1, got 0"):
        AutoLength(longest=0)


def test_what_it_knows_is_told() -> None:
    """Seconds of plain rounds, and what the next run begins with."""
    curve = machine("flat", 0.6).curve()
    policy = AutoLength(curve, sources=[Source.STAGE, Source.NGRAM])
    assert policy.plain_seconds() is None
    row = policy.start_row()
    row.observe(round_of(0, 0, 0.5))
    row.observe(round_of(0, 0, 0.5))
    alone = policy.shared.costs.seconds(1) + 0.0001
    assert policy.plain_seconds() == pytest.approx(alone)
    assert policy.plain_seconds(2) == pytest.approx(policy.shared.costs.batch_seconds([2])[0] + 0.0002)
    assert policy.experience().log_odds == LOG_ODDS
    policy.shared.usual[Source.STAGE].level = 1.25
    policy.shared.calibrations[Source.STAGE].level, policy.shared.calibrations[Source.STAGE].slope = 0.5, 0.75
    learnt = policy.experience()
    assert learnt.log_odds == (1.25, 0.5, 0.75)
    assert learnt.curve is not None
    assert learnt.curve.verify_seconds[0] == pytest.approx(0.5, rel=0.02)


def test_what_it_begins_with() -> None:
    """A probe, what an earlier run has learnt, or what is usual."""
    curve = CostCurve((1, 2), (0.02, 0.03), 0.004)
    probed, fresh = AutoLength(curve).shared, AutoLength(trees=False).shared
    known = [probed.costs.seconds(1), probed.costs.seconds(2), probed.costs.draft_step_seconds()]
    assert known == pytest.approx([0.02, 0.03, 0.004])
    assert fresh.costs.seconds(1) == pytest.approx(0.03)
    assert (fresh.branches, probed.branches) == (False, True)
    learnt = LearnedPrior(curve, (1.0, 2.0, 3.0))
    again = AutoLength(learnt, longest=5).shared
    assert again.costs.seconds(2) == pytest.approx(0.03)
    assert again.usual[Source.MODEL].level == 1.0
    assert (again.calibrations[Source.MODEL].level, again.calibrations[Source.MODEL].slope) == (2.0, 3.0)
    assert (again.longest, fresh.longest) == (5, 15)
    assert AutoLength(longest=1).shared.longest == 1


@pytest.mark.parametrize("prior", [None, machine("flat", 0.6).curve()])
def test_the_first_round_times_plain_decoding_and_the_second_drafts(prior: CostCurve | None) -> None:
    row = AutoLength(prior).start_row()
    assert not row.wants_more(Draft())
    row.observe(round_of(0, 0, 0.01))
    assert row.wants_more(Draft())


def test_without_a_prior_the_first_draft_risks_one_token() -> None:
    """What a draft step costs is not known yet: it could be as much as the target."""
    row = AutoLength().start_row()
    row.observe(round_of(0, 0, 0.01))
    assert row.wants_more(Draft())
    assert not row.wants_more(draft_of(1, 0.98))


def test_asking_twice_changes_nothing() -> None:
    row = AutoLength(machine("flat", 0.6).curve()).start_row()
    for n_accepted in (0, 0, 1, 1, 1, 3, 3):
        n = 0
        while row.wants_more(draft_of(n)):
            assert row.wants_more(draft_of(n))
            n += 1
        assert not row.wants_more(draft_of(n))
        row.observe(round_of(n, min(n, n_accepted), 0.0103))


def test_a_hiccup_of_plain_decoding_is_corrected_by_the_next_round() -> None:
    """The first plain round took thrice its time: against that, every draft seemed to win, for good."""
    row = AutoLength(machine("q8_0", 0.6).curve()).start_row()
    row.observe(round_of(0, 0, 0.0855))
    row.observe(round_of(1, 0, 0.0665))
    assert not row.wants_more(Draft())


def test_where_nothing_is_known_one_row_times_a_width_twice() -> None:
    policy = AutoLength()
    row, other = policy.start_row(), policy.start_row()
    assert (row.trial_width(), other.trial_width()) == (4, 0)
    row.observe_trial(4, 0.06)  # something held it up
    assert row.trial_width() == 4
    row.observe_trial(4, 0.02)
    assert policy.shared.costs.n_timed == {4: 2}
    assert policy.shared.costs.seconds(4) == pytest.approx(0.02)
    assert policy.shared.trials == [(4, 0.06), (4, 0.02)]
    assert (row.trial_width(), policy.start_row().trial_width()) == (0, 0)
    known = [AutoLength(machine("q4_0", 0.6).curve()), AutoLength(widths={1, 4}), AutoLength(sources=())]
    assert [each.start_row().trial_width() for each in known] == [0, 0, 0]


def test_nobody_drafts_where_no_source_is_told() -> None:
    """After a probe of the target alone every round is one position wide."""
    on = machine("q4_0", 0.0)
    policy = AutoLength(on.curve(), sources=())
    row = policy.start_row()
    for _ in range(40):
        assert not row.wants_more(Draft())
        assert row.width(1) == 1
        row.observe(round_of(0, 0, 0.0164))
    assert set(policy.shared.costs.n_timed) == {1}


def test_a_single_position_is_never_padded() -> None:
    """Two unlucky timings of width 1 once made every plain round two positions wide, for the whole text."""
    curve = CostCurve((1, 2, 3, 4), (1.0, 1.0, 1.0, 0.5), 0.1)
    assert AutoLength(curve).start_row().width(1) == 1
    assert AutoLength(curve).start_row().width(2) == 4


def test_width_counts_all_positions_and_pads_them() -> None:
    row = AutoLength(machine("q4_0", 0.6).curve()).start_row()
    assert [row.width(n) for n in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, 5]
    assert row.width(5000) == 5000
    only = AutoLength(machine("q4_0", 0.6).curve(), widths={1, 2, 6}).start_row()
    assert [only.width(n) for n in (1, 2, 3, 6, 7, 5000)] == [1, 2, 6, 6, None, None]


@pytest.mark.parametrize("widths", [{1}, {1, 2}, {1, 4}, {1, 2, 3, 4, 5, 12}])
def test_only_allowed_widths_are_evaluated(widths: set[int]) -> None:
    policy = AutoLength(widths=widths)
    play(policy, machine("flat", 0.6), text("constant 0.95", 0))
    timed = set(policy.shared.costs.n_timed)
    assert timed <= widths
    assert max(timed) == max(widths)


def test_never_longer_than_the_longest() -> None:
    result = play(AutoLength(longest=5), machine("flat", 0.6), text("constant 0.95", 0))
    assert max(result.lengths) == 5


def test_drafts_that_never_come_do_no_harm() -> None:
    """A drafter may have nothing to draft, as one that looks for repetitions."""
    policy = AutoLength()
    row = policy.start_row()
    for _ in range(50):
        row.wants_more(Draft())
        row.observe(round_of(0, 0, 0.02))
    assert policy.shared.costs.n_timed == {1: 50}


def test_the_same_rounds_give_the_same_decisions() -> None:
    on = machine("f16", 3.0)
    first, second = (play(AutoLength(), on, text("informed", 0), seed=5) for _ in range(2))
    assert first == second


def test_what_one_text_has_won_the_next_may_hardly_lose() -> None:
    """No more than two tokens of it: that much, or texts fall silent after two unlucky rounds."""
    on, policy = machine("f16", 0.6), AutoLength()
    play(policy, on, text("constant 0.95", 0))
    assert play(policy, on, text("useless", 0)).worst_to_plain(96) <= 1 / 0.95


STEEP = CostCurve((1, 2, 3, 4, 8), (0.010, 0.018, 0.022, 0.025, 0.050), 0.0005)


def begun(curve: CostCurve, *, drops: bool = True, n_accepted: int = 1, n: int = 60) -> AutoRow:
    """A row that has seen single draft tokens of confidence .6, of which two in three were accepted."""
    row = AutoLength(curve).start_row(drops=drops)
    row.observe(round_of(0, 0, curve.verify_seconds[0]))
    for i in range(n):
        row.observe(round_of(1, n_accepted * (i % 3 > 0), curve.verify_seconds[1], curve.draft_step_seconds))
    row.observe(round_of(0, 0, curve.verify_seconds[0]))
    row._shared.budget.left = 1.8
    return row


def drafted(row: AutoRow, *confidences: float) -> tuple[int, int]:
    """Tokens that are made of a draft whose confidences would be these, and those that are verified."""
    n = 0
    while n < len(confidences) and row.wants_more(draft_with(*confidences[:n])):
        n += 1
    return n, row.n_verified(draft_with(*confidences[:n]))


def draft_with(*confidences: float) -> Draft:
    return Draft(np.zeros(len(confidences), dtype=np.int32), (), confidences)


def test_only_what_is_worth_its_position_is_verified() -> None:
    """Here drafting loses on average, and wins with tokens of which the draft is sure."""
    assert drafted(begun(STEEP), 0.97, 0.97, 0.97) == (3, 3)
    assert drafted(begun(STEEP), 0.05) == (1, 0)
    assert drafted(begun(STEEP), 0.97, 0.97, 0.97, 0.02, 0.02)[1] == 3
    assert drafted(begun(STEEP), 0.97, 0.02, 0.97)[1] == 0


def test_rules_that_cannot_leave_tokens_out_verify_none_or_all() -> None:
    """What is tried is settled before it is drawn: one token, which is not verified however sure it is."""
    assert drafted(begun(STEEP, drops=False), 0.97, 0.97, 0.97) == (1, 0)
    flat = machine("flat", 0.6).curve()
    n_made, n_verified = drafted(begun(flat, drops=False), 0.9, 0.9, 0.02, 0.9)
    assert n_made == n_verified == 3


def test_tries_take_a_small_part_of_the_time_and_none_where_nothing_could_pay() -> None:
    on = machine("f16", 1.0)  # a step costs a fortieth of a token
    ran = play(AutoLength(on.curve()), on, text("useless", 0))
    assert 3 <= sum(ran.n_steps) <= 42 * (0.6 + 0.008 * 512)
    assert sum(ran.n_steps[128:]) >= 1  # never given up for good
    hopeless = CostCurve((1, 2, 16), (0.010, 0.020, 0.170), 0.001)
    assert drafted(begun(hopeless), 0.97) == (0, 0)


def test_tries_that_find_something_are_not_limited() -> None:
    row = begun(STEEP)
    for _ in range(60):
        n, n_verified = drafted(row, 0.97, 0.97, 0.97)
        assert (n, n_verified) == (0, 0) if row._shared.wants_plain else (3, 3)
        row.observe(round_of(n, n, STEEP.verify_seconds[n], STEEP.draft_step_seconds))


def test_nothing_is_verified_that_could_lose_more_than_may_be_lost() -> None:
    row = begun(STEEP)
    row._shared.budget.left = 1.7  # three draft tokens cost 1.65 plain ones
    assert drafted(row, 0.97, 0.97, 0.97)[1] == 3
    row = begun(STEEP)
    row._shared.budget.left = 1.4
    assert drafted(row, 0.97, 0.97, 0.97)[1] < 3


def test_what_sets_a_text_apart_counts_where_it_is_much() -> None:
    """Every draft token of this text was rejected, and nearly every one of the others accepted."""
    policy = AutoLength(STEEP)
    good, bad = (policy.start_row(drops=True) for _ in range(2))
    for row in (good, bad):
        row.observe(round_of(0, 0, STEEP.verify_seconds[0]))
    for _ in range(40):
        good.observe(round_of(1, 1, STEEP.verify_seconds[1], STEEP.draft_step_seconds))
        bad.observe(round_of(1, 0, STEEP.verify_seconds[1], STEEP.draft_step_seconds))
    bad._begin()
    chances = [bad._expect(draft_with(0.9))[1][0], good._expect(draft_with(0.9))[1][0]]
    assert chances[0] < policy.shared.calibrations[Source.MODEL].probability(0.9) - 0.1 < chances[1] - 0.1
