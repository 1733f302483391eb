"""Trees of a model drafter: which tokens, in how many steps, and when it makes a chain instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fakes import FakeModel, Length, answer_alone, tokens
from llamaspec.drafters.model import ModelDrafter
from llamaspec.drafters.tree import FixedTree, Growth, TreeDrafter, TreeLength
from llamaspec.errors import ContextFullError, ScoresError
from llamaspec.length.tree import TreePlan
from llamaspec.sampling.acceptance_rules import RULES
from llamaspec.sampling.filters import Sampling
from llamaspec.sampling.random_streams import SeededStreams
from llamaspec.values import DRAFT, Draft, Forward, ForwardRequest

MODEL = FakeModel(seed=3, vocabulary_size=30, context_size=256)
CONTEXT = tokens(4, 7, 9)
WARM = Sampling(temperature=1.0, top_k=None, top_p=None, min_p=None)


class NoTree(Length):
    """Lets no tree grow: a chain is as good."""

    def tree(self, grow: Callable[[TreePlan], Growth]) -> None:
        pass


def tree_drafter(
    length: TreeLength, sampling: Sampling = WARM, seed: int = 0, context_size: int = 256
) -> TreeDrafter:
    return TreeDrafter(30, context_size, sampling, RULES["coupled"], SeededStreams(seed), trees=length)


def drafted(
    length: TreeLength, sampling: Sampling = WARM, seed: int = 0, context_size: int = 256
) -> tuple[Draft, list[ForwardRequest]]:
    """A draft, and what was asked for it."""
    proposing = tree_drafter(length, sampling, seed, context_size).propose(CONTEXT, length)
    asked = list[ForwardRequest]()
    try:
        wanted = next(proposing)
        while True:
            asked.append(wanted)
            wanted = proposing.send(Forward(MODEL.logits(wanted), 0.0, wanted.n_scored, 1, 0, 0))
    except StopIteration as end:
        return end.value, asked


@pytest.mark.parametrize("sampling", [WARM, Sampling(temperature=0), Sampling(temperature=0.7, top_k=5)])
def test_the_first_branch_is_the_chain(sampling: Sampling) -> None:
    for seed in range(5):
        chain, _ = drafted(NoTree(4), sampling, seed)
        tree, _ = drafted(FixedTree((3, 2, 2, 1)), sampling, seed)
        assert tree.tokens[:4].tolist() == chain.tokens.tolist()
        assert tree.path(3) == [0, 1, 2, 3]


def test_a_level_is_one_step_and_no_token_is_read_twice() -> None:
    draft, asked = drafted(FixedTree((3, 2, 1)))
    assert [wanted.n_scored for wanted in asked] == [1, 3, 6]
    assert [wanted.n_read for wanted in asked] == [0, 0, 3]
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


def test_where_no_tree_may_grow_it_makes_the_chain() -> None:
    streams = SeededStreams(0)
    chain = ModelDrafter(30, 256, WARM, RULES["coupled"], streams).propose(CONTEXT, Length(1))
    wanted = next(chain)
    with pytest.raises(StopIteration) as end:
        chain.send(Forward(MODEL.logits(wanted), 0.0, 1, 1, 0, 0))
    assert drafted(NoTree(1))[0].tokens.tolist() == end.value.value.tokens.tolist()


def test_where_the_context_ends_a_chain_is_drafted() -> None:
    draft, asked = drafted(FixedTree((3, 2)), context_size=16)
    assert draft.is_chain
    assert [wanted.n_scored for wanted in asked] == [1, 1]


def test_without_room_the_tree_stays_as_it_is() -> None:
    length = FixedTree((2, 2, 2))
    proposing = tree_drafter(length).propose(CONTEXT, length)
    wanted = next(proposing)
    proposing.send(Forward(MODEL.logits(wanted), 0.0, 1, 1, 0, 0))
    with pytest.raises(StopIteration) as end:
        proposing.throw(ContextFullError("full"))
    assert len(end.value.value) == 2


def test_scores_that_are_no_numbers_end_all_drafting() -> None:
    length = FixedTree((2, 2))
    drafter = tree_drafter(length)
    proposing = drafter.propose(CONTEXT, length)
    next(proposing)
    with pytest.raises(StopIteration) as end:
        proposing.throw(ScoresError("x.gguf gives scores that are not numbers"))
    assert len(end.value.value) == 0
    assert not answer_alone(drafter.propose(CONTEXT, length), {DRAFT: MODEL})
