"""Sums and rates of a completion, with rounds made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from llamaspec.engine.completion import MIN_PLAIN_SECONDS, MIN_TIMED_TOKENS, Summary, summarize
from llamaspec.values import Evaluation, Round
from rounds import a_round

ROUNDS = [
    a_round((1, 2, 3), accepted=3, seconds=(1.0, 2.0, 4.0)),
    a_round((1, 2), accepted=0, seconds=(0.5, 0.25, 0.125)),
    a_round((), seconds=(0.0, 1.0, 0.0)),
    a_round((4, 5), accepted=1, seconds=(0.0, 0.0, 0.125)),
]


def test_sums_over_rounds() -> None:
    assert summarize(ROUNDS, 8) == Summary(
        n_tokens=8,
        n_rounds=4,
        n_rounds_without_draft=1,
        n_drafted=7,
        n_verified=7,
        n_accepted=4,
        accepted_histogram=(2, 1, 0, 1),
        draft_seconds=1.5,
        verify_seconds=3.25,
        overhead_seconds=4.25,
        plain_seconds=None,  # a single plain round may have been delayed
        speed_up=None,
    )
    assert summarize(3 * [*ROUNDS], 24).speed_up == 8 / 9
    assert summarize(2 * [*ROUNDS], 16).speed_up is None


ALONE = a_round((1, 2, 3), accepted=2, seconds=(0.5, 2.0, 0.5))
SHARED = replace(a_round((4, 5), accepted=1, seconds=(0.25, 2.0, 0.25)), verified_in=Evaluation(3, 4))
PLAIN = a_round(seconds=(0.0, 0.5, 0.125))


def believing(seconds: dict[int, float], rounds: Sequence[Round]) -> list[Round]:
    """Return rounds with a policy's estimates of plain rounds, by the number of sequences."""
    return [replace(round_, plain_seconds=seconds.get(round_.n_sequences)) for round_ in rounds]


def gain(rounds: Sequence[Round]) -> float | None:
    rounds = [*rounds] * MIN_TIMED_TOKENS
    return summarize(rounds, sum(len(round_.tokens) for round_ in rounds)).speed_up


def test_the_speed_up_over_plain_decoding() -> None:
    """3 tokens alone, 2 beside three other sequences, and 1 alone: in 6.125 s. Overhead counts."""
    made, seconds = [ALONE, SHARED, PLAIN], {1: 1.0, 4: 2.5}
    told = gain(believing(seconds, made))
    assert told == pytest.approx((3 * 1.125 + 2 * 2.625 + 1.125) / 6.125)
    assert gain(believing({1: 2.0, 4: 3.5}, made)) == 2.0, "no more than the tokens of a round"
    for first in ({}, {1: 7.0}):  # before a plain round was timed, or with another estimate
        assert gain([*believing(first, [ALONE]), *believing(seconds, [SHARED, PLAIN])]) == told
    beside = replace(
        SHARED, verified_in=Evaluation(33, 4, 0, 30), verify_seconds=0.01
    )  # beside a prompt: does not count
    assert gain(believing(seconds, [*made, beside])) == told
    assert gain(believing(seconds, [beside])) is None
    paused = replace(ALONE, verify_seconds=ALONE.verify_seconds + 3_600, stalled_seconds=3_600)
    assert gain(believing(seconds, [paused, SHARED, PLAIN])) == pytest.approx(told)
    assert gain(believing({1: 1.0}, made)) is None  # four sequences were never timed without drafts
    assert gain(believing(seconds, [a_round((1,), seconds=(0.0, 0.0, 0.0))])) is None
    assert gain([]) is None
    assert gain(made) is None


def test_plain_rounds_count_without_an_estimate_of_the_policy() -> None:
    """8 tokens in 16 seconds, and the median of 1, 3 and 8 seconds without a draft."""
    plain = [a_round((), seconds=(0.0, seconds, 0.0)) for seconds in (1.0, 8.0, 3.0)]
    drafted = a_round((1, 2, 3, 4), accepted=4, seconds=(1.0, 2.0, 1.0))
    assert summarize([*plain, drafted], 8).plain_seconds == 3.0
    assert gain([*plain, drafted]) == 8 * 3.0 / 16.0
    assert gain(plain) is None  # nothing was drafted
    assert gain([drafted]) is None  # no plain round


def test_rates_follow_their_definitions() -> None:
    """Unverified draft tokens do not count for acceptance."""
    summary = Summary(6, 4, 1, 10, 8, 2, (2, 1), 1.0, 2.0, 5.0)
    assert summary.acceptance_rate == 2 / 8
    assert summary.mean_tokens_per_round == (2 + 4) / 4
    assert summary.decode_seconds == 8.0
    assert summary.tokens_per_second == 6 / 8


def test_no_rates_without_rounds() -> None:
    summary = summarize([], 0)
    assert summary.accepted_histogram == ()
    assert summary.acceptance_rate is None
    assert summary.mean_tokens_per_round is None
    assert summary.tokens_per_second is None


def test_an_estimate_that_tells_nothing_is_not_made() -> None:
    """Because a round is too short, or because the estimate is wrong for the plain rounds that were made."""

    def quicker(rounds: Sequence[Round], factor: float) -> list[Round]:
        return [
            replace(
                each,
                draft_seconds=factor * each.draft_seconds,
                verify_seconds=factor * each.verify_seconds,
                overhead_seconds=factor * each.overhead_seconds,
                plain_seconds=None if each.plain_seconds is None else factor * each.plain_seconds,
            )
            for each in rounds
        ]

    alone = believing({1: 0.5}, [ALONE, PLAIN])
    told = gain(alone)
    assert told is not None
    shortest = MIN_PLAIN_SECONDS / (0.5 + 0.125)
    assert gain(quicker(alone, 1.01 * shortest)) == pytest.approx(told)
    assert gain(quicker(alone, 0.99 * shortest)) is None
    assert gain(believing({1: 2.2}, [ALONE, PLAIN])) is not None
    drafted = a_round((1, 2, 3), accepted=0, seconds=(0.0, 0.6, 0.125))
    assert gain(believing({1: 0.5}, [drafted, PLAIN])) == pytest.approx(1.25 / 1.35)
    assert gain(believing({1: 0.3}, [drafted, PLAIN])) is None, "37% slower, but its plain rounds were, too"
