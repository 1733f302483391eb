"""The prefix store: finding beginnings, adding sequences, dropping them at the limit."""

from __future__ import annotations

import numpy as np
import pytest

from forward_requests import text
from llamaspec.llama.prefix_store import Bytes, Checkpoint, KnownPrefix, Node, PrefixStore
from llamaspec.values import TokenArray, n_common, scope_of

LARGE, BLOCK = 1 << 20, 16


class Copied:
    """A fake of the cells: records which positions were copied."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []

    def __call__(self, start: int, end: int) -> Bytes | None:
        self.spans.append((start, end))
        return np.zeros(10 * (end - start), dtype=np.uint8)


def put(store: PrefixStore, tokens: TokenArray) -> list[tuple[int, int]]:
    copied = Copied()
    store.put(tokens, BLOCK, copied)
    return copied.spans


def found_tokens(found: KnownPrefix) -> TokenArray:
    return np.concatenate([np.empty(0, dtype=np.int32), *(node.tokens for node in found.nodes)])[: found.n]


def test_a_growing_conversation_adds_only_new_tokens() -> None:
    store = PrefixStore(LARGE)
    assert put(store, text(40)) == [(0, 16), (16, 32), (32, 40)]
    assert put(store, text(60)) == [(40, 56), (56, 60)]
    assert put(store, text(50)) == []
    assert store.n_bytes == 14 * 60


def test_a_common_beginning_is_stored_once() -> None:
    store = PrefixStore(LARGE)
    put(store, text(40))
    other = np.append(text(34), text(10, 1))
    assert put(store, other) == [(32, 44)]  # from the block with the first difference
    assert store.find(text(41)).n == 40
    assert store.find(other).n == 44


def test_another_model_finds_nothing_and_shares_the_limit() -> None:
    store = PrefixStore(14 * 60)
    other = PrefixStore(limit_of=store)
    put(store, text(40))
    assert other.find(text(40)) == KnownPrefix()
    other.clear()
    assert (store.find(text(40)).n, other.n_bytes) == (40, 14 * 40)
    put(other, text(32, 1))
    assert (store.find(text(40)).n, other.find(text(32, 1)).n) == (16, 32)
    store.clear()
    assert (store.find(text(40)).n, store.n_bytes) == (0, 14 * 32)


def test_a_closed_store_takes_nothing_from_the_shared_limit() -> None:
    """Sequences that ended after their model's store was closed took room from the other models for good."""
    store = PrefixStore(LARGE)
    closed = PrefixStore(limit_of=store)
    put(store, text(20))
    n_bytes = store.n_bytes
    put(closed, text(20, 1))
    for _ in range(2):
        closed.close()
        assert put(closed, text(20, 1)) == []
        assert (store.n_bytes, store.fault()) == (n_bytes, None)


def test_the_longest_beginning_is_found_below_a_shorter_node() -> None:
    """A turn ended at 10 tokens and was continued; another sequence has 16 tokens in its first block."""
    store, tokens = PrefixStore(LARGE), text(60)
    put(store, tokens[:10])
    put(store, tokens)
    put(store, np.append(tokens[:14], text(20, 1)))
    assert store.find(tokens).n == 60


def test_at_the_limit_the_least_recently_used_leaves_are_dropped() -> None:
    store = PrefixStore(14 * 100)
    for seed in (1, 2, 3):
        put(store, text(32, seed))
    store.touch(store.find(text(32, 1)))
    put(store, text(16, 4))
    assert [store.find(text(32, seed)).n for seed in (1, 2, 3, 4)] == [32, 16, 32, 16]
    assert store.n_bytes <= store.limit


def test_an_older_node_drops_no_other_and_goes_first() -> None:
    store, other, content = PrefixStore(14 * 100), PrefixStore(LARGE), np.zeros(160, dtype=np.uint8)
    put(other, text(32, 1))
    (first, _), (second, _) = other.by_last_use()
    parent = Node(store.root, first.tokens, content)
    assert store.add_older(Node(parent, second.tokens, content), -2) is None  # its parent is not here
    assert store.add_older(parent, -1) is parent
    assert store.add_older(Node(store.root, first.tokens, content), -1) is parent
    assert store.add_older(child := Node(parent, second.tokens, content), -2) is child
    put(store, text(64, 2))
    assert store.add_older(Node(store.root, text(16, 3), content), -3) is None  # no room
    put(store, text(16, 4))
    assert [store.find(text(64, seed)).n for seed in (1, 2, 4)] == [16, 64, 16]
    assert store.fault() is None


