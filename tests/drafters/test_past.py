"""Earlier texts against plain search."""

from __future__ import annotations

import numpy as np
import pytest

from fakes import tokens
from llamaspec.drafters.ngram import NgramDrafter, SuffixAutomaton
from llamaspec.drafters.past import _PLACE_BITS, MAX_TOKENS, MIN_MATCH, PastTexts, latest
from llamaspec.length.fixed_length import FixedLength
from llamaspec.values import Source, TokenArray


def random_text(rng: np.random.Generator, n: int, n_tokens: int = 3) -> TokenArray:
    return rng.integers(0, n_tokens, n).astype(np.int32)


def longest_end(path: list[int], texts: list[list[int]]) -> int:
    """By trying every length and place; something must follow there."""
    for length in range(min(len(path), 32), MIN_MATCH - 1, -1):
        end = path[-length:]
        if any(text[i : i + length] == end for text in texts for i in range(len(text) - length)):
            return length
    return 0


@pytest.mark.parametrize("seed", range(30))
def test_what_is_found_is_what_plain_search_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    texts = [random_text(rng, int(rng.integers(1, 60))) for _ in range(6)]
    past = PastTexts(texts[:3])
    for text in texts[3:]:
        past.add(text)
    kept = [text.tolist() for text in past.texts]
    for _ in range(40):
        source = texts[int(rng.integers(6))]
        start = int(rng.integers(len(source)))
        path = np.concatenate([random_text(rng, int(rng.integers(0, 9))), source[start : start + 20]])
        match = past.find(path)
        assert match.length == longest_end(path.tolist(), kept)
        if match.length:
            place = [*path.tolist()[-match.length :], *match.following.tolist()]
            assert any(place == text[i : i + len(place)] for text in kept for i in range(len(text)))


