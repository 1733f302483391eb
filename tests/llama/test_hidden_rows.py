"""Hidden rows of the end of a sequence, against a dictionary of all rows."""

from __future__ import annotations

import numpy as np

from llamaspec.llama.cached_sequence import CachedSequence
from llamaspec.llama.hidden_rows import MOST, TAIL, HiddenRows

WIDTH = 3


def some_rows(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.standard_normal((n, WIDTH)).astype(np.float32)


def test_what_is_kept_is_right_and_reaches_far_enough_back() -> None:
    rng = np.random.default_rng(0)
    kept, right, n = HiddenRows(), dict[int, np.ndarray](), 0
    for _ in range(400):
        n = max(0, n - int(rng.choice([0, 0, 1, 5])))  # rejected
        kept.cut(n)
        start = n + int(rng.random() < 0.02) * 7  # tokens that were taken over from another sequence
        rows = some_rows(rng, int(rng.choice([1, 4, 17, 512])))
        kept.add(start, rows)
        if start > n:
            right.clear()
        right = {p: row for p, row in right.items() if p < start} | dict(enumerate(rows, start))
        n = start + len(rows)
        assert kept.end == n
        assert kept.first >= min(right)
        assert kept.end - kept.first >= min(MOST, len(right))
        for p in (kept.first, (kept.first + n) // 2, n - 1):
            assert (kept.rows(p, p + 1)[0] == right[p]).all()


def test_the_tail_is_a_copy_of_the_last_rows_before_a_position() -> None:
    rows = some_rows(np.random.default_rng(1), 100)
    kept = HiddenRows()
    kept.add(10, rows)
    tail = kept.tail(90)
    kept.add(80, np.zeros((5, WIDTH), dtype=np.float32))
    assert (tail.first, tail.end) == (90 - TAIL, 90)
    assert (tail.rows(tail.first, 90) == rows[80 - TAIL : 80]).all()


def test_the_tail_before_what_is_known_is_empty() -> None:
    kept = HiddenRows()
    kept.add(10, np.zeros((5, WIDTH), dtype=np.float32))
    tail = kept.tail(7)
    tail.add(7, np.ones((2, WIDTH), dtype=np.float32))
    assert (tail.first, tail.end) == (7, 9)


def test_tokens_without_rows_leave_no_wrong_ones() -> None:
    """A sequence that is cut, and goes on before its rows are noted: Ctrl-C may come in between."""
    sequence = CachedSequence(0)
    sequence.append(np.arange(10, dtype=np.int32), np.arange(10, dtype=np.int32))
    sequence.hidden.add(0, np.zeros((10, WIDTH), dtype=np.float32))
    sequence.n = 4
    sequence.append(np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32))
    assert sequence.hidden.end == 4
