"""Which tokens two vocabularies have in common, and texts and scores of one in the numbers of the other."""

from __future__ import annotations

import numpy as np
import pytest

from fakes import tokens
from llamaspec.drafters.common_vocabulary import LEAST, NONE, CommonTokens, SameTokens
from llamaspec.errors import PairError
from vocabularies import FakeVocabulary, spelled

TARGET = FakeVocabulary(
    [b"<s>", b"</s>", b"a", b"b", b"ab", b"<tool>", b"c"], {0: b"<s>", 1: b"</s>", 5: b"<tool>"}, 0, 1
)
DRAFT = FakeVocabulary(
    [b"c", b"a", b"[end]", b"<tool>", b"b", b"a", b"ba", b"[begin]"],
    {2: b"[end]", 3: b"<tool>", 7: b"[begin]"}, bos=7, eos=2, adds_bos=True,
)  # fmt: skip


def test_tokens_are_the_same_by_their_text_and_ends_by_what_they_are() -> None:
    """Of two draft tokens with one text, a byte and a letter, the letter is meant."""
    made = CommonTokens(TARGET, DRAFT)
    assert made.to_draft.tolist() == [NONE, 2, 5, 4, NONE, 3, 0]
    assert made.is_common.tolist() == [False, True, True, True, False, True, True]
    assert made.drawable(tokens(0, 2, 4, 6)).tolist() == [2, 6]


def test_a_text_is_read_token_by_token() -> None:
    """What only the target has is spelled by the longest tokens that the draft has."""
    made = CommonTokens(TARGET, DRAFT)
    for _ in range(2):  # learnt, and known
        assert made.translate(tokens(0, 2, 4, 6, 1)).tolist() == [7, 5, 5, 4, 0, 2]
        assert made.translate(tokens(4)).tolist() == [7, 5, 4]
        assert made.translate_each(tokens(4, 4, 3)).tolist() == [5, 4, 5, 4, 4]
    assert made.translate_each(tokens()).tolist() == []
    assert made.translate(tokens(2, 3)).tolist() == [7, 5, 4]


@pytest.mark.parametrize(
    ("pieces", "text", "expected"),
    [
        ([b"the", b" th", b"en", b"e"], b" then", [b" th", b"en"]),
        ([b"a", b"aa", b"aaaa"], b"aaaaaaa", [b"aaaa", b"aa", b"a"]),
        ([b"b", b"a"], b"b\xff\xe2b", [b"b", b"b"]),  # what it cannot spell is left out
        ([bytes([i]) for i in range(256)], b"\xf0\x9f\x91", [b"\xf0", b"\x9f", b"\x91"]),
    ],
)
def test_a_token_that_the_draft_lacks(pieces: list[bytes], text: bytes, expected: list[bytes]) -> None:
    made = CommonTokens(FakeVocabulary([text, b"e"]), FakeVocabulary([*pieces, b"e"]))
    spelling = [*pieces, b"e"]
    assert [spelling[token] for token in made.translate_each(tokens(0)).tolist()] == expected


def test_a_special_token_that_the_draft_lacks_is_read_as_text() -> None:
    made = CommonTokens(TARGET, FakeVocabulary([b"<", b">", b"t", b"oo", b"l", b"a", b"b", b"c"]))
    assert spelled(TARGET, tokens(5)) == b"<tool>"
    assert made.translate_each(tokens(5)).tolist() == [0, 2, 3, 4, 1]


def test_a_draft_without_a_beginning() -> None:
    made = CommonTokens(TARGET, FakeVocabulary([b"b", b"a", b"c"]))
    assert made.translate(tokens(0, 2, 3)).tolist() == [1, 0]


def test_scores_have_the_targets_numbers() -> None:
    scores = CommonTokens(TARGET, DRAFT).scores(np.arange(8, dtype=np.float32))
    assert scores.tolist() == [-np.inf, 2, 5, 4, -np.inf, 3, 0]


def test_no_two_tokens_are_the_same_token_of_the_draft() -> None:
    """Of two tokens with one text the draft means the letter, and reads both alike."""
    made = CommonTokens(FakeVocabulary([b"q", b"e", b"q"]), FakeVocabulary([b"q", b"e"]))
    assert made.to_draft.tolist() == [0, 1, 0]
    assert made.is_common.tolist() == [False, True, True]
    assert made.scores(np.array([3, 4], np.float32)).tolist() == [-np.inf, 4, 3]


def test_too_little_in_common_is_refused() -> None:
    target = FakeVocabulary([b"e", b"t", b"a", b"h"])
    assert LEAST < CommonTokens(target, FakeVocabulary([b"a", b"t", b"e"])).of_text < 1
    for draft in ([b"h", b"x"], [b"only", b"words"], []):
        with pytest.raises(PairError, match="choose a draft of the target's family"):
            CommonTokens(target, FakeVocabulary(draft))


def test_same_numbers_with_more_of_them() -> None:
    shorter, longer = SameTokens(3, 5), SameTokens(5, 3)
    assert shorter.translate(tokens(1, 4, 2)).tolist() == [1, 0, 2]
    assert longer.translate(tokens(1, 2)).tolist() == [1, 2]
    assert shorter.scores(np.ones(3, np.float32)).tolist() == [1, 1, 1, -np.inf, -np.inf]
    assert longer.scores(np.arange(5, dtype=np.float32)).tolist() == [0, 1, 2]
    assert shorter.drawable(tokens(1, 2, 3, 4)).tolist() == [1, 2]
