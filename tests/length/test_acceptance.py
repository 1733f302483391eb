"""Draft tokens of known acceptance in, believed acceptance out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from llamaspec.length.acceptance import Acceptance, verified_tokens
from llamaspec.length.prior import LOG_ODDS
from llamaspec.values import Draft, Round


def calibration() -> Acceptance:
    return Acceptance(*LOG_ODDS[1:])


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
