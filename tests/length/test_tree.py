"""Trees grow where their tokens are worth positions and steps, and learn what candidates are worth."""

from __future__ import annotations

import numpy as np
import pytest

from llamaspec.length.allocator import Pledge
from llamaspec.length.auto_length import AutoLength
from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.row_length import AutoRow
from llamaspec.length.tree import CandidateTree, FixedTree
from llamaspec.length.tree_growth import TreeAcceptance, TreeGrowth, tree_speed_up
from llamaspec.values import Draft, Round, Source

CONFIDENCES = (0.55, 0.2, 0.08, 0.04)


def growth(position: float, step: float, longest: int = 16) -> TreeGrowth:
    """With linear prices, in tokens."""
    acceptance = TreeAcceptance()
    prices, steps = np.linspace(0.0, position * longest, longest + 1), np.full(9, step)
    steps[0] = 0.0
    return TreeGrowth(acceptance, acceptance.usual(0.6), prices, steps, Pledge(), 1.0)


def grow(
    rule: TreeGrowth | FixedTree, tree: CandidateTree | None = None
) -> tuple[CandidateTree, Draft, list[int]]:
    """A tree whose candidates are equally sure everywhere, and how wide its steps were."""
    tree, widths = tree or CandidateTree(), list[int]()
    while nodes := rule.expand(tree):
        widths.append(len(nodes))
        tree.read += [node for node in nodes if node >= 0]
        for node in nodes:
            tree.add(node, range(10 * len(tree), 10 * len(tree) + 4), CONFIDENCES)
        assert len(widths) < 30
    return tree, tree.draft(rule.keep(tree), Source.MODEL), widths


def test_free_positions_are_filled_and_dear_ones_make_a_chain() -> None:
    _, wide, _ = grow(growth(position=0.005, step=0.1))
    _, narrow, steps = grow(growth(position=0.3, step=0.03))
    _, nothing, _ = grow(growth(position=1.0, step=0.1))
    assert len(wide) == 16
    assert wide.n_branches > 4
    assert narrow.is_chain
    assert 0 < len(narrow) <= sum(steps)
    assert len(nothing) == 0


def test_dear_steps_make_bushes_and_cheap_ones_make_trees_deep() -> None:
    depths = []
    for step in (0.02, 0.2, 0.6):
        _, draft, steps = grow(growth(position=0.01, step=step))
        depths.append(max(len(draft.path(i)) for i in range(len(draft))))
        assert depths[-1] <= len(steps)
        assert max(steps) <= 8
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > depths[-1]


def test_a_token_is_kept_only_with_those_before_it_and_never_without_a_better_sibling() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        rule, tree = growth(0.02, 0.05), CandidateTree()
        while nodes := rule.expand(tree):
            assert all(tree.parents[node] in (-1, *tree.read) for node in nodes if node >= 0)
            tree.read += [node for node in nodes if node >= 0]
            for node in nodes:
                sure = np.sort(rng.dirichlet([0.5] * 6))[::-1][:4]
                tree.add(node, range(4), sure.tolist())
        kept = set(rule.keep(tree))
        for i in kept:
            assert tree.parents[i] in (-1, *kept)
            assert tree.ranks[i] == 0 or i - 1 in kept


def test_the_first_branch_is_that_of_the_best() -> None:
    _, draft, _ = grow(FixedTree((2, 2)))
    assert draft.parents is not None
    assert draft.parents.tolist() == [-1, 0, 0, -1, 3, 3]
    assert draft.tokens.tolist()[:2] == [0, 40]


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


def values_of(acceptance: TreeAcceptance, tree: CandidateTree) -> list[float]:
    """Products along the paths; a candidate is no likelier than its better siblings."""
    found: list[float] = []
    for i, parent in enumerate(tree.parents):
        better = [j for j in range(i + 1) if tree.parents[j] == parent]
        chance = min(acceptance.chance(tree.ranks[j], tree.confidences[j]) for j in better)
        found.append(chance * (found[parent] if parent >= 0 else 1.0))
    return found


