"""Copies compared with a plain search, and a choice among drafters."""

from __future__ import annotations

import numpy as np
import pytest

from fakes import CountingUp, tokens
from llamaspec.drafters.alignment import LONGEST_MATCH
from llamaspec.drafters.calling import drafting
from llamaspec.drafters.fallback import FallbackDrafter, NoDrafter
from llamaspec.drafters.ngram import NgramDrafter, longest_match
from llamaspec.length.fixed import FixedLength
from llamaspec.protocols import Drafter, Preparing
from llamaspec.values import DRAFT, LONGEST_COPY, Draft, ForwardRequest, Source, TokenArray


def proposed(drafter: Drafter, context: TokenArray, n: int) -> Draft:
    """Return the draft of a drafter without a model."""
    try:
        next(drafting(drafter, context, FixedLength(n)))
    except StopIteration as end:
        made: Draft = end.value
        return made
    raise AssertionError("a model was asked")


def longest_end(path: list[int], texts: list[list[int]], at_least: int) -> int:
    """Try every length and place; a token must follow the place."""
    for length in range(min(len(path), LONGEST_MATCH), at_least - 1, -1):
        end = path[-length:]
        if any(text[i : i + length] == end for text in texts for i in range(len(text) - length)):
            return length
    return 0


@pytest.mark.parametrize("seed", range(12))
def test_the_longest_match_is_that_of_a_plain_search(seed: int) -> None:
    """The latest of the longest; with two different tokens, matches exceed LONGEST_MATCH."""
    random = np.random.default_rng(seed)
    sequence = random.integers(0, 3 if seed % 4 else 2, 90)
    if seed % 4 == 0:
        sequence[50:] = sequence[5:45]
    for n in range(len(sequence)):
        path = sequence[:n].tolist()
        for at_least in (1, 2, 4):
            length, begin = longest_match(tokens(*path), at_least)
            assert length == longest_end(path, [path], at_least)
            if length:
                places = [i for i in range(length, n) if path[i - length : i] == path[-length:]]
                assert begin == places[-1]


@pytest.mark.parametrize(
    ("context", "n", "expected"),
    [
        ((), 3, []),
        ((1,), 3, []),
        ((1, 2, 3, 1), 3, []),  # a match of one token is too short
        ((1, 2, 3, 4, 1, 2), 3, [3, 4, 1]),
        ((1, 2, 3, 4, 1, 2), 1, [3]),
        ((5, 5, 5, 5), 4, [5, 5, 5, 5]),  # the copy continues with itself
        ((9, 7, 8, 6, 7, 8), 5, [6, 7, 8, 6, 7]),
        ((1, 2, 3, 9, 1, 2, 4, 9, 1, 2), 1, [4]),  # the latest place, not the first
    ],
)
def test_draft_tokens(context: tuple[int, ...], n: int, expected: list[int]) -> None:
    draft = NgramDrafter().propose(tokens(*context), FixedLength(n))
    assert draft.tokens.tolist() == expected
    assert [q.tokens.tolist() for q in draft.distributions] == [[token] for token in expected]
    assert all(0 < confidence < 1 for confidence in draft.confidences)


def test_confidence_grows_with_the_length_of_the_match() -> None:
    draft = NgramDrafter().propose(tokens(1, 2, 3, 4, 1, 2), FixedLength(3))
    assert draft.source is Source.NGRAM
    assert draft.confidences == (2 / 3, 3 / 4, 4 / 5)


def test_a_drafter_forgets_another_context() -> None:
    drafter = NgramDrafter()
    drafter.prepare(tokens(1, 2, 3, 1, 2, 9))
    assert drafter.propose(tokens(4, 5, 6, 4, 5, 6, 4, 5), FixedLength(1)).tokens.tolist() == [6]
    assert drafter.propose(tokens(1, 2, 3, 1, 2), FixedLength(1)).tokens.tolist() == [3]


