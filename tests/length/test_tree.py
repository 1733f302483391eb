"""When trees are faster than chains, and how the chances of their candidates are learnt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llamaspec.length.acceptance import expected_accepted
from llamaspec.length.costs import CostCurve, Costs
from llamaspec.length.policy import AutoLength
from llamaspec.length.tree import SHARES, TreeAcceptance, TreePlan, looked_ahead, plan_tree
from llamaspec.values import NO_DRAFT, Draft, Evaluation, Round

FLAT = CostCurve((1, 16), (0.010, 0.011), 0.003)
STEEP = CostCurve((1, 2, 16), (0.010, 0.018, 0.130), 0.001)
BRANCHED = Draft(np.arange(4, dtype=np.int32), (), (0.6, 0.6, 0.2, 0.2), parents=np.array([-1, 0, 0, -1]))


def planned(curve: CostCurve, chance: float) -> TreePlan | None:
    """Plan a tree, compared with the best chain."""
    seconds = Costs(curve).seconds_of(1, 16)
    times = seconds + curve.draft_step_seconds * np.arange(16)
    rate = ((1 + expected_accepted(chance, 15)) / times).max()
    step = curve.draft_step_seconds
    return plan_tree(TreeAcceptance(), chance, seconds - seconds[0], step, Costs(curve), rate, seconds[0])


def test_a_tree_is_planned_only_if_positions_are_cheap_and_first_candidates_miss() -> None:
    plan = planned(FLAT, 0.5)
    assert plan is not None
    assert plan.usual == pytest.approx((0.5, 0.225, 0.065, 0.03), abs=0.006)
    assert planned(STEEP, 0.5) is None
    assert planned(FLAT, 0.97) is None


def test_all_candidates_but_the_first_are_learnt() -> None:
    acceptance = TreeAcceptance()
    before = acceptance.chance(1, 0.2)
    for _ in range(100):  # the first candidate is accepted, and after it the second one
        acceptance.learn(Round(BRANCHED, (0, 2), 0, Evaluation(5)))
    assert acceptance.chance(1, 0.2) > before
    assert acceptance.shares[0] > SHARES[0]
    assert acceptance.shares[1] == SHARES[1]
    assert acceptance.chance(0, 0.001) < 0.1


def test_looking_ahead_finds_the_most_valuable_tokens() -> None:
    assert looked_ahead((0.5, 0.2), 1).tolist() == pytest.approx([0.5, 0.2])
    assert looked_ahead((0.5, 0.2), 2).tolist() == pytest.approx([0.5, 0.25, 0.2, 0.1, 0.1, 0.04])


@pytest.mark.parametrize(("trees", "curve", "grows"), [(False, FLAT, 0), (True, STEEP, 0), (True, FLAT, 1)])
def test_trees_are_off_by_default(trees: bool, curve: CostCurve, grows: bool) -> None:
    policy = AutoLength(curve, trees=trees)
    sequence = policy.start_sequence(drops=True)
    for i in range(16):  # widths are timed, too
        sequence.wants_more(NO_DRAFT)
        width = sequence.timed_width() or 1
        sequence.observe(
            Round(NO_DRAFT, (), 0, Evaluation(width, 1, i), verify_seconds=policy.costs.seconds(width))
        )
    assert (sequence.tree() is not None) == grows
    sequence.reading.n_to_read = 64
    assert sequence.tree() is None, "the draft model processes a chunk of the prompt instead"
    assert sequence.n_verified(BRANCHED) == 4  # the tree has chosen
    sequence.observe(replace(Round(BRANCHED, (0,), 0, Evaluation(5)), verify_seconds=0.011, n_draft_steps=2))
    assert policy.costs.step_seconds == pytest.approx(curve.draft_step_seconds, rel=0.2)
