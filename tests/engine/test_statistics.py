"""Sums and rates of a text, against rounds made by hand."""

from __future__ import annotations

import pytest

from llamaspec.engine.statistics import Summary, summarize
from rounds import a_round

ROUNDS = [
    a_round((1, 2, 3), accepted=3, seconds=(1.0, 2.0, 4.0)),
    a_round((1, 2), accepted=0, seconds=(0.5, 0.25, 0.125)),
    a_round((), seconds=(0.0, 1.0, 0.0)),
    a_round((4, 5), accepted=1, seconds=(0.0, 0.0, 0.125)),
]


def test_what_rounds_add_up_to() -> None:
    assert summarize(ROUNDS, 8) == Summary(
        n_tokens=8,
        n_rounds=4,
        n_rounds_without_draft=1,
        n_rounds_cut=0,
        n_drafted=7,
        n_verified=7,
        n_accepted=4,
        accepted_histogram=(2, 1, 0, 1),
        draft_seconds=1.5,
        verify_seconds=3.25,
        overhead_seconds=4.25,
        plain_seconds=1.0,
    )
    assert summarize(ROUNDS, 7).n_rounds_cut == 1


def test_speed_is_compared_with_plain_rounds_of_the_same_text() -> None:
    """8 tokens in 13 seconds: 4, and three times the median of 1, 3 and 8 seconds without a draft."""
    plain = [a_round((), seconds=(0.0, seconds, 0.0)) for seconds in (1.0, 8.0, 3.0)]
    drafted = a_round((1, 2, 3, 4), accepted=4, seconds=(1.0, 2.0, 1.0))
    found = summarize([*plain, drafted], 8)
    assert found.plain_seconds == 3.0
    assert (found.decode_seconds, found.plain_excess) == (16.0, 3.0)
    assert found.speed_up == 8 * 3.0 / 13.0
    assert summarize(plain, 3).speed_up is None  # nothing was drafted
    assert summarize([drafted], 5).speed_up is None  # nothing to compare with


def test_rates_are_what_their_definitions_say() -> None:
    """Draft tokens that nobody verified say nothing of acceptance."""
    summary = Summary(6, 4, 1, 0, 10, 8, 2, (2, 1), 1.0, 2.0, 5.0)
    assert summary.acceptance_rate == 2 / 8
    assert summary.mean_tokens_per_round == (2 + 4) / 4
    assert summary.decode_seconds == 8.0
    assert summary.tokens_per_second == 6 / 8


def test_nothing_has_no_rates() -> None:
    summary = summarize([], 0)
    assert summary.accepted_histogram == ()
    assert summary.acceptance_rate is None
    assert summary.mean_tokens_per_round is None
    assert summary.tokens_per_second is None


@pytest.mark.parametrize("n", [0, 1, 2])
def test_the_path_is_what_was_accepted(n: int) -> None:
    summary = summarize([a_round((1, 2), accepted=n)], n + 1)
    assert (summary.n_accepted, summary.n_tokens, len(summary.accepted_histogram)) == (n, n + 1, n + 1)
