"""Feed the cost model the timings of a known machine; see what it believes.

`surprise` times a width so much longer or shorter than foreseen, in logarithms: sums are exact then.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise, product
from math import exp, inf, log, nan, sqrt

import numpy as np
import pytest

from llamaspec.length.cost_curve import LONGEST, SHORTEST, WIDEST, CostCurve
from llamaspec.length.cost_model import (
    APART,
    CATCH_UP,
    FAR,
    FOREIGN,
    LASTING,
    LINEAR,
    MOST,
    MOST_STEPS,
    NOISE,
    OUTLIER,
    PLAIN_SECONDS,
    POWER,
    PROBED,
    STEP_RATIO,
    TOGETHER,
    CostModel,
)
from llamaspec.length.prior import LearnedPrior

Q4_0 = {1: 16.4, 2: 26.4, 3: 36.5, 4: 29.2, 5: 42.3, 6: 52.5, 7: 53.2, 8: 54.0}  # ms; width 4 is a dip
PAIR = {1: 20.0, 4: 31.0}
OFF = 0.2  # a surprise within reason
FAR_OFF = 0.9  # a hiccup


def curve(milliseconds: dict[int, float], step: float = 0.6) -> CostCurve:
    return CostCurve(tuple(milliseconds), tuple(t / 1000 for t in milliseconds.values()), step / 1000)


def probed(milliseconds: dict[int, float], step: float = 0.6) -> CostModel:
    return CostModel(curve(milliseconds, step))


def believed(model: CostModel, widths: Collection[int] = range(1, 9)) -> list[float]:
    """In milliseconds."""
    return [1000 * model.seconds(width) for width in widths]


def surprise(model: CostModel, width: int, *logarithms: float) -> None:
    for logarithm in logarithms:
        model.observe_verify(width, model.seconds(width) * exp(logarithm))


def started(milliseconds: dict[int, float], n_timed: dict[int, int]) -> CostModel:
    """A probe's model that was right so often."""
    model = probed(milliseconds)
    for width, n in n_timed.items():
        surprise(model, width, *(0.0,) * n)
    return model


def moves(model: CostModel, width: int, *logarithms: float) -> tuple[float, float]:
    """By how much the logarithms of this width and of all others change."""
    other = 1 if width > 1 else 4
    before = model.seconds(width), model.seconds(other)
    surprise(model, width, *logarithms)
    return log(model.seconds(width) / before[0]), log(model.seconds(other) / before[1])


def both(own: float, off: float) -> tuple[float, float]:
    """What `moves` should answer where a timing counts for this part of a width's average."""
    together = TOGETHER * (1 - own) * off
    return pytest.approx((own * off + together, together), abs=1e-12)  # type: ignore[return-value]


# What is believed before the first timing, and by it.


def test_a_prior_is_believed_until_something_is_measured() -> None:
    model = probed(Q4_0)
    assert believed(model) == pytest.approx(list(Q4_0.values()))
    assert model.draft_step_seconds() == pytest.approx(0.0006)
    assert [model.cheapest_width(n) for n in range(1, 9)] == [1, 2, 4, 4, 5, 6, 7, 8]
    assert (model.knows_step, model.is_surprised, model.n_timed, model.reach) == (True, False, {}, 16)


def test_without_a_prior_there_is_a_guess() -> None:
    model = CostModel()
    guessed = [PLAIN_SECONDS * width**POWER for width in (1, 2, 7, 60, 900)]
    assert [model.seconds(width) for width in (1, 2, 7, 60, 900)] == pytest.approx(guessed)
    assert model.draft_step_seconds() == pytest.approx(STEP_RATIO * PLAIN_SECONDS)
    assert (model.knows_step, model.is_surprised, model.reach) == (False, False, 2)
    assert not any(model.knows(n) for n in (1, 2, 40))


@pytest.mark.parametrize(
    ("model", "is_blank"),
    [
        (CostModel(), True),
        (probed(PAIR), False),
        (CostModel(allowed={1, 4}), False),
        (CostModel(curve(PAIR), {1, 4}), False),
    ],
)
def test_a_model_is_blank_where_nothing_is_known_or_forbidden(model: CostModel, is_blank: bool) -> None:
    assert model.is_blank == is_blank


@pytest.mark.parametrize("width", [1, 3, 30])
@pytest.mark.parametrize("off", [-0.39, 0.3, 0.39])
def test_the_first_timing_corrects_the_scale_of_every_width(width: int, off: float) -> None:
    """A busy day."""
    model, widths = probed(Q4_0), (*range(1, 9), 40)
    before = believed(model, widths)
    surprise(model, width, off)
    assert believed(model, widths) == pytest.approx([t * exp(off) for t in before])
    assert model.draft_step_seconds() == pytest.approx(0.0006 * exp(off))
    assert not model.is_surprised
    assert model.knows(8)
    assert model.n_timed == {width: 1}