class Prepared(NoDrafter):
    """Records the prompts that it is given, and requests their evaluation."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def prepare(self, context: TokenArray) -> Preparing:  # type: ignore[override]
        self.seen.append(context.tolist())
        yield ForwardRequest(DRAFT, context, n_logits=0)


def test_the_first_draft_that_is_not_empty_is_used() -> None:
    fallback = FallbackDrafter([NoDrafter(), NgramDrafter(), CountingUp(9)])
    assert proposed(fallback, tokens(1, 2, 3, 1, 2), 1).source is Source.NGRAM
    assert proposed(fallback, tokens(1, 2, 3), 2).tokens.tolist() == [4, 5]
    assert len(proposed(FallbackDrafter([NoDrafter()]), tokens(1, 2), 1)) == 0


def test_every_drafter_processes_the_prompt() -> None:
    """Coroutines and plain functions."""
    one, other = Prepared(), Prepared()
    fallback = FallbackDrafter([NgramDrafter(), one, NoDrafter(), other])
    requests = list(fallback.prepare(tokens(1, 2)))
    assert [request.tokens.tolist() for request in requests] == [[1, 2], [1, 2]]
    assert one.seen == other.seen == [[1, 2]]


PASSAGE = tokens(*range(100, 160))


def test_an_alignment_outlives_a_copy_from_elsewhere() -> None:
    """An insertion may be a copy itself; afterwards the sequence continues in its passage."""
    drafter, text = NgramDrafter(), [*range(100, 190), *range(50, 60), *range(100, 110)]
    drafter.prepare(tokens(*text))
    proposed(drafter, tokens(*text), 1)
    text += range(50, 55)
    assert proposed(drafter, tokens(*text), 2).tokens.tolist() == [55, 56]
    assert proposed(drafter, tokens(*text, 110), 3).tokens.tolist() == [111, 112, 113]


def test_a_prediction_is_copied_from_the_first_token_and_after_a_wrong_one() -> None:
    drafter = NgramDrafter(prediction=PASSAGE)
    drafter.prepare(tokens(1, 2, 3))
    draft = proposed(drafter, tokens(1, 2, 3), 3)
    assert (draft.source, draft.tokens.tolist()) == (Source.PREDICTION, [100, 101, 102])
    draft = proposed(drafter, tokens(1, 2, 3, 7, 8, 102, 103), 3)
    assert (draft.source, draft.tokens.tolist()) == (Source.PREDICTION, [104, 105, 106])


@pytest.mark.parametrize("text", [(5, 6), (1, 2, 3, 4, 5, 6)])  # a match; then an alignment
def test_a_copy_stops_after_an_end_token(text: tuple[int, ...]) -> None:
    """An edited file ends like the file in the prompt, where control tokens of the conversation follow."""
    prompt, end = (1, 2, 3, 4, 5, 6, 7, 8, 99, 98, 97, 96), 99
    drafter = NgramDrafter(is_end=lambda token: token == end)
    drafter.prepare(tokens(*prompt))
    for n in range(2, len(text) + 1):
        assert proposed(drafter, tokens(*prompt, *text[:n]), 9).tokens.tolist()[-3:] == [7, 8, end]


def test_new_tokens_are_never_aligned_with_themselves() -> None:
    """Tokens of the last round are searched for in the tokens before them."""
    drafter, text = NgramDrafter(), [*range(1, 9), *range(1, 5)]
    drafter.prepare(tokens(*text))
    proposed(drafter, tokens(*text), 2)
    assert proposed(drafter, tokens(*text, 70, 71, 72, 73, 6, 7), 1).tokens.tolist() == [8]


def test_an_aligned_copy_of_a_repetition_continues_with_itself() -> None:
    period = tuple(range(10, 20))
    drafter = NgramDrafter()
    drafter.prepare(tokens(*period))
    for n in (2, 3):  # the second time with an alignment
        draft = drafter.propose(tokens(*(period * n)), FixedLength(25))
        assert draft.tokens.tolist() == [*period, *period, *period[:5]]
        assert list(draft.confidences) == sorted(draft.confidences)


def test_a_copy_looks_no_further_ahead_than_the_policy_can_want() -> None:
    """Looking 511 tokens ahead in every round cost a tiny model a third of its speed."""
    looked_at: list[int] = []

    def is_end(token: int) -> bool:
        looked_at.append(token)
        return False

    text = tokens(*range(20), *range(8))
    drafter = NgramDrafter(is_end=is_end)
    assert proposed(drafter, text, 3).tokens.tolist() == [8, 9, 10]
    assert looked_at == [8, 9, 10]
    following = tokens(*text, 8, 9)  # now the sequence is aligned with its source
    assert proposed(drafter, following, 2).tokens.tolist() == [10, 11]
    assert looked_at[3:] == [10, 11]
    assert len(proposed(drafter, following, 10**6)) == LONGEST_COPY
