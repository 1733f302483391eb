"""Trees of a model drafter: their tokens, their steps, and when it drafts a chain instead."""

from __future__ import annotations

import numpy as np
import pytest

from fakes import FakeModel, Length, answer_alone, tokens
from fixed_tree import FixedTree
from llamaspec.drafters.common_vocabulary import SameTokens
from llamaspec.drafters.model import TreeDrafter
from llamaspec.errors import ContextFullError, EvaluationError, LlamaspecError, MemoryFullError, ScoresError
from llamaspec.length.tree import (
    CONTEXT,
    WIDEST,
    CandidateTree,
    TreeAcceptance,
    TreeLength,
    TreePlan,
    looked_ahead,
)
from llamaspec.sampling.acceptance_rules import RULES
from llamaspec.sampling.filters import Sampling
from llamaspec.sampling.random_streams import SeededStreams
from llamaspec.sampling.sampler import Sampler
from llamaspec.values import DRAFT, Draft, Evaluation, Forward, ForwardRequest, Source

MODEL = FakeModel(seed=3, vocabulary_size=30, context_size=256)
TEXT = tokens(4, 7, 9)
WARM = Sampling(temperature=1.0, top_k=None, top_p=None, min_p=None)


class NoTree(Length):
    """A policy that wants no tree, because a chain is as good."""

    def tree(self) -> None:
        pass


def tree_drafter(
    length: TreeLength, sampling: Sampling = WARM, seed: int = 0, context_size: int = 256
) -> TreeDrafter:
    rule, streams = RULES["coupled"], SeededStreams(seed)
    return TreeDrafter(SameTokens(30, 30), context_size, Sampler(sampling), rule, streams, trees=length)


def drafted(
    length: TreeLength, sampling: Sampling = WARM, seed: int = 0, context_size: int = 256
) -> tuple[Draft, list[ForwardRequest]]:
    """Return a draft and the requests that it took."""
    proposing = tree_drafter(length, sampling, seed, context_size).propose(TEXT, length)
    asked = list[ForwardRequest]()
    try:
        wanted = next(proposing)
        while True:
            asked.append(wanted)
            wanted = proposing.send(Forward(MODEL.logits(wanted), 0.0, 0, Evaluation(wanted.n_scored)))
    except StopIteration as end:
        return end.value, asked


@pytest.mark.parametrize("sampling", [WARM, Sampling(temperature=0), Sampling(temperature=0.7, top_k=5)])
def test_the_first_branch_is_the_chain(sampling: Sampling) -> None:
    for seed in range(5):
        chain, _ = drafted(NoTree(4), sampling, seed)
        tree, _ = drafted(FixedTree((3, 2, 2, 1)), sampling, seed)
        assert tree.tokens[:4].tolist() == chain.tokens.tolist()
        assert tree.path(3) == [0, 1, 2, 3]


def test_a_level_is_one_step_and_no_token_is_processed_twice() -> None:
    draft, asked = drafted(FixedTree((3, 2, 1)))
    assert [wanted.n_scored for wanted in asked] == [1, 3, 6]
    assert [wanted.n_known for wanted in asked] == [0, 0, 3]
    assert len(draft) == 3 + 6 + 6
    assert draft.n_branches == 6
    read = asked[-1]
    paths = {tuple(draft.tokens[draft.path(i)].tolist()) for i in range(len(draft))}
    tree = Draft(read.draft, (), (0.5,) * len(read.draft), parents=read.parents)
    assert {tuple(tree.tokens[tree.path(i)].tolist()) for i in range(len(tree))} <= paths


def test_siblings_differ_and_the_best_comes_first() -> None:
    draft, _ = drafted(FixedTree((4, 4)))
    for node in (-1, *range(len(draft))):
        children = draft.children(node)
        assert len({int(draft.tokens[child]) for child in children}) == len(children)
        confidences = [draft.confidences[child] for child in children]
        assert confidences == sorted(confidences, reverse=True)


def test_near_the_end_of_the_context_a_chain_is_drafted() -> None:
    draft, asked = drafted(FixedTree((3, 2)), context_size=16)
    assert draft.is_chain
    assert [wanted.n_scored for wanted in asked] == [1, 1]


def test_a_full_context_ends_the_growth_of_a_tree() -> None:
    length = FixedTree((2, 2, 2))
    proposing = tree_drafter(length).propose(TEXT, length)
    wanted = next(proposing)
    proposing.send(Forward(MODEL.logits(wanted), 0.0, 0, Evaluation(1)))
    with pytest.raises(StopIteration) as end:
        proposing.throw(ContextFullError("full"))
    assert len(end.value.value) == 2


@pytest.mark.parametrize("fault", [ScoresError, EvaluationError, MemoryFullError])
def test_a_fault_ends_all_drafting(fault: type[LlamaspecError]) -> None:
    length = FixedTree((2, 2))
    drafter = tree_drafter(length)
    proposing = drafter.propose(TEXT, length)
    next(proposing)
    with pytest.raises(StopIteration) as end:
        proposing.throw(fault("of the model"))
    assert len(end.value.value) == 0
    assert drafter.fault == "of the model"
    assert not answer_alone(drafter.propose(TEXT, length), {DRAFT: MODEL})


# -- how trees grow -----------------------------------------------------------------------------------------


CONFIDENCES = (0.55, 0.2, 0.08, 0.04)


