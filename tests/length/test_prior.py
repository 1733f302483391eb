"""What runs have learnt: how much it weighs in the next run, and how two runs that wrote it are merged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llamaspec.length.automatic import AutoLength
from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.estimates import KEPT, Acceptance
from llamaspec.length.prior import RECENT, Gain, LearnedPrior
from llamaspec.values import NO_DRAFT, Draft, Evaluation, Round, Source

CURVE = CostCurve((1, 4), (1.0, 1.5), 0.1)


def learnt(
    confidence: float, n: int, prior: LearnedPrior | None = None, source: Source = Source.MODEL
) -> LearnedPrior:
    """Return what a run has learnt from `n` accepted draft tokens."""
    policy = AutoLength(prior or LearnedPrior(CURVE))
    for _ in range(n):
        policy.shared.acceptance[source].learn(1.0, confidence)
    return policy.experience()


@pytest.mark.parametrize(("n", "most"), [(100, 0.025), (8, 0.1)])
def test_the_more_was_learnt_the_less_one_rejection_moves_it(n: int, most: float) -> None:
    before = Acceptance()
    for i in range(n):
        before.learn(float(i % 5 > 0))  # 80 % are accepted
    after = Acceptance(before.log_odds.tolist(), before.counts)
    assert after.probability() == before.probability()
    after.learn(0.0)
    assert most / 2 < before.probability() - after.probability() < most
    assert max(before.counts) == min(n, KEPT)


def test_a_run_keeps_its_own_bins_and_those_of_others() -> None:
    start = learnt(0.3, 5)
    mine, other = learnt(0.6, 20, start), learnt(0.99, 20, start)
    merged = mine.merged(start, other)
    belief, mine_believes, others_belief = (
        Acceptance(prior.log_odds, prior.counts) for prior in (merged, mine, other)
    )
    assert belief.probability(0.6) == mine_believes.probability(0.6) != others_belief.probability(0.6)
    assert belief.probability(0.99) == others_belief.probability(0.99) != mine_believes.probability(0.99)
    assert sum(merged.counts[:-1]) == 5 + 20 + 20


@pytest.mark.parametrize("source", [Source.MODEL, Source.NGRAM, Source.EARLIER])
def test_the_acceptance_of_each_source_is_kept(source: Source) -> None:
    start, kept = learnt(0.6, 0), learnt(0.6, 30, source=source)
    for prior in (kept, start.merged(start, kept), kept.merged(start, start)):
        found = AutoLength(prior).shared.acceptance
        for other in (Source.MODEL, Source.NGRAM, Source.EARLIER):
            usual = Acceptance(is_copied=other is not Source.MODEL).probability(0.6)
            assert (found[other].probability(0.6) > usual) == (other is source)


def test_what_another_run_has_timed_better_is_kept_at_the_speed_of_this_one() -> None:
    mine = LearnedPrior(CostCurve((1, 4, 16), (2.0, 3.0, 9.0), 0.2, deviations=(0.0, 0.1, 0.3)))
    other = LearnedPrior(
        CostCurve((1, 4, 8, 16), (1.0, 9.0, 2.5, 4.0), 0.3, 0.01, (0.0, 0.2, 0.2, 0.2), draft_deviation=0.01)
    )
    merged = mine.merged(LearnedPrior(CURVE), other).curve
    assert merged is not None
    assert merged.widths == (1, 4, 8, 16)
    assert merged.verify_seconds == (2.0, 3.0, 5.0, 8.0)
    assert merged.deviations == (0.0, 0.1, 0.2, 0.2)
    assert (merged.draft_step_seconds, merged.draft_deviation) == (0.6, 0.01)
    assert merged.draft_reading_seconds == 0.02
    assert mine.merged(mine, LearnedPrior()).curve == mine.curve


def test_no_merged_width_is_faster_than_one_position() -> None:
    """Another program may have held up the one position of the other run."""
    mine = LearnedPrior(CostCurve((1, 4, 16), (2.0, 9.0, 9.0), 0.2, deviations=(0.0, 0.3, 0.3)))
    other = LearnedPrior(CostCurve((1, 4), (4.0, 3.0), 0.2, deviations=(0.2, 0.0)))
    merged = mine.merged(LearnedPrior(CURVE), other).curve
    assert merged is not None
    assert min(merged.verify_seconds) == merged.verify_seconds[0]


def test_the_distance_of_explorations_is_that_of_the_run_that_changed_it() -> None:
    start = LearnedPrior(CURVE, distance=8)
    far = replace(start, distance=64)
    assert start.merged(start, far).distance == far.merged(start, start).distance == 64


def test_counts_belong_to_their_bins() -> None:
    with pytest.raises(ValueError, match="of another kind"):
        LearnedPrior(log_odds=(0.1,) * 10, counts=(1, 2))
    with pytest.raises(ValueError, match="counts"):
        LearnedPrior(log_odds=(0.1,) * 10, counts=(KEPT + 1,) * 10)
    with pytest.raises(ValueError, match="of another kind"):
        LearnedPrior(earlier_log_odds=(0.1,) * 3)


def test_the_gain_of_real_requests_adds_up_over_runs() -> None:
    """Eight rounds of a draft step and two tokens, in 1.6 s instead of 2 s; overhead does not count."""
    policy = AutoLength(LearnedPrior(CURVE, gain=Gain(10.0, 9.0, 12.0)))
    sequence = policy.start_sequence()
    draft = Draft(np.array([7], np.int32), (), (0.9,), Source.MODEL)
    for i in range(8):
        sequence.wants_more(NO_DRAFT)
        round_ = Round(draft, 1, 1, Evaluation(2, 1, i), draft_seconds=0.1, verify_seconds=1.5)
        sequence.observe(replace(round_, overhead_seconds=5.0, plain_seconds=1.0))
    gain = policy.experience().gain
    assert gain.n_tokens == 10 + 16
    assert gain.seconds == pytest.approx(9 + 8 * 1.6)
    assert gain.plain_seconds == 12 + 16


def test_the_gains_of_two_runs_are_added_and_fade() -> None:
    start = LearnedPrior(gain=Gain(100.0, 10.0, 20.0))
    mine, other = (replace(start, gain=Gain(n, n / 10, n / 5)) for n in (150.0, 1100.0))
    assert mine.merged(start, other).gain == Gain(1150.0, 115.0, 230.0)
    assert mine.merged(start, LearnedPrior()).gain.n_tokens == 50.0, "a benchmark has dropped what was before"
    assert Gain(2 * RECENT, 4.0, 6.0).faded() == Gain(RECENT, 2.0, 3.0)
    with pytest.raises(ValueError, match=">= 0"):
        Gain(-1.0)
