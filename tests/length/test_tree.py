"""What candidates are worth is learnt, and a tree is planned where it promises more than the best chain."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest

from llamaspec.drafters.tree import CandidateTree, TreeGrowth
from llamaspec.length.acceptance import Acceptance
from llamaspec.length.auto_length import AutoLength
from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.row_length import AutoRow
from llamaspec.length.tree import WIDEST, TreeAcceptance, TreePlan, looked_ahead, tree_speed_up
from llamaspec.values import Draft, Round, Source

BRANCHED = Draft(np.arange(4, dtype=np.int32), (), (0.6, 0.6, 0.2, 0.2), parents=np.array([-1, 0, 0, -1]))
PLAIN = Round(Draft(), (), 0, 1, 1, 61, verify_seconds=0.04)


def test_what_candidates_are_worth_is_learnt() -> None:
    """The second is always drawn: it becomes worth more than the first."""
    acceptance = TreeAcceptance()
    before = acceptance.chance(0, 0.6), acceptance.chance(1, 0.2), acceptance.usual(0.5)[1]
    draft = Draft(np.arange(3, dtype=np.int32), (), (0.6, 0.2, 0.1), parents=np.array([-1, -1, -1]))
    for _ in range(60):
        assert acceptance.learn(Round(draft, (1,), 0, width=4)) == [False]
    after = acceptance.chance(0, 0.6), acceptance.chance(1, 0.2), acceptance.usual(0.5)[1]
    assert after[0] < before[0] - 0.2
    assert after[1] > before[1] + 0.2
    assert after[2] > before[2] + 0.1


def test_what_candidates_are_worth_at_first_and_after_one_round() -> None:
    acceptance = TreeAcceptance()
    assert acceptance.usual(0.6) == pytest.approx((0.6, 0.4 * 0.45, 0.4 * 0.13, 0.4 * 0.06))
    even = acceptance.chance(0, 0.5), acceptance.chance(1, 0.5), acceptance.chance(3, 0.5)
    assert even == pytest.approx((1 / (1 + np.exp(-0.4)), 0.5, 0.5))
    assert acceptance.chance(0, 0.9) == pytest.approx(1 / (1 + np.exp(-0.4 - 0.8 * np.log(9))))
    assert acceptance.chance(2, 0.9) == pytest.approx(0.9)  # what is not the first is taken at its word
    assert acceptance.chance(1, 0.01) == pytest.approx(0.5 * acceptance.chance(1, 0.02))
    acceptance.first.level = 40.0
    assert acceptance.chance(0, 1.0) == 0.998
    draft = Draft(np.arange(4, dtype=np.int32), (), (0.5,) * 4, parents=np.array([-1, -1, -1, 0]))
    fresh = TreeAcceptance()
    assert fresh.learn(Round(draft, (1,), 0, width=5)) == [False]
    assert fresh.shares == pytest.approx([0.45 + 0.02 * 0.55, 0.13 - 0.02 * 0.13, 0.06])
    assert fresh.first.level < 0.4
    before = list(fresh.shares)
    assert fresh.learn(Round(draft, (0, 3), 0, width=5)) == [True, True]  # says nothing of what came second
    assert fresh.shares == before


def test_each_candidate_of_a_position_teaches_with_its_confidence() -> None:
    """The fourth was drawn: three were not, and its share grows."""
    found, first, others = TreeAcceptance(), Acceptance(0.4, 0.8), Acceptance(0.0, 1.0)
    draft = Draft(np.arange(4, dtype=np.int32), (), (0.6, 0.2, 0.1, 0.05), parents=np.full(4, -1))
    for _ in range(3):
        assert found.learn(Round(draft, (3,), 0, width=5)) == [False]
        first.pass_tokens(1)
        first.learn(0.0, 0.6)
        for confidence, drawn in ((0.2, 0.0), (0.1, 0.0), (0.05, 1.0)):
            others.pass_tokens(1)
            others.learn(drawn, confidence)
    for confidence in (0.3, 0.8):
        assert found.first.probability(confidence, 1.0) == first.probability(confidence, 1.0)
        assert found.others.probability(confidence, 1.0) == others.probability(confidence, 1.0)
    assert found.shares == pytest.approx([0.45 * 0.98**3, 0.13 * 0.98**3, 1.0 - 0.94 * 0.98**3])


def test_along_a_path_each_position_teaches() -> None:
    acceptance = TreeAcceptance()
    assert acceptance.learn(Round(BRANCHED, (0, 2), 0, width=5)) == [True, False]
    assert acceptance.learn(Round(BRANCHED, (3,), 0, width=5)) == [False]
    assert acceptance.learn(Round(BRANCHED, (0, 1), 0, width=5)) == [True, True]


def best_of_levels(usual: tuple[float, ...], depth: int) -> list[float]:
    """The best 64 tokens of a tree whose levels are cut to the best 32."""
    found, level = list[float](), [1.0]
    for _ in range(depth):
        level = sorted((a * round(b, 2) for a in level for b in usual), reverse=True)[:32]
        found += level
    return sorted(found, reverse=True)[:64]


@pytest.mark.parametrize("acceptance", [0.35, 0.62, 0.9])
@pytest.mark.parametrize(("position", "longest"), [(0.004, 20), (0.05, 20), (0.3, 20), (0.004, 3)])
def test_the_speed_of_the_best_tree_is_that_of_plain_search(
    position: float, longest: int, acceptance: float
) -> None:
    usual = TreeAcceptance().usual(acceptance)
    prices, steps = np.cumsum([0.0, *[position] * longest]), np.array([0.0, *np.linspace(0.05, 0.12, WIDEST)])
    best = 1.0
    for depth in (1, 2, 4, 8):
        values = best_of_levels(usual, depth)
        assert looked_ahead(usual, depth).tolist() == pytest.approx(values)
        for n in range(1, min(len(values), longest) + 1):
            width = min(max(n / depth, 1.0), 8.0)
            low, high = steps[int(width)], steps[min(int(width) + 1, 8)]
            step = low + (width - int(width)) * (high - low)
            best = max(best, (1 + sum(values[:n])) / (1 + prices[n] + depth * step))
    assert tree_speed_up(usual, prices, steps) == pytest.approx(best)
    assert best > 1.0 or position > 0.1


def test_a_tree_is_as_fast_as_the_best_chain_at_least() -> None:
    usual, one = TreeAcceptance().usual(0.6), (0.6, 0.0)
    for position in (0.01, 0.1, 0.3):
        prices, steps = np.linspace(0.0, position * 16, 17), np.full(9, 0.05)
        assert tree_speed_up(usual, prices, steps) >= tree_speed_up(one, prices, steps)


def sloping(slope: float, step: float = 0.002) -> CostCurve:
    """A position more costs such a part of the first."""
    return CostCurve(tuple(range(1, 18)), tuple(0.04 * (1 + slope * i) for i in range(17)), step)


def drafted(n: int, source: Source = Source.MODEL, confidence: float = 0.6) -> Draft:
    return Draft(np.zeros(n, np.int32), (), (confidence,) * n, source)


def opened(curve: CostCurve, *, trees: bool = True) -> tuple[AutoLength, AutoRow]:
    """A row whose draft has been accepted in six of ten positions."""
    policy = AutoLength(curve, trees=trees)
    row = policy.start_row(drops=True)
    for i in range(60):
        n = 0 if i < 12 else 1
        while n and n < 3 and row.wants_more(drafted(n)):
            n += 1
        path = tuple(range(n)) if i % 5 < 3 else ()
        seconds, step = curve.verify_seconds[n], n * curve.draft_step_seconds
        row.observe(Round(drafted(n), path, 0, n + 1, 1, i + 1, n, step, seconds))
    policy.shared.budget.left = 8.0  # no width is hoped to be cheaper than it was
    return policy, row


@pytest.mark.parametrize(("slope", "grows"), [(0.01, True), (0.35, False)])
def test_automatic_length_branches_where_widths_are_cheap(slope: float, *, grows: bool) -> None:
    _, row = opened(sloping(slope))
    rule = row.tree(TreeGrowth)
    assert (rule is not None) == grows
    if rule is not None:
        tree = CandidateTree()
        while nodes := rule.expand(tree):
            tree.read += [node for node in nodes if node >= 0]
            for node in nodes:
                tree.add(node, range(4), (0.55, 0.2, 0.08, 0.04))
        assert tree.draft(rule.keep(tree), Source.MODEL).n_branches > 1


def planned(row: AutoRow) -> TreePlan | None:
    return row.tree(lambda plan: plan)


def test_a_tree_costs_what_positions_and_steps_cost_at_its_own_rate() -> None:
    policy, row = opened(sloping(0.015))
    costs, plan = policy.shared.costs, planned(row)
    assert plan is not None
    assert plan.acceptance is policy.shared.trees
    assert plan.usual == pytest.approx(policy.shared.trees.usual(plan.usual[0]))
    assert 0.5 < plan.usual[0] < 0.8
    seconds, plain = [costs.seconds(n) for n in range(1, 17)], policy.shared.plain_rate(1)
    steps = [costs.draft_step_seconds() * ratio for ratio in costs.wide_steps(WIDEST)]
    faster = tree_speed_up(plan.usual, plain * (np.array(seconds) - seconds[0]), plain * np.array([*steps]))
    assert plan.rate == pytest.approx(plain * faster)
    assert plan.prices.tolist() == pytest.approx([plan.rate * (each - seconds[0]) for each in seconds])
    assert plan.steps.tolist() == pytest.approx([plan.rate * step for step in steps])
    assert plan.steps[1] < plan.steps[8]


def test_of_rows_that_draft_together_each_has_its_share_of_a_tree() -> None:
    """They share the draft step, and each pays for its own positions, which all cost the same here."""
    policy, row = opened(sloping(0.01))
    alone, other = planned(row), policy.start_row(drops=True)
    pledge = policy.shared.pledges[1]
    pledge.is_asking = pledge.is_drafting = True
    row.observe(PLAIN)
    pledge.is_drafting = True
    both = planned(row)
    assert alone is not None
    assert both is not None
    assert both.steps[1] / both.rate == pytest.approx(0.5 * alone.steps[1] / alone.rate, rel=0.02)
    assert both.prices[3] / both.rate == pytest.approx(alone.prices[3] / alone.rate, rel=0.02)
    other.close()


def test_what_a_row_that_grows_a_tree_has_pledged() -> None:
    """It drafts until its draft is made; then others know how many positions it needs."""
    policy, row = opened(sloping(0.01))
    (pledge,) = policy.shared.pledges
    row.observe(PLAIN)
    assert (pledge.is_drafting, pledge.has_drafted) == (False, False)
    assert planned(row) is not None
    assert (pledge.n_draft, pledge.is_drafting, pledge.has_drafted) == (0, True, True)
    assert row.n_verified(BRANCHED) == 4
    assert (pledge.n_draft, pledge.is_drafting, pledge.has_drafted) == (4, False, True)


def test_a_row_whose_tree_is_none_has_pledged_nothing() -> None:
    policy, row = opened(sloping(0.35))
    (pledge,) = policy.shared.pledges
    row.observe(PLAIN)
    assert planned(row) is None
    assert (pledge.n_draft, pledge.is_drafting, pledge.has_drafted) == (0, False, False)


def test_no_tree_where_none_may_grow_or_nothing_is_known() -> None:
    assert planned(opened(sloping(0.01), trees=False)[1]) is None
    assert planned(AutoLength(sloping(0.01)).start_row(drops=True)) is None
    assert planned(AutoLength().start_row(drops=True)) is None


def test_where_a_draft_is_only_tried_it_is_a_chain() -> None:
    """Nobody knows yet what a draft step takes."""
    row = AutoLength(sloping(0.01, step=0.0)).start_row(drops=True)
    row.observe(Round(drafted(0), (), 0, 1, 1, 1, verify_seconds=0.04))
    assert planned(row) is None
    assert row.wants_more(drafted(0))


def test_a_tree_must_promise_more_than_the_best_chain() -> None:
    """Positions for second candidates would pay, but hardly: 1 % is not worth a tree."""
    grows = [planned(opened(sloping(slope))[1]) is not None for slope in (0.02, 0.06, 0.07, 0.08, 0.12)]
    assert grows == sorted(grows, reverse=True)
    assert grows[0]
    assert not grows[-1]


def test_a_tree_grows_where_another_source_had_no_draft_after_all() -> None:
    """Copies that a constraint does not allow: their number stood as the row's, and no position was left."""
    policy, row = opened(sloping(0.01))
    n = 0
    while row.wants_more(drafted(n, Source.GRAMMAR, 1.0)):
        n += 1
    assert n == 15
    plan = planned(row)
    assert plan is not None
    assert len(plan.prices) == 16
    assert policy.shared.pledges[0].n_draft == 0


