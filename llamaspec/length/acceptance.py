"""How likely a draft token is to be accepted, by its confidence or, before it is drawn, on average.

Each source has an average of the log-odds for every bin of confidence (for copies, of the length of the
match), and one more for tokens that are not drawn yet. They are shared by all completions and kept with the
pair; each completion adds a level of its own. Tokens behind a rejected one teach nothing.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np
import numpy.typing as npt

from llamaspec.length.costs import CostCurve
from llamaspec.values import Round

Array = npt.NDArray[np.float64]

EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # between bins of confidence
CENTRES = (0.05, 0.15, 0.275, 0.425, 0.575, 0.725, 0.85, 0.94, 0.985)
MATCHES = (0.5, 1, 2, 3.5, 6, 12, 24, 48, 96, 192, 400)  # tokens: centres of the bins of copies
MATCH_EDGES = tuple(i / (i + 1) for i in (0.5, 1.5, 2.5, 4.5, 8.5, 16.5, 32.5, 64.5, 128.5, 256.5))
LEVEL, SLOPE, UNDRAWN = 0.2, 0.6, 0.4  # log-odds at first; of tokens that are not drawn yet
PRIOR, MOST = 4, 200  # tokens that these count for; that an average remembers
GAIN = 0.25  # how fast a completion's level moves
SETTLED = 3  # runs of a pair after which its costs are trusted: one of them may have been on a busy machine
NEAREST, FARTHEST = 4, 512  # rounds between two explorations, at least and at most
FLATTEST = 0.1  # slope of a probability over its log-odds, at least


class Acceptance:
    """Acceptance of one source over all completions: log-odds of each bin, then of tokens not drawn yet.

    At first, a copy continues after a match of n tokens with odds of n : 1.
    """

    def __init__(
        self,
        log_odds: Sequence[float] = (),
        *,
        level: float = LEVEL,
        slope: float = SLOPE,
        is_copied: bool = False,
    ) -> None:
        self._edges = MATCH_EDGES if is_copied else EDGES
        usual = map(log, MATCHES) if is_copied else (level + slope * log(p / (1 - p)) for p in CENTRES)
        self.log_odds = np.array(log_odds if len(log_odds) else (*usual, UNDRAWN))
        self._n = [PRIOR] * len(self.log_odds)

    @property
    def n_learnt(self) -> int:
        """Tokens that it was learnt from, as far as the average remembers."""
        return self._n[-1] - PRIOR

    def probability(self, confidence: float | None = None, shift: float = 0.0) -> float:
        """Probability that a token is accepted; None stands for one that is not drawn yet."""
        return 1.0 / (1.0 + exp(-max(float(self.log_odds[self._bin(confidence)]) + shift, -30.0)))

    def probabilities(self, confidences: Sequence[float], shift: float = 0.0) -> Array:
        """Probability that each token is accepted, given that those before it are: [n]."""
        bins = np.searchsorted(self._edges, confidences, side="right")
        return 1.0 / (1.0 + np.exp(-np.maximum(self.log_odds[bins] + shift, -30.0)))

    def learn(self, outcome: float, confidence: float | None = None) -> None:
        """Learn from one token that was accepted (1) or rejected (0)."""
        i, p = self._bin(confidence), self.probability(confidence)
        self._n[i] = min(self._n[i] + 1, MOST)
        self.log_odds[i] += (outcome - p) / (self._n[i] * max(p * (1 - p), FLATTEST))

    def _bin(self, confidence: float | None) -> int:
        return len(self._edges) + 1 if confidence is None else bisect(self._edges, confidence)


class TextAcceptance:
    """One completion's acceptance: the shared one, and a level for undrawn tokens and for all copies."""

    def __init__(self, shared: Acceptance, *, is_copied: bool) -> None:
        self._shared, self._is_copied, self._level = shared, is_copied, 0.0

    def probability(self, confidence: float | None = None) -> float:
        """Probability that a token is accepted; None stands for one that is not drawn yet."""
        has_level = confidence is None or self._is_copied
        return self._shared.probability(confidence, self._level if has_level else 0.0)

    def probabilities(self, confidences: Sequence[float]) -> Array:
        """Probability that each drawn token is accepted, given that those before it are: [n]."""
        return self._shared.probabilities(confidences, self._level if self._is_copied else 0.0)

    def learn(self, outcome: float, confidence: float) -> None:
        """Learn from one token."""
        self._level += GAIN * (outcome - self.probability(confidence if self._is_copied else None))
        self._shared.learn(outcome)
        self._shared.learn(outcome, confidence)


@dataclass(slots=True)
class Exploration:
    """When to try what does not seem to win: at distances that double while it loses."""

    distance: int = NEAREST
    n_since: int = 0  # rounds

    def is_due(self) -> bool:
        """Whether enough rounds have passed."""
        return self.n_since >= self.distance

    def begin(self) -> None:
        """Try now."""
        self.n_since = 0

    def reset(self) -> None:
        """What was tried wins."""
        self.distance = NEAREST

    def learn(self, *, paid: bool) -> None:
        """Note the result of a try."""
        self.distance = max(NEAREST, self.distance // 2) if paid else min(2 * self.distance, FARTHEST)
        self.n_since = 0


@dataclass(frozen=True, slots=True)
class LearnedPrior:
    """What a policy starts from: the result of a probe, or of earlier runs.

    Raises
    ------
    ValueError
        A number is not finite, or the tuples have another length than `Acceptance`.
    """

    curve: CostCurve | None = None
    log_odds: tuple[float, ...] = ()  # acceptance of the draft
    distance: int = NEAREST  # rounds between two explorations
    copy_log_odds: tuple[float, ...] = ()  # acceptance of copies from the text itself
    n_runs: int = SETTLED  # in which costs were measured, or as good as so many
    n_learnt: int = 0  # draft tokens that `log_odds` were learnt from; counting stops at a few hundred

    def __post_init__(self) -> None:
        kinds = ((self.log_odds, Acceptance()), (self.copy_log_odds, Acceptance(is_copied=True)))
        is_whole = all(len(log_odds) in (0, len(usual.log_odds)) for log_odds, usual in kinds)
        if not is_whole or self.distance < 1 or min(self.n_runs, self.n_learnt) < 0:
            raise ValueError("a prior of another kind")
        if not all(abs(number) < 50 for number in (*self.log_odds, *self.copy_log_odds)):
            raise ValueError("a prior must be finite")


def expected_accepted(acceptance: float, longest: int) -> Array:
    """Expected number of accepted tokens in drafts of 0, 1, ... `longest` tokens: [longest + 1]."""
    return np.concatenate(([0.0], (acceptance ** np.arange(1, longest + 1)).cumsum()))


def verified_tokens(round_: Round) -> list[tuple[float, bool]]:
    """Confidence of each verified token, and whether it was accepted; in trees, of the first candidates."""
    found: list[tuple[float, bool]] = []
    for node, drawn in zip((-1, *round_.path), (*round_.path, None), strict=True):
        if children := round_.draft.children(node):
            found.append((round_.confidences[children[0]], children[0] == drawn))
    return found
