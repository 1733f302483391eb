"""Cells that nobody needs are moved out of the way once they have cost as much as that."""

from __future__ import annotations

import numpy as np
import pytest

from forward_requests import request, text
from llamaspec.llama import clutter
from llamaspec.llama.cells import LARGE, Scratch
from llamaspec.llama.kv_cache import KVCache
from model_store import OpenModel
from simulated_cells import Checked


@pytest.fixture(autouse=True)
def _every_cell_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clutter, "LOOK", 1)
    monkeypatch.setattr(clutter, "BLOCK", 1)


@pytest.mark.parametrize(("price", "n_steps"), [(1.0, 5), (2.0, 9), (4.0, 18), (64.0, 300)])
def test_garbage_is_moved_out_once_it_has_cost_as_much(price: float, n_steps: int) -> None:
    """40 cells of garbage, and 180 + n that are needed: after n steps when 40 n exceeds price * (180 + n)."""
    checked = Checked(1024, price=price)
    checked.run(0, request(80, draft=text(40, 9)))
    checked.run(1, request(100, 1))
    checked.run(0, request(81))  # all draft tokens were rejected
    n = 0
    while checked.cache.n_used > 81 + 100 + n and n < 300:
        n += 1
        checked.run(1, request(100 + n, 1))
    assert n == pytest.approx(n_steps, abs=1)


def test_a_prefix_that_nobody_uses_is_moved_once_it_has_cost_as_much() -> None:
    """It is only copied out, so it is half as dear as what is copied back."""
    checked = Checked(1024, price=4.0)
    checked.run(0, request(60))
    checked.run(1, request(100, 1))
    checked.cache.release(1)
    n = 0
    while checked.cache.n_used > 60 + n:
        n += 1
        checked.run(0, request(60 + n))
    assert n == 5  # 100 n >= 4 * (60 + n + 100 / 2)


def test_wide_evaluations_lose_more() -> None:
    """9 positions three times as much as one, 16 or a prompt of 40 no more than 4.75 times."""
    for n_new, expected in ((1, 6), (9, 2), (16, 2), (40, 2)):
        checked = Checked(1024, price=5.0)
        checked.run(0, request(60))
        checked.run(1, request(100, 1))
        checked.cache.release(1)
        n = 0
        while checked.cache.n_used > 60 + n_new * n:
            n += 1
            checked.run(0, request(60 + n_new * n))
        assert n == expected  # 100 n weight >= 5 * (60 + n_new (n - 1) + 100 / 2)


def test_memory_of_copies_is_used_again() -> None:
    scratch = Scratch()
    for _ in range(2):
        scratch.reset()
        first, second = scratch.take(100), scratch.take(50)
        first[:], second[:] = 1, 2
        assert (first == 1).all()
        assert (len(first), len(second)) == (100, 50)
    kept = first
    scratch.reset()
    assert np.shares_memory(scratch.take(150), kept)
    assert scratch.take(LARGE + 1).nbytes == LARGE + 1
    scratch.reset()  # so much is not kept
    assert np.shares_memory(scratch.take(150), kept)


def test_cells_that_are_needed_are_not_moved() -> None:
    """Nor a prefix that a row has taken over."""
    checked = Checked(1024, price=0.0)
    checked.run(0, request(100))
    checked.cache.release(0)
    checked.run(1, request(101))
    checked.run(2, request(50, 2))
    cells = checked.held(1).cells[:101].tolist()
    for n in range(1, 20):
        checked.run(1, request(101 + n))
    assert checked.held(1).cells[:101].tolist() == cells
    assert checked.cache._n_compactions == 0


def test_less_than_a_block_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clutter, "BLOCK", 256)
    checked = Checked(1024, price=0.0)
    checked.run(0, request(60))
    checked.cache.release(0)
    for n in range(195):
        checked.run(1, request(1 + n, 1))
    assert checked.cache.n_used == 255
    for n in range(195, 198):
        checked.run(1, request(1 + n, 1))
    assert checked.cache.n_used == 198


def test_looks_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look counts all cells; what lay between two of them is counted with it."""
    monkeypatch.setattr(clutter, "LOOK", 8)
    checked = Checked(1024, price=4.0)
    checked.run(0, request(60))
    checked.run(1, request(100, 1))
    checked.cache.release(1)
    used = []
    for n in range(1, 7):
        checked.run(0, request(60 + n))
        used.append(checked.cache.n_used - n)
    assert used == [160, 160, 160, 160, 160, 60]


@pytest.mark.parametrize(("attention", "price"), [("on", 16.0), ("auto", 16.0), ("off", 8.0)])
def test_cells_are_moved_sooner_without_flash_attention(
    opened: OpenModel, attention: str, price: float
) -> None:
    cache = opened(flash_attention=attention)._contexts[0].cache
    assert isinstance(cache, KVCache)
    assert cache._clutter._price == price