def test_copies_must_be_worth_more_than_a_tree() -> None:
    """Copies that are surer than this are preferred to the best chain; to a tree, only still surer ones."""
    least = []
    for branches in (True, False):
        policy, row = opened(sloping(0.01), trees=branches)
        planned(row)  # from now on it is known who drafts
        row.observe(PLAIN)
        policy.shared.sources |= {Source.NGRAM}
        copies = drafted(0, Source.NGRAM)
        least.append(
            min(
                sure
                for sure in np.linspace(0.05, 0.95, 19).tolist()
                if copy.deepcopy(row).wants_more(replace(copies, ahead=(sure,) * 15))
            )
        )
    assert least[0] > least[1] > 0.1


def test_the_same_rounds_give_the_same_beliefs_with_trees() -> None:
    """`measure.reasons` plays rounds again; it asks for no tree."""
    policies = []
    for asks in (True, False):
        policy, row = opened(sloping(0.01))
        for i in range(10):
            assert (planned(row) is not None) if asks else True
            row.observe(Round(BRANCHED, (0, 2), 0, 5, 1, 100 + i, 2, 0.004, 0.042, n_draft_scored=3))
        policies.append(policy)
    a, b = (policy.shared for policy in policies)
    assert a.trees.shares == b.trees.shares
    assert a.costs.draft_step_seconds() == b.costs.draft_step_seconds()
    assert a.usual[Source.MODEL].level == b.usual[Source.MODEL].level
    assert (a.budget.gain, a.budget.left) == (b.budget.gain, b.budget.left)