@pytest.mark.parametrize("off", [-0.41, 0.41, -2.3])
def test_a_prior_of_another_machine_is_dropped(off: float) -> None:
    """The next timing shows that it was no hiccup."""
    assert abs(off) > FOREIGN
    model = probed({1: 16.0, 2: 20.0, 8: 70.0})
    surprise(model, 2, off)
    assert model.is_surprised
    surprise(model, 2, 0.0)
    assert not model.is_surprised
    guessed = [16.0, 20.0, 20.0 * 4**POWER, 20.0 * 8**POWER]
    assert believed(model, (1, 2, 8, 16)) == pytest.approx([t * exp(off) for t in guessed])
    assert [model.knows(n) for n in (1, 2, 3, 8)] == [False, True, False, False]
    assert model.reach == 4
    assert model.learned().widths == (1, 2)
    surprise(model, 8, -0.39)  # which is believed as it is
    assert model.seconds(8) == pytest.approx(guessed[2] / 1000 * exp(off - 0.39))
    assert not model.is_surprised


@pytest.mark.parametrize("step", [0.4, 250.0])
def test_a_draft_step_of_another_machine_is_forgotten(step: float) -> None:
    """It was a tenth of what it is here, which took many rounds to see; or so dear that nothing was tried."""
    model = probed({1: 100.0, 4: 110.0}, step)
    surprise(model, 1, log(0.2), 0.0)
    assert not model.knows_step
    assert model.draft_step_seconds() == pytest.approx(STEP_RATIO * 0.020)
    model.observe_draft(1, 0, 0.0008)
    assert model.draft_step_seconds() == pytest.approx(0.0008)


def test_where_nothing_is_known_the_first_timing_surprises_nobody() -> None:
    model = CostModel()
    model.observe_verify(4, 1.7)
    assert not model.is_surprised
    assert [model.seconds(n) for n in (1, 4, 8)] == pytest.approx([1.7 / 4**POWER, 1.7, 1.7 * 2**POWER])
    assert [model.knows(n) for n in (1, 4, 5)] == [False, True, False]


@pytest.mark.parametrize(("off", "surprises"), [(0.41, True), (-0.41, True), (0.39, False), (-0.39, False)])
def test_plain_decoding_far_off_its_guess_is_timed_again(off: float, surprises: bool) -> None:
    model = CostModel()
    model.observe_verify(4, 0.0292)
    before = model.seconds(1)
    surprise(model, 1, off)
    assert model.is_surprised == surprises
    assert model.seconds(1) == pytest.approx(before * exp(off))
    assert model.seconds(4) == pytest.approx(0.0292)


def test_a_prior_of_another_shape_is_doubted_at_its_first_contradiction() -> None:
    model = probed({1: 100.0, 8: 102.0})
    for width in (1, 2, 1, 2, 1, 2, 8):
        model.observe_verify(width, Q4_0[width] / 1000)
    assert believed(model, (1, 2, 8)) == pytest.approx([16.4, 26.4, 54.0], rel=0.06)
    assert believed(model)[3] > 30.0  # the prior said 16.5


# Widths that were not timed, and wide ones.


@pytest.mark.parametrize(
    ("known", "foreseen"),
    [
        ({1: 10.0, 4: 14.0, 9: 40.0}, {2: 10 * 1.4**0.5, 6: 14 * (40 / 14) ** (log(6 / 4) / log(9 / 4))}),
        ({1: 10.0, 4: 14.0, 9: 40.0}, {18: 40 * 2 ** (log(4) / log(9)), 81: 160.0}),  # as from 1 to 9
        ({1: 10.0, 4: 12.0}, {2: 10 * 1.2**0.5, 8: 12 * 2**POWER, 400: 12 * 100**POWER}),  # at least POWER
        ({1: 10.0, 4: 12.0, 9: 8.0}, {6: 12 * (8 / 12) ** (log(6 / 4) / log(9 / 4)), 36: 8 * 4**POWER}),
        ({1: 10.0, 2: 16.0}, {4: 25.6, 16: 10 * 1.6**4}),
        ({1: 10.0}, {2: 10 * 2**POWER, 50: 10 * 50**POWER}),
    ],
)
def test_untimed_widths_lie_on_straight_lines(known: dict[int, float], foreseen: dict[int, float]) -> None:
    model = probed(known)
    assert believed(model, foreseen) == pytest.approx(list(foreseen.values()))
    assert believed(model, known) == pytest.approx(list(known.values()))


def test_lines_end_at_what_was_timed() -> None:
    model = CostModel()
    for width, milliseconds in {1: 10.0, 9: 24.0, 5: 18.0}.items():
        model.observe_verify(width, milliseconds / 1000)
    line = [10.0, 10 * 1.8 ** (log(2) / log(5)), 18.0, 18 * (24 / 18) ** (log(6 / 5) / log(9 / 5)), 24.0]
    assert believed(model, (1, 2, 5, 6, 9)) == pytest.approx(line)


def test_dips_are_kept_and_batches_padded_to_them() -> None:
    model = CostModel()
    for factor in (1.02, 0.98, 1.03, 0.97, 1.02, 0.98):
        for width, milliseconds in Q4_0.items():
            model.observe_verify(width, factor * milliseconds / 1000)
    assert believed(model) == pytest.approx(list(Q4_0.values()), rel=0.03)
    assert model.cheapest_width(3) == 4
    assert model.batch_seconds([3, 5]) == pytest.approx([model.seconds(4), model.seconds(5)])


