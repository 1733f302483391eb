"""Feed the cost model the timings of a known machine; see what it believes."""

from __future__ import annotations

import numpy as np
import pytest

from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.cost_model import CATCH_UP, CostModel
from llamaspec.length.prior import LearnedPrior

Q4_0 = {1: 16.4, 2: 26.4, 3: 36.5, 4: 29.2, 5: 42.3, 6: 52.5, 7: 53.2, 8: 54.0}  # ms; width 4 is a dip


def probed(seconds: dict[int, float], step: float = 0.6) -> LearnedPrior:
    curve = CostCurve(tuple(seconds), tuple(t / 1000 for t in seconds.values()), step / 1000)
    return LearnedPrior.of_probe(curve)


def believed(model: CostModel) -> list[float]:
    return [1000 * model.seconds(width) for width in range(1, 10)]


def test_a_prior_is_believed_until_something_is_measured() -> None:
    model = CostModel(probed(Q4_0))
    assert believed(model)[:8] == pytest.approx(list(Q4_0.values()))
    assert model.draft_step_seconds() == pytest.approx(0.0006)
    assert [model.cheapest_width(n) for n in range(1, 9)] == [1, 2, 4, 4, 5, 6, 7, 8]


def test_one_timing_corrects_the_scale_of_every_width() -> None:
    model = CostModel(probed(Q4_0))
    model.observe_verify(1, 0.0197)  # a busy day: a fifth slower
    assert believed(model)[:8] == pytest.approx([1.2 * t for t in Q4_0.values()], rel=0.02)


def test_a_hiccup_of_width_1_is_forgotten_with_the_next_timing() -> None:
    for model in (CostModel(probed(Q4_0)), CostModel(LearnedPrior())):
        model.observe_verify(1, 0.0492)
        model.observe_verify(1, 0.0164)
        assert model.seconds(1) == pytest.approx(0.0164, rel=0.1)


def test_a_hiccup_of_width_1_moves_no_width_that_was_timed() -> None:
    """Its correction once made width 4 a third of what it was, and every draft seemed to win."""
    model = CostModel(LearnedPrior())
    assert model.is_blank
    model.observe_verify(4, 0.0292)
    assert not model.is_blank
    model.observe_verify(1, 0.0492)
    assert model.doubts_plain
    model.observe_verify(1, 0.0164)
    assert [model.seconds(1), model.seconds(4)] == pytest.approx([0.0164, 0.0292], rel=0.15)
    assert not model.doubts_plain


def test_a_width_that_really_is_cheaper_is_believed_in_the_end() -> None:
    model = CostModel(LearnedPrior())
    for n in range(3):
        model.observe_verify(4, 0.010)
        model.observe_verify(1, 0.020)
        assert model.doubts_plain == (n < 2)
    assert not CostModel(probed(Q4_0)).is_blank
    assert not CostModel(LearnedPrior(), allowed={1, 4}).is_blank


def test_a_wider_evaluation_that_is_shorter_shows_the_hiccup_too() -> None:
    model = CostModel(probed(Q4_0))
    model.observe_verify(1, 0.0492)
    model.observe_verify(2, 0.0264)
    assert believed(model)[:2] == pytest.approx([16.4, 26.4], rel=0.1)


def test_a_prior_of_another_shape_is_doubted_at_its_first_contradiction() -> None:
    model = CostModel(probed({1: 100.0, 8: 102.0}))
    model.observe_verify(1, 0.0164)
    assert model.looks_foreign(1)
    for _ in range(3):
        model.observe_verify(1, 0.0164)
        model.observe_verify(2, 0.0264)
    assert believed(model)[:2] == pytest.approx([16.4, 26.4], rel=0.06)
    assert believed(model)[3] > 30.0  # the prior said 16.5


def test_unmeasured_widths_lie_between_their_neighbours() -> None:
    model = CostModel(LearnedPrior())
    for _ in range(5):
        for width, seconds in {1: 0.010, 5: 0.018, 9: 0.024}.items():
            model.observe_verify(width, seconds)
    times = believed(model)
    assert times[0] < times[1] < times[2] < times[4]
    assert times[4] < times[5] < times[6] < times[8]


def test_dips_are_kept_and_batches_padded_to_them() -> None:
    model = CostModel(LearnedPrior())
    for _ in range(6):
        for width, seconds in Q4_0.items():
            model.observe_verify(width, seconds / 1000)
    assert believed(model)[:8] == pytest.approx(list(Q4_0.values()), rel=0.03)
    assert model.cheapest_width(3) == 4
    assert model.batch_seconds([3])[0] == pytest.approx(model.seconds(4))
    assert model.batch_seconds([3, 5]) == pytest.approx([model.seconds(4), model.seconds(5)])


