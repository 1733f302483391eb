"""How likely a guess stands: from the draft's confidence, and before the guess is drawn.

Two estimates. *Sighted*: log-odds as a curve over the confidence, a Gaussian belief on a few knots, plus a
mood that comes and goes with easy and hard stretches. *Blind*: averages of different memory, for guesses
not drawn yet. Both are mixtures whose members gain weight by predicting well. Guesses behind a rejection
are not judged and teach nothing. Knows no costs. tests/rules/test_calibration.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

import numpy as np

KNOTS = (0.02, 0.1, 0.25, 0.5, 0.75, 0.92, 0.985)  # confidences at which the curve is kept
MOOD_TOKENS = (0.0, 80.0, 14.0)  # how long a mood lasts; 0 = there are no moods
MOOD_SPREAD = (0.0, 1.0, 1.4)  # its standard deviation, log-odds
START = 0.6  # chance of a guess before anything is known
START_COUNT, KNOWN_COUNT = 5.0, 12.0  # guesses that the first belief counts for: of nobody, of earlier runs
FORGET = 0.985  # of the record by which members are weighed


def _logit(p: float) -> float:
    return log(p / (1.0 - p))


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + exp(-x)) if x > -30 else 0.0


_KNOT_LOGITS = [_logit(k) for k in KNOTS]
START_LEVELS = tuple(0.2 + 0.6 * x for x in _KNOT_LOGITS)  # the curve before anything is known


class Sighted:
    """Chance that a guess of a given confidence stands."""

    def __init__(self, levels: Sequence[float]) -> None:
        x = np.array(_KNOT_LOGITS)
        self._mean = np.array(levels)
        self._covariance = 0.8**2 + 0.25**2 * np.outer(x, x) + 0.3**2 * np.minimum.outer(x - x[0], x - x[0])
        self._covariance += 0.1**2 * np.eye(len(x))
        self._drift = 0.02**2 + 0.01**2 * np.eye(len(x))
        self._curve: list[float] = self._mean.tolist()
        self._moods = [0.0] * len(MOOD_TOKENS)
        self._doubts = [spread**2 for spread in MOOD_SPREAD]
        self._record = [0.5, 0.0, 0.0]
        self._weights = [1 / 3] * 3
        self._weigh()

    @property
    def levels(self) -> tuple[float, ...]:
        """Log-odds at the knots, without moods."""
        return tuple(self._curve)

    def chance(self, confidence: float) -> float:
        """Calibrated chance, mood included."""
        level = self._level(confidence)
        return sum(w * _sigmoid(level + mood) for w, mood in zip(self._weights, self._moods, strict=True))

    def bound(self, confidence: float, z: float) -> float:
        """The same, `z` standard deviations of the curve further up."""
        i, part = self._place(confidence)
        near = self._covariance[i : i + 2, i : i + 2]
        variance = (1 - part) ** 2 * near[0, 0] + 2 * part * (1 - part) * near[0, 1] + part**2 * near[1, 1]
        level = self._level(confidence) + z * float(variance) ** 0.5
        return sum(w * _sigmoid(level + mood) for w, mood in zip(self._weights, self._moods, strict=True))

    def _place(self, confidence: float) -> tuple[int, float]:
        """The knot below a confidence, and how far towards the next one."""
        x = _logit(min(max(confidence, KNOTS[0]), KNOTS[-1]))
        i = 0
        while i < len(KNOTS) - 2 and x > _KNOT_LOGITS[i + 1]:
            i += 1
        return i, (x - _KNOT_LOGITS[i]) / (_KNOT_LOGITS[i + 1] - _KNOT_LOGITS[i])

    def _level(self, confidence: float) -> float:
        i, part = self._place(confidence)
        return (1 - part) * self._curve[i] + part * self._curve[i + 1]

    def judge(self, confidence: float, stood: bool) -> None:
        """Learn from one judged guess."""
        i, part = self._place(confidence)
        level = (1 - part) * self._curve[i] + part * self._curve[i + 1]
        for e, mood in enumerate(self._moods):
            p = _sigmoid(level + mood)
            self._record[e] = FORGET * self._record[e] + log(max(p if stood else 1 - p, 1e-6))
            doubt = self._doubts[e]
            gain = doubt / (1 + p * (1 - p) * doubt)
            self._moods[e] += gain * (stood - p)
            self._doubts[e] = gain
        p = _sigmoid(level)
        self._covariance += self._drift
        column = (1 - part) * self._covariance[:, i] + part * self._covariance[:, i + 1]
        variance = (1 - part) * float(column[i]) + part * float(column[i + 1])
        curvature = max(p * (1 - p), 0.02)
        gain = 1 / (1 + curvature * variance)
        self._mean = self._mean + column * (gain * (stood - p))
        self._covariance -= np.outer(column, column * (curvature * gain))
        self._curve = self._mean.tolist()

    def pass_tokens(self, n: int) -> None:
        """Text went by: moods fade."""
        for e, tokens in enumerate(MOOD_TOKENS):
            if tokens:
                keep = exp(-n / tokens)
                self._moods[e] *= keep
                self._doubts[e] = keep**2 * self._doubts[e] + (1 - keep**2) * MOOD_SPREAD[e] ** 2
        self._weigh()

    def _weigh(self) -> None:
        top = max(self._record)
        raw = [exp(r - top) for r in self._record]
        total = sum(raw)
        self._weights = [r / total for r in raw]


class Blind:
    """Chance that a guess not yet drawn stands."""

    MEMORY = (200.0, 40.0, 9.0, 30.0, 8.0)  # guesses remembered by each member
    SOFT = (False, False, False, True, True)  # learns from calibrated chances instead of outcomes
    PRIOR = (6.0, 3.0, 1.5, 3.0, 1.5)  # guesses that the slow average counts for, in each member

    def __init__(self, start: float, count: float) -> None:
        self._start, self._start_count = start, count
        self._hits = [0.0] * 5
        self._counts = [0.0] * 5
        self._record = [0.3, 0.0, 0.0, 0.0, 0.0]
        self._chances = [start] * 5
        self.chance = start
        self._effective = count

    @property
    def usual(self) -> float:
        """The longest average."""
        return self._chances[0]

    def see(self, chances: Sequence[float]) -> None:
        """Learn from the calibrated chances of the guesses drawn in a round."""
        for chance in chances:
            self._add(chance, soft=True)
        self.refresh()

    def judge(self, stood: bool) -> None:
        """Learn from one judged guess."""
        for e, p in enumerate(self._chances):
            self._record[e] = FORGET * self._record[e] + log(max(p if stood else 1 - p, 1e-6))
        self._add(float(stood), soft=False)
        self.refresh()

    def _add(self, y: float, soft: bool) -> None:
        for e, memory in enumerate(self.MEMORY):
            if self.SOFT[e] is soft:
                keep = 1 - 1 / memory
                self._hits[e] = keep * self._hits[e] + y
                self._counts[e] = keep * self._counts[e] + 1

    def pass_tokens(self, n: int) -> None:
        """Text went by: short memories fade towards the long one."""
        for e, memory in enumerate(self.MEMORY):
            keep = exp(-n / (3 * memory))
            self._hits[e] *= keep
            self._counts[e] *= keep
        self.refresh()

    def refresh(self) -> None:
        """Mix the members."""
        slow = (self._hits[0] + self._start_count * self._start) / (self._counts[0] + self._start_count)
        self._chances = [
            (h + prior * slow) / (c + prior)
            for h, c, prior in zip(self._hits, self._counts, self.PRIOR, strict=True)
        ]
        self._chances[0] = slow
        top = max(self._record)
        raw = [exp(r - top) for r in self._record]
        total = sum(raw)
        weights = [r / total for r in raw]
        self.chance = sum(w * p for w, p in zip(weights, self._chances, strict=True))
        counts = [c + prior for c, prior in zip(self._counts, self.PRIOR, strict=True)]
        self._effective = sum(w * c for w, c in zip(weights, counts, strict=True))

    def bound(self, z: float) -> float:
        """The chance, `z` standard deviations of its log-odds further up."""
        p = min(max(self.chance, 0.01), 0.99)
        spread = 1 / (min(self._effective, 40.0) * p * (1 - p)) ** 0.5
        return _sigmoid(_logit(p) + z * min(spread, 2.0))


class Calibration:
    """Both estimates, taught together."""

    def __init__(self, known: tuple[float, Sequence[float]] | None = None) -> None:
        self._sighted = Sighted(START_LEVELS if known is None else known[1])
        self._blind = Blind(START, START_COUNT) if known is None else Blind(known[0], KNOWN_COUNT)
        self._seen: tuple[float, ...] = ()  # confidences whose product is remembered
        self._standing = 1.0

    @property
    def usual(self) -> float:
        """Chance that a guess stands, over the whole run."""
        return self._blind.usual

    @property
    def levels(self) -> tuple[float, ...]:
        """Log-odds that a guess stands, at each of the knots of confidence."""
        return self._sighted.levels

    @property
    def ahead(self) -> float:
        """Chance that a guess stands which is not drawn yet."""
        return self._blind.chance

    def bound(self, z: float) -> float:
        """`ahead`, with `z` standard deviations of luck."""
        return self._blind.bound(z)

    def chance(self, confidence: float) -> float:
        """Chance that a guess of this confidence stands."""
        return self._sighted.chance(confidence)

    def hopeful_chance(self, confidence: float, z: float) -> float:
        """The same, with `z` standard deviations of luck."""
        return self._sighted.bound(confidence, z)

    def all_stand(self, confidences: tuple[float, ...]) -> float:
        """Chance that all guesses of a draft stand. Cheap when a draft is asked again with one guess more."""
        if confidences != self._seen:
            known = len(self._seen)
            if confidences[:known] != self._seen:
                known, self._standing = 0, 1.0
            for confidence in confidences[known:]:
                self._standing *= self._sighted.chance(confidence)
            self._seen = confidences
        return self._standing

    def learn(self, confidences: Sequence[float], n_judged: int, n_accepted: int) -> None:
        """Learn from a draft whose first `n_judged` guesses were judged, and the first `n_accepted` stood."""
        chances = [self._sighted.chance(confidence) for confidence in confidences]
        for i in range(n_judged):
            self._blind.judge(i < n_accepted)
            self._sighted.judge(confidences[i], i < n_accepted)
        self._blind.see(chances)
        self._seen, self._standing = (), 1.0

    def pass_tokens(self, n: int) -> None:
        """Text went by."""
        self._sighted.pass_tokens(n)
        self._blind.pass_tokens(n)
        self._seen, self._standing = (), 1.0
