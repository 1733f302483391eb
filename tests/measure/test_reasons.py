"""Conclusions from costs, and the gain of a completion, compared with values computed by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llamaspec.length.cost_curve import CostCurve
from llamaspec.measure.verdict import (
    BestFixedLength,
    Reasons,
    best_length,
    break_even,
    explain,
    round_seconds,
    saturation_width,
    verdict,
)
from llamaspec.values import Draft, Evaluation, Round, Source
from rounds import a_text

DIP = CostCurve((1, 2, 3, 4), (1.0, 2.0, 3.0, 1.5), 0.1)  # width 4 is cheaper than 2 and 3


def test_rounds_interpolate() -> None:
    assert round_seconds(DIP) == pytest.approx([1.0, 2.1, 3.2, 1.8])
    assert round_seconds(CostCurve((1, 3), (1.0, 2.0), 0.0)) == pytest.approx([1.0, 1.5, 2.0])


def test_prompt_chunks_do_not_count_as_drafts() -> None:
    """With them, drafts seemed to win at an acceptance of 97 %; by the probe, they never did."""
    narrow = CostCurve((1, 16), (1.0, 16.0), 0.1)
    with_chunk = CostCurve((1, 16, 512), (1.0, 16.0, 20.0), 0.1)
    assert (
        verdict(with_chunk)
        == verdict(narrow)
        == "on this machine, drafting with this pair is slower at any acceptance, so plain decoding and "
        "copies are used"
    )
    assert "unknown" in verdict(CostCurve((1, 512), (1.0, 20.0), 0.1))


@pytest.mark.parametrize(
    ("curve", "acceptance", "n_guesses", "speed_up"),
    [
        (DIP, 0.8, 3, 2.952 / 1.8),  # two guesses: 2.44 / 3.2
        (DIP, 0.0, 0, 1.0),
        (CostCurve((1, 2), (1.0, 1.5), 0.1), 0.5, 0, 1.0),  # one guess: 1.5 / 1.6
        (CostCurve((1, 2), (1.0, 1.5), 0.1), 0.8, 1, 1.8 / 1.6),
        (CostCurve((1, 2, 3), (2.0, 2.0, 2.0), 1.0), 0.5, 0, 1.0),  # in a tie nothing is drafted
        (CostCurve((1, 2, 3), (1.0, 1.0, 1.0), 0.0), 1.0, 2, 3.0),
        (CostCurve((1,), (1.0,), 0.1), 0.9, 0, 1.0),  # nothing but width 1 was measured
    ],
)
def test_the_best_fixed_length(curve: CostCurve, acceptance: float, n_guesses: int, speed_up: float) -> None:
    best = best_length(round_seconds(curve), acceptance)
    assert best == BestFixedLength(n_guesses, pytest.approx(speed_up))  # type: ignore[arg-type]


def test_the_best_length_of_at_least_one() -> None:
    assert best_length([1.0, 2.0, 2.5], 0.5, least=1) == BestFixedLength(1, 0.75)


@pytest.mark.parametrize(
    ("curve", "acceptance"),
    [
        (CostCurve((1, 2), (1.0, 1.5), 0.1), 0.6),  # (1 + a) / 1.6 > 1
        (CostCurve((1, 2), (1.0, 2.0), 0.1), None),  # 2 tokens in 2.1
        (CostCurve((1, 2), (1.0, 1.2), 0.1), 0.3),  # (1 + a) / 1.3 > 1
        (CostCurve((1, 2, 3), (1.0, 2.5, 1.55), 0.1), 0.5),  # two guesses: 1 + a + a² = 1.75
        (CostCurve((1,), (1.0,), 0.0), None),
    ],
)
def test_break_even_acceptance(curve: CostCurve, acceptance: float | None) -> None:
    expected = None if acceptance is None else pytest.approx(acceptance, abs=1e-9)
    assert break_even(round_seconds(curve)) == expected


@pytest.mark.parametrize(
    ("seconds", "widest"),
    [
        ((1.0, 1.4, 2.2), 4),  # less than 1.5 and 2.5
        ((2.0, 2.1, 5.2), 2),
        ((2.0, 3.2, 3.4), 1),
    ],
)
def test_where_a_curve_saturates(seconds: tuple[float, ...], widest: int) -> None:
    assert saturation_width(CostCurve((1, 2, 4), seconds, 0.0)) == widest


# One completion

PLAIN = Round(Draft(), 0, 0, Evaluation(1), verify_seconds=0.020, overhead_seconds=0.001)
DRAFTED = Round(  # 2 of 3 draft tokens accepted: 3 tokens
    Draft(np.zeros(3, np.int32), (), (0.95, 0.8, 0.4)), 2, 0, Evaluation(4), n_draft_steps=3,
    draft_seconds=0.006, verify_seconds=0.029, overhead_seconds=0.003,
)  # fmt: skip
DROPPED = replace(PLAIN, n_draft_steps=2, draft_seconds=0.005, n_dropped=2)
CURVE = CostCurve((1, 4, 10), (0.020, 0.030, 0.090), 0.002)


def test_the_gain_is_that_of_the_statistics() -> None:
    """--explain had an estimate of its own. Here 3 tokens take 38 ms with a draft, and 63 ms without."""
    completion = a_text([PLAIN, PLAIN, *6 * [DRAFTED], DROPPED])
    why = explain(completion, CURVE)
    summary = completion.summary
    assert summary.speed_up == pytest.approx(21 * 0.021 / (2 * 0.021 + 6 * 0.038 + 0.026))
    assert why.gained_seconds == pytest.approx(19 * 0.021 - 6 * 0.038 - 0.026)
    assert why.accepted == {"from the draft model": (summary.n_accepted, summary.n_verified)}
    assert why.lengths == {0: 3, 3: 6}


def test_the_gain_is_unknown_if_no_plain_round_was_timed() -> None:
    why = explain(a_text(6 * [DRAFTED]), None)
    assert (why.gained_seconds, why.curve) == (None, None)


def judged(why: Reasons) -> list[tuple[int, int]]:
    return [(len(outcomes), sum(outcomes)) for outcomes in why.bins.values()]


def test_draft_tokens_count_up_to_the_first_rejected_one() -> None:
    """A bin includes its upper end; the tokens after a rejected one do not count."""
    draft = Draft(np.zeros(5, np.int32), (), (0.95, 0.9, 0.8, 0.3, 0.6))
    why = explain(a_text([Round(draft, 3, 0, Evaluation(6))]), None)
    assert judged(why) == [(0, 0), (1, 0), (0, 0), (0, 0), (2, 2), (1, 1)]
    assert explain(a_text([PLAIN]), None).accepted == {}
    assert [*why.bins] == [(0.0, 0.1), (0.1, 0.3), (0.3, 0.5), (0.5, 0.7), (0.7, 0.9), (0.9, 1.0)]


def test_draft_tokens_are_counted_by_their_origin() -> None:
    """Copies were left out: "observed acceptance: 0 %", though copied tokens were accepted."""
    rounds = [
        Round(Draft.certain([1] * n, source=source), k, 0, Evaluation(n + 1))
        for source, n, k in (
            (Source.NGRAM, 3, 1),
            (Source.NGRAM, 5, 2),
            (Source.PREDICTION, 9, 9),
            (Source.GRAMMAR, 7, 7),
            (Source.MODEL, 2, 1),
        )
    ]
    why = explain(a_text(rounds), None)
    assert why.accepted == {
        "copied from earlier text": (1 + 2, 3 + 5),
        "copied from the prediction": (9, 9),
        "forced by the grammar": (7, 7),
        "from the draft model": (1, 2),
    }
    assert sum(len(outcomes) for outcomes in why.bins.values()) == 2, "copies have no confidence of a model"
    assert why.lengths == dict.fromkeys((2, 3, 5, 7, 9), 1)
