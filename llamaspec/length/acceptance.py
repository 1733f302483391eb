"""How likely a draft token is accepted: by its confidence, and before it is drawn.

For each source an average of the log-odds in every bin of confidence (of copies: of the length of the match),
shared by all texts and kept for the pair; one more bin for tokens that are not drawn yet. That one has a
level for each text besides. Tokens behind a rejection are not verified and teach nothing.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from math import exp, log

import numpy as np
import numpy.typing as npt

from llamaspec.values import Round

EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # between bins of confidence
CENTRES = (0.05, 0.15, 0.275, 0.425, 0.575, 0.725, 0.85, 0.94, 0.985)
LEVEL, SLOPE, UNDRAWN = 0.2, 0.6, 0.4  # log-odds at first; of tokens that are not drawn yet
PRIOR, MOST = 4, 200  # tokens that these count for; that an average remembers
GAIN, COPY_GAIN = 0.25, 0.8  # how fast the level of a text moves
FADING = 0.95  # of the level of copies, with each token of the text
FLATTEST = 0.1  # slope of a probability over its log-odds, at least


class Acceptance:
    """What all texts have learnt of one source: log-odds of acceptance.

    Parameters
    ----------
    log_odds : sequence of float, optional
        Of each bin, and of tokens that are not drawn yet.
    level, slope : float
        Else: of a confidence of 0.5, and for its log-odds.
    """

    def __init__(self, log_odds: Sequence[float] = (), *, level: float = LEVEL, slope: float = SLOPE) -> None:
        usual = [level + slope * log(p / (1 - p)) for p in CENTRES]
        self.log_odds = list(log_odds or (*usual, UNDRAWN))
        self._n = [PRIOR] * len(self.log_odds)

    def probability(self, confidence: float | None = None, shift: float = 0.0) -> float:
        """That a token is accepted; None: that is not drawn yet."""
        return _probability(self.log_odds[_bin(confidence)] + shift)

    def learn(self, outcome: float, confidence: float | None = None) -> None:
        """Learn from one token that was accepted (1) or rejected (0)."""
        i = _bin(confidence)
        p = self.probability(confidence)
        self._n[i] = min(self._n[i] + 1, MOST)
        self.log_odds[i] += (outcome - p) / (self._n[i] * max(p * (1 - p), FLATTEST))


class TextAcceptance:
    """That of one text: the shared one, and a level.

    The level is of tokens that are not drawn yet. Of copies it is of all tokens, and fades, because copied
    passages begin and end at once.
    """

    def __init__(self, shared: Acceptance, *, is_copied: bool) -> None:
        self._shared, self._is_copied, self._level = shared, is_copied, 0.0

    def probability(self, confidence: float | None = None) -> float:
        """That a token is accepted; None: that is not drawn yet."""
        has_level = confidence is None or self._is_copied
        return self._shared.probability(confidence, self._level if has_level else 0.0)

    def learn(self, outcome: float, confidence: float) -> None:
        """Learn from one token."""
        if self._is_copied:
            self._level += COPY_GAIN * (outcome - self.probability(confidence))
        else:
            self._level += GAIN * (outcome - self.probability())
        self._shared.learn(outcome)
        self._shared.learn(outcome, confidence)

    def pass_tokens(self, n: int) -> None:
        """So many tokens were written."""
        if self._is_copied:
            self._level *= FADING**n


def expected_accepted(acceptance: float, longest: int) -> npt.NDArray[np.float64]:
    """[n] draft tokens that are accepted, on average, of n = 0 .. longest with the same acceptance.

    Examples
    --------
    >>> expected_accepted(0.5, 3).tolist()
    [0.0, 0.5, 0.75, 0.875]
    """
    return np.concatenate(([0.0], (acceptance ** np.arange(1, longest + 1)).cumsum()))


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


def _bin(confidence: float | None) -> int:
    return len(EDGES) + 1 if confidence is None else bisect(EDGES, confidence)


def _probability(log_odds: float) -> float:
    return 1.0 / (1.0 + exp(-log_odds)) if log_odds > -30 else 0.0
