"""What a policy says of itself, and what it hands on to the next run."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest

from llamaspec.length.auto_length import AutoLength
from llamaspec.length.cost_curve import CostCurve
from llamaspec.measure.reasons import Reasons, explain
from llamaspec.values import Draft, Round, Source
from simulated import SEEDS, machine, mean, run, text
from simulator import play


class Recorded:
    """A policy whose rounds are kept; its own row."""

    def __init__(self, policy: AutoLength) -> None:
        self.policy, self.rounds = policy, list[Round]()

    def start_row(self, *, drops: bool = False) -> Recorded:
        self.row = self.policy.start_row(drops=drops)
        return self

    def wants_more(self, draft: Draft) -> bool:
        return self.row.wants_more(draft)

    def n_verified(self, draft: Draft) -> int:
        return self.row.n_verified(draft)

    def trial_width(self) -> int:
        return self.row.trial_width()

    def observe_trial(self, width: int, seconds: float) -> None:
        self.row.observe_trial(width, seconds)

    def width(self, n_positions: int) -> int | None:
        return self.row.width(n_positions)

    def observe(self, round_: Round) -> None:
        self.rounds.append(round_)
        self.row.observe(round_)

    def close(self) -> None:
        self.row.close()


def reasons() -> Reasons:
    recorded, on = Recorded(AutoLength()), machine("f16", 3.0)
    play(recorded, on, text("informed", 1), seed=1)
    assert recorded.policy.shared.trial is not None
    return explain(AutoLength(), recorded.rounds, recorded.policy.shared.trial)


@pytest.mark.parametrize("sources", [{Source.MODEL}, {Source.NGRAM}])
def test_rounds_that_are_played_again_teach_the_same(sources: set[Source]) -> None:
    """Also of a policy that has seen other texts, with a copy made in between."""
    recorded, on, passage = Recorded(AutoLength(sources=sources)), machine("q4_0", 0.6), text("stretches", 1)
    copies = passage if Source.NGRAM in sources else None
    play(recorded, on, text("informed", 1), seed=1, copies=text("informed", 1) if copies else None)
    before = copy.deepcopy(recorded.policy)
    recorded.rounds.clear()
    play(recorded, on, passage, seed=2, copies=copies)
    why = explain(before, recorded.rounds, recorded.policy.shared.trial)
    assert before.experience() == recorded.policy.experience()
    assert sum(count.n_rounds for count in why.lengths) == len(recorded.rounds)
    assert why.n_tries <= sum(len(round_.draft) > 0 for round_ in recorded.rounds)
    assert (why.acceptance is None) == (sources == {Source.NGRAM})
    assert (why.n_ngram_verified > 0) == (sources == {Source.NGRAM})


def test_an_exploration_is_counted_with_what_it_lost() -> None:
    """One draft token at 30 ms in place of 10 ms, and rejected: two plain tokens."""
    plain = Round(Draft(), (), 0, 1, verify_seconds=0.01)
    tried = Round(Draft(np.zeros(1, dtype=np.int32), (), (0.5,)), (), 0, 2, n_draft_steps=1,
                  draft_seconds=0.001, verify_seconds=0.012)  # fmt: skip
    why = explain(AutoLength(), [plain, tried])
    assert why.n_tries == 1
    assert why.explored_seconds == pytest.approx(0.003, rel=0.1)
    assert why.gained_seconds == pytest.approx(-why.explored_seconds)


def test_reasons_add_up() -> None:
    why = reasons()
    played = run("f16", 3.0, "none", "informed", 1)
    assert {count.n_draft: count.n_rounds for count in why.lengths} == {
        n: played.lengths.count(n) for n in set(played.lengths)
    }
    assert sum(b.n_judged for b in why.bins) <= sum(played.lengths)
    assert all(0 <= b.n_accepted <= b.n_judged and 0 <= b.believed <= 1 for b in why.bins)
    assert [cost.width for cost in why.widths] == list(range(1, 17))
    assert sum(cost.n_timed for cost in why.widths) == 1 + len(played.lengths)


def test_reasons_predict_the_time_that_was_measured() -> None:
    why = reasons()
    assert why.predicted_tokens_per_second == pytest.approx(why.measured_tokens_per_second, rel=0.1)
    assert why.draft_step_seconds == pytest.approx(0.003, rel=0.1)
    assert why.widths[0].seconds == pytest.approx(0.0425, rel=0.1)
    assert why.explored_seconds < 0.03 * why.measured_seconds
    assert why.break_even_acceptance is not None


def test_reasons_before_the_first_round() -> None:
    why = explain(AutoLength(), [])
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
    assert mean(gains) >= 1.003


def test_experience_of_another_machine_does_no_harm() -> None:
    slow = AutoLength()
    play(slow, machine("flat", 0.6), text("constant 0.95", 0))
    for curve in ("m4", "q8_0"):
        on = machine(curve, 3.0)
        result = play(AutoLength(slow.experience()), on, text("constant 0.5", 0))
        assert result.worst_to_plain(96) <= 1 / 0.965


def test_damaged_experience_is_refused() -> None:
    known = AutoLength().experience()
    with pytest.raises(ValueError, match="do not belong together"):
        replace(known, means=(0.0,))
    with pytest.raises(ValueError, match="widths must ascend"):
        replace(known, widths=(1,), means=(*known.means, 0.0), variances=(*known.variances, 0.0))
    with pytest.raises(ValueError, match="must be finite"):
        replace(known, log_odds=(0.4, float("nan"), 0.6))
    with pytest.raises(ValueError, match="must be finite"):
        replace(known, means=(0.0, 1e300))
    with pytest.raises(ValueError, match="must be finite"):
        replace(known, variances=(0.1, -1.0))


def test_draft_tokens_that_were_looked_up_are_counted_together() -> None:
    """Of this text and of earlier ones; not what a constraint forced, nor what a model drafted."""
    rounds = [
        Round(Draft.certain([1] * n, source=source), tuple(range(k)), 0, n + 1)
        for source, n, k in (
            (Source.NGRAM, 3, 1),
            (Source.STORE, 5, 2),
            (Source.GRAMMAR, 7, 7),
            (Source.MODEL, 2, 1),
        )
    ]
    why = explain(AutoLength(sources={Source.MODEL, Source.NGRAM, Source.STORE}), rounds)
    assert (why.n_ngram_verified, why.n_ngram_accepted) == (2 + 3, 1 + 2)  # up to the first rejected one
    assert sum(bin_.n_judged for bin_ in why.bins) == 2
    assert [(count.n_draft, count.n_rounds) for count in why.lengths] == [(2, 1), (3, 1), (5, 1), (7, 1)]


def test_acceptance_is_believed_of_the_middle_of_a_bin() -> None:
    policy = AutoLength()
    calibration = policy.shared.calibrations[policy.shared.drafting]
    believed = {(b.low, b.high): b.believed for b in explain(policy, []).bins}
    assert believed[0.7, 0.9] == calibration.probability(0.8)
    assert believed[0.1, 0.3] == calibration.probability(0.2)
    assert believed[0.1, 0.3] < believed[0.7, 0.9] < calibration.probability(0.9)


def test_the_verdict_knows_the_longest_drafts() -> None:
    """All widths cost as much as 14 single positions: only 16 tokens at once are worth it."""
    policy = AutoLength(CostCurve((1, 2, 16), (0.01, 0.14, 0.14), 1e-9))
    assert policy.shared.allocator.longest == 15
    needed = explain(policy, []).break_even_acceptance
    assert needed is not None
    assert sum(needed**n for n in range(16)) == pytest.approx(14, rel=0.02)


def timed(width: int, seconds: float) -> Round:
    draft = Draft(np.zeros(width - 1, dtype=np.int32), (), (0.5,) * (width - 1))
    return Round(draft, (), 0, width, n_draft_steps=width - 1, draft_seconds=0.003 * (width - 1),
                 verify_seconds=seconds)  # fmt: skip


def verdict_after(
    rounds: list[tuple[int, float]], prior: CostCurve | None = None
) -> tuple[float | None, bool]:
    """Break-even acceptance, and whether it is known, after timings of widths; a draft step costs 3 ms."""
    why = explain(AutoLength(prior), [timed(width, seconds) for width, seconds in rounds])
    return why.break_even_acceptance, why.break_even_is_known


def test_one_round_of_width_2_is_no_verdict() -> None:
    assert not verdict_after([(1, 0.010), (2, 0.030)])[1]


def test_a_verdict_needs_several_timings_of_several_widths() -> None:
    steep = [(width, 0.010 * width) for width in range(1, 18)]
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
        why = explain(policy, [timed(1, 0.010), timed(2, 0.030)])
        assert not why.break_even_is_known
