"""The arithmetic of common beginnings. What a real memory does with it is in test_model.py."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec import Ask
from llamaspec.llama.memory import levelled, shared
from llamaspec.values import TokenArray

texts = st.text(alphabet="ab", max_size=9)


def tokens(text: str) -> TokenArray:
    """Letters stand for tokens."""
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)


@pytest.mark.parametrize(
    ("a", "b", "n"),
    [
        ("", "", 0),
        ("", "abc", 0),
        ("abc", "abc", 3),
        ("abc", "abcde", 3),
        ("abcde", "abc", 3),
        ("abc", "abd", 2),
        ("abc", "xbc", 0),
        ("abxc", "abyc", 2),
    ],
)
def test_shared(a: str, b: str, n: int) -> None:
    assert shared(tokens(a), tokens(b)) == n


@given(texts, texts)
def test_shared_is_the_longest_common_beginning(a: str, b: str) -> None:
    n = shared(tokens(a), tokens(b))
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


@pytest.mark.parametrize(
    ("asked", "kept", "level"),
    [
        (["abc"], [2], [2]),
        # They go on alike beyond the lower: both must end there.
        (["abcd", "abce"], [3, 1], [1, 1]),
        (["abcd", "abce"], [1, 3], [1, 1]),
        # They part at or before the lower: nothing to do.
        (["abcd", "abxy"], [3, 2], [3, 2]),
        (["abcd", "xyzw"], [3, 0], [3, 0]),
        (["ab", "abcd"], [1, 2], [1, 1]),
        # Lowering one lowers another.
        (["abcd", "abce", "abfg"], [3, 2, 1], [1, 1, 1]),
        (["abcdef", "abcdxy", "abzzzz"], [5, 4, 2], [5, 4, 2]),
        (["abcdef", "abcdxy", "abzzzz"], [5, 3, 1], [1, 1, 1]),
        (["abcdef", "abcdxy", "abzzzz"], [5, 3, 2], [3, 3, 2]),
    ],
)
def test_levelled(asked: list[str], kept: list[int], level: list[int]) -> None:
    given_kept = list(kept)
    assert levelled([Ask(i, tokens(text), 1) for i, text in enumerate(asked)], kept) == level
    assert kept == given_kept


@given(st.lists(texts.filter(bool), min_size=1, max_size=4), st.data())
def test_levelled_lanes_can_share_positions(asked: list[str], data: st.DataObject) -> None:
    """Two asks that share a position to evaluate keep equally many, and no lane keeps more than before."""
    kept = [data.draw(st.integers(0, len(text) - 1)) for text in asked]
    level = levelled([Ask(i, tokens(text), 1) for i, text in enumerate(asked)], kept)
    assert all(after <= before for before, after in zip(kept, level, strict=True))
    for a, keep_a in zip(asked, level, strict=True):
        for b, keep_b in zip(asked, level, strict=True):
            if shared(tokens(a), tokens(b)) > min(keep_a, keep_b):
                assert keep_a == keep_b
