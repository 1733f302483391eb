"""Drafts that cost nothing: how many are wanted, by hand and on simulated machines and texts."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from math import exp, log

import numpy as np
import pytest

from llamaspec.length.auto_length import AutoLength
from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.row_length import COPY_WAIT, AutoRow
from llamaspec.values import NO_DRAFT, NO_NGRAM_DRAFT, Draft, Round, Source
from simulator import Machine, Passage, passage, play, table

FLAT = CostCurve((1, 5, 17), (0.010, 0.011, 0.014), 0.001)
STEEP = CostCurve((1, 2, 17), (0.010, 0.0202, 0.172), 0.001)
N = 512


def ngram_draft(n: int, match: int = 2, source: Source = Source.NGRAM) -> Draft:
    """Tokens that continue a match of this length, and could go on."""
    confidences = tuple((match + i) / (match + i + 1) for i in range(64))
    return Draft(np.zeros(n, dtype=np.int32), (), confidences[:n], source, ahead=confidences[n:])


def round_of(draft: Draft, n_accepted: int, curve: CostCurve) -> Round:
    width = len(draft) + 1
    seconds = float(np.interp(width, curve.widths, curve.verify_seconds))
    return Round(draft, tuple(range(n_accepted)), 0, width, verify_seconds=seconds)


def started(curve: CostCurve, *sources: Source) -> AutoRow:
    """A row of a machine whose plain decoding is well known."""
    row = AutoLength(curve, sources=sources).start_row()
    for _ in range(10):
        row.observe(round_of(NO_DRAFT, 0, curve))
    return row


def n_wanted(row: AutoRow, match: int) -> int:
    """In the coming round, which stays open."""
    row, n = deepcopy(row), 0
    while row.wants_more(ngram_draft(n, match)):
        n += 1
    return n


def test_nothing_is_copied_before_plain_decoding_is_timed() -> None:
    assert not AutoLength(FLAT, sources={Source.NGRAM}).start_row().wants_more(ngram_draft(0))


def test_copies_of_earlier_texts_have_an_acceptance_of_their_own() -> None:
    row = started(FLAT, Source.NGRAM, Source.STORE)
    for _ in range(20):
        row.observe(round_of(ngram_draft(2), 0, FLAT))
        row.observe(round_of(ngram_draft(2, source=Source.STORE), 2, FLAT))
    row.observe(round_of(NO_DRAFT, 0, FLAT))
    assert row.wants_more(ngram_draft(0, source=Source.STORE))
    assert row._shared.calibrations[Source.STORE].probability(0.7) > 0.7
    assert row._shared.calibrations[Source.NGRAM].probability(0.7) < 0.3


def test_a_long_match_goes_on_and_a_short_one_stops() -> None:
    curve = CostCurve((1, 2, 17), (0.010, 0.0102, 0.080), 0.001)  # width 2 is free, then 4.7 ms for each
    row = started(curve, Source.NGRAM)
    for match, n_accepted in ((2, 1), (40, 2)) * 20:
        draft = ngram_draft(2, match)
        row.observe(round_of(draft, n_accepted, curve))
    row.observe(round_of(NO_DRAFT, 0, curve))
    assert n_wanted(row, 2) < n_wanted(row, 40)


def test_copying_is_refused_where_the_model_is_worth_more() -> None:
    """Copies are right once in two rounds; the model makes three tokens in the time of one."""
    alone, both = started(FLAT, Source.NGRAM), started(FLAT, Source.NGRAM, Source.MODEL)
    for row in (alone, both):
        for i in range(20):
            row.observe(round_of(ngram_draft(1), i % 2, FLAT))
            tokens = Draft(np.zeros(6, dtype=np.int32), (), (0.95,) * 6)
            if row is both:
                row.observe(replace(round_of(tokens, 6, FLAT), n_draft_steps=6, draft_seconds=0.0006))
    assert alone.wants_more(ngram_draft(0))
    assert not both.wants_more(ngram_draft(0))
    assert both.wants_more(NO_DRAFT)


def test_nothing_is_copied_before_the_model_was_asked() -> None:
    """Copies that cost next to nothing once kept a model silent that would have been right."""
    row = AutoLength(sources={Source.NGRAM, Source.MODEL}).start_row()
    row.observe(round_of(NO_DRAFT, 0, FLAT))
    assert not row.wants_more(ngram_draft(0))
    assert row.wants_more(NO_DRAFT)
    row.observe(replace(round_of(Draft.certain([1]), 1, FLAT), n_draft_steps=1, draft_seconds=0.0001))
    assert row.wants_more(ngram_draft(0, match=40))


def test_a_long_match_is_copied_and_a_short_one_left_to_the_model() -> None:
    """Each in its place: the copies that are worth more than the model's four tokens in the time of one."""
    row = started(FLAT, Source.NGRAM, Source.MODEL)
    for match, n_accepted in ((2, 0), (40, 8)) * 12:
        row.observe(round_of(ngram_draft(8, match), n_accepted, FLAT))
        made = Draft(np.zeros(6, dtype=np.int32), (), (0.8,) * 6)
        row.observe(replace(round_of(made, 4, FLAT), n_draft_steps=6, draft_seconds=0.006))
    for is_known in (True, True, False):
        if not is_known:  # nobody knows what the model is worth: that comes first
            row = started(CostCurve(FLAT.widths, FLAT.verify_seconds, 0.0), Source.NGRAM, Source.MODEL)
        assert n_wanted(row, 2) == 0
        assert (n_wanted(row, 40) >= 8) == is_known
        assert row.wants_more(NO_DRAFT) or is_known


