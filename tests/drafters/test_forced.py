"""Drafts that a constraint knows: what is forced is drafted, and what is forbidden is not."""

from __future__ import annotations

import numpy as np
import pytest

from fake_constraint import Steps
from fakes import Branching, Length, tokens
from llamaspec.drafters.fallback import drafting
from llamaspec.drafters.forced import AllowedDrafter, ForcedDrafter
from llamaspec.protocols import Drafter, Preparing, RowLength
from llamaspec.values import DRAFT, NO_DRAFT, Draft, ForwardRequest, Source, TokenArray

N_PROMPT = 2


def proposed(drafter: Drafter, context: TokenArray, n: int) -> Draft:
    try:
        next(drafting(drafter, context, Length(n)))
    except StopIteration as end:
        draft: Draft = end.value
        return draft
    raise AssertionError("no model is needed")


@pytest.mark.parametrize(
    ("generated", "n", "expected"),
    [((1, 0), 3, [2]), ((1, 0), 0, []), ((1, 2), 3, []), ((), 3, []), ((0, 1), 3, [])],
)
def test_what_is_forced(generated: tuple[int, ...], n: int, expected: list[int]) -> None:
    """The prompt, which ends with a 0, is not what the constraint is about."""
    draft = proposed(ForcedDrafter(Steps(), N_PROMPT), tokens(1, 0, *generated), n)
    assert draft.tokens.tolist() == expected
    assert draft.source is Source.GRAMMAR
    assert draft.confidences == (1.0,) * len(expected)


class Forces(Steps):
    """Three tokens at once."""

    def forced(self, generated: TokenArray) -> TokenArray:
        return tokens(2, 1, 2)


@pytest.mark.parametrize("n", range(5))
def test_as_many_forced_tokens_as_are_wanted(n: int) -> None:
    draft = proposed(ForcedDrafter(Forces(), N_PROMPT), tokens(1, 0), n)
    assert draft.tokens.tolist() == [2, 1, 2][:n]


class Says:
    """Drafts always the same."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft

    def prepare(self, context: TokenArray) -> None:
        pass

    def propose(self, context: TokenArray, length: RowLength) -> Draft:
        return self.draft


@pytest.mark.parametrize(
    ("says", "kept"), [([1, 2, 1], 3), ([1, 0, 1, 2], 2), ([2, 1], 0), ([], 0), ([0, 2, 2], 2), ([1, 1], 1)]
)
def test_what_is_forbidden_is_cut(says: list[int], kept: int) -> None:
    drafter = AllowedDrafter(Says(Draft.certain(says, source=Source.NGRAM)), Steps(), N_PROMPT)
    draft = proposed(drafter, tokens(1, 0, 1, 2), 9)
    assert draft.tokens.tolist() == says[:kept]
    assert draft.source is Source.NGRAM


class Reads(Says):
    """Has a model read the prompt."""

    def prepare(self, context: TokenArray) -> Preparing:  # type: ignore[override]
        yield ForwardRequest(DRAFT, context, n_logits=0)


def test_the_drafter_that_is_cut_takes_in_the_prompt() -> None:
    (request,) = AllowedDrafter(Reads(NO_DRAFT), Steps(), N_PROMPT).prepare(tokens(1, 0))
    assert request.tokens.tolist() == [1, 0]
    assert list(AllowedDrafter(Says(NO_DRAFT), Steps(), N_PROMPT).prepare(tokens(1, 0))) == []


def test_a_tree_is_left_to_the_rule() -> None:
    whole = proposed(Branching(), tokens(1, 0), 2)
    kept = proposed(AllowedDrafter(Branching(), Steps(), N_PROMPT), tokens(1, 0), 2)
    assert np.array_equal(kept.tokens, whole.tokens)
