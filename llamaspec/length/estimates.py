"""Estimates from noisy observations: numbers of which several explain a measurement, and acceptance.

A `Belief` holds unknown numbers, each with its uncertainty: an iterated extended Kalman filter. It moves each
by its share of the uncertainty, and remembers which ones a later measurement can tell apart (R. E. Kalman, "A
new approach to linear filtering and prediction problems", 1960). `Costs` are estimated with it.

`Acceptance` says how likely a draft token is to be accepted. Each source has an average of the log-odds for
every bin of confidence (for copies, of the length of the match), and one more for tokens that are not drawn
yet. All completions share them, and they are kept with the pair; each completion adds a level of its own.
Nothing is learnt from tokens after a rejected one.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from math import exp, log, sqrt
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from llamaspec.values import Round

Array: TypeAlias = npt.NDArray[np.float64]
Expected: TypeAlias = tuple[float, Mapping[int, float]]  # a measurement, and the effect of each unknown on it

SMALL, ITERATIONS = 0.1, 2  # after a larger surprise, the effects are computed again so many times

EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # between bins of confidence
CENTRES = (0.05, 0.15, 0.275, 0.425, 0.575, 0.725, 0.85, 0.94, 0.985)
MATCHES = (0.5, 1, 2, 3.5, 6, 12, 24, 48, 96, 192, 400)  # matched tokens: centres of the bins of copies
MATCH_EDGES = tuple(i / (i + 1) for i in (0.5, 1.5, 2.5, 4.5, 8.5, 16.5, 32.5, 64.5, 128.5, 256.5))
LEVEL, SLOPE, UNDRAWN = 0.2, 0.6, 0.4  # first guesses of log-odds; of tokens that are not drawn yet
PRIOR, MOST = 4, 200  # weight of a first guess, and longest memory of an average, in tokens
KEPT = 50  # maximum weight of what earlier runs have learnt, in tokens: the next text may be of another kind
GAIN = 0.25  # how fast a completion's level moves
LOSS = 0.5  # how fast it falls after a wrong copy, which costs a wide evaluation for nothing
UNLIKELY = 0.1  # a draft token that is accepted less often is worth nothing, whatever the costs say
FLATTEST = 0.1  # minimum slope of a probability over its log-odds


class Belief:
    """Means and covariances of unknowns, which are added one by one and keep their index."""

    def __init__(self) -> None:
        self.means = np.zeros(0)  # [n]
        self._covariance = np.zeros((0, 0))  # [n, n]

    def add(self, mean: float, deviation: float) -> int:
        """Add an unknown with its standard deviation; return its index."""
        n = len(self.means)
        covariance = np.zeros((n + 1, n + 1))
        covariance[:n, :n], covariance[n, n] = self._covariance, deviation**2
        self.means, self._covariance = np.append(self.means, mean), covariance
        return n

    def deviation(self, i: int) -> float:
        """Return the standard deviation of an unknown."""
        return sqrt(self._covariance[i, i])

    def doubt(self, i: int | slice, deviation: float) -> None:
        """Let one or more unknowns have changed by about this much."""
        np.einsum("ii->i", self._covariance)[i] += deviation**2

    def learn(
        self,
        expect: Callable[[Array], Expected],
        surprise: float,
        noise: float,
        only: Collection[int] | None = None,
    ) -> None:
        """Learn from a measurement.

        Parameters
        ----------
        expect : callable
            Returns what the means [n] let expect, and how much that changes with each unknown.
        surprise : float
            The measurement, minus what was expected.
        noise : float
            Standard deviation of the measurement itself.
        only : collection of int, optional
            The unknowns to learn about; the others count as uncertain, and stay as they are.
        """
        before = self.means
        expected, effects = expect(before)
        measured = expected + surprise
        gain, shared, variance = self._gain(effects, noise, only)
        self.means = before + gain * surprise
        for _ in range(ITERATIONS if abs(surprise) > SMALL else 0):  # the effects differ at the new means
            expected, effects = expect(self.means)
            gain, shared, variance = self._gain(effects, noise, only)
            moved = sum(factor * (self.means[i] - before[i]) for i, factor in effects.items())
            self.means = before + gain * (measured - expected + moved)
        change = np.outer(gain, shared)
        if only is None:
            self._covariance -= change
        else:  # the form of Joseph, for gains that are not optimal
            self._covariance += variance * np.outer(gain, gain) - change - change.T

    def spread(self, effects: Mapping[int, float]) -> float:
        """Return the standard deviation of a sum of unknowns with these factors."""
        at, factors = list(effects), np.array(list(effects.values()))
        return sqrt(factors @ self._covariance[at][:, at] @ factors)

    def _gain(
        self, effects: Mapping[int, float], noise: float, only: Collection[int] | None
    ) -> tuple[Array, Array, float]:
        """Return the gains, the covariances of each unknown with the measurement, and its variance."""
        at, factors = list(effects), np.array(list(effects.values()))
        shared = self._covariance[:, at] @ factors
        variance = float(factors @ shared[at]) + noise * noise
        gain = shared / variance
        if only is not None:
            others = np.ones(len(gain), dtype=bool)
            others[list(only)] = False
            gain[others] = 0.0
        return gain, shared, variance


# Acceptance


class Acceptance:
    """Acceptance of one source over all completions: log-odds of each bin, then of tokens not drawn yet.

    `log_odds` and the `counts` of tokens that they were learnt from are those of an earlier run. The first
    guess for a copy after a match of n tokens is odds of n : 1.
    """

    def __init__(
        self,
        log_odds: Sequence[float] = (),
        counts: Sequence[int] = (),
        *,
        level: float = LEVEL,
        slope: float = SLOPE,
        is_copied: bool = False,
    ) -> None:
        self._edges = MATCH_EDGES if is_copied else EDGES
        usual = map(log, MATCHES) if is_copied else (level + slope * log(p / (1 - p)) for p in CENTRES)
        self.log_odds = np.array(log_odds if len(log_odds) else (*usual, UNDRAWN))
        self._n = [PRIOR + min(n, KEPT) for n in counts or [0] * len(self.log_odds)]

    @property
    def counts(self) -> tuple[int, ...]:
        """Tokens from which the log-odds were learnt, at most `KEPT` for each."""
        return tuple(min(n - PRIOR, KEPT) for n in self._n)

    def probability(self, confidence: float | None = None, shift: float = 0.0) -> float:
        """Probability that a token is accepted; None = one that is not drawn yet."""
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


class SequenceAcceptance:
    """Acceptance in one completion: the shared one, and a level for undrawn tokens or for all copies."""

    def __init__(self, shared: Acceptance, *, is_copied: bool) -> None:
        self._shared, self._is_copied, self._level = shared, is_copied, 0.0

    def probability(self, confidence: float | None = None) -> float:
        """Probability that a token is accepted; None = one that is not drawn yet."""
        has_level = confidence is None or self._is_copied
        return self._shared.probability(confidence, self._level if has_level else 0.0)

    def probabilities(self, confidences: Sequence[float]) -> Array:
        """Probability that each drawn token is accepted, given that those before it are: [n]."""
        return self._shared.probabilities(confidences, self._level if self._is_copied else 0.0)

    def learn(self, outcome: float, confidence: float) -> None:
        """Learn from one token that was accepted (1) or rejected (0)."""
        surprise = outcome - self.probability(confidence if self._is_copied else None)
        self._level += (LOSS if self._is_copied and surprise < 0 else GAIN) * surprise
        self._shared.learn(outcome)
        self._shared.learn(outcome, confidence)


def expected_accepted(acceptance: float, longest: int) -> Array:
    """Return the expected number of accepted tokens in drafts of 0, 1, ... `longest` tokens."""
    return summed(np.power(acceptance, np.arange(1.0, longest + 1.0), dtype=np.float64))


def summed(chances: Array) -> Array:
    """Return the expected number of accepted tokens among the first 0, 1, ... of a draft: [1 + n].

    `chances` are those that a token and all before it are accepted. Those below `UNLIKELY` do not count:
    costs that were learnt beside other programs may say that a wider evaluation is free.
    """
    return np.concatenate(([0.0], np.where(chances < UNLIKELY, 0.0, chances).cumsum()))


def verified_tokens(round_: Round) -> list[tuple[float, bool]]:
    """Return confidence and acceptance of each accepted token, and of the first rejected one."""
    n = round_.n_accepted
    return [(confidence, i < n) for i, confidence in enumerate(round_.confidences[: n + 1])]