def growth(position: float, step: float, longest: int = 16) -> TreePlan:
    """With linear prices, in tokens."""
    acceptance = TreeAcceptance()
    prices, steps = np.linspace(0.0, position * longest, longest + 1), np.full(WIDEST + 1, step)
    steps[0] = 0.0
    return TreePlan(acceptance, acceptance.usual(0.6), prices, steps)


def grow(rule: TreePlan) -> tuple[Draft, list[int]]:
    """Return a tree with the same confidences everywhere, and the widths of its steps."""
    tree, widths = CandidateTree(), list[int]()
    while nodes := rule.expand(tree):
        widths.append(len(nodes))
        tree.evaluated += [node for node in nodes if node >= 0]
        for node in nodes:
            tree.add(node, range(10 * len(tree), 10 * len(tree) + 4), CONFIDENCES)
        assert len(widths) < 30
    return tree.draft(rule.keep(tree), Source.MODEL), widths


def test_free_positions_are_filled_and_expensive_ones_make_a_chain() -> None:
    wide, _ = grow(growth(position=0.005, step=0.1))
    narrow, steps = grow(growth(position=0.3, step=0.03))
    nothing, _ = grow(growth(position=1.0, step=0.1))
    assert len(wide) == 16
    assert wide.n_branches > 4
    assert narrow.is_chain
    assert 0 < len(narrow) <= sum(steps)
    assert len(nothing) == 0


def values_of(acceptance: TreeAcceptance, tree: CandidateTree) -> list[float]:
    """Products along the paths; a candidate counts at most as likely as its better siblings."""
    found: list[float] = []
    for i, parent in enumerate(tree.parents):
        better = [j for j in range(i + 1) if tree.parents[j] == parent]
        chance = min(acceptance.chance(tree.ranks[j], tree.confidences[j]) for j in better)
        found.append(chance * (found[parent] if parent >= 0 else 1.0))
    return found


def most_worth(values: list[float], prices: list[float]) -> tuple[int, float]:
    """Try every number of verified tokens; return the best and its gain."""
    values = sorted(values, reverse=True)
    worth = [sum(values[:n]) - prices[n] for n in range(1, min(len(values) + 1, len(prices)))]
    best = max(worth, default=0.0)
    return (worth.index(best) + 1, best) if best > 0 else (0, 0.0)


def read_next(plan: TreePlan, tree: CandidateTree) -> list[int]:
    """Return the tokens that the draft should process next, by trying every number of levels."""
    values, prices = values_of(plan.acceptance, tree), plan.prices.tolist()
    others = sorted(set(range(len(tree))) - set(tree.evaluated), key=lambda i: (-values[i], i))[:8]
    (_, best), chosen = most_worth(values, prices), list[int]()
    for depth in (1, 2, 4, 8):
        ahead = looked_ahead(plan.usual, depth).tolist()
        pool = values + [values[i] * each for i in others for each in ahead]
        n, worth = most_worth(pool, prices)
        if n:
            least = sorted(pool, reverse=True)[n - 1]
            nodes = [i for i in others if values[i] * plan.usual[0] >= least]
            worth -= depth * plan.steps[len(nodes)]
            if nodes and worth > best:
                best, chosen = worth, nodes
    return chosen


@pytest.mark.parametrize("seed", range(12))
def test_trees_grow_as_in_a_plain_search(seed: int) -> None:
    """Costs, confidences and the acceptance of first candidates differ every time."""
    rng = np.random.default_rng(seed)
    acceptance, steps = TreeAcceptance(), np.cumsum(rng.uniform(0.002, 0.03, WIDEST + 1))
    acceptance.first.log_odds -= seed % 3
    steps[0] = 0.0
    prices = np.cumsum(rng.choice([0.001, 0.02, 0.3], 17, p=[0.3, 0.6, 0.1]))
    prices[0] = 0.0
    plan = TreePlan(acceptance, acceptance.usual(float(rng.uniform(0.3, 0.9))), prices, steps)
    tree, n_levels = CandidateTree(), 0
    assert plan.expand(tree) == [CONTEXT]
    tree.add(CONTEXT, range(4), np.sort(rng.dirichlet([0.7] * 5))[::-1][:4].tolist())
    while nodes := plan.expand(tree):
        n_levels += 1
        assert nodes == read_next(plan, tree)
        tree.evaluated += nodes
        for node in nodes:
            tree.add(node, range(4), np.sort(rng.dirichlet([0.7] * 5))[::-1][:4].tolist())
    assert read_next(plan, tree) == []
    values = values_of(acceptance, tree)
    n, _ = most_worth(values, prices.tolist())
    best = sorted(range(len(values)), key=lambda i: (-values[i], i))[:n]
    assert plan.keep(tree) == sorted(best)
    assert n_levels or seed


def test_the_draft_grows_while_no_token_is_worth_its_cost_yet() -> None:
    """All positions together cost as much as the first, which alone is not worth it."""
    acceptance = TreeAcceptance()
    prices, steps = np.array([0.0, *[0.9] * 16]), np.array([0.0, *[0.02] * WIDEST])
    rule = TreePlan(acceptance, acceptance.usual(0.6), prices, steps)
    tree = CandidateTree()
    tree.add(CONTEXT, [7, 5], [0.45, 0.15])
    assert rule.keep(tree) == []
    assert rule.expand(tree) == [0, 1]
    tree.evaluated += [0, 1]
    tree.add(0, [9, 2], [0.9, 0.05])
    assert rule.keep(tree) == [0, 1, 2, 3]


def test_a_draft_lists_the_best_branch_first() -> None:
    """A token that is left out has no descendants that are kept."""
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
