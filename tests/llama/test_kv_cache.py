"""The KV cache over simulated cells: what is noted is what the cells hold, in order, at every step."""

from __future__ import annotations

import math
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest

from forward_requests import RandomRows, RandomTrees, request, text
from llamaspec.errors import ContextFullError
from llamaspec.llama import clutter
from llamaspec.llama.branches import n_leaves
from llamaspec.llama.cached_sequence import shared
from llamaspec.llama.kv_cache import TAKE_OVER
from llamaspec.values import TARGET, ForwardRequest
from simulated_cells import Checked


def test_a_row_grows_and_goes_back() -> None:
    checked = Checked()
    assert checked.run(0, request(20)) == 0
    assert checked.run(0, request(21, draft=text(4, 1))) == 20
    assert checked.run(0, request(22)) == 21  # the draft tokens were at the top: their cells are free again
    assert checked.cache.n_used == 22


def test_rejected_tokens_below_another_row_are_garbage() -> None:
    checked = Checked()
    checked.run(0, request(10, draft=text(4, 9)))
    checked.run(1, request(10, 1))
    checked.run(0, request(11))
    assert len(checked.cells.of(checked.garbage)) == 4
    assert checked.cache.n_used == 25
    assert checked.held(0).cells[:11].tolist() == [*range(10), 24]


def test_a_prefix_is_taken_over_from_a_row_and_from_one_that_has_ended() -> None:
    checked = Checked(128)
    checked.run(0, request(50))
    assert checked.run(1, request(60)) == 50
    checked.cache.release(0)
    checked.cache.release(1)
    assert checked.run(2, request(58, n_logits=2)) == 56
    assert checked.cache.n_used == 62


def test_what_is_taken_over_later_keeps_the_order_of_cells() -> None:
    """A row has read a short beginning for itself, and then wants more of what another knows from before."""
    checked = Checked(256)
    checked.run(0, request(100))
    checked.run(1, request(TAKE_OVER - 1, n_logits=0))
    assert checked.run(1, request(90)) == 89
    assert checked.held(1).cells[:89].tolist() == list(range(89))


def test_eviction_takes_the_prefix_that_was_used_least_recently() -> None:
    checked = Checked()
    for row in range(3):
        checked.run(row, request(18, row))
        checked.cache.release(row)
    checked.run(3, request(12, 3))
    assert [sequence.n for sequence in checked.cache._rows.all[:4]] == [0, 18, 18, 12]
    checked.run(3, request(13, 3))
    assert shared(checked.cache._rows.all[1].tokens, text(18, 1)) == 18


def test_compaction_keeps_rows_and_what_they_share() -> None:
    checked = Checked(128)
    checked.run(0, request(60))
    checked.run(1, request(70))  # shares 60
    checked.run(2, request(10, 2, draft=text(5, 9)))
    checked.run(3, request(5, 3))
    checked.run(2, request(11, 2))  # five cells of garbage
    assert checked.cache.n_used == 60 + 10 + 15 + 5 + 1
    wanted = request(45, 3)
    checked.prepare((3, wanted, 0))
    assert checked.cache._n_compactions == 1
    assert checked.cells.of(checked.garbage) == []
    assert [checked.held(row).n for row in range(4)] == [60, 70, 11, 5]
    assert checked.held(0).cells[:60].tolist() == checked.held(1).cells[:60].tolist()
    checked.evaluate((3, wanted))


@pytest.mark.parametrize("fails", ["copy out", "copy in"])
def test_what_cannot_be_moved_is_read_again(fails: str) -> None:
    checked = Checked(64, can_copy=fails != "copy out")
    checked.cells.fails_to_copy_in = fails == "copy in"
    checked.run(0, request(20, draft=text(9, 9)))
    checked.run(1, request(20, 1))
    batch = ((0, request(25), 0), (1, request(34, 1), 0))
    assert checked.prepare(*batch) == [0, 0]
    assert checked.cache._n_compactions == 1
    checked.evaluate((0, request(25)), (1, request(34, 1)))


def test_a_row_without_room_leaves_the_others_alone() -> None:
    checked = Checked()
    checked.run(0, request(20))
    checked.run(1, request(20, 1))
    answers = checked.prepare((0, request(30), 0), (2, request(15, 2), 0), (1, request(24, 1), 0))
    assert [answer if isinstance(answer, int) else str(answer) for answer in answers] == [
        20,
        "the context of 64 tokens is full: this text needs 15, other texts hold 50",
        20,
    ]
    checked.evaluate((0, request(30)), (1, request(24, 1)))
    checked.cache.release(0)
    assert checked.prepare((2, request(15, 2), 0)) == [0]


def test_a_row_alone_that_is_too_long() -> None:
    (answer,) = Checked().prepare((0, request(65), 0))
    assert str(answer) == "the context of 64 tokens is full: this text needs 65"


def test_what_a_row_has_reserved_is_not_given_to_others() -> None:
    """Until it has used it, or wants something else: then nothing stays reserved."""
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


def test_padding_is_reserved_and_taken_out_again() -> None:
    checked = Checked()
    wanted = request(10)
    checked.prepare((0, wanted, 54))
    checked.evaluate((0, wanted), n_padding=54)
    assert checked.cache.n_used == 10
    assert checked.held(0).n_reserved == 0
    (answer,) = checked.prepare((0, request(10), 55))
    assert isinstance(answer, ContextFullError)


def test_an_interrupted_evaluation_leaves_nothing_behind() -> None:
    checked = Checked()
    checked.run(0, request(10))
    checked.prepare((0, request(20), 0))
    checked.cache.begin()
    checked.cells.evaluate(checked.held(0).number, 10, text(20)[10:])
    assert checked.run(0, request(25)) == 10