@pytest.mark.parametrize("questions", [[(2,), (40,), (700,)], [(700,), (40,), (2,)], [(2, 40, 700)]])
def test_tables_grow_where_they_are_asked(questions: list[tuple[int, ...]]) -> None:
    model = probed({1: 10.0, 8: 40.0})
    found = {n: t for asked in questions for n, t in zip(asked, model.batch_seconds(asked), strict=True)}
    line = {n: 0.010 * n ** (log(4) / log(8)) for n in (2, 40, 700)}
    assert found == pytest.approx(line)
    assert {n: model.cheapest_width(n) for n in (3000, 2, 9000)} == {3000: 3000, 2: 2, 9000: 9000}
    wide = probed({1: 10.0, 60: 80.0})
    assert [wide.cheapest_width(n) for n in (2, 50)] == [2, 50]


def test_tables_grow_only_where_they_are_asked() -> None:
    """Each surprise once made them one wider, and a long run slower and slower."""
    model = CostModel()
    for i in range(200):
        surprise(model, 1 + i % 4, OFF, -OFF)
    assert len(model._seconds) < 100


def test_wide_evaluations_know_few_widths() -> None:
    """Each up to 17, then 15 % apart."""
    model = CostModel()
    for width in range(1, 401):
        model.observe_verify(width, 0.010 * width**0.6)
    known = model.learned().widths
    assert known[:20] == (*range(1, 18), 20, 22, 26)
    assert len(known) < 50
    assert all(1.09 < b / a < 1.19 for a, b in pairwise(known[17:]))


SHUFFLED = np.random.default_rng(0).permutation(400) + 1


@pytest.mark.parametrize("widths", [(1, *SHUFFLED.tolist()), range(1, 401), (1, *range(400, 1, -1))])
def test_widths_that_are_known_together_are_foreseen_in_any_order(widths: Collection[int]) -> None:
    """Width 34 began with the seconds of 32, the others seemed slow then, and all times grew by a tenth."""
    model = CostModel()
    for width in widths:
        model.observe_verify(width, 0.010 * width**0.6)
    assert believed(model, (1, 17, 36, 100)) == pytest.approx(
        [10 * w**0.6 for w in (1, 17, 36, 100)], rel=0.01
    )


@pytest.mark.parametrize(("width", "alike", "others"), [(16, (16,), (15, 17)), (36, (32, 34, 36), (31, 37))])
def test_wide_evaluations_are_known_together(
    width: int, alike: tuple[int, ...], others: tuple[int, ...]
) -> None:
    model = CostModel()
    model.observe_verify(1, 0.010)
    model.observe_verify(width, 0.070)
    assert all(model.knows(n) for n in alike)
    assert not any(model.knows(n) for n in others)


def test_widths_of_many_rows_are_learnt() -> None:
    """Width 36 is known by width 34."""
    model = CostModel()
    model.observe_verify(1, 0.010)
    for _ in range(8):
        model.observe_verify(36, 0.070)
    assert model.seconds(36) == pytest.approx(0.070, rel=0.06)
    assert model.seconds(1) == pytest.approx(0.010, rel=0.06)
    assert model.seconds(16) < model.seconds(36) < model.seconds(48)
    assert model.reach == 2 * 34
    assert model.batch_seconds([700])[0] > model.batch_seconds([512])[0]


# Averages.


def test_the_first_timings_of_a_width_are_averaged() -> None:
    """With 1, 1/2, 1/3 of each, as far as all times do not move together."""
    model = CostModel()
    surprise(model, 1, 3.0)
    assert moves(model, 4, OFF) == both(1.0, OFF)
    assert moves(model, 4, -0.15) == both(1 / 2, -0.15)
    assert moves(model, 1, OFF) == both(1 / 2, OFF)
    assert moves(model, 1, -0.1) == both(1 / 3, -0.1)
    assert model.n_timed == {1: 3, 4: 2}


def test_a_prior_counts_for_some_timings() -> None:
    model = probed(PAIR)
    surprise(model, 1, OFF)  # which scales
    assert moves(model, 1, OFF) == both(1 / (PROBED + 1), OFF)
    assert moves(model, 1, -0.1) == both(1 / (PROBED + 2), -0.1)
    assert moves(model, 4, 0.25) == both(1 / (PROBED + 1), 0.25)


def test_all_times_move_together_a_little() -> None:
    model = started(Q4_0, {1: 1})
    before, step = believed(model, (2, 3, 8, 30)), model.draft_step_seconds()
    surprise(model, 4, OFF)
    together = exp(TOGETHER * (1 - 1 / (PROBED + 1)) * OFF)
    assert believed(model, (2, 3, 8)) == pytest.approx([t * together for t in before[:3]])
    assert model.draft_step_seconds() == pytest.approx(step * together)


@pytest.mark.parametrize("n", [MOST, MOST + 1, 80])
def test_an_average_remembers_so_many_timings(n: int) -> None:
    model = started(PAIR, {4: n})
    assert moves(model, 4, 0.24) == both(1 / (MOST + 1), 0.24)


def test_prices_are_computed_anew_after_a_hundredth() -> None:
    model = started(PAIR, {1: 1, 4: LASTING})
    assert moves(model, 4, 0.06) == both(0.0, 0.06 * 7 / 8)  # an eighth of 0.06 is not yet seen
    surprise(model, 4, 0.06)
    assert log(model.seconds(4) / model.seconds(1) * 20 / 31) == pytest.approx(0.06 / 8 + 0.06 / 9)


def test_growth_with_the_context_reaches_widths_not_measured_meanwhile() -> None:
    model = probed(Q4_0)
    for i in range(300):
        model.observe_verify(4, 0.0292 * (1 + i / 300))
    assert model.seconds(4) == pytest.approx(2 * 0.0292, rel=0.05)
    assert model.seconds(1) == pytest.approx(2 * 0.0164, rel=0.25)


