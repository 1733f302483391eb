"""How likely a draft token is accepted: from its confidence, and before it is drawn.

Two beliefs for each source of drafts, both in log-odds. A *calibration* of its confidence (Platt scaling: a
level and a slope), shared by all rows. And each row's acceptance of tokens not drawn yet: a level that
wanders. Tokens behind a rejection are not verified and teach nothing. tests/length/test_acceptance.py.
"""

from __future__ import annotations

from math import exp, log, sqrt

from llamaspec.values import Round

UNKNOWN, UNKNOWN_SLOPE = 0.8, 0.5  # standard deviations of levels and slope
COUNT = 8.0  # tokens of a text that all earlier ones count for
DRIFT, TEXT_DRIFT = 0.02, 0.14  # how far log-odds wander with each token, over all texts and within one
FREE_DRIFT = 0.25  # copied stretches begin and end at once
BACK = 0.02  # of the way back to what is usual, with each token of a text
FLATTEST = 0.02  # slope of a probability over its log-odds, at least
SUREST = 0.02  # confidences closer than this to 0 or 1 count as this far off


class Acceptance:
    """The probability that a token is accepted: log-odds of a level and, perhaps, a slope; both Gaussian."""

    def __init__(self, level: float, slope: float = 0.0, drift: float = DRIFT) -> None:
        self.level, self.slope = level, slope
        self._level_variance, self._covariance, self._slope_variance = UNKNOWN**2, 0.0, UNKNOWN_SLOPE**2
        self._widest, self._drift = UNKNOWN**2, drift
        self._usual, self._back = self, 0.0

    def of_text(self, drift: float = TEXT_DRIFT) -> Acceptance:
        """That of a new text, which differs."""
        text, p = Acceptance(self.level, drift=drift), self.probability()
        others = 1.0 / (COUNT * max(p * (1.0 - p), FLATTEST))
        text._level_variance = text._widest = self._level_variance + others
        text._usual, text._back = self, BACK
        return text

    def probability(self, confidence: float = 0.5, z: float = 0.0, shift: float = 0.0) -> float:
        """That a token is accepted; the level `z` standard deviations further up, and `shift` besides."""
        log_odds = self.level + z * sqrt(self._level_variance) + self.slope * _logit(confidence) + shift
        return 1.0 / (1.0 + exp(-log_odds)) if log_odds > -30 else 0.0

    def learn(self, outcome: float, confidence: float = 0.5) -> None:
        """Learn from one verified token, accepted (1) or not (0): a step of logistic regression."""
        p, x = self.probability(confidence), _logit(confidence)
        curvature = max(p * (1.0 - p), FLATTEST)
        of_level = self._level_variance + x * self._covariance
        of_slope = self._covariance + x * self._slope_variance
        total = of_level + x * of_slope + 1.0 / curvature
        surprise = (outcome - p) / (curvature * total)
        self.level += of_level * surprise
        self.slope += of_slope * surprise
        self._level_variance -= of_level * of_level / total
        self._covariance -= of_level * of_slope / total
        self._slope_variance -= of_slope * of_slope / total

    def pass_tokens(self, n: int) -> None:
        """Text went by: it may have changed."""
        self._level_variance = min(self._level_variance + n * self._drift**2, self._widest)
        self.level += min(n * self._back, 1.0) * (self._usual.level - self.level)
        self._slope_variance += n * (self._drift / 2) ** 2


def verified_tokens(round_: Round) -> list[tuple[float, bool]]:
    """Confidence of each draft token that was verified, and whether it was accepted.

    Of a tree, the best one of each position.
    """
    found: list[tuple[float, bool]] = []
    for node, drawn in zip((-1, *round_.path), (*round_.path, None), strict=True):
        children = round_.draft.children(node)
        if children:
            found.append((round_.confidences[children[0]], children[0] == drawn))
    return found


def _logit(confidence: float) -> float:
    if confidence == 0.5:
        return 0.0
    p = min(max(confidence, SUREST), 1.0 - SUREST)
    return log(p / (1.0 - p))