OWN_CODE = ("llama/kv_cache.py", "llama/branches.py", "llama/cached_sequence.py", "llama/compaction.py")


def some_operations(checked: Checked) -> None:
    """Taking over, going back, garbage, trees, eviction and compaction."""
    checked.run(0, request(34, draft=text(3, 9)))
    checked.run(1, request(36))
    checked.run(0, request(35, draft=text(2, 8)))
    checked.run(2, request(9, 2))
    checked.cache.release(1)
    checked.run(0, request(36))
    checked.run(2, request(27, 2))
    assert checked.cache._n_compactions == 1


def test_an_interrupt_at_any_line_leaves_no_wrong_note() -> None:
    """As a signal handler raises it: before every line of the cache's own code, one after the other."""
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
        sys.settrace(called)
        try:
            some_operations(checked)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        checked.cache.release(1)
        for row, seed in ((0, 0), (2, 2)):
            checked.run(row, request(30, seed))
    assert n_lines > 300


def test_prefixes_that_nobody_uses_are_put_aside_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that attention goes over few cells; what rows need stays."""
    monkeypatch.setattr(clutter, "LOOK", 1)
    monkeypatch.setattr(clutter, "BLOCK", 1)
    checked = Checked(512, 8, price=1.0)
    for row in range(4):
        checked.run(row, request(40, row))
        assert checked.cache.n_used == 40
        checked.cache.release(row)
    checked.run(4, request(60, 4))
    assert checked.cache.n_used == 60
    checked.cache.release(4)
    assert [checked.run(6 + seed, request(40, seed)) for seed in range(4)] == [39] * 4
    checked.cache.forget()
    assert checked.run(20, request(40)) == 0


def test_a_parked_prefix_of_which_little_is_wanted_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token in common, as all texts have: reading it is faster than copying what comes with it."""
    monkeypatch.setattr(clutter, "LOOK", 1)
    monkeypatch.setattr(clutter, "BLOCK", 1)
    checked = Checked(512, 8, price=0.0)
    checked.run(0, request(200))
    checked.cache.release(0)
    other = request(40, 1)
    for n_alike, n_cached in ((6, 0), (7, 7)):
        checked.run(8, request(10, 8))  # the long one is put aside
        assert checked.cache.n_used == 10
        tokens = np.concatenate([request(n_alike).tokens, other.tokens])
        row = 10 + n_alike
        assert checked.run(row, ForwardRequest(TARGET, tokens)) == n_cached
        checked.cache.release(row)
        checked.cache.release(8)


def test_what_cannot_be_put_aside_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clutter, "LOOK", 1)
    monkeypatch.setattr(clutter, "BLOCK", 1)
    checked = Checked(512, 8, can_copy=False, price=0.0)
    checked.run(0, request(90))
    checked.cache.release(0)
    checked.run(1, request(5, 1))
    assert checked.run(2, request(90)) == 89


@pytest.mark.parametrize("price", [0.0, 1.0, math.inf])
@pytest.mark.parametrize("can_copy", [True, False])
@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("seed", range(3))
def test_random_operations(
    seed: int, trees: bool, can_copy: bool, price: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees have hardly more branches than one of them needs, so rows take them from each other."""
    monkeypatch.setattr(clutter, "LOOK", 1)
    monkeypatch.setattr(clutter, "BLOCK", 1)
    rng = np.random.default_rng(seed)
    checked = Checked(160, 8, 10 if trees else 0, can_copy=can_copy, price=price)
    rows, n_full = (RandomTrees if trees else RandomRows)(rng, longest=50, n_rows=5), 0
    n_trees = 0
    for _ in range(400):
        for row in rows.leaving():
            checked.cache.release(row)
            checked.check()
        n_padding = int(rng.choice([0, 0, 3]))
        prepared = [(row, wanted, n_padding) for row, wanted in rows.batch()]
        answers = checked.prepare(*prepared)
        fitting = [
            (row, wanted)
            for (row, wanted, _), n_cached in zip(prepared, answers, strict=True)
            if isinstance(n_cached, int) and n_cached < wanted.n_tokens
        ]
        n_full += sum(isinstance(answer, ContextFullError) for answer in answers)
        kind = rng.choice(["all", "some", "none", "interrupted"], p=[0.6, 0.2, 0.1, 0.1])
        if kind == "some":
            fitting = fitting[: int(rng.integers(0, len(fitting) + 1))]
        n_branches = np.cumsum(
            [0 if wanted.parents is None else n_leaves(wanted.parents) for _, wanted in fitting]
        )
        fitting = fitting[: int((n_branches <= 10).sum())]
        if kind == "interrupted" and fitting and fitting[0][1].is_tree:
            row, wanted = fitting[0]
            growth = checked.cache.grow(row, wanted, [row])
            if rng.random() < 0.7:
                checked.cache.begin()
                n_text = checked.held(row).n
                added = np.concatenate([wanted.tokens[n_text:], wanted.draft[growth.n_old :]])
                checked.cells.evaluate_tree(growth, len(wanted.tokens), added)
        elif kind == "interrupted" and fitting:
            row, wanted = fitting[0]
            checked.cache.begin()
            checked.cells.evaluate(
                checked.held(row).number, checked.held(row).n, wanted.tokens[checked.held(row).n :]
            )
        elif kind != "none" and fitting:
            checked.evaluate(*fitting, n_padding=n_padding)
            n_trees += sum(wanted.is_tree for _, wanted in fitting)
        if rng.random() < 0.02:
            checked.cache.forget()
            checked.check()
    assert checked.cache._n_compactions > 3
    assert n_full > 0
    assert (n_trees > 100) == trees
