"""Guesses with known chances in, believed chances out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from llamaspec.rules.calibration import Calibration


def taught(chance_of: Callable[[float], float], n: int = 300, seed: int = 0) -> Calibration:
    """Single guesses of every confidence, standing with a chance that depends on it."""
    rng = np.random.default_rng(seed)
    calibration = Calibration()
    for confidence in rng.uniform(0.02, 0.98, n).tolist():
        stood = bool(rng.random() < chance_of(confidence))
        calibration.learn((confidence,), 1, int(stood))
        calibration.pass_tokens(1 + stood)
    return calibration


@pytest.mark.parametrize(
    "chance_of",
    [
        pytest.param(lambda c: c, id="honest"),
        pytest.param(lambda c: 0.5 + 0.45 * c, id="modest"),
        pytest.param(lambda c: 0.3 * c, id="boasting"),
        pytest.param(lambda c: 1 - c, id="upside down"),
        pytest.param(lambda c: 0.4, id="says nothing"),
    ],
)
def test_confidence_is_calibrated(chance_of: Callable[[float], float]) -> None:
    calibration = taught(chance_of)
    errors = [abs(calibration.chance(c) - chance_of(c)) for c in (0.1, 0.3, 0.5, 0.7, 0.9)]
    assert float(np.mean(errors)) < 0.09


@pytest.mark.parametrize("chance", [0.02, 0.3, 0.6, 0.95])
def test_the_chance_of_a_guess_not_drawn_yet(chance: float) -> None:
    beliefs = [taught(lambda c: chance, 200, seed).ahead for seed in range(8)]
    assert float(np.mean(beliefs)) == pytest.approx(chance, abs=0.06)
    assert max(abs(belief - chance) for belief in beliefs) < 0.2


def test_guesses_behind_a_rejection_teach_nothing_of_their_own() -> None:
    """Every draft falls at its first guess; the second, of another confidence, is never judged."""
    calibration = Calibration()
    before = calibration.chance(0.95)
    for _ in range(40):
        calibration.learn((0.1, 0.95), 1, 0)
    assert calibration.chance(0.1) < 0.1
    assert calibration.chance(0.95) - calibration.chance(0.1) > 0.5 * (before - calibration.chance(0.1)) - 0.3


def test_a_change_is_followed_and_moods_fade() -> None:
    calibration = Calibration()
    for easy in (True, False) * 3:
        for _ in range(30):
            calibration.learn((0.5,), 1, int(easy))
            calibration.pass_tokens(1)
        assert (calibration.ahead > 0.8) if easy else (calibration.ahead < 0.2)
    calibration.pass_tokens(200)
    assert calibration.ahead > 0.2  # after a long silence, the long average speaks


def test_the_product_over_a_draft() -> None:
    calibration = taught(lambda c: c)
    chances = [calibration.chance(c) for c in (0.9, 0.5, 0.7)]
    for draft in ((0.9,), (0.9, 0.5), (0.9, 0.5, 0.7), (0.5,), (0.9, 0.5, 0.7), ()):
        expected = float(np.prod([chances[(0.9, 0.5, 0.7).index(c)] for c in draft]))
        assert calibration.all_stand(draft) == pytest.approx(expected)


def test_bounds_surround_the_chance_and_close_in() -> None:
    fresh, old = Calibration(), taught(lambda c: 0.6)
    assert fresh.bound(-1.0) < fresh.ahead < fresh.bound(1.0)
    assert old.bound(1.0) - old.bound(-1.0) < fresh.bound(1.0) - fresh.bound(-1.0)
