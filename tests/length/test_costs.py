"""Expected costs of evaluations, compared with figures by hand."""

from __future__ import annotations

import pytest

from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.costs import Costs
from llamaspec.values import Attention

STEPPED = {1: 10.0, 2: 16.0, 3: 22.0, 4: 12.0, 8: 20.0, 16: 60.0, 32: 50.0, 64: 90.0, 128: 100.0, 512: 400.0}


def timed(times: dict[int, float], turns: int = 6, costs: Costs | None = None) -> Costs:
    costs = costs or Costs()
    for _ in range(turns):
        for width, seconds in times.items():
            costs.observe_verify(width, seconds)
    return costs


def test_a_curve_with_steps_is_known_at_every_width_that_was_timed() -> None:
    costs = timed(STEPPED)
    for width, seconds in STEPPED.items():
        assert costs.seconds(width) == pytest.approx(seconds, rel=0.02)
    assert costs.seconds(6) == pytest.approx(16.0, rel=0.02)  # between 4 and 8
    assert costs.seconds(200) == pytest.approx(156.0, rel=0.02)
    assert costs.widest_timed() == 512


def test_seconds_of_many_widths_are_those_of_each() -> None:
    costs = timed(STEPPED)
    assert costs.seconds_of(1, 4).tolist() == pytest.approx([10.0, 16.0, 22.0, 12.0], rel=0.02)
    for first, last, stride in ((2, 20, 3), (1, 700, 1), (600, 600, 1), (1, 9, 2)):
        each = [costs.seconds(width) for width in range(first, last + 1, stride)]
        assert costs.seconds_of(first, last, stride).tolist() == pytest.approx(each)
    costs.observe_verify(1, 10.5)
    assert costs.seconds_of(1, 1)[0] == costs.seconds(1)


def test_beyond_the_widest_width_the_cost_is_assumed_constant() -> None:
    assert timed({1: 10.0, 2: 15.0}).seconds(64) == pytest.approx(15.0, rel=0.02)


@pytest.mark.parametrize("hiccup", [3.0, 10.0])
def test_one_slow_evaluation_changes_little(hiccup: float) -> None:
    costs = timed({1: 10.0, 4: 20.0})
    costs.observe_verify(4, 20.0 * hiccup)
    assert costs.seconds(4) == pytest.approx(20.0, rel=0.1)
    assert costs.seconds(1) == pytest.approx(10.0, rel=0.05)
    assert costs.is_surprised


def test_a_slow_first_timing_is_corrected_by_the_second() -> None:
    costs = timed({1: 10.0})
    costs.observe_verify(4, 300.0)
    assert costs.seconds(4) > 80.0
    costs.observe_verify(4, 20.0)
    assert costs.seconds(4) == pytest.approx(20.0, rel=0.02)


def test_each_width_is_timed_once_and_later_once_more() -> None:
    """Plain rounds are padded to them, if as many seconds can be spared as that is expected to cost.

    The first evaluation of a width may also compile kernels, so a second one follows once there is time.
    """
    costs, spare = timed({1: 10.0}), []
    assert Costs().next_untimed() is None, "plain decoding comes first"
    while (wanted := costs.next_untimed()) is not None:
        width, seconds = wanted
        spare.append((width, round(seconds, 1)))
        costs.observe_verify(width, 10.0 + 2.0 * (width - 1))
    assert [width for width, _ in spare] == [2, 4, 8, 16, 2, 4, 8, 16]
    assert [seconds for _, seconds in spare] == pytest.approx([2, 6, 14, 30, 8, 24, 56, 120], rel=0.05)
    assert timed({1: 10.0}, costs=Costs(pads=False)).next_untimed() is None


def test_a_machine_that_gets_slower_as_a_whole_is_followed_at_all_widths() -> None:
    costs = timed({1: 10.0, 4: 20.0, 8: 40.0})
    for width in (4, 1, 4, 1):
        costs.observe_verify(width, {1: 30.0, 4: 60.0}[width])
    assert costs.seconds(1) == pytest.approx(30.0, rel=0.15)
    assert costs.seconds(8) == pytest.approx(120.0, rel=0.2)


def test_a_wrong_width_of_a_prior_is_corrected_alone() -> None:
    costs = Costs(CostCurve((1, 4, 8), (0.010, 0.012, 0.014), 0.001))
    for _ in range(4):
        costs.observe_verify(1, 0.010)
        costs.observe_verify(4, 0.036)
    assert costs.seconds(4) == pytest.approx(0.036, rel=0.1)
    assert costs.seconds(8) == pytest.approx(0.014, rel=0.2)


def test_a_prior_of_a_faster_machine_keeps_its_shape() -> None:
    costs = Costs(CostCurve((1, 4), (0.010, 0.012), 0.001))
    costs.observe_verify(1, 0.1)
    assert [costs.seconds(4), costs.drafting_seconds(1)] == pytest.approx([0.12, 0.01], rel=0.01)