def test_copies_that_cannot_win_are_only_shadows() -> None:
    """A position more costs as much as a token. Where nobody else drafts, looking at one costs nothing."""
    row = started(STEEP, Source.NGRAM)
    for i in range(200):
        assert row.wants_more(ngram_draft(0))
        assert not row.wants_more(ngram_draft(1))
        assert row.n_verified(ngram_draft(1)) == 0
        shadow = (ngram_draft(1).confidences[0], float(i % 3 > 0))
        row.observe(replace(round_of(NO_DRAFT, 0, STEEP), draft=NO_NGRAM_DRAFT, shadow=shadow))
    assert row._shared.budget.gain == pytest.approx(0.0)
    assert 0.5 < row._shared.calibrations[Source.NGRAM].probability(shadow[0]) < 0.8
    assert row._shared.calibrations[Source.STORE].probability(shadow[0]) < 0.5


def test_copies_are_tried_now_and_then_where_the_model_seems_to_be_worth_more() -> None:
    """They were refused for a hundred tokens; with luck they would be worth more than the model's draft."""
    row, verified = started(FLAT, Source.NGRAM, Source.MODEL), list[int]()
    for i in range(120):
        n = n_wanted(row, 9)
        if n:
            verified.append(i)
            row.observe(round_of(ngram_draft(n, 9), 0, FLAT))
        else:
            made = Draft(np.zeros(3, dtype=np.int32), (), (0.6,) * 3)
            row.observe(replace(round_of(made, 1, FLAT), n_draft_steps=3, draft_seconds=0.003))
    assert 2 <= len(verified) <= 20
    assert np.diff(verified[-4:]).min() >= COPY_WAIT / 2


# -- on simulated machines ----------------------------------------------------------------------------------

CURVES = {
    "f16": {1: 42.5, 2: 58.0, 3: 62.5, 4: 69.2, 5: 75.5, 6: 78.0, 8: 94.3, 12: 117.0, 16: 137.0},
    "q4_0": {1: 16.4, 2: 26.4, 3: 36.5, 4: 29.2, 5: 42.3, 6: 52.5, 8: 54.0, 12: 79.0, 16: 89.0},
    "flat": {1: 10.0, 2: 10.3, 4: 10.7, 8: 12.0, 12: 13.5, 16: 15.0},
    "m4": {1: 20.0, 2: 36.0, 4: 77.0, 8: 149.0, 16: 290.0},  # guessing does not pay
}


def machine(curve: str) -> Machine:
    seconds = {width: ms / 1000 for width, ms in CURVES[curve].items()}
    return Machine(table(seconds), 0.0006, jitter=0.07, spikes=0.01)


def copied(share: float, seed: int) -> Passage:
    """Stretches of 32 tokens, a share of which stood before; elsewhere matches are short and mean nothing."""
    rng = np.random.default_rng(seed)
    stood = np.repeat(rng.random(N // 32) < share, 32)
    into = np.arange(N) % 32
    length = np.where(stood, 2 + into, rng.integers(2, 4, N))
    return passage(np.where(stood, 0.97, 0.05), length / (length + 1.0), seed)


def drawn(seed: int) -> Passage:
    """Tokens of a draft model, right three times of four."""
    rng = np.random.default_rng(100 + seed)  # not that of the passage: what stands must not depend on it
    return passage(np.full(N, 0.75), rng.uniform(0.5, 0.95, N), seed)


SEEDS = range(3)


def mean(ratios: Sequence[float]) -> float:
    return exp(sum(map(log, ratios)) / len(ratios))


@pytest.mark.parametrize("curve", list(CURVES))
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_copies_never_make_a_text_slower(curve: str, share: float) -> None:
    ran: list[float] = []
    for seed in range(6):
        text = copied(share, seed)
        played = play(AutoLength(sources={Source.NGRAM}), machine(curve), text, seed, text)
        ran.append(played.worst_to_plain(96))
    assert mean(ran) <= 1 / 0.97
    assert max(ran) <= 1 / 0.94


@pytest.mark.parametrize(("curve", "speed_up"), [("f16", 2.2), ("q4_0", 1.5), ("flat", 3.2)])
def test_a_text_that_copies_gets_faster(curve: str, speed_up: float) -> None:
    text = copied(0.9, 1)
    ran = [play(AutoLength(sources={Source.NGRAM}), machine(curve), text, seed, text) for seed in SEEDS]
    assert 1 / mean([r.to_plain for r in ran]) >= speed_up


@pytest.mark.parametrize("curve", ["f16", "q4_0", "flat"])
@pytest.mark.parametrize(("share", "least"), [(0.0, 0.93), (0.5, 0.94), (0.9, 1.25)])
def test_copies_before_a_draft(curve: str, share: float, least: float) -> None:
    """Faster than the draft alone where text is copied, and hardly slower where nothing is."""
    ratios = []
    for seed in range(6):
        alone = play(AutoLength(), machine(curve), drawn(seed), seed)
        both = play(AutoLength(sources=set(Source)), machine(curve), drawn(seed), seed, copied(share, seed))
        ratios.append(alone.seconds[-1] / both.seconds[-1])
    assert mean(ratios) >= least
