"""The KV cache over simulated cells: at every step its record agrees with the cells, in order."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forward_requests import RandomRows, request, text
from llamaspec.errors import ContextFullError
from llamaspec.llama.kv_cache import MIN_SHARED, KVCache
from llamaspec.values import EVERYONE, TARGET, ForwardRequest, n_common, scope_of
from simulated_cells import Checked, SimulatedCells

letters = st.lists(st.integers(0, 1), max_size=9)


@given(letters, letters)
def test_n_common_is_the_longest_common_beginning(a: list[int], b: list[int]) -> None:
    n = n_common(np.array(a, dtype=np.int32), np.array(b, dtype=np.int32))
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


def test_a_sequence_grows_and_rolls_back() -> None:
    checked = Checked()
    assert checked.run(0, request(20)) == 0
    assert checked.run(0, request(21, draft=text(4, 1))) == 20
    assert checked.run(0, request(22)) == 21  # the draft tokens were at the top: their cells are empty again
    assert checked.cache.n_used == 22


def test_rejected_tokens_below_another_sequence_are_garbage() -> None:
    checked = Checked()
    checked.run(0, request(10, draft=text(4, 9)))
    checked.run(1, request(10, 1))
    checked.run(0, request(11))
    assert len(checked.cells.of(checked.garbage)) == 4
    assert checked.cache.n_used == 25
    assert checked.held(0).cells[:11].tolist() == [*range(10), 24]


def _lose_a_cell(checked: Checked) -> None:
    checked.cache._table._n_owners[3] -= 1


def _miscount_garbage(checked: Checked) -> None:
    checked.cache._table.n_garbage += 1


def _miscount_bytes(checked: Checked) -> None:
    checked.store._room.n_bytes += 1


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (_lose_a_cell, "other owners"),
        (_miscount_garbage, "20 used cells, 1 of garbage and 44 free ones of 64"),
        (_miscount_bytes, "bytes in the store"),
    ],
)
def test_a_record_that_is_wrong_is_noticed_and_the_cache_works_again_after_a_reset(
    harm: Callable[[Checked], None], says: str
) -> None:
    checked = Checked()
    checked.run(7, request(20))
    harm(checked)
    assert says in str(checked.cache.fault())
    checked.cache.reset()
    assert checked.cache.n_used == checked.store.n_bytes == 0
    assert checked.run(8, request(20)) == 0


def test_a_prefix_is_shared_with_a_running_sequence() -> None:
    checked = Checked(128)
    checked.run(0, request(50))
    assert checked.run(1, request(60)) == 50
    assert checked.cache.n_used == 60


def test_a_sequence_that_continues_a_finished_one_takes_its_cells() -> None:
    checked = Checked(128)
    checked.run(0, request(50))
    checked.cache.release(0)
    assert checked.run(1, request(58, n_logits=2)) == 50
    assert checked.held(1).cells[:58].tolist() == list(range(58))
    assert checked.store.n_bytes == 0  # nothing was copied


def test_another_sequence_sends_a_finished_one_to_the_store() -> None:
    """The cells of finished sequences slowed down every later evaluation of a server."""
    checked = Checked(128)
    checked.run(0, request(50))
    checked.cache.release(0)
    checked.run(1, request(20, 1))
    assert checked.cache.n_used == 20
    checked.cache.release(1)
    assert checked.run(2, request(60)) == 50  # copied back
    assert checked.cache.n_used == 60


def test_a_sequence_that_ends_beside_others_leaves_no_cells() -> None:
    checked = Checked(128)
    checked.run(0, request(50))
    checked.run(1, request(40, 1))
    checked.cache.release(0)
    assert checked.run(1, request(41, 1)) == 40
    assert checked.cache.n_used == 41
    assert checked.held(1).cells[:41].tolist() == list(range(41))
    assert checked.run(2, request(51)) == 50


def test_a_longer_beginning_in_the_store_is_preferred_to_a_shorter_one_in_the_cells() -> None:
    checked = Checked(128)
    checked.run(0, request(90))
    checked.cache.release(0)
    checked.run(1, request(40))
    checked.cache.release(1)
    assert checked.run(2, request(92)) == 90


def test_without_a_store_the_last_sequence_stays_cached() -> None:
    checked = Checked(128, stored=0)
    checked.run(0, request(50))
    checked.cache.release(0)
    assert checked.run(1, request(60)) == 50
    checked.cache.release(1)
    checked.run(2, request(20, 1))
    checked.cache.release(2)
    assert checked.run(3, request(60)) == 0


def test_the_rest_of_a_finished_sequence_goes_to_the_store() -> None:
    """Two agents take turns with one system prompt: no token is processed twice."""
    checked = Checked(256)
    first, second = (np.concatenate([text(60), text(50, seed)]) for seed in (1, 2))
    for number in range(6):
        tokens = (first, second)[number % 2][: 80 + 5 * number]
        n_cached = checked.run(number, ForwardRequest(TARGET, tokens))
        assert n_cached == (0, 60, 80, 85, 90, 95)[number]
        checked.cache.release(number)


@pytest.mark.parametrize("where", ["running", "finished", "stored", "kept"])
@pytest.mark.parametrize(
    ("owner", "other", "n"),
    [("a", "a", 50), ("a", "b", 0), ("", "a", 0), ("a", "", 0), (EVERYONE, "a", 50), ("a", EVERYONE, 0)],
)
def test_tokens_are_found_only_in_their_scope(owner: str, other: str, n: int, where: str) -> None:
    checked = Checked(256, keeps_finished=where == "kept")
    checked.run(0, request(50, scope=owner))
    if where != "running":
        checked.cache.release(0)
    if where == "stored":
        checked.run(1, request(20, 1, scope=other))
    assert checked.cache.n_known(text(60), scope_of(other)) == n
    assert checked.run(2, request(60, scope=other)) == n
    checked.cache.release(2)
    assert checked.run(3, request(52, scope=owner)) >= 50  # still there


def test_a_beginning_for_everyone_is_stored_once() -> None:
    checked = Checked(256)
    checked.run(0, request(48, scope=EVERYONE))
    checked.cache.release(0)
    checked.run(1, request(9, 1))
    n_bytes = checked.store.n_bytes
    for number, scope in enumerate("abc", 2):
        assert checked.run(number, request(64, scope=scope)) == 48
        checked.cache.release(number)
    assert checked.store.n_bytes == 2 * n_bytes  # 16 tokens of each


@pytest.mark.parametrize("n_shared", [5, 20, 40])
def test_cells_shared_with_a_running_sequence_are_not_copied(n_shared: int) -> None:
    """A stored block is copied as a whole, but tokens that are shared already stay shared."""
    checked = Checked(256)
    checked.run(0, request(100))
    checked.run(9, request(10, 9))
    checked.cache.release(0)
    checked.run(1, ForwardRequest(TARGET, np.append(text(n_shared), text(5, 1))))
    assert checked.run(2, request(80)) == 79
    assert checked.held(2).cells[:n_shared].tolist() == checked.held(1).cells[:n_shared].tolist()


def test_on_a_gpu_finished_sequences_stay_until_their_room_is_needed() -> None:
    checked = Checked(128, keeps_finished=True)
    for number in range(3):
        checked.run(number, request(40, number))
        checked.cache.release(number)
    assert checked.cache.n_used == 120
    assert checked.store.n_bytes == 0
    assert checked.run(3, request(41, 1)) == 40
    checked.cache.release(3)
    checked.run(4, request(30, 4))  # the least recently used sequence makes room
    assert checked.store.n_bytes > 0
    assert checked.run(5, request(41, 2)) == 40
    checked.cache.release(4)
    assert checked.run(6, request(41, 0)) == 40  # copied back


def test_sequences_that_do_not_fit_into_the_store_together_are_copied_once() -> None:
    """They evicted each other for ever, so that a server with --cache-dir never ended."""
    checked = Checked(128, stored=300, keeps_finished=True)
    for number in range(2):
        checked.run(number, request(40, number))
        checked.cache.release(number)
    copies = [checked.cache.store_finished(16) for _ in range(8)]
    assert copies == [16, 16, 8, 16, 16, 8, 0, 0]
    assert [checked.store.find(text(40, seed)).n for seed in range(2)] == [16, 40]  # the newest stays
    assert checked.run(2, request(60, 0)) == 40
    checked.cache.release(2)
    assert checked.cache.store_finished(64) == 44  # it has been used again


def test_compactions_end_although_they_lose_what_was_copied_back() -> None:
    """Blocks were copied back, made garbage, and were lost when the garbage was removed, again and again."""
    checked = Checked(256)
    for seed in range(2):
        checked.run(0, request(33, seed))
        checked.cache.release(0)
    checked.run(2, request(10, 2))
    for seed in range(2):
        checked.run(seed, request(15, seed))
    checked.cells.copy_out = lambda *_: None  # type: ignore[method-assign]  # no memory is left
    answers = checked.prepare(*((3 + seed, request(40, seed, n_logits=0), 0) for seed in range(2)))
    assert answers == [15, 15]
    assert checked.cache.n_compactions == 2


def test_cells_that_are_shared_later_stay_in_order() -> None:
    """A sequence has evaluated a short beginning itself, and then shares more with an older sequence."""
    checked = Checked(256)
    checked.run(0, request(100))
    checked.run(1, request(MIN_SHARED - 1, n_logits=0))
    assert checked.run(1, request(90)) == 89
    assert checked.held(1).cells[:89].tolist() == list(range(89))


def test_compaction_keeps_sequences_and_shared_cells() -> None:
    checked = Checked(128)
    checked.run(0, request(60))
    checked.run(1, request(70))  # shares 60
    checked.run(2, request(10, 2, draft=text(5, 9)))
    checked.run(3, request(5, 3))
    checked.run(2, request(11, 2))  # five cells of garbage
    assert checked.cache.n_used == 60 + 10 + 15 + 5 + 1
    wanted = request(45, 3)
    checked.prepare((3, wanted, 0))
    assert checked.cache.n_compactions == 1
    assert checked.cells.of(checked.garbage) == []
    assert [checked.held(number).n for number in range(4)] == [60, 70, 11, 5]
    assert checked.held(0).cells[:60].tolist() == checked.held(1).cells[:60].tolist()
    checked.evaluate((3, wanted))


@pytest.mark.parametrize(("can_copy", "n_used"), [(True, 99), (False, 133)])
def test_much_garbage_is_removed_if_cells_can_be_moved(can_copy: bool, n_used: int) -> None:
    """If cells cannot be copied, compaction loses tokens, so it waits until the cache is full."""
    checked = Checked(256, can_copy=can_copy)
    checked.run(0, request(60, draft=text(20, 9)))
    checked.run(1, request(30, 1))
    checked.run(0, request(61))
    assert checked.cache.n_used == 111  # 20 of them garbage: less than a quarter
    checked.run(0, request(62, draft=text(14, 9)))
    checked.run(1, request(36, 1))
    checked.run(0, request(63))
    checked.run(0, request(63))
    assert checked.cache.n_used == n_used
    assert checked.run(1, request(37, 1)) == 36


def test_cells_that_others_hold_do_not_become_garbage() -> None:
    """Two sequences with the same tokens grew and ended; then one with 60 tokens failed in a cache of 100.

    A cut made shared cells garbage, so llama.cpp kept them when the other sequence ended.
    """
    checked = Checked(100, stored=0)
    checked.run(0, request(40))
    checked.run(1, request(40))
    checked.run(0, request(41))
    checked.run(9, request(2, 9))
    checked.cache.release(0)
    checked.cache.release(1)
    checked.run(2, request(60, 2))
    assert checked.cells.n_used == 62


@pytest.mark.parametrize("fails", ["copy out", "copy in"])
def test_tokens_that_cannot_be_moved_are_evaluated_again(fails: str) -> None:
    checked = Checked(64, can_copy=fails != "copy out")
    checked.cells.fails_to_copy_in = fails == "copy in"
    checked.run(0, request(20, draft=text(9, 9)))
    checked.run(1, request(20, 1))
    batch = ((0, request(25), 0), (1, request(34, 1), 0))
    assert checked.prepare(*batch) == [20, 0]
    assert checked.cache.n_compactions == 1
    checked.evaluate((0, request(25)), (1, request(34, 1)))


def test_a_sequence_without_room_leaves_the_others_alone() -> None:
    checked = Checked()
    checked.run(0, request(20))
    checked.run(1, request(20, 1))
    answers = checked.prepare((0, request(30), 0), (2, request(15, 2), 0), (1, request(24, 1), 0))
    assert [answer if isinstance(answer, int) else str(answer) for answer in answers] == [
        20,
        "the context of 64 tokens is full: this completion needs 15, other completions hold 50",
        20,
    ]
    checked.evaluate((0, request(30)), (1, request(24, 1)))
    checked.cache.release(0)
    assert checked.prepare((2, request(15, 2), 0)) == [0]


def test_one_sequence_too_many_leaves_the_others_alone() -> None:
    """Once, the cached tokens of all sequences were dropped and evaluated again."""
    checked = Checked(n_sequences=2)
    assert checked.prepare((0, request(9), 0), (1, request(9, 1), 0)) == [0, 0]
    checked.evaluate((0, request(9)), (1, request(9, 1)))
    late, *others = checked.prepare((2, request(5, 2), 0), (0, request(10), 0), (1, request(10, 1), 0))
    assert str(late) == "2 completions are running already; wait for one to end"
    assert others == [9, 9]


def test_reserved_cells_are_not_given_to_others() -> None:
    """They stay reserved until they are used or the sequence makes another request."""
    checked = Checked()
    checked.prepare((0, request(40, n_logits=0), 0))
    (answer,) = checked.prepare((1, request(30, 1), 0))
    assert isinstance(answer, ContextFullError)
    checked.evaluate((0, request(20, n_logits=0)))  # a part of the prompt
    assert checked.held(0).n_reserved == 20
    (answer,) = checked.prepare((1, request(30, 1), 0))
    assert isinstance(answer, ContextFullError)
    assert checked.prepare((0, request(10, n_logits=0), 0)) == [10]  # cached already
    assert checked.prepare((1, request(30, 1), 0)) == [0]


def test_padding_is_reserved_and_removed_again() -> None:
    checked = Checked()
    wanted = request(10)
    checked.prepare((0, wanted, 54))
    checked.evaluate((0, wanted), n_padding=54)
    assert checked.cache.n_used == 10
    assert checked.held(0).n_reserved == 0
    (answer,) = checked.prepare((0, request(10), 55))
    assert isinstance(answer, ContextFullError)


def test_an_interrupted_evaluation_leaves_no_cells() -> None:
    checked = Checked()
    checked.run(0, request(10))
    checked.prepare((0, request(20), 0))
    checked.interrupt(0, request(20), reached_llama=True)
    assert checked.run(0, request(25)) == 10


OWN_CODE = ("llama/kv_cache.py", "llama/tree_cells.py", "llama/cells.py")


def some_operations(checked: Checked) -> None:
    """Share, roll back, leave garbage, store and compact."""
    checked.run(0, request(34, draft=text(3, 9)))
    checked.run(1, request(36))
    checked.run(0, request(35, draft=text(2, 8)))
    checked.run(2, request(9, 2))
    checked.cache.release(1)
    checked.run(0, request(36))
    checked.run(2, request(27, 2))
    checked.cache.release(0)
    assert checked.run(3, request(34)) == 33
    assert checked.cache.n_compactions > 0


def test_an_exception_at_any_line_leaves_a_right_record() -> None:
    """As a signal handler may raise it: before each line of the cache's code, in one run each."""
    n_lines = n_left = 0

    def line(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal n_left
        n_left -= event == "line"
        if n_left == 0 and event == "line":
            raise KeyboardInterrupt
        return line

    def called(frame: FrameType, _event: str, _argument: object) -> Any:
        return line if frame.f_code.co_filename.endswith(OWN_CODE) else None

    while n_left <= 0:
        n_lines += 1
        n_left, checked, before = n_lines, Checked(64), sys.gettrace()
        checked.check = lambda: None  # type: ignore[method-assign]  # slow, and other tests' concern
        sys.settrace(called)
        try:
            some_operations(checked)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        del checked.check
        for number in (1, 3):
            checked.cache.release(number)
        for number, seed in ((0, 0), (2, 2)):
            checked.run(number, request(30, seed))
    assert n_lines > 300


@pytest.mark.parametrize("keeps_finished", [True, False])
@pytest.mark.parametrize("can_copy", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_random_operations(seed: int, can_copy: bool, keeps_finished: bool) -> None:
    """The store has much, little or no room."""
    rng, stored = np.random.default_rng(seed), (1 << 20, 600, 0)[seed]
    checked = Checked(160, 7, stored=stored, can_copy=can_copy, keeps_finished=keeps_finished)
    rows, n_full = RandomRows(rng, longest=50, n_sequences=5), 0
    for _ in range(400):
        for number in rows.leaving():
            checked.cache.release(number)
            checked.check()
        n_padding = int(rng.choice([0, 0, 3]))
        prepared = [(number, wanted, n_padding) for number, wanted in rows.batch()]
        answers = checked.prepare(*prepared)
        fitting = [
            (number, wanted)
            for (number, wanted, _), n_cached in zip(prepared, answers, strict=True)
            if isinstance(n_cached, int) and n_cached < wanted.n_tokens
        ]
        n_full += sum(isinstance(answer, ContextFullError) for answer in answers)
        kind = rng.choice(["all", "some", "none", "interrupted"], p=[0.6, 0.2, 0.1, 0.1])
        if kind == "some":
            fitting = fitting[: int(rng.integers(0, len(fitting) + 1))]
        if kind == "interrupted" and fitting:
            checked.interrupt(*fitting[0], reached_llama=bool(rng.random() < 0.7))
        elif kind != "none" and fitting:
            checked.evaluate(*fitting, n_padding=n_padding)
        if rng.random() < 0.02:
            checked.cache.forget()
            checked.check()
        if rng.random() < 0.1:
            while checked.cache.store_finished(16):
                checked.check()
    assert checked.store.n_bytes <= stored
    assert checked.cache.n_compactions > 3
    assert n_full > 0


class NoCells(SimulatedCells):
    """Cells without cost."""

    def __init__(self) -> None:
        super().__init__(0, block=0)


@pytest.mark.parametrize("n_shared", [0, 30_000], ids=["nothing in common", "a long prompt in common"])
def test_bookkeeping_of_32_sequences_with_32k_tokens(n_shared: int) -> None:
    """Each request is compared with its own sequence only: 1 ms per step; it once took 42 ms.

    Processor time of the fastest step, so that other load hardly matters.
    """
    n_sequences, n_tokens = 32, 32_768
    rng = np.random.default_rng(0)
    cache = KVCache(NoCells(), (n_sequences + 1) * n_tokens, 64)
    texts = rng.integers(2, 32_000, (n_sequences, n_tokens)).astype(np.int32)
    texts[:, :n_shared] = texts[0, :n_shared]
    lengths = np.full(n_sequences, n_tokens - 400)
    for number in range(n_sequences):
        beginning = ForwardRequest(TARGET, texts[number, : lengths[number]], n_logits=0)
        cache.prepare_all([(number, beginning, 0)])
        cache.commit([(number, texts[number, cache.running[number].n : lengths[number]])])
    steps = []
    for _ in range(50):
        batch = [
            ForwardRequest(TARGET, texts[number, : lengths[number] + 1].copy(), draft=texts[number, :4])
            for number in range(n_sequences)
        ]
        begin = time.thread_time()
        answers = cache.prepare_all([(number, wanted, 0) for number, wanted in enumerate(batch)])
        cache.commit([(number, np.append(each.tokens[-1:], each.draft)) for number, each in enumerate(batch)])
        steps.append(time.thread_time() - begin)
        assert answers == lengths.tolist()
        lengths += 1
    assert min(steps) < 0.02