@pytest.mark.parametrize("seconds", [0.0, -0.1])
def test_times_that_cannot_be_teach_nothing(seconds: float) -> None:
    model = probed(Q4_0)
    before = believed(model)
    model.observe_verify(1, seconds)
    model.observe_draft(0, 3, 1.0)
    model.observe_draft(2, 3, seconds)
    assert (believed(model), model.n_timed) == (before, {})
    assert model.draft_step_seconds() == pytest.approx(0.0006)


# Hiccups, and changes that last.


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("width", [1, 4])
def test_an_outlier_counts_for_no_more_than_a_surprise_within_reason(width: int, sign: int) -> None:
    model = started(PAIR, {1: LASTING, 4: LASTING})
    n = PROBED + LASTING - (width == 1)  # the first timing of a run scales
    assert moves(model, width, sign * FAR_OFF) == both(1 / (n + 1), sign * OUTLIER)
    assert model.is_surprised
    surprise(model, width, 0.0)
    assert not model.is_surprised


@pytest.mark.parametrize("sign", [1, -1])
def test_a_surprise_within_reason_is_no_outlier(sign: int) -> None:
    model = started(PAIR, {1: LASTING, 4: LASTING})
    assert moves(model, 4, sign * 0.249) == both(1 / (PROBED + LASTING + 1), sign * 0.249)
    assert not model.is_surprised
    surprise(model, 4, sign * 0.251)
    assert model.is_surprised


@pytest.mark.parametrize("n", range(4))
def test_a_shorter_timing_of_a_width_timed_seldom_corrects_it_at_once(n: int) -> None:
    """What was longer, a probe's or the first timings, were hiccups; no other width had any."""
    model = started(PAIR, {1: 1, 4: n})
    moved = moves(model, 4, -FAR_OFF)
    assert moved == (both(1.0, -FAR_OFF) if n < LASTING else both(1 / (PROBED + n + 1), -OUTLIER))
    assert model.is_surprised


@pytest.mark.parametrize("n", range(3))
def test_a_longer_timing_corrects_nothing_at_once(n: int) -> None:
    model = started(PAIR, {1: 1, 4: n})
    assert moves(model, 4, FAR_OFF) == both(1 / (PROBED + n + 1), OUTLIER)


def test_three_outliers_in_a_row_move_everything() -> None:
    """The machine has become slower, and what the third shows is believed."""
    model = started(PAIR, {1: 1, 4: LASTING})
    slow, step, plain = model.seconds(4) * exp(FAR_OFF), model.draft_step_seconds(), model.seconds(1)
    for _ in range(2):
        model.observe_verify(4, slow)
        assert model.seconds(4) < 0.6 * slow
    model.observe_verify(4, slow)
    assert model.seconds(4) == pytest.approx(slow)
    own = OUTLIER / (PROBED + LASTING + 1) + OUTLIER / (PROBED + LASTING + 2)
    assert log(model.seconds(1) / plain) == pytest.approx(FAR_OFF - own)
    assert log(model.draft_step_seconds() / step) == pytest.approx(FAR_OFF - own)
    assert moves(model, 4, OFF) == both(1 / (PROBED + LASTING + 3), OFF)


def test_a_change_that_lasts_is_seen_in_all_widths_together() -> None:
    model = started(Q4_0, {1: LASTING, 4: LASTING, 2: 1})
    for width in (1, 2, 4):
        surprise(model, width, -FAR_OFF if width != 2 else -OUTLIER - 0.01)
    assert model.seconds(8) < 0.054 * exp(-0.9 * FAR_OFF)


def test_outliers_in_a_row_of_a_width_timed_seldom_move_that_width() -> None:
    """A probe may be wrong about one width."""
    model = started(PAIR, {1: LASTING})
    assert moves(model, 4, FAR_OFF) == both(1 / (PROBED + 1), OUTLIER)
    assert moves(model, 4, FAR_OFF) == both(1 / (PROBED + 2), OUTLIER)
    assert moves(model, 4, FAR_OFF) == both(1 / (PROBED + 3), FAR_OFF)


def test_outliers_of_both_signs_are_no_change() -> None:
    model = started(PAIR, {1: LASTING, 4: LASTING})
    for i, sign in enumerate((1, 1, -1, -1, 1, 1, -1)):
        assert moves(model, 4, sign * FAR_OFF) == both(1 / (PROBED + LASTING + 1 + i), sign * OUTLIER)
        assert model.is_surprised


def test_outliers_with_usual_timings_between_them_are_no_change() -> None:
    model = started(PAIR, {1: LASTING, 4: LASTING})
    for i in range(4):
        assert moves(model, 4, FAR_OFF) == both(1 / (PROBED + LASTING + 1 + i), OUTLIER)
        surprise(model, 1, 0.0)


@pytest.mark.parametrize(
    ("width", "times", "believed_times"),
    [(8, 3.0, 3.0), (8, 7.6, 7.6), (8, 8.9, 8 * LINEAR), (8, 50, 8 * LINEAR), (2, 2.3, 2 * LINEAR)],
)
def test_a_width_costs_no_more_than_single_evaluations(
    width: int, times: float, believed_times: float
) -> None:
    """The first timing is a hiccup then, as far as it is longer."""
    model = CostModel()
    model.observe_verify(1, 0.020)
    model.observe_verify(width, times * 0.020)
    assert believed(model, (1, width)) == pytest.approx([20.0, 20.0 * believed_times])
    assert model.is_surprised == (log(believed_times / width**POWER) > FOREIGN)