def test_draft_steps_are_averaged_and_prompt_tokens_beside_them_count() -> None:
    costs = timed({1: 0.010})
    assert not costs.knows_step
    for _ in range(8):
        costs.observe_draft(2, 2, 0.0044)
    assert costs.knows_step
    assert costs.drafting_seconds(1) == pytest.approx(0.002, rel=0.02)
    assert costs.drafting_seconds(2, 30) == pytest.approx(0.01, rel=0.02)
    costs.observe_draft(1, 0, 0.2)
    assert costs.drafting_seconds(1) < 0.0022


def test_costs_of_a_busy_first_run_are_corrected() -> None:
    """A draft step of 1.1 s was kept, so the draft was never used, and its step was never timed again."""
    spoilt = CostCurve((1, 2, 4, 8, 16), (0.1, 0.4, 0.5, 0.6, 0.7), 1.1, 0.0, (0.0,) + 4 * (0.08,))
    costs = Costs(spoilt)
    costs.observe_first_step(0.02)
    costs.observe_verify(1, 0.1)
    assert costs.drafting_seconds(1) == pytest.approx(0.02, rel=0.1)
    for _ in range(4):  # runs, each of which times a width again
        while (wanted := costs.next_untimed()) is not None:
            costs.observe_verify(wanted[0], 0.12)
        costs = Costs(costs.learned())
        costs.observe_verify(1, 0.1)
    assert costs.seconds(2) < 0.15
    costs.observe_first_step(0.5)
    costs.observe_verify(1, 0.1)
    assert costs.drafting_seconds(1) < 0.03, "one that is timed slower was held up"


def test_a_stall_of_the_first_evaluation_does_not_spoil_a_known_curve() -> None:
    """It made all wider batches and the draft step 200 times as expensive, in this run and all later ones."""
    costs = Costs(CostCurve((1, 2, 4), (0.004, 0.005, 0.006), 0.002))
    for seconds in (0.8, 0.004, 0.004, 0.004):
        costs.observe_verify(1, seconds)
    learnt = costs.learned()
    assert learnt.verify_seconds == pytest.approx((0.004, 0.005, 0.006), rel=0.15)
    assert learnt.draft_step_seconds == pytest.approx(0.002, rel=0.15)


def test_a_draft_step_that_was_timed_first_does_not_follow_the_machine() -> None:
    costs = Costs()
    costs.observe_first_step(0.002)
    costs.observe_verify(1, 0.5)
    assert costs.knows_step
    assert costs.drafting_seconds(1) == pytest.approx(0.002, rel=0.15)
    costs.observe_draft(1, 16, 0.1)
    assert costs.drafting_seconds(1) == pytest.approx(0.002, rel=0.15), "it also processed a prompt"
    costs.observe_draft(1, 1, 0.1)
    assert costs.drafting_seconds(1) < 0.003, "it was held up"


def test_the_next_run_starts_with_the_learned_costs() -> None:
    costs = timed({1: 0.010, 4: 0.016, 32: 0.050})
    costs.observe_draft(1, 0, 0.002)
    curve = costs.learned()
    assert curve.widths == (1, 4, 32)
    assert curve.verify_seconds == pytest.approx((0.010, 0.016, 0.050), rel=0.05)
    assert curve.draft_step_seconds == pytest.approx(0.002, rel=0.02)
    assert Costs(curve).learned().verify_seconds == pytest.approx(curve.verify_seconds)
    assert Costs().learned().widths == (1,)
    assert Costs().learned().draft_step_seconds == 0.0


