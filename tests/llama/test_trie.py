"""Every distinct position once: tables of asks and the trie that they make."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec import Ask
from llamaspec.llama.trie import Trie, merge
from llamaspec.values import TokenArray


def ask(lane: int, text: str, n: int = 1) -> Ask:
    """Letters stand for tokens."""
    return Ask(lane, np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32), n)


def shown(trie: Trie) -> str:
    """Letter, position, lanes, and * where scores are wanted."""
    return " ".join(
        f"{chr(node.token)}{node.position}:{''.join(map(str, node.lanes))}{'*' * node.wanted}"
        for node in trie.nodes
    )


@pytest.mark.parametrize(
    ("asks", "kept", "nodes", "paths"),
    [
        # One ask is a chain.
        ([ask(0, "abc")], [0], "a0:0 b1:0 c2:0*", [[2]]),
        ([ask(0, "abc")], [2], "c2:0*", [[0]]),
        ([ask(3, "abcd", 3)], [1], "b1:3* c2:3* d3:3*", [[0, 1, 2]]),
        # Two asks with a common beginning are a tree.
        ([ask(0, "abc"), ask(1, "abd")], [0, 0], "a0:01 b1:01 c2:0* d2:1*", [[2], [3]]),
        ([ask(0, "abc"), ask(1, "abd")], [1, 1], "b1:01 c2:0* d2:1*", [[1], [2]]),
        # Both want the same scores: one row serves both.
        ([ask(0, "ab", 2), ask(1, "ab")], [0, 0], "a0:01* b1:01*", [[0, 1], [1]]),
        # One is the beginning of the other.
        ([ask(0, "abc"), ask(1, "ab")], [0, 0], "a0:01 b1:01* c2:0*", [[2], [1]]),
        # The same token after different beginnings, or at different places, is not the same position.
        ([ask(0, "ac"), ask(1, "bc")], [1, 1], "c1:0* c1:1*", [[0], [1]]),
        ([ask(0, "ac"), ask(1, "bc")], [0, 0], "a0:0 c1:0* b0:1 c1:1*", [[1], [3]]),
        ([ask(0, "aab"), ask(1, "ab")], [0, 0], "a0:01 a1:0 b2:0* b1:1*", [[2], [3]]),
        # Kept differently far: nothing in common to evaluate.
        ([ask(0, "abc"), ask(1, "abc")], [2, 0], "c2:0* a0:1 b1:1 c2:1*", [[0], [3]]),
        # Three, of which two part later.
        (
            [ask(0, "abcd"), ask(1, "abce"), ask(2, "axyz", 2)],
            [1, 1, 1],
            "b1:01 c2:01 d3:0* e3:1* x1:2 y2:2* z3:2*",
            [[2], [3], [5, 6]],
        ),
    ],
)
def test_merging(asks: list[Ask], kept: list[int], nodes: str, paths: list[list[int]]) -> None:
    trie = merge(asks, kept)
    assert shown(trie) == nodes
    assert trie.paths == paths


def test_nothing_is_merged_where_positions_cannot_be_shared() -> None:
    trie = merge([ask(0, "abc"), ask(1, "abd")], [0, 0], shares=False)
    assert shown(trie) == "a0:0 b1:0 c2:0* a0:1 b1:1 d2:1*"
    assert trie.paths == [[2], [5]]


letters = st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=8)


def as_tokens(letters: list[int]) -> TokenArray:
    return np.array(letters, dtype=np.int32)


@given(st.lists(letters, min_size=1, max_size=5))
def test_one_node_for_every_distinct_beginning(texts: list[list[int]]) -> None:
    asks = [Ask(lane, as_tokens(text), 1) for lane, text in enumerate(texts)]
    trie = merge(asks, [0] * len(asks))
    distinct = {tuple(text[: i + 1]) for text in texts for i in range(len(text))}
    assert len(trie.nodes) == len(distinct)
    for lane, text in enumerate(texts):
        mine = [node for node in trie.nodes if lane in node.lanes]
        assert [node.token for node in mine] == text  # in order, so each follows those it depends on
        assert [node.position for node in mine] == list(range(len(text)))