@pytest.mark.parametrize("factor", [0, 1, 1 << 40])
def test_hashes_that_meet_decide_nothing(factor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All four tokens alike, or many of them: the places are compared."""
    monkeypatch.setattr("llamaspec.drafters.past._FACTOR", factor)
    rng = np.random.default_rng(3)
    texts = [random_text(rng, 12, 4) for _ in range(4)]
    past = PastTexts(texts)
    kept = [text.tolist() for text in past.texts]
    lengths = list[int]()
    for _ in range(200):
        path = random_text(rng, 7, 4)
        match = past.find(path)
        assert match.length == longest_end(path.tolist(), kept)
        assert bool(len(match.following)) == bool(match.length)
        lengths.append(match.length)
    assert 0 in lengths
    assert max(lengths) > 4


def test_no_more_is_copied_and_compared_than_pays() -> None:
    """64 tokens, and the latest 64 places."""
    past = PastTexts([np.arange(200, dtype=np.int32)])
    assert past.find(tokens(0, 1, 2, 3)).following.tolist() == list(range(4, 68))
    long = past.find(np.arange(190, dtype=np.int32))
    assert (long.length, long.following.tolist()) == (32, list(range(190, 200)))
    for n_later, length, following in ((63, 5, 50), (64, 4, 163)):
        later = [tokens(1, 2, 3, 4, 100 + i) for i in range(n_later)]
        match = PastTexts([tokens(9, 1, 2, 3, 4, 50), *later]).find(tokens(9, 1, 2, 3, 4))
        assert (match.length, int(match.following[0])) == (length, following)


def test_every_place_has_a_number_of_its_own() -> None:
    """Also where all texts are as short as may be, with a gap behind each."""
    assert MAX_TOKENS + MAX_TOKENS // (MIN_MATCH + 1) + 32 <= 1 << _PLACE_BITS


def test_texts_too_short_to_be_found_are_not_kept() -> None:
    past = PastTexts()
    past.add(tokens(1, 2, 3, 4))
    assert (past.texts, past.added, past.n_tokens) == ((), (), 0)
    past.add(tokens(1, 2, 3, 4, 5))
    assert (len(past.texts), len(past.added), past.n_tokens) == (1, 1, 5)
    assert past.find(tokens(2, 3, 4)).length == 0
    assert past.find(tokens(1, 2, 3, 4)).length == 4


def test_what_is_added_is_the_callers_no_longer() -> None:
    past, text = PastTexts(), tokens(1, 2, 3, 4, 5)
    past.add(text)
    text[:] = 9
    assert past.texts[0].tolist() == [1, 2, 3, 4, 5]


def test_the_latest_of_several_places_counts() -> None:
    past = PastTexts([tokens(1, 2, 3, 4, 5), tokens(1, 2, 3, 4, 6)])
    assert past.find(tokens(9, 1, 2, 3, 4)).following.tolist() == [6]
    past.add(tokens(1, 2, 3, 4, 7))
    assert past.find(tokens(9, 1, 2, 3, 4)).following.tolist() == [7]


def test_no_copy_reaches_from_one_text_into_the_next() -> None:
    past = PastTexts([tokens(1, 2, 3, 4), tokens(5, 6, 7, 8, 9)])
    assert past.find(tokens(1, 2, 3, 4)).length == 0
    assert past.find(tokens(5, 6, 7, 8)).following.tolist() == [9]
    assert past.find(tokens(3, 4, 5, 6)).length == 0


def test_a_text_takes_the_place_of_its_beginning() -> None:
    """A conversation grows from turn to turn and is kept once."""
    past = PastTexts([tokens(*range(10)), tokens(7, 7, 7, 7, 7)])
    past.add(tokens(*range(20)))
    assert [len(text) for text in past.texts] == [5, 20]
    past.add(tokens(*range(20)))
    assert [len(text) for text in past.added] == [20]


def test_the_oldest_texts_go_first() -> None:
    past = PastTexts([tokens(*range(i, i + 10)) for i in range(5)], max_tokens=25)
    assert [int(text[0]) for text in past.texts] == [3, 4]
    past.add(tokens(*range(50, 60)))
    assert [int(text[0]) for text in past.texts] == [4, 50]
    assert past.n_tokens == 20


def test_one_text_may_not_fill_everything() -> None:
    past = PastTexts()
    past.add(np.arange(MAX_TOKENS, dtype=np.int32))
    assert past.n_tokens == MAX_TOKENS // 4
    assert past.find(np.arange(MAX_TOKENS - 50, MAX_TOKENS - 10, dtype=np.int32)).following.tolist()


def test_many_short_texts_are_searched_in_few_places() -> None:
    rng = np.random.default_rng(0)
    past = PastTexts()
    for _ in range(200):
        past.add(random_text(rng, int(rng.integers(5, 40)), 1000))
    assert len(past._indices) <= 12
    assert all(past.find(text[:-1]).following.tolist() == text[-1:].tolist() for text in past.texts)


def test_texts_of_another_vocabulary_are_dropped() -> None:
    past = PastTexts([tokens(1, 2, 3, 4, 5), tokens(1, 2, 3, 4, 99), tokens(1, 2, 3, 4, -5)])
    past.keep_below(99)
    assert [text.tolist() for text in past.texts] == [[1, 2, 3, 4, 5]]
    assert past.find(tokens(1, 2, 3, 4)).following.tolist() == [5]


def test_the_latest_that_there_is_room_for() -> None:
    texts = [tokens(1, 2), tokens(3), tokens(3, 4), tokens(3, 4, 5)]
    assert [text.tolist() for text in latest(texts, 5)] == [[1, 2], [3, 4, 5]]
    assert [text.tolist() for text in latest(texts, 4)] == [[3, 4, 5]]
    assert latest([], 4) == ()


# -- as draft tokens ----------------------------------------------------------------------------------------


def test_the_longer_match_is_copied() -> None:
    past = PastTexts([tokens(1, 2, 3, 4, 5, 6, 7)])
    drafter = NgramDrafter(past=past)
    draft = drafter.propose(tokens(3, 4, 9, 1, 2, 3, 4), FixedLength(8))
    assert (draft.source, draft.tokens.tolist()) == (Source.STORE, [5, 6, 7])
    assert draft.confidences == (4 / 5, 5 / 6, 6 / 7)
    draft = NgramDrafter(past=past).propose(tokens(1, 2, 3, 4, 8, 1, 2, 3, 4), FixedLength(2))
    assert (draft.source, draft.tokens.tolist()) == (Source.NGRAM, [8, 1])
    assert len(NgramDrafter(past=past).propose(tokens(1, 2, 3, 4), FixedLength(0))) == 0


def test_a_text_becomes_a_past_one_when_it_ends() -> None:
    past = PastTexts()
    drafter, other = NgramDrafter(past=past), NgramDrafter(past=past)
    drafter.propose(tokens(1, 2, 3, 4, 5, 6), FixedLength(3))
    assert len(other.propose(tokens(9, 1, 2, 3, 4), FixedLength(3))) == 0
    for _ in range(2):
        drafter.close()
    assert other.propose(tokens(9, 1, 2, 3, 4), FixedLength(3)).tokens.tolist() == [5, 6]
    assert len(past.texts) == 1


@pytest.mark.parametrize("seed", range(20))
def test_tokens_that_are_taken_back_leave_no_trace(seed: int) -> None:
    rng = np.random.default_rng(seed)
    text = rng.integers(0, 3, 60).tolist()
    automaton, fresh = SuffixAutomaton(), SuffixAutomaton()
    for token in text:
        automaton.append(token)
        fresh.append(token)
        n = int(rng.integers(0, 6))
        for other in rng.integers(0, 3, n).tolist():
            automaton.append(other)
        for _ in range(n):
            automaton.pop()
        for name in ("_next", "_link", "_length", "_end", "_last", "n_tokens"):
            assert getattr(automaton, name) == getattr(fresh, name)


def test_a_text_that_goes_on_otherwise_is_not_read_again() -> None:
    """As where a draft's draft tokens were rejected."""
    drafter = NgramDrafter()
    drafter.prepare(tokens(1, 2, 3, 1, 2, 9, 9))
    automaton = drafter._automaton
    assert drafter.propose(tokens(1, 2, 3, 1, 2), FixedLength(1)).tokens.tolist() == [3]
    assert drafter._automaton is automaton
