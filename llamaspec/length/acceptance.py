"""How likely a draft token is accepted: from its confidence, and before it is drawn.

Two estimates for each source of drafts. A *calibration*: the log-odds as a curve over the confidence, a
Gaussian belief on a few knots, shared by all rows. A *running average* of each row, for tokens not drawn
yet. Tokens behind a rejection are not verified and teach nothing. tests/length/test_acceptance.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import exp, log

import numpy as np

from llamaspec.values import Round

KNOTS = (0.02, 0.1, 0.25, 0.5, 0.75, 0.92, 0.985)  # confidences at which the curve is kept
START, FREE_START = 0.6, 0.4  # acceptance before anything is known: of a draft model, of an n-gram
START_COUNT, KNOWN_COUNT = 5.0, 8.0  # tokens that it counts for; that an earlier text's average counts for
LONG_MEMORY = 200.0  # and that of all texts
SURE = 40.0  # tokens after which a running average does not get surer


def _logit(p: float) -> float:
    return log(p / (1.0 - p))


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + exp(-x)) if x > -30 else 0.0


_KNOT_LOGITS = [_logit(k) for k in KNOTS]
FREE_LEVELS = tuple(0.9 * x - 0.8 for x in _KNOT_LOGITS)  # of an n-gram: a match of 2 goes on in 46 %
START_LEVELS = tuple(0.2 + 0.6 * x for x in _KNOT_LOGITS)  # log-odds at the knots, before anything is known


def _place(confidence: float) -> tuple[int, float]:
    """The knot below a confidence, and how far towards the next one: [0, 1]."""
    x = _logit(min(max(confidence, KNOTS[0]), KNOTS[-1]))
    i = min(bisect_right(_KNOT_LOGITS, x), len(KNOTS) - 1) - 1
    return i, (x - _KNOT_LOGITS[i]) / (_KNOT_LOGITS[i + 1] - _KNOT_LOGITS[i])


class Calibration:
    """Acceptance probability of a draft token of a given confidence."""

    def __init__(self, levels: Sequence[float] = START_LEVELS) -> None:
        x = np.array(_KNOT_LOGITS)
        self._mean = np.array(levels)
        self._levels: list[float] = self._mean.tolist()
        self._covariance = 0.8**2 + 0.25**2 * np.outer(x, x) + 0.3**2 * np.minimum.outer(x - x[0], x - x[0])
        self._covariance += 0.1**2 * np.eye(len(x))
        self._drift = 0.02**2 + 0.01**2 * np.eye(len(x))

    @property
    def levels(self) -> tuple[float, ...]:
        """[len(KNOTS)] log-odds."""
        return tuple(self._levels)

    def probability(self, confidence: float) -> float:
        """As calibrated by what was verified."""
        i, part = _place(confidence)
        return _sigmoid((1 - part) * self._levels[i] + part * self._levels[i + 1])

    def learn(self, confidence: float, is_accepted: bool) -> None:
        """Learn from one verified token: a step of logistic regression."""
        p, (i, part) = self.probability(confidence), _place(confidence)
        covariance = self._covariance + self._drift
        column = (1 - part) * covariance[:, i] + part * covariance[:, i + 1]
        variance = (1 - part) * float(column[i]) + part * float(column[i + 1])
        curvature = max(p * (1 - p), 0.02)
        gain = 1 / (1 + curvature * variance)
        self._mean = self._mean + column * (gain * (is_accepted - p))
        self._covariance = covariance - np.outer(column, column * (curvature * gain))
        self._levels = self._mean.tolist()


class RunningAverage:
    """Acceptance of tokens not drawn yet: an average that forgets, around what was known at its start."""

    def __init__(self, start: float, count: float, memory: float) -> None:
        self._start, self._start_count, self._memory = start, count, memory
        self._hits = self._count = 0.0

    @property
    def probability(self) -> float:
        """Of the next token."""
        return (self._hits + self._start_count * self._start) / (self._count + self._start_count)

    def fresh(self, memory: float) -> RunningAverage:
        """An average for a new text, around this one."""
        count = START_COUNT if not self._count else KNOWN_COUNT
        return RunningAverage(self.probability, count, memory)

    def bound(self, z: float) -> float:
        """The same, `z` standard deviations of its log-odds further up."""
        p = min(max(self.probability, 0.01), 0.99)
        spread = 1 / (min(self._count + self._start_count, SURE) * p * (1 - p)) ** 0.5
        return _sigmoid(_logit(p) + z * min(spread, 2.0))

    def learn(self, is_accepted: float, count: float = 1.0) -> None:
        """Learn from one verified token."""
        keep = 1 - count / self._memory
        self._hits, self._count = keep * self._hits + count * is_accepted, keep * self._count + count

    def pass_tokens(self, n: int) -> None:
        """Text went by: what was seen counts for less."""
        keep = exp(-n / (3 * self._memory))
        self._hits, self._count = keep * self._hits, keep * self._count


class SourceBelief:
    """What is known of one source over all rows and texts."""

    def __init__(
        self, acceptance: float = START, levels: Sequence[float] = START_LEVELS, count: float = START_COUNT
    ) -> None:
        self.calibration = Calibration(levels)
        self.usual = RunningAverage(acceptance, count, LONG_MEMORY)


def verified_tokens(round_: Round) -> list[tuple[float, bool]]:
    """Confidence of each draft token that was verified, and whether it was accepted."""
    found = [(round_.confidences[i], True) for i in round_.path]
    missed = round_.draft.children(round_.path[-1] if round_.path else -1)
    return found + [(round_.confidences[i], False) for i in missed]