def test_what_a_probe_has_found_may_cost_more_than_single_evaluations() -> None:
    model = started({1: 20.0, 4: 110.0}, {1: 1})
    assert moves(model, 4, OFF) == both(1 / (PROBED + 1), OFF)


def test_a_spike_is_not_believed_but_a_lasting_change_is() -> None:
    model = CostModel()
    for _ in range(30):
        model.observe_verify(1, 0.010)
    model.observe_verify(1, 0.030)
    assert model.seconds(1) == pytest.approx(0.010, rel=0.04)
    for _ in range(3):
        model.observe_verify(1, 0.020)
    assert model.seconds(1) == pytest.approx(0.020, rel=0.01)


def test_outliers_of_both_signs_at_the_beginning_are_no_change() -> None:
    """The second corrects the first, and says nothing of a third: that width 1 had become slower, too."""
    model = CostModel()
    for width, milliseconds in ((4, 27.1), (1, 43.0), (1, 12.9), (3, 26.8)):
        model.observe_verify(width, milliseconds / 1e3)
    assert believed(model)[0] == pytest.approx(13.0, rel=0.1)


@pytest.mark.parametrize("prior", [None, curve(Q4_0)])
@pytest.mark.parametrize("width", [1, 4])
def test_a_hiccup_of_a_width_is_forgotten_with_its_next_timing(prior: CostCurve | None, width: int) -> None:
    model = CostModel(prior)
    model.observe_verify(width, 3 * 0.0292)
    model.observe_verify(width, 0.0292)
    assert model.seconds(width) == pytest.approx(0.0292)
    assert not model.is_surprised


@pytest.mark.parametrize("times", [1.3, 1.45, 3.0])
@pytest.mark.parametrize("width", [1, 4])
def test_a_hiccup_of_the_first_timing_leaves_no_trace(width: int, times: float) -> None:
    """It had scaled all times, and only its own width was corrected: no draft ever seemed to pay again."""
    model = probed(Q4_0)
    surprise(model, width, log(times), -log(times))
    assert believed(model) == pytest.approx(list(Q4_0.values()))
    assert model.draft_step_seconds() == pytest.approx(0.0006)


def test_what_is_twice_far_off_is_of_another_machine() -> None:
    model = probed(Q4_0)
    surprise(model, 1, log(3.0))
    assert model.is_surprised
    assert model.learned().widths != (1,)
    surprise(model, 1, 0.0)
    assert model.learned().widths == (1,)
    assert not model.knows_step


def test_a_probed_width_between_those_known_by_themselves_keeps_its_time() -> None:
    """It stood for its neighbour, which was never wider than a tenth."""
    model = probed({1: 10.0, 24: 50.0})
    assert believed(model, (24,)) == pytest.approx([50.0], rel=0.02)


def test_a_width_that_was_timed_often_is_no_longer_doubted() -> None:
    """It is padded, then, though none of its timings was a surprise."""
    model = CostModel(curve({1: 10.0, 2: 21.0, 3: 20.0}))
    surprise(model, 2, *(0.0,) * (LASTING - 1))
    assert model.cheapest_width(2) == 2
    surprise(model, 2, 0.0)
    assert model.cheapest_width(2) == 3


def test_a_hiccup_of_width_1_moves_no_width_that_was_timed() -> None:
    """Its correction once made width 4 a third of what it was, and every draft seemed to win."""
    model = CostModel()
    model.observe_verify(4, 0.0292)
    model.observe_verify(1, 0.0492)
    model.observe_verify(1, 0.0164)
    assert believed(model, (1, 4)) == pytest.approx([16.4, 29.2], rel=0.02)


def test_a_hiccup_of_the_first_width_does_not_stand_for_ever() -> None:
    """Four rows were once padded to five positions, and four were never timed again."""
    model = CostModel()
    model.observe_verify(4, 3 * 0.0292)
    assert model.cheapest_width(4) == 4
    for _ in range(5):
        model.observe_verify(5, 0.0423)
        assert model.cheapest_width(4) == 4
    assert believed(model)[4] == pytest.approx(42.3, rel=0.01)
    model.observe_verify(4, 0.0292)
    assert believed(model)[3] == pytest.approx(29.2, rel=0.01)


# Draft steps.


def timed_steps(*logarithms: float, step: float = 0.6) -> CostModel:
    """A model whose draft steps were each time off by so much."""
    model = probed(PAIR, step)
    for logarithm in logarithms:
        model.observe_draft(1, 0, model.draft_step_seconds() * exp(logarithm))
    return model