def most_worth(values: list[float], prices: list[float]) -> tuple[int, float]:
    """How many of some tokens to verify, by trying every number, and what that is worth."""
    values = sorted(values, reverse=True)
    worth = [sum(values[:n]) - prices[n] for n in range(1, min(len(values) + 1, len(prices)))]
    best = max(worth, default=0.0)
    return (worth.index(best) + 1, best) if best > 0 else (0, 0.0)


def looked_ahead(usual: tuple[float, ...], depth: int) -> list[float]:
    """The best 64 tokens of a tree whose levels are cut to the best 32."""
    found, level = list[float](), [1.0]
    for _ in range(depth):
        level = sorted((a * round(b, 2) for a in level for b in usual), reverse=True)[:32]
        found += level
    return sorted(found, reverse=True)[:64]


def read_next(rule: TreeGrowth, tree: CandidateTree) -> list[int]:
    """What the draft should read, by trying every number of levels."""
    values, prices = values_of(rule.acceptance, tree), rule.prices.tolist()
    unread = sorted(set(range(len(tree))) - set(tree.read), key=lambda i: (-values[i], i))[:8]
    (_, best), chosen = most_worth(values, prices), list[int]()
    for depth in (1, 2, 4, 8):
        pool = values + [values[i] * ahead for i in unread for ahead in looked_ahead(rule.usual, depth)]
        n, worth = most_worth(pool, prices)
        if n:
            least = sorted(pool, reverse=True)[n - 1]
            nodes = [i for i in unread if values[i] * rule.usual[0] >= least]
            worth -= depth * rule.steps[len(nodes)]
            if nodes and worth > best:
                best, chosen = worth, nodes
    return chosen


@pytest.mark.parametrize("seed", range(12))
def test_trees_grow_as_plain_search_lets_them(seed: int) -> None:
    """Positions, steps and confidences are others every time."""
    rng = np.random.default_rng(seed)
    acceptance, steps = TreeAcceptance(), np.cumsum(rng.uniform(0.002, 0.03, 9))
    steps[0] = 0.0
    prices = np.cumsum(rng.choice([0.001, 0.02, 0.3], 17, p=[0.3, 0.6, 0.1]))
    prices[0] = 0.0
    rule = TreeGrowth(
        acceptance, acceptance.usual(float(rng.uniform(0.3, 0.9))), prices, steps, Pledge(), 1.0
    )
    tree, n_levels = CandidateTree(), 0
    assert rule.expand(tree) == [-1]
    tree.add(-1, range(4), np.sort(rng.dirichlet([0.7] * 5))[::-1][:4].tolist())
    while nodes := rule.expand(tree):
        n_levels += 1
        assert rule.pledge.is_drafting
        assert nodes == read_next(rule, tree)
        tree.read += nodes
        for node in nodes:
            tree.add(node, range(4), np.sort(rng.dirichlet([0.7] * 5))[::-1][:4].tolist())
    assert read_next(rule, tree) == []
    values = values_of(acceptance, tree)
    n, _ = most_worth(values, prices.tolist())
    best = sorted(range(len(values)), key=lambda i: (-values[i], i))[:n]
    assert rule.keep(tree) == sorted(best)
    assert (rule.pledge.n_draft, rule.pledge.is_drafting) == (n, False)
    assert n_levels or seed


@pytest.mark.parametrize("acceptance", [0.35, 0.62, 0.9])
@pytest.mark.parametrize("position", [0.004, 0.05, 0.3])
def test_the_speed_of_the_best_tree_is_that_of_plain_search(position: float, acceptance: float) -> None:
    usual = TreeAcceptance().usual(acceptance)
    prices, steps = np.cumsum([0.0, *[position] * 20]), np.array([0.0, *np.linspace(0.05, 0.12, 8)])
    best = 1.0
    for depth in (1, 2, 4, 8):
        values = looked_ahead(usual, depth)
        for n in range(1, min(len(values), 20) + 1):
            width = min(max(n / depth, 1.0), 8.0)
            step = steps[int(width)] + (width - int(width)) * (
                steps[min(int(width) + 1, 8)] - steps[int(width)]
            )
            best = max(best, (1 + sum(values[:n])) / (1 + prices[n] + depth * step))
    assert tree_speed_up(usual, prices, steps) == pytest.approx(best)
    assert best > 1.0 or position > 0.1


