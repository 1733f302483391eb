"""A limit on a length policy: it decides below the limit, and is asked and told everything else."""

from __future__ import annotations

import pytest

from fakes import Length
from llamaspec.length.at_most import AtMost
from llamaspec.values import Draft
from rounds import a_round


class Halving(Length):
    """Lets half of a draft be verified, where that may be."""

    drops = False

    def start_row(self, *, drops: bool = False) -> Halving:
        self.drops = drops
        return self

    def n_verified(self, draft: Draft) -> int:
        return len(draft) // 2 if self.drops else len(draft)


@pytest.mark.parametrize(("limit", "n_wanted", "longest"), [(3, 5, 3), (5, 3, 3), (0, 2, 0)])
def test_the_policy_decides_below_the_limit(limit: int, n_wanted: int, longest: int) -> None:
    row = AtMost(limit, Length(n_wanted)).start_row()
    assert [row.wants_more(Draft.certain([1] * n)) for n in range(7)] == [n < longest for n in range(7)]


@pytest.mark.parametrize(("drops", "n_verified"), [(True, [0, 1, 3]), (False, [1, 3, 6])])
def test_the_policy_decides_what_is_verified(drops: bool, n_verified: list[int]) -> None:
    """Also of a draft that is longer than the limit: whoever made it did not ask."""
    row = AtMost(4, Halving(5)).start_row(drops=drops)
    assert [row.n_verified(Draft.certain([1] * n)) for n in (1, 3, 6)] == n_verified


def test_unless_told_nothing_may_be_dropped() -> None:
    policy = Halving(5)
    policy.drops = True
    AtMost(4, policy).start_row()
    assert not policy.drops


def test_the_policy_learns_and_ends() -> None:
    policy = Length(5, widths=lambda n: 2 * n + 1 if n < 4 else None)
    row, one = AtMost(2, policy).start_row(), a_round((1, 2), 1)
    assert [row.width(n) for n in (1, 3, 4)] == [3, 7, None]
    row.observe(one)
    assert policy.rounds == [one]
    assert policy.n_closed == 0
    row.close()
    assert policy.n_closed == 1