@pytest.mark.parametrize(
    ("offs", "moved"),
    [
        ([2.0], 2.0),  # the first is believed
        ([-2.0], -2.0),
        ([0.0, OFF], OFF / 2),
        ([0.0, 0.0, OFF], OFF / 3),
        ([0.0, 2.0], OUTLIER / 2),
        ([0.0, -2.0], -2.0),  # the first was a hiccup
        ([0.0, 0.0, -2.0], -2.0),
        ([0.0, 0.0, 0.0, -2.0], -OUTLIER / 4),
        ([0.0, 0.0, 0.0, -OFF], -OFF / 4),
        ([0.0] * MOST_STEPS + [OFF], OFF / (MOST_STEPS + 1)),
        ([0.0] * 50 + [OFF], OFF / (MOST_STEPS + 1)),
    ],
)
def test_draft_steps_are_averaged(offs: list[float], moved: float) -> None:
    model = timed_steps(*offs, step=0.0)
    assert log(model.draft_step_seconds() / (STEP_RATIO * 0.020)) == pytest.approx(moved, abs=1e-12)
    assert model.knows_step
    assert believed(model, (1, 4)) == pytest.approx([20.0, 31.0])
    assert not model.is_surprised


@pytest.mark.parametrize(("off", "moved"), [(OFF, OFF), (-OFF, -OFF), (2.0, OUTLIER), (-2.0, -OUTLIER)])
def test_a_probed_draft_step_counts_for_some_timings(off: float, moved: float) -> None:
    model = timed_steps(off)
    assert log(model.draft_step_seconds() / 0.0006) == pytest.approx(moved / (PROBED + 1))


def test_a_draft_step_of_a_blank_model_is_part_of_width_1() -> None:
    model = probed({1: 50.0}, step=0.0)
    assert not model.knows_step
    assert model.draft_step_seconds() == pytest.approx(0.12 * 0.050)
    surprise(model, 1, -FAR_OFF)
    assert model.draft_step_seconds() == pytest.approx(0.12 * 0.050 * exp(-FAR_OFF))


def test_what_the_draft_has_not_read_costs_a_part_of_a_step() -> None:
    model = timed_steps(step=0.0)
    model.observe_draft(2, 5, 0.003 * (2 + 5 * CATCH_UP))
    assert model.draft_step_seconds() == pytest.approx(0.003)
    assert model.drafting_seconds(4, 10) == pytest.approx(0.003 * (4 + 10 * CATCH_UP))
    assert model.drafting_seconds(1.5, 0) == pytest.approx(0.003 * 1.5)


def test_draft_steps_and_catching_up_are_told_apart() -> None:
    rng = np.random.default_rng(0)
    model = CostModel()
    model.observe_verify(1, 0.020)
    assert not model.knows_step
    for _ in range(40):
        n, unread = int(rng.integers(1, 5)), int(rng.choice([0, 0, 1, 10]))
        seconds = 0.002 * (n + CATCH_UP * unread)
        model.observe_draft(n, unread, seconds * float(np.exp(0.05 * rng.standard_normal())))
    assert model.draft_step_seconds() == pytest.approx(0.002, rel=0.05)
    assert model.drafting_seconds(1, 10) == pytest.approx(0.002 * (1 + 10 * CATCH_UP), rel=0.05)


def test_guesses_that_cost_nothing_leave_the_prior_of_the_target_alone() -> None:
    model = probed(Q4_0, step=0.0)
    model.observe_verify(1, 0.0164)
    for _ in range(5):
        model.observe_draft(3, 0, 20e-6)
    assert believed(model) == pytest.approx(list(Q4_0.values()))
    assert model.draft_step_seconds() == pytest.approx(20e-6 / 3)


def test_an_outlier_of_the_draft_says_nothing_of_the_target() -> None:
    model = started(PAIR, {1: 1, 4: LASTING})
    surprise(model, 4, FAR_OFF)
    model.observe_draft(1, 0, model.draft_step_seconds())
    assert model.is_surprised
    before = believed(model)
    for _ in range(5):
        model.observe_draft(1, 0, 5 * model.draft_step_seconds())
    assert believed(model) == before


def test_steps_that_read_more_get_dearer_as_the_target_does() -> None:
    model = probed(Q4_0)
    ratios = [0.0, *(t / 16.4 for t in (16.4, 26.4, 36.5, 36.5, 42.3))]  # more are never cheaper
    assert model.wide_steps(5) == pytest.approx(ratios)
    surprise(model, 1, OFF)
    assert model.wide_steps(5) == pytest.approx(ratios)
    assert probed({1: 10.0}).wide_steps(90)[90] == pytest.approx(90**POWER)


def test_steps_that_score_several_positions_count_for_more() -> None:
    model = probed(Q4_0)
    two, three, four = (t / 16.4 for t in (26.4, 36.5, 36.5))
    found = [model.narrow_steps(3, n) for n in (0, 2, 3, 4, 6, 8, 9, 10)]
    parts = [3, 3, 3, 2 + two, 3 * two, two + 2 * three, 3 * three, 2 * three + four]
    assert found == pytest.approx(parts)


# Padding, and widths that are allowed.


@pytest.mark.parametrize(
    ("milliseconds", "cheapest"),
    [
        ({1: 10.0, 2: 20.0, 3: 28.0, 4: 26.7}, [1, 2, 4, 4]),  # 4.6 % less
        ({1: 10.0, 2: 20.0, 3: 28.0, 4: 27.0}, [1, 2, 3, 4]),  # 3.6 %
        ({1: 10.0, 2: 30.0, 3: 28.0, 4: 26.7}, [1, 4, 4, 4]),
        ({1: 10.0, 2: 5.0, 3: 6.0, 4: 7.0}, [1, 2, 3, 4]),  # width 1 is never padded
    ],
)
def test_a_width_is_padded_where_that_saves_something(
    milliseconds: dict[int, float], cheapest: list[int]
) -> None:
    model = probed(milliseconds)
    assert [model.cheapest_width(n) for n in range(1, 5)] == cheapest
    assert model.batch_seconds(range(1, 5)) == pytest.approx([milliseconds[n] / 1000 for n in cheapest])
    assert [model.seconds(n) for n in range(1, 5)] == pytest.approx([t / 1e3 for t in milliseconds.values()])


