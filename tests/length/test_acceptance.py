"""The expected acceptance of draft tokens."""

from __future__ import annotations

from math import log

import numpy as np
import pytest

from llamaspec.length.estimates import Acceptance, SequenceAcceptance, verified_tokens
from llamaspec.values import Draft, Evaluation, Round


def test_at_first_acceptance_follows_confidence_less_steeply() -> None:
    believed = [Acceptance().probability(c) for c in (0.02, 0.15, 0.3, 0.45, 0.6, 0.7, 0.85, 0.95, 0.99)]
    assert believed == sorted(believed)
    assert 0.1 < believed[0] < 0.25
    assert 0.85 < believed[-1] < 0.97
    assert Acceptance().probability() == pytest.approx(0.6, abs=0.01)


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_each_confidence_gets_its_own_acceptance(chance: float) -> None:
    """Also if the draft is overconfident: a confidence of 0.93 that is accepted once in ten times."""
    rng, belief = np.random.default_rng(1), Acceptance()
    before = belief.probability(0.3)
    for _ in range(300):
        belief.learn(float(rng.random() < chance), 0.93)
    assert belief.probability(0.93) == pytest.approx(chance, abs=0.08)
    assert belief.probability(0.3) == before
    assert Acceptance(belief.log_odds.tolist()).probability(0.93) == belief.probability(0.93)


def test_a_sequence_has_a_level_of_its_own() -> None:
    shared = Acceptance()
    hard, easy = SequenceAcceptance(shared, is_copied=False), SequenceAcceptance(shared, is_copied=False)
    for _ in range(16):
        hard.learn(0.0, 0.5)
        easy.learn(1.0, 0.5)
    assert hard.probability() < 0.4 < 0.7 < easy.probability()
    assert hard.probability(0.5) == easy.probability(0.5)
    assert SequenceAcceptance(shared, is_copied=False).probability() == pytest.approx(0.6, abs=0.15)


def test_acceptance_of_copies_recovers_soon_after_a_rejection() -> None:
    copies = SequenceAcceptance(Acceptance(is_copied=True), is_copied=True)
    before = copies.probability(0.9)
    for _ in range(2):
        copies.learn(0.0, 0.9)
    rejected = copies.probability(0.9)
    assert rejected < before - 0.1
    for _ in range(16):
        copies.learn(1.0, 0.9)
    assert copies.probability(0.9) > rejected + 0.1


@pytest.mark.parametrize(
    ("n_accepted", "found"),
    [
        (0, [(0.9, False)]),
        (1, [(0.9, True), (0.8, False)]),
        (3, [(0.9, True), (0.8, True), (0.7, True)]),
    ],
)
def test_nothing_is_learnt_from_tokens_after_a_rejection(
    n_accepted: int, found: list[tuple[float, bool]]
) -> None:
    draft = Draft(np.arange(3, dtype=np.int32), (), (0.9, 0.8, 0.7))
    assert verified_tokens(Round(draft, n_accepted, 0, Evaluation(4))) == found


def log_odds(probability: float) -> float:
    return log(probability / (1.0 - probability))


@pytest.mark.parametrize(("outcome", "level"), [(1.0, 0.125), (0.0, -0.25)])
def test_a_wrong_copy_moves_the_level_of_a_completion_more_than_a_right_one(
    outcome: float, level: float
) -> None:
    """In answers of JSON, wrong copies cost an eighth of the time before the level had fallen."""
    shared = Acceptance(is_copied=True)
    assert shared.probability(0.5) == pytest.approx(0.5)
    completion = SequenceAcceptance(shared, is_copied=True)
    completion.learn(outcome, 0.5)
    moved = log_odds(completion.probability(0.5)) - log_odds(shared.probability(0.5))
    assert moved == pytest.approx(level)
