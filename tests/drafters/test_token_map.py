"""Which tokens two vocabularies share, and texts and scores of one in the numbers of the other."""

from __future__ import annotations

import numpy as np

from fakes import tokens
from foreign import FakeVocabulary
from llamaspec.drafters.spelling import Spelling
from llamaspec.drafters.token_map import NONE, Overlap, SameTokens, TokenMap

TARGET = FakeVocabulary(
    [b"<s>", b"</s>", b"a", b"b", b"ab", b"<tool>", b"c"], {0: b"<s>", 1: b"</s>", 5: b"<tool>"}, 0, 1
)
DRAFT = FakeVocabulary(
    [b"c", b"a", b"[end]", b"<tool>", b"b", b"a", b"ba", b"[begin]"],
    {2: b"[end]", 3: b"<tool>", 7: b"[begin]"}, bos=7, eos=2, adds_bos=True,
)  # fmt: skip


def token_map(target: FakeVocabulary = TARGET, draft: FakeVocabulary = DRAFT) -> TokenMap:
    return TokenMap(Spelling(target), Spelling(draft))


def test_tokens_are_the_same_by_their_text_and_ends_by_what_they_are() -> None:
    """Of two draft tokens with one text, a byte and a letter, the letter is meant."""
    made = token_map()
    assert made.to_draft.tolist() == [NONE, 2, 5, 4, NONE, 3, 0]
    assert made.to_target.tolist() == [6, NONE, 1, 5, 3, 2, NONE, NONE]
    assert made.is_shared.tolist() == [False, True, True, True, False, True, True]
    assert made.among(tokens(0, 2, 4, 6)).tolist() == [2, 6]
    assert made.noise.tolist() == [6, 7 + 1, 1, 5, 3, 2, 7 + 6, 7 + 7]


def test_the_first_token_has_the_targets_noise_too() -> None:
    made = token_map(FakeVocabulary([b"b", b"a"]), FakeVocabulary([b"a", b"b", b"c"]))
    assert made.noise.tolist() == [1, 0, 2 + 2]


def test_a_text_is_read_token_by_token() -> None:
    made = token_map()
    for _ in range(2):  # learnt, and known
        assert made.read(tokens(0, 2, 4, 6, 1)).tolist() == [7, 5, 1, 4, 0, 2]
        assert made.read(tokens(4)).tolist() == [7, 1, 4]
        assert made.spelled(tokens(4, 4, 3)).tolist() == [1, 4, 1, 4, 4]
    assert made.spelled(tokens()).tolist() == []
    assert made.read(tokens(2, 3)).tolist() == [7, 5, 4]


def test_a_draft_without_a_beginning() -> None:
    made = token_map(TARGET, FakeVocabulary([b"b", b"a"]))
    assert made.read(tokens(0, 2, 3)).tolist() == [1, 0]


def test_scores_have_the_targets_numbers() -> None:
    scores = token_map().scores(np.arange(8, dtype=np.float32))
    assert scores.tolist() == [-np.inf, 2, 5, 4, -np.inf, 3, 0]


def test_no_two_tokens_mean_the_same() -> None:
    made = token_map(DRAFT, TARGET)
    meant = made.to_target[made.to_target >= 0].tolist()
    assert len(meant) == len(set(meant)) == 6 - 1


def test_how_well_they_fit_on_a_text() -> None:
    spellings = Spelling(TARGET), Spelling(DRAFT)
    overlap = Overlap(*spellings, TokenMap(*spellings), b"abcabb")  # ab c ab b; a b c a b b
    assert (overlap.n_shared, overlap.n_target, overlap.of_text) == (5, 7, 0.5)
    assert (overlap.n_steps, overlap.whole) == (1.5, 4 / 6)


def test_same_numbers_with_more_of_them() -> None:
    shorter, longer = SameTokens(3, 5), SameTokens(5, 3)
    assert shorter.read(tokens(1, 4, 2)).tolist() == [1, 0, 2]
    assert longer.read(tokens(1, 2)).tolist() == [1, 2]
    assert shorter.scores(np.ones(3, np.float32)).tolist() == [1, 1, 1, -np.inf, -np.inf]
    assert longer.scores(np.arange(5, dtype=np.float32)).tolist() == [0, 1, 2]
    assert shorter.among(tokens(1, 2, 3, 4)).tolist() == [1, 2]
