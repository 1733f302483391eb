"""Alignments with a source over edits: insertions, deletions and replacements."""

from __future__ import annotations

import pytest

from fakes import tokens
from llamaspec.drafters.alignment import Alignment
from llamaspec.values import TokenArray

PASSAGE = tokens(*range(100, 160))


def aligned(source: TokenArray, *text: int) -> Alignment:
    """Return an alignment that has followed a sequence from the beginning of its source."""
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
        ((10, 11, 12, 98, 99, 7), 13),  # an insertion ends before the expected token
        ((10, 11, 12, 7, 13, 98, 99, 13), 14),  # or repeats the token before it
        ((10, 11, 12, 7, 13, 98, 7, 15), 16),  # a replacement by as many tokens
        ((10, 11, 12, 98, 15), 14),  # one match further on may be chance: assume a replacement
        ((10, 11, 12, 98, 15, 16), 13),  # two matches are not
    ],
)
def test_a_copy_resumes_near_the_place_where_it_ended(text: tuple[int, ...], expected: int) -> None:
    """The nearest of several places: a distant one once led the copy away from its passage."""
    source = tokens(10, 11, 12, 7, 13, 14, 7, 15, 16, 13, 7, 17, 13, 18, 19, 20)
    assert aligned(source, *text).continuation(source, 1)[0].tolist() == [expected]


def test_confidence_is_low_at_places_where_the_sequence_left_its_source() -> None:
    source = tokens(*range(20, 30), 7, 8, 30, *range(40, 50), 7, 8, 31, *range(60, 70))
    text = (*range(20, 30), 7, 8, 99, 98, 97, 30, *range(40, 50))
    following, strengths = aligned(source, *text).continuation(source, 5)
    assert following.tolist() == [7, 8, 31, 60, 61]
    assert strengths[2] < 1.0 < strengths[[0, 1, 3, 4]].min()


def test_a_replacement_is_proposed_again_until_it_is_wrong() -> None:
    source = tokens(10, 11, 5, 12, 13, 14, 5, 15, 16, 17, 5, 18, 19)
    alignment = aligned(source, 10, 11, 99, 12, 13)
    assert alignment.continuation(source, 4)[0].tolist() == [14, 99, 15, 16]
    for token in (14, 5, 15, 16):
        alignment.follow(source, token)
    assert alignment.continuation(source, 3)[0].tolist() == [17, 5, 18]
