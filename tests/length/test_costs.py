"""Expected costs of evaluations, compared with figures by hand."""

from __future__ import annotations

import pytest

from llamaspec.length.costs import CostCurve, Costs

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
    assert costs.seconds(4) == pytest.approx(300.0)
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
    assert spare == [(2, 2.0), (4, 6.0), (8, 14.0), (16, 30.0), (2, 8.0), (4, 24.0), (8, 56.0), (16, 120.0)]
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
    assert [costs.seconds(4), costs.step_seconds] == pytest.approx([0.12, 0.01])


def test_draft_steps_are_averaged_and_prompt_tokens_beside_them_count() -> None:
    costs = timed({1: 0.010})
    assert not costs.knows_step
    for _ in range(8):
        costs.observe_draft(2, 2, 0.0044)
    assert costs.knows_step
    assert costs.step_seconds == pytest.approx(0.002)
    assert costs.drafting_seconds(1, 0) == pytest.approx(0.002)
    assert costs.drafting_seconds(2, 30) == pytest.approx(0.01)
    costs.observe_draft(1, 0, 0.2)
    assert costs.step_seconds < 0.0022


def test_costs_of_a_busy_first_run_are_corrected() -> None:
    """A draft step of 1.1 s was kept, so the draft was never used, and its step was never timed again."""
    spoilt = CostCurve((1, 2, 4, 8, 16), (0.1, 0.4, 0.5, 0.6, 0.7), 1.1)
    costs = Costs(spoilt, is_settled=False)
    costs.observe_first_step(0.02)
    costs.observe_verify(1, 0.1)
    assert costs.step_seconds == pytest.approx(0.02)
    while (wanted := costs.next_untimed()) is not None:
        costs.observe_verify(wanted[0], 0.12)
    assert costs.seconds(2) < 0.3
    costs.observe_first_step(0.5)
    costs.observe_verify(1, 0.1)
    assert costs.step_seconds < 0.03, "one that is timed slower was held up"
    assert Costs(spoilt).next_untimed() is None


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
    assert costs.step_seconds == pytest.approx(0.002)
    costs.observe_draft(1, 16, 0.1)
    assert costs.step_seconds == pytest.approx(0.002), "it also processed a prompt"
    costs.observe_draft(1, 1, 0.1)
    assert costs.step_seconds < 0.0025, "it was held up"


def test_the_next_run_starts_with_the_learned_costs() -> None:
    costs = timed({1: 0.010, 4: 0.016, 32: 0.050})
    costs.observe_draft(1, 0, 0.002)
    curve = costs.learned()
    assert curve.widths == (1, 4, 32)
    assert curve.verify_seconds == pytest.approx((0.010, 0.016, 0.050), rel=0.05)
    assert curve.draft_step_seconds == pytest.approx(0.002)
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
