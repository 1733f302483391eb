"""How likely a draft token is accepted: from its confidence, and before it is drawn.

Two beliefs for each source of drafts, both in log-odds. A *calibration* of its confidence (Platt scaling: a
level and a slope), shared by all rows. And each row's acceptance of tokens not drawn yet: a level that
wanders. Tokens behind a rejection are not verified and teach nothing. tests/length/test_acceptance.py.
"""

from __future__ import annotations

from math import exp, log, sqrt

from llamaspec.length.beliefs import Belief, learn
from llamaspec.values import Round

UNKNOWN, UNKNOWN_SLOPE = 0.8, 0.5  # standard deviations of levels and slope
COUNT = 8.0  # tokens of a text that all earlier ones count for
DRIFT, TEXT_DRIFT = 0.02, 0.1  # how far log-odds wander with each token, over all texts and within one
SUREST = 0.02  # confidences closer than this to 0 or 1 count as this far off


class Acceptance:
    """The probability that a token is accepted: log-odds of a level and, perhaps, a slope."""

    def __init__(self, level: float, slope: float = 0.0, drift: float = DRIFT) -> None:
        self.level, self.slope = Belief(level, UNKNOWN**2), Belief(slope, UNKNOWN_SLOPE**2)
        self.widest, self._drift = self.level.variance, drift

    def of_text(self) -> Acceptance:
        """That of a new text, which differs."""
        text, p = Acceptance(self.level.mean, drift=TEXT_DRIFT), self.probability()
        text.level.variance = text.widest = 1.0 / (COUNT * max(p * (1.0 - p), 0.02))
        return text

    def probability(self, confidence: float = 0.5, z: float = 0.0) -> float:
        """That a token is accepted, `z` standard deviations of the level further up."""
        log_odds = self.level.mean + z * sqrt(self.level.variance) + self.slope.mean * _logit(confidence)
        return 1.0 / (1.0 + exp(-log_odds)) if log_odds > -30 else 0.0

    def learn(self, outcome: float, confidence: float = 0.5, count: float = 1.0) -> None:
        """Learn from one verified token, accepted (1) or not (0): a step of logistic regression."""
        p = self.probability(confidence)
        curvature = max(p * (1.0 - p), 0.02)
        parts = [(self.level, 1.0), (self.slope, _logit(confidence))]
        learn(parts, (outcome - p) / curvature, 1.0 / (count * curvature))

    def pass_tokens(self, n: int) -> None:
        """Text went by: it may have changed."""
        self.level.variance = min(self.level.variance + n * self._drift**2, self.widest)
        self.slope.variance += n * self._drift**4


def verified_tokens(round_: Round) -> list[tuple[float, bool]]:
    """Confidence of each draft token that was verified, and whether it was accepted."""
    found = [(round_.confidences[i], True) for i in round_.path]
    missed = round_.draft.children(round_.path[-1] if round_.path else -1)
    return found + [(round_.confidences[i], False) for i in missed]


def _logit(confidence: float) -> float:
    p = min(max(confidence, SUREST), 1.0 - SUREST)
    return log(p / (1.0 - p))
