"""What a policy says of itself, and what it hands on to the next run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llamaspec.length.auto_length import AutoLength
from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.reasons import Reasons
from llamaspec.values import Draft, Round
from simulated import SEEDS, machine, mean, run, text
from simulator import play


def reasons() -> Reasons:
    policy, on = AutoLength(), machine("f16", 3.0)
    play(policy, on, text("informed", 1), seed=1)
    return policy.explain()


def test_reasons_add_up() -> None:
    why = reasons()
    played = run("f16", 3.0, "none", "informed", 1)
    assert {count.n_draft: count.n_rounds for count in why.lengths} == {
        n: played.lengths.count(n) for n in set(played.lengths)
    }
    assert sum(b.n_judged for b in why.bins) <= sum(played.lengths)
    assert all(0 <= b.n_accepted <= b.n_judged and 0 <= b.believed <= 1 for b in why.bins)
    assert [cost.width for cost in why.widths] == list(range(1, 18))
    assert sum(cost.n_timed for cost in why.widths) == len(played.lengths)


def test_reasons_predict_the_time_that_was_measured() -> None:
    why = reasons()
    assert why.predicted_tokens_per_second == pytest.approx(why.measured_tokens_per_second, rel=0.1)
    assert why.draft_step_seconds == pytest.approx(0.003, rel=0.1)
    assert why.widths[0].seconds == pytest.approx(0.0425, rel=0.1)
    assert why.explored_seconds < 0.03 * why.measured_seconds
    assert why.break_even_acceptance is not None


def test_reasons_before_the_first_round() -> None:
    why = AutoLength().explain()
    assert why.lengths == ()
    assert why.predicted_tokens_per_second is None
    assert why.measured_tokens_per_second is None
    assert {b.acceptance_rate for b in why.bins} == {None}


def test_experience_saves_the_next_run_what_this_one_had_to_learn() -> None:
    """Without a probe; over many texts, for one text can always begin unluckily."""
    gains = []
    for curve in ("q4_0", "f16", "flat"):
        on = machine(curve, 0.6)
        for name in ("constant 0.7", "constant 0.85", "informed", "stretches"):
            for seed in SEEDS:
                first = AutoLength()
                cold = play(first, on, text(name, seed), seed)
                warm = play(AutoLength(first.experience()), on, text(name, seed), seed + 1)
                gains.append(cold.seconds[-1] / warm.seconds[-1])
    assert mean(gains) >= 1.01


def test_experience_of_another_machine_does_no_harm() -> None:
    slow = AutoLength()
    play(slow, machine("flat", 0.6), text("constant 0.95", 0))
    for curve in ("m4", "q8_0"):
        on = machine(curve, 3.0)
        result = play(AutoLength(slow.experience()), on, text("constant 0.5", 0))
        assert result.worst_to_plain(96) <= 1 / 0.97


def test_damaged_experience_is_refused() -> None:
    known = AutoLength().experience()
    with pytest.raises(ValueError, match="not what a policy learns"):
        replace(known, acceptance=1.5)
    with pytest.raises(ValueError, match="not what a policy learns"):
        replace(known, confidence_levels=(0.0,))
    with pytest.raises(ValueError, match="do not belong together"):
        replace(known.costs, log_seconds=(0.0, 1.0))
    with pytest.raises(ValueError, match="must be finite"):
        replace(known.costs, catch_up=(0.4, float("nan")))


def verdict_after(
    rounds: list[tuple[int, float]], prior: CostCurve | None = None
) -> tuple[float | None, bool]:
    """Break-even acceptance, and whether it is known, after timings of widths; a draft step costs 3 ms."""
    policy = AutoLength(prior)
    row = policy.start_row()
    for width, seconds in rounds:
        draft = Draft(np.zeros(width - 1, dtype=np.int32), (), (0.5,) * (width - 1))
        row.observe(
            Round(draft, (), 0, width, n_draft_steps=width - 1, draft_seconds=0.003 * (width - 1),
                  verify_seconds=seconds)
        )  # fmt: skip
    why = policy.explain()
    return why.break_even_acceptance, why.break_even_is_known


def test_one_round_of_width_2_is_no_verdict() -> None:
    never = verdict_after([(1, 0.010), (2, 0.030)])
    assert never == (None, False)


def test_a_verdict_needs_several_timings_of_several_widths() -> None:
    steep = [(width, 0.010 * width) for width in (1, 2, 3, 4, 6, 9, 12, 17)]
    assert verdict_after(steep * 4) == (None, True)
    flat = [(width, 0.010 + 0.0001 * width) for width in (1, 2, 4, 8)]
    found, is_known = verdict_after(flat * 3)
    assert is_known
    assert found is not None


def test_doubt_outlives_the_run() -> None:
    """What one round of width 2 said is not believed by the next two runs."""
    policy = AutoLength()
    for _ in range(2):
        policy = AutoLength(policy.experience())
        row = policy.start_row()
        for width, seconds in ((1, 0.010), (2, 0.030)):
            draft = Draft(np.zeros(width - 1, dtype=np.int32), (), (0.5,) * (width - 1))
            row.observe(Round(draft, (), 0, width, n_draft_steps=width - 1, draft_seconds=0.003,
                              verify_seconds=seconds))  # fmt: skip
        assert not policy.explain().break_even_is_known
