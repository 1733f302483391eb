"""Guesses that cost nothing: how many are judged, by hand and on simulated machines and texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp, log

import numpy as np
import pytest

from llamaspec.rules.auto_length import AutoLength
from llamaspec.rules.copies import PATIENCE, Copies
from llamaspec.rules.planning import Prices
from llamaspec.values import Draft, Round
from simulator import Machine, Passage, passage, play, table

FLAT = Prices([1.0, 1.1, 1.2, 1.3, 1.4], 0.1)
STEEP = Prices([1.0, 2.0, 3.0, 4.0, 5.0], 0.1)
N = 512


def copies_of(*lengths: int) -> Draft:
    """Guesses that continue matches of these lengths."""
    confidences = tuple(length / (length + 1) for length in lengths)
    return Draft(np.zeros(len(lengths), dtype=np.int32), (), confidences, is_copy=True)


def judged(draft: Draft, n_accepted: int) -> Round:
    return Round(draft.tokens, draft.confidences, len(draft), n_accepted, 0, 0.0, 1.0, 0.0, is_copy=True)


PLAIN_ROUND = Round(np.empty(0, dtype=np.int32), (), 0, 0, 0, 0.0, 1.0, 0.0)


def worth(copies: Copies, draft: Draft, prices: Prices, rate: float = 1.0, room: float = 9.0) -> int:
    return copies.n_worth(draft, prices, prices.batch_seconds, rate, room)


@pytest.mark.parametrize(
    ("lengths", "prices", "rate", "room", "n"),
    [
        ((30, 31, 32, 33), FLAT, 1.0, 9.0, 4),
        ((30, 31, 32, 33, 34, 35), FLAT, 1.0, 9.0, 4),  # no more than have a price
        ((30, 31), STEEP, 1.0, 9.0, 0),  # a position more costs as much as a token
        ((30, 31, 32, 33), FLAT, 1.0, 0.25, 2),  # no more may be lost
        ((30, 31, 32, 33), FLAT, 1.0, 0.05, 0),
        ((2,), FLAT, 1.0, 9.0, 1),
        ((2,), FLAT, 3.0, 9.0, 0),  # another round brings three tokens a second
        ((30, 31, 32, 33), FLAT, 2.5, 9.0, 4),  # this one brings more
    ],
)
def test_how_many_are_worth_it(
    lengths: tuple[int, ...], prices: Prices, rate: float, room: float, n: int
) -> None:
    assert worth(Copies(), copies_of(*lengths), prices, rate, room) == n


def test_chances_are_learnt_by_the_length_of_the_match() -> None:
    copies, short, long = Copies(), copies_of(2), copies_of(40)
    dear = replace(FLAT, batch_seconds=[1.0, 1.6])
    assert worth(copies, short, dear) == worth(copies, long, dear) == 1
    for _ in range(20):
        copies.observe(judged(short, 0))
        copies.observe(judged(long, 1))
    assert (worth(copies, short, dear), worth(copies, long, dear)) == (0, 1)
    assert (copies.n_judged, copies.n_accepted) == (40, 20)


def test_what_is_refused_is_tried_again_less_and_less_often() -> None:
    copies, draft, tries = Copies(), copies_of(2), list[int]()
    for i in range(400):
        tried = worth(copies, draft, STEEP)
        assert worth(copies, draft.first(tried), STEEP) == tried  # the loop asks once more
        copies.observe(judged(draft, 0) if tried else PLAIN_ROUND)
        if tried:
            tries.append(i)
    waits = np.diff(tries).tolist()
    assert tries[0] == PATIENCE
    assert waits == [2 * PATIENCE + 1, 4 * PATIENCE + 1, 8 * PATIENCE + 1, 16 * PATIENCE + 1]


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
    """Guesses of a draft model, right three times of four."""
    rng = np.random.default_rng(seed)
    return passage(np.full(N, 0.75), rng.uniform(0.5, 0.95, N), seed)


SEEDS = range(3)


def mean(ratios: Sequence[float]) -> float:
    return exp(sum(map(log, ratios)) / len(ratios))


@pytest.mark.parametrize("curve", list(CURVES))
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_copies_never_make_a_text_slower(curve: str, share: float) -> None:
    for seed in SEEDS:
        text = copied(share, seed)
        ran = play(AutoLength(), machine(curve), text, seed, text)
        assert ran.worst_to_plain(64) <= 1 / 0.97


@pytest.mark.parametrize(("curve", "speed_up"), [("f16", 2.2), ("q4_0", 1.6), ("flat", 3.2)])
def test_a_text_that_copies_gets_faster(curve: str, speed_up: float) -> None:
    text = copied(0.9, 1)
    ran = [play(AutoLength(), machine(curve), text, seed, text) for seed in SEEDS]
    assert 1 / mean([r.to_plain for r in ran]) >= speed_up


@pytest.mark.parametrize("curve", ["f16", "q4_0", "flat"])
@pytest.mark.parametrize(("share", "least"), [(0.0, 0.95), (0.5, 1.02), (0.9, 1.3)])
def test_copies_before_a_draft(curve: str, share: float, least: float) -> None:
    """Faster than the draft alone where text is copied, and hardly slower where nothing is."""
    ratios = []
    for seed in SEEDS:
        alone = play(AutoLength(), machine(curve), drawn(seed), seed)
        both = play(AutoLength(), machine(curve), drawn(seed), seed, copied(share, seed))
        ratios.append(alone.seconds[-1] / both.seconds[-1])
    assert mean(ratios) >= least