def test_along_a_path_each_position_teaches() -> None:
    draft = Draft(np.arange(4, dtype=np.int32), (), (0.6, 0.6, 0.2, 0.2), parents=np.array([-1, 0, 0, -1]))
    acceptance = TreeAcceptance()
    assert acceptance.learn(Round(draft, (0, 2), 0, width=5)) == [True, False]
    assert acceptance.learn(Round(draft, (3,), 0, width=5)) == [False]
    assert acceptance.learn(Round(draft, (0, 1), 0, width=5)) == [True, True]


def test_a_tree_is_as_fast_as_the_best_chain_at_least() -> None:
    usual, one = TreeAcceptance().usual(0.6), (0.6, 0.0)
    for position in (0.01, 0.1, 0.3):
        prices, steps = np.linspace(0.0, position * 16, 17), np.full(9, 0.05)
        assert tree_speed_up(usual, prices, steps) >= tree_speed_up(one, prices, steps)


def opened(curve: CostCurve) -> tuple[AutoLength, AutoRow]:
    """A row whose draft has been accepted in six of ten positions."""
    policy = AutoLength(curve)
    row = policy.start_row()
    for i in range(60):
        n = 0 if i < 12 else 1
        while n and n < 3 and row.wants_more(Draft(np.zeros(n, np.int32), (), (0.6,) * n)):
            n += 1
        draft = Draft(np.zeros(n, np.int32), (), (0.6,) * n)
        seconds = curve.verify_seconds[n]
        path = tuple(range(n)) if i % 5 < 3 else ()
        row.observe(Round(draft, path, 0, n + 1, 1, i + 1, n, n * curve.draft_step_seconds, seconds))
    return policy, row


@pytest.mark.parametrize(("slope", "grows"), [(0.01, True), (0.35, False)])
def test_automatic_length_branches_where_widths_are_cheap(slope: float, *, grows: bool) -> None:
    curve = CostCurve(tuple(range(1, 18)), tuple(0.04 * (1 + slope * i) for i in range(17)), 0.002)
    _, row = opened(curve)
    rule = row.tree()
    assert (rule is not None) == grows
    if rule is not None:
        _, draft, _ = grow(rule)
        assert draft.n_branches > 1


def test_a_tree_grows_where_another_source_had_no_draft_after_all() -> None:
    """Copies that a constraint does not allow: their number stood as the row's, and no position was left."""
    curve = CostCurve(tuple(range(1, 18)), tuple(0.04 * (1 + 0.01 * i) for i in range(17)), 0.002)
    _, row = opened(curve)
    n = 0
    while row.wants_more(Draft(np.zeros(n, np.int32), (), (1.0,) * n, Source.GRAMMAR)):
        n += 1
    assert n == 15
    assert row.tree() is not None


def test_the_same_rounds_give_the_same_beliefs_with_trees() -> None:
    """`measure.reasons` plays rounds again; it asks for no tree."""
    curve = CostCurve(tuple(range(1, 18)), tuple(0.04 * (1 + 0.01 * i) for i in range(17)), 0.002)
    policies = []
    for asks in (True, False):
        policy, row = opened(curve)
        for i in range(10):
            tree = Draft(
                np.arange(4, dtype=np.int32), (), (0.6, 0.6, 0.2, 0.2), parents=np.array([-1, 0, 0, -1])
            )
            rule = row.tree() if asks else None
            assert (rule is not None) == asks
            row.observe(Round(tree, (0, 2), 0, 5, 1, 100 + i, 2, 0.004, 0.042, n_draft_scored=3))
        policies.append(policy)
    a, b = (policy.shared for policy in policies)
    assert a.trees.shares == b.trees.shares
    assert a.costs.draft_step_seconds() == b.costs.draft_step_seconds()
    assert a.usual[Source.MODEL].level == b.usual[Source.MODEL].level
