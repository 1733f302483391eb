"""n-gram draft tokens against plain search; drafters in order of preference."""

from __future__ import annotations

import numpy as np
import pytest

from fakes import CountingUp, tokens
from llamaspec.drafters.coroutines import drafting
from llamaspec.drafters.fallback import FallbackDrafter
from llamaspec.drafters.ngram import NgramDrafter, SuffixAutomaton
from llamaspec.drafters.no_drafter import NoDrafter
from llamaspec.length.fixed_length import FixedLength
from llamaspec.protocols import Drafter, Preparing
from llamaspec.values import DRAFT, Draft, ForwardRequest, Source, TokenArray


def proposed(drafter: Drafter, context: TokenArray, n: int) -> Draft:
    """What a drafter proposes that asks no model."""
    try:
        next(drafting(drafter, context, FixedLength(n)))
    except StopIteration as end:
        made: Draft = end.value
        return made
    raise AssertionError("a model was asked")


def longest_repeated_end(sequence: list[int]) -> int:
    """By trying every length and place."""
    for length in range(len(sequence) - 1, 0, -1):
        end = sequence[-length:]
        if any(sequence[i : i + length] == end for i in range(len(sequence) - length)):
            return length
    return 0


@pytest.mark.parametrize("seed", range(40))
def test_the_automaton_finds_what_plain_search_finds(seed: int) -> None:
    random = np.random.default_rng(seed)
    sequence = random.integers(0, 3, 50).tolist()
    automaton = SuffixAutomaton()
    assert automaton.match_length == 0
    for i, token in enumerate(sequence):
        automaton.append(token)
        seen = sequence[: i + 1]
        match = longest_repeated_end(seen)
        assert automaton.match_length == match
        if match:
            end = automaton.match_end
            assert end <= i
            assert seen[end - match : end] == seen[-match:]


def test_states_are_copied_only_where_they_must_be() -> None:
    """The smallest automaton of a repetition has one state for each length."""
    automaton = SuffixAutomaton()
    for _ in range(20):
        automaton.append(1)
    assert len(automaton._next) == 21


@pytest.mark.parametrize(
    ("context", "n", "expected"),
    [
        ((), 3, []),
        ((1,), 3, []),
        ((1, 2, 3, 1), 3, []),  # one token is too short a match
        ((1, 2, 3, 4, 1, 2), 3, [3, 4, 1]),
        ((1, 2, 3, 4, 1, 2), 1, [3]),
        ((5, 5, 5, 5), 4, [5, 5, 5, 5]),  # what has been copied is copied, too
        ((9, 7, 8, 6, 7, 8), 5, [6, 7, 8, 6, 7]),
        ((1, 2, 3, 9, 1, 2, 4, 9, 1, 2), 1, [4]),  # the recent place, not the first
    ],
)
def test_draft_tokens(context: tuple[int, ...], n: int, expected: list[int]) -> None:
    draft = NgramDrafter().propose(tokens(*context), FixedLength(n))
    assert draft.tokens.tolist() == expected
    assert [q.tokens.tolist() for q in draft.distributions] == [[token] for token in expected]
    assert all(0 < confidence < 1 for confidence in draft.confidences)


def test_a_draft_token_is_as_sure_as_the_match_that_it_would_be_part_of() -> None:
    draft = NgramDrafter().propose(tokens(1, 2, 3, 4, 1, 2), FixedLength(3))
    assert draft.source is Source.NGRAM
    assert draft.confidences == (2 / 3, 3 / 4, 4 / 5)


def test_longer_matches_are_more_confident() -> None:
    short = NgramDrafter().propose(tokens(7, 1, 2, 3, 8, 1, 2), FixedLength(1))
    long = NgramDrafter().propose(tokens(7, 0, 1, 2, 3, 8, 7, 0, 1, 2), FixedLength(1))
    assert long.confidences > short.confidences


def test_the_place_that_was_looked_up_last_is_preferred() -> None:
    """1 2 was followed by 3, 4, 5 and 6: what is copied stood behind the last of them."""
    context = tokens(1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2, 6, 1, 2)
    assert proposed(NgramDrafter(), context, 1).tokens.tolist() == [6]


def test_another_context_is_not_taken_for_a_longer_one() -> None:
    drafter = NgramDrafter()
    drafter.prepare(tokens(1, 2, 3, 1, 2))
    assert drafter.propose(tokens(4, 5, 6, 4, 5, 6, 4, 5), FixedLength(1)).tokens.tolist() == [6]
    assert drafter.propose(tokens(1, 2, 3, 1, 2), FixedLength(1)).tokens.tolist() == [3]


class Prepared(NoDrafter):
    """Notes what it was given to take in, and asks a model about it."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def prepare(self, context: TokenArray) -> Preparing:  # type: ignore[override]
        self.seen.append(context.tolist())
        yield ForwardRequest(DRAFT, context, n_logits=0)


def test_the_first_drafter_with_a_draft_speaks() -> None:
    fallback = FallbackDrafter([NoDrafter(), NgramDrafter(), CountingUp(9)])
    assert proposed(fallback, tokens(1, 2, 3, 1, 2), 1).source is Source.NGRAM
    assert proposed(fallback, tokens(1, 2, 3), 2).tokens.tolist() == [4, 5]
    assert len(proposed(FallbackDrafter([NoDrafter()]), tokens(1, 2), 1)) == 0


def test_every_drafter_takes_in_the_prompt() -> None:
    """Those that are coroutines, and those that are plain functions."""
    one, other = Prepared(), Prepared()
    fallback = FallbackDrafter([NgramDrafter(), one, NoDrafter(), other])
    requests = list(fallback.prepare(tokens(1, 2)))
    assert [request.tokens.tolist() for request in requests] == [[1, 2], [1, 2]]
    assert one.seen == other.seen == [[1, 2]]
