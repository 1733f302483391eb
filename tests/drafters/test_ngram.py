"""n-gram guesses against plain search."""

from __future__ import annotations

import numpy as np
import pytest

from fakes import CountingUp
from llamaspec.drafters.chain import FirstThatGuesses
from llamaspec.drafters.ngram import NgramDrafter, SuffixAutomaton
from llamaspec.drafters.silent import SilentDrafter
from llamaspec.rules.lengths import FixedLength
from llamaspec.values import Draft, Round, TokenArray


class OnlySure:
    """Wants four guesses, and keeps them if the first is sure enough, or was not copied."""

    def __init__(self, least: float) -> None:
        self.least = least

    def wants_more(self, draft: Draft) -> bool:
        return len(draft) < 4

    def n_to_verify(self, draft: Draft) -> int:
        return 0 if draft.is_copy and draft.confidences[0] < self.least else len(draft)

    def width(self, n_guesses: int) -> int:
        return n_guesses + 1

    def observe(self, round_: Round) -> None:
        pass


def tokens(*ids: int) -> TokenArray:
    return np.array(ids, dtype=np.int32)


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
    for i, token in enumerate(sequence):
        automaton.append(token)
        seen = sequence[: i + 1]
        match = longest_repeated_end(seen)
        assert automaton.match_length == match
        if match:
            end = automaton.match_end
            assert end <= i
            assert seen[end - match : end] == seen[-match:]


@pytest.mark.parametrize(
    ("context", "n", "guesses"),
    [
        ((), 3, []),
        ((1,), 3, []),
        ((1, 2, 3, 1), 3, []),  # one token is too short a match
        ((1, 2, 3, 4, 1, 2), 3, [3, 4, 1]),
        ((1, 2, 3, 4, 1, 2), 1, [3]),
        ((5, 5, 5, 5), 4, [5]),  # no more text to copy than there is
        ((1, 2, 3, 9, 1, 2, 4, 9, 1, 2), 1, [4]),  # the recent place, not the first
    ],
)
def test_guesses(context: tuple[int, ...], n: int, guesses: list[int]) -> None:
    draft = NgramDrafter().propose(tokens(*context), FixedLength(n))
    assert draft.tokens.tolist() == guesses
    assert [q.tokens.tolist() for q in draft.distributions] == [[guess] for guess in guesses]
    assert all(0 < confidence < 1 for confidence in draft.confidences)


def test_a_guess_is_as_sure_as_the_match_that_it_would_be_part_of() -> None:
    draft = NgramDrafter().propose(tokens(1, 2, 3, 4, 1, 2), FixedLength(3))
    assert draft.is_copy
    assert draft.confidences == (2 / 3, 3 / 4, 4 / 5)


def test_what_is_not_worth_an_evaluation_is_not_proposed() -> None:
    context = tokens(1, 2, 3, 4, 1, 2)
    assert len(NgramDrafter().propose(context, OnlySure(0.7))) == 0
    assert len(NgramDrafter().propose(context, OnlySure(0.6))) == 4
    chain = FirstThatGuesses([NgramDrafter(), CountingUp(9)])
    assert chain.propose(context, OnlySure(0.6)).is_copy
    assert not chain.propose(context, OnlySure(0.7)).is_copy


def test_longer_matches_are_more_confident() -> None:
    short = NgramDrafter().propose(tokens(7, 1, 2, 3, 8, 1, 2), FixedLength(1))
    long = NgramDrafter().propose(tokens(7, 0, 1, 2, 3, 8, 7, 0, 1, 2), FixedLength(1))
    assert long.confidences > short.confidences


def test_another_context_is_not_taken_for_a_longer_one() -> None:
    drafter = NgramDrafter()
    drafter.prepare(tokens(1, 2, 3, 1, 2))
    assert drafter.propose(tokens(4, 5, 6, 4, 5, 6, 4, 5), FixedLength(1)).tokens.tolist() == [6]
    assert drafter.propose(tokens(1, 2, 3, 1, 2), FixedLength(1)).tokens.tolist() == [3]


def test_the_first_drafter_that_guesses_speaks() -> None:
    chain = FirstThatGuesses([SilentDrafter(), NgramDrafter(), SilentDrafter()])
    chain.prepare(tokens(1, 2))
    assert chain.propose(tokens(1, 2, 3, 1, 2), FixedLength(1)).tokens.tolist() == [3]
    assert len(FirstThatGuesses([SilentDrafter()]).propose(tokens(1, 2), FixedLength(1))) == 0
