"""Medians, quartiles, speed-ups and verdicts of measurements, compared with values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from llamaspec.measure.audit import Audit, Fork
from llamaspec.measure.compare import Arm, Comparison, SpeedUp
from llamaspec.measure.probe import Probe, WidthTiming
from llamaspec.measure.turns import Spread
from rounds import a_round, a_text, taking


def test_a_median_lies_between_its_quartiles() -> None:
    assert Spread.of([4.0, 1.0, 2.0, 16.0, 8.0]) == Spread(2.0, 4.0, 8.0)
    assert Spread(2.0, 4.0, 8.0).half == 3.0


def test_the_speed_of_an_arm_is_that_of_its_median_run() -> None:
    arm = Arm("x", tuple(taking(seconds) for seconds in (1.0, 2.0, 8.0)))
    assert arm.seconds == [1.0, 2.0, 8.0]
    assert arm.rates == [4.0, 2.0, 0.5]
    assert arm.tokens_per_second == 2.0
    assert arm.acceptance_rate is None


def test_the_acceptance_of_an_arm_is_that_of_all_its_runs() -> None:
    runs = (a_text([a_round((1, 2, 3), accepted=3)]), a_text([a_round((1,), accepted=0)]))
    assert Arm("x", runs).acceptance_rate == 3 / 4
    assert Arm("x", runs).n_drafted == 4


def compared(*speculative: tuple[int, ...]) -> Comparison:
    plain = Arm("target alone", tuple(taking(seconds) for seconds in (1.0, 2.0, 4.0)))
    runs = tuple(a_text([a_round(text[:-1], len(text) - 1, text[-1])]) for text in speculative)
    return Comparison((plain, Arm("speculative", runs)), same_file=False)


def test_a_speed_up_is_run_against_run() -> None:
    """Not median to median: a busy minute slows both arms of a turn."""
    found = compared((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4))  # one second each
    faster, same = found.speed_up(found.speculative), found.speed_up(found.target)
    assert faster is not None
    assert faster.mean == pytest.approx(2.0)  # 1, 2 and 4 times
    assert same == SpeedUp(1.0, 1.0, 1.0)


def test_the_next_measurement_lies_in_the_interval() -> None:
    """`compare` printed 1.51x ± .03, and 13 minutes later .98x ± .01."""
    noise = np.random.default_rng(1)
    n, inside, trials = 5, 0, 2000
    for _ in range(trials):
        first, second = (
            SpeedUp.of((1.3 * np.exp(0.1 * noise.standard_normal(n))).tolist()) for _ in range(2)
        )
        assert first.low is not None
        assert first.high is not None
        inside += first.low <= second.mean <= first.high
    assert 0.93 < inside / trials < 0.97


def test_differences_between_prompts_do_not_widen_the_interval() -> None:
    """Five prompts, each measured once, gave 1.35x (0.91 to 1.99)."""
    found = SpeedUp.of([1.0, 2.0, 4.0] * 2, n_cases=3)
    assert [found.mean, found.low, found.high] == pytest.approx([2.0, 2.0, 2.0])
    noise = np.random.default_rng(1)
    prompts, inside, trials = np.log([1.1, 1.5, 2.2] * 2), 0, 2000
    for _ in range(trials):
        first, second = (
            SpeedUp.of(np.exp(prompts + 0.05 * noise.standard_normal(6)).tolist(), 3) for _ in range(2)
        )
        assert first.low is not None
        assert first.high is not None
        inside += first.low <= second.mean <= first.high
    assert 0.93 < inside / trials < 0.97
    assert SpeedUp.of([1.0, 1.2, 1.1], n_cases=2).low is None, "only one run repeats another"


def test_one_different_run_is_reported() -> None:
    right = (1, 2, 3, 4)
    assert compared(right, right, right).same_text
    assert not compared(right, right, (1, 2, 3, 9)).same_text
    assert not compared((1, 2, 3), right, right).same_text


def test_either_finding_makes_an_audit_fail() -> None:
    fork = Fork(3, 4, "a", "b", 0.01)
    sound = Audit(9, (), True, None)
    assert sound.is_lossless
    assert not Audit(9, (fork,), True, None).is_lossless
    assert not Audit(9, (), True, 0).is_lossless
    changed = Audit(9, (), True, None, {"beside others": 2}, 9)
    assert (sound.is_exact, changed.is_exact, changed.is_lossless) == (True, False, True)


PROBE = Probe(
    depths=(64, 1024),
    left_out_depths=(),
    widths=(
        WidthTiming(1, (Spread(0.009, 0.010, 0.020), Spread(0.9, 1.0, 1.1)), 0.0),
        WidthTiming(2, (Spread(0.010, 0.011, 0.021), Spread(1.0, 1.1, 1.2)), 0.0),
        WidthTiming(4, (Spread(0.013, 0.014, 0.024), Spread(1.3, 1.4, 1.5)), 0.1),
    ),
    draft_step=Spread(0.001, 0.001, 0.001),
)


def test_the_curve_is_that_of_the_shortest_context() -> None:
    assert PROBE.curve.widths == (1, 2, 4)
    assert PROBE.curve.verify_seconds == (0.010, 0.011, 0.014)
    assert PROBE.curve.draft_step_seconds == 0.001