def test_a_width_is_padded_once_it_was_timed_often_enough() -> None:
    """Or never."""
    model = started(Q4_0, {1: 1})
    assert model.cheapest_width(3) == 4
    padded = []
    for _ in range(4):
        surprise(model, 3, 0.1)
        padded.append(model.cheapest_width(3))
    assert padded == [3, 3, 4, 4]
    assert LASTING == 3


def test_a_width_that_is_known_by_its_neighbours_is_padded() -> None:
    model = started({1: 10.0, 2: 30.0, 4: 20.0}, {1: 1})
    assert [model.cheapest_width(n) for n in (2, 3)] == [4, 4]
    assert model.knows(3)


def test_only_allowed_widths_are_chosen() -> None:
    model = CostModel(curve(Q4_0), allowed={1, 5, 8})
    assert [model.cheapest_width(n) for n in range(1, 10)] == [1, 5, 5, 5, 5, 8, 8, 8, None]
    assert model.batch_seconds([1, 2, 6, 9]) == pytest.approx([0.0164, 0.0423, 0.054, inf])
    assert CostModel(curve(Q4_0), {1, 3, 4}).cheapest_width(3) == 4
    assert model.knows(9)  # nothing is to be found out
    assert not CostModel(allowed={1, 5}).knows(2)


@pytest.mark.parametrize("prior", [None, curve(Q4_0)])
def test_allowed_widths_may_be_wide(prior: CostCurve | None) -> None:
    model = CostModel(prior, allowed={1, 32, 100})
    assert [model.cheapest_width(n) for n in (1, 2, 32, 33, 100, 101)] == [1, 32, 32, 100, 100, None]
    assert model.batch_seconds([5, 90]) == pytest.approx([model.seconds(32), model.seconds(100)])


# Doubts.


def test_the_doubt_of_a_width_shrinks_with_its_timings() -> None:
    """Only next to the first position: that times may all be longer is of no interest."""
    model = started({1: 10.0, 2: 14.0, 4: 31.0}, {1: 1})
    for n, z in ((PROBED, 1.5), (PROBED + 1, -2.0)):
        exact = model.batch_seconds([1, 2, 4])
        factors = [b / a for a, b in zip(exact, model.batch_seconds([1, 2, 4], z), strict=True)]
        assert factors == pytest.approx([1.0, exp(z * NOISE / sqrt(PROBED)), exp(z * NOISE / sqrt(n))])
        surprise(model, 4, 0.0)
    (first, _), (second, _) = model.batch_seconds([2, 4], 2.0), model.batch_seconds([2, 4], -2.0)
    assert first == second == pytest.approx(0.014)


@pytest.mark.parametrize(
    ("width", "doubt"),
    [
        (2, APART + FAR * log(2)),
        (3, APART + FAR * log(4 / 3)),
        (5, APART + FAR * log(5 / 4)),
        (40, APART + FAR * log(10)),
    ],
)
def test_the_doubt_of_an_untimed_width_grows_with_the_way_to_the_next(width: int, doubt: float) -> None:
    model = probed(PAIR)
    exact, low, high = (model.batch_seconds([1, width], z)[1] for z in (0.0, -2.0, 2.0))
    assert [low / exact, high / exact] == pytest.approx([exp(-2 * doubt), exp(2 * doubt)])


def test_a_guess_is_no_neighbour_but_width_1_is() -> None:
    model = CostModel()
    exact, high = (model.batch_seconds([1, 3], z)[1] for z in (0.0, 2.0))
    assert high / exact == pytest.approx(exp(2 * (APART + FAR * log(3))))
    model = probed(PAIR)
    surprise(model, 1, FAR_OFF, 0.0)  # nothing of it is known any more
    exact, high = (model.batch_seconds([1, 3], z)[1] for z in (0.0, 2.0))
    assert high / exact == pytest.approx(exp(2 * (APART + FAR * log(3))))


def test_what_is_padded_as_the_first_is_as_sure() -> None:
    model = probed(Q4_0)
    first, second, third = model.batch_seconds([3, 4, 5], 2.0)
    assert first == second == pytest.approx(0.0292)
    assert third > model.seconds(5)


def test_what_is_not_allowed_costs_more_than_anything_at_any_doubt() -> None:
    """`--explain` of a run with `--exact` ended in a traceback."""
    model = CostModel(curve(PAIR), allowed={1, 4})
    assert model.batch_seconds([1, 4, 5, 17], 1.64)[2:] == [inf, inf]
    assert CostModel(curve(PAIR), {1}).batch_seconds([2, 3], -1.64) == [inf, inf]


@pytest.mark.parametrize(("offs", "n"), [([], 0.005), ([0.0], 1), ([0.0, 0.0], 2), ([0.0] * 20, MOST_STEPS)])
def test_the_doubt_of_a_draft_step_shrinks_with_its_timings(offs: list[float], n: float) -> None:
    model = timed_steps(*offs, step=0.0)
    step = model.draft_step_seconds()
    assert [model.draft_step_seconds(z) / step for z in (-1.0, 2.0)] == pytest.approx(
        [exp(-NOISE / sqrt(n)), exp(2 * NOISE / sqrt(n))]
    )