def test_what_a_store_leaves_stays_for_the_next_one_while_there_is_room() -> None:
    store = PrefixStore(14 * 100)
    closed, again = PrefixStore(limit_of=store), PrefixStore(limit_of=store)
    put(closed, text(48, 1))
    put(again, text(16, 1))
    closed.leave("one")
    assert put(closed, text(20, 3)) == []
    put(store, text(48, 2))  # drops the least recently used leaf, of the closed store
    again.take("other")
    assert again.find(text(48, 1)).n == 16
    again.take("one")
    assert (again.find(text(48, 1)).n, store.n_bytes, store.fault()) == (32, 14 * 80, None)
    assert again.drop_left(1) == 0


def test_what_was_left_last_is_dropped_last() -> None:
    store = PrefixStore(14 * 100)
    for seed, key in enumerate("abca"):
        left = PrefixStore(limit_of=store)
        put(left, text(16, seed))
        left.leave(key)
    assert store.n_bytes == 14 * 48  # what was left first under the last key is gone
    assert store.drop_left(14 * 16 + 1) == 14 * 32
    older = Node(store.root, text(90, 9), np.zeros(900, dtype=np.uint8))
    assert store.add_older(older, -1) is older  # takes what is left
    assert (store.n_bytes, store.drop_left(1), store.fault()) == (14 * 90, 0, None)


def test_of_a_sequence_larger_than_the_store_the_beginning_stays() -> None:
    store = PrefixStore(14 * 40)
    put(store, text(100))
    assert store.find(text(100)).n == 32
    assert put(PrefixStore(0), text(100)) == []


def test_a_sequence_is_stored_up_to_a_failed_copy() -> None:
    store = PrefixStore(LARGE)
    store.put(text(40), BLOCK, lambda start, end: None if start else np.zeros(1, dtype=np.uint8))
    assert store.find(text(40)).n == 16


def test_a_state_can_be_used_at_its_end_and_at_its_checkpoints() -> None:
    """A state cannot be cut anywhere else."""
    store, state = PrefixStore(LARGE), np.zeros(8, dtype=np.uint8)
    store.put_whole(text(40), state, (Checkpoint(24, state), Checkpoint(12, state)))
    assert [store.find(text(n)).n for n in (11, 12, 30, 40, 50)] == [0, 12, 24, 40, 40]
    store.put_whole(text(50), state)  # replaces the sequence that it continues
    assert [store.find(text(n)).n for n in (40, 50)] == [0, 50]


def test_a_state_replaces_only_beginnings_of_its_scope() -> None:
    store, state, scopes = PrefixStore(LARGE), np.zeros(8, dtype=np.uint8), [scope_of(name) for name in "ab"]
    for n, scope in zip((40, 50), scopes, strict=True):
        store.put_whole(text(n), state, scope=scope)
    assert [store.find(text(60), scope).n for scope in scopes] == [40, 50]


def test_an_answer_that_was_written_anew_is_the_first_to_go() -> None:
    """Turns of a conversation, whose template drops reasoning, took the room of other conversations."""
    state, size = np.zeros(100, dtype=np.uint8), 300
    store = PrefixStore(4 * size)
    store.put_whole(text(50, 1), state)
    store.put_whole(text(50), state, (Checkpoint(20, state),))
    store.put_whole(np.append(text(30), text(20, 2)), state)  # instead of the last 20 tokens
    store.put_whole(text(50, 3), state)
    assert [store.find(text(50, seed)).n for seed in (0, 1, 3)] == [0, 50, 50]


@pytest.mark.parametrize("seed", range(5))
def test_random_sequences_compared_with_a_list(seed: int) -> None:
    rng, store, known = np.random.default_rng(seed), PrefixStore(LARGE), list[TokenArray]()
    for _ in range(200):
        base = known[int(rng.integers(len(known)))] if known and rng.random() < 0.8 else text(0)
        cut = base[: int(rng.integers(len(base) + 1))]
        tokens = np.append(cut, rng.integers(0, 2, int(rng.integers(1, 40)), dtype=np.int32)).astype(np.int32)
        found = store.find(tokens)
        assert found.n == max([n_common(tokens, each) for each in known], default=0)
        assert np.array_equal(found_tokens(found), tokens[: found.n])
        if rng.random() < 0.7:
            put(store, tokens)
            known.append(tokens)
    order = [node for node, _ in store.by_last_use()]
    places = {node: i for i, node in enumerate(order)}
    assert all(node.parent not in places or places[node.parent] < places[node] for node in order)
    assert store.n_bytes == sum(node.n_bytes for node in order)
