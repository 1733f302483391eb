"""The tokens that two vocabularies share, and sequences and scores translated from one to the other."""

from __future__ import annotations

import numpy as np
import pytest

from fakes import tokens
from llamaspec.drafters.common_vocabulary import LEAST, NONE, CommonTokens
from llamaspec.drafters.model import SameTokens
from llamaspec.errors import PairError
from vocabularies import FakeVocabulary, spelled

TARGET = FakeVocabulary(
    [b"<s>", b"</s>", b"a", b"b", b"ab", b"<tool>", b"c"], {0: b"<s>", 1: b"</s>", 5: b"<tool>"}, 0, 1
)
DRAFT = FakeVocabulary(
    [b"c", b"a", b"[end]", b"<tool>", b"b", b"a", b"ba", b"[begin]"],
    {2: b"[end]", 3: b"<tool>", 7: b"[begin]"}, bos=7, eos=2, adds_bos=True,
)  # fmt: skip


def test_tokens_with_the_same_text_are_shared_and_so_are_end_tokens() -> None:
    """If a byte and a letter of the draft have the same text, the letter counts."""
    made = CommonTokens(TARGET, DRAFT)
    assert made.to_draft.tolist() == [NONE, 2, 5, 4, NONE, 3, 0]
    assert made.is_common.tolist() == [False, True, True, True, False, True, True]
    assert made.drawable(tokens(0, 2, 4, 6)).tolist() == [2, 6]


def test_a_sequence_is_translated_token_by_token() -> None:
    """A token that only the target has becomes the longest tokens of the draft."""
    made = CommonTokens(TARGET, DRAFT)
    for _ in range(2):  # computed, then known
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
        ([b"b", b"a"], b"b\xff\xe2b", [b"b", b"b"]),  # bytes that it lacks are left out
        ([bytes([i]) for i in range(256)], b"\xf0\x9f\x91", [b"\xf0", b"\x9f", b"\x91"]),
    ],
)
def test_a_token_that_the_draft_lacks(pieces: list[bytes], text: bytes, expected: list[bytes]) -> None:
    made = CommonTokens(FakeVocabulary([text, b"e"]), FakeVocabulary([*pieces, b"e"]))
    spelling = [*pieces, b"e"]
    assert [spelling[token] for token in made.translate_each(tokens(0)).tolist()] == expected


def test_a_special_token_that_the_draft_lacks_is_translated_as_text() -> None:
    made = CommonTokens(TARGET, FakeVocabulary([b"<", b">", b"t", b"oo", b"l", b"a", b"b", b"c"]))
    assert spelled(TARGET, tokens(5)) == b"<tool>"
    assert made.translate_each(tokens(5)).tolist() == [0, 2, 3, 4, 1]


def test_a_draft_without_a_bos_token() -> None:
    made = CommonTokens(TARGET, FakeVocabulary([b"b", b"a", b"c"]))
    assert made.translate(tokens(0, 2, 3)).tolist() == [1, 0]


def test_scores_are_indexed_by_the_targets_tokens() -> None:
    scores = CommonTokens(TARGET, DRAFT).scores(np.arange(8, dtype=np.float32))
    assert scores.tolist() == [-np.inf, 2, 5, 4, -np.inf, 3, 0]


def test_a_token_of_the_draft_stands_for_one_token_of_the_target() -> None:
    """If two tokens have the same text, the draft draws the letter; it processes both alike."""
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


def test_the_same_ids_with_more_tokens_on_one_side() -> None:
    shorter, longer = SameTokens(3, 5), SameTokens(5, 3)
    assert shorter.translate(tokens(1, 4, 2)).tolist() == [1, 0, 2]
    assert longer.translate(tokens(1, 2)).tolist() == [1, 2]
    assert shorter.scores(np.ones(3, np.float32)).tolist() == [1, 1, 1, -np.inf, -np.inf]
    assert longer.scores(np.arange(5, dtype=np.float32)).tolist() == [0, 1, 2]
    assert shorter.drawable(tokens(1, 2, 3, 4)).tolist() == [1, 2]
