"""The bound that bench.py prints, against trying all ways to cut a text into rounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foresight import RARE, costs, shortest, standing
from llamaspec.values import Draft, Round


def brute_force(stands: list[bool], seconds: list[float]) -> float:
    if not stands:
        return 0.0
    ways = []
    for n, cost in enumerate(seconds):
        if all(stands[:n]):
            ways.append(cost + brute_force(stands[n + 1 :], seconds))
    return min(ways)


@given(
    stands=st.lists(st.booleans(), max_size=9),
    seconds=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=5),
)
def test_no_way_is_shorter(stands: list[bool], seconds: list[float]) -> None:
    assert shortest(stands, seconds) == pytest.approx(brute_force(stands, seconds))


def made(n_verified: int, n_accepted: int, verify: float) -> Round:
    return Round(
        draft=Draft.certain([0] * n_verified),
        path=tuple(range(n_accepted)),
        next_token=1,
        width=n_verified + 1,
        n_draft_steps=n_verified,
        draft_seconds=0.1 * n_verified,
        verify_seconds=verify,
        overhead_seconds=0.01,
    )


def test_what_stands_is_read_off_a_run() -> None:
    rounds = [made(3, 2, 1.0), made(3, 0, 1.0), made(3, 3, 1.0), made(0, 0, 1.0)]
    assert standing(rounds) == [True, True, False, False, True, True, True, True, True]


def test_costs_are_medians_and_the_cheaper_wider_batch() -> None:
    plain = [made(0, 0, 1.0), made(0, 0, 1.2), made(0, 0, 9.0)]
    wide = [made(1, 1, 2.0), made(3, 0, 1.5)] * RARE
    assert costs([plain, [*wide, made(5, 5, 0.1)]]) == pytest.approx([1.21, 1.61, 1.71, 1.81])
