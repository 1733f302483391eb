"""Draft tokens of known acceptance in, believed acceptance out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from llamaspec.length.acceptance import Calibration, RunningAverage, verified_tokens
from llamaspec.values import Draft, Round


def taught(acceptance_of: Callable[[float], float], n: int = 300, seed: int = 0) -> Calibration:
    """Single tokens of every confidence, accepted with a probability that depends on it."""
    rng = np.random.default_rng(seed)
    calibration = Calibration()
    for confidence in rng.uniform(0.02, 0.98, n).tolist():
        calibration.learn(confidence, bool(rng.random() < acceptance_of(confidence)))
    return calibration


@pytest.mark.parametrize(
    "acceptance_of",
    [
        pytest.param(lambda c: c, id="honest"),
        pytest.param(lambda c: 0.5 + 0.45 * c, id="modest"),
        pytest.param(lambda c: 0.3 * c, id="boasting"),
        pytest.param(lambda c: 1 - c, id="upside down"),
        pytest.param(lambda c: 0.4, id="says nothing"),
    ],
)
def test_confidence_is_calibrated(acceptance_of: Callable[[float], float]) -> None:
    calibration = taught(acceptance_of)
    errors = [abs(calibration.probability(c) - acceptance_of(c)) for c in (0.1, 0.3, 0.5, 0.7, 0.9)]
    assert float(np.mean(errors)) < 0.09


def test_what_is_learnt_of_one_confidence_says_little_of_another() -> None:
    calibration = Calibration()
    before = calibration.probability(0.95)
    for _ in range(40):
        calibration.learn(0.1, False)
    assert calibration.probability(0.1) < 0.1
    assert calibration.probability(0.95) > before - 0.3


@pytest.mark.parametrize("acceptance", [0.02, 0.3, 0.95])
def test_a_running_average_by_hand(acceptance: float) -> None:
    """Four tokens' worth of 0.5 at the start; the newest of three counts most."""
    average = RunningAverage(0.5, 4.0, memory=2.0)
    for accepted in (acceptance, 0.0, 1.0):
        average.learn(accepted)
    hits, count = acceptance / 4 + 0.0 / 2 + 1.0, 1 / 4 + 1 / 2 + 1
    assert average.probability == pytest.approx((hits + 4 * 0.5) / (count + 4))


def test_a_change_is_followed_and_what_was_seen_fades() -> None:
    average = RunningAverage(0.6, 5.0, memory=20.0)
    for is_easy in (True, False) * 3:
        for _ in range(30):
            average.learn(is_easy)
        assert (average.probability > 0.75) if is_easy else (average.probability < 0.5)
    average.pass_tokens(300)
    assert average.probability == pytest.approx(0.6, abs=0.02)  # after a long silence


def test_a_new_text_begins_with_what_earlier_ones_were_like() -> None:
    usual = RunningAverage(0.6, 5.0, memory=200.0)
    for _ in range(400):
        usual.learn(0.25)
    fresh = usual.fresh(20.0)
    assert fresh.probability == usual.probability == pytest.approx(0.26, abs=0.01)
    assert fresh.bound(1.0) - fresh.bound(-1.0) > 1.5 * (usual.bound(1.0) - usual.bound(-1.0))


def test_bounds_surround_the_average_and_close_in() -> None:
    average = RunningAverage(0.6, 5.0, memory=40.0)
    wide = average.bound(1.0) - average.bound(-1.0)
    assert average.bound(-1.0) < average.probability < average.bound(1.0)
    for _ in range(40):
        average.learn(0.6)
    assert average.bound(1.0) - average.bound(-1.0) < wide / 2


@pytest.mark.parametrize(
    ("parents", "path", "verified"),
    [
        (None, (), [(0.9, False)]),
        (None, (0,), [(0.9, True), (0.7, False)]),
        (None, (0, 1, 2), [(0.9, True), (0.7, True), (0.2, True)]),
        ([-1, 0, -1], (2,), [(0.2, True)]),  # a tree: nobody knows what came of the first branch
        ([-1, 0, -1], (), [(0.9, False), (0.2, False)]),
        ([-1, 0, 0], (0,), [(0.9, True), (0.7, False), (0.2, False)]),
    ],
)
def test_tokens_behind_a_rejection_are_not_verified(
    parents: list[int] | None, path: tuple[int, ...], verified: list[tuple[float, bool]]
) -> None:
    tree = None if parents is None else np.array(parents, dtype=np.int32)
    draft = Draft(np.zeros(3, dtype=np.int32), (), (0.9, 0.7, 0.2), parents=tree)
    assert verified_tokens(Round(draft, path, 0, width=4)) == verified