# Rounds.


def test_what_a_round_costs_besides_the_models_is_learnt_without_its_hiccups() -> None:
    model = CostModel()
    told = [model.observe_overhead(seconds, drafted=False) for seconds in (0.0, 2.0, 3.0, 9.0)]
    assert told == pytest.approx([0.0, 2.0, 3.0, 3 * 2.1])
    assert model.overhead_seconds == pytest.approx(2.1 + 0.1 * (6.3 - 2.1))


def test_what_rounds_with_drafts_cost_besides_is_no_part_of_plain_decoding() -> None:
    model = CostModel()
    told = [
        model.observe_overhead(n, drafted=drafted) for n, drafted in ((2.0, False), (5.0, True), (7.0, True))
    ]
    assert told == pytest.approx([2.0, 5.0, 6.0])
    assert model.overhead_seconds == 2.0


# What the next run begins with.


def test_the_next_run_begins_with_what_was_learnt() -> None:
    model = probed({1: 20.0, 4: 31.0, 9: 77.0})
    surprise(model, 1, OFF, -0.1)
    surprise(model, 30, 0.3)
    surprise(model, 4, 0.2)
    model.observe_draft(1, 0, 0.001)
    learned = model.learned()
    assert learned.widths == (1, 4, 9, 30)
    assert learned.verify_seconds == pytest.approx([model.seconds(w) for w in learned.widths])
    assert learned.draft_step_seconds == pytest.approx(model.draft_step_seconds())
    again, widths = CostModel(learned), (1, 2, 4, 7, 9, 18, 30, 80)
    assert believed(again, widths) == pytest.approx(believed(model, widths))
    assert again.learned().verify_seconds == pytest.approx(learned.verify_seconds)


def test_guesses_are_not_kept() -> None:
    model = CostModel()
    model.observe_verify(4, 0.050)
    kept = model.learned()
    assert (kept.widths, kept.draft_step_seconds) == ((1, 4), 0.0)
    assert kept.verify_seconds == pytest.approx((0.050 / 4**POWER, 0.050))


# What a damaged file might say.


@pytest.mark.parametrize("number", [nan, inf, -inf, 50.0, -50.0, 1e308])
@pytest.mark.parametrize("place", range(3))
def test_log_odds_that_cannot_be_are_refused(number: float, place: int) -> None:
    odds = [0.1, -0.2, 0.3]
    odds[place] = number
    with pytest.raises(ValueError, match="finite"):
        LearnedPrior(None, (odds[0], odds[1], odds[2]))
    LearnedPrior(curve(PAIR), (49.9, -49.9, 0.0))


@pytest.mark.parametrize("seconds", [nan, inf, -inf, 0.0, -1.0, 1e308, 1.1e6, 5e-324, 9e-13])
def test_times_that_cannot_be_are_refused(seconds: float) -> None:
    for times in ((seconds, 1.0), (1.0, seconds)):
        with pytest.raises(ValueError, match="seconds must be positive"):
            CostCurve((1, 4), times, 0.1)
    if seconds:
        with pytest.raises(ValueError, match="seconds must be positive"):
            CostCurve((1, 4), (1.0, 2.0), seconds)


@pytest.mark.parametrize(
    ("widths", "n_times", "complaint"),
    [
        ((), 0, "from width 1 on"),
        ((2, 3), 2, "from width 1 on"),
        ((-1, 1), 2, "from width 1 on"),
        ((1, 2), 1, "one time for each"),
        ((1, 2), 3, "one time for each"),
        ((1, 3, 3), 3, "ascend"),
        ((1, 4, 3), 3, "ascend"),
        ((1, WIDEST + 1), 2, "must be <= 65536"),
        ((1, 10**400), 2, "must be <= 65536"),
    ],
)
def test_widths_that_cannot_be_are_refused(widths: tuple[int, ...], n_times: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        CostCurve(widths, (1.0,) * n_times, 0.1)


@pytest.mark.parametrize("allowed", [None, {1, 2, 5, 9}])
def test_whatever_a_curve_may_say_can_be_used(allowed: set[int] | None) -> None:
    """It is corrected, too."""
    extremes = (SHORTEST, 1e-3, LONGEST)
    for *seconds, step in product(extremes, extremes, extremes, (0.0, *extremes)):
        model = CostModel(CostCurve((1, 2, 5), tuple(seconds), step), allowed)
        model.observe_verify(1, 1.2 * seconds[0])
        assert model.learned().widths == (1, 2, 5)
        for width in (1, 2, 4, 5, 9, 1):
            for _ in range(4):
                model.observe_verify(width, 0.011 * width**0.3)
                model.observe_draft(2, 1, 0.0022)
            model.learned()
        model.batch_seconds(range(1, 400))
        model.batch_seconds(range(1, 10), 2.0)
        assert model.seconds(1) == pytest.approx(0.011, rel=0.1)


def test_the_widest_curve_can_be_used() -> None:
    model = CostModel(CostCurve((1, WIDEST), (SHORTEST, LONGEST), 0.0))
    assert model.seconds(WIDEST) == pytest.approx(LONGEST, rel=0.05)
    assert model.seconds(2 * WIDEST) > LONGEST