def test_only_allowed_widths_are_chosen() -> None:
    model = CostModel(probed(Q4_0), allowed={1, 5, 8})
    assert [model.cheapest_width(n) for n in range(1, 10)] == [1, 5, 5, 5, 5, 8, 8, 8, None]
    assert model.batch_seconds([9])[0] == float("inf")


def test_widths_of_many_rows_are_interpolated_and_learnt() -> None:
    """Width 36 lies between those with a belief of their own, 32 and 40."""
    model = CostModel(LearnedPrior())
    model.observe_verify(1, 0.010)
    for _ in range(8):
        model.observe_verify(36, 0.070)
    assert model.seconds(36) == pytest.approx(0.070, rel=0.06)
    assert model.seconds(1) == pytest.approx(0.010, rel=0.06)
    assert model.seconds(16) < model.seconds(36) < model.seconds(48)
    assert model.batch_seconds([700])[0] > model.batch_seconds([512])[0]


def test_bounds_are_those_of_the_ratio_to_width_1() -> None:
    model = CostModel(LearnedPrior())
    for _ in range(5):
        model.observe_verify(1, 0.010)
    assert model.batch_seconds([1], 2.0) == pytest.approx([model.seconds(1)])
    low, high = model.batch_seconds([1, 4], -2.0)[1], model.batch_seconds([1, 4], 2.0)[1]
    assert low < 0.7 * model.seconds(4) < 1.4 * model.seconds(4) < high
    for _ in range(10):
        model.observe_verify(4, 0.020)
    assert model.batch_seconds([1, 4], 2.0)[1] == pytest.approx(0.020, rel=0.15)


def test_a_spike_is_not_believed_but_a_lasting_change_is() -> None:
    model = CostModel(LearnedPrior())
    for _ in range(30):
        model.observe_verify(1, 0.010)
    model.observe_verify(1, 0.030)
    assert model.seconds(1) == pytest.approx(0.010, rel=0.02)
    for _ in range(30):
        model.observe_verify(1, 0.020)
    assert model.seconds(1) == pytest.approx(0.020, rel=0.05)


def test_growth_with_the_context_reaches_widths_not_measured_meanwhile() -> None:
    model = CostModel(probed(Q4_0))
    for i in range(300):
        model.observe_verify(4, 0.0292 * (1 + i / 300))
    assert model.seconds(4) == pytest.approx(2 * 0.0292, rel=0.08)
    assert model.seconds(1) == pytest.approx(2 * 0.0164, rel=0.25)


def test_draft_steps_and_catching_up_are_told_apart() -> None:
    rng = np.random.default_rng(0)
    model = CostModel(LearnedPrior())
    model.observe_verify(1, 0.020)
    assert not model.knows_step
    for _ in range(40):
        n, unread = int(rng.integers(1, 5)), int(rng.choice([0, 0, 1, 10]))
        seconds = 0.002 * (n + CATCH_UP * unread)
        model.observe_draft(n, unread, seconds * float(np.exp(0.05 * rng.standard_normal())))
    assert model.knows_step
    assert model.draft_step_seconds() == pytest.approx(0.002, rel=0.05)
    assert model.drafting_seconds(1, 10) == pytest.approx(0.002 + 0.004, rel=0.05)


def test_guesses_that_cost_nothing_leave_the_prior_of_the_target_alone() -> None:
    model = CostModel(probed(Q4_0, step=0.0))
    model.observe_verify(1, 0.0164)
    for _ in range(5):
        model.observe_draft(3, 0, 20e-6)
    assert believed(model)[:8] == pytest.approx(list(Q4_0.values()), rel=0.02)
    assert model.draft_step_seconds() < 1e-4


def test_wide_batches_know_few_widths() -> None:
    """Else each of hundreds of widths would be a row of the covariance, and a question take milliseconds."""
    model, rng = CostModel(LearnedPrior()), np.random.default_rng(0)
    for width in [1, *rng.integers(1, 400, 600).tolist()]:
        model.observe_verify(width, 0.010 * width**0.6)
    assert len(model.learned((0.0, 0.0, 0.0)).widths) < 50
    assert [model.seconds(w) for w in (16, 36, 300)] == pytest.approx(
        [0.010 * w**0.6 for w in (16, 36, 300)], rel=0.02
    )
