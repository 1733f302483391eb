"""n-gram draft tokens against plain search; drafters in order of preference."""

from __future__ import annotations

import numpy as np
import pytest

from fakes import CountingUp, tokens
from llamaspec.drafters.fallback import FallbackDrafter, NoDrafter, drafting
from llamaspec.drafters.ngram import LONGEST_MATCH, Alignment, NgramDrafter, longest_match
from llamaspec.length.fixed import FixedLength
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


def longest_end(path: list[int], texts: list[list[int]], at_least: int) -> int:
    """By trying every length and place; something must follow there."""
    for length in range(min(len(path), LONGEST_MATCH), at_least - 1, -1):
        end = path[-length:]
        if any(text[i : i + length] == end for text in texts for i in range(len(text) - length)):
            return length
    return 0


@pytest.mark.parametrize("seed", range(40))
def test_what_is_found_is_what_plain_search_finds(seed: int) -> None:
    """The latest of the longest; in long texts of two tokens, matches are longer than what is told apart."""
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


def test_a_drafter_remembers_no_other_context() -> None:
    drafter = NgramDrafter()
    drafter.prepare(tokens(1, 2, 3, 1, 2, 9))
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


# Alignment

PASSAGE = tokens(*range(100, 160))


def aligned(source: TokenArray, *text: int) -> Alignment:
    """An alignment that has followed a text from the begin of its source."""
    alignment = Alignment(0, 0)
    for token in text:
        alignment.follow(source, token)
    return alignment


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ((*range(100, 110), 1, *range(111, 114)), [114, 115, 116]),  # a replacement
        ((*range(100, 110), 1, 2, *range(110, 113)), [113, 114, 115]),  # an insertion
        ((*range(100, 110), *range(113, 116)), [116, 117, 118]),  # a deletion
    ],
)
def test_a_copy_resumes_after_an_edit(text: tuple[int, ...], expected: list[int]) -> None:
    assert aligned(PASSAGE, *text).continuation(PASSAGE, 3)[0].tolist() == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ((10, 11, 12, 98, 99, 7), 13),  # the token that was expected ends an insertion
        ((10, 11, 12, 7, 13, 98, 99, 13), 14),  # so does the token before it
        ((10, 11, 12, 7, 13, 98, 7, 15), 16),  # as many tokens are replaced by others
        ((10, 11, 12, 98, 15), 14),  # one token further on may be chance: as many are taken to be replaced
        ((10, 11, 12, 98, 15, 16), 13),  # two are not
    ],
)
def test_a_copy_resumes_near_the_place_where_it_ended(text: tuple[int, ...], expected: int) -> None:
    """Of several places the nearest: a far one took the copy away from its passage, and it came back late."""
    source = tokens(10, 11, 12, 7, 13, 14, 7, 15, 16, 13, 7, 17, 13, 18, 19, 20)
    assert aligned(source, *text).continuation(source, 1)[0].tolist() == [expected]


def test_a_copy_is_unsure_where_the_text_left_such_a_place_before() -> None:
    source = tokens(*range(20, 30), 7, 8, 30, *range(40, 50), 7, 8, 31, *range(60, 70))
    text = (*range(20, 30), 7, 8, 99, 98, 97, 30, *range(40, 50))
    following, strengths = aligned(source, *text).continuation(source, 5)
    assert following.tolist() == [7, 8, 31, 60, 61]
    assert strengths[2] < 1.0 < strengths[[0, 1, 3, 4]].min()


def test_an_alignment_outlives_a_copy_from_elsewhere() -> None:
    """What is inserted may have been copied; the text then goes on where it was."""
    drafter, text = NgramDrafter(), [*range(100, 190), *range(50, 60), *range(100, 110)]
    drafter.prepare(tokens(*text))
    proposed(drafter, tokens(*text), 1)
    text += range(50, 55)
    assert proposed(drafter, tokens(*text), 2).tokens.tolist() == [55, 56]
    assert proposed(drafter, tokens(*text, 110), 3).tokens.tolist() == [111, 112, 113]


def test_a_replacement_is_proposed_again_and_dropped_when_it_was_wrong() -> None:
    source = tokens(10, 11, 5, 12, 13, 14, 5, 15, 16, 17, 5, 18, 19)
    alignment = aligned(source, 10, 11, 99, 12, 13)
    assert alignment.continuation(source, 4)[0].tolist() == [14, 99, 15, 16]
    for token in (14, 5, 15, 16):
        alignment.follow(source, token)
    assert alignment.continuation(source, 3)[0].tolist() == [17, 5, 18]


def test_a_prediction_is_followed_from_the_first_token_and_after_a_wrong_beginning() -> None:
    drafter = NgramDrafter(prediction=PASSAGE)
    drafter.prepare(tokens(1, 2, 3))
    draft = proposed(drafter, tokens(1, 2, 3), 3)
    assert (draft.source, draft.tokens.tolist()) == (Source.PREDICTION, [100, 101, 102])
    draft = proposed(drafter, tokens(1, 2, 3, 7, 8, 102, 103), 3)
    assert (draft.source, draft.tokens.tolist()) == (Source.PREDICTION, [104, 105, 106])


@pytest.mark.parametrize("text", [(5, 6), (1, 2, 3, 4, 5, 6)])  # a match; from then on aligned
def test_nothing_is_copied_from_behind_the_end_of_a_text(text: tuple[int, ...]) -> None:
    """An edit of a whole file ends like the file in the prompt. Marks of the conversation follow that."""
    prompt, end = (1, 2, 3, 4, 5, 6, 7, 8, 99, 98, 97, 96), 99
    drafter = NgramDrafter(is_end=lambda token: token == end)
    drafter.prepare(tokens(*prompt))
    for n in range(2, len(text) + 1):
        assert proposed(drafter, tokens(*prompt, *text[:n]), 9).tokens.tolist()[-3:] == [7, 8, end]


def test_a_text_that_repeats_itself_is_continued_beyond_its_end() -> None:
    draft = proposed(NgramDrafter(), tokens(*[7, 8, 9] * 3), 8)
    assert draft.tokens.tolist() == [7, 8, 9, 7, 8, 9, 7, 8]


def test_new_tokens_are_never_aligned_with_themselves() -> None:
    """What was written since the last round is looked for in the text before it."""
    drafter, text = NgramDrafter(), [*range(1, 9), *range(1, 5)]
    drafter.prepare(tokens(*text))
    proposed(drafter, tokens(*text), 2)
    assert proposed(drafter, tokens(*text, 70, 71, 72, 73, 6, 7), 1).tokens.tolist() == [8]


def test_an_aligned_text_that_repeats_goes_on_beyond_its_end() -> None:
    period = tuple(range(10, 20))
    drafter = NgramDrafter()
    drafter.prepare(tokens(*period))
    for n in (2, 3):  # the second time it is aligned
        draft = drafter.propose(tokens(*(period * n)), FixedLength(25))
        assert draft.tokens.tolist() == [*period, *period, *period[:5]]
        assert list(draft.confidences) == sorted(draft.confidences)
