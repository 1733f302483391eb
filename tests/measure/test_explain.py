"""What one completion gained from drafts, compared with values computed by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llamaspec.length.cost_curve import CostCurve
from llamaspec.measure.explain import Reasons, explain
from llamaspec.values import Draft, Evaluation, Round, Source
from rounds import a_text

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
