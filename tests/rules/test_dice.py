"""Chance from a seed: the right law, independent where it must be, the same where it must be."""

from __future__ import annotations

import numpy as np
import pytest

from llamaspec.protocols import Use
from llamaspec.rules.dice import SeededDice
from llamaspec.values import Distribution

COIN = Distribution(np.array([4, 9], dtype=np.int32), np.array([0.5, 0.5]))
SKEWED = Distribution(np.array([0, 3, 7, 100_000], dtype=np.int32), np.array([0.6, 0.25, 0.1, 0.05]))

GOLDEN_TOKENS = [7, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 3]
GOLDEN_CHANCES = [False, True, True, False, False, True, True, True]


def test_golden_values() -> None:
    """A seed means the same text in every version."""
    dice = SeededDice(7)
    assert [dice.choose(SKEWED, Use.TOKEN, position) for position in range(12)] == GOLDEN_TOKENS
    assert [dice.chance(0.5, Use.ACCEPT, position, 3) for position in range(8)] == GOLDEN_CHANCES


def test_the_law_of_a_draw() -> None:
    n, dice = 20_000, SeededDice(1)
    drawn = np.array([dice.choose(SKEWED, Use.TOKEN, position) for position in range(n)])
    counts = np.array([(drawn == token).sum() for token in SKEWED.tokens])
    expected = n * SKEWED.probabilities
    assert (
        (counts - expected) ** 2 / expected
    ).sum() < 16.3  # chi-square, 3 degrees, 0.1 %; the seed is fixed


def test_the_law_of_a_chance() -> None:
    dice = SeededDice(2)
    hits = sum(dice.chance(0.3, Use.ACCEPT, position) for position in range(20_000))
    assert abs(hits - 6000) < 4 * 65


@pytest.mark.parametrize("use", list(Use))
def test_never_and_always(use: Use) -> None:
    dice = SeededDice(3)
    assert not any(dice.chance(0.0, use, position) for position in range(100))
    assert all(dice.chance(1.0, use, position) for position in range(100))


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("seed", lambda position: SeededDice(6).choose(COIN, Use.TOKEN, position, 2)),
        ("use", lambda position: SeededDice(5).choose(COIN, Use.GUESS, position, 2)),
        ("position", lambda position: SeededDice(5).choose(COIN, Use.TOKEN, position + 1, 2)),
        ("attempt", lambda position: SeededDice(5).choose(COIN, Use.TOKEN, position, 3)),
    ],
)
def test_draws_that_differ_in_anything_are_independent(name: str, other: object) -> None:
    assert callable(other)
    n = 4000
    same = sum(SeededDice(5).choose(COIN, Use.TOKEN, i, 2) == other(i) for i in range(n))
    assert abs(same - n / 2) < 4 * np.sqrt(n) / 2


def test_the_same_question_has_the_same_answer() -> None:
    assert SeededDice(5).choose(SKEWED, Use.TOKEN, 9) == SeededDice(5 + 2**64).choose(SKEWED, Use.TOKEN, 9)


def test_two_models_that_nearly_agree_nearly_always_draw_alike() -> None:
    """What makes the coupled rule accept: at least (1 - TV) / (1 + TV)."""
    near = Distribution(SKEWED.tokens, np.array([0.55, 0.3, 0.1, 0.05]))
    dice, n = SeededDice(8), 4000
    same = sum(dice.choose(SKEWED, Use.TOKEN, i) == dice.choose(near, Use.TOKEN, i) for i in range(n))
    assert same / n > 0.95 / 1.05
