"""Trees grow where their tokens are worth positions and steps, and drafts list them branch by branch."""

from __future__ import annotations

import numpy as np
import pytest

from llamaspec.drafters.tree import CONTEXT, CandidateTree, FixedTree, TreeGrowth
from llamaspec.length.tree import WIDEST, TreeAcceptance, TreePlan, looked_ahead
from llamaspec.values import Draft, Source

CONFIDENCES = (0.55, 0.2, 0.08, 0.04)


def growth(position: float, step: float, longest: int = 16) -> TreeGrowth:
    """With linear prices, in tokens."""
    acceptance = TreeAcceptance()
    prices, steps = np.linspace(0.0, position * longest, longest + 1), np.full(WIDEST + 1, step)
    steps[0] = 0.0
    return TreeGrowth(TreePlan(acceptance, acceptance.usual(0.6), prices, steps, rate=1.0))


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
        assert max(steps) <= WIDEST
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > depths[-1]


def test_a_token_is_kept_only_with_those_before_it_and_never_without_a_better_sibling() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        rule, tree = growth(0.02, 0.05), CandidateTree()
        while nodes := rule.expand(tree):
            assert all(tree.parents[node] in (CONTEXT, *tree.read) for node in nodes if node >= 0)
            tree.read += [node for node in nodes if node >= 0]
            for node in nodes:
                sure = np.sort(rng.dirichlet([0.5] * 6))[::-1][:4]
                tree.add(node, range(4), sure.tolist())
        kept = set(rule.keep(tree))
        assert kept
        for i in kept:
            assert tree.parents[i] in (CONTEXT, *kept)
            assert tree.ranks[i] == 0 or i - 1 in kept


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


def read_next(plan: TreePlan, tree: CandidateTree) -> list[int]:
    """What the draft should read, by trying every number of levels."""
    values, prices = values_of(plan.acceptance, tree), plan.prices.tolist()
    unread = sorted(set(range(len(tree))) - set(tree.read), key=lambda i: (-values[i], i))[:8]
    (_, best), chosen = most_worth(values, prices), list[int]()
    for depth in (1, 2, 4, 8):
        ahead = looked_ahead(plan.usual, depth).tolist()
        pool = values + [values[i] * each for i in unread for each in ahead]
        n, worth = most_worth(pool, prices)
        if n:
            least = sorted(pool, reverse=True)[n - 1]
            nodes = [i for i in unread if values[i] * plan.usual[0] >= least]
            worth -= depth * plan.steps[len(nodes)]
            if nodes and worth > best:
                best, chosen = worth, nodes
    return chosen


@pytest.mark.parametrize("seed", range(12))
def test_trees_grow_as_plain_search_lets_them(seed: int) -> None:
    """Positions, steps and confidences are others every time; so is what first candidates are worth."""
    rng = np.random.default_rng(seed)
    acceptance, steps = TreeAcceptance(), np.cumsum(rng.uniform(0.002, 0.03, WIDEST + 1))
    acceptance.first.level -= seed % 3
    steps[0] = 0.0
    prices = np.cumsum(rng.choice([0.001, 0.02, 0.3], 17, p=[0.3, 0.6, 0.1]))
    prices[0] = 0.0
    plan = TreePlan(acceptance, acceptance.usual(float(rng.uniform(0.3, 0.9))), prices, steps, rate=1.0)
    rule, tree, n_levels = TreeGrowth(plan), CandidateTree(), 0
    assert (rule.expand(tree), rule.n_candidates) == ([CONTEXT], 4)
    tree.add(CONTEXT, range(4), np.sort(rng.dirichlet([0.7] * 5))[::-1][:4].tolist())
    while nodes := rule.expand(tree):
        n_levels += 1
        assert nodes == read_next(plan, tree)
        tree.read += nodes
        for node in nodes:
            tree.add(node, range(4), np.sort(rng.dirichlet([0.7] * 5))[::-1][:4].tolist())
    assert read_next(plan, tree) == []
    values = values_of(acceptance, tree)
    n, _ = most_worth(values, prices.tolist())
    best = sorted(range(len(values)), key=lambda i: (-values[i], i))[:n]
    assert rule.keep(tree) == sorted(best)
    assert n_levels or seed


def test_the_draft_reads_on_where_no_token_pays_yet() -> None:
    """All positions together cost as much as the first, which is not worth it."""
    acceptance = TreeAcceptance()
    prices, steps = np.array([0.0, *[0.9] * 16]), np.array([0.0, *[0.02] * WIDEST])
    rule = TreeGrowth(TreePlan(acceptance, acceptance.usual(0.6), prices, steps, rate=1.0))
    tree = CandidateTree()
    tree.add(CONTEXT, [7, 5], [0.5, 0.2])
    assert rule.keep(tree) == []
    assert rule.expand(tree) == [0, 1]
    tree.read += [0, 1]
    tree.add(0, [9, 2], [0.9, 0.05])
    assert rule.keep(tree) == [0, 1, 2, 3]


def test_candidates_know_their_place() -> None:
    tree = CandidateTree()
    tree.add(CONTEXT, [7, 5], [0.6, 0.3])
    tree.add(1, [9], [0.8])
    tree.add(2, [4, 8, 6], [0.5, 0.25, 0.1])
    assert len(tree) == 6
    assert tree.tokens == [7, 5, 9, 4, 8, 6]
    assert tree.parents == [-1, -1, 1, 2, 2, 2]
    assert tree.ranks == [0, 1, 0, 0, 1, 2]
    assert tree.depths == [0, 0, 1, 2, 2, 2]


def test_a_draft_lists_the_branch_of_the_best_first() -> None:
    """What is left out may stand anywhere but before what is kept."""
    tree = CandidateTree()
    tree.add(CONTEXT, [7, 5, 3], [0.6, 0.3, 0.05])
    tree.add(1, [9, 2], [0.8, 0.1])
    tree.add(0, [4, 8, 6], [0.5, 0.25, 0.1])
    draft = tree.draft([0, 1, 3, 5, 6], Source.MTP)
    assert draft.tokens.tolist() == [7, 4, 8, 5, 9]
    assert draft.parents is not None
    assert draft.tokens.dtype == draft.parents.dtype == np.int32
    assert draft.parents.tolist() == [-1, 0, 0, -1, 3]
    assert draft.confidences == (0.6, 0.5, 0.25, 0.3, 0.8)
    assert draft.source is Source.MTP
    assert len(tree.draft([], Source.MODEL)) == 0


def test_the_first_branch_is_that_of_the_best() -> None:
    _, draft, _ = grow(FixedTree((2, 2)))
    assert draft.parents is not None
    assert draft.parents.tolist() == [-1, 0, 0, -1, 3, 3]
    assert draft.tokens.tolist()[:2] == [0, 40]


def test_a_fixed_tree_is_as_wide_as_it_says() -> None:
    """Its own row; where only chains can be drafted, these are as deep."""
    rule = FixedTree((3, 1, 2))
    tree, draft, widths = grow(rule)
    assert rule.start_row(drops=True) is rule
    assert rule.tree(TreeGrowth) is rule
    assert (rule.n_candidates, FixedTree(()).n_candidates) == (3, 0)
    assert widths == [1, 3, 3]
    assert np.bincount([tree.depths[i] for i in rule.keep(tree)]).tolist() == [3, 3, 6]
    assert (len(draft), draft.n_branches, rule.n_verified(draft), rule.width(7)) == (12, 6, 12, 7)
    assert [rule.wants_more(Draft.certain([1] * n)) for n in range(5)] == [True, True, True, False, False]
    assert grow(FixedTree(()))[2] == []