@pytest.mark.parametrize(
    ("widths", "seconds", "step", "match"),
    [
        ((2, 3), (1.0, 1.0), 0.1, "from width 1"),
        ((1, 2), (1.0,), 0.1, "one time for each"),
        ((1, 3, 2), (1.0, 1.0, 1.0), 0.1, "ascend"),
        ((1, 1 << 20), (1.0, 1.0), 0.1, "<= 65536"),
        ((1,), (0.0,), 0.1, "positive"),
        ((1,), (float("nan"),), 0.1, "positive"),
        ((1,), (1.0,), -1.0, "positive"),
    ],
)
def test_impossible_curves_are_refused(
    widths: tuple[int, ...], seconds: tuple[float, ...], step: float, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        CostCurve(widths, seconds, step)


def deep(costs: Costs, width: int, seconds: float, depth: float) -> None:
    """Time an evaluation of one sequence with cached tokens."""
    costs.observe_verify(width, seconds, Attention().plus(depth, width))


def test_what_is_learnt_at_one_depth_holds_at_another() -> None:
    """A cached token costs the first position 0.001 and each other one 0.0004."""
    costs, shallow = Costs(), {1: 10.0, 2: 12.0, 4: 15.0, 8: 22.0}
    for depth in (0, 8_000, 0, 8_000):
        for _ in range(3):
            for width, seconds in shallow.items():
                deep(costs, width, seconds + depth * (0.001 + 0.0004 * (width - 1)), depth)
    for depth in (0, 4_000, 16_000):
        for width, seconds in shallow.items():
            expected = seconds + depth * (0.001 + 0.0004 * (width - 1))
            assert costs.seconds(width, Attention().plus(depth, width)) == pytest.approx(expected, rel=0.08)
    again = Costs(costs.learned())
    assert again.seconds(8, Attention().plus(16_000, 8)) == pytest.approx(82.8, rel=0.08)
    assert costs.learned().at(16_000).verify_seconds[-1] == pytest.approx(82.8, rel=0.08)


def test_chunks_of_a_prompt_show_what_cached_tokens_cost() -> None:
    costs = Costs()
    for begin in range(0, 16_384, 512):
        attention = Attention().plus(begin + 256, 512)
        costs.observe_prompt(512, 300.0 + 0.0005 * (attention.first + attention.others), attention)
    timed({1: 10.0}, costs=costs)
    deep(costs, 1, 18.0, 16_384)
    deep(costs, 1, 18.0, 16_384)
    assert costs.seconds(1, Attention(16_384)) == pytest.approx(18.2, rel=0.05)
    assert costs.seconds(1) == pytest.approx(10.0, rel=0.1)


def test_a_busy_machine_changes_only_the_scale() -> None:
    costs = timed({1: 10.0, 2: 12.0, 4: 15.0, 8: 22.0, 16: 40.0})
    for _ in range(50):
        costs.observe_verify(1, 20.0, is_disturbed=True)
        costs.observe_verify(4, 60.0, is_disturbed=True)
    assert costs.next_untimed() is None, "all widths are known"
    assert costs.seconds(4) / costs.seconds(1) == pytest.approx(1.5, rel=0.02)
    assert costs.seconds(1) > 18.0
    timed({1: 10.0}, costs=costs)
    assert costs.seconds(4) == pytest.approx(15.0, rel=0.05)


def test_a_kept_timing_is_repeated_after_some_runs() -> None:
    costs = timed({1: 10.0, 2: 12.0, 4: 15.0, 8: 22.0, 16: 40.0})
    repeated = []
    for _ in range(6):
        costs = Costs(costs.learned())
        costs.observe_verify(1, 10.0)
        repeated.append(costs.next_untimed() is not None)
    assert repeated[:2] == [False, False]
    assert any(repeated[2:4])


def test_a_width_that_is_not_used_is_timed_again_in_a_long_run() -> None:
    costs = timed({1: 10.0, 2: 12.0, 4: 15.0, 8: 22.0, 16: 40.0})
    assert costs.next_untimed() is None
    timed({1: 10.0}, 5_000, costs)
    assert costs.next_untimed() is not None


def test_on_a_machine_that_is_always_busy_drafts_have_a_price_too() -> None:
    costs, seconds = Costs(), {1: 20.0, 2: 26.0, 4: 36.0, 8: 60.0, 16: 110.0}
    for _ in range(2):
        costs.observe_verify(1, seconds[1], is_disturbed=True)
    assert costs.knows_plain
    while (wanted := costs.next_untimed()) is not None:
        costs.observe_verify(wanted[0], seconds[wanted[0]], is_disturbed=True)
    for width, expected in seconds.items():
        assert costs.seconds(width) == pytest.approx(expected, rel=0.2)
    costs.observe_verify(1, 10.0)
    assert costs.next_untimed() is not None, "all are timed again as soon as the machine is calm"


@pytest.mark.parametrize("is_disturbed", [False, True])
def test_a_pause_is_told_apart_from_the_seconds_of_an_evaluation(is_disturbed: bool) -> None:
    costs = timed({1: 10.0, 4: 15.0})
    assert costs.observe_verify(4, 16.0, is_disturbed=is_disturbed) == pytest.approx(16.0)
    assert costs.observe_verify(4, 3_600.0, is_disturbed=is_disturbed) < 130.0
    assert costs.seconds(1) < 15.0
    costs.observe_draft(1, 0, 1.0)
    for n_unread in (0, 2, 20):
        assert costs.observe_draft(1, n_unread, 3_600.0) < 30.0
    assert costs.drafting_seconds(1) == pytest.approx(1.0, rel=0.5)


def test_a_first_draft_step_that_waited_for_the_disk_is_timed_again() -> None:
    """The draft was never tried again, in any run."""
    costs = timed({1: 0.06})
    costs.observe_draft(1, 0, 20.0)
    assert not costs.knows_step
    costs.observe_draft(1, 0, 0.015)
    assert costs.drafting_seconds(1) == pytest.approx(0.015, rel=0.15)
    slow = timed({1: 0.06})
    for _ in range(4):
        slow.observe_draft(1, 0, 0.3)
    assert slow.drafting_seconds(1) > 0.06, "it is as slow as that"


def test_a_draft_step_that_was_held_up_is_corrected_by_the_first_that_was_not() -> None:
    """The draft was hardly used in the first run, because its first step had waited for the disk."""
    costs = Costs()
    costs.observe_first_step(0.035)
    timed({1: 0.06}, costs=costs)
    costs.observe_draft(1, 1, 0.015)
    assert costs.drafting_seconds(1) == pytest.approx(0.015, rel=0.15)
