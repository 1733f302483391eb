"""Draft tokens of known acceptance in, believed acceptance out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from llamaspec.length.acceptance import FREE_DRIFT, Acceptance, verified_tokens
from llamaspec.length.prior import LOG_ODDS
from llamaspec.values import Draft, Round


def calibration() -> Acceptance:
    return Acceptance(*LOG_ODDS[1:])


@dataclass
class Plain:
    """The same belief, written down as the extended Kalman filter of a logistic regression, in matrices."""

    mean: np.ndarray[tuple[int], np.dtype[np.float64]]  # level and slope, in log-odds
    covariance: np.ndarray[tuple[int, int], np.dtype[np.float64]]
    widest: float  # variance of the level that nothing exceeds
    drift: float  # standard deviation of the level's step with each token; of the slope's: half of it
    usual: Plain | None = None
    back: float = 0.0  # of the way to the usual level, with each token

    @classmethod
    def of_all(cls, level: float, slope: float = 0.0) -> Plain:
        return cls(np.array([level, slope]), np.diag([0.8**2, 0.5**2]), 0.8**2, 0.02)

    def of_text(self, drift: float = 0.14) -> Plain:
        """As sure of its level as eight tokens of it, and the usual level itself, allow."""
        p = self.probability()
        variance = float(self.covariance[0, 0]) + 1 / (8 * max(p * (1 - p), 0.02))
        start = np.array([self.mean[0], 0.0])
        return Plain(start, np.diag([variance, 0.5**2]), variance, drift, self, 0.02)

    def at(self, confidence: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        odds = min(max(confidence, 0.02), 0.98)
        return np.array([1.0, np.log(odds / (1 - odds))])

    def probability(self, confidence: float = 0.5, z: float = 0.0, shift: float = 0.0) -> float:
        log_odds = self.at(confidence) @ self.mean + z * np.sqrt(self.covariance[0, 0]) + shift
        return float(1 / (1 + np.exp(-log_odds)))

    def learn(self, outcome: float, confidence: float = 0.5) -> None:
        x, p = self.at(confidence), self.probability(confidence)
        information = max(p * (1 - p), 0.02)
        gain = self.covariance @ x / (x @ self.covariance @ x + 1 / information)
        self.mean = self.mean + gain * (outcome - p) / information
        self.covariance = self.covariance - np.outer(gain, x @ self.covariance)

    def pass_tokens(self, n: int) -> None:
        if self.usual is not None:
            self.mean[0] += min(n * self.back, 1.0) * (self.usual.mean[0] - self.mean[0])
        self.covariance[0, 0] = min(self.covariance[0, 0] + n * self.drift**2, self.widest)
        self.covariance[1, 1] += n * (self.drift / 2) ** 2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["all texts", "a text", "a copied text"])
def test_beliefs_are_those_of_the_filter_in_matrices(kind: str, seed: int) -> None:
    """Of a text, too, while what is usual changes with other texts."""
    rng = np.random.default_rng(seed)
    usual = found, plain = Acceptance(0.4, 0.6), Plain.of_all(0.4, 0.6)
    steps = [(n, *rng.random(3).tolist()) for n in rng.choice([0, 1, 1, 3, 70], 120).tolist()]
    for i, (n, outcome, confidence, elsewhere) in enumerate(steps):
        if i == 60 and kind == "a text":
            found, plain = found.of_text(), plain.of_text(0.14)
        elif i == 60 and kind == "a copied text":
            found, plain = found.of_text(FREE_DRIFT), plain.of_text(FREE_DRIFT)
        outcome = outcome if i % 2 else float(confidence < 0.7)  # what is sure is rejected
        found.pass_tokens(n)
        plain.pass_tokens(n)
        found.learn(outcome, confidence)
        plain.learn(outcome, confidence)
        if found is not usual[0]:
            usual[0].learn(elsewhere, 0.3)
            usual[1].learn(elsewhere, 0.3)
        for sure in (0.001, 0.3, 0.5, 0.999):
            for z in (-1.0, 0.0, 2.0):
                assert found.probability(sure, z) == pytest.approx(plain.probability(sure, z), rel=1e-9)
            shifted = found.probability(sure, shift=-0.7)
            assert shifted == pytest.approx(plain.probability(sure, shift=-0.7), rel=1e-9)


def test_what_is_hopeless_is_no_overflow() -> None:
    assert Acceptance(-1000.0).probability() == 0.0
    assert Acceptance(-29.9).probability() == pytest.approx(np.exp(-29.9))
    assert Acceptance(1000.0).probability() == 1.0


def taught(acceptance_of: Callable[[float], float], n: int = 300, seed: int = 0) -> Acceptance:
    """Single tokens of every confidence, accepted with a probability that depends on it."""
    rng, found = np.random.default_rng(seed), calibration()
    for confidence in rng.uniform(0.02, 0.98, n).tolist():
        found.pass_tokens(1)
        found.learn(bool(rng.random() < acceptance_of(confidence)), confidence)
    return found


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
    found = taught(acceptance_of)
    errors = [abs(found.probability(c) - acceptance_of(c)) for c in (0.1, 0.3, 0.5, 0.7, 0.9)]
    assert float(np.mean(errors)) < 0.09


def test_what_is_learnt_of_one_confidence_says_little_of_another() -> None:
    found = calibration()
    before = found.probability(0.95)
    for _ in range(40):
        found.learn(0, 0.1)
    assert found.probability(0.1) < 0.1
    assert found.probability(0.95) > before - 0.3


@pytest.mark.parametrize("chance", [0.05, 0.4, 0.9])
def test_a_frequency_is_learnt(chance: float) -> None:
    """The start counts for little: after 400 tokens of all texts, the frequency is what is left."""
    rng, usual = np.random.default_rng(1), Acceptance(LOG_ODDS[0])
    accepted = rng.random(400) < chance
    for is_accepted in accepted:
        usual.learn(bool(is_accepted))
    assert usual.probability() == pytest.approx(float(accepted.mean()), abs=0.03)


def test_a_change_is_followed_and_what_was_seen_gets_unsure() -> None:
    text = Acceptance(LOG_ODDS[0]).of_text()
    for is_easy in (True, False) * 3:
        for _ in range(30):
            text.pass_tokens(1)
            text.learn(is_easy)
        assert (text.probability() > 0.75) if is_easy else (text.probability() < 0.45)
    known = text.probability(z=1.0) - text.probability()
    text.pass_tokens(60)
    assert text.probability(z=1.0) - text.probability() > 1.5 * known


def test_a_new_text_begins_with_what_earlier_ones_were_like() -> None:
    usual = Acceptance(LOG_ODDS[0])
    for i in range(400):
        usual.learn(i % 4 == 0)
    fresh = usual.of_text()
    assert fresh.probability() == usual.probability() == pytest.approx(0.25, abs=0.03)
    assert fresh.probability(z=1.0) - fresh.probability(z=-1.0) > 1.5 * (
        usual.probability(z=1.0) - usual.probability(z=-1.0)
    )


def test_bounds_surround_the_estimate_and_close_in() -> None:
    acceptance = Acceptance(LOG_ODDS[0])
    wide = acceptance.probability(z=1.0) - acceptance.probability(z=-1.0)
    assert acceptance.probability(z=-1.0) < acceptance.probability() < acceptance.probability(z=1.0)
    for _ in range(40):
        acceptance.learn(0.6)
    assert acceptance.probability(z=1.0) - acceptance.probability(z=-1.0) < wide / 2


@pytest.mark.parametrize(
    ("parents", "path", "verified"),
    [
        (None, (), [(0.9, False)]),
        (None, (0,), [(0.9, True), (0.7, False)]),
        (None, (0, 1, 2), [(0.9, True), (0.7, True), (0.2, True)]),
        ([-1, 0, -1], (2,), [(0.9, False)]),  # a tree: of each position the best
        ([-1, 0, -1], (), [(0.9, False)]),
        ([-1, 0, 0], (0,), [(0.9, True), (0.7, False)]),
    ],
)
def test_tokens_behind_a_rejection_are_not_verified(
    parents: list[int] | None, path: tuple[int, ...], verified: list[tuple[float, bool]]
) -> None:
    tree = None if parents is None else np.array(parents, dtype=np.int32)
    draft = Draft(np.zeros(3, dtype=np.int32), (), (0.9, 0.7, 0.2), parents=tree)
    assert verified_tokens(Round(draft, path, 0, width=4)) == verified
